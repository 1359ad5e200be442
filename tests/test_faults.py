"""What a day may bring to train.py: kills, full disks, signals, damaged checkpoints."""

import errno
import math
import os
import pickle
import random
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import PIPES, ROOT, SMALL_MODEL, begin, command, new_run, put, result, wait_for
from forked import Forked
from torch.testing import assert_close

import train as module
from nanocram import glue, model_folder, runlog, talk
from nanocram.facts import read_facts


def start(out, data_dir, first="", **changes):
    settings = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out} | changes
    return begin("train.py", first=first, **settings)


def whole(out):
    """The state in a checkpoint, which can be read, as the model folder can."""
    model_folder.load(out)
    return torch.load(out / "ckpt.pt", weights_only=True)["state"]


@pytest.fixture
def run_of_3_steps(train, monkeypatch):
    """Its folder; train.main() would go on to nine steps."""
    put(monkeypatch, train, max_steps=3, samples="")
    train.main()
    # a resume may set the optimizer to the checkpoint's: put() takes that back
    put(monkeypatch, train, init="resume", max_steps=9, optimizer=train.optimizer)
    return Path(train.out_dir)


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path, data_dir):
    """A run that is killed 30 times ends as if it had not been: the same log, the same weights."""
    settings = {"init": "auto", "max_steps": 4000, "dropout": 0.1, "evals": 40}
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    ckpt = out / "ckpt.pt"
    rng, while_writing = random.Random(0), False
    for kill in range(30):
        before = ckpt.exists() and ckpt.stat().st_mtime
        process = start(out, data_dir, **settings, checkpoint_minutes=1e-9)
        if kill % 3 == 0:  # from the start of its life
            time.sleep(rng.uniform(0, 2))
        else:
            wait_for(lambda at=before: ckpt.exists() and ckpt.stat().st_mtime > at, process)
            time.sleep(rng.uniform(0, 0.9))  # while it trains, evaluates or saves
        if kill % 3 == 2:  # while a file is being written
            wait_for(lambda: any(out.glob("*.tmp")), process, 0)
        process.kill()
        process.end(-signal.SIGKILL)
        while_writing |= any(out.glob("*.tmp"))
        if ckpt.exists():
            whole(out)
    assert while_writing
    for folder in (out, undisturbed):
        start(folder, data_dir, **settings, checkpoint_minutes=0.0).end()
    assert {p.name for p in out.iterdir()} == {p.name for p in undisturbed.iterdir()}
    assert result(out) == result(undisturbed)


# The clock goes on at each look at it; in the end, behind the model folder, comes kill -9.
TICKS = """
import itertools, os
from nanocram import checkpoint, machine
ticks = itertools.count()
machine.now = lambda: next(ticks) / 10
"""
KILLED = """
save = checkpoint.save

def die_or_save(run, *where, **how):
    if run.state.finished_at:
        os.kill(os.getpid(), 9)
    save(run, *where, **how)

checkpoint.save = die_or_save
"""


def test_a_run_that_is_killed_in_its_last_save_makes_its_end_again(tmp_path, data_dir):
    """By the clock: behind the model folder, before the checkpoint."""
    out, settings = tmp_path / "out", {"budget_hours": 30 / 3600, "samples": "", "evals": 1}
    start(out, data_dir, TICKS + KILLED, **settings).end(-signal.SIGKILL)
    killed_at = whole(out)["step"]
    assert killed_at < runlog.read_log(out)[-1]["step"] == read_facts(out)["finished_at_step"]
    for hours, last in ((1 / 3600, killed_at), (30 / 3600, math.inf)):  # used up; and as it was
        settings |= {"init": "resume", "budget_hours": hours}
        start(out, data_dir, TICKS, **settings).end()
        state, line = whole(out), runlog.read_log(out)[-1]
        assert killed_at <= state["step"] == state["finished_at"] == line["step"] <= last
        assert "val_loss_15" in line
        kept = torch.load(out / "ckpt.pt", weights_only=True)["model"]
        assert_close(model_folder.load(out).state_dict(), kept, rtol=0, atol=0)


