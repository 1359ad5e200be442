"""Every call of train.py that changes a file is disturbed once, one run for each; nothing is lost.

The idea is SQLite's (sqlite.org/testing.html, "I/O error testing" and "crash testing"):
failing_io.c stands before libc. It takes an hour, and prints a table:

    nice python -m pytest -m slow -s tests/test_failing_io.py
"""

import ctypes
import errno
import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_MODEL

from nanocram import machine, model_folder, runlog
from nanocram.tokenizer import Tokenizer

is_possible = sys.platform == "linux" and shutil.which("cc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible, reason="needs Linux and a C compiler"),
]

COUNT, ONCE, FULL, BEFORE, TORN, HALF, READING = range(7)  # as in failing_io.c
CHANGES, GROWS, READS = range(3)
MODES = {
    "EIO once": (ONCE, errno.EIO),
    "ENOSPC from then on": (FULL, errno.ENOSPC),
    "half a write, then ENOSPC": (HALF, errno.ENOSPC),
    "ended before it": (BEFORE, 0),
    "ended in the middle of a write": (TORN, 0),
}
ENDED = 99  # the exit status of a process that failing_io.c ended
# saves at 0, 1 and 12
FLAGS = {"n_layer": 1, "n_embd": 16, "max_steps": 12, "checkpoint_minutes": 0.0, "log_every": 3}


# train.py runs in forks of one process that has imported all it needs: an import takes seconds.


