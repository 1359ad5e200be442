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
        "state": asdict(run.state),
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
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=False):
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
    for name, value in checkpoint["state"].items():
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
    name_older_states(run, checkpoint)
    wrong = misfit(checkpoint["model"], run.model.state_dict())
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        wrong = wrong or misfit_of_states(states, o, run.model)
    wrong = wrong or misfit_of_numbers(checkpoint["scaler"], run.scaler.state_dict())
    wrong = wrong or misfit_of_numbers(checkpoint["state"], asdict(run.state))
    for name in ("step", "row", "elapsed"):
        if name not in checkpoint["state"]:
            wrong = f"{name} is missing"
    return f"does not fit: {wrong}" if wrong else ""


def misfit_of_numbers(saved, defaults):
    """The first saved value of another type than its default, or that no run has; '' if none.

    What has no default here, such as the scale where none is used, is not looked at."""
    for name, value in saved.items():
        if defaults.get(name) is None:
            continue
        wanted = type(defaults[name])
        is_number = type(value) in (int, float) and -1 <= value < math.inf
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if wanted in (int, float):
            fits = fits and is_number
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
        # A moment is of its parameter's shape; what else an optimiser keeps is its own affair.
        known = dict.fromkeys(MOMENTS, weights[name]) | {"step": torch.zeros(())}
        checked = {key: t for key, t in state.items() if key in known or torch.is_tensor(t)}
        wrong = misfit(checked, {key: known.get(key, t) for key, t in checked.items()})
        if wrong:
            return f"of {name}'s state in the optimiser, {wrong}"
    return ""
