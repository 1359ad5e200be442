"""The edits that README.md and docs/how_it_works.md name, and more, each in a copy of the code."""

import json
import math
import os
import shutil

import pytest
import torch
from conftest import QUICK, ROOT, SMALL_MODEL, flags
from forked import IN_TRANSFORMERS, SCRIPT, Forked, two_ranks
from safetensors.torch import load_file

from nanocram.runlog import read_log

MASKED = """
import torch, train
from types import SimpleNamespace as Names
begins_word = torch.arange(600) % 3 == 2  # 5, 6 and 7 are a word, 8, 9 and 10 are the next one
rows = Names(fetch=lambda *which: torch.arange(4, 132).repeat(64, 1))
run = Names(rows=rows, begins_word=begins_word, state=train.State())
torch.save(train.masked_batch(run, 0, 64, (128, 20))[0] == 3, "masked.pt")
"""
SCORES = "    scores = torch.rand(B, T - 1, device=rows.device)\n"
SUMMED = "        for name, value in measured.items():\n"
LOSS = '        return {"loss": losses.mean()}\n'
MADE = "        self.apply(init_weights(config.n_embd))\n"


class Fork:
    """A copy of the repository, to be edited."""

    def __init__(self, folder, data_dir):
        self.folder = folder
        self.settings = SMALL_MODEL | {"data_dir": str(data_dir), "samples": ""}
        self.settings |= {"log_every": 1, "max_steps": 4}
        shutil.copytree(ROOT / "nanocram", folder / "nanocram")
        for name in ("train.py", "model.py"):
            shutil.copy(ROOT / name, folder)

    def edit(self, file, old, new):
        """Replace what stands once in a file."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            end = pytest.fail if "UPSTREAM" in os.environ else pytest.skip  # .ci/run sets it
            end(f"{file} has been changed: {old!r} stands there {text.count(old)} times")
        path.write_text(text.replace(old, new), encoding="utf-8")

    def insert(self, file, before, new):
        """Put lines before what stands once in a file."""
        self.edit(file, before, new + before)

    def train(self, out_dir="out", first="", **settings):
        """Run train.py, after what is to come first; (rows of log.csv, ckpt.pt)."""
        settings = self.settings | settings | {"out_dir": out_dir}
        code = first + QUICK + SCRIPT
        self.said = Forked(self.folder, code, "train.py", *flags(**settings)).end()
        folder = self.folder / out_dir
        return read_log(folder), torch.load(folder / "ckpt.pt", weights_only=True)

    def masked(self, first=""):
        """Where 64 rows of 128 tokens have a [MASK], (64, 128), if 20 of them are hidden."""
        Forked(self.folder, first + MASKED).end()
        return torch.load(self.folder / "masked.pt")

    def load(self, then):
        """Load the model of folder out and then do something with it; what is printed."""
        code = "import torch\nfrom nanocram import model_folder\nmodel = model_folder.load('out')\n"
        return Forked(self.folder, code + then).end().strip()

    def model_type(self, out_dir="out"):
        return json.loads((self.folder / out_dir / "config.json").read_text())["model_type"]


@pytest.fixture
def fork(tmp_path, data_dir):
    return Fork(tmp_path / "fork", data_dir)


def test_other_schedules_and_other_maskings(fork):
    """Rate, rows of a step and their length; spans of tokens side by side, whole words."""
    new = '    if schedule == "root":\n        return (1 - progress) ** power\n'
    fork.insert("train.py", '    if schedule == "linear":\n', new)
    fork.insert("train.py", "warmup = 0.01 ", "power = 1.0\n")
    new = "    return micro_batch * (3 if progress > 0.4 else 1)\n"
    fork.insert("train.py", "    if progress >= batch_ramp:\n", new)
    new = "    return 64 if progress < 0.5 else seq_len, 40 - int(20 * progress)\n"
    fork.insert("train.py", "    stage = min(3, int(4 * progress))\n", new)
    spans = "    scores = -(torch.arange(T - 1) - torch.randint(T, (B, 1))).abs()\n"
    fork.edit("train.py", SCORES, spans)
    (_, *rows), _ = fork.train(schedule="root", power=0.5, lr=0.01)
    wanted = {
        "lr": [0.01 * (1 - step / 4) ** 0.5 for step in range(4)],
        "batch_size": [8, 8, 24, 24],
        "mask_rate": [40 / 64, 35 / 64, 30 / 128, 25 / 128],
    }
    for name, values in wanted.items():
        assert [row[name] for row in rows] == pytest.approx(values, rel=1e-4)
    # of the 20 tokens of a span any ten are a [MASK], and not those of the largest scores
    for hidden in fork.masked("import train\ntrain.mask_token_share = 0.5"):
        (places,) = hidden.nonzero(as_tuple=True)
        assert 10 <= places[-1] - places[0] < 20
    words = """    words = run.begins_word[rows[:, 1:]].cumsum(1)
    scores = torch.rand(B, T, device=rows.device).gather(1, words)
