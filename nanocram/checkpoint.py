"""ckpt.pt: everything that a run needs to go on, in one dict that torch.load() reads.

    python -c "import torch; print(torch.load('out/tiny/ckpt.pt', weights_only=True)['state'])"

A new checkpoint replaces the old one only when it is whole.
"""

import pickle
import sys
from dataclasses import MISSING, asdict, fields

import torch

from nanocram.safety import first_line, write_beside


def save(run, path, optimizer_name):
    """Write a train.Run to path. Raises ValueError if a weight is not finite or State cannot be
    read again, OSError or RuntimeError if the disk fails."""
    weights = run.model.state_dict()
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has a value that is not finite")
    ckpt = {
        "config": asdict(run.model.config),
        "optimizer": optimizer_name,
        "data": run.meta["sha256"]["train.bin"],
        "model": weights,
        "optimizers": [o.state_dict() for o in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "state": {field.name: getattr(run.state, field.name) for field in fields(run.state)},
    }

    def write(temporary):
        with open(temporary, "wb") as f:  # given a path, torch.save() hides why the disk fails
            torch.save(ckpt, f)
        try:
            torch.load(temporary, weights_only=True, mmap=True)  # or no resume could read it
        except pickle.UnpicklingError as e:
            what = str(e).partition("WeightsUnpickler error: ")[2][:80]
            raise ValueError(f"State has what cannot be read again: {what}") from None

    write_beside(path, write)


def load(run, path, optimizer_name):
    """Restore a train.Run from path, except for its settings; exits if it does not fit."""
    if not path.exists():
        sys.exit(f"{path} not found: name the --out_dir of a run to resume, or drop --init=resume")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        check_config(run, ckpt, path, optimizer_name)
        run.model.load_state_dict(ckpt["model"])
        for o, saved in zip(run.optimizers, ckpt["optimizers"], strict=True):
            ours = [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            o.load_state_dict(saved)
            for group, settings in zip(o.param_groups, ours, strict=True):
                group.update(settings)  # learning rates are those of this command
        if run.scaler.is_enabled() and ckpt["scaler"]:
            run.scaler.load_state_dict(ckpt["scaler"])
        for field in fields(run.state):
            if field.name in ckpt["state"]:  # a field that is newer keeps its default
                setattr(run.state, field.name, ckpt["state"][field.name])
        where = run.model.decoder.weight.device
        run.state.tensors = {k: t.detach().to(where) for k, t in run.state.tensors.items()}
    except Exception as e:  # there are many ways to be broken
        sys.exit(f"{path} does not fit this model or is damaged: {first_line(e)}")


def check_config(run, ckpt, path, optimizer_name):
    """Exit if the checkpoint is of another model, optimiser or data set."""
    ours = asdict(run.model.config) | {"optimizer": optimizer_name}
    # a field added after the checkpoint was written had its default then
    defaults = {f.name: f.default for f in fields(run.model.config) if f.default is not MISSING}
    theirs = defaults | ckpt["config"] | {"optimizer": ckpt["optimizer"]}
    flags = [f"--{name}={theirs.get(name)}" for name in ours if theirs.get(name) != ours[name]]
    if flags:
        sys.exit(f"{path} is of another model: to resume it, type {' '.join(flags)}")
    if ckpt["data"] != run.meta["sha256"]["train.bin"]:
        sys.exit(f"{path} was trained on another train.bin: name its --data_dir")
