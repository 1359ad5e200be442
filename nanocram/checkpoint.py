"""ckpt.pt: everything that a run needs to go on, in one dict that torch.load() reads."""

import pickle
import sys
import zipfile
from dataclasses import asdict, fields

import torch

from nanocram.data import load_meta
from nanocram.safety import write_beside


def save(run, path, optimizer_name):
    """Write a train.Run to path; raises ValueError if State cannot be read again, or OSError."""
    ckpt = {
        "config": asdict(run.model.config),
        "optimizer": optimizer_name,
        "data": run.meta["sha256"]["train.bin"],
        "model": run.model.state_dict(),
        "optimizers": [o.state_dict() for o in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "state": {field.name: getattr(run.state, field.name) for field in fields(run.state)},
    }

    def write(temporary):
        try:
            with open(temporary, "wb") as f:  # given a path, torch.save() hides why the disk fails
                torch.save(ckpt, f)
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            raise OSError(e.__context__ or e) from None
        except pickle.UnpicklingError as e:
            what = str(e).partition("WeightsUnpickler error: ")[2][:80]
            raise ValueError(f"State has what cannot be read again: {what}") from None

    write_beside(path, write)


def read_config(path, data_dir):
    """ModelConfig's fields and "optimizer", of a checkpoint; exits if data_dir has other rows."""
    if not path.exists():
        sys.exit(f"{path} not found: name the --out_dir of a run to resume, or drop --init=resume")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
        data, config = ckpt["data"], ckpt["config"] | {"optimizer": ckpt["optimizer"]}
    except Exception:  # there are many ways to be broken
        sys.exit(f"{path} is damaged: --init={path.parent} with another --out_dir has its weights")
    if data != load_meta(data_dir)["sha256"]["train.bin"]:
        sys.exit(f"{path} was trained on another train.bin: name its --data_dir")
    return config


def load(run, path):
    """Restore a train.Run from path, except for its settings; exits if it does not fit."""
    try:
        if broken := zipfile.ZipFile(path).testzip():  # torch.load() compares no checksums
            raise ValueError(f"{broken} has another checksum")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        run.model.load_state_dict(ckpt["model"])
        for o, saved in zip(run.optimizers, ckpt["optimizers"], strict=True):
            for group, ours in zip(saved["param_groups"], o.param_groups, strict=True):
                group.update(ours | {"params": group["params"]})  # rates are those of this command
            o.load_state_dict(saved)
        if ckpt["scaler"]:
            run.scaler.load_state_dict(ckpt["scaler"])
        named = {"step", "rows_seen", "elapsed", *ckpt["state"]}  # a newer field keeps its default
        for name in named & {field.name for field in fields(run.state)}:
            setattr(run.state, name, ckpt["state"][name])
        run.saved_step = ckpt["state"]["step"]
        where = run.model.decoder.weight.device
        run.state.tensors = {k: t.detach().to(where) for k, t in run.state.tensors.items()}
    except Exception as e:  # there are many ways to be broken
        why = " ".join(str(e).split())[:200]
        sys.exit(f"{path} does not fit this model or is damaged: {why}")
