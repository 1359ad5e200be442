import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocram.muon import Muon, orthogonalise

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


def matrices(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def random_like(matrix, seed):
    return torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 3), st.integers(0, 99))
def test_equal_to_torchs(shapes, copies, seed):
    """Several steps beside torch.optim.Muon; one matrix has no gradient."""
    ours, theirs = matrices(shapes * copies, seed), matrices(shapes * copies, seed)
    options = {"lr": 0.03, "weight_decay": 0.1}
    optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(3):
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = 0.03 / (step + 1)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gradient = random_like(a, 1000 * step + i)
            a.grad, b.grad = (None, None) if i == 3 else (gradient, gradient.clone())
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        # A product of a batch may add up in another order, in bfloat16.
        assert torch.allclose(a, b, rtol=0, atol=2e-3)


def test_equal_to_torchs_to_the_bit_at_the_shapes_of_a_model_and_loads_its_state():
    shapes = [(128, 128)] * 6 + [(512, 128)] * 2 + [(128, 256)] * 2
    ours, theirs = matrices(shapes, 0), matrices(shapes, 0)
    optimizers = Muon(ours, 0.02, 0.05), torch.optim.Muon(theirs, 0.02, 0.05)

    def step(n):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            for p in pair:
                p.grad = random_like(p, 100 * n + i)
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    step(0)
    step(1)
    saved = copy.deepcopy(optimizers[1].state_dict()["state"])
    optimizers = Muon(ours, 0.02, 0.05), optimizers[1]
    groups = optimizers[0].state_dict()["param_groups"]
    optimizers[0].load_state_dict({"state": saved, "param_groups": groups})
    step(2)


def test_singular_values_come_close_to_one():
    """The quintic takes all of a spread of three orders of magnitude into (0.6, 1.3)."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(64, 64)).Q for _ in range(2))
    wide = U @ torch.diag(torch.logspace(-2, 0, 64)) @ V.T
    for x in (wide, torch.cat((wide, wide))):
        y = orthogonalise(x[None].bfloat16())[0].float()
        values = torch.linalg.svdvals(y)
        assert y.shape == x.shape and values.max() < 1.3 and values[: 64 * 3 // 4].min() > 0.6


def quintic(matrix):
    """U f(S) Vᵀ in float64: what orthogonalise() is in exact numbers."""
    U, s, Vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return U @ torch.diag(s) @ Vt


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_float32_follows_the_formula(shape):
    """One step without momentum against the quintic of the singular values in float64."""
    (weight,) = matrices([shape], 3)
    before = weight.detach().double()
    weight.grad = random_like(weight, 4)
    Muon([weight], lr=0.1, momentum=0.0, dtype=torch.float32).step()
    size = 0.1 * max(1, shape[0] / shape[1]) ** 0.5
    wanted = before - size * quintic(weight.grad)
    assert torch.allclose(weight.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(192, 64), (96, 96)])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_float16_follows_the_formula_at_any_size_of_the_gradient(shape, size):
    """Beside the quintic of the singular values in float64, as in the test above."""
    (weight,) = matrices([shape], 5)
    before = weight.detach().double()
    weight.grad = size * random_like(weight, 6)
    Muon([weight], lr=0.1, momentum=0.0, dtype=torch.float16).step()
    step = 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * quintic(weight.grad)
    assert (before - weight.double() - step).norm() < 5e-3 * step.norm()
