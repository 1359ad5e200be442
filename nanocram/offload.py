"""Train a model that is larger than the GPU's memory (--offload=True).

    python train.py config/offload.py
    python train.py config/tiny.py --offload=True --optimizer=adamw    # the same path, on a CPU

float32 weights, gradients and AdamW's moments stay in host memory, as in MegaTrain (arXiv
2604.05091). While a block computes, the next block's weights are copied to the device.
"""

import copy
import functools
import sys

import torch

from model import Block, MaskedLM, mixed_precision, pick_residual_dtype
from nanocram import machine


def split(model):
    """Lists of a MaskedLM's parameters: those outside of its blocks, block 0's, block 1's, …"""
    outside = [p for name, p in model.named_parameters() if ".layers." not in name]
    return [outside, *(list(block.parameters()) for block in model.model.layers)]


def padded(p):
    """Numbers that p takes in a flat buffer, where each tensor starts at a multiple of 16 bytes."""
    return (p.numel() + 3) // 4 * 4


def views(flat, parameters):
    """Tensors of the parameters' shapes, one after the other in flat."""
    sizes = [padded(p) for p in parameters]
    parts = flat[: sum(sizes)].split(sizes)
    return [part[: p.numel()].view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def plan_memory(config, dev, amp_dtype, batch_shape):
    """Print how much memory a model of config needs; return whether all gradients fit on dev.

    batch_shape: rows, tokens and predicted tokens a row. Exits if the host's memory is too small.
    """
    rows, seq_len, n_predicted = batch_shape
    with torch.device("meta"):
        outside, *blocks = (4 * sum(map(padded, group)) for group in split(MaskedLM(config)))

    # host: weights, gradients, two moments, and the weights of a checkpoint while it is read
    buffers = [outside, *blocks]
    if dev.type == "cuda":  # torch allocates pinned memory in powers of two
        buffers = [1 << (size - 1).bit_length() for size in buffers]
    on_host = 2 * sum(buffers) + 3 * (outside + sum(blocks))
    missing = on_host - machine.free_bytes(torch.device("cpu"))
    if missing > 0:
        sys.exit(
            f"offload needs {on_host / 1e9:.3g} GB in host memory, {missing / 1e9:.3g} GB more "
            "than are free: type a smaller --n_layer or --n_embd"
        )

    # activations in bytes: all blocks' inputs, and either what one block keeps or the logits
    C = config.n_embd
    width = amp_dtype.itemsize
    residual_dtype = None if config.post_norm else pick_residual_dtype(dev, amp_dtype)
    inputs = (residual_dtype or torch.float32).itemsize * C * config.n_layer + 4 * C  # a token's
    block = width * (9 * C + 4 * config.n_inner)  # a token's
    logits = (8 + width) * config.vocab_size  # a predicted token's
    activations = rows * (seq_len * inputs + max(seq_len * block, n_predicted * logits))

    # device: outside of the blocks weights, gradients, and two parts of the table's gradient; two
    # blocks' weights and gradients, one block's new gradients and its weights in amp_dtype
    least = activations + 4 * outside + 6 * max(blocks)
    with_gradients = least + sum(blocks) - 2 * max(blocks)
    gradients_fit = with_gradients < 0.9 * machine.free_bytes(dev)
    on_device = with_gradients if gradients_fit else least
    print(
        f"offload: {on_host / 1e9:.3g} GB in host memory, about {on_device / 1e9:.3g} GB on the "
        f"device; gradients {'stay there' if gradients_fit else 'travel with the weights'}"
    )
    return gradients_fit


class Slot:
    """A flat buffer on the device, in which groups of parameters take turns."""

    def __init__(self, size, dev, streams):
        self.buffer = torch.empty(size, device=dev)
        self.source = None  # the host's buffer that was copied, or is being copied, into this one
        self.ready = streams.Event()  # the end of that copy


class Group:
    """Parameters that are copied together: on the host they are views into one flat buffer.

    Their gradients are views into another. memo gets {id of a parameter: its copy in the slot}."""

    def __init__(self, parameters, weight_slot, sum_slot, memo):
        size = sum(map(padded, parameters))
        pinned = weight_slot.buffer.is_cuda  # a GPU copies from pinned memory in the background
        self.weights = torch.empty(size, pin_memory=pinned)
        self.sums = torch.empty(size, pin_memory=pinned)
        self.weight_slot = weight_slot
        self.sum_slot = sum_slot
        self.gradients = list(zip(parameters, views(self.sums, parameters), strict=True))
        flats = self.weights, weight_slot.buffer, sum_slot.buffer
        tensors = [views(flat, parameters) for flat in flats]
        for p, on_host, weight, gradient in zip(parameters, *tensors, strict=True):
            p.data = on_host.copy_(p.data)
            memo[id(p)] = torch.nn.Parameter(weight)
            memo[id(p)].grad = gradient


class Streamed:
    """A fresh MaskedLM on the host, .model, whose passes run on a device, block after block.

    A step: p.grad = None; forward and backward passes; collect(), after which p.grad holds the
    gradients. They add up on the device: all of them stay there if there is room, otherwise those
    of a block travel with its weights. The host adds nothing: its memory is busy with copies."""

    def __init__(self, config, dev, amp_dtype, batch_shape, compile=False):
        gradients_fit = plan_memory(config, dev, amp_dtype, batch_shape)
        self.sums_stay = gradients_fit or config.n_layer <= 2  # two slots hold them all
        self.model = MaskedLM(config)
        self.amp_dtype = amp_dtype
        self.is_first = True  # whether this is the first micro-batch of its step
        # compile training alone, since evaluations have other shapes: a graph for a kind of block
        compiled = torch.compile(Block.forward, dynamic=False)
        self.train_forward = compiled if compile else Block.forward
        self.random = torch.cuda if dev.type == "cuda" else torch  # whose numbers dropout uses

        # a stream for each direction, since the bus carries both at once; on a CPU they do nothing
        self.streams = torch.get_device_module(dev)
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()

        # embeddings, head and decoder have slots of their own; the blocks take turns in two
        outside, *blocks = split(self.model)
        size = max(sum(map(padded, block)) for block in blocks)
        n_sums = len(blocks) if self.sums_stay else 2
        weights = [Slot(size, dev, self.streams) for _ in range(2)]
        sums = [Slot(size, dev, self.streams) for _ in range(n_sums)]
        memo = {id(buffer): buffer.to(dev) for buffer in self.model.buffers()}
        slots = [(weights[i % 2], sums[i % n_sums]) for i in range(len(blocks))]
        self.groups = [Group(blocks[i], *slots[i], memo) for i in range(len(blocks))]
        slots = [Slot(sum(map(padded, outside)), dev, self.streams) for _ in range(2)]
        self.resident = Group(outside, *slots, memo)

        # the same modules once more, with the parameters that are in the slots
        self.twin = copy.deepcopy(self.model, memo)
        self.blocks = list(self.twin.model.layers)
        for i, block in enumerate(self.blocks):
            block.forward = functools.partial(StreamedBlock.apply, self, i)
        self.model.forward = self.forward

    def forward(self, *args, **named):
        self.twin.train(self.model.training)
        self.is_first = next(self.model.parameters()).grad is None
        if self.is_first:  # the weights may have changed
            for group in self.groups:
                group.weight_slot.source = None
                group.sum_slot.source = None
            self.resident.weight_slot.buffer.copy_(self.resident.weights, non_blocking=True)
            self.resident.sum_slot.buffer.zero_()
        return self.twin(*args, **named)

    def fill(self, slot, flat, with_zeros=False):
        """Start to copy a buffer of the host, or zeros in its place, unless the slot has it."""
        if slot.source is flat:
            return
        slot.source = flat
        with self.streams.stream(self.h2d):
            if with_zeros:
                slot.buffer.zero_()
            else:
                slot.buffer[: len(flat)].copy_(flat, non_blocking=True)
        slot.ready.record(self.h2d)

    def get_weights(self, i, next_block):
        """Make the current stream wait for block i's weights; start to copy the next block's."""
        stream = self.streams.current_stream()
        # the next block's slot is free once all the work is done that the stream has by now
        self.h2d.wait_stream(stream)
        next_block = min(max(next_block, 0), len(self.groups) - 1)
        for group in self.groups[i], self.groups[next_block]:
            self.fill(group.weight_slot, group.weights)
        self.groups[i].weight_slot.ready.wait(stream)

    def get_sums(self, i):
        """Make the current stream wait for block i's gradients so far; start to copy the next."""
        self.h2d.wait_stream(self.d2h)  # the slots' gradients may still be on their way to the host
        for group in self.groups[i], self.groups[max(i - 1, 0)]:
            self.fill(group.sum_slot, group.sums, with_zeros=self.is_first)
        self.groups[i].sum_slot.ready.wait(self.streams.current_stream())

    def copy_to_host(self, group):
        """Start to copy a group's gradients to the host."""
        self.d2h.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.d2h):
            group.sums.copy_(group.sum_slot.buffer[: len(group.sums)], non_blocking=True)

    def collect(self):
        """Wait until p.grad holds the gradients, summed over the step's micro-batches."""
        for group in [self.resident] + (self.groups if self.sums_stay else []):
            self.copy_to_host(group)
        self.streams.synchronize()


