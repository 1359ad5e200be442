"""The paper's recipes, against its numbers: those of arXiv 2212.14034 and of its authors' code.

Nothing on the expected side comes from train.py or model.py: each recipe's numbers and formulas
stand here once more, with the update written out in float64. What is not the paper's is in
docs/how_it_works.md.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, any_words

import train
from model import Classifier, MaskedLM
from nanocram.settings import configure

MOMENTS = (np.arange(2000) + 0.5) / 2000  # of a run, none where a ramp has its steps


def triangle(t):  # "budget-triangle2"
    return min(0.25 + t, 4 - 4 * t)


def linear(warmup):
    return lambda t: min(t / warmup, (1 - t) / (1 - warmup))


def cosine(warmup):
    return lambda t: (
        t / warmup if t < warmup else (1 + math.cos(math.pi * (t - warmup) / (1 - warmup))) / 2
    )


def ramp(t, micro):  # to 8,192 rows at 0.6 of the budget, by whole micro-batches
    return min(micro * (math.floor(8192 * t / (0.60 * micro)) + 1), 8192)


CRAMMED = {
    "parameters": 119_589_889,
    "lr": 1e-3,
    "betas": (0.9, 0.98),
    "eps": 1e-12,
    "coupled": False,
    "clip": 0.5,
    "schedule": triangle,
    "rows": ramp,
    "hidden": (26, 3, 3),  # [MASK], a random token, as it was
    "dropout": 0.0,
}
BERTS_MASKS = {"hidden": (15, 2, 2)}
RECIPES = {
    "crammed": CRAMMED,
    "bert_minimal_arch": CRAMMED | {"parameters": 110_945_024},
    "bert_minimal_train": CRAMMED
    | BERTS_MASKS
    | {"lr": 5e-4, "clip": 0.0, "schedule": cosine(0.06), "rows": lambda t, micro: 8192},
    # Theirs warms up over the first hundredth of a million steps, and would end after the last.
    "bert": BERTS_MASKS
    | {
        "parameters": 111_241_472,
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "coupled": True,
        "clip": 0.0,
        "schedule": linear(0.01),
        "rows": lambda t, micro: 512,
        "dropout": 0.1,
    },
    # 1e-3 is its inventors'; the paper's authors have 2e-3.
    "izsak": BERTS_MASKS
    | {
        "parameters": 337_081_344,
        "lr": 1e-3,
        "betas": (0.9, 0.98),
        "eps": 1e-6,
        "coupled": False,
        "clip": 0.0,
        "schedule": linear(0.06),
        "rows": lambda t, micro: 4096,
        "dropout": 0.1,
    },
}
DECAY = 0.01  # of all five


def set_to(recipe, monkeypatch, *flags):
    """Set train.py to a recipe until the test is over."""
    for name in train.SETTINGS:
        monkeypatch.setattr(train, name, getattr(train, name))
    configure(vars(train), [str(ROOT / f"config/{recipe}.py"), *flags])


@pytest.fixture(params=RECIPES)
def paper(request, monkeypatch):
    """The numbers of a recipe, which train.py is set to."""
    set_to(request.param, monkeypatch)
    return RECIPES[request.param]


def config_of(**sizes):
    """The ModelConfig of train.py's settings, but for the sizes."""
    return replace(train.model_config(), **sizes)


def test_parameters(paper):
    with torch.device("meta"):
        model = MaskedLM(config_of())
    assert sum(p.numel() for p in model.parameters()) == paper["parameters"]


def test_the_learning_rate_over_a_run(paper):
    assert train.lr == paper["lr"]
    for t in MOMENTS:
        assert train.lr_scale(t) == pytest.approx(paper["schedule"](t), abs=1e-9)


def test_the_rows_of_a_step_over_a_run(paper):
    wanted = [paper["rows"](t, train.micro_batch) for t in MOMENTS]
    assert [train.batch_rows(t) for t in MOMENTS] == wanted


def test_the_ramp_of_smaller_cards(monkeypatch):
    set_to("crammed", monkeypatch, "--micro_batch=128", "--batch_start=128")
    assert [train.batch_rows(t) for t in MOMENTS] == [ramp(t, 128) for t in MOMENTS]


