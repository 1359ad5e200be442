"""The edits of the README's table "Change it", and more, each in a copy of the code.

A fork that has changed a place which such an edit starts from skips that test."""

import csv
import json
import os
import shutil

import pytest
import torch
from conftest import ROOT, SMALL_MODEL
from forked import SCRIPT, Server
from safetensors.torch import load_file

FILES = ("train.py", "model.py", "finetune_glue.py", "nanocram", "config")
# What takes most of the seconds of a small run: the yardstick and the picture.
QUICK = """
from nanocram import machine, runlog
machine.matmul_rate = lambda *where: 1e12
runlog.plot = lambda folder: None
"""


class Fork:
    """A copy of the repository, whose edits are counted."""

    def __init__(self, folder, data_dir, server):
        self.folder = folder
        self.server = server
        self.settings = SMALL_MODEL | {
            "data_dir": str(data_dir),
            "log_every": 1,
            "max_steps": 4,
            "samples": "",
        }
        self.edited = 0  # lines
        folder.mkdir()
        for name in FILES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)

    def edit(self, file, old, new):
        """Replace what stands once in a file; at most eight lines of a fork are new."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            end = pytest.fail if "UPSTREAM" in os.environ else pytest.skip  # .ci/run sets it
            end(f"{file} has been changed: {old!r} stands there {text.count(old)} times")
        before = old.splitlines()
        self.edited += sum(line not in before for line in new.splitlines())
        assert self.edited <= 8
        path.write_text(text.replace(old, new), encoding="utf-8")

    def python(self, code, *argv):
        status, said = self.server.run(self.folder, code, argv or ("-c",))
        assert status == 0, said
        return said

    def train(self, *args, out_dir="out", **settings):
        """Run train.py; (run.json, rows of log.csv, ckpt.pt)."""
        flags = [f"--{key}={value}" for key, value in (self.settings | settings).items()]
        self.python(QUICK + SCRIPT, "train.py", *args, *flags, f"--out_dir={out_dir}")
        folder = self.folder / out_dir
        facts = json.loads((folder / "run.json").read_text())
        rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
        return facts, rows, torch.load(folder / "ckpt.pt", weights_only=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture
def fork(tmp_path, data_dir, server):
    return Fork(tmp_path / "fork", data_dir, server)


@pytest.fixture(scope="module")
def before(tmp_path_factory, data_dir, server):
    """The out_dir of a run of two steps, as the code is before any edit."""
    original = Fork(tmp_path_factory.mktemp("original") / "fork", data_dir, server)
    original.train(max_steps=2)
    return original.folder / "out"


SWEEP = """
import train
for name, value in SETTINGS.items():
    setattr(train, name, value)
for seed in (3, 4):
    train.seed = seed
    train.out_dir = f"out/{seed}"
    train.main()
"""


def test_a_script_that_imports_train(fork):
    """As a notebook does it: settings by assignment, two runs in one process."""
    fork.python(QUICK + SWEEP.replace("SETTINGS", repr(fork.settings)))
    for seed in (3, 4):
        facts = json.loads((fork.folder / f"out/{seed}/run.json").read_text())
        assert facts["settings"]["seed"] == seed


def test_another_schedule_of_rate_and_batch_and_a_setting(fork):
    old = '    if schedule == "linear":\n'
    new = '    if schedule == "root":\n        return (1 - progress) ** power\n'
    fork.edit("train.py", old, new + old)
    old = "    if progress >= batch_ramp:\n"
    fork.edit("train.py", "warmup = 0.01 ", "power = 1.0\nwarmup = 0.01 ")
    fork.edit("train.py", old, "    return micro_batch * (3 if progress > 0.4 else 1)\n" + old)
    _, rows, _ = fork.train(schedule="root", power=0.5, lr=0.01)
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    assert rates == pytest.approx([0.01 * (1 - step / 4) ** 0.5 for step in range(4)], rel=1e-5)
    assert [row["batch_size"] for row in rows] == ["", "8", "8", "24", "24"]


def test_another_masking(fork):
    """Whole spans: the masked tokens of a row stand side by side. Their number falls evenly."""
    old = "scores = torch.rand(B, T - 1, device=rows.device)"
    fork.edit("train.py", old, "scores = -(torch.arange(T - 1) - torch.randint(T, (B, 1))).abs()")
    old = "    stage = min(3, int(4 * progress))\n"
    fork.edit("train.py", old, "    return seq_len, 40 - int(20 * progress)\n" + old)
    _, rows, _ = fork.train()
    rates = [float(row["mask_rate"]) for row in rows if row["mask_rate"]]
    assert rates == pytest.approx([count / 128 for count in (40, 35, 30, 25)], rel=1e-5)
    code = "import torch, train; rows = torch.arange(4, 132).repeat(9, 1)\n"
    code += "ids = train.draw_masks(None, rows, 9)[0]\n"
    code += "print(*(ids == 3).long().diff().eq(1).sum(1).tolist())"
    assert fork.python(code).split() == ["1"] * 9  # one begin


WHOLE_WORDS = """
import re, torch, train
from pathlib import Path
from types import SimpleNamespace
from nanocram.data import Rows
from nanocram.tokenizer import Tokenizer
folder = Path(FOLDER)
tokenizer = Tokenizer(folder / "tokenizer.json")
run = SimpleNamespace(begins_word=torch.tensor(tokenizer.begins_word()))
rows = Rows(folder / "train.bin", 128).read(0, 64)
ids, positions, labels = train.draw_masks(run, rows, 20)
for row, hidden in zip(rows.tolist(), (ids == 3).tolist()):
    cut = 0
    word = []
    for token, is_hidden in [*zip(row[1:], hidden[1:]), (None, None)]:
        text = tokenizer.decode([token]) if token else " "
        if not re.match("[a-z0-9]", text):  # it does not go on
            cut += len(set(word)) == 2
            word = []
        word.append(is_hidden)
    print(sum(hidden), cut)
