"""Several GPUs as one: what the processes that torchrun starts have to agree on.

    torchrun --nproc_per_node=8 train.py --micro_batch=128
    torchrun --nproc_per_node=2 train.py config/tiny.py --device=cpu   # two processes on a CPU

Of the micro-batches of a step, rank r of N computes those numbered r, r + N and so on, with the
masks that one process alone would draw, and the gradients are summed once a step: N learn what one
would. Nothing else keeps their weights together, so before each save they are compared. It is not
DistributedDataParallel: at the start of a batch ramp there may be fewer micro-batches than ranks,
and those with nothing to compute would leave the others waiting in the backward pass.
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


def all_reduce(tensors, op="SUM"):
    """Sum (or MAX) each of tensors, all of one dtype, over the ranks, in place.

    Exits with one line when another rank has died; torchrun ends those that could not notice."""
    if WORLD == 1:
        return
    # As one buffer: the gradients are 131 tensors, and a card's links are fast for large ones only.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    try:
        dist.all_reduce(flat, op=getattr(dist.ReduceOp, op))
    except RuntimeError as e:
        if is_out_of_memory(e):
            raise
        # gloo and NCCL have many words for a rank that is gone; NCCL's cause comes last.
        reason = " ".join(str(e).split())[:600]
        then = "what they said comes first; where there is a checkpoint, --init=resume goes on"
        sys.exit(f"rank {RANK} has lost the others: {then}: {reason}")
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def share(work, matrices):
    """work(matrices) (N, rows, columns), of which each rank computes a part and gets the rest.

    The others' places are zeros, to which a sum over ranks adds what these have computed: exact."""
    if WORLD == 1:
        return work(matrices)
    mine = slice(RANK, None, WORLD)
    done = torch.zeros_like(matrices)
    done[mine] = work(matrices[mine])
    all_reduce([done])
    return done


def agree(progress, *flags):
    """(rank 0's progress, of each flag whether any rank has set it), the same on all ranks."""
    if WORLD == 1:
        return progress, *flags
    mine = [progress if RANK == 0 else 0.0, *map(float, flags)]
    total = torch.tensor(mine, dtype=torch.float64)
    all_reduce([total])
    return total[0].item(), *(total[1:] > 0).tolist()


def any_rank(flag):
    """Whether flag is set on any rank."""
    return agree(0.0, flag)[1]


class Apart(SystemExit):
    """The ranks' weights are not equal any more: which are right, none of them knows."""


def check_equal(weights):
    """Raise Apart, with one line, if the bits of {name: float32 tensor} differ between ranks."""
    if WORLD == 1:
        return
    sums = torch.stack([weight.view(torch.int32).sum() for weight in weights.values()]).cpu()
    most_and_least = torch.cat((sums, -sums))  # the largest of -x is minus the smallest of x
    all_reduce([most_and_least], "MAX")
    most, minus_least = most_and_least.chunk(2)
    names = list(weights)
    differing = [names[i] for i in (most != -minus_least).nonzero().flatten().tolist()]
    if differing:
        which = f"{len(differing)} of {len(names)} weights, {differing[0]} first"
        why = "cards of several kinds, or one that computes wrongly"
        then = "the last checkpoint stands, --init=resume goes on from it"
        raise Apart(f"ranks differ in {which} ({why}); nothing is saved: {then}")
