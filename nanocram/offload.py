"""A model larger than the card: it lives in host memory and streams through (--offload=True).

    python train.py config/offload.py
    python train.py config/tiny.py --offload=True --optimizer=adamw    # the same path, on a CPU

float32 weights, gradients and AdamW's moments are on the host, as in MegaTrain (arXiv 2604.05091);
while a block computes, the next comes. docs/how_it_works.md has a picture.
"""

import copy
import functools
import sys

import torch

from model import Block, MaskedLM, mixed_precision, pick_residual_dtype
from nanocram import machine


def split(model):
    """The parameters of a MaskedLM: [those outside of its blocks, block 0's, block 1's, …]."""
    outside = [p for name, p in model.named_parameters() if ".layers." not in name]
    return [outside, *(list(block.parameters()) for block in model.model.layers)]


def padded(p):
    """Numbers that p takes in a flat buffer, where each tensor begins at a multiple of 16 bytes."""
    return (p.numel() + 3) // 4 * 4


def views(flat, parameters):
    """Tensors of the parameters' shapes, one behind the other in flat."""
    sizes = [padded(p) for p in parameters]
    parts = flat[: sum(sizes)].split(sizes)
    return [part[: p.numel()].view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def plan_memory(config, dev, amp_dtype, rows, seq_len, n_predicted):
    """Say what memory a model of config takes; whether sums_stay, as Streamed has it.

    rows: of a micro-batch. Exits with one line where the host's memory does not suffice."""
    with torch.device("meta"):
        outside, *blocks = (4 * sum(map(padded, group)) for group in split(MaskedLM(config)))
    on_host = bytes_on_host((outside, *blocks), pinned=dev.type == "cuda")
    words = f"offload: {on_host / 1e9:.3g} GB in host memory"
    free_host = machine.free_bytes(torch.device("cpu"))
    if on_host > free_host:
        missing = f"{(on_host - free_host) / 1e9:.3g} GB more than are free"
        sys.exit(f"{words}, {missing}: type a smaller --n_layer or --n_embd")

    # Bytes of a token: its input to every block, in the dtype of the residual stream; beside these,
    # in turns, all that one block keeps, and the logits of predicted tokens.
    C = config.n_embd
    width = amp_dtype.itemsize
    residual_dtype = torch.float32
    if not config.post_norm:
        residual_dtype = pick_residual_dtype(dev, amp_dtype) or torch.float32
    inputs = residual_dtype.itemsize * C * config.n_layer + 4 * C
    block = width * (9 * C + 4 * config.n_inner)
    logits = (8 + width) * config.vocab_size
    batch = rows * (seq_len * inputs + max(seq_len * block, n_predicted * logits))
    # Outside of the blocks: weights, sums, the table's two gradients before they are one. Of the
    # blocks: two slots, two sums, gradients on their way to these, weights as autocast has them.
    least = 4 * outside + 6 * max(blocks) + batch
    most = least + sum(blocks) - 2 * max(blocks)
    sums_stay = most < 0.9 * machine.free_bytes(dev)
    on_device = most if sums_stay else least
    where = "add up on the device" if sums_stay else "come and go with the weights"
    about = f"about {on_device / 1e9:.3g} GB on the device"
    print(f"{words}, {about}; gradients {where}", flush=True)
    return sums_stay


def bytes_on_host(sizes, pinned):
    """Bytes of host memory for groups of so many bytes of weights.

    Weights and gradients, two moments, and the weights of a checkpoint while it is read."""
    # torch hands out pinned memory in powers of two.
    whole = [1 << (size - 1).bit_length() if pinned else size for size in sizes]
    return 2 * sum(whole) + 3 * sum(sizes)


class Slot:
    """A flat buffer on the device, in which groups of parameters take turns."""

    def __init__(self, size, dev, streams):
        self.buffer = torch.empty(size, device=dev)
        self.holds = None  # the host's buffer whose turn it is: its copy, or zeros, or on their way
        self.came = streams.Event()  # that is there


class Group:
    """Parameters that travel together: on the host they are views into one flat buffer.

    Their gradients are views into another. memo gets {id of a parameter: the one in the slot}."""

    def __init__(self, parameters, weight_slot, sum_slot, memo):
        size = sum(map(padded, parameters))
        pinned = weight_slot.buffer.is_cuda  # the card copies from pinned memory by itself
        self.weights = torch.empty(size, pin_memory=pinned)
        self.sums = torch.empty(size, pin_memory=pinned)
        self.weight_slot = weight_slot
        self.sum_slot = sum_slot
        self.gradients = list(zip(parameters, views(self.sums, parameters), strict=True))
        buffers = self.weights, weight_slot.buffer, sum_slot.buffer
        tensors = [views(flat, parameters) for flat in buffers]
        for p, on_host, weight, gradient in zip(parameters, *tensors, strict=True):
            p.data = on_host.copy_(p.data)
            memo[id(p)] = torch.nn.Parameter(weight)
            memo[id(p)].grad = gradient


class Streamed:
    """A MaskedLM of the host whose passes are computed on a device, block after block.

    A step: p.grad = None; passes; collect(), and p.grad holds the gradients. sums_stay: those of
    all blocks add up on the device. If they do not fit, a block's sums travel with its weights; the
    host never adds, which leaves its memory to copies."""

    def __init__(self, model, dev, amp_dtype, sums_stay):
        self.model = model
        self.amp_dtype = amp_dtype
        self.sums_stay = sums_stay or len(model.model.layers) <= 2  # two slots hold them all
        self.is_first = True  # the micro-batch under way is the first of its step
        self.block_forward = Block.forward  # or that compiled, as compile() does
        self.random = torch.cuda if dev.type == "cuda" else torch  # has the state of dropout
        # One stream for each direction: the bus carries both at once. On a CPU they do nothing.
        self.streams = torch.get_device_module(dev)
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()

        # Embeddings, head and decoder have slots of their own, the blocks take turns in two.
        outside, *blocks = split(model)
        size = max(sum(map(padded, block)) for block in blocks)
        n_sums = len(blocks) if self.sums_stay else 2
        weights = [Slot(size, dev, self.streams) for _ in range(2)]
        sums = [Slot(size, dev, self.streams) for _ in range(n_sums)]
        memo = {id(buffer): buffer.to(dev) for buffer in model.buffers()}
        slots = [(weights[i % 2], sums[i % n_sums]) for i in range(len(blocks))]
        self.groups = [Group(blocks[i], *slots[i], memo) for i in range(len(blocks))]
        slots = [Slot(sum(map(padded, outside)), dev, self.streams) for _ in range(2)]
        self.resident = Group(outside, *slots, memo)

        # The same modules once more, with the parameters that lie in the slots.
        self.twin = copy.deepcopy(model, memo)
        self.blocks = list(self.twin.model.layers)
        for i, block in enumerate(self.blocks):
            block.forward = functools.partial(StreamedBlock.apply, self, i)
        model.forward = self.forward

    def forward(self, *args, **named):
        self.twin.train(self.model.training)
        self.is_first = next(self.model.parameters()).grad is None
        if self.is_first:  # the weights may have changed
            for group in self.groups:
                group.weight_slot.holds = None
                group.sum_slot.holds = None
            self.resident.weight_slot.buffer.copy_(self.resident.weights, non_blocking=True)
            self.resident.sum_slot.buffer.zero_()
        return self.twin(*args, **named)

    def compile(self, loss_fn):
        """loss_fn with compiled blocks, but in evaluations: a graph for each kind of block."""
        block_forward = torch.compile(Block.forward, dynamic=False)

        def compiled_loss(*batch):
            if self.model.training:
                self.block_forward = block_forward
            try:
                return loss_fn(*batch)
            finally:
                self.block_forward = Block.forward

        return compiled_loss

    def bring(self, slot, flat, are_zeros=False):
        """Queue the copy of a buffer of the host into a slot, unless it lies there."""
        if slot.holds is flat:
            return
        slot.holds = flat
        with self.streams.stream(self.h2d):
            if are_zeros:
                slot.buffer.zero_()
            else:
                slot.buffer[: len(flat)].copy_(flat, non_blocking=True)
        slot.came.record(self.h2d)

    def get_weights(self, i, following):
        """What is queued from here on has block i's weights; those of a following block come."""
        stream = self.streams.current_stream()
        # The following block's slot is free when all that is queued by now is done.
        self.h2d.wait_stream(stream)
        next_one = min(max(following, 0), len(self.groups) - 1)
        for group in self.groups[i], self.groups[next_one]:
            self.bring(group.weight_slot, group.weights)
        self.groups[i].weight_slot.came.wait(stream)

    def get_sums(self, i):
        """What is queued from here on has the sums of block i's gradients; block i - 1's come."""
        self.h2d.wait_stream(self.d2h)  # which may still take home what lay in their slots
        for group in self.groups[i], self.groups[max(i - 1, 0)]:
            self.bring(group.sum_slot, group.sums, are_zeros=self.is_first)
        self.groups[i].sum_slot.came.wait(self.streams.current_stream())

    def take_home(self, group):
        """Queue the copy of a group's gradients to the host."""
        self.d2h.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.d2h):
            group.sums.copy_(group.sum_slot.buffer[: len(group.sums)], non_blocking=True)

    def collect(self):
        """Wait until p.grad holds the gradients, summed over the step's micro-batches."""
        staying = self.groups if self.sums_stay else []
        for group in (self.resident, *staying):
            self.take_home(group)
        self.streams.synchronize()


