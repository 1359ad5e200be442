"""The paper's recipes, against the numbers of arXiv 2212.14034 and of its authors' code.

Nothing on the expected side comes from train.py or model.py.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, error, keep_settings, model_config

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


def ramp(t):  # to 8,192 rows at 0.6 of the budget, by whole micro-batches
    return min(train.micro_batch * (math.floor(8192 * t / (0.60 * train.micro_batch)) + 1), 8192)


CRAMMED = dict(parameters=119_589_889, lr=1e-3, schedule=triangle, rows=ramp)
CRAMMED |= dict(betas=(0.9, 0.98), eps=1e-12, coupled=False, clip=0.5, dropout=0.0)
CRAMMED |= dict(hidden=(26, 3, 3))  # [MASK], a random token, as it was
BERTS = CRAMMED | dict(hidden=(15, 2, 2), clip=0.0)
MINIMAL = BERTS | dict(lr=5e-4, schedule=cosine(0.06), rows=lambda t: 8192)
# Theirs warms up over the first hundredth of a million steps, and would end after the last.
BERT = BERTS | dict(parameters=111_241_472, lr=1e-4, schedule=linear(0.01), rows=lambda t: 512)
BERT |= dict(betas=(0.9, 0.999), eps=1e-8, coupled=True, dropout=0.1)
# 1e-3 is its inventors'; the paper's authors have 2e-3.
IZSAK = BERTS | dict(parameters=337_081_344, schedule=linear(0.06), rows=lambda t: 4096)
IZSAK |= dict(eps=1e-6, dropout=0.1)
RECIPES = {
    "crammed": CRAMMED,
    "bert_minimal_arch": CRAMMED | dict(parameters=110_945_024),
    "bert_minimal_train": MINIMAL,
    "bert": BERT,
    "izsak": IZSAK,
}


@pytest.fixture(params=RECIPES)
def paper(request, monkeypatch):
    """The numbers of a recipe, which train.py is set to."""
    keep_settings(monkeypatch, train)
    configure(vars(train), [str(ROOT / f"config/{request.param}.py")])
    return RECIPES[request.param]


def test_parameters_dropout_pooler_rates_and_rows(paper):
    with torch.device("meta"):
        model = MaskedLM(model_config())
    assert sum(p.numel() for p in model.parameters()) == paper["parameters"]
    assert model.config.dropout == paper["dropout"]
    assert Classifier(model, 2).head.dense.bias is not None
    assert train.lr == paper["lr"]
    for t in MOMENTS:
        assert train.lr_scale(t) == pytest.approx(paper["schedule"](t), abs=1e-9)
        assert train.batch_rows(t) == paper["rows"](t)


def test_what_is_hidden_of_a_row(paper):
    """So many in each row, of each kind; anywhere but at [CLS], every place as likely."""
    n = sum(paper["hidden"])
    assert {train.row_shape(t) for t in MOMENTS} == {(128, n)}
    # Tokens from 10 on: a [MASK] is nothing else, and a random token hardly ever the one before.
    rows = torch.randint(10, train.vocab_size, (40_000, 128))
    rows[:, 0] = 1  # [CLS]
    begins_word = torch.ones(train.vocab_size, dtype=torch.bool)  # for a fork's masking
    run = SimpleNamespace(begins_word=begins_word, state=train.State())
    ids, positions, labels = train.draw_masks(run, rows, n)
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
    assert abs(by_place[1:] - expected).max() < 0.3 * expected


def test_fresh_weights(paper):
    """N(0, 0.02) for every matrix and table, ones and zeros in norms, no bias but 0; positions."""
    wide = MaskedLM(model_config(vocab_size=300, n_layer=2))  # their width: a narrower one has more
    for name, p in wide.named_parameters():
        if "position_scale" in name:
            assert p.item() == pytest.approx(1 / math.sqrt(768))
        elif p.ndim == 2:
            allowed = 20 / math.sqrt(p.numel())  # standard errors of a mean
            assert p.std().item() == pytest.approx(0.02, rel=allowed), name
            assert p.mean().item() == pytest.approx(0.0, abs=0.02 * allowed), name
        else:
            assert (p == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
    if train.position_embedding == "sinusoidal":
        i, t = np.arange(384), np.arange(128)[:, None]
        angles = t / 10000 ** (2 * i / 768)
        table = wide.model.embeddings.position_table.numpy()
        assert np.allclose(table[:, 0::2], np.sin(angles), atol=1e-4)
        assert np.allclose(table[:, 1::2], np.cos(angles), atol=1e-4)


def test_a_dozen_updates(paper):
    """Weights after them, from one history of gradients; test_train.py has the clipping."""
    assert train.grad_clip == paper["clip"]
    sizes = dict(vocab_size=90, n_layer=2, n_head=2, n_embd=16, n_inner=24, max_seq_len=128)
    model = MaskedLM(model_config(**sizes)).double()
    fresh, theirs = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = train.build_optimizers(model, torch.float32)
    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, p in theirs.named_parameters():
        groups["bias" in name or "norm" in name]["params"].append(p)
    kind = torch.optim.Adam if paper["coupled"] else torch.optim.AdamW
    expected = kind(groups, betas=paper["betas"], eps=paper["eps"], weight_decay=0.01)
    for step in range(12):
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p) * 0.01 * (step + 1)
            q.grad = p.grad.clone()
        t = (step + 0.5) / 12
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * train.lr_scale(t)
            optimizer.step()
        for group in expected.param_groups:
            group["lr"] = paper["lr"] * paper["schedule"](t)
        expected.step()
    for p, wanted, before in zip(*(m.parameters() for m in (model, theirs, fresh)), strict=True):
        assert error(p - before, wanted - before) < 1e-6
