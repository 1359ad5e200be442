"""Every call that changes a file is disturbed once, one run for each, and nothing is lost.

The idea is SQLite's (sqlite.org/testing.html, "I/O error testing" and "crash testing"). Three
scripts run with failing_io.c before libc. All of it, with the table of results/README.md:

    nice python -m pytest -m slow -s tests/test_failing_io.py
"""

import ctypes
import errno
import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_MODEL

from nanocram import glue, machine, model_folder, record
from nanocram.data import load_meta
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
TINY_MODEL = {"n_layer": 1, "n_embd": 16, "dropout": 0.1}
ENDED = 99  # the exit status of a process that failing_io.c ended


# The scripts run in forks of one process that has imported all they need: an import takes seconds.


def serve():
    """Run jobs, a line of JSON each, in forks of this process; print the exit status of each."""
    import matplotlib.figure
    import matplotlib.image
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401

    # What takes time and writes nothing: the machine's rate, and what a picture shows.
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


def run_script(name, flags, said, log, folder, mode, error, n):
    """Run a script of ours as the interpreter would, and end this process."""
    for fd in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    ctypes.CDLL(None).failing_io(folder.encode(), mode, error, ctypes.c_long(n), log)
    sys.argv = [name, *flags]
    status = 0
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
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


def run(server, root, name, flags, mode=COUNT, error=0, n=0, where=""):
    """Run a script, its n-th call below `where` disturbed: (status, what it said, its calls)."""
    said, log = root.with_name(f"{root.name}.said"), root.with_name(f"{root.name}.calls")
    said.unlink(missing_ok=True)
    job = {"name": name, "flags": [f"--{k}={v}" for k, v in flags.items()]}
    job |= {"said": str(said), "log": str(log), "folder": str(where or root)}
    print(json.dumps(job | {"mode": mode, "error": error, "n": n}), file=server.stdin)
    status = int(server.stdout.readline())
    calls = [line.split(" ", 3) for line in log.read_text().splitlines()]
    calls = [Call(name, int(kind), int(size), path) for name, kind, size, path in calls]
    return status, said.read_text(errors="replace"), calls


# The subjects: each begins with something of an earlier run in its folder.


def files(folder):
    """{path: bytes} of all files below a folder, but for locks."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class Prepare:
    """prepare.py, with another data set beside, and what a killed run left."""

    script = "prepare.py"

    def __init__(self, data_dir, corpus, **unused):
        self.data_dir = data_dir
        self.flags = {"source": corpus, "vocab_size": 400, "seq_len": 1024, "filter_ratio": 0.0}
        self.flags |= {"val_share": 0.2, "threads": 1}

    def begin(self, root):
        shutil.copytree(self.data_dir, root / "earlier")
        (root / "data.partial").mkdir()
        (root / "data.partial/tokenizer.json").write_text("{")
        (root / "data.partial/bucket-007").write_text("rows")

    def command(self, root):
        return self.flags | {"data_dir": root / "data"}

    def again(self, root):
        return self.command(root)

    def earlier(self, root):
        return files(root / "earlier")

    def check(self, root):
        if (root / "data").exists():
            load_meta(root / "data")

    def result(self, root):
        return files(root / "data")


class Train:
    """train.py for 12 steps with saves at 0, 1 and 12, in the folder of an earlier run."""

    script = "train.py"

    def __init__(self, data_dir, finished, **unused):
        self.finished = finished
        self.flags = SMALL_MODEL | {"data_dir": data_dir, "max_steps": 12, "dropout": 0.1}
        self.flags |= TINY_MODEL | {"checkpoint_minutes": 0.0, "log_every": 3}

    def begin(self, root):
        shutil.copytree(self.finished, root / "out")

    def command(self, root):
        return self.flags | {"out_dir": root / "out"}

    def again(self, root):
        began = (root / "out.1").exists()
        resumable = began and (root / "out/ckpt.pt").exists()
        return self.command(root) | {"init": "resume" if resumable else "scratch"}

    def earlier(self, root):
        aside = root / "out.1"
        return files(aside if aside.exists() else root / "out")

    def check(self, root):
        out = root / "out"
        if (root / "out.1").exists() and out.exists():
            check_run(out)

    def result(self, root):
        out = root / "out"
        checkpoint = torch.load(out / "ckpt.pt", weights_only=True)
        del checkpoint["state"]["elapsed"]
        for name in [name for name in checkpoint["state"] if name.endswith("seconds")]:
            del checkpoint["state"][name]
        rows = [row | {"elapsed_s": 0} for row in record.read_log(out)]
        assert "12 steps" in (out / "README.md").read_text()
        weights = (out / "model.safetensors").read_bytes()
        return {
            "log": rows,
            "checkpoint": flat(checkpoint),
            "weights": weights,
            "in": [*files(out)],
        }


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
        "log.csv": lambda path: record.read_log(out),
    }
    for name, read in readers.items():
        if (out / name).exists():
            read(out / name)


class FineTune:
    """finetune_glue.py: one epoch of CoLA's 40 rows, its classifier kept, after RTE was done."""

    script = "finetune_glue.py"

    def __init__(self, fine_tuned, glue_flags, **unused):
        self.fine_tuned = fine_tuned
        self.flags = glue_flags | {"tasks": "cola"}

    def begin(self, root):
        shutil.copytree(self.fine_tuned, root / "model")

    def command(self, root):
        return self.flags | {"model": root / "model"}

    def again(self, root):
        return self.command(root)

    def earlier(self, root):
        found = files(root / "model")
        kept = {name for name in files(self.fine_tuned) if not name.startswith("glue.")}
        runs = [run for run in glue.read_runs(root / "model") if run["task"] == "rte"]
        return {name: found.get(name) for name in kept - {"README.md"}} | {"rte": runs}

    def check(self, root):
        model = root / "model"
        check_run(model)
        if (model / "cola").exists():
            check_run(model / "cola")
        assert (model / "glue.md").read_text().startswith("# GLUE")

    def result(self, root):
        found = files(root / "model")
        del found["glue.jsonl"]  # it has a line for each attempt
        found["glue.md"] = re.sub(rb"\d+-\d+-\d+ on", b"on", found["glue.md"])
        runs = {run["task"]: run for run in glue.read_runs(root / "model")}
        for run in runs.values():
            for name in ("seconds", "rows_per_second", "date", "commit"):
                del run[name]
        return found | runs


