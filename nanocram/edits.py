"""Looks for edits that run without an error and train another model: on a small one when train.py
starts, in the passes that set up a run, and in its first steps. Each ends in one line.
"""

import contextlib
import inspect
import itertools
import sys
from dataclasses import replace

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from model import MaskedLM, gather_positions
from nanocram.offload import Streamed
from nanocram.safety import first_line


@torch.no_grad()
def small_model(config, T):
    """A MaskedLM with all layers of config, but narrow, that evaluates; its ids and positions."""
    small = {"n_embd": 4 * config.n_head, "n_inner": 32, "vocab_size": 64}
    torch.manual_seed(0)
    ids = torch.randint(small["vocab_size"], (2, T))
    with contextlib.suppress(Exception):  # an edit may have rules of its own for sizes
        MaskedLM(replace(config, **small))(ids)
        config = replace(config, **small)
    model = MaskedLM(config).eval()
    for p in model.parameters():
        # random, each of another scale: zeros or equal norms would hide an effect
        p.add_(torch.randn_like(p) * torch.empty(()).uniform_(0.4, 1.4) * p.shape[-1] ** -0.5)
    return model, ids, torch.rand(2, T).topk(T // 4).indices


def outputs(model, *args):
    """What each layer of a model returns in a pass, and then the logits."""
    found, layers = [], set(model.model.layers)
    with register_module_forward_hook(lambda m, _, y: found.append(y) if m in layers else None):
        found.append(model(*args))
    return [tree_leaves(y)[0] for y in found]  # an edit may return more than x


@torch.no_grad()
def check_mixing(config, T):
    """Exit if an edit mixes tokens in the wrong place: if a model of config, on rows of T tokens,
    computes other numbers at some positions than in whole rows, or beside padding and other rows.

    What an edit does in training mode alone is not seen."""
    model, ids, positions = small_model(config, T)

    def compare(found, wanted, said):
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            b = b if a.shape == b.shape else gather_positions(b, positions)
            if not torch.allclose(a, b, 1e-3, 1e-3):
                place = f"layer {i}" if i < config.n_layer else "what follows the layers"
                sys.exit(f"an edit of model.py {said.format(place)}")

    said = "changes {} where only some tokens are computed: what mixes tokens belongs at the top "
    said += "of Block.forward(), where x has all of them"
    said += " (a narrow layer never has: type --n_narrow=0)" * (config.n_narrow > 1)
    said += "; a mask (T, T) needs its rows at positions"
    compare(outputs(model, ids, positions), outputs(model, ids), said)
    n = T - 4  # tokens of the second row, before its padding
    mask = torch.arange(T) < torch.tensor([[T], [n]])
    beside_padding = [y[1, :n] for y in outputs(model, ids, None, mask)]
    said = "gives a row other numbers in {} beside padding or another row: in Block.forward(), set "
    said += "what it mixes to 0 where attention_mask (B, T), if given, is 0"
    compare(beside_padding, [y[0] for y in outputs(model, ids[1:, :n])], said)


def check_streaming(config, T, dev):
    """Exit if offload, on a torch.device, has other gradients than a plain model of config."""
    plain, ids, positions = small_model(config, T)
    try:
        streamed = Streamed(plain.config, dev, torch.float32).model
        streamed.load_state_dict(plain.state_dict())
        for model, micro_batch in itertools.product((plain.to(dev).train(), streamed), range(2)):
            torch.manual_seed(micro_batch)  # of dropout
            y = model(ids.to(dev), positions.to(dev))
            sum(tensor.sin().sum() for tensor in tree_leaves(y)).backward()
        for (name, p), q in zip(plain.named_parameters(), streamed.parameters(), strict=True):
            p = torch.zeros_like(q) if p.grad is None else p.grad.cpu()
            if not (p - q.grad).norm() <= 1e-4 * p.norm():
                raise ValueError(f"{name} has another gradient")
    except Exception as e:
        said = "a block takes tensors, reads weights that no other one has, and returns one tensor"
        sys.exit(f"offload cannot follow an edit of model.py ({first_line(e)}): {said}")


def check_loss(run, loss):
    """Exit if a loss depends on parameters that MaskedLM.__init__() has not made, or that offload
    keeps on the host."""
    with torch.device("meta"):
        names = dict(MaskedLM(run.model.config).named_parameters())
    ours = {p for name, p in run.twin.named_parameters() if name in names}
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.nn.Parameter) and leaf not in ours:
                said = f"the loss reads a parameter {tuple(leaf.shape)} outside of the model"
                sys.exit(f"{said}: make it in MaskedLM.__init__(), use it in MaskedLM.forward()")


def fingerprint(value):
    """What the numbers, texts and tensors in a value are, and which its other objects are."""
    leaves = tree_leaves(value.state_dict() if isinstance(value, torch.nn.Module) else value)
    leaves = [str(x.float().sum().item()) if torch.is_tensor(x) else x for x in leaves]
    return [x if isinstance(x, int | float | str) else id(x) for x in leaves if x is not None]


@contextlib.contextmanager
def only_state_changes(run, script, in_pass):
    """Around a step or a pass: exit if it changes a script's globals or an attribute of run, which
    no checkpoint has. A pass may change no buffer and no variable of the loss either: set-up and
    evaluations have passes too. What is new is not seen, nor what begins after the second step."""
    if not in_pass and run.state.step > 1:
        yield
        return

    def values():
        places = {"": script, "run.": vars(run)}
        if in_pass:
            places["the buffer "] = dict(run.twin.named_buffers())
            loss_fn = inspect.unwrap(run.loss_fn)  # as it was before torch.compile()
            if inspect.isfunction(loss_fn):
                places["loss_fn's "] = inspect.getclosurevars(loss_fn).nonlocals
        named = {where + name: x for where, place in places.items() for name, x in place.items()}
        ours = (run.model, run.twin)
        return {name: fingerprint(x) for name, x in named.items() if not any(x is m for m in ours)}

    before = values()
    yield
    for name, found in values().items():
        was = before.get(name, [])
        if found[: len(was)] != was:
            if in_pass:
                said = f"a pass changes {name}, and so do evaluations: keep the mean over a step"
                sys.exit(f"{said} in state.tensors (docs/how_it_works.md: a statistic)")
            said = f"a step changes {name}, which a resume would not have: keep it in State"
            sys.exit(f"{said} (docs/how_it_works.md: what must survive a resume)")