"""
    fork.edit("train.py", spans, words)
    # all tokens of a word are hidden, or none; but for the last one that was drawn
    hidden = fork.masked()[:, 1:127].unflatten(1, (42, 3)).sum(2)  # of each word's three tokens
    assert ((hidden == 1) | (hidden == 2)).sum(1).max() <= 1 and hidden.sum(1).min() >= 19
    fork.train()


def test_a_new_switch_of_the_model(fork):
    """Older checkpoints and model folders have its default; a run's folder keeps its value."""
    fork.train(max_steps=2)
    fork.edit("model.py", "    zero_init: bool\n", "    zero_init: bool\n    scale: float = 1.0\n")
    fork.insert("model.py", "        self.token_types =", "        self.scale = config.scale\n")
    fork.edit("model.py", "x = self.tok_embeddings(", "x = self.scale * self.tok_embeddings(")
    fork.insert("train.py", "zero_init = True ", "scale = 1.0\n")
    assert fork.load("print(model.config.scale)").endswith("\n1.0")  # behind a warning
    with pytest.raises(AssertionError, match=r"--scale=1\.0"):  # it was trained with the default
        fork.train(init="resume", scale=3.0)
    rows, _ = fork.train(init="resume")
    assert rows[-1]["step"] == 4
    scaled, _ = fork.train("other", scale=3.0)
    assert scaled[-1]["val_loss_15"] != rows[-1]["val_loss_15"]
    said = fork.load("print(model_folder.not_native(model_folder.load('other').config))")
    assert "scale=3.0" in said  # even if somebody calls the code a ModernBERT's


