"""Ten edits that a fork makes, each in a copy of the repository: five lines, and nothing else."""

import csv
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL_MODEL

FILES = ("train.py", "model.py", "bench.py", "prepare.py", "nanocram", "config")
# A script as it is, but for what takes two of its three seconds: the yardstick and the picture.
QUICK = """
import runpy, sys
from nanocram import machine, record
machine.matmul_rate = lambda *where: 1e12
record.plot = lambda folder: None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Fork:
    """A copy of the repository, whose edits are counted."""

    def __init__(self, folder, data_dir):
        self.folder = folder
        self.settings = SMALL_MODEL | {"data_dir": data_dir, "log_every": 1, "max_steps": 4}
        self.edited = 0  # lines
        folder.mkdir()
        for name in FILES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)

    def edit(self, file, old, new):
        """Replace what stands once in a file; at most five lines of a fork are new."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        before = old.splitlines()
        self.edited += sum(line not in before for line in new.splitlines())
        assert self.edited <= 5
        path.write_text(text.replace(old, new), encoding="utf-8")

    def python(self, *args):
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def train(self, *args, out_dir="out", **settings):
        """Run train.py; (what it printed, run.json, rows of log.csv, ckpt.pt)."""
        flags = [f"--{key}={value}" for key, value in (self.settings | settings).items()]
        printed = self.python("-c", QUICK, "train.py", *args, *flags, f"--out_dir={out_dir}")
        folder = self.folder / out_dir
        facts = json.loads((folder / "run.json").read_text())
        rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
        return printed, facts, rows, torch.load(folder / "ckpt.pt", weights_only=True)


@pytest.fixture
def fork(tmp_path, data_dir):
    return Fork(tmp_path / "fork", data_dir)


@pytest.fixture(scope="module")
def before(tmp_path_factory, data_dir):
    """The out_dir of a run of two steps, as the code is before any edit."""
    original = Fork(tmp_path_factory.mktemp("original") / "fork", data_dir)
    original.train(max_steps=2)
    return original.folder / "out"


@pytest.mark.slow
def test_a_setting_becomes_an_expression(fork):
    """It is in --help, recorded, kept by a resume, and a flag overrides it."""
    fork.edit("train.py", "n_embd = 768\n", "n_embd = 4 * 8\n")
    fork.edit("train.py", "n_inner = 1536 ", "n_inner = 2 * n_embd ")
    for name in ("n_embd", "n_inner"):
        del fork.settings[name]
    assert "# = 64" in fork.python("train.py", "--help")
    _, facts, _, _ = fork.train(max_steps=2)
    assert (facts["settings"]["n_embd"], facts["settings"]["n_inner"]) == (32, 64)
    _, facts, _, _ = fork.train(max_steps=1, n_embd=64, out_dir="wider")
    assert facts["settings"]["n_inner"] == 128  # it follows
    _, facts, rows, ckpt = fork.train(init="resume")
    assert facts["settings"]["n_inner"] == 64 and rows[-1]["step"] == "4"
    assert ckpt["model"]["model.layers.0.mlp.Wo.weight"].shape == (32, 64)
    _, facts, _, _ = fork.train(n_inner="3*n_embd", out_dir="other")
    assert facts["settings"]["n_inner"] == 96


def test_a_recipe_with_arithmetic(fork):
    recipe = "n_embd = 2 * 16\nn_inner = 3 * n_embd\nlr = lr / 2\nglue_lr = 2 * hf_lr\n"
    (fork.folder / "config/mine.py").write_text(recipe)
    shutil.copy(ROOT / "finetune_glue.py", fork.folder)
    for name in ("n_embd", "n_inner"):
        del fork.settings[name]
    _, facts, _, _ = fork.train("config/mine.py")
    settings = facts["settings"]
    assert (settings["n_embd"], settings["n_inner"], settings["lr"]) == (32, 96, 0.002)