"""


def test_whole_words(fork, data_dir):
    """All tokens of a word are hidden, or none; but for the last one that was drawn."""
    old = "    scores = torch.rand(B, T - 1, device=rows.device)\n"
    fork.edit(
        "train.py",
        old,
        "    words = run.begins_word[rows[:, 1:]].cumsum(1)\n"
        "    scores = torch.rand(B, T, device=rows.device).gather(1, words)\n",
    )
    said = fork.python(WHOLE_WORDS.replace("FOLDER", repr(str(data_dir)))).splitlines()
    assert len(said) == 64
    assert all(line.split()[0] == "20" and int(line.split()[1]) <= 1 for line in said)
    fork.train()


def test_shorter_rows_at_first(fork):
    old = "    return seq_len, max(1, round(seq_len * rate))\n"
    new = "    tokens = 64 if progress < 0.5 else seq_len\n"
    fork.edit("train.py", old, new + "    return tokens, round(tokens * rate)\n")
    _, rows, _ = fork.train(mask_rate=0.4, mask_rate_end=0.4)
    rates = [float(row["mask_rate"]) for row in rows[1:]]
    assert rates == pytest.approx([26 / 64, 26 / 64, 51 / 128, 51 / 128], rel=1e-5)
    assert fork.edited == 2


LOAD = "from nanocram import model_folder; model = model_folder.load('{}'); "


def test_a_new_switch_of_the_model(fork, before):
    """Older checkpoints and model folders have its default; a run's folder keeps its value."""
    fork.edit("model.py", "    zero_init: bool\n", "    zero_init: bool\n    scale: float = 1.0\n")
    made = "        self.token_types = config.token_types\n"
    fork.edit("model.py", made, made + "        self.scale = config.scale\n")
    summed = "        x = self.tok_embeddings(ids)  # (B, T, C)\n"
    fork.edit("model.py", summed, summed.replace("= self", "= self.scale * self"))
    fork.edit("train.py", "zero_init = True ", "scale = 1.0\nzero_init = True ")
    shutil.copytree(before, fork.folder / "out")
    print_scale = LOAD.format("out") + "print(model.config.scale)"
    assert fork.python(print_scale).strip() == "1.0"
    _, rows, _ = fork.train(init="resume")
    assert rows[-1]["step"] == "4"
    with pytest.raises(AssertionError, match=r"--scale=1\.0"):  # it was trained with the default
        fork.train(init="resume", max_steps=6, scale=3.0)
    _, scaled, _ = fork.train(scale=3.0, out_dir="other")
    assert scaled[-1]["val_loss_15"] != rows[-1]["val_loss_15"]
    kinds = {}
    for name in ("out", "other"):
        config = json.loads((fork.folder / name / "config.json").read_text())
        kinds[name] = config["model_type"]
    assert kinds == {"out": "modernbert", "other": "nanocram"}  # transformers knows no scale


