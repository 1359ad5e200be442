"""Real processes over gloo; one process is the reference."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import PIPES, QUICK, ROOT, SMALL_MODEL, assert_same_course, flags, put, wait_for_step

from nanocram import facts, runlog

SETTINGS = SMALL_MODEL | {"zero_init": False, "samples": "", "evals": 3, "log_every": 1}
# The second rank alone has no room for more than eight rows at a time.
SCRIPT = """
import os, pathlib, sys, torch, train
from nanocram import parallel, settings
take_all_passes = train.take_all_passes

def limited(run, *args):
    seconds = take_all_passes(run, *args)
    if parallel.RANK == 1 and run.micro_batch > 8:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return seconds

train.take_all_passes = limited
pathlib.Path(__file__).with_name(os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
settings.configure(vars(train), sys.argv[1:])
train.main()
"""


def torchrun(tmp_path, **settings):
    """Two ranks, stdout and stderr together."""
    script = tmp_path / "limited.py"
    script.write_text(QUICK + SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(script), *flags(**settings)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **PIPES)


def test_two_ranks_match_one(train, monkeypatch, data_dir, tmp_path):
    """The ramp goes from one micro-batch, with a rank idle, to three, with more for one to do."""
    settings = SETTINGS | {"data_dir": str(data_dir), "max_steps": 8, "batch_size": 24}
    settings |= {"optimizer": "adamw", "dropout": 0.1}
    ranks = torchrun(tmp_path, **settings, out_dir=tmp_path / "two")
    put(monkeypatch, train, **settings, out_dir=str(tmp_path / "one"))
    train.main()
    said, _ = ranks.communicate()
    assert ranks.returncode == 0, said
    assert said.count("8 steps, 0 of them skipped") == 1  # one speaks for all
    assert facts.read_facts(tmp_path / "two")["processes"] == 2
    batches = {row.get("batch_size") for row in runlog.read_log(tmp_path / "two")}
    assert batches == {None, 8, 16, 24}
    assert_same_course(tmp_path / "two", tmp_path / "one", 2e-5, of_weights=2e-4)


@pytest.mark.slow
def test_a_full_a_stopped_and_a_dead_rank(train, monkeypatch, data_dir, tmp_path):
    """No room on one of two: both halve micro_batch. SIGTERM to one: all save. kill -9 to one: no
    hang. One alone goes on.

    With Muon, whose products in bfloat16 make more of small differences."""
    settings = SETTINGS | {"data_dir": str(data_dir), "max_steps": 50, "checkpoint_minutes": 0.005}
    settings |= {"batch_size": 32, "batch_start": 32}  # whatever the micro_batch
    out = tmp_path / "out"
    ranks = torchrun(tmp_path, **settings | {"micro_batch": 16}, out_dir=out)
    wait_for_step(out, 6, ranks)
    assert facts.read_facts(out)["rows_per_pass"] == 8
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGTERM)
    said, _ = ranks.communicate()
    assert ranks.returncode == 0 and "stopped at step" in said, said
    reached = torch.load(out / "ckpt.pt", weights_only=True)["state"]["step"]
    assert 6 <= reached < 50

    ranks = torchrun(tmp_path, **settings, out_dir=out, init="resume")
    wait_for_step(out, reached + 4, ranks)
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
    said, _ = ranks.communicate(timeout=1800)
    assert ranks.returncode != 0 and "resumed at step" in said, said
    assert "--init=resume" in said, said  # a rank that is left says what to type
    assert runlog.read_log(out)[-1]["step"] < 50

    put(monkeypatch, train, **settings, out_dir=str(out), init="resume")
    train.main()
    put(monkeypatch, train, out_dir=str(tmp_path / "undisturbed"), init="scratch")
    train.main()
    assert_same_course(out, tmp_path / "undisturbed", 1e-3, of_weights=1e-2)
