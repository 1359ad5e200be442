"""results/compare.py on two real runs of train.py, and its arithmetic beside numpy's."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SMALL_MODEL, command, table_cells
from forked import SCRIPT

from nanocram import runlog
from results import compare


def test_time_to_a_loss_lies_between_two_evaluations():
    rows = [{"elapsed_s": t, "val_loss_15": loss} for t, loss in ((10, 7.0), (20, 5.0), (40, 4.0))]
    assert [compare.time_to(rows, loss) for loss in (6.5, 5.0, 4.25)] == [12.5, 20, 35]


@pytest.mark.slow
def test_seeds_are_one_line_and_the_first_line_is_the_measure(
    tmp_path, data_dir, server, monkeypatch, capsys
):
    """Two seeds of Muon, and AdamW between them."""
    changes = {"muon.0": {}, "adamw": {"optimizer": "adamw"}, "muon.1": {"seed": 1}}
    names = [str(tmp_path / name) for name in changes]
    for name, own in zip(names, changes.values(), strict=True):
        values = SMALL_MODEL | {"data_dir": data_dir, "out_dir": name, "max_steps": 6}
        server.run(ROOT, SCRIPT, command("train.py", **(values | own))[1:])
    monkeypatch.setattr(sys, "argv", ["compare.py", *names])
    compare.main()
    muon, adamw = table_cells(capsys.readouterr().out)
    assert table_cells((tmp_path / "compare.md").read_text()) == [muon, adamw]
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert (muon[0], adamw[0]) == (f"{names[0]}, 2 seeds", names[1])
    ends = {name: runlog.read_log(name)[-1] for name in names}
    losses = sorted(ends[name]["val_loss_15"] for name in (names[0], names[2]))
    wanted = f"{np.median(losses):.3f} ({losses[0]:.3f} to {losses[1]:.3f})"
    assert muon[5] == wanted and muon[7] == "1.00"
    assert adamw[5] == f"{ends[names[1]]['val_loss_15']:.3f}"
    assert muon[3] == adamw[3] == "6"
    facts = runlog.read_facts(names[1])
    assert adamw[1] == f"{facts['parameters'] / 1e6:.1f}M"

    facts["data"] += "x"
    Path(names[1], "run.json").write_text(json.dumps(facts))
    compare.main()
    assert "WARNING: the runs have different data" in capsys.readouterr().out
