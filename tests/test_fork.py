"""The edits of the README's table "Change it", each in a copy of the code: at most five lines."""

import csv
import json
import shutil

import pytest
import torch
from conftest import ROOT, SMALL_MODEL
from forked import SCRIPT, Server

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
        """Replace what stands once in a file; at most five lines of a fork are new."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        before = old.splitlines()
        self.edited += sum(line not in before for line in new.splitlines())
        assert self.edited <= 5
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
    fork.edit("train.py", old, "    return 40 - int(20 * progress)\n" + old)
    _, rows, _ = fork.train()
    rates = [float(row["mask_rate"]) for row in rows if row["mask_rate"]]
    assert rates == pytest.approx([count / 128 for count in (40, 35, 30, 25)], rel=1e-5)
    code = "import torch, train; rows = torch.arange(4, 132).repeat(9, 1)\n"
    code += "print(*(train.draw_masks(rows, 9)[0] == 3).long().diff().eq(1).sum(1).tolist())"
    assert fork.python(code).split() == ["1"] * 9  # one begin


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


def test_an_auxiliary_loss(fork):
    """The z-loss: 1e-2 · log² Z for each predicted token, about 0.4 at a uniform start."""
    _, plain, _ = fork.train(out_dir="plain")
    old = "        return F.cross_entropy("
    fork.edit(
        "model.py",
        old,
        "        log_z = logits.float().logsumexp(-1)[labels.flatten() != -100]\n"
        "        z_loss = 1e-2 * log_z.square().sum() if model.training else 0.0\n"
        "        return z_loss + F.cross_entropy(",
    )
    _, rows, _ = fork.train()
    uniform = 1e-2 * torch.tensor(float(SMALL_MODEL["vocab_size"])).log().item() ** 2
    difference = float(rows[1]["loss"]) - float(plain[1]["loss"])
    assert difference == pytest.approx(uniform, rel=0.1)
    assert rows[0]["val_loss_15"] == plain[0]["val_loss_15"]


def test_another_optimiser(fork):
    """One of torch's; its states are in the checkpoint, and a resume takes them."""
    old = "[adam(groups, lr=lr, betas=(beta1, beta2), eps=adam_eps, fused=fused)]"
    fork.edit("train.py", old, "[torch.optim.Adagrad(groups, lr=lr)]")
    fork.train(max_steps=2)
    _, rows, ckpt = fork.train(init="resume")
    assert rows[-1]["step"] == "4"
    state = ckpt["optimizers"][0]["state"][0]
    assert set(state) == {"step", "sum"} and state["step"] == 4


def test_a_new_field_of_state(fork, before):
    """It takes its default where an older checkpoint lacks it; the original goes on from its."""
    field = "    best: float = math.inf\n"
    fork.edit("train.py", "    step: int = 0 ", field + "    step: int = 0 ")
    counted = "        state.loss_count += 1\n"
    kept = "        state.best = min(state.best, loss)\n"
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
    """A resume keeps what stands there."""
    fork.edit("nanocram/runlog.py", "grad_norm skipped", "grad_norm loss_scale clipped skipped")
    old = '        "grad_norm": grad_norm,\n'
    new = (
        '        "loss_scale": run.scaler.get_scale(),\n        "clipped": int(grad_norm > 1e-9),\n'
    )
    fork.edit("train.py", old, old + new)
    fork.train(max_steps=2)
    _, rows, _ = fork.train(init="resume")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    for name, value in (("loss_scale", "1"), ("clipped", "1")):
        assert [row[name] for row in rows] == ["", *[value] * 4]
