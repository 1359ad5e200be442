"""Muon beside torch.optim.Muon, and beside its formula in float64."""

import copy

import pytest
import torch
from conftest import SEED, error

from nanocram.muon import Muon

SHAPES_OF_A_MODEL = [(128, 128)] * 6 + [(512, 128)] * 2 + [(128, 256)] * 2
ODD_SHAPES = [(1, 1), (40, 7), (7, 40), (1, 30), (40, 7), (13, 13)]


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 10_000 * SEED))


@pytest.mark.parametrize("shapes", [SHAPES_OF_A_MODEL, ODD_SHAPES], ids=["usual", "odd"])
def test_equal_to_torchs_and_loads_its_state(shapes):
    """But for the order in which a processor adds up bfloat16."""
    ours = [torch.nn.Parameter(random(shape, i)) for i, shape in enumerate(shapes)]
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    options = {"lr": 0.03, "weight_decay": 0.1}
    optimizers = [Muon(ours, **options), torch.optim.Muon(theirs, **options)]
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(optimizers[1].state_dict()["state"])
            optimizers[0] = Muon(ours, **options)
            groups = optimizers[0].state_dict()["param_groups"]
            optimizers[0].load_state_dict({"state": saved, "param_groups": groups})
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gradient = random(a.shape, 1000 * step + i)
            a.grad, b.grad = (None, None) if i == 3 else (gradient, gradient.clone())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.03 / (step + 1)
            optimizer.step()
        for a, b, start in zip(ours, theirs, before, strict=True):
            assert error(a - start, b - start) < 0.1
        assert error(*(o.state_dict()["state"] for o in optimizers)) < 1e-6


def quintic(matrix):
    """U f(S) Vᵀ in float64: what orthogonalise() is in exact numbers."""
    U, s, Vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    assert s.max() < 1.3 and s[: len(s) * 3 // 4].min() > 0.6  # it comes close to U Vᵀ
    return U @ torch.diag(s) @ Vt


@pytest.mark.parametrize("shape", [(192, 64), (64, 192), (96, 96)])
@pytest.mark.parametrize(
    ("dtype", "size", "tolerance"),
    [(torch.float32, 1.0, 1e-4), (torch.float16, 1.0, 0.05), (torch.float16, 1e-6, 0.05)],
)
def test_a_step_follows_the_formula_in_float64(shape, dtype, size, tolerance):
    """In float16 at any size of the gradient: its square must not become 0."""
    weight = torch.nn.Parameter(random(shape, 5))
    wanted, buffer = weight.detach().double(), 0.0
    before = wanted.clone()
    muon = Muon([weight], lr=0.1, weight_decay=0.2, momentum=0.9, dtype=dtype)
    for step in range(3):
        weight.grad = size * random(shape, 6 + step)
        muon.step()
        gradient = weight.grad.double()
        buffer = 0.9 * buffer + 0.1 * gradient
        update = quintic(0.1 * gradient + 0.9 * buffer)  # Nesterov's
        wanted = (1 - 0.1 * 0.2) * wanted - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * update
    assert error(weight - before, wanted - before) < tolerance