def serve():
    """Run jobs, a line of JSON each, in forks of this process; print the exit status of each."""
    import matplotlib.figure
    import matplotlib.image
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401

    # what takes time and writes nothing: the machine's rate, and what a picture shows
    machine.matmul_rate = lambda *where: 1e12
    noise = np.random.default_rng(0).random((40, 40, 3))
    figure = MagicMock()
    figure.subplots.return_value = MagicMock(), MagicMock()
    figure.savefig = lambda path, format: matplotlib.image.imsave(path, noise, format=format)
    matplotlib.figure.Figure = lambda **options: figure
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            run_script(**job)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def run_script(flags, said, log, folder, mode, error, n):
    """Run train.py as the interpreter would, and end this process."""
    for fd in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    ctypes.CDLL(None).failing_io(folder.encode(), mode, error, ctypes.c_long(n), log)
    sys.argv = ["train.py", *flags]
    status = 0
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as e:
        status = e.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process of serve() with failing_io.c before libc."""
    library = tmp_path_factory.mktemp("library") / "failing_io.so"
    command = ["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests/failing_io.c", "-ldl"]
    subprocess.run(command, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import test_failing_io; test_failing_io.serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    process = subprocess.Popen(command, cwd=ROOT / "tests", env=environment, **pipes)
    yield process
    process.stdin.close()
    process.wait(60)


@dataclass
class Call:
    name: str
    kind: int
    size: int
    path: str


@dataclass
class Train:
    """Runs of train.py in root/out, where an earlier run is."""

    server: subprocess.Popen
    flags: dict
    earlier: str  # the folder of that run, which is moved aside or resumed
    resume: bool = False

    def begin(self, root):
        shutil.copytree(self.earlier, root / "out")

    def run(self, root, mode=COUNT, error=0, n=0, where="", again=False):
        """Its n-th call below `where` is disturbed: (status, what it said, its calls)."""
        said, log = root.with_name(f"{root.name}.said"), root.with_name(f"{root.name}.calls")
        said.unlink(missing_ok=True)
        resume = self.resume
        if again:  # as a user would go on
            resume |= (root / "out.1").exists() and (root / "out/ckpt.pt").exists()
        flags = self.flags | {"out_dir": root / "out", "init": "resume" if resume else "scratch"}
        job = {"flags": [f"--{k}={v}" for k, v in flags.items()], "said": str(said)}
        job |= {"log": str(log), "folder": str(where or root), "mode": mode, "error": error, "n": n}
        print(json.dumps(job), file=self.server.stdin)
        status = int(self.server.stdout.readline())
        calls = [line.split(" ", 3) for line in log.read_text().splitlines()]
        calls = [Call(name, int(kind), int(size), path) for name, kind, size, path in calls]
        return status, said.read_text(errors="replace"), calls

    def check(self, root):
        """The earlier run is all there, aside or not yet; every file of the new one is whole."""
        aside, out = root / "out.1", root / "out"
        if not self.resume:
            assert files(aside if aside.exists() else out) == files(self.earlier)
        if (aside.exists() or self.resume) and out.exists():
            check_run(out)

    def result(self, root):
        """What must be equal, whatever happened on the way."""
        out = root / "out"
        checkpoint = torch.load(out / "ckpt.pt", weights_only=True)
        state = checkpoint["state"]
        for name in [n for n in state if n == "elapsed" or n.endswith("seconds")]:
            del state[name]
        for optimizer in checkpoint["optimizers"]:
            del optimizer["param_groups"]  # rates that the next step sets
        assert "12 steps" in (out / "README.md").read_text()
        return {
            "log": [{**row, "elapsed_s": 0} for row in runlog.read_log(out)],
            "checkpoint": flat(checkpoint),
            "weights": (out / "model.safetensors").read_bytes(),
            "in": sorted(files(out)),
        }


def files(folder):
    """{name: bytes} of all files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flat(value, path=""):
    """{path: leaf} of nested dicts and lists; tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return {path: value.contiguous().numpy().tobytes()}
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value}


def check_run(out):
    """Every file of a run that is there is whole."""
    from matplotlib.image import imread

    readers = {
        "ckpt.pt": lambda path: torch.load(path, weights_only=True)["state"],
        "model.safetensors": lambda path: model_folder.load(out),
        "config.json": lambda path: json.loads(path.read_text())["nanocram"],
        "run.json": lambda path: json.loads(path.read_text())["settings"],
        "tokenizer.json": Tokenizer,
        "tokenizer_config.json": lambda path: json.loads(path.read_text()),
        "loss.png": imread,
        "README.md": lambda path: path.read_text().split("---")[2],
        "log.csv": lambda path: runlog.read_log(out),
    }
    for name, read in readers.items():
        if (out / name).exists():
            read(out / name)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, server, data_dir):
    """A Train that begins anew, where a run of three steps is."""
    root = tmp_path_factory.mktemp("earlier")
    flags = SMALL_MODEL | FLAGS | {"data_dir": data_dir, "dropout": 0.1}
    first = Train(server, flags | {"max_steps": 3, "seed": 7}, "")
    status, said, _ = first.run(root)
    assert status == 0, said
    return Train(server, flags, root / "out")


def undisturbed(subject, root, **how):
    """(the calls, the result) of a run without faults."""
    root.mkdir()
    subject.begin(root)
    status, said, calls = subject.run(root, **how)
    assert status == 0, said
    subject.check(root)
    return calls, subject.result(root)


def trial(subject, wanted, root, mode, error, n, where=""):
    """One run with its n-th call disturbed and one after it; the exit status of the first."""
    root.mkdir()
    subject.begin(root)
    status, said, calls = subject.run(root, mode, error, n, where)
    assert len(calls) >= n, said
    told = f"{calls[n - 1]}\n{said}"
    assert "Traceback" not in said, told
    subject.check(root)
    if mode in (BEFORE, TORN):
        assert status == ENDED, told
    else:
        why = [line for line in said.splitlines() if os.strerror(error) in line]
        is_warned = any(line.startswith("WARNING") for line in why)
        did_not_matter = status == 0 and subject.result(root) == wanted
        is_last_line = status == 1 and said.splitlines()[-1:] == why
        assert status in (0, 1) and (is_warned or did_not_matter or is_last_line), told
    again, then, _ = subject.run(root, again=True)
    told = f"{told}\nthen:\n{then}"
    assert again == 0 and "Traceback" not in then, told
    subject.check(root)
    result = subject.result(root)
    assert [key for key in wanted if result[key] != wanted[key]] == [], told
    shutil.rmtree(root)
    return status


def applies(mode, call):
    """Whether a call can be disturbed so: room and halves are for those that write."""
    if mode == FULL:
        return call.kind == GROWS
    if mode in (HALF, TORN):
        return call.kind == GROWS and call.size > 1
    return True


def test_a_file_is_on_the_disk_before_it_has_its_name(fresh, tmp_path):
    """All of its bytes are written in sight of failing_io.c and synced, then it is renamed."""
    calls, _ = undisturbed(fresh, tmp_path / "whole")
    written, synced = Counter(), set()
    for call in calls:
        path = call.path
        if call.name in ("write", "pwrite", "pwrite64", "writev"):
            written[path] += call.size
            synced.discard(path)
        elif call.name == "open" and call.size:
            written[path] = 0
        elif call.name == "fsync":
            # zipfile writes a header twice; safetensors gives a file its name out of sight
            assert written[path] >= call.size or "model.safetensors" in path, call
            synced.add(path)
        elif call.name == "rename" and path.endswith(".tmp"):
            assert path in synced, call
    names = {path.rsplit("/", 1)[1].removesuffix(".tmp") for path in written.keys() - synced}
    names = {name for name in names if not name.startswith(".tmp")}  # of safetensors
    assert names <= {"log.csv"}  # it is appended to


@pytest.mark.parametrize("way", MODES)
def test_every_call_fails(fresh, tmp_path, way):
    mode, error = MODES[way]
    calls, wanted = undisturbed(fresh, tmp_path / "whole")
    ends, losses = Counter(), []
    for n, call in enumerate(calls, 1):
        if not applies(mode, call):
            continue
        root = tmp_path / f"{n}"
        try:
            ends[trial(fresh, wanted, root, mode, error, n)] += 1
        except Exception as e:  # on to the next: the line below counts them
            losses.append(f"{n}: {type(e).__name__} {e}")
            shutil.rmtree(root)
    counts = f"{ends[0]} went on, {ends[1]} one line, {ends[ENDED]} ended, {len(losses)} lost"
    print(f"\n{way}: {len(calls)} calls, {counts}", flush=True)
    assert not losses, "\n\n".join(losses)


def test_a_checkpoint_that_cannot_be_read_is_one_line(fresh, tmp_path):
    """Any read of it fails; the same command then goes on, and ends equal."""
    subject = Train(fresh.server, fresh.flags | {"seed": 7}, fresh.earlier, resume=True)
    root = tmp_path / "whole"
    calls, wanted = undisturbed(subject, root, mode=READING, where=root / "out/ckpt.pt")
    assert calls
    for n in range(1, len(calls) + 1):
        root = tmp_path / f"{n}"
        trial(subject, wanted, root, READING, errno.EIO, n, root / "out/ckpt.pt")