MLP_NORM = "        self.mlp_norm = layer_norm(config)\n"
CONV = "        self.conv = nn.Conv1d(32, 32, 3, padding=1)\n"
NORMED = "        normed = x if self.post_norm else self.attn_norm(x)\n"
PADDING = "        x = x if attention_mask is None else x * attention_mask[..., None]\n"
MIXED = "        x = x + self.conv(x.mT).mT\n"
NEIGHBOURS = [(MLP_NORM, CONV + MLP_NORM), (NORMED, PADDING + MIXED + NORMED)]
RMS_NORM = [("nn.LayerNorm(", "nn.RMSNorm("), (", bias=config.norm_bias)", ")")]
SWIGLU = ('    "geglu": F.gelu,\n', '    "geglu": F.gelu,\n    "swiglu": F.silu,\n')
OTHER_MODELS = {  # {name: (edits of model.py, settings)}
    "RMSNorm and SwiGLU": ([*RMS_NORM, SWIGLU], {"activation": "swiglu"}),
    "an untied decoder": ([("self.decoder.weight =", "_ =")], {}),
    "a layer that mixes neighbours": (NEIGHBOURS, {}),
    "values of embeddings, without a tensor": ([("values = keys if", "values = keys + x0 if")], {}),
    "the same from host memory": (NEIGHBOURS, {"optimizer": "adamw", "offload": True}),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model(fork, name):
    """Its folder has its weights and its code; transformers computes it where nothing else is."""
    edits, settings = OTHER_MODELS[name]
    for old, new in edits:
        fork.edit("model.py", old, new)
    fork.train(**settings)
    assert fork.model_type() == "nanocram"
    code = "kept = torch.load('out/ckpt.pt')['model']\n"
    code += "torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)\n"
    code += "inputs = [torch.arange(9)[None]]\ntorch.save(inputs, 'out/inputs')\n"
    fork.load(code + "torch.save(model(*inputs), 'out/wanted')")
    moved = (fork.folder / "out").rename(fork.folder.parent / "moved")
    Forked(moved, IN_TRANSFORMERS).end()
    torch.testing.assert_close(torch.load(moved / "found"), torch.load(moved / "wanted"))


WRONG_PLACES = {
    "behind the gathering": ("        return x + self.drop(", MIXED, "by .*top of Block"),
    "of padding": (NORMED, MIXED, "by .*padding or another row"),
    # x of narrow layers has few tokens
    "not in narrow layers": (NORMED, PADDING + MIXED, "by .*--n_narrow=0"),
    "of 128 tokens": (NORMED, "        x = x + self.of_128(x.mT).mT\n", r"fails on .*\(8x64 and"),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_a_layer_that_mixes_in_the_wrong_place_is_one_line(fork, name):
    place, new, said = WRONG_PLACES[name]
    fork.insert("model.py", MLP_NORM, CONV + "        self.of_128 = nn.Linear(128, 128)\n")
    fork.insert("model.py", place, new)
    with pytest.raises(AssertionError, match=f"an edit of model.py .*{said}.*if you mean it"):
        fork.train(n_layer=3, n_narrow=2 if "narrow" in said else 0)


def test_a_mask_that_some_layers_have(fork):
    """Attention to neighbours in each third layer, without positions and with them."""
    fork.edit("model.py", "Block(config, first=i == 0)", "Block(config, i == 0, near=i % 3 == 2)")
    fork.edit("model.py", "(self, config, first):\n", "(self, config, first, near=False):\n")
    fork.insert("model.py", MLP_NORM, "        self.attn.near = near\n")
    new = """        if self.near:
            at = torch.arange(k.shape[2])
            near = ((at[:, None] - at).abs() < 9)[None, None, : q.shape[2]]
            mask = near if mask is None else mask & near
"""
    fork.insert("model.py", "        by_math = q.is_cpu", new)
    with pytest.raises(AssertionError, match=r"an edit of model\.py changes layer 5 by .* where"):
        fork.train(n_layer=6)
    right = "[None if positions is None else positions][:, None]"
    fork.edit("model.py", "[None, None, : q.shape[2]]", right)
    fork.train(n_layer=6)


def test_a_statistic_that_decides_what_is_hidden(fork):
    """The losses of each token: the same after a resume, and on two ranks."""
    new = "        hard = labels.flatten().clamp(min=0).bincount(losses.detach(), 600)\n"
    fork.edit("model.py", LOSS, new + LOSS.replace("}", ', "hard": hard}'))
    new = '        state.tensors["hard"] = state.tensors.get("hard", 0.0) + means["hard"]\n'
    fork.insert("train.py", SUMMED, new)
    new = """    if "hard" in run.state.tensors:
        scores = scores ** (1 / (1 + run.state.tensors["hard"][rows[:, 1:]]))
"""
    fork.edit("train.py", SCORES, SCORES + new)
    steady = {"schedule": "constant", "warmup": 0, "batch_ramp": 0, "mask_rate_end": 0.3}
    _, wanted = fork.train(**steady)
    fork.train("stopped", max_steps=2, **steady)
    for out_dir, first, init in (("stopped", "", "resume"), ("ranks", two_ranks(), "scratch")):
        _, ckpt = fork.train(out_dir, first, init=init, **steady)
        torch.testing.assert_close(ckpt["state"]["tensors"], wanted["state"]["tensors"])
        torch.testing.assert_close(ckpt["model"], wanted["model"], rtol=1e-4, atol=1e-6)


def test_what_no_check_ends(fork):
    """int8 that rounds all tokens by one scale, numbers read in __init__(); a run that began."""
    rates = "        self.rates = [x.item() for x in torch.linspace(0, 0.1, config.n_layer)]\n"
    fork.insert("model.py", MADE, rates)
    new = """        scale = x.detach().abs().mean() / 32
        x = x + ((x / scale).round() * scale - x).detach()
"""
    fork.insert("model.py", NORMED, new)
    fork.train(max_steps=2, zero_init=False)
    assert "WARNING: an edit of model.py changes layer" in fork.said
    fork.insert("model.py", NORMED, "        x = x + x.mean(0)\n")
    rows, _ = fork.train(init="resume", zero_init=False)
    assert fork.said.count("padding or another row") == 1
    assert rows[-1]["step"] == 4


def test_a_second_head(fork):
    """Trained and saved in the model; named if nothing reads it; refused beside the loss."""
    second = "        self.second = nn.Linear(config.n_embd, 3)\n"
    fork.edit("model.py", MADE, second + MADE + "        nn.init.zeros_(self.second.weight)\n")
    fork.train(max_steps=1)
    assert "set-up reads second.weight, second.bias" in fork.said
    new = """        if self.training:
            return self.decoder(self.head(hidden)), self.second(hidden)
"""
    fork.insert("model.py", "        return self.decoder(self.head(hidden))\n", new)
    new = "        logits, classes = logits if model.training else (logits, logits[..., :3])\n"
    fork.insert("model.py", "        logits = logits.flatten(0, 1)", new)
    classes = "        classes = classes.flatten(0, 1).float()\n"
    second = "        second = F.cross_entropy(classes, labels.flatten().clamp(min=0) % 3)\n"
    summed = LOSS.replace("}", ' + 0.1 * model.training * second, "second": second}')
    fork.edit("model.py", LOSS, classes + second + summed)
    (_, *rows), ckpt = fork.train()
    assert "set-up reads" not in fork.said
    assert rows[0]["second"] == pytest.approx(math.log(3), rel=1e-4)
    assert "second.weight" in ckpt["model"] and fork.model_type() == "nanocram"
    fork.train("offloaded", offload=True, optimizer="adamw")
    fork.insert("model.py", "    def loss_fn(ids", "    second_head = nn.Linear(600, 3)\n\n")
    fork.edit("model.py", classes, "        classes = second_head(logits)\n")
    with pytest.raises(AssertionError, match=r"the loss reads a parameter .* MaskedLM\.__init__"):
        fork.train()


def test_what_offload_cannot_follow_is_one_line(fork):
    new = "        x = x + self.layers[1].mlp.Wo.weight.detach()[:, 0]\n"
    fork.insert("model.py", "        return self.final_norm(x)\n", new)
    fork.train(n_layer=4, optimizer="adamw")
    with pytest.raises(AssertionError, match=r"offload cannot follow an edit of model\.py \("):
        fork.train(n_layer=4, optimizer="adamw", offload=True)


def test_an_auxiliary_loss_its_column_and_its_weight(fork):
    """The z-loss, log² Z. Its weight is of training alone: a model folder does not fix it."""
    fork.edit("model.py", "zero_init: bool\n", "zero_init: bool\n    z_weight: float = 0.0\n")
    fork.insert("train.py", "zero_init = True ", "z_weight = 0.0\n")
    fork.edit("model.py", "FOR_TRAINING = {", 'FOR_TRAINING = {"z_weight", ')
    new = "        z = logits.float().logsumexp(-1).square().mean() * model.training\n"
    fork.edit("model.py", LOSS, new + LOSS.replace("}", ' + model.config.z_weight * z, "z": z}'))
    how = {"max_steps": 1, "frequency_bias": False}  # with it Z would begin near 1
    plain, _ = fork.train(**how)
    rows, _ = fork.train("weighted", z_weight=0.01, **how)
    z = rows[1]["z"]
    assert z == pytest.approx(math.log(SMALL_MODEL["vocab_size"]) ** 2, rel=0.5)
    assert rows[1]["loss"] - plain[1]["loss"] == pytest.approx(0.01 * z, rel=1e-3)
    assert rows[0]["val_loss_15"] == plain[0]["val_loss_15"]
    (_, row), _ = fork.train("more", init="out", z_weight=0.5, max_steps=1)
    assert row["loss"] > 0.5 * row["z"] > 10


def test_a_number_that_changes_in_the_loss_must_be_a_tensor(fork):
    """From the ninth value on nothing would be compiled."""
    fork.edit("train.py", "dynamic=False)", "dynamic=False, backend='eager')")
    fork.insert("model.py", MADE, "        self.share = 0.0\n")
    fork.insert("train.py", "    # set the learning rates\n", "    run.model.share = progress\n")
    fork.edit("model.py", LOSS, LOSS.replace("()}", "() * (1 + model.share)}"))
    with pytest.raises(AssertionError, match="what changes in loss_fn must be a tensor"):
        fork.train(compile=True, n_layer=1, max_steps=40, mask_rate_end=0.3)


def test_a_batch_that_depends_on_what_was_measured(fork):
    """Of any number of rows: whole passes are trained, and all of them are counted."""
    new = "    if state.last:\n        n_rows = 8 * state.step + 9 + 0 * state.last['grad_norm']\n"
    fork.insert("train.py", "    # set the learning rates\n", new)
    (_, *rows), ckpt = fork.train(batch_start=16)
    assert [row["batch_size"] for row in rows] == [16, 24, 32, 40]
    assert rows[-1]["tokens"] == 128 * ckpt["state"]["rows_seen"] == 128 * (16 + 24 + 32 + 40)


def test_a_mean_of_the_weights_is_evaluated(fork):
    """The folder has the means, the checkpoint what trains, and the means for a resume."""
    new = """        for name, p in run.model.named_parameters():
            state.tensors.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.5)
"""
    fork.insert("train.py", SUMMED, new)
    new = """        kept = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.model.load_state_dict(run.state.tensors, strict=False)
"""
    fork.insert("train.py", "        yield  # copy others in before this line ...\n", new)
    fork.edit("train.py", "pass  # ... and", "run.model.load_state_dict(kept, strict=False)  #")
    _, ckpt = fork.train()
    name = "model.layers.0.mlp.Wo.weight"
    tensors = load_file(fork.folder / "out/model.safetensors")
    found = tensors[name] if name in tensors else tensors[f"net.{name}"]
    assert torch.equal(found, ckpt["state"]["tensors"][name])
    assert not torch.equal(found, ckpt["model"][name])


def test_another_optimiser(fork):
    """For the blocks' matrices, or for all. A resume takes its states, the log its rate."""
    new = """    elif optimizer == "adagrad":
        others = [torch.optim.Adagrad(matrices, lr=muon_lr)]
"""
    fork.insert("train.py", '    elif optimizer in ("adamw", "adam"):\n', new)
    fork.train(max_steps=2, optimizer="adagrad")
    settings = {"optimizer": "adagrad", "init": "resume", "schedule": "constant", "warmup": 0}
    rows, ckpt = fork.train(**settings)
    assert rows[-1]["step"] == 4 and rows[-1]["adagrad_lr"] == 0.01
    state = ckpt["optimizers"][1]["state"][0]
    assert set(state) == {"step", "sum"} and state["step"] == 4
    with pytest.raises(AssertionError, match=r"offload needs AdamW .*--optimizer=adamw"):
        fork.train(optimizer="adagrad", offload=True)
    fork.edit("train.py", "Adagrad(matrices,", "Adagrad(model.parameters(),")
    fork.train("all", optimizer="adagrad")


def test_a_new_field_of_state_and_new_columns_of_the_log(fork):
    """Older checkpoints lack them. The norm of each layer's gradient, and of Muon's update."""
    fork.train(max_steps=2)
    fork.insert("train.py", "    step: int = 0 ", "    best: float = math.inf\n")
    new = '        state.best = min(state.best, measured["loss"])\n'
    fork.insert("train.py", "        state.consecutive_skips = 0\n", new)
    new = """    for i, layer in enumerate(run.model.model.layers):
        measured[f"norm_{i}"] = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
"""
    fork.insert("train.py", "    torch.nn.utils.clip_grads_with_norm_(", new)
    fork.insert("train.py", SUMMED, '        measured["moved"] = run.optimizers[1].moved.item()\n')
    moved = "                self.moved = updates.norm()\n"
    fork.insert("nanocram/muon.py", "                torch._foreach_mul_(matrices", moved)
    (*_, third, fourth), ckpt = fork.train(init="resume")
    best = min(third["loss"], fourth["loss"])
    assert ckpt["state"]["best"] == pytest.approx(best, rel=1e-5)
    for row in (third, fourth):
        assert 0 < math.hypot(row["norm_0"], row["norm_1"]) <= row["grad_norm"] * 1.001
        assert row["moved"] > 0