def leaf(tensor):
    """A tensor of the same numbers, whose grad a backward pass fills."""
    return None if tensor is None else tensor.detach().requires_grad_()


def compute(block_forward, block, rope, attn_bias, positions, x, context):
    """(x, context, y): fresh leaves, and a block's output y, whose backward fills their grad."""
    x, context = leaf(x), leaf(context)
    with torch.enable_grad():
        y = block_forward(block, x, rope, attn_bias, context, positions)
    return x, context, y


class StreamedBlock(torch.autograd.Function):
    """A block in both passes: it keeps its inputs alone, and is computed anew to go backward."""

    @staticmethod
    def forward(ctx, streamed, i, x, rope, attn_bias, context=None, positions=None):
        ctx.save_for_backward(x, context)
        ctx.streamed = streamed
        ctx.i = i
        ctx.random_state = streamed.random.get_rng_state()
        which = streamed.block_forward, streamed.blocks[i]
        ctx.compute = functools.partial(compute, *which, rope, attn_bias, positions)
        streamed.get_weights(i, i + 1)
        # With gradients, as in the backward pass: one compiled graph is both, with equal dropout.
        *_, y = ctx.compute(x, context)
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        streamed = ctx.streamed
        streamed.get_weights(ctx.i, ctx.i - 1)
        streamed.get_sums(ctx.i)
        streamed.random.set_rng_state(ctx.random_state)  # train.batch_at() sets another one anyway
        with mixed_precision(grad.device, streamed.amp_dtype):
            x, context, y = ctx.compute(*ctx.saved_tensors)
        torch.autograd.backward(y, grad)
        if not streamed.sums_stay:
            streamed.take_home(streamed.groups[ctx.i])
        if ctx.i == 0:  # for forward() to see that the step has begun; numbers come with collect()
            for group in (streamed.resident, *streamed.groups):
                for p, gradient in group.gradients:
                    p.grad = gradient
        context_grad = None if context is None else context.grad
        return None, None, x.grad, None, None, context_grad, None
