"""Several GPUs as one: what the processes that torchrun starts have to agree on.

    torchrun --nproc_per_node=8 train.py --budget_hours=24
    torchrun --nproc_per_node=2 train.py config/tiny.py --device=cpu   # two processes on a CPU

Of the micro-batches of a step, rank r of N computes those numbered r, r + N and so on, with the
masks that one process alone would draw, and the gradients are summed once a step: N learn what one
would. It is not DistributedDataParallel: at the start of a batch ramp there may be fewer
micro-batches than ranks, and those with nothing to compute would leave the others waiting in the
backward pass.
"""

import os
import sys

import torch
import torch.distributed as dist

from nanocram.safety import is_out_of_memory

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number on this machine
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # how many there are


def join(device):
    """Become one of the processes that torchrun started, if it did, with a GPU of its own."""
    if WORLD == 1:
        return
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus and gpus <= LOCAL_RANK:
        which = f"process {LOCAL_RANK} of this machine"
        sys.exit(f"there is no GPU for {which}: type --nproc_per_node={gpus}")
    if gpus:
        torch.cuda.set_device(LOCAL_RANK)
    # Default arguments in this module hold the process group that exists when it is imported. If
    # torch imported it later, they would keep our group alive after leave(): gloo's threads would
    # run on while Python exits, and now and then abort it.
    from torch.distributed.nn import functional  # noqa: F401

    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def meet(dev):
    """Take a first sum of tensors on dev: NCCL has its memory from now on, and is seen to work."""
    if WORLD == 1:
        return
    first = torch.zeros((), device=dev)
    try:
        dist.all_reduce(first)
        first.item()  # waits: NCCL tells of some failures only then
    except RuntimeError as e:
        if is_out_of_memory(e):
            raise
        reason = " ".join(str(e).split())[:600]
        more = "NCCL_DEBUG=INFO in front of torchrun tells more"
        sys.exit(f"rank {RANK} cannot add up with the others on {dev}: {more}: {reason}")


def leave():
    """End what join() began."""
    # All wait for rank 0, which is still saving: gloo aborts a process that leaves before others.
    any_rank(False)
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(tensors):
    """Sum each of tensors over the ranks, in place.

    Exits with one line when another rank has died; torchrun ends those that could not notice."""
    if WORLD == 1:
        return
    try:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
    except RuntimeError as e:
        if is_out_of_memory(e):
            raise
        # gloo and NCCL have many words for a rank that is gone; NCCL's cause comes last.
        reason = " ".join(str(e).split())[:600]
        then = "what they said comes first; where there is a checkpoint, --init=resume goes on"
        sys.exit(f"rank {RANK} has lost the others: {then}: {reason}")


def agree(progress, stop):
    """(rank 0's progress, whether any rank wants to stop), the same on all ranks."""
    if WORLD == 1:
        return progress, stop
    mine = [progress if RANK == 0 else 0.0, float(stop)]
    total = torch.tensor(mine, dtype=torch.float64)
    all_reduce([total])
    return total[0].item(), bool(total[1])


def any_rank(flag):
    """Whether flag is set on any rank."""
    return agree(0.0, flag)[1]
