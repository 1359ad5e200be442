"""bench.py: what it prints follows from what it measures, and its rivals compute one loss."""

import functools
import json
import re

import numpy as np
import pytest
import torch
from conftest import SMALL_MODEL, model_config, put, script
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import bench
from model import MaskedLM
from nanocram import machine
from nanocram.model_folder import to_folder_keys
from nanocram.settings import configure

CPU = torch.device("cpu")


@pytest.fixture
def small(train, monkeypatch):
    """The train module with the settings of a small run, behind a small bench.py."""
    put(monkeypatch, bench, bench_steps=4, ROUNDS=2, TURN_SECONDS=0.1)
    put(monkeypatch, train, batch_ramp=0.6)  # bench.step_of() changes it
    return train


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


def test_random_tokens_are_as_uneven_as_words(small):
    """Counts of tokens by rank beside 1 / (rank + 2.7), by a chi-square test; none is special."""
    torch.manual_seed(0)
    rows = bench.RandomRows(small.seq_len, CPU).read(0, 2000)
    assert rows.shape == (2000, small.seq_len) and rows.dtype == torch.int64
    n_special, n_tokens = 4, small.vocab_size - 4
    law = 1 / (np.arange(1, n_tokens + 1) + 2.7)
    seen = np.bincount(rows.flatten().numpy(), minlength=small.vocab_size)
    assert len(seen) == small.vocab_size and not seen[:n_special].any()
    seen = seen[n_special:]
    assert stats.chisquare(seen, seen.sum() * law / law.sum()).pvalue > 1e-3
    assert stats.chisquare(seen).pvalue < 1e-9  # an even draw would not pass for it


def test_the_first_measured_steps_are_discarded(small, monkeypatch, capsys):
    """Three slow ones, then steps of 2, 3, 4 and 5 s: the median of these, and MFU at it."""
    seconds = iter([1.0, 1.0, 1.0, 1.0, 90.0, 80.0, 70.0, 2.0, 3.0, 4.0, 5.0])  # after the warm-up

    def timed(dev, work, *args):
        return (next(seconds) if work is bench.step_of else 1.0), None

    monkeypatch.setattr(machine, "timed", timed)
    run = bench.new_run()
    bench.measure_speed(run)
    assert not list(seconds)
    speed = np.median([16 * small.seq_len / s for s in (2.0, 3.0, 4.0, 5.0)])
    printed = capsys.readouterr().out
    assert number(r"tokens/s +([\d,]+)", printed) == pytest.approx(speed, abs=0.5)
    mfu = speed * run.flops_per_token / 1e12  # the rate that conftest.py gives the machine
    assert number(r"MFU +([\d.]+)%", printed) / 100 == pytest.approx(mfu, abs=1e-3)


def test_a_step_has_the_rows_that_are_asked_for_and_learns(small):
    run = bench.new_run()
    before = [weight.detach().clone() for weight in run.model.parameters()]
    bench.step_of(run, 2)
    bench.step_of(run, 3)
    assert (run.state.step, run.state.row) == (2, 5 * small.micro_batch)
    after = run.model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=30))
def test_spread_is_numpys(values):
    low, mid, high = np.percentile(values, [10, 50, 90])
    words = bench.median_and_range(values, ".6e").replace("(", "").replace(")", "").split()
    assert [float(words[i]) for i in (0, 1, 3)] == pytest.approx([mid, low, high], rel=1e-5)


def test_rivals_compute_the_same_loss(small):
    """With our weights, transformers' dense and sparse heads end at our loss."""
    run = bench.new_run()
    batch = small.masked_batch(run, 0, small.mask_count(0.5))
    models, loss_fns = bench.make_rivals(run.model.config, batch, CPU, torch.float32)
    ours = models["nanocram"]
    torch.nn.init.normal_(ours.model.layers[-1].mlp.Wo.weight)  # zero until here
    weights = to_folder_keys(ours.state_dict(), ours.config, True)
    for name, theirs in models.items():
        if theirs is not ours:
            keys = theirs.load_state_dict(weights, strict=False)
            assert keys.missing_keys == ["decoder.weight"] and not keys.unexpected_keys
        assert loss_fns[name]().item() == pytest.approx(loss_fns["nanocram"]().item(), rel=1e-5)
    assert len(models) == 3


def test_the_whole_report(small, monkeypatch, capsys, tmp_path):
    # torch.compile without inductor
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    trace = tmp_path / "a" / "trace.json"
    put(monkeypatch, small, compile=True, max_steps=3)  # fewer than it takes
    put(monkeypatch, bench, compare=True, profile=True, trace=str(trace))
    bench.main()
    text = capsys.readouterr().out
    assert "WARNING" not in text and "# of Calls" in text
    assert number(r"memory +([\d.]+) GiB", text) > 0.05
    assert json.loads(trace.read_text())["traceEvents"]
    for part in ("data", "forward", "backward", "update"):
        assert number(rf"{part} ([\d.]+)", text) >= 0

    # MFU follows from the speed, and so does the comparison
    flops = number(r"tokens/s +([\d,]+)", text) * number(r"([\d.,]+) MFLOP a token", text) * 1e6
    assert number(r"MFU +([\d.]+)%", text) / 100 == pytest.approx(flops / 1e12, rel=0.05, abs=1e-3)
    assert text.index("some 1 min") < text.index("| nanocram")
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    ours, theirs = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ours[0] == "nanocram" and theirs[0].startswith("transformers") and ours[2] == "1.00"
    speeds = [float(cells[1].split()[0].replace(",", "")) for cells in (ours, theirs)]
    assert float(theirs[2]) == pytest.approx(speeds[0] / speeds[1], rel=0.02, abs=0.01)


def test_as_a_command_without_data(tmp_path):
    """Flags of train.py and its own all reach it; it leaves nothing in the folder it runs in."""
    flags = SMALL_MODEL | {"data_dir": "nowhere", "bench_steps": 3, "dtype": "auto"}
    done = script("bench.py", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stdout
    assert "random tokens" in done.stdout
    sizes = {k: SMALL_MODEL[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")}
    parameters = sum(p.numel() for p in MaskedLM(model_config(**sizes)).parameters())
    assert f"{parameters:,} parameters" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_misspelt_setting_of_train_is_said(small):
    with pytest.raises(SystemExit, match="did you mean n_layer"):
        configure(vars(bench), ["--n_layers=3"], also=small)
