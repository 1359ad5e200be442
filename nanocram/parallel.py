"""Several processes with one clock: what the ranks that torchrun starts share.

    torchrun --nproc_per_node=2 train.py config/tiny.py --device=cpu

Rank r of N computes a step's micro-batches r, r + N and so on, and the gradients are summed. It is
not DistributedDataParallel: a batch ramp may begin with fewer micro-batches than ranks.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from nanocram.settings import read_ranks

RANK, LOCAL_RANK, WORLD_SIZE = read_ranks()  # rank 0 evaluates, logs and saves


def join(device):
    """Join the processes that torchrun started, if it did; each takes a GPU of its own."""
    if WORLD_SIZE == 1:
        return
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus and gpus <= LOCAL_RANK:
        sys.exit(f"there is no GPU for process {LOCAL_RANK}: type --nproc_per_node={gpus}")
    if gpus:
        torch.cuda.set_device(LOCAL_RANK)
    print(f"rank {RANK} waits for the other {WORLD_SIZE - 1}", file=sys.stderr)
    # imported later it would keep the group, whose threads then outlive leave() and may abort
    from torch.distributed.nn import functional  # noqa: F401

    # The others wait in the next sum while rank 0 evaluates and saves.
    how = {"rank": RANK, "world_size": WORLD_SIZE, "timeout": timedelta(hours=1)}
    # behind a restart torchrun's store has old addresses; machines share no count of restarts
    if os.environ.get("LOCAL_WORLD_SIZE") == str(WORLD_SIZE):
        store, *_ = next(dist.rendezvous("env://", timeout=how["timeout"]))
        how["store"] = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", **how)


def leave():
    """Wait for all ranks, rank 0 may still be saving, and end what join() began."""
    if WORLD_SIZE > 1:
        agree(0.0)
        dist.destroy_process_group()


def all_reduce(tensors):
    """Sum each of tensors, all of one dtype, over the ranks, in place."""
    if WORLD_SIZE == 1:
        return
    # One flat buffer: a card's links are only fast for large tensors, and there are 131 gradients.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    try:
        dist.all_reduce(flat)
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:300]
        sys.exit(f"rank {RANK} lost others, see what they said ({reason}): --init=resume goes on")
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_over_ranks(means, weights):
    """Sum the tensors of a dict and the gradients of weights over the ranks, in place."""
    for weight in weights:
        if weight.grad is None:  # on a rank without a micro-batch
            weight.grad = torch.zeros_like(weight)
    all_reduce([*means.values(), *(weight.grad for weight in weights)])


def agree(progress, *flags):
    """(rank 0's progress, for each flag whether any rank has set it): the same on all ranks."""
    total = torch.tensor([progress if RANK == 0 else 0.0, *flags], dtype=torch.float64)
    all_reduce([total])
    return total[0].item(), *(total[1:] > 0).tolist()
