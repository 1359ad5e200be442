"""What several test files share: a small data set, small runs of train.py, a small GLUE."""

import gc
import getpass
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need a network
MODULES = tempfile.TemporaryDirectory()  # the code of folders, as transformers copies it
os.environ["HF_MODULES_CACHE"] = MODULES.name
# A shell's script ignores SIGINT in what it starts in its background, and so would our children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor a GPU: they run on the CPU beside it. test_gpu.py shows it to the processes that it starts.
if "GPUS_BEFORE_TESTS" not in os.environ:
    os.environ["GPUS_BEFORE_TESTS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Busy threads of one process beside those of another are 30 times as slow; none survives a fork.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
if kind := os.environ.get("ATEN_CPU_CAPABILITY"):  # whose code inductor's cache mixes up
    name = f"torchinductor_{getpass.getuser()}_{kind}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), name)
SEED = int(os.environ.get("TEST_SEED", "0"))  # of the numbers that are compared: any one passes

import torch
from filelock import FileLock
from forked import SCRIPT, Forked
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import prepare as prepare_module
import train as module
from model import MaskedLM
from nanocram import machine, model_folder, runlog, settings, tokenizer
from nanocram.data import Rows, load_meta
from nanocram.tokenizer import Tokenizer

PLOT = runlog.plot
SMALL_DATA = {"vocab_size": 600, "filter_ratio": 0.0, "val_share": 0.2}
SMALL_MODEL = dict(vocab_size=600, n_layer=2, n_head=2, n_embd=32, n_inner=48)
SMALL_MODEL |= dict(micro_batch=8, batch_size=16, batch_start=8, eval_rows=24, evals=2)
SMALL_MODEL |= dict(compile=False, dtype="float32", log_every=2, samples="once upon a [MASK].")
SIZES = dict(vocab_size=90, max_seq_len=160, n_layer=3, n_head=2, n_embd=32, n_inner=24)
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
# What takes most of the seconds of a small run: the yardstick and the picture.
QUICK = """
from nanocram import machine, runlog
machine.matmul_rate = lambda *where: 1e12
runlog.plot = lambda folder: None
"""


def flags(**settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def command(name, *args, **settings):
    """What a user would type for a script of ours."""
    return [sys.executable, str(ROOT / name), *map(str, args), *flags(**settings)]


def begin(name, *args, first="", **settings):
    """Begin a script of ours, behind other code, in a process that is ready for it, and quicker."""
    return Forked(ROOT, first + QUICK + SCRIPT, *command(name, *args, **settings)[1:])


def script(name, *args, status=0, **settings):
    """begin() and wait for it to end so; what it prints, to stderr too."""
    return begin(name, *args, **settings).end(status)


def typed(name, *args, **settings):
    """Run a script of ours as a user who types it."""
    done = subprocess.run(command(name, *args, **settings), cwd=ROOT, **PIPES)
    assert done.returncode == 0, done.stdout
    return done.stdout


def wait_for(is_so, process=None, pause=0.02):
    """Until is_so(), while the process lives."""
    while not is_so():
        assert not process or process.poll() is None
        time.sleep(pause)


def wait_for_step(folder, step, process, pause=0.02):
    """Until a run's log.csv has come so far."""
    wait_for(lambda: any(row["step"] >= step for row in runlog.read_log(folder)), process, pause)


def error(found, wanted):
    """‖found − wanted‖ / ‖wanted‖, of tensors or of equal lists of them."""
    found, wanted = (
        torch.cat([x.detach().double().flatten() for x in tree_leaves(tensors)])
        for tensors in (found, wanted)
    )
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def assert_same_course(out, reference, tolerance, of_weights):
    """Same steps, same rows; losses within tolerance, norms of gradients within ten times that."""
    allowed = dict.fromkeys(("step", "tokens", "batch_size", "lr", "mask_rate"), 1e-9)
    allowed |= dict.fromkeys(("loss", "val_loss_15", "val_loss_25"), tolerance)
    allowed |= {"grad_norm": 10 * tolerance}
    for row, other in zip(runlog.read_log(out), runlog.read_log(reference), strict=True):
        for name, rel in allowed.items():
            assert row.get(name, 0) == pytest.approx(other.get(name, 0), rel=rel), (name, row)
    weights, others = (load_file(path / "model.safetensors") for path in (out, reference))
    assert weights.keys() == others.keys()
    for name, other in others.items():
        assert error(weights[name], other) <= of_weights, name


def result(out):
    """The weights of a run, and its log but for the time."""
    rows = [{**row, "elapsed_s": 0} for row in runlog.read_log(out)]
    return (out / "model.safetensors").read_bytes(), rows


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws depends on TEST_SEED, and not on the tests before."""
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def texts():
    """The documents of the embedded corpus."""
    with gzip.open(ROOT / "data/sample.txt.gz", "rt", encoding="utf-8") as f:
        return [text.strip("\n") for text in f.read().split("\n\n")]


@pytest.fixture(scope="session")
def corpus(shared, texts):
    """A text file with 40 short documents of real prose."""
    text = "\n\n".join(text[:4000] for text in texts[:40])
    folder = shared("corpus", lambda folder: (folder / "corpus.txt").write_text(text, "utf-8"))
    return folder / "corpus.txt"


def prepare(folder, source, **other):
    """Run prepare.py's main() in this process; return meta.json."""
    values = SMALL_DATA | {"data_dir": str(folder), "source": str(source)} | other
    with pytest.MonkeyPatch.context() as patch:
        put(patch, prepare_module, **values)
        put(patch, prepare_module, ProcessPoolExecutor=lambda n, *how: ThreadPoolExecutor(n))
        prepare_module.load_tokenizer.cache_clear()
        prepare_module.main()
    return json.loads((folder / "meta.json").read_text())


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A function that has make(folder) called by one of the workers; all get the folder."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name, make):
        with FileLock(base / f"{name}.lock"):
            if not (base / name).exists():
                (base / name).mkdir()
                make(base / name)
        return base / name

    return made


@pytest.fixture(scope="session")
def data_dir(shared, corpus):
    """A finished data set of corpus."""
    return shared("small_data", lambda folder: prepare(folder, corpus))


@pytest.fixture
def train(monkeypatch, data_dir, tmp_path):
    """The train module with the settings of a small run; set others with put()."""
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)
    monkeypatch.setattr(runlog, "plot", lambda folder: None)
    folders = {"data_dir": str(data_dir), "out_dir": str(tmp_path / "out")}
    put(monkeypatch, settings, typed=set())
    put(monkeypatch, module, typed=settings.typed, **(SMALL_MODEL | folders))
    monkeypatch.setattr(module, "_given", {}, raising=False)  # assign() changes no later test
    return module


def put(monkeypatch, module, **settings):
    """Set globals of a script; each must be there."""
    for name, value in settings.items():
        assert hasattr(module, name), name
        monkeypatch.setattr(module, name, value)


def keep_settings(monkeypatch, *scripts):
    """Put settings back when the test is over."""
    for script in scripts:
        put(monkeypatch, script, **{name: getattr(script, name) for name in script.SETTINGS})


def model_config(**changes):
    """A ModelConfig of train.py's settings, but for changes."""
    return replace(module.model_config(), **changes)


def random_model(**changes):
    """A small model whose every parameter is random, in float64: no processor's rounding shows."""
    torch.manual_seed(SEED)
    return randomise(MaskedLM(model_config(**(SIZES | changes))).eval().double())


def padded_batch(T):
    """Tokens (3, T) of random_model() and their attention_mask; two rows are padded."""
    torch.manual_seed(SEED + 1)
    mask = torch.ones(3, T, dtype=torch.long)
    mask[1, T - 5 :] = 0
    mask[2, 5:] = 0
    return torch.randint(4, 90, (3, T)), mask


def write_model(folder, data_dir, **changes):
    """A small model folder with the vocabulary of data_dir, as train.py leaves one."""
    sizes = SIZES | {"vocab_size": 600, "max_seq_len": 128, "n_layer": 2, "zero_init": False}
    torch.manual_seed(0)
    model_folder.save(MaskedLM(model_config(**(sizes | changes))), folder)
    tokenizer.copy_tokenizer(data_dir, folder, 128)
    return folder


def table_cells(text):
    """The cells of a markdown table's lines, but for its heading and the line below."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def new_run(amp_dtype=torch.float32):
    """A Run of train.py as it is set, on the CPU."""
    folder = Path(module.data_dir)
    rows = Rows(folder / "train.bin", module.seq_len)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    return module.Run(rows, load_meta(folder), tokenizer, torch.device("cpu"), amp_dtype)


def randomise(model):
    """Let every parameter be random, so that none can be left out unnoticed."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


# The official GLUE files: their columns, a text's marked by *, the label's by =; and the labels.
PAIR = "|sentence1*|sentence2*"
PARSES = "index|promptID|pairID|genre|sentence1_binary_parse|sentence1_parse"
ENTAILED = ("entailment", "not_entailment")
OFFICIAL_FILES = {
    "CoLA": ("source|label=|mark|sentence*", "01"),
    "SST-2": ("sentence*|label=", "01"),
    "MRPC": ("Quality=|#1 ID|#2 ID|#1 String*|#2 String*", "01"),
    "STS-B": ("index|genre|filename|year|old_index|source1|source2" + PAIR + "|score=", ""),
    "QQP": ("id|qid1|qid2|question1*|question2*|is_duplicate=", "01"),
    "MNLI": (PARSES + PAIR + "|label1|gold_label=", ("entailment", "neutral", "contradiction")),
    "QNLI": ("index|question*|sentence*|label=", ENTAILED),
    "RTE": ("index" + PAIR + "|label=", ENTAILED),
    "WNLI": ("index" + PAIR + "|label=", "01"),
}


@pytest.fixture(scope="session")
def sentences(texts):
    """Short sentences of real prose, tabs and line breaks out."""
    found = [" ".join(s.split()) for text in texts[:20] for s in text.split(". ")]
    return [s for s in found if 20 < len(s) < 160][:300]


@pytest.fixture(scope="session")
def glue_files(tmp_path_factory, sentences):
    """(folder of a small GLUE in the official layout, {(task, split): [(texts, label)]})."""
    folder, written = tmp_path_factory.mktemp("glue"), {}
    for task, (columns, labels) in OFFICIAL_FILES.items():
        columns = columns.replace("|", "\t")
        (folder / task).mkdir()
        dev = ("dev_matched", "dev_mismatched") if task == "MNLI" else ("dev",)
        for at, split in enumerate(("train", *dev)):
            if split == "dev_matched":  # all five annotators' labels, and so in the next one
                columns = columns.replace("label1", "label1\tlabel2\tlabel3\tlabel4\tlabel5")
            lines = [] if task == "CoLA" else [re.sub("[*=]", "", columns)]
            rows = written[task, split] = []
            for i in range(12 if at else 40):
                numbers = (7 * i + at, 3 * i + at)[: columns.count("*")]
                texts = tuple(sentences[n % len(sentences)] for n in numbers)
                length = len(texts[0])
                label = labels[length % len(labels)] if labels else f"{length / 40:.3f}"
                cells = iter(texts)
                line = re.sub(r"[^\t]+=", label, columns)  # other cells have their column's name
                lines.append(re.sub(r"[^\t]+\*", lambda column, cells=cells: next(cells), line))
                rows.append((texts, label))
            encoding = "utf-8-sig" if task == "MRPC" else "utf-8"
            path, text = folder / task / f"{split}.tsv", "\n".join(lines) + "\n"
            path.write_text(text, encoding, newline="\n")
    return folder, written


def pytest_collection_finish():
    """From here on no search for garbage goes through all that is imported."""
    gc.freeze()
