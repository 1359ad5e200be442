"""Real processes over gloo; one process is the reference."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, new_run, put, train_step
from safetensors.torch import load_file

import train as module
from nanocram import parallel, record

SETTINGS = SMALL_MODEL | {
    "batch_size": 24,
    "zero_init": False,
    "samples": "",
    "evals": 3,
    "log_every": 1,
}


def torchrun(n, script=ROOT / "train.py", **settings):
    """A script in n processes, as a user would start it, stdout and stderr together."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={n}",
    ]
    command += [str(script), *(f"--{k}={v}" for k, v in settings.items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alone(train, monkeypatch, **settings):
    """The same in this process."""
    put(monkeypatch, train, **settings)
    module.main()


def assert_equal_runs(a, b, tolerance):
    """Rows consumed, losses, gradient norms and the weights in the end."""
    rows, others = record.read_log(a), record.read_log(b)
    for name in ("step", "tokens", "batch_size", "lr", "mask_rate"):
        assert [row.get(name, 0) for row in rows] == pytest.approx(
            [row.get(name, 0) for row in others], rel=1e-9
        )
    for name in ("loss", "val_loss_15", "val_loss_25", "grad_norm"):
        pairs = [
            (row.get(name, 0), other.get(name, 0)) for row, other in zip(rows, others, strict=True)
        ]
        assert all(x == pytest.approx(y, rel=tolerance) for x, y in pairs), name
    weights, other = (load_file(Path(folder) / "model.safetensors") for folder in (a, b))
    for name in weights:
        scale = weights[name].abs().max().item()
        assert torch.allclose(weights[name], other[name], atol=10 * tolerance * scale), name


# The second rank alone has no room for more than four rows at a time.
FULL_ON_ONE = """
import sys
sys.path.insert(0, ROOT)
import torch
import train
from nanocram import machine, parallel, safety

machine.matmul_rate = lambda *where: 1e12
rehearse = train.rehearse


def limited(*args):
    rehearse(*args)
    if parallel.RANK == 1 and train.micro_batch > 4:
        raise torch.OutOfMemoryError("CUDA out of memory")


train.rehearse = limited
vars(train).update(SETTINGS)
safety.run(train.main, "out", "then")
"""


def test_ranks_halve_micro_batch_together(data_dir, tmp_path):
    settings = SETTINGS | {"data_dir": str(data_dir), "out_dir": str(tmp_path / "out")}
    settings |= {"max_steps": 2, "batch_size": 32, "batch_start": 16, "micro_batch": 16}
    code = FULL_ON_ONE.replace("ROOT", repr(str(ROOT))).replace("SETTINGS", repr(settings))
    (tmp_path / "limited.py").write_text(code)
    ranks = torchrun(2, script=tmp_path / "limited.py")
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode == 0, said
    # Each says it: only train.py as a script silences all but the first.
    assert said.count("going on with 8") == said.count("going on with 4") == 2
    assert record.read_facts(tmp_path / "out")["settings"]["micro_batch"] == 4
    assert record.read_log(tmp_path / "out")[-1]["step"] == 2


def test_two_ranks_match_one(train, monkeypatch, data_dir, tmp_path):
    """The ramp begins with one micro-batch, so that a rank is idle, and ends with three, so that
    one has more to do."""
    settings = SETTINGS | {
        "data_dir": str(data_dir),
        "max_steps": 8,
        "dropout": 0.1,
        "optimizer": "adamw",
    }
    ranks = torchrun(2, **settings, out_dir=tmp_path / "two")
    alone(train, monkeypatch, **settings, out_dir=str(tmp_path / "one"))
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode == 0, said
    assert (
        said.count("parameters, ") == said.count("8 steps, 0 of them skipped") == 1
    )  # one speaks for all
    batches = {row.get("batch_size") for row in record.read_log(tmp_path / "two")}
    assert batches == {None, 8, 16, 24}
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 2e-5)


def worker(launcher, rank):
    """The process number of a rank that torchrun has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(
        int(c)
        for c in children
        if f"RANK={rank}".encode() in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")
    )


def wait_for_step(folder, step, launcher):
    end = time.monotonic() + 120
    while (
        not (folder / "log.csv").exists()
        or max(row["step"] for row in record.read_log(folder)) < step
    ):
        assert launcher.poll() is None and time.monotonic() < end, launcher.communicate()[0]
        time.sleep(0.05)


def test_a_stopped_and_a_dead_rank_and_other_numbers_of_ranks(
    train, monkeypatch, data_dir, tmp_path
):
    """SIGTERM to one of two: all save. kill -9 to one of three: no hang. One goes on as if alone.

    With Muon, whose products in bfloat16 make more of small differences."""
    settings = SETTINGS | {"data_dir": str(data_dir), "max_steps": 50, "checkpoint_minutes": 0.005}
    out = tmp_path / "out"
    ranks = torchrun(2, **settings, out_dir=out)
    wait_for_step(out, 6, ranks)
    os.kill(worker(ranks, 1), signal.SIGTERM)
    said, _ = ranks.communicate(timeout=60)
    assert ranks.returncode == 0 and "stopped at step" in said, said
    reached = record.read_log(out)[-1]["step"]
    assert 6 <= reached < 50

    ranks = torchrun(3, **settings, out_dir=out, init="resume")
    wait_for_step(out, reached + 4, ranks)
    os.kill(worker(ranks, 2), signal.SIGKILL)
    start = time.monotonic()
    said, _ = ranks.communicate(timeout=100)
    assert ranks.returncode != 0 and "resumed at step" in said and "has lost the others" in said, (
        said
    )
    assert time.monotonic() - start < 60
    assert record.read_log(out)[-1]["step"] < 50

    alone(train, monkeypatch, **settings, out_dir=str(out), init="resume")
    alone(train, monkeypatch, **settings, out_dir=str(tmp_path / "undisturbed"), init="scratch")
    assert_equal_runs(tmp_path / "undisturbed", out, 1e-3)


def test_no_thread_of_gloo_outlives_the_group(tmp_path):
    """One that still runs when Python ends may abort the process: seen once, after a run that was
    complete."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from nanocram import parallel

def threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)

