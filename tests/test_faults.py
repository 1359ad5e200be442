"""What a day may bring to train.py: kills, full disks, signals, damaged checkpoints.

The long ones: python -m pytest -m slow -s tests/test_faults.py
"""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, new_log, new_run, put
from safetensors.torch import load_file

import train as module
from nanocram import model_folder, runlog


def start(out, data_dir, preexec_fn=None, **changes):
    """train.py as a process of its own."""
    flags = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out} | changes
    flags = [f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, preexec_fn=preexec_fn, **streams)


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def whole(out):
    """The state in a checkpoint, which can be read, as the model folder can."""
    model_folder.load(out)
    return torch.load(out / "ckpt.pt", weights_only=True)["state"]


@pytest.fixture(scope="module")
def run_of_3_steps(tmp_path_factory, data_dir):
    """Its folder."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        folders = {"data_dir": str(data_dir), "out_dir": str(out)}
        put(patch, module, **(SMALL_MODEL | folders | {"max_steps": 3, "samples": ""}))
        module.main()
    return out


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path, data_dir):
    """A run that is killed 30 times ends as if it had not been: the same log, the same weights."""
    settings = {"max_steps": 400, "dropout": 0.1, "checkpoint_minutes": 1e-9, "evals": 40}
    last = settings | {"checkpoint_minutes": 0.0}
    undisturbed = start(tmp_path / "undisturbed", data_dir, **last)
    assert undisturbed.wait(600) == 0, undisturbed.communicate()[0]
    out, rng, kills, while_writing = tmp_path / "out", random.Random(0), 0, 0

    def last_save():
        return (out / "ckpt.pt").stat().st_mtime_ns if (out / "ckpt.pt").exists() else 0

    while kills < 30:
        before = last_save()
        process = start(out, data_dir, init="resume" if before else "scratch", **settings)
        if kills % 3 == 0:  # from the start of its life, imports and all
            time.sleep(rng.uniform(0, 5))
        else:
            while process.poll() is None and last_save() in (0, before):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.9))  # while it trains, evaluates or saves
            while kills % 3 == 2 and process.poll() is None and not any(out.glob("*.tmp")):
                pass  # while a file is being written
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
        kills += 1
        while_writing += any(out.glob("*.tmp"))
        if (out / "ckpt.pt").exists():
            whole(out)
    assert while_writing
    process = start(out, data_dir, init="resume", **last)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert {p.name for p in out.iterdir()} == {p.name for p in (tmp_path / "undisturbed").iterdir()}
    rows, others = (
        [{**row, "elapsed_s": 0} for row in runlog.read_log(folder)]
        for folder in (out, tmp_path / "undisturbed")
    )
    assert rows == others
    a, b = (load_file(o / "model.safetensors") for o in (out, tmp_path / "undisturbed"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    print(f"\n{kills} kills, {while_writing} of them while a file was being written")


def test_a_full_disk(run_of_3_steps, train, monkeypatch, data_dir):
    """Files may not grow beyond 20 kB: what was there stands, each failure is one line, and the run
    can go on later."""
    resource = pytest.importorskip("resource", reason="there is none on Windows")
    out = Path(train.out_dir)
    shutil.copytree(run_of_3_steps, out)
    large = [p for p in out.iterdir() if p.suffix in (".pt", ".safetensors", ".png")]
    before = {path: path.read_bytes() for path in large}
    assert min(map(len, before.values())) > 20_000 > (out / "log.csv").stat().st_size

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    full = start(out, data_dir, limit, max_steps=9, init="resume", samples="")
    said, _ = full.communicate(timeout=200)
    assert full.returncode == 1 and "Traceback" not in said, said
    assert str(out) in next(line for line in said.splitlines() if line.startswith("WARNING"))
    assert before == {path: path.read_bytes() for path in large} and not list(out.glob("*tmp*"))
    put(monkeypatch, train, max_steps=9, init="resume", samples="")
    train.main()
    assert whole(out)["step"] == 9


def test_a_closed_pipe_ends_no_run_and_two_never_write_one_folder(tmp_path, data_dir):
    """Whoever read the output is gone: the run goes on, a second one is refused, and SIGINT still
    saves."""
    out = tmp_path / "out"
    process = start(out, data_dir, max_steps=100000)
    try:
        wait_for(out / "ckpt.pt", process)
        process.stdout.close()
        link = tmp_path / "link"
        link.symlink_to(out)
        second = start(link, data_dir, max_steps=3, init="resume")
        said, _ = second.communicate(timeout=200)
        assert second.returncode == 1 and "another process writes to" in said.splitlines()[-1]
        reached = runlog.read_log(out)[-1]["step"]
        end = time.monotonic() + 120
        while runlog.read_log(out)[-1]["step"] < reached + 20 and time.monotonic() < end:
            time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
    assert whole(out)["step"] >= reached + 20


WAITER = """
import time
from nanocram import safety
with safety.Signals():
    print("ready", flush=True)
    time.sleep(600)
