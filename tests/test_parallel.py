"""Real processes over gloo; one process is the reference."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, put
from safetensors.torch import load_file

import train as module
from nanocram import parallel, record

CHANGES = {"batch_size": 24, "zero_init": False, "samples": "", "evals": 3, "log_every": 1}
SETTINGS = SMALL_MODEL | CHANGES


def torchrun(n, script=ROOT / "train.py", **settings):
    """A script in n processes, as a user would start it, stdout and stderr together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={n}", str(script)]
    command += [f"--{name}={value}" for name, value in settings.items()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alone(train, monkeypatch, **settings):
    """The same in this process."""
    put(monkeypatch, train, **settings)
    module.main()


def assert_equal_runs(a, b, tolerance):
    """Rows consumed, losses, gradient norms and the weights in the end."""
    tolerances = dict.fromkeys(("step", "tokens", "batch_size", "lr", "mask_rate"), 1e-9)
    tolerances |= dict.fromkeys(("loss", "val_loss_15", "val_loss_25", "grad_norm"), tolerance)
    for row, other in zip(record.read_log(a), record.read_log(b), strict=True):
        for name, rel in tolerances.items():
            assert row.get(name, 0) == pytest.approx(other.get(name, 0), rel=rel), name
    weights, others = (load_file(Path(folder) / "model.safetensors") for folder in (a, b))
    for name, weight in weights.items():
        scale = weight.abs().max().item()
        assert torch.allclose(weight, others[name], atol=10 * tolerance * scale), name


# The second rank alone has no room for more than four rows at a time.
FULL_ON_ONE = """
import sys
sys.path.insert(0, ROOT)
import torch
import train
from nanocram import machine, parallel, safety

machine.matmul_rate = lambda *where: 1e12
rehearse = train.rehearse


def limited(run, *args):
    rehearse(run, *args)
    if parallel.RANK == 1 and run.state.micro_batch > 4:
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
    settings = SETTINGS | {"max_steps": 8, "dropout": 0.1, "optimizer": "adamw"}
    settings |= {"data_dir": str(data_dir)}
    ranks = torchrun(2, **settings, out_dir=tmp_path / "two")
    alone(train, monkeypatch, **settings, out_dir=str(tmp_path / "one"))
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode == 0, said
    assert said.count("8 steps, 0 of them skipped") == 1  # one speaks for all
    batches = {row.get("batch_size") for row in record.read_log(tmp_path / "two")}
    assert batches == {None, 8, 16, 24}
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 2e-5)


# From step 5 on memory has no room for more than four rows, on one rank alone.
FULL_LATER = """
import os, sys
sys.path.insert(0, ROOT)
import torch
import train
from nanocram import machine, safety

machine.matmul_rate = lambda *where: 1e12
make_loss, train_step = train.make_loss, train.train_step
step = 0


def make_limited(*args):
    loss_fn = make_loss(*args)

    def limited(ids, *others):
        loss = loss_fn(ids, *others)  # first: so the step is half done
        if step >= 5 and os.environ["RANK"] == "1" and len(ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    return limited


def counted(run, progress):
    global step
    step = run.state.step
    train_step(run, progress)


train.make_loss, train.train_step = make_limited, counted
vars(train).update(SETTINGS)
safety.run(train.main, "out", "then")
"""


def test_ranks_halve_micro_batch_together_in_mid_run(train, monkeypatch, data_dir, tmp_path):
    """Beside one process whose micro-batches are halved at that step."""
    settings = SETTINGS | {"data_dir": str(data_dir), "out_dir": str(tmp_path / "two")}
    settings |= {"max_steps": 8, "batch_ramp": 0.0, "batch_size": 32, "optimizer": "adamw"}
    code = FULL_LATER.replace("ROOT", repr(str(ROOT))).replace("SETTINGS", repr(settings))
    (tmp_path / "full_later.py").write_text(code)
    ranks = torchrun(2, script=tmp_path / "full_later.py")

    train_step = module.train_step

    def smaller(run, progress):
        run.state.micro_batch = 8 if run.state.step < 5 else 4
        train_step(run, progress)

    monkeypatch.setattr(module, "train_step", smaller)
    alone(train, monkeypatch, **(settings | {"out_dir": str(tmp_path / "one")}))
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode == 0, said
    assert said.count("out of memory in step 6: saving, then going on with micro_batch=4") == 1
    assert "8 steps, 0 of them skipped" in said
    assert record.read_facts(tmp_path / "two")["settings"]["micro_batch"] == 4
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 2e-5)


# One bit of one weight of one rank is another from step 5 on.
APART = """
import os, sys
sys.path.insert(0, ROOT)
import torch
import train
from nanocram import machine, safety

machine.matmul_rate = lambda *where: 1e12
train_step = train.train_step


def spoilt(run, progress):
    train_step(run, progress)
    if run.state.step == 5 and os.environ["RANK"] == "2":
        run.model.model.layers[1].mlp.Wo.weight.data.view(torch.int32)[3, 2] ^= 1


train.train_step = spoilt
vars(train).update(SETTINGS)
safety.run(train.main, "out", "then")
"""


def test_ranks_whose_weights_differ_save_nothing(data_dir, tmp_path):
    """All end with the one line that names the weight; the checkpoint before stands."""
    out = tmp_path / "out"
    settings = SETTINGS | {"data_dir": str(data_dir), "out_dir": str(out)}
    settings |= {"max_steps": 9, "checkpoint_minutes": 1e-9}
    code = APART.replace("ROOT", repr(str(ROOT))).replace("SETTINGS", repr(settings))
    (tmp_path / "apart.py").write_text(code)
    ranks = torchrun(3, script=tmp_path / "apart.py")
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode != 0
    line = r"^ranks differ in 1 of .*, model\.layers\.1\.mlp\.Wo\.weight first.*nothing is saved"
    assert re.search(line, said, re.MULTILINE), said
    assert "lost the others" not in said
    assert torch.load(out / "ckpt.pt", weights_only=True)["state"]["step"] == 4


@pytest.mark.slow
def test_two_machines_match_one(train, monkeypatch, data_dir, tmp_path):
    """Two agents of torchrun, as two machines have them; each is the first of its own."""
    settings = SETTINGS | {"max_steps": 8, "optimizer": "adamw", "data_dir": str(data_dir)}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}", str(ROOT / "train.py")]
    flags = settings | {"out_dir": tmp_path / "two"}
    command += [f"--{name}={value}" for name, value in flags.items()]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, **streams) for _ in range(2)]
    alone(train, monkeypatch, **settings, out_dir=str(tmp_path / "one"))
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(said).count("8 steps, 0 of them skipped") == 1
    assert record.read_facts(tmp_path / "two")["processes"] == 2
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 2e-5)


def worker(launcher, rank):
    """The process number of a rank that torchrun has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)


def wait_for_step(folder, step, launcher):
    end = time.monotonic() + 120
    while max((row["step"] for row in record.read_log(folder)), default=-1) < step:
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
    assert ranks.returncode != 0 and "resumed at step" in said, said
    assert "has lost the others" in said, said
    assert time.monotonic() - start < 60
    assert record.read_log(out)[-1]["step"] < 50

    alone(train, monkeypatch, **settings, out_dir=str(out), init="resume")
    alone(train, monkeypatch, **settings, out_dir=str(tmp_path / "undisturbed"), init="scratch")
    assert_equal_runs(tmp_path / "undisturbed", out, 1e-3)


def test_nccl_that_fails_at_its_start_is_told_from_a_rank_that_is_gone(monkeypatch):
    """In torch's words; a lack of memory goes on to those who halve the micro-batch."""

    def fail(text):
        def all_reduce(tensor):
            raise RuntimeError(text)

        monkeypatch.setattr(parallel.dist, "all_reduce", all_reduce)

    monkeypatch.setattr(parallel, "WORLD", 2)
    fail("NCCL error in: ProcessGroupNCCL.cpp:94\nunhandled cuda error, NCCL version 2.29.7")
    with pytest.raises(SystemExit, match=r"rank 0 cannot .* on cpu: NCCL_DEBUG.* unhandled") as e:
        parallel.meet(torch.device("cpu"))
    assert "\n" not in str(e.value)
    fail("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        parallel.meet(torch.device("cpu"))


def test_what_ranks_agree_on_and_no_thread_of_gloo_outlives_them(tmp_path):
    """The clock is rank 0's, a wish to stop anybody's. A thread that still runs when Python ends
    may abort the process: seen once, after a run that was complete."""
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
agreed = parallel.agree(0.25 + parallel.RANK, parallel.RANK == 1)
began = threads()
parallel.leave()
sys.stdout.write(f"{{agreed}}, threads {{began > 0}} {{threads()}}\\n")
""")
    said, _ = (ranks := torchrun(2, script)).communicate(timeout=100)
    assert ranks.returncode == 0 and said.count("(0.25, True), threads True 0") == 2, said


def test_slips_and_lost_ranks_are_one_line(train, monkeypatch):
    def said_by(call, *args):
        with pytest.raises(SystemExit) as end:
            call(*args)
        assert "\n" not in str(end.value)
        return str(end.value)

    monkeypatch.setattr(parallel, "WORLD", 4)
    monkeypatch.setattr(parallel, "LOCAL_RANK", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "--nproc_per_node=2" in said_by(parallel.join, "auto")
    monkeypatch.setattr(train, "offload", True)
    assert "--offload=False" in said_by(module.check_settings)

    def lost(*args, **kwargs):
        raise RuntimeError("unhandled system error\nC++ trace")

    monkeypatch.setattr(parallel.dist, "all_reduce", lost)
    for call in (parallel.agree, 0.5, False), (parallel.all_reduce, [torch.zeros(3)]):
        said = said_by(*call)
        assert "rank 0" in said and "--init=resume" in said and "unhandled system error" in said

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(parallel.dist, "all_reduce", full)
    with pytest.raises(torch.OutOfMemoryError):  # safety.run() says what to do about it
        parallel.agree(0.5, False)


def test_alone_nothing_is_shared():
    assert parallel.agree(0.25, True) == (0.25, True)
    ones = [torch.ones(2)]
    parallel.all_reduce(ones)
    parallel.join("auto")
    assert torch.equal(ones[0], torch.ones(2)) and not parallel.dist.is_initialized()
