"""Training with everything in host memory: the model may be larger than the card (--offload=True).

    python train.py config/offload.py
    python train.py config/tiny.py --offload=True --optimizer=adamw    # the same path, on a CPU

float32 weights, gradients and AdamW's state live on the host. One block at a time comes to the
device, in the forward pass and once more in the backward pass, which computes the block anew. As
far as torch's source tells, fully_shard does not hide these copies behind the compute.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from model import Block, MaskedLM, mixed_precision


def move_to_host(model, dev):
    """Keep a MaskedLM in host memory, as DTensors of one process, and compute on dev.

    Returns {name: parameter}: ordinary tensors that share their memory, for the optimisers."""
    # Half a second that other runs need not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    # That logits are a view: nobody writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    if not dist.is_initialized():  # fully_shard asks for a process group, be it of one
        backend = "cpu:gloo,cuda:nccl" if dev.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(dev.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=dev.type == "cuda")
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, offload_policy=policy)
    # Embeddings and head are one more group, which is on the device all the time.
    fully_shard(model, mesh=mesh, offload_policy=policy)
    on_host = {name: p.to_local().detach() for name, p in model.named_parameters()}
    return {name: torch.nn.Parameter(tensor) for name, tensor in on_host.items()}


def memory_plan(config, amp_dtype, micro_batch, seq_len, n_predicted, pinned):
    """What memory a model of config takes, in a line, before anything of it is made."""
    with torch.device("meta"):
        model = MaskedLM(config)
    on_host = host_bytes(model, pinned) / 1e9
    on_device = device_bytes(model, amp_dtype, micro_batch, seq_len, n_predicted) / 1e9
    return f"offload: {on_host:.3g} GB in host memory, about {on_device:.3g} GB on the device"


def host_bytes(model, pinned):
    """Bytes in host memory: weights, gradients, two moments, and q, k, v side by side for a save.

    pinned: weights and gradients are in pinned memory, which torch hands out in powers of two."""
    sizes = [p.nbytes for p in model.parameters()]
    held = sum(1 << (size - 1).bit_length() for size in sizes) if pinned else sum(sizes)
    saving = 12 * model.config.n_layer * model.config.n_embd**2
    return 2 * held + 2 * sum(sizes) + saving


def device_bytes(model, amp_dtype, micro_batch, seq_len, n_predicted):
    """Bytes on the device, about: embeddings, head, the largest block, and the activations."""
    config = model.config
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    there = sum(p.nbytes for p in model.parameters()) - sum(blocks) + max(blocks)
    # The weights, their gradients, two copies of these on their way, and what autocast multiplies.
    weights = 4 * there + (there // 2 if amp_dtype != torch.float32 else 0)

    # All that one block keeps, with attention in float32. The difference of two rows and one: the
    # weights in low precision are in both.
    block = Block(config, first=False)
    kept = []
    for rows in (1, 2):
        x = torch.randn(rows, seq_len, config.n_embd, requires_grad=True)
        with mixed_precision(x.device, amp_dtype):
            forward = functools.partial(block, x, None, None)
            kept.append(saved_for_backward(forward, block.parameters()))
    inputs = 4 * config.n_layer * seq_len * config.n_embd  # of every block, for a row
    logits = 10 * n_predicted * config.vocab_size  # in low precision, in float32, their softmax
    return weights + micro_batch * (inputs + kept[1] - kept[0] + logits)


def saved_for_backward(forward, parameters):
    """Bytes that forward() keeps for the backward pass: each storage once, no parameters."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}  # bytes of a storage, by its address

    def pack(tensor):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        kept[address] = 0 if address in own else storage.nbytes()
        return tensor.detach()  # the tensor itself would keep the graph that keeps it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    # Not before: until here no storage can have been freed, and its address used again.
    del result
    return sum(kept.values())
