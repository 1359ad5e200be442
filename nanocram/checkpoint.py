"""ckpt.pt: all that a run needs to go on; replaced only by a whole one, read without running code.

    python -c "import torch; print(torch.load('out/tiny/ckpt.pt', weights_only=True)['state'])"

What does not fit is refused by name before anything of the run is touched.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from nanocram.model_folder import misfit, not_finite
from nanocram.safety import write_beside

VERSION = 2  # of the format; another one is refused


def write(run, optimizer):
    """Write ckpt.pt of a train.Run; the old one is there until the new one is whole.

    Raises OSError or RuntimeError where that fails, ValueError where a weight is not finite."""
    weights = run.model.state_dict()
    wrong = not_finite(weights)
    if wrong:
        raise ValueError(wrong)
    checkpoint = {
        "version": VERSION,
        "config": asdict(run.model.config),
        "data": run.meta["sha256"]["train.bin"],
        "model": weights,
        "optimizer": optimizer,
        "optimizers": [o.state_dict()["state"] for o in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "state": asdict(run.state) | {"elapsed": run.clock.elapsed()},
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

    write_beside(run.folder / "ckpt.pt", write_to)


def restore(run, optimizer):
    """Take everything but the settings from ckpt.pt, or exit with one line and change nothing."""
    path = Path(run.folder) / "ckpt.pt"
    if not path.exists():
        sys.exit(f"{path} not found: name the --out_dir of a run to resume, or drop --init=resume")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        wrong = objection(run, optimizer, checkpoint)
    except OSError as e:
        sys.exit(f"{path} cannot be read: {e.strerror or e}")
    except Exception as e:  # there are many ways to be broken
        sys.exit(f"{path} is damaged or no checkpoint of train.py: {e!r:.60}")
    if wrong:
        sys.exit(f"{path} {wrong}")
    for name, tensor in run.model.state_dict().items():
        tensor.copy_(checkpoint["model"][name])
    for o, state in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        o.load_state_dict({"state": state, "param_groups": o.state_dict()["param_groups"]})
    if checkpoint["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(checkpoint["scaler"])
    run.clock.earlier = checkpoint["state"].pop("elapsed")
    for name, value in checkpoint["state"].items():
        setattr(run.state, name, value)
    run.state.skipped_in_row = 0  # a fresh start


def objection(run, optimizer, checkpoint):
    """Why a checkpoint cannot be resumed as run, and what to type; '' where it can."""
    version = checkpoint["version"]
    if version != VERSION:
        return f"is of version {version!r:.20}, not {VERSION}: use the commit that run.json names"
    ours = asdict(run.model.config) | {"optimizer": optimizer}
    theirs = checkpoint["config"] | {"optimizer": checkpoint["optimizer"]}
    other = sorted(theirs.keys() ^ ours.keys())
    if other:
        return f"is of a model with other settings ({other[0]:.40}): use the commit in run.json"
    flags = [f"--{name}={theirs[name]}" for name in ours if ours[name] != theirs[name]]
    if flags:
        return f"is of another model: to resume it, type {' '.join(flags)}"
    if checkpoint["data"] != run.meta["sha256"]["train.bin"]:
        return "was trained on another train.bin: name its --data_dir"
    if checkpoint["state"].keys() != {*asdict(run.state), "elapsed"}:
        return "is of another version of train.py: use the commit in run.json"
    wrong = misfit(checkpoint["model"], run.model.state_dict())
    wrong = wrong or optimizer_misfit(run.optimizers, checkpoint["optimizers"])
    numbers = checkpoint["scaler"] | checkpoint["state"]
    for name, value in numbers.items():
        if name != "last" and not -1 <= value < math.inf:
            wrong = f"{name}={value!r:.30}"
    return f"does not fit: {wrong}" if wrong else ""


def optimizer_misfit(optimizers, states):
    """The first thing in saved optimiser states that does not fit these optimisers; '' if none."""
    for o, state in zip(optimizers, states, strict=True):
        params = [p for group in o.param_groups for p in group["params"]]
        for i, remembered in state.items():
            # A moment is of its parameter's shape; a counter of steps has no dimension.
            wanted = {name: params[i] if t.ndim else t for name, t in remembered.items()}
            wrong = misfit(remembered, wanted)
            if wrong:
                return f"of parameter {i} of {type(o).__name__}, {wrong}"
    return ""