def test_a_full_disk(run_of_3_steps, train):
    """No file may pass 20 kB: what was there stands, the failure is one line, a resume works."""
    pytest.importorskip("resource", reason="there is none on Windows")
    out = run_of_3_steps
    before = {path: path.read_bytes() for path in (out / "ckpt.pt", out / "model.safetensors")}
    assert min(map(len, before.values())) > 20_000 > (out / "log.csv").stat().st_size
    settings = {name: getattr(train, name) for name in train.SETTINGS}
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    said = begin("train.py", first=full, **settings).end(1)
    assert "Traceback" not in said and f"WARNING: cannot save to {out}: " in said
    assert before == {path: path.read_bytes() for path in before} and not list(out.glob("*tmp*"))
    train.main()
    assert whole(out)["step"] == 9


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("call", ["os.fsync", "os.chmod", "fcntl.flock"])
def test_what_a_file_system_lacks_costs_nothing(train, monkeypatch, call, number):
    """A mounted bucket's, a network share's; the file of a lock is there from before."""
    pytest.importorskip("fcntl", reason="there is none on Windows")
    fail = Mock(side_effect=OSError(number, "made up"))
    monkeypatch.setattr(call, fail)
    out = Path(train.out_dir)
    out.with_name(f".{out.name}.lock").touch()
    put(monkeypatch, train, max_steps=2, samples="")
    train.main()
    assert whole(out)["step"] == 2 and (out / "README.md").exists()
    (out / ".glue.lock").touch()
    glue.add_runs(out)
    if call == "os.fsync":  # but where a disk fails
        fail.side_effect = OSError(errno.EIO, "made up")
        with pytest.raises(OSError, match="made up"):
            glue.add_runs(out)


@pytest.mark.parametrize("damage", ["", '{"settings": {', "[1]", '{"settings": 1}'])
def test_a_resume_keeps_what_it_cannot_read(run_of_3_steps, train, damage):
    """A run.json that is none; a log.csv with a note, or with decimal commas, but not a mark."""
    out, before = run_of_3_steps, runlog.read_log(run_of_3_steps)
    path, text = out / "log.csv", (out / "log.csv").read_text().strip() + ","
    sheet = (text.replace(",", ";").replace(".", ",") + "grün").encode("cp1252")
    (out / "run.json").write_text(damage)
    for content in (text.encode("utf-8-sig"), (text + "good\n").encode(), sheet):
        path.write_bytes(content)
        train.main()
        lines, number = runlog.read_log(out), len(list(out.glob("log.csv.*")))
        assert lines[: len(before)] == before or content == sheet
        train.max_steps += 1  # for the next resume
    assert number == 2 and (out / "log.csv.2").read_bytes() == sheet
    assert (out / "run.json.1").read_text() == damage
    assert read_facts(out)["finished_at_step"] == whole(out)["step"] == lines[-1]["step"] == 11


def test_a_closed_pipe_ends_no_run_and_two_never_write_one_folder(tmp_path, data_dir):
    """Whoever read the output is gone; a second run is refused, and SIGINT still saves."""
    out = tmp_path / "out"
    settings = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out, "max_steps": 100000}
    process = subprocess.Popen(command("train.py", **settings), **PIPES)
    try:
        wait_for((out / "ckpt.pt").exists, process)
        process.stdout.close()
        (tmp_path / "link").symlink_to(out)
        said = start(tmp_path / "link", data_dir, max_steps=3, init="resume").end(1)
        assert "another process writes to" in said.splitlines()[-1]
        reached = runlog.read_log(out)[-1]["step"]
        wait_for(lambda: runlog.read_log(out)[-1]["step"] >= reached + 20, process)
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        process.kill()
    assert whole(out)["step"] >= reached + 20


SIGNALLED = """
import ctypes, os, signal, threading
from nanocram import safety
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
signals = safety.Signals()
with signals:
    signal.raise_signal(signal.SIGHUP)
    assert not signals.stop
    signal.raise_signal(signal.SIGUSR1)  # sbatch --signal=USR1@60
    signal.raise_signal(signal.SIGTERM)
    assert signals.stop
    for seconds in (0.5, 3):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Timer(1, print, ("it lives",), {"flush": True}).start()
    ctypes.CDLL(None).sleep(60)  # a C call, in which Python handles no signal
"""


