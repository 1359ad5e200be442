"""ckpt.pt: all that a run needs to go on; replaced only by a whole one, read without running code.

    python -c "import torch; print(torch.load('out/tiny/ckpt.pt', weights_only=True)['state'])"

Tensors have to fit, by name and shape; what does not is refused by name before anything of the run
is touched. Of State and ModelConfig a field that is new keeps its default, and one that is gone is
named and left out: so a fork goes on from what its original wrote.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from nanocram.model_folder import misfit, not_finite
from nanocram.safety import write_beside


def write(run, folder, optimizer):
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
        "optimizer": optimizer,
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

    write_beside(Path(folder) / "ckpt.pt", write_to)


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


def restore(run, folder, optimizer):
    """Take everything but the settings from ckpt.pt, or exit with one line and change nothing."""
    path = Path(folder) / "ckpt.pt"
    if not path.exists():
        sys.exit(f"{path} not found: name the --out_dir of a run to resume, or drop --init=resume")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        name_older_states(run, checkpoint)
        wrong = misfit_of_run(run, optimizer, checkpoint)
    except OSError as e:
        sys.exit(f"{path} cannot be read: {e.strerror or e}")
    except Exception as e:  # there are many ways to be broken
        sys.exit(f"{path} is damaged or no checkpoint of train.py: {e!r:.60}")
    if wrong:
        sys.exit(f"{path} {wrong}")

    ours = asdict(run.model.config).keys() | asdict(run.state).keys()
    gone = (checkpoint["config"].keys() | checkpoint["state"].keys()) - ours
    if gone:
        print(
            f"{path} also has what this code no longer knows, left out: {', '.join(sorted(gone))}"
        )
    for name, tensor in run.model.state_dict().items():
        tensor.copy_(checkpoint["model"][name])
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        names = names_of(o, run.model)
        state = {names.index(name): tensors for name, tensors in states.items()}
        o.load_state_dict({"state": state, "param_groups": o.state_dict()["param_groups"]})
    if checkpoint["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(checkpoint["scaler"])
    for name in asdict(run.state).keys() & checkpoint["state"].keys():
        setattr(run.state, name, checkpoint["state"][name])
    run.state.skipped_in_row = 0  # a fresh start


def misfit_of_run(run, optimizer, checkpoint):
    """Why a checkpoint cannot be resumed as run, and what to type; '' where it can."""
    ours = asdict(run.model.config) | {"optimizer": optimizer}
    theirs = checkpoint["config"] | {"optimizer": checkpoint["optimizer"]}
    differ = [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]
    flags = [f"--{name}={theirs[name]}" for name in sorted(differ)]
    if flags:
        return f"is of another model: to resume it, type {' '.join(flags)}"
    if checkpoint["data"] != run.meta["sha256"]["train.bin"]:
        return "was trained on another train.bin: name its --data_dir"
    wrong = misfit(checkpoint["model"], run.model.state_dict())
    weights = dict(run.model.named_parameters())
    for o, states in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        wrong = wrong or misfit_of_states(states, {n: weights[n] for n in names_of(o, run.model)})
    wrong = wrong or misfit_of_numbers(checkpoint["scaler"], run.scaler.state_dict())
    wrong = wrong or misfit_of_numbers(checkpoint["state"], asdict(run.state))
    for name in ("step", "row", "elapsed"):
        if name not in checkpoint["state"]:
            wrong = f"{name} is missing"
    return f"does not fit: {wrong}" if wrong else ""


def misfit_of_numbers(saved, wanted):
    """The first saved number that is none, or not one that a run can have; '' where all are."""
    for name, value in saved.items():
        is_number = isinstance(wanted.get(name), int | float)
        if is_number and not (isinstance(value, int | float) and -1 <= value < math.inf):
            return f"{name}={value!r:.30}"
        if name in wanted and not is_number and type(value) is not type(wanted[name]):
            return f"{name}={value!r:.30}"
    return ""


def misfit_of_states(states, weights):
    """The first thing in an optimiser's saved states that does not fit its weights; '' if none."""
    for name, state in states.items():
        if name not in weights:
            return f"the optimiser's state of {name} is unknown"
        # A moment is of its parameter's shape; a counter of steps has no dimension.
        wanted = {key: weights[name] if t.ndim else t for key, t in state.items()}
        wrong = misfit(state, wanted)
        if wrong:
            return f"of {name}'s state in the optimiser, {wrong}"
    return ""
