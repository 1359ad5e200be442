"""Training with everything in host memory, so that the model may be larger than the card (train.py --offload=True).

    python train.py config/offload.py
    python bench.py config/offload.py --n_layer=2                 # the plan, and what a step takes
    python train.py config/tiny.py --offload=True --optimizer=adamw       # the same path, and the same losses, on a CPU

float32 weights, gradients and AdamW's state live on the host. One block at a time comes to the device, in the forward
pass and once more in the backward pass, which computes the block anew from its input (activation checkpointing); its
gradients go back, and AdamW steps on the host. ZeRO-Offload (Ren et al. 2021) has gradients and optimiser there,
MegaTrain (arXiv 2604.05091) the weights too, and hides the copies behind the compute. Here torch's fully_shard and its
CPUOffloadPolicy do it all, which as far as their source tells hide nothing.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from model import Block, MaskedLM
from nanocram import machine


def offload(model, dev):
    """Keep a MaskedLM in host memory and compute on dev; its parameters become DTensors of one process.

    Returns {name: parameter}, ordinary tensors that share their memory: optimisers take these."""
    from torch.distributed.device_mesh import (
        init_device_mesh,  # half a second that other runs need not wait for
    )
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # that logits are a view: nobody writes into them
    if not dist.is_initialized():  # fully_shard asks for a process group, be it of one
        backend = "cpu:gloo,cuda:nccl" if dev.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(dev.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=dev.type == "cuda")
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(
        model, mesh=mesh, offload_policy=policy
    )  # embeddings and head: one more group, there all the time
    return {name: torch.nn.Parameter(p.to_local().detach()) for name, p in model.named_parameters()}


def step_bytes(model, amp_dtype, n_micro, micro_batch, seq_len, predicted, pinned):
    """Bytes of a step of so many micro-batches of a MaskedLM: in host memory, on the device (about), to it, from it.

    pinned: whether the host's copies are in pinned memory, which torch hands out in powers of two."""
    config, low = model.config, amp_dtype != torch.float32
    every = sum(p.nbytes for p in model.parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    rest = every - sum(blocks)  # embeddings and head
    held = sum(1 << (p.nbytes - 1).bit_length() for p in model.parameters()) if pinned else every
    saving = (
        12 * config.n_layer * config.n_embd**2
    )  # q, k and v side by side, as the model folder has them
    states = 4 * (
        rest + max(blocks)
    )  # weights, their gradients, and two copies of these on their way
    states += (rest + max(blocks)) // 2 if low else 0  # what autocast multiplies
    row = (
        4 * config.n_layer * seq_len * config.n_embd
    )  # the input of every block, and all of one of them
    row += kept_of_a_row(Block(config, first=False), seq_len, amp_dtype)
    row += (
        10 * predicted * config.vocab_size
    )  # logits in low precision and in float32, and their softmax
    return (
        2 * held + 2 * every + saving,
        states + micro_batch * row,
        n_micro * (every + sum(blocks)),
        n_micro * every,
    )


def kept_of_a_row(block, seq_len, amp_dtype):
    """Bytes that a block keeps of a row for the backward pass; as a CPU does, whose attention is in float32."""

    def kept(rows):
        x = torch.randn(rows, seq_len, block.attn.Wo.out_features, requires_grad=True)
        with torch.autocast("cpu", amp_dtype, enabled=amp_dtype != torch.float32):
            return machine.kept_bytes(lambda: block(x, None, None), block.parameters())

    return kept(2) - kept(1)  # the weights in low precision are in both


def bus_rates(dev):
    """Bytes/s of weights to the device and of gradients back, where they are added to those of other micro-batches."""
    there = torch.zeros(2**26, device=dev)
    here, total = torch.zeros(2**26, pin_memory=dev.type == "cuda"), torch.zeros(2**26)
    to = min(machine.timed(dev, there.copy_, here)[0] for _ in range(3))
    back = min(
        machine.timed(dev, lambda: total.add_(there.to("cpu", copy=True)))[0] for _ in range(3)
    )
    return there.nbytes / to, there.nbytes / back


def adamw_rate():
    """Parameters/s that fused AdamW updates on the host."""
    p = torch.nn.Parameter(torch.zeros(2**25))  # half a GB in all: more than caches hold
    p.grad = torch.ones_like(p)
    step = torch.optim.AdamW([p], fused=True).step
    return p.numel() / min(machine.timed(p.device, step)[0] for _ in range(3))


def plan(config, dev, amp_dtype, rows, micro_batch, seq_len, predicted):
    """What a step of so many rows takes, in two lines, before anything is made; the rates are measured here."""
    with torch.device("meta"):
        model = MaskedLM(config)
    n_micro, pinned = rows // micro_batch, dev.type == "cuda"
    on_host, on_device, out, back = step_bytes(
        model, amp_dtype, n_micro, micro_batch, seq_len, predicted, pinned
    )
    to_rate, back_rate = bus_rates(dev)
    copies = out / to_rate + back / back_rate
    flops = (
        rows * seq_len * model.flops_per_token(seq_len, predicted) * 4 / 3
    )  # forward, once more, and backward
    compute = flops / machine.matmul_rate(dev, amp_dtype)
    update = sum(p.numel() for p in model.parameters()) / adamw_rate()
    return (
        f"offload: {on_host / 1e9:.3g} GB in host memory, about {on_device / 1e9:.3g} GB on the device\n"
        f"a step of {n_micro} x {micro_batch} rows: {(out + back) / 1e9:.3g} GB over the bus in {copies:.2g} s, "
        f"matrix products {compute:.2g} s at best, AdamW {update:.2g} s; {copies + compute + update:.2g} s in all, "
        "for nothing overlaps"
    )
