"""What several test files share: a small data set made by prepare.py from the embedded corpus, and running scripts."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need a network

SMALL_DATA = {"vocab_size": 600, "filter_ratio": 0.0, "val_share": 0.2}
SMALL_MODEL = {
    "vocab_size": 600, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 48, "micro_batch": 8, "batch_size": 16,
    "batch_start": 8, "eval_rows": 24, "evals": 2, "compile": False, "dtype": "float32", "log_every": 2,
    "samples": "once upon a [MASK].",
}  # fmt: skip


def script(name, *args, cwd=ROOT, **settings):
    """Run a script of ours as a user would; the finished process, with stdout and stderr together as .stdout."""
    flags = [f"--{k}={v}" for k, v in settings.items()]
    command = [sys.executable, str(ROOT / name), *map(str, args), *flags]
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def last_line(process):
    return process.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def texts():
    """The documents of the embedded corpus."""
    with gzip.open(ROOT / "data/sample.txt.gz", "rt", encoding="utf-8") as f:
        return [text.strip("\n") for text in f.read().split("\n\n")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    """A text file with 40 short documents of real prose."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(text[:4000] for text in texts[:40]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory, corpus):
    """A finished data set of corpus."""
    folder = tmp_path_factory.mktemp("data") / "small"
    done = script("prepare.py", source=corpus, data_dir=folder, **SMALL_DATA)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def train(monkeypatch, data_dir, tmp_path):
    """The train module with the settings of a small run; set others with monkeypatch.setattr."""
    import train

    for name, value in (SMALL_MODEL | {"data_dir": str(data_dir), "out_dir": str(tmp_path / "out")}).items():
        assert hasattr(train, name)
        monkeypatch.setattr(train, name, value)
    return train
