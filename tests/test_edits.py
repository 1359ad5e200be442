"""No verdict on an edit hangs on rounding; test_fork.py has the edits that are refused."""

from dataclasses import replace

import pytest
import torch
from conftest import model_config
from test_model import recipe
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import model as module
from nanocram.edits import check_mixing, check_streaming
from nanocram.machine import float32_products

aten = torch.ops.aten
PRODUCTS = [aten.mm, aten.bmm, aten.addmm, aten.baddbmm]
PRODUCTS += [aten._scaled_dot_product_flash_attention_for_cpu]
PRODUCTS += [aten._scaled_dot_product_flash_attention_for_cpu_backward]


def ten_bits(x):
    """A float32 tensor as TF32 takes it into a product."""
    is_float32 = x.dtype == torch.float32
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32) if is_float32 else x


class OtherProcessor(TorchDispatchMode):
    """Its products take TF32, unless full ones are asked for, and differ in the last bit."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket not in PRODUCTS:
            return function(*args, **(kwargs or {}))
        if torch.get_float32_matmul_precision() != "highest":
            args = tree_map_only(torch.Tensor, ten_bits, args)
        found = function(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, lambda x: x * (1 + 6e-8 * torch.randn_like(x)), found)


@pytest.mark.parametrize("name", ["small", "bert", "crammed", "izsak", "narrow"])
def test_checks_are_silent_on_another_processor(name, capsys):
    """The gradient of Wk's bias is 0 but for rounding, without RoPE and dropout."""
    config = replace(recipe(name), linear_bias=True, dropout=0.0)
    with float32_products("high"), OtherProcessor():
        x = torch.rand(2, 8, 8)
        assert (x @ x - x.double() @ x.double()).abs().max() > 1e-4  # it does what it says
        capsys.readouterr()
        check_mixing(config, 128)
        check_streaming(config, 128, torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not capsys.readouterr().out


class NormOfBatch(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


@pytest.mark.parametrize("norm", [torch.nn.Identity, NormOfBatch])
def test_a_model_without_a_norm_of_each_token_does_not_overflow(norm, monkeypatch, capsys):
    monkeypatch.setattr(module, "layer_norm", lambda config: norm(config.n_embd))
    check_mixing(model_config(n_layer=24), 128)
    assert not capsys.readouterr().out
