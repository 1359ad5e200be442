"""Several GPUs as one: what the processes that torchrun starts have to agree on.

    torchrun --nproc_per_node=8 train.py --budget_hours=24
    torchrun --nproc_per_node=2 train.py config/tiny.py --device=cpu      # the same with two processes on a CPU

Of the micro-batches of a step, rank r of N computes those numbered r, r + N, …, with the masks that one process alone
would draw, and the gradients are summed once a step. So N ranks learn from exactly what one would. This is data
parallelism without DistributedDataParallel: at the start of a batch ramp there may be fewer micro-batches than ranks,
and those with nothing to compute would leave the others waiting in the backward pass.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

RANK, LOCAL_RANK, WORLD = (
    int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)
# what gloo and NCCL say of a rank that is gone
LOST = ("connection", "timed out", "timeout", "broken pipe", "remote process", "aborted")


def join(device):
    """Become one of the processes that torchrun started, with a GPU of its own; nothing happens without torchrun."""
    if WORLD == 1:
        return
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        if gpus <= LOCAL_RANK:
            sys.exit(
                f"there is no GPU for process {LOCAL_RANK} of this machine: type --nproc_per_node={gpus}"
            )
        torch.cuda.set_device(LOCAL_RANK)
    # Its functions' defaults are the group there is at its import. torch imports it sooner or later, and a group they
    # keep is not destroyed by leave(): the threads of gloo run on while Python ends, and now and then abort it.
    from torch.distributed.nn import functional  # noqa: F401

    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def leave():
    """End what join() or offload_host.offload() began."""
    agree(
        0.0, False
    )  # all wait for rank 0, which is still saving: gloo aborts a process that leaves before the others
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def others():
    """Exit with one line when another rank has died; torchrun then ends those that could not notice."""
    try:
        yield
    except RuntimeError as e:
        if not any(word in str(e).lower() for word in LOST):
            raise
        sys.exit(
            f"rank {RANK} has lost the others, start again with --init=resume: {str(e).splitlines()[0]:.120}"
        )


def agree(progress, stop):
    """(rank 0's progress, whether any rank wants to stop), the same on all ranks: there is one clock."""
    if WORLD == 1:
        return progress, stop
    both = torch.tensor([progress if RANK == 0 else 0.0, float(stop)], dtype=torch.float64)
    with others():
        dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].item(), bool(both[1])


def add_up(tensors):
    """Sum each of tensors over the ranks, in place."""
    if WORLD > 1:
        with others():
            for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                work.wait()
