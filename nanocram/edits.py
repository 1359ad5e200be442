"""Looks for edits that run without an error and train another model: in a small one, and in the
passes of set-up. What takes two runs to be seen is a test: python -m pytest tests/test_edit.py
"""

import contextlib
import sys
from dataclasses import replace

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from model import MaskedLM, gather_positions
from nanocram.machine import float32_products
from nanocram.offload import Streamed
from nanocram.safety import first_line, say_once


def object_to(said, check, only_warn):
    """Exit with said, or warn, as where a run was let begin; check: what to delete."""
    said = f"{said}; if you mean it, delete {check}"
    if not only_warn:
        sys.exit(said)
    say_once(f"WARNING: {said}")


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
        # zeros or equal norms would hide an effect; larger ones overflow in models without norms
        size = torch.empty(()).uniform_(0.2, 0.7) * max(p.shape[-1:], default=1) ** -0.5
        p.add_(torch.randn_like(p) * size)
    return model, ids, torch.rand(2, T).topk(T // 4).indices


def outputs(model, *args):
    """What each layer of a model returns in a pass, and then the logits."""
    found, layers = [], set(model.model.layers)
    with register_module_forward_hook(lambda m, _, y: found.append(y) if m in layers else None):
        found.append(model(*args))
    return [tree_leaves(y)[0] for y in found]  # an edit may return more than x


@torch.no_grad()
@float32_products("highest")
def check_mixing(config, T, begun=False):
    """Compare a small model's vectors at some positions with those of whole rows of T tokens, and
    those of a padded row with those of the row alone. Object if they differ: an edit mixes tokens
    in the wrong place. Warn where each layer adds 5 % or less (int8). Training mode is not seen."""
    check = "edits.check_mixing() in check_settings()"
    model, ids, positions = small_model(config, T)
    n = T // 2  # tokens of the second row, before its padding
    ids[1, n:] = 0
    mask = (torch.arange(T) < torch.tensor([[T], [n]])).long()
    whole = outputs(model, ids)  # a bug that ends this keeps its traceback
    if not all(y.isfinite().all() for y in whole):
        said = "an edit of model.py overflows in a small model: how it mixes tokens is not checked"
        return object_to(said, check, only_warn=True)
    try:
        some = outputs(model, ids, positions)
        padded, alone = outputs(model, ids, None, mask), outputs(model, ids[1:, :n])
    except Exception as e:
        said = f"an edit of model.py fails on short rows, padding or positions ({first_line(e)})"
        said += ": take the length of rows from x.shape[1], and see Block.forward() for the others"
        return object_to(said, check, only_warn=begun)

    def compare(found, wanted, said):
        # of each layer the largest difference, as a share of the vectors' mean length
        changes = [torch.tensor(0.0)]
        for a, b in zip(found, wanted, strict=True):
            b = b if a.shape == b.shape else gather_positions(b, positions)
            changes.append((a - b).norm(dim=-1).max() / b.norm(dim=-1).mean().clamp(min=1e-30))
        changes = torch.stack(changes)
        if changes.max() <= 1e-3:  # rounding in 32 layers gives 1e-5
            return
        added = changes.diff()  # by each layer
        i = (added >= added.max() / 2).int().argmax()  # the first one to blame
        place = f"layer {i}" if i < config.n_layer else "what follows the layers"
        is_small = added.max() <= 0.05 and changes.max() <= 0.25
        said = f"an edit of model.py changes {place} by {added[i]:.1%} {said}"
        if is_small:
            said += "; int8 needs a scale for each token"
        object_to(said, check, only_warn=begun or is_small)

    compare(outputs(model, ids), whole, "from pass to pass: chance belongs behind self.training")
    said = "where only some tokens are computed: mix tokens at the top of Block.forward()"
    said += " (in a narrow layer x never has all: type --n_narrow=0)" * (config.n_narrow > 1)
    compare(some, whole, f"{said}; index a mask or bias (T, T) by positions")
    said = "beside padding or another row: first multiply x by attention_mask[..., None], if given"
    compare([y[1, :n] for y in padded], [y[0] for y in alone], said)


@float32_products("highest")
def check_streaming(config, T, dev, begun=False):
    """Object if offload, on a torch.device, has other gradients than a plain model of config."""
    plain, ids, positions = small_model(config, T)
    try:
        streamed = Streamed(plain.config, dev)
        streamed.model.load_state_dict(plain.state_dict())
        gradients = []
        for model in (plain.to(dev).train(), streamed.model):
            for micro_batch in range(2):
                torch.manual_seed(micro_batch)  # of dropout
                y = model(ids.to(dev), positions.to(dev))
                sum(tensor.sin().sum() for tensor in tree_leaves(y)).backward()
            streamed.wait()
            found = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
            gradients.append([g.cpu() for g in found])
        # some gradients are exactly 0 but for rounding, as that of Wk's bias without RoPE
        least = 1e-6 * torch.nn.utils.get_total_norm(gradients[0])
        for (name, _), g, wanted in zip(plain.named_parameters(), *gradients[::-1], strict=True):
            if not (g - wanted).norm() <= 1e-4 * wanted.norm() + least:
                raise ValueError(f"{name} has another gradient")
    except Exception as e:
        said = f"offload cannot follow an edit of model.py ({first_line(e)}): a block takes "
        said += "tensors, reads weights that no other one has, and returns one tensor"
        object_to(said, "edits.check_streaming() in check_settings()", only_warn=begun)


def check_loss(run, loss):
    """Object to a loss that reads parameters which MaskedLM.__init__() has not made."""
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.nn.Parameter) and leaf not in run.made:
                said = f"the loss reads a parameter {tuple(leaf.shape)} outside of the model: "
                said += "make it in MaskedLM.__init__(), use it in MaskedLM.forward()"
                object_to(said, "edits.check_loss() in take_all_passes()", run.saved_step >= 0)