def leaf(tensor):
    """The same numbers as a tensor whose grad a backward pass fills."""
    return None if tensor is None else tensor.detach().requires_grad_()


class StreamedBlock(torch.autograd.Function):
    """A block that keeps only its inputs, and is computed a second time in the backward pass."""

    @staticmethod
    def forward(ctx, streamed, i, x, rope, attn_bias, context=None, positions=None):
        block_forward = streamed.train_forward if streamed.model.training else Block.forward
        block = streamed.blocks[i]

        def compute(x, context):
            x, context = leaf(x), leaf(context)
            with torch.enable_grad():
                y = block_forward(block, x, rope, attn_bias, context, positions)
            return x, context, y

        ctx.save_for_backward(x, context)
        ctx.streamed, ctx.i, ctx.compute = streamed, i, compute
        ctx.random_state = streamed.random.get_rng_state()
        streamed.get_weights(i, i + 1)
        # with gradients, as in the backward pass: one compiled graph serves both, dropout included
        *_, y = compute(x, context)
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        streamed = ctx.streamed
        streamed.get_weights(ctx.i, ctx.i - 1)
        streamed.get_sums(ctx.i)
        streamed.random.set_rng_state(ctx.random_state)  # train.masked_batch() seeds it anyway
        with mixed_precision(grad.device, streamed.amp_dtype):
            x, context, y = ctx.compute(*ctx.saved_tensors)
        torch.autograd.backward(y, grad)
        if not streamed.sums_stay:
            streamed.copy_to_host(streamed.groups[ctx.i])
        # show forward() that the step has begun; the numbers come with collect()
        if ctx.i == 0:
            for group in (streamed.resident, *streamed.groups):
                for p, gradient in group.gradients:
                    p.grad = gradient
        context_grad = None if context is None else context.grad
        return None, None, x.grad, None, None, context_grad, None