def test_a_script_that_imports_train(fork):
    """As a notebook does it: settings by assignment, two runs in one process."""
    lines = [f"train.{name} = {value!r}" for name, value in fork.settings.items()]
    lines = [line.replace("PosixPath", "str") for line in lines]
    script = "import train\n" + "\n".join(lines) + SWEEP
    (fork.folder / "sweep.py").write_text(script)
    fork.python("sweep.py")
    seeds = []
    for seed in (3, 4):
        facts = json.loads((fork.folder / f"out/{seed}/run.json").read_text())
        seeds.append(facts["settings"]["seed"])
    assert seeds == [3, 4]
    fork.train("config/tiny.py", out_dir="tiny")  # a recipe is not confused by the new script


SWEEP = """
for seed in (3, 4):
    train.seed = seed
    train.out_dir = f"out/{seed}"
    train.main()
"""


@pytest.mark.slow
def test_a_new_field_of_state(fork, before):
    """It takes its default where an older checkpoint lacks it; the original goes on from its."""
    fork.edit("train.py", "    step: int = 0 ", "    best: float = math.inf\n    step: int = 0 ")
    counted = "        state.loss_count += 1\n"
    fork.edit("train.py", counted, counted + "        state.best = min(state.best, loss)\n")
    shutil.copytree(before, fork.folder / "out")
    _, _, rows, ckpt = fork.train(init="resume")
    losses = [float(row["loss"]) for row in rows if row["step"] in ("3", "4")]
    assert ckpt["state"]["best"] == pytest.approx(min(losses), rel=1e-5)
    fork.edit("train.py", "    best: float = math.inf\n", "")
    fork.edit("train.py", "        state.best = min(state.best, loss)\n", "")
    printed, _, rows, _ = fork.train(init="resume", max_steps=6)
    assert "best" in printed and rows[-1]["step"] == "6"


def test_a_new_switch_of_the_model(fork, before):
    """Older checkpoints and model folders have its default; a run's folder keeps its value."""
    fork.edit("model.py", "    zero_init: bool\n", "    zero_init: bool\n    scale: float = 1.0\n")
    made = "        self.token_types = config.token_types\n"
    fork.edit("model.py", made, made + "        self.scale = config.scale\n")
    fork.edit(
        "model.py",
        "        x = self.tok_embeddings(ids)  # (B, T, C)\n",
        "        x = self.scale * self.tok_embeddings(ids)  # (B, T, C)\n",
    )
    fork.edit("train.py", "zero_init = True ", "scale = 1.0\nzero_init = True ")
    shutil.copytree(before, fork.folder / "out")
    load = "from nanocram import model_folder; print(model_folder.load('{}').config.scale)"
    assert fork.python("-c", load.format("out")).strip() == "1.0"
    _, _, rows, _ = fork.train(init="resume")
    assert rows[-1]["step"] == "4"
    with pytest.raises(AssertionError, match=r"--scale=1\.0"):  # it was trained with the default
        fork.train(init="resume", max_steps=6, scale=3.0)
    _, _, scaled, _ = fork.train(scale=3.0, out_dir="other")
    kinds = {}
    for name in ("out", "other"):
        config = json.loads((fork.folder / name / "config.json").read_text())
        kinds[name] = config["model_type"]
    assert kinds == {"out": "modernbert", "other": "nanocram"}  # transformers knows no scale
    assert fork.python("-c", load.format("other")).strip() == "3.0"
    assert scaled[-1]["val_loss_15"] != rows[-1]["val_loss_15"]
    # A folder is read as it was written, whatever the default has become.
    fork.edit("model.py", "    scale: float = 1.0\n", "    scale: float = 2.0\n")
    assert fork.python("-c", load.format("out")).strip() == "1.0"


