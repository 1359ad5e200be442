"""results/compare.py on two real runs of train.py, and its arithmetic beside numpy's."""

import re
import shutil

import numpy as np
import pytest
from conftest import SMALL_MODEL, last_line, script
from hypothesis import given
from hypothesis import strategies as st

from nanocram import runlog
from results import compare

curves = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 1)), min_size=2, max_size=12)


def falling(curve):
    """(evaluations, times, losses) of [(seconds, fall of the loss), ...]."""
    times, falls = np.cumsum(curve, axis=0).T
    rows = [
        {"elapsed_s": time, "val_loss_15": 20 - fall}
        for time, fall in zip(times, falls, strict=True)
    ]
    return rows, times, 20 - falls


@given(curves, st.floats(0, 1))
def test_time_to_a_loss_is_numpys_interpolation(curve, share):
    rows, times, losses = falling(curve)
    loss = losses[-1] + share * (losses[0] - losses[-1])
    assert compare.time_to(rows, loss) == pytest.approx(np.interp(-loss, -losses, times), rel=1e-6)


@given(curves, st.floats(0.2, 5), st.integers(0, 3))
def test_a_slower_clock_is_slower_by_that_factor(curve, factor, cut):
    """The same losses at times a factor apart; it does not matter which of the two ends earlier."""
    rows, _, _ = falling(curve)
    slow = [row | {"elapsed_s": row["elapsed_s"] * factor} for row in rows]
    short = slow[: max(2, len(slow) - cut)]
    assert compare.times_sooner(rows, short) == pytest.approx(factor)
    assert compare.times_sooner(short, rows) == pytest.approx(1 / factor)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_dir):
    """A folder with three runs: two seeds of Muon, and one with AdamW."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"muon.0": {}, "muon.1": {"seed": 1}, "adamw": {"optimizer": "adamw"}}
    for name, own in changes.items():
        flags = SMALL_MODEL | {"data_dir": data_dir, "out_dir": folder / name, "max_steps": 6} | own
        done = script("train.py", **flags)
        assert done.returncode == 0, done.stdout
    return folder


def table_cells(text):
    """The cells of a markdown table's lines, its heading left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_seeds_are_one_line_and_the_first_line_is_the_measure(runs):
    names = [str(runs / name) for name in ("muon.0", "adamw", "muon.1")]
    done = script("results/compare.py", *names)
    assert done.returncode == 0, done.stdout
    muon, adamw = table_cells(done.stdout)
    assert table_cells((runs / "compare.md").read_text()) == [muon, adamw]
    assert (runs / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert (muon[0], adamw[0]) == (f"{names[0]}, 2 seeds", names[1])
    ends = {name: runlog.read_log(name)[-1] for name in names}
    losses = sorted(ends[name]["val_loss_15"] for name in (names[0], names[2]))
    wanted = f"{np.median(losses):.3f} ({losses[0]:.3f} to {losses[1]:.3f})"
    assert muon[5] == wanted and muon[7] == "1.00"
    assert adamw[5] == f"{ends[names[1]]['val_loss_15']:.3f}"
    assert muon[3] == adamw[3] == "6"
    facts = runlog.read_facts(names[1])
    assert adamw[1] == f"{facts['parameters'] / 1e6:.1f}M"


def test_runs_of_other_data_are_said(runs, tmp_path):
    other = shutil.copytree(runs / "adamw", tmp_path / "other")
    text = (other / "run.json").read_text()
    (other / "run.json").write_text(re.sub('"data": "', '"data": "x', text))
    done = script("results/compare.py", runs / "adamw", other)
    assert "WARNING: the runs have different data" in done.stdout
    assert not (tmp_path / "compare.md").exists()  # beside the first


@pytest.mark.parametrize("names", [["nowhere"], []])
def test_slips_are_said(tmp_path, names):
    done = script("results/compare.py", *names, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert "--out_dir" in last_line(done) if names else "results/compare.py out/" in done.stdout
    assert not list(tmp_path.iterdir())