def test_layers_of_another_kind(fork):
    old = '    "geglu": F.gelu,\n'
    fork.edit("model.py", old, old + '    "swiglu": F.silu,\n')
    old = "    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.norm_bias)"
    fork.edit("model.py", old, "    return nn.RMSNorm(config.n_embd, eps=config.norm_eps)")
    fork.train(activation="swiglu")
    assert json.loads((fork.folder / "out/config.json").read_text())["model_type"] == "nanocram"
    code = LOAD.format("out") + "print(model.model.final_norm, model.model.layers[0].mlp.act)"
    said = fork.python(code)
    assert "RMSNorm" in said and "silu" in said


NEIGHBOURS = (
    "        self.mlp_norm = layer_norm(config)\n",
    (
        "        self.mlp_norm = layer_norm(config)\n"
        "        C = config.n_embd\n"
        "        self.conv = nn.Conv1d(C, C, 3, padding=1, groups=C)\n"
    ),
)
NORMED = "        normed = x if self.post_norm else self.attn_norm(x)\n"
PADDING = "        x = x if attention_mask is None else x * attention_mask[..., None]\n"
OUTPUT = "        return x + self.drop(self.mlp(self.mlp_norm(x)))\n"


@pytest.mark.parametrize("offload", [False, True])
def test_a_layer_that_mixes_neighbours(fork, offload):
    """At the top of Block; transformers is not told that it can read the folder."""
    fork.edit("model.py", *NEIGHBOURS)
    fork.edit("model.py", NORMED, PADDING + "        x = x + self.conv(x.mT).mT\n" + NORMED)
    settings = {"optimizer": "adamw", "offload": offload}
    _, rows, _ = fork.train(**settings)
    assert rows[-1]["step"] == "4"
    assert json.loads((fork.folder / "out/config.json").read_text())["model_type"] == "nanocram"
    said = fork.python(LOAD.format("out") + "print(model.model.layers[0].conv.weight.std() > 0)")
    assert said.strip() == "tensor(True)"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (OUTPUT, "        x = x + self.conv(x.mT).mT\n" + OUTPUT, "top of Block"),
        (NORMED, "        x = x + self.conv(x.mT).mT\n" + NORMED, "padding"),
    ],
)
def test_a_layer_that_mixes_in_the_wrong_place_is_one_line(fork, old, new, said):
    fork.edit("model.py", *NEIGHBOURS)
    fork.edit("model.py", old, new)
    with pytest.raises(AssertionError, match=f"an edit of model.py .*{said}.*"):
        fork.train()


def test_an_untied_decoder(fork):
    """The folder has its weights too, and is none that transformers would tie again."""
    fork.edit(
        "model.py",
        "        self.decoder.weight = self.model.embeddings.tok_embeddings.weight\n",
        "",
    )
    *_, ckpt = fork.train()
    assert json.loads((fork.folder / "out/config.json").read_text())["model_type"] == "nanocram"
    found = load_file(fork.folder / "out/model.safetensors")["decoder.weight"]
    assert torch.equal(found, ckpt["model"]["decoder.weight"])
    said = fork.python(LOAD.format("out") + "print(model.decoder.weight.sum().item())")
    assert float(said) == pytest.approx(found.sum().item(), rel=1e-4)


def test_an_auxiliary_loss_and_its_column(fork):
    """The z-loss: 1e-2 · log² Z for each predicted token, about 0.4 at a uniform start."""
    _, plain, _ = fork.train(out_dir="plain")
    old = '        return {"loss": losses.sum()}\n'
    fork.edit(
        "model.py",
        old,
        "        log_z = logits.float().logsumexp(-1)[labels.flatten() != -100]\n"
        "        z_loss = 1e-2 * log_z.square().sum() if model.training else 0.0\n"
        '        return {"loss": losses.sum() + z_loss, "z_loss": z_loss}\n',
    )
    _, rows, _ = fork.train()
    uniform = 1e-2 * torch.tensor(float(SMALL_MODEL["vocab_size"])).log().item() ** 2
    assert float(rows[1]["z_loss"]) == pytest.approx(uniform, rel=0.1)
    difference = float(rows[1]["loss"]) - float(plain[1]["loss"])
    assert difference == pytest.approx(float(rows[1]["z_loss"]), rel=1e-3)
    assert rows[0]["val_loss_15"] == plain[0]["val_loss_15"]