def test_a_layer_of_another_kind(fork):
    """Without a switch: the folder says no longer that transformers may read it, and loads here."""
    old = "    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.norm_bias)"
    fork.edit("model.py", old, "    return nn.RMSNorm(config.n_embd, eps=config.norm_eps)")
    printed, *_ = fork.train()
    assert "this is no ModernBERT" in printed
    assert json.loads((fork.folder / "out/config.json").read_text())["model_type"] == "nanocram"
    code = "from nanocram import model_folder; print(model_folder.load('out').model.final_norm)"
    assert "RMSNorm" in fork.python("-c", code)


def test_another_schedule(fork):
    old = '    if schedule == "linear":\n'
    new = '    if schedule == "root":\n        return (1 - progress) ** 0.5\n'
    fork.edit("train.py", old, new + old)
    _, _, rows, _ = fork.train(schedule="root", lr=0.01)
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    assert rates == pytest.approx([0.01 * (1 - step / 4) ** 0.5 for step in range(4)], rel=1e-5)


def test_an_auxiliary_loss(fork):
    """The z-loss: 1e-2 · log² Z for each predicted token, about 0.4 at a uniform start."""
    _, _, plain, _ = fork.train(out_dir="plain")
    old = "        return cross_entropy(logits.flatten(0, 1), labels.flatten())"
    fork.edit(
        "model.py",
        old,
        "        log_z = logits.float().logsumexp(-1)[labels != -100]\n"
        "        z_loss = 1e-2 * log_z.square().sum() if model.training else 0.0\n"
        + old.replace("return ", "return z_loss + "),
    )
    _, _, rows, _ = fork.train()
    first = {row["step"]: row for row in plain}["1"], {row["step"]: row for row in rows}["1"]
    uniform = 1e-2 * torch.tensor(float(SMALL_MODEL["vocab_size"])).log().item() ** 2
    difference = float(first[1]["loss"]) - float(first[0]["loss"])
    assert difference == pytest.approx(uniform, rel=0.1)
    assert rows[0]["val_loss_15"] == plain[0]["val_loss_15"]


def test_another_optimiser(fork):
    """One of torch's; its states are in the checkpoint, and a resume takes them."""
    fork.edit(
        "train.py",
        "    optimizers = [kinds[optimizer](groups, **options)]\n",
        "    optimizers = [torch.optim.Adagrad(groups, lr=lr)]\n",
    )
    fork.train(max_steps=2)
    _, _, rows, ckpt = fork.train(init="resume")
    assert rows[-1]["step"] == "4"
    state = ckpt["optimizers"][0]["model.embeddings.tok_embeddings.weight"]
    assert set(state) == {"step", "sum"} and state["step"] == 4


def test_new_columns_of_the_log(fork):
    """Numbers, Python's or of a tensor, and words; a resume keeps what stands there."""
    columns = "grad_norm loss_scale clipped phase skipped"
    fork.edit("nanocram/record.py", "grad_norm skipped", columns)
    old = '    if optimizer == "muon":\n        state.last["muon_lr"]'
    new = '    state.last["loss_scale"] = run.scaler.get_scale()\n'
    new += '    state.last |= {"clipped": norm > 1e9, "phase": "first"}\n'
    fork.edit("train.py", old, new + old)
    fork.train(max_steps=2)
    _, _, rows, _ = fork.train(init="resume")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    for name, value in (("loss_scale", "1"), ("clipped", "0"), ("phase", "first")):
        assert [row[name] for row in rows] == ["", *[value] * 4]


def test_another_masking(fork):
    """Whole spans: the masked tokens of a row stand side by side."""
    old = "scores.topk(n_positions).indices + 1"
    new = "torch.randint(1, T - n_positions, (B, 1)) + torch.arange(n_positions)"
    fork.edit("train.py", old, new)
    _, _, rows, _ = fork.train()
    assert rows[-1]["step"] == "4"
    code = "import torch, train; rows = torch.arange(4, 132).repeat(2, 1)\n"
    code += "print(*(train.draw_masks(rows, 9, 9)[0] == 3).long().diff().ne(0).sum(1).tolist())"
    assert fork.python("-c", code).split() == ["2", "2"]  # one begin and one end
