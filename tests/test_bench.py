"""bench.py: what it prints follows from what it measures. Its rivals compute our loss."""

import functools
import re

import pytest
import torch
from conftest import new_run, put, table_cells

import bench
from nanocram.model_folder import to_folder_keys
from results import bench_modernbert


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


def test_transformers_with_our_weights_has_our_loss(train, monkeypatch):
    """With its dense and its sparse head."""
    put(monkeypatch, train, **bench_modernbert.AS_THEIRS)
    run = new_run()
    batch = train.masked_batch(run, 0, run.micro_batch, train.row_shape(0.5))
    models = bench_modernbert.make_models(run, batch)
    ours, our_loss = models["nanocram"]
    torch.nn.init.normal_(ours.model.layers[-1].mlp.Wo.weight)  # zero until here
    weights = to_folder_keys(ours.state_dict(), ours.config)
    for theirs, loss_fn in models.values():
        if theirs is not ours:
            keys = theirs.load_state_dict(weights, strict=False)
            assert not keys.missing_keys and not keys.unexpected_keys
        assert loss_fn().item() == pytest.approx(our_loss().item(), rel=1e-5)
    assert len(models) == 3


def test_the_whole_report(train, monkeypatch, capsys):
    # torch.compile without inductor
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    put(monkeypatch, train, compile=True, data_dir="nowhere", max_steps=3)  # fewer than it takes
    put(monkeypatch, train, batch_ramp=0.6)  # bench.step_of() changes it
    put(monkeypatch, bench, bench_steps=4, profile=True)
    bench.main()
    text = capsys.readouterr().out
    assert "WARNING" not in text and "# of Calls" in text
    assert number(r"memory +([\d.]+) GiB", text) > 0.05
    # MFU follows from the speed, to the two digits that are printed
    flops = number(r"tokens/s +([\d,]+)", text) * number(r"([\d.,]+) MFLOP a token", text) * 1e6
    assert number(r"MFU +([\d.]+)%", text) / 100 == pytest.approx(flops / 1e12, rel=0.3, abs=4e-3)

    put(monkeypatch, train, **bench_modernbert.AS_THEIRS)  # main() would leave them to other tests
    put(monkeypatch, bench_modernbert, ROUNDS=2, TURN_SECONDS=0.1)
    bench_modernbert.main()
    ours, *theirs = table_cells(capsys.readouterr().out)
    assert ours[0] == "nanocram" and ours[2] == "1.00" and len(theirs) == 2
    for name, speed, faster in theirs:
        assert name.startswith("transformers")
        speeds = [float(cell.split()[0].replace(",", "")) for cell in (ours[1], speed)]
        assert float(faster) == pytest.approx(speeds[0] / speeds[1], rel=0.02, abs=0.01)
