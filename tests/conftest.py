"""What several test files share: a small data set, small runs of train.py, a small GLUE."""

import gzip
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need a network
# A shell's script ignores SIGINT in what it starts in its background, and so would our children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor a GPU: where there is one, they run on the CPU beside it. test_gpu.py shows it again to the
# processes that it starts.
if "GPUS_BEFORE_TESTS" not in os.environ:
    os.environ["GPUS_BEFORE_TESTS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Busy threads of one process beside those of another are 30 times as slow.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from nanocram import machine, runlog

PLOT = runlog.plot
SMALL_DATA = {"vocab_size": 600, "filter_ratio": 0.0, "val_share": 0.2}
SMALL_MODEL = {
    "vocab_size": 600,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_inner": 48,
    "micro_batch": 8,
    "batch_size": 16,
    "batch_start": 8,
    "eval_rows": 24,
    "evals": 2,
    "compile": False,
    "dtype": "float32",
    "log_every": 2,
    "samples": "once upon a [MASK].",
}


def script(name, *args, cwd=ROOT, **settings):
    """Run a script of ours as a user would; the process, stdout and stderr together as .stdout."""
    flags = [f"--{k}={v}" for k, v in settings.items()]
    command = [sys.executable, str(ROOT / name), *map(str, args), *flags]
    return subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


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
    """The train module with the settings of a small run; set others with put()."""
    import train

    # Seconds of work, and many of them in bfloat16 where that is not native.
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)
    # Most of a small save: who looks at loss.png puts PLOT back.
    monkeypatch.setattr(runlog, "plot", lambda folder: None)
    folders = {"data_dir": str(data_dir), "out_dir": str(tmp_path / "out")}
    put(monkeypatch, train, **(SMALL_MODEL | folders))
    return train


def put(monkeypatch, module, **settings):
    """Set globals of a script; each must be there."""
    for name, value in settings.items():
        assert hasattr(module, name), name
        monkeypatch.setattr(module, name, value)


def model_config(**changes):
    """A ModelConfig of train.py's settings, but for changes."""
    import train

    return replace(train.model_config(), **changes)


def new_run(amp_dtype=torch.float32):
    """A Run of train.py as it is set, on the CPU."""
    import train
    from nanocram.data import Rows, load_meta
    from nanocram.tokenizer import Tokenizer

    folder = Path(train.data_dir)
    rows = Rows(folder / "train.bin", train.seq_len)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    return train.Run(rows, load_meta(folder), tokenizer, torch.device("cpu"), amp_dtype)


def any_words(vocab_size):
    """What a rule of masking may ask a Run for, where every entry begins a word."""
    return SimpleNamespace(begins_word=torch.ones(vocab_size, dtype=torch.bool))


def new_log(run):
    """The runlog.Log of a run, in out_dir."""
    import train

    settings = {name: getattr(train, name) for name in train.SETTINGS}
    return runlog.Log(run, train.out_dir, train.data_dir, settings)


# The official GLUE files: columns, which of them are the texts and the label, and the labels.
PARSES = "index|promptID|pairID|genre|sentence1_binary_parse|sentence1_parse|"
GENRES = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"
BOTH = ("sentence1", "sentence2")
ENTAILED = ("entailment", "not_entailment")
OFFICIAL_FILES = {
    "CoLA": ("source|label|mark|sentence", ("sentence",), ("0", "1")),
    "SST-2": ("sentence|label", ("sentence",), ("0", "1")),
    "MRPC": ("Quality|#1 ID|#2 ID|#1 String|#2 String", ("#1 String", "#2 String"), ("0", "1")),
    "STS-B": (GENRES, BOTH, ()),
    "QQP": (
        "id|qid1|qid2|question1|question2|is_duplicate",
        ("question1", "question2"),
        ("0", "1"),
    ),
    "MNLI": (
        PARSES + "sentence1|sentence2|label1|gold_label",
        BOTH,
        ("entailment", "neutral", "contradiction"),
    ),
    "QNLI": ("index|question|sentence|label", ("question", "sentence"), ENTAILED),
    "RTE": ("index|sentence1|sentence2|label", BOTH, ENTAILED),
    "WNLI": ("index|sentence1|sentence2|label", BOTH, ("0", "1")),
}
LABEL_COLUMNS = {"label", "Quality", "score", "is_duplicate", "gold_label"}


def write_glue(folder, sentences, train=40, dev=12):
    """Files in the official layout, labels by the length of the first text; {(task, split):
    [(texts, label)]}."""
    written = {}
    for task, (header, text_columns, labels) in OFFICIAL_FILES.items():
        devs = ("dev_matched", "dev_mismatched") if task == "MNLI" else ("dev",)
        (folder / task).mkdir(parents=True)
        for at, split in enumerate(("train", *devs)):
            if task == "MNLI" and at:
                header = header.replace("label1|g", "label1|label2|label3|label4|label5|g")
            columns = header.split("|")
            lines = [] if task == "CoLA" else ["\t".join(columns)]
            rows = written[task, split] = []
            for i in range(dev if at else train):
                numbers = (7 * i + at, 3 * i + at)[: len(text_columns)]
                texts = tuple(sentences[n % len(sentences)] for n in numbers)
                length = len(texts[0])
                label = labels[length % len(labels)] if labels else f"{length / 40:.3f}"
                cells = dict.fromkeys(columns, "x") | dict.fromkeys(LABEL_COLUMNS, label)
                cells |= dict(zip(text_columns, texts, strict=True))
                lines.append("\t".join(cells[column] for column in columns))
                rows.append((texts, label))
            start = "\ufeff" if task == "MRPC" else ""
            text = start + "\n".join(lines) + "\n"
            (folder / task / f"{split}.tsv").write_text(text, encoding="utf-8", newline="\n")
    return written


@pytest.fixture(scope="session")
def sentences(texts):
    """Short sentences of real prose, tabs and line breaks out."""
    found = [" ".join(s.split()) for text in texts[:20] for s in text.split(". ")]
    return [s for s in found if 20 < len(s) < 160][:300]


@pytest.fixture(scope="session")
def glue_files(tmp_path_factory, sentences):
    """(folder of a small GLUE in the official layout, what was written into it)."""
    folder = tmp_path_factory.mktemp("glue")
    return folder, write_glue(folder, sentences)