def test_what_is_hidden_of_a_row(paper):
    """So many in each row, of each kind; anywhere but at [CLS], every place as likely."""
    n = sum(paper["hidden"])
    assert {train.row_shape(t) for t in MOMENTS} == {(128, n)}
    # Tokens from 10 on: a [MASK] is nothing else, and a random token hardly ever the one before.
    rows = torch.randint(10, train.vocab_size, (4000, 128))
    ids, positions, labels = train.draw_masks(any_words(train.vocab_size), rows, n)
    assert torch.equal(labels, rows.gather(1, positions))
    assert all(len(set(row)) == n for row in positions.tolist())
    seen = ids.gather(1, positions)
    masked = (seen == 3).sum(1)  # [MASK]
    kept = (seen == labels).sum(1)
    counts = torch.stack((masked, n - masked - kept, kept)).double().mean(1)
    assert counts.tolist() == pytest.approx(paper["hidden"], abs=0.05)
    others = torch.ones_like(rows, dtype=torch.bool).scatter(1, positions, False)
    assert torch.equal(ids[others], rows[others])
    by_place = np.bincount(positions.flatten(), minlength=128)
    expected = len(rows) * n / 127
    assert by_place[0] == 0
    assert abs(by_place[1:] - expected).max() < 5 * math.sqrt(expected)


def test_fresh_weights(paper):
    """N(0, 0.02) for every matrix and table, ones and zeros in norms, no bias but 0; positions."""
    wide = MaskedLM(config_of(vocab_size=300, n_layer=2))  # their width: a narrower one has more
    for name, p in wide.named_parameters():
        if "position_scale" in name:
            assert p.item() == pytest.approx(1 / math.sqrt(768))
        elif p.ndim == 2:
            tolerance = 5 / math.sqrt(2 * p.numel())
            assert p.std().item() == pytest.approx(0.02, rel=tolerance), name
            assert abs(p.mean()) < 5 * 0.02 / math.sqrt(p.numel()), name
        else:
            assert (p == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
    if train.position_embedding == "sinusoidal":
        i, t = np.arange(384), np.arange(128)[:, None]
        angles = t / 10000 ** (2 * i / 768)
        table = wide.model.embeddings.position_table.numpy()
        assert np.allclose(table[:, 0::2], np.sin(angles), atol=1e-4)
        assert np.allclose(table[:, 1::2], np.cos(angles), atol=1e-4)


def test_dropout_and_pooler(paper):
    config = config_of(vocab_size=300, n_layer=2)
    assert config.dropout == paper["dropout"]
    assert Classifier(MaskedLM(config), 2).head.dense.bias is not None


def the_papers_update(weights, gradients, state, step, rate, decayed, paper):
    """One step of Adam or AdamW behind clipping, in place, on {name: float64 array}."""
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    shrink = min(1.0, paper["clip"] / (norm + 1e-6)) if paper["clip"] else 1.0
    beta1, beta2 = paper["betas"]
    for name, w in weights.items():
        decay = DECAY if name in decayed else 0.0
        g = gradients[name] * shrink
        if paper["coupled"]:
            g = g + decay * w
        else:
            w *= 1 - rate * decay
        m, v = state.setdefault(name, (np.zeros_like(w), np.zeros_like(w)))
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g**2
        corrected = m / (1 - beta1**step), v / (1 - beta2**step)
        w -= rate * corrected[0] / (np.sqrt(corrected[1]) + paper["eps"])


def test_a_dozen_updates(paper):
    """Weights after them, from one history of gradients, some of them beyond the clipping."""
    torch.manual_seed(0)
    assert train.grad_clip == paper["clip"]
    config = config_of(vocab_size=90, n_layer=2, n_head=2, n_embd=16, n_inner=24, max_seq_len=128)
    model = MaskedLM(config).double()
    named = dict(model.named_parameters())
    weights = {name: p.detach().numpy().copy() for name, p in named.items()}
    before = {name: w.copy() for name, w in weights.items()}
    # Theirs exempts what has "bias" or "norm" in its name: all vectors, but not the scale.
    decayed = {name for name, p in named.items() if p.ndim == 2 or p.numel() == 1}
    optimizers = train.build_optimizers(model, torch.float32)
    state = {}
    for step in range(1, 13):
        gradients = {}
        for name, p in named.items():
            p.grad = torch.randn_like(p) * 0.01 * step
            gradients[name] = p.grad.numpy().copy()
        if paper["clip"]:
            torch.nn.utils.clip_grad_norm_(named.values(), train.grad_clip)
        t = (step - 0.5) / 12
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * train.lr_scale(t)
            optimizer.step()
        rate = paper["lr"] * paper["schedule"](t)
        the_papers_update(weights, gradients, state, step, rate, decayed, paper)
    for name, p in named.items():
        moved = np.abs(weights[name] - before[name]).max()
        assert moved > 0
        assert np.abs(p.detach().numpy() - weights[name]).max() < 1e-6 * moved, name