def test_signals():
    """nohup holds; of two signals, as torchrun sends, the second ends a run, but not at once."""
    pytest.importorskip("resource", reason="Windows has none of these signals")
    said = Forked(ROOT, SIGNALLED).end(-signal.SIGTERM)
    assert said.count("stopping") == 2 and said.endswith("it lives\n")


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("raise KeyboardInterrupt", "stopped: type it again"),
        ("open('nowhere')", "nowhere: No such file or directory; type it again"),
        ("raise RuntimeError('CUDA out of memory. Tried to')", "use a smaller model"),
        ("raise RuntimeError('a defect')", ""),
    ],
)
def test_errors_of_the_machine_are_one_line_and_bugs_keep_their_trace(what, line):
    code = "from nanocram import safety\n"
    code += f"def main():\n    {what}\nsafety.run(main, 'here', 'type it again')"
    said = Forked(ROOT, code).end(1).strip()
    assert said.endswith(line or "RuntimeError: a defect\ntype it again")
    assert ("Traceback" in said) == ("\n" in said) == (not line)


def test_what_no_resume_could_use_replaces_no_checkpoint(train, capsys):
    """Weights that are not finite, and what torch.load() refuses, of a fork's State."""
    run = new_run()
    log = talk.begin_log(run)
    assert module.save(run, log)
    before = (log.folder / "ckpt.pt").read_bytes()
    with pytest.raises(AttributeError):
        run.state.means = {}  # no field: it would not come back
    run.state.last = {"count": np.float64(1.5)}
    assert not module.save(run, log)
    assert "cannot be read again: Unsupported global" in capsys.readouterr().out
    run.state.last = {}
    run.model.decoder.bias.data[3] = float("nan")
    assert not module.save(run, log)
    assert "decoder.bias" in capsys.readouterr().out
    assert (log.folder / "ckpt.pt").read_bytes() == before


class Bomb:
    """What pickle makes into a call of os.mkdir()."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def refusal(folder, content):
    """What train.main() says of a folder with that ckpt.pt, bytes or a dict, in one line."""
    log = (folder / "log.csv").read_bytes()
    with open(folder / "ckpt.pt", "wb") as f:
        f.write(content) if isinstance(content, bytes) else torch.save(content, f)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert (folder / "log.csv").read_bytes() == log
    assert "ckpt.pt" in str(end.value) and "\n" not in str(end.value)
    return str(end.value)


def test_a_checkpoint_that_is_damaged_or_does_not_fit_is_one_line(run_of_3_steps, monkeypatch):
    """And executes nothing."""
    monkeypatch.chdir(run_of_3_steps)
    path = run_of_3_steps / "ckpt.pt"
    good, ckpt = path.read_bytes(), torch.load(path, weights_only=True)
    bomb = pickle.dumps(Bomb(), 2)
    weight = ckpt["model"]["decoder.weight"].numpy().tobytes()
    flipped = good.replace(weight, weight[:-1] + bytes([weight[-1] ^ 64]))  # a bit of an exponent
    assert flipped != good
    for content in (b"", {}, good[:1000], good[:-1000], flipped, bomb, ckpt | {"state": Bomb()}):
        assert "damaged" in refusal(run_of_3_steps, content)
    assert not Path("exploded").exists()
    pickle.loads(bomb)
    assert Path("exploded").exists()  # it would have
    for change in (
        {"model": ckpt["model"] | {"model.layers.1.attn.Wq.weight": torch.ones(3, 4)}},
        {"optimizers": ckpt["optimizers"][:1]},
        {"config": ckpt["config"] | {"n_layer": 3}},
        {"optimizer": "adamw"},  # which is taken over
    ):
        assert "does not fit" in refusal(run_of_3_steps, ckpt | change)
    assert "--data_dir" in refusal(run_of_3_steps, ckpt | {"data": "0"})
