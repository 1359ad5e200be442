"""results/compare.py on two real runs of train.py, and its arithmetic beside numpy's."""

import re
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT, SMALL_MODEL
from forked import SCRIPT, Server
from hypothesis import given
from hypothesis import strategies as st

from nanocram import runlog
from results import compare

curves = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 1)), min_size=2, max_size=12)


@given(curves, st.floats(0, 1))
def test_time_to_a_loss_is_numpys_interpolation(curve, share):
    times, falls = np.cumsum(curve, axis=0).T
    losses = 20 - falls
    both = zip(times, losses, strict=True)
    rows = [{"elapsed_s": time, "val_loss_15": loss} for time, loss in both]
    loss = losses[-1] + share * (losses[0] - losses[-1])
    assert compare.time_to(rows, loss) == pytest.approx(np.interp(-loss, -losses, times), rel=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_dir):
    """A folder with three runs: two seeds of Muon, and one with AdamW."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"muon.0": {}, "muon.1": {"seed": 1}, "adamw": {"optimizer": "adamw"}}
    server = Server(folder)
    for name, own in changes.items():
        values = SMALL_MODEL | {"data_dir": data_dir, "out_dir": folder / name, "max_steps": 6}
        flags = [f"--{key}={value}" for key, value in (values | own).items()]
        code, said = server.run(ROOT, SCRIPT, [ROOT / "train.py", *flags])
        assert code == 0, said
    server.close()
    return folder


def table_cells(text):
    """The cells of a markdown table's lines, its heading left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.slow
def test_seeds_are_one_line_and_the_first_line_is_the_measure(runs, monkeypatch, capsys):
    names = [str(runs / name) for name in ("muon.0", "adamw", "muon.1")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *names])
    compare.main()
    muon, adamw = table_cells(capsys.readouterr().out)
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


@pytest.mark.slow
def test_runs_of_other_data_are_said(runs, tmp_path, monkeypatch, capsys):
    other = shutil.copytree(runs / "adamw", tmp_path / "other")
    text = (other / "run.json").read_text()
    (other / "run.json").write_text(re.sub('"data": "', '"data": "x', text))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(runs / "adamw"), str(other)])
    compare.main()
    assert "WARNING: the runs have different data" in capsys.readouterr().out