def test_a_mean_of_the_weights_is_evaluated(fork):
    """The folder has the means, the checkpoint what trains; a resume is as if there was no stop."""
    stepped = "        for name, value in measured.items():\n"
    fork.edit(
        "train.py",
        stepped,
        "        for name, p in run.model.named_parameters():\n"
        "            mean = state.tensors.setdefault(name, torch.zeros_like(p).detach())\n"
        "            mean.lerp_(p.detach(), 1 / (state.step + 1))\n" + stepped,
    )
    there = """        yield  # copy others in before this line ...
    finally:
        pass  # ... and the training weights back in here
"""
    fork.edit(
        "train.py",
        there,
        """        kept = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.model.load_state_dict(run.state.tensors, strict=False)
        yield
    finally:
        run.model.load_state_dict(kept, strict=False)
""",
    )
    ends = []
    for out, stops in (("out", [4]), ("stopped", [2, 4])):
        for at, steps in enumerate(stops):
            settings = {"max_steps": steps, "init": "resume" if at else "scratch"}
            settings |= {"schedule": "constant", "warmup": 0, "batch_ramp": 0, "mask_rate_end": 0.3}
            *_, ckpt = fork.train(out_dir=out, **settings)
        ends.append((ckpt["model"], ckpt["state"]["tensors"]))
        name = "model.layers.0.mlp.Wi.weight"
        found = load_file(fork.folder / out / "model.safetensors")[name]
        assert torch.equal(found, ckpt["state"]["tensors"][name])
        assert not torch.equal(found, ckpt["model"][name])
    for tensors, others in zip(*ends, strict=True):
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_another_optimiser(fork):
    """For the blocks' matrices, or for all: one of torch's. A resume takes its states, the log its
    rate."""
    old = '    elif optimizer in ("adamw", "adam"):\n'
    new = """    elif optimizer == "adagrad":
        others = [torch.optim.Adagrad(matrices, lr=muon_lr)]
"""
    fork.edit("train.py", old, new + old)
    fork.train(max_steps=2, optimizer="adagrad")
    settings = {"optimizer": "adagrad", "init": "resume", "schedule": "constant", "warmup": 0}
    _, rows, ckpt = fork.train(**settings)
    assert rows[-1]["step"] == "4" and rows[-1]["adagrad_lr"] == "0.01"
    state = ckpt["optimizers"][1]["state"][0]
    assert set(state) == {"step", "sum"} and state["step"] == 4
    with pytest.raises(AssertionError, match=r"offload needs AdamW .*--optimizer=adamw"):
        fork.train(optimizer="adagrad", offload=True)
    fork.edit("train.py", "Adagrad(matrices,", "Adagrad(model.parameters(),")
    fork.train(optimizer="adagrad", out_dir="all")


def test_a_new_field_of_state(fork, before):
    """It takes its default where an older checkpoint lacks it; the original goes on from its."""
    field = "    best: float = math.inf\n"
    fork.edit("train.py", "    step: int = 0 ", field + "    step: int = 0 ")
    counted = "        state.consecutive_skips = 0\n"
    kept = '        state.best = min(state.best, measured["loss"])\n'
    fork.edit("train.py", counted, counted + kept)
    shutil.copytree(before, fork.folder / "out")
    _, rows, ckpt = fork.train(init="resume")
    losses = [float(row["loss"]) for row in rows if row["step"] in ("3", "4")]
    assert ckpt["state"]["best"] == pytest.approx(min(losses), rel=1e-5)
    fork.edit("train.py", field, "")
    fork.edit("train.py", kept, "")
    _, rows, _ = fork.train(init="resume", max_steps=6)
    assert rows[-1]["step"] == "6"


def test_new_columns_of_the_log(fork):
    """The norm of each layer's gradient, and what is no tensor; a resume keeps what is there."""
    old = "    torch.nn.utils.clip_grads_with_norm_("
    new = """    for i, layer in enumerate(run.model.model.layers):
        measured[f"norm_{i}"] = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
"""
    fork.edit("train.py", old, new + old)
    old = '{"batch_size": n_rows, '
    fork.edit("train.py", old, '{"loss_scale": run.scaler.get_scale(), "batch_size": n_rows, ')
    fork.train(max_steps=2)
    _, rows, _ = fork.train(init="resume")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row["loss_scale"] for row in rows] == ["", *["1"] * 4]
    for row in rows[1:]:
        inside = sum(float(row[f"norm_{i}"]) ** 2 for i in (0, 1)) ** 0.5
        assert 0 < inside <= float(row["grad_norm"]) * 1.001
