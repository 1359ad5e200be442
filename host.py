"""Training with everything in host memory, so that the model may be larger than the card (train.py --offload=True).

    python train.py config/offload.py
    python train.py config/tiny.py --offload=True --optimizer=adamw       # the same path, and the same losses, on a CPU

fp32 weights, gradients and optimiser state live on the host. One block at a time comes to the device, in the forward
pass and once more in the backward pass, which computes the block anew from its input (activation checkpointing); its
gradients go back, and the optimiser steps on the host. That is the ground of ZeRO-Offload (arXiv 2101.06840) and
MegaTrain (arXiv 2604.05091), here by torch's fully_shard and its CPUOffloadPolicy. They overlap copies with compute and
go on to NVMe; neither is done here.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import machine
from model import Block


def offload(model, dev):
    """Keep a MaskedLM in host memory and compute on dev; its parameters become DTensors of one process.

    Returns {name: parameter}, ordinary tensors that share their memory: optimisers take these."""
    from torch.distributed.device_mesh import init_device_mesh  # half a second that other runs need not wait for
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # that logits are a view: nobody writes into them
    if not dist.is_initialized():  # fully_shard asks for a process group, be it of one
        backend = "cpu:gloo,cuda:nccl" if dev.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(dev.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=dev.type == "cuda")
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)  # embeddings and head: one more group, there all the time
    return {name: torch.nn.Parameter(p.to_local().detach()) for name, p in model.named_parameters()}


def bus_rate(dev):
    """Bytes/s of a copy from host memory to the device."""
    there = torch.empty(2**26, device=dev)
    here = torch.empty(2**26, pin_memory=dev.type == "cuda").fill_(1.0)
    return there.nbytes / min(machine.timed(dev, there.copy_, here)[0] for _ in range(4))


def adamw_rate():
    """Parameters/s that fused AdamW updates on the host."""
    p = torch.nn.Parameter(torch.zeros(2**23))
    p.grad = torch.ones_like(p)
    step = torch.optim.AdamW([p], fused=True).step
    return p.numel() / min(machine.timed(p.device, step)[0] for _ in range(3))


def plan(run, rows, micro_batch, seq_len, rate):
    """What a step of so many rows takes, in two lines, before it is tried; rate: FLOP/s of the device.

    The rates of bus and AdamW are measured; the bytes on the device leave out what the allocator wastes."""
    dev, config, blocks = run.device, run.model.config, run.model.model.layers
    every = sum(w.nbytes for w in run.weights.values())
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    rest = every - sum(sizes)  # embeddings and head
    moments = sum(p.nbytes * (1 if "momentum" in g else 2) for o in run.optimizers for g in o.param_groups
                  for p in g["params"])  # fmt: skip
    block, x = Block(config, first=False), torch.randn(1, seq_len, config.n_embd, requires_grad=True)
    with torch.autocast("cpu", run.amp_dtype, enabled=run.amp_dtype != torch.float32):
        inside = machine.kept_bytes(lambda: block(x, None, None), block.parameters())
    row = config.n_layer * x.nbytes + inside + 10 * run.k_max * config.vocab_size  # logits: bfloat16, float32, softmax
    on_device = 4 * (rest + max(sizes)) + micro_batch * row  # a weight, its gradient, and two copies on their way
    n_micro = rows // micro_batch
    bus = n_micro * (2 * sum(sizes) + rest + every)  # blocks twice, the rest once; all gradients back
    compute = rows * seq_len * run.flops_per_token * 4 / 3 / rate  # forward, once more, backward
    copy, update = bus / bus_rate(dev), every / 4 / adamw_rate()
    return (f"offload: {(2 * every + moments) / 1e9:.3g} GB in host memory, about {on_device / 1e9:.3g} GB on the "
            f"device\na step of {n_micro} x {micro_batch} rows: {bus / 1e9:.3g} GB over the bus in {copy:.2g} s, "
            f"{compute:.2g} s of matrix products at best, AdamW {update:.2g} s on the host; "
            f"nothing overlaps: {copy + compute + update:.2g} s")  # fmt: skip