"""


def waiter(*wrapper):
    """A process that says a line on stderr at each signal that it heeds."""
    command = [*wrapper, sys.executable, "-c", WAITER]
    options = {"cwd": ROOT, "text": True, "stdin": subprocess.DEVNULL}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Not what pytest may have from a nohup of its own.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, **options)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_signal_ends_a_run_but_not_at_once():
    """A batch system and torchrun may both send one; a user who is out of patience comes later."""
    process = waiter()
    try:
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        end = time.monotonic() + 60  # it takes two seconds to heed another one
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.returncode == -signal.SIGTERM
    finally:
        process.kill()


def test_nohup_keeps_a_closed_terminal_from_ending_a_run():
    process = waiter("nohup")
    try:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
    finally:
        process.kill()


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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.strip()
    assert said.endswith(line or "RuntimeError: a defect\ntype it again")
    assert ("Traceback" in said) == (not line) and ("\n" in said) == (not line)


def test_weights_that_are_not_finite_replace_no_checkpoint(train, capsys):
    run = new_run()
    log = new_log(run)
    assert module.save(run, log)
    before = (log.folder / "ckpt.pt").read_bytes()
    run.model.decoder.bias.data[3] = float("nan")
    assert not module.save(run, log)
    assert "decoder.bias" in capsys.readouterr().out
    assert (log.folder / "ckpt.pt").read_bytes() == before


# Checkpoints that are damaged or made to harm


class Bomb:
    """What pickle makes into a call of os.mkdir()."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def resumed(train, monkeypatch, run_of_3_steps):
    """resumed(change): train.py goes on from ckpt.pt after change(its content) or as those bytes;
    what it says in refusal, '' if it does not."""
    out = Path(train.out_dir)
    shutil.copytree(run_of_3_steps, out)
    # a resume may set the optimizer to the checkpoint's: put() takes that back
    put(monkeypatch, train, init="resume", max_steps=5, samples="", optimizer=train.optimizer)

    def resume(change=None, content=b""):
        path = out / "ckpt.pt"
        if change:
            ckpt = torch.load(run_of_3_steps / "ckpt.pt", weights_only=True)
            change(ckpt)
            torch.save(ckpt, path)
        else:
            path.write_bytes(content)
        try:
            train.main()
        except SystemExit as end:
            assert (out / "log.csv").read_bytes() == (run_of_3_steps / "log.csv").read_bytes()
            assert "ckpt.pt" in str(end) and "\n" not in str(end)
            return str(end)
        return ""

    return resume


NAME = "model.layers.1.attn.Wq.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["model"].update({NAME: torch.ones(3, 4)}), "does not fit"),
        (lambda c: c["optimizers"].pop(), "does not fit"),
        (lambda c: c.update(data="0"), "--data_dir"),
        (lambda c: c["config"].update(n_layer=3), "does not fit"),
        (lambda c: c.update(optimizer="adamw"), "does not fit"),
        (lambda c: c.clear(), "damaged"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(resumed, change, named):
    assert named in resumed(change)


def test_a_damaged_checkpoint_is_one_line_and_executes_nothing(resumed, run_of_3_steps, tmp_path):
    good = (run_of_3_steps / "ckpt.pt").read_bytes()
    bomb = Bomb(tmp_path / "exploded")
    for content in (b"", good[:1000], good[:-1000], pickle.dumps(bomb, 2)):
        assert "damaged" in resumed(content=content)
    assert "damaged" in resumed(lambda ckpt: ckpt.update(state=bomb))
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(bomb, 2))
    assert (tmp_path / "exploded").exists()  # it would have