parallel.join("cpu")
import torch._dynamo  # as an optimiser does; its imports see the group
parallel.agree(0.0, False)
began = threads()
parallel.leave()
sys.stdout.write(f"threads {{began > 0}} {{threads()}}\\n")
""")
    said, _ = (ranks := torchrun(2, script)).communicate(timeout=100)
    assert ranks.returncode == 0 and said.count("threads True 0") == 2, said


def test_slips_and_lost_ranks_are_one_line(train, monkeypatch):
    monkeypatch.setattr(parallel, "WORLD", 4)
    monkeypatch.setattr(parallel, "LOCAL_RANK", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        SystemExit, match="no GPU for process 2 of this machine: type --nproc_per_node=2"
    ):
        parallel.join("auto")
    monkeypatch.setattr(train, "offload", True)
    with pytest.raises(SystemExit, match="offload is for one process"):
        module.check_settings()

    def lost(*args, **kwargs):
        raise RuntimeError("unhandled system error\nC++ trace")

    monkeypatch.setattr(parallel.dist, "all_reduce", lost)
    for call in (lambda: parallel.agree(0.5, False), lambda: parallel.all_reduce([torch.zeros(3)])):
        with pytest.raises(SystemExit) as e:
            call()
        said = str(e.value)
        assert said.startswith("rank 0 has lost the others: ") and "--init=resume" in said
        assert said.endswith(": unhandled system error C++ trace")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(parallel.dist, "all_reduce", full)
    with pytest.raises(torch.OutOfMemoryError):  # safety.run() says what to do about it
        parallel.agree(0.5, False)


def test_there_is_one_clock(train, monkeypatch):
    """Between micro-batches it is rank 0's that ends a step; another's may be ahead."""
    monkeypatch.setattr(train, "budget_hours", 1.0)
    run = new_run()
    monkeypatch.setattr(run.clock, "elapsed", lambda: 4000.0)
    assert run.clock.progress() == 1 and not train_step(run, 0.5)
    monkeypatch.setattr(parallel, "RANK", 1)
    assert train_step(run, 0.5)


def test_alone_nothing_is_shared(monkeypatch):
    assert parallel.agree(0.25, True) == (0.25, True)
    ones = [torch.ones(2)]
    parallel.all_reduce(ones)
    parallel.join("auto")
    assert torch.equal(ones[0], torch.ones(2)) and not parallel.dist.is_initialized()
