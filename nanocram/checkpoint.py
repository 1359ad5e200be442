"""ckpt.pt: all that a run needs to go on; replaced only by a whole one, read without running code.

    python -c "import torch; print(torch.load('out/tiny/ckpt.pt', weights_only=True)['state'])"

Tensors have to fit, by name and shape; what does not is refused by name before anything of the run
is touched. Of State and ModelConfig a field that is new keeps its default, and one that is gone is
named and left out: so a fork goes on from what its original wrote.
"""

import math
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import numpy as np
import torch

from nanocram.model_folder import misfit, not_finite, today
from nanocram.safety import write_beside

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of torch's optimisers, and of Muon


def write(run, folder, optimizer_name, file="ckpt.pt"):
    """Write ckpt.pt of a train.Run; the old one is there until the new one is whole.

    Raises OSError or RuntimeError where that fails, ValueError where a weight is not finite."""
    weights = run.model.state_dict()
    wrong = not_finite(weights)
    if wrong:
        raise ValueError(wrong)
    checkpoint = {
        "config": asdict(run.model.config),
        "data": run.meta["sha256"]["train.bin"],
        "model": weights,
        "optimizer": optimizer_name,
        "optimizers": [states_by_name(o, run.model) for o in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "state": state_to_keep(run.state),
    }

    def write_to(path):
        # Given a path, torch would hide why the disk fails; given a file, the error has a context.
        with open(path, "wb") as f:
            try:
                torch.save(checkpoint, f)
            except RuntimeError as e:
                cause = e.__context__
                error = cause if isinstance(cause, OSError) else e
                raise error from None

    write_beside(Path(folder) / file, write_to)


def state_to_keep(state):
    """{field: value} of a train.State, without what restore() would refuse: that is named."""
    defaults = asdict(type(state)())
    kept = {}
    for name, value in asdict(state).items():
        try:
            value = for_each(as_python, value)
            wrong = misfit_of_values({name: value}, defaults)
        except TypeError as e:
            wrong = f"{name}, {e}"
        if wrong:
            print(f"WARNING: the checkpoint lacks State.{wrong}: a resume begins with its default")
        else:
            kept[name] = value
    return kept


def as_python(value):
    """A value as torch reads it without running code; TypeError, of its kind, where it cannot."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, bool | int | float | str | torch.Tensor | None):
        raise TypeError(f"a {type(value).__name__}: keep numbers, strings, lists, dicts, tensors")
    return value


def for_each(function, value):
    """function(part) for each part of dicts, lists, tuples and sets, in their places."""
    if isinstance(value, dict):
        return {key: for_each(function, part) for key, part in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(for_each(function, part) for part in value)
    return function(value)


def names_of(optimizer, model):
    """The names of an optimiser's parameters, in the order in which it counts them."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def states_by_name(optimizer, model):
    """{parameter: {"exp_avg": tensor, …}} of an optimiser."""
    names = names_of(optimizer, model)
    return {names[i]: state for i, state in optimizer.state_dict()["state"].items()}


def name_older_states(run, checkpoint):
    """Give the optimisers' states their parameters' names: until November 2026 they had numbers."""
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        names = names_of(o, run.model)
        for i in [key for key in states if isinstance(key, int)]:
            states[names[i]] = states.pop(i)


def restore(run, folder, optimizer_name):
    """Take everything but the settings from ckpt.pt, or exit with one line and change nothing."""
    path = Path(folder) / "ckpt.pt"
    if not path.exists():
        sys.exit(f"{path} not found: name the --out_dir of a run to resume, or drop --init=resume")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = asdict(run.model.config).keys() | asdict(run.state).keys()
        for part in ("config", "state"):
            checkpoint[part] = today(checkpoint[part], known, f"{path}, {part},")
        wrong = misfit_of_run(run, optimizer_name, checkpoint)
    except OSError as e:
        sys.exit(f"{path} cannot be read: {e.strerror or e}")
    except Exception as e:  # there are many ways to be broken
        sys.exit(f"{path} is damaged or no checkpoint of train.py: {e!r:.60}")
    if wrong:
        sys.exit(f"{path} {wrong}")

    for name, tensor in run.model.state_dict().items():
        tensor.copy_(checkpoint["model"][name])
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        names = names_of(o, run.model)
        state = {names.index(name): tensors for name, tensors in states.items()}
        o.load_state_dict({"state": state, "param_groups": o.state_dict()["param_groups"]})
    if run.scaler.is_enabled():
        run.scaler.load_state_dict(run.scaler.state_dict() | checkpoint["scaler"])
    where = run.model.decoder.weight.device  # with offload the host
    for name, value in checkpoint["state"].items():
        # Tensors are a fork's: an average of the weights, say.
        value = for_each(lambda part: part.to(where) if torch.is_tensor(part) else part, value)
        setattr(run.state, name, value)
    run.state.consecutive_skips = 0  # a fresh start


def misfit_of_run(run, optimizer_name, checkpoint):
    """Why a checkpoint cannot be resumed as run, and what to type; '' where it can."""
    ours = asdict(run.model.config) | {"optimizer": optimizer_name}
    # A switch that is newer than the checkpoint was at its default, if it has one.
    defaults = {f.name: f.default for f in fields(run.model.config) if f.default is not MISSING}
    theirs = ours | defaults | checkpoint["config"] | {"optimizer": checkpoint["optimizer"]}
    flags = [f"--{name}={theirs[name]}" for name in ours if ours[name] != theirs[name]]
    if flags:
        return f"is of another model: to resume it, type {' '.join(flags)}"
    if checkpoint["data"] != run.meta["sha256"]["train.bin"]:
        return "was trained on another train.bin: name its --data_dir"
    if len(checkpoint["optimizers"]) != len(run.optimizers):
        count = f"{len(checkpoint['optimizers'])}, build_optimizers() makes {len(run.optimizers)}"
        return f"has the states of another number of optimisers, {count}: make as many to resume it"
    name_older_states(run, checkpoint)
    wrong = misfit(checkpoint["model"], run.model.state_dict())
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        wrong = wrong or misfit_of_states(states, o, run.model)
    wrong = wrong or misfit_of_values(checkpoint["scaler"], run.scaler.state_dict())
    wrong = wrong or misfit_of_values(checkpoint["state"], asdict(run.state))
    for name in ("step", "row", "elapsed"):
        if name not in checkpoint["state"]:
            wrong = f"{name} is missing"
    return f"does not fit: {wrong}" if wrong else ""


def misfit_of_values(saved, defaults):
    """The first saved value of another type than its default, or that no run has; '' if none.

    Counts, seconds and the loss scale are finite and not below -1; others may be infinite, as a
    fork's best loss is at first. What has no default here, such as the scale where none is used, is
    not looked at."""
    for name, value in saved.items():
        if defaults.get(name) is None:
            continue
        wanted = type(defaults[name])
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        is_time = name == "elapsed" or name.endswith("_seconds")
        if wanted is int or (wanted is float and (is_time or name == "scale")):
            fits = fits and -1 <= value < math.inf
        elif wanted is float:
            fits = fits and not math.isnan(value)
        if not fits:
            return f"{name}={value!r:.30}"
    return ""


def misfit_of_states(states, optimizer, model):
    """The first thing in saved states that does not fit the optimiser's weights; '' if none."""
    weights = dict(model.named_parameters())
    names = names_of(optimizer, model)
    for name, state in states.items():
        if name not in names:
            return f"the optimiser's state of {name} is unknown"
        # A moment is of its parameter's shape; other tensors have to be finite, the rest may be
        # what it likes.
        known = dict.fromkeys(MOMENTS, weights[name]) | {"step": torch.zeros(())}
        checked = {key: t for key, t in state.items() if key in known or torch.is_tensor(t)}
        count = checked.get("step")
        if isinstance(count, int) and count >= 0:  # some count in Python
            checked["step"] = torch.tensor(float(count))
        shapes_from = {key: known.get(key, t) for key, t in checked.items()}
        wrong = misfit(checked, shapes_from)
        if wrong:
            return f"of {name}'s state in the optimiser, {wrong}"
    return ""
