"""ckpt.pt: all that a run needs to go on, written beside its goal and renamed, read without executing anything.

    python -c "import torch; print(torch.load('out/tiny/ckpt.pt', weights_only=True)['state'])"

What does not fit, weights that are not finite included, is refused by name before anything of the run is touched.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from nanocram.model_folder import complaint, plain
from nanocram.record import COLUMNS
from nanocram.safety import write_beside

VERSION = 1  # of the format; another one is refused


def write(run, optimizer):
    """Write ckpt.pt of a train.Run; the old one is there until the new one is whole.

    Raises OSError or RuntimeError where that fails, ValueError where a weight is not finite."""
    if wrong := complaint(model := {k: plain(v) for k, v in run.model.state_dict().items()}, model):
        raise ValueError(wrong)
    checkpoint = {
        "version": VERSION,
        "config": asdict(run.model.config),
        "data": run.meta["sha256"]["train.bin"],
        "model": model,
        "optimizer": optimizer,
        "optimizers": [o.state_dict()["state"] for o in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "state": run.state,
        "elapsed": run.elapsed(),
    }
    write_beside(run.folder / "ckpt.pt", lambda path: torch.save(checkpoint, path))


def read(run, optimizer):
    """The dict in ckpt.pt; exits with one line where it is damaged, or does not fit the run."""
    path = Path(run.folder) / "ckpt.pt"
    if not path.exists():
        sys.exit(
            f"{path} not found: name the --out_dir of a run to resume, or leave out --init=resume"
        )
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if ckpt.get("version", VERSION) != VERSION:
            sys.exit(
                f"{path} is of version {ckpt['version']!r:.20}, not {VERSION}: use the commit that run.json names"
            )
        ours, theirs = asdict(run.model.config) | {"optimizer": optimizer}, dict(ckpt["config"])
        theirs = (
            asdict(type(run.model.config)()) | theirs | {"optimizer": ckpt["optimizer"]}
        )  # settings may be younger
        if unknown := theirs.keys() - ours.keys():
            sys.exit(
                f"{path} has a setting {min(unknown):.40}, unknown here: use the commit that run.json names"
            )
        if wrong := [f"--{k}={theirs[k]}" for k in ours if ours[k] != theirs[k]]:
            sys.exit(f"{path} is of another model: to resume it, type {' '.join(wrong)}")
        if ckpt["data"] != run.meta["sha256"]["train.bin"]:
            sys.exit(f"{path} was trained on another train.bin: name its --data_dir")
        ckpt["model"] = {
            k: v.reshape(v.shape or (1,)) for k, v in ckpt["model"].items()
        }  # position_scale was a scalar
        ckpt["state"] = (
            run.state | ckpt["state"] | {"skipped_in_row": 0}
        )  # younger fields, and a fresh start
        if wrong := complaint(ckpt["model"], run.model.state_dict()) or misfit(run, ckpt):
            sys.exit(f"{path} does not fit: {wrong}")
    except Exception as e:  # there are many ways to be broken
        sys.exit(f"{path} is damaged or no checkpoint of train.py: {type(e).__name__}")
    return ckpt


def misfit(run, ckpt):
    """What of optimisers, scaler, state and clock cannot be the run's, in a few words; '' if all can."""
    if len(ckpt["optimizers"]) != len(run.optimizers):
        return f"{len(ckpt['optimizers'])} optimisers, not {len(run.optimizers)}"
    for o, saved in zip(run.optimizers, ckpt["optimizers"], strict=True):
        params = [p for group in o.param_groups for p in group["params"]]
        for i, remembered in saved.items():
            wanted = {k: params[i] if v.ndim else v for k, v in remembered.items()}
            if wrong := complaint(remembered, wanted):
                return f"of parameter {i} of {type(o).__name__}, {wrong}"
    if unknown := ckpt["state"].keys() - run.state.keys() or ckpt["state"]["last"].keys() - set(
        COLUMNS
    ):
        return f"{min(unknown)} in its state is unknown"
    if ckpt["scaler"] and not 0 < ckpt["scaler"]["scale"] < math.inf:
        return f"scale={ckpt['scaler']['scale']!r:.30}"
    for name, value in (run.state | {"elapsed": 0.0}).items():
        found = (ckpt["state"] | {"elapsed": ckpt["elapsed"]})[name]
        if type(found) is not type(value) or (
            type(value) in (int, float) and not -1 <= found < math.inf
        ):
            return f"{name}={found!r:.30}"
    return ""


def restore(run, optimizer):
    """Take everything but the settings from ckpt.pt, or exit with one line and leave the run as it was."""
    ckpt = read(run, optimizer)
    for name, tensor in run.model.state_dict().items():
        plain(tensor).copy_(ckpt["model"][name])
    for o, saved in zip(run.optimizers, ckpt["optimizers"], strict=True):
        o.load_state_dict({"state": saved, "param_groups": o.state_dict()["param_groups"]})
    if ckpt["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(ckpt["scaler"])
    run.state, run.before = ckpt["state"], ckpt["elapsed"]