SUBJECTS = {"prepare.py": Prepare, "train.py": Train, "finetune_glue.py": FineTune}


@pytest.fixture(scope="module")
def parts(tmp_path_factory, server, texts, data_dir, glue_files):
    """What the subjects begin with, by the names of their arguments."""
    root = tmp_path_factory.mktemp("parts")
    corpus = root / "corpus.txt"
    corpus.write_text("\n\n".join(text[:1000] for text in texts[:40]), encoding="utf-8")
    flags = SMALL_MODEL | TINY_MODEL | {"data_dir": data_dir, "out_dir": root / "model"}
    status, said, _ = run(server, root, "train.py", flags | {"max_steps": 3, "seed": 7})
    assert status == 0, said
    fine_tuned = shutil.copytree(root / "model", root / "fine_tuned/model")
    glue_flags = {"glue_dir": glue_files[0], "seeds": 1, "epochs": 1, "glue_batch": 8}
    glue_flags |= {"dtype": "float32", "save_models": True}
    flags = glue_flags | {"model": fine_tuned, "tasks": "rte"}
    status, said, _ = run(server, root, "finetune_glue.py", flags)
    assert status == 0, said
    found = {"data_dir": data_dir, "corpus": corpus, "finished": root / "model"}
    return found | {"fine_tuned": fine_tuned, "glue_flags": glue_flags}


@dataclass
class Undisturbed:
    calls: list
    result: dict
    earlier: dict


def undisturbed(server, subject, root, where="", mode=COUNT):
    """What a run without faults does and leaves."""
    root.mkdir()
    subject.begin(root)
    earlier = subject.earlier(root)
    command = subject.command(root)
    status, said, calls = run(server, root, subject.script, command, mode, where=where)
    assert status == 0, said
    assert subject.earlier(root) == earlier
    return Undisturbed(calls, subject.result(root), earlier)


def trial(server, subject, whole, root, mode, error, n, where=""):
    """One run with its n-th call disturbed and one after it; the exit status of the first."""
    root.mkdir()
    subject.begin(root)
    command = subject.command(root)
    status, said, calls = run(server, root, subject.script, command, mode, error, n, where)
    assert len(calls) >= n, said
    told = f"{calls[n - 1]}\n{said}"
    assert "Traceback" not in said, told
    assert subject.earlier(root) == whole.earlier, told
    subject.check(root)
    if mode in (BEFORE, TORN):
        assert status == ENDED, told
    else:
        why = [line for line in said.splitlines() if os.strerror(error) in line]
        is_warned = any(line.startswith("WARNING") for line in why)
        did_not_matter = status == 0 and subject.result(root) == whole.result
        is_last_line = status == 1 and why == said.splitlines()[-1:]
        assert status in (0, 1), told
        assert is_warned or did_not_matter or is_last_line, told

    again, then, _ = run(server, root, subject.script, subject.again(root))
    told = f"{told}\nthen:\n{then}"
    assert again == 0 and "Traceback" not in then, told
    assert subject.earlier(root) == whole.earlier, told
    result = subject.result(root)
    wrong = [key for key in {**result, **whole.result} if result.get(key) != whole.result.get(key)]
    assert not wrong, f"{wrong}: {told}"
    shutil.rmtree(root)
    return status


def applies(mode, call):
    """Whether a call can be disturbed so: room and halves are for those that write."""
    if mode == FULL:
        return call.kind == GROWS
    if mode in (HALF, TORN):
        return call.kind == GROWS and call.size > 1
    return True


@pytest.fixture(scope="module", params=SUBJECTS)
def pair(request, server, parts, tmp_path_factory):
    """(a subject, its undisturbed run)."""
    subject = SUBJECTS[request.param](**parts)
    return subject, undisturbed(server, subject, tmp_path_factory.mktemp("pair") / "whole")


def test_a_file_is_on_the_disk_before_it_has_its_name(pair):
    """All of its bytes are written in sight of failing_io.c and synced, then it is renamed."""
    written, synced = Counter(), set()
    for call in pair[1].calls:
        path = call.path
        if call.name in ("write", "pwrite", "pwrite64", "writev"):
            written[path] += call.size
            synced.discard(path)
        elif call.name == "open" and call.size:
            written[path] = 0
        elif call.name == "fsync":
            assert written[path] >= call.size, call  # zipfile writes a header twice
            synced.add(path)
        elif call.name == "unlink":
            written.pop(path, None)
        elif call.name == "rename":
            moved = {p for p in written if p == path or p.startswith(f"{path}/")}
            assert moved <= synced, call
    names = {path.rsplit("/", 1)[1].removesuffix(".tmp") for path in written.keys() - synced}
    assert names <= {"log.csv", "glue.jsonl"}  # these are appended to


def test_every_call_fails(server, pair, tmp_path):
    """Every one, in every way; prints the lines of the table."""
    subject, whole = pair
    losses = []
    print(f"\n| {subject.script} | calls | runs | went on | one line | ended | losses | seconds |")
    for way, (mode, error) in MODES.items():
        start = time.monotonic()
        ends = Counter()
        for n, call in enumerate(whole.calls, 1):
            if not applies(mode, call):
                continue
            root = tmp_path / f"{mode}-{n}"
            try:
                ends[trial(server, subject, whole, root, mode, error, n)] += 1
            except Exception as e:  # on to the next: the table counts them
                ends["lost"] += 1
                losses.append(f"{way}, {n}: {type(e).__name__} {e}")
                shutil.rmtree(root)
        counts = [len(whole.calls), ends.total(), ends[0], ends[1], ends[ENDED], ends["lost"]]
        cells = [way, *counts, round(time.monotonic() - start)]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    assert not losses, "\n\n".join(losses)


class Resume(Train):
    """train.py that goes on from the checkpoint of the earlier run, after 3 steps."""

    def command(self, root):
        return super().command(root) | {"init": "resume", "seed": 7}

    def again(self, root):
        return self.command(root)

    def earlier(self, root):
        return {}

    def check(self, root):
        check_run(root / "out")


READ = [(Train, "data/train.bin"), (Resume, "out/ckpt.pt"), (FineTune, "glue/CoLA/train.tsv")]


@pytest.mark.parametrize(("kind", "file"), READ)
def test_a_disk_that_cannot_be_read_is_one_line(server, parts, tmp_path, kind, file):
    """Any read of a file fails; the script then goes on, and ends equal."""
    parts = dict(parts)
    parts["data_dir"] = shutil.copytree(parts["data_dir"], tmp_path / "data")
    glue_dir = shutil.copytree(parts["glue_flags"]["glue_dir"], tmp_path / "glue")
    parts["glue_flags"] = parts["glue_flags"] | {"glue_dir": glue_dir}
    subject = kind(**parts)

    def place(root):
        return (root if kind == Resume else tmp_path) / file

    root = tmp_path / "whole"
    whole = undisturbed(server, subject, root, place(root), READING)
    print(f"\n{file}: {len(whole.calls)} reads")
    for n in range(1, len(whole.calls) + 1):
        root = tmp_path / f"{n}"
        trial(server, subject, whole, root, READING, errno.EIO, n, place(root))
