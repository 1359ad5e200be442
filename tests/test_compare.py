"""results/compare.py on runs whose losses are known, and on two real ones; by numpy and a table."""

import json
import sys

import numpy as np
import pytest
from conftest import SMALL_MODEL, put, script, table_cells

from nanocram import runlog
from results import compare

T_OF_4 = 2.776  # Student's t, 4 degrees of freedom, 0.05 two-sided, of any textbook
BASE = (3.0, 3.1, 2.9, 3.05, 2.95)


def write_run(folder, seed, loss, tokens=1_000_000, evals=6, settings=(), **facts):
    """A run of evals evaluations, whose loss falls along a line to loss."""
    folder.mkdir(parents=True)
    done = np.linspace(0, 1, evals + 1)
    columns = np.stack((100 * done, 10 * evals * done, tokens * done, loss + 3 - 3 * done), 1)
    how = {"header": "elapsed_s,step,tokens,val_loss_15", "comments": "", "delimiter": ","}
    np.savetxt(folder / "log.csv", columns, "%.12g", **how)
    own = {"seed": seed, "out_dir": str(folder), "init": "scratch", "lr": 0.1, "eval_rows": 8}
    usual = {"data": "d", "held_out": "h", "device": "cpu", "code": "c", "commit": "x"}
    usual |= {"began_from": {}, "parameters": 1000, "frequency_loss": 6.6}
    usual |= {"settings": own | dict(settings), "finished_at_step": 10 * evals}
    (folder / "run.json").write_text(json.dumps(usual | facts))
    return str(folder)


@pytest.fixture
def table(monkeypatch, capsys):
    """The cells of the lines that compare.py prints for arguments, and all that it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
        compare.main()
        said = capsys.readouterr().out
        return table_cells(said), said

    return run


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_difference_is_believed_from_students_t_on(tmp_path, table, factor):
    """Of pairs of equal seed: their losses differ by more than the variants do."""
    noise = np.array([0.02, -0.01, 0.0, 0.01, -0.02])
    error = noise.std(ddof=1) / 5**0.5
    moved = noise + factor * T_OF_4 * error
    for seed, (loss, more) in enumerate(zip(BASE, moved, strict=True)):
        write_run(tmp_path / f"a/{seed}", seed, loss)
        write_run(tmp_path / f"b/{4 - seed}", seed, loss + more, code="edited")
    (base, edited), said = table(f"base={tmp_path}/a/*", f"edited={tmp_path}/b")
    verdict = "worse" if factor > 1 else "cannot be told apart"
    assert edited[7:] == [f"{moved.mean():+.3f} ± {error:.3f} of 5 pairs: {verdict}"] * 2
    assert base[:2] == ["base", "5"] and base[6] == "3.000 (2.900 to 3.100)"
    assert edited[1] == "5" and base[7:] == ["–", "–"]
    assert "WARNING" not in said
    write_run(tmp_path / "b/7", 7, 1.0, code="edited")  # no seed of the other
    (_, with_another), said = table(f"base={tmp_path}/a/*", f"edited={tmp_path}/b")
    assert with_another[7:] == edited[7:] and "do not both have seeds [7]" in said
    # nothing is believed of the seeds that are left, and the table says so
    write_run(tmp_path / "b/9", 9, 3.0, code="edited", finished_at_step=50)
    (_, edited), said = table(f"base={tmp_path}/a/*", f"edited={tmp_path}/b")
    assert edited[7].endswith("of 5 pairs; no verdict, for runs are missing")
    assert f"left out of edited: {tmp_path}/b/9 (is unfinished)" in said
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("compare.md", "compare.png"):  # where it may not write, it prints
        (tmp_path / f"a/{name}.tmp").mkdir()
        assert f"no {name}: " in table(f"base={tmp_path}/a/*")[1]


def test_nothing_is_believed_where_a_run_is_in_mid_schedule(tmp_path, table):
    """A variant of half the speed: at its last token the other is half done, and 1.5 higher."""
    for seed, loss in enumerate(BASE):
        write_run(tmp_path / f"a/{seed}", seed, loss)
        write_run(tmp_path / f"b/{seed}", seed, loss, tokens=500_000)
        write_run(tmp_path / f"c/{seed}", seed, loss, tokens=500_000, evals=2)
        write_run(tmp_path / f"d/{seed}", seed, loss, tokens=300_000, evals=1)
        write_run(tmp_path / f"e/{seed}", seed, loss, tokens=970_000)
    longer = "; no verdict, for the longer run was only {} % done"
    (_, slow, rare, _, slower), _ = table(*(tmp_path / name for name in "abcde"))
    assert slow[7] == rare[7] == slower[7] == "+0.000 ± 0.000 of 5 pairs: cannot be told apart"
    assert slow[8] == rare[8] == "-1.500 ± 0.000 of 5 pairs" + longer.format(50)
    assert slower[8] == "-0.090 ± 0.000 of 5 pairs" + longer.format(97)
    (_, unknown), _ = table(tmp_path / "c", tmp_path / "d")
    assert unknown[8] == "unknown: it takes more --evals"


def test_what_misleads_is_said(tmp_path, table, monkeypatch):
    put(monkeypatch, compare, draw=lambda variants, path: None)  # seconds
    names = [write_run(tmp_path / f"r{seed}", seed, 3.0) for seed in range(3)]
    edited = [write_run(tmp_path / f"e{seed}", seed, 3.0, code="e") for seed in range(2)]
    # without names code makes a variant, and its first run the name
    (base, other), _ = table(*names, *edited)
    assert base[:2] == [names[0], "3"] and other[:2] == [edited[0], "2"]
    assert table(names[0], edited[0])[0][1][7] == "+0.000; no verdict, for it is one pair"
    assert table(names[1], edited[0])[0][1][7] == "no seed in common"

    write_run(tmp_path / "e5", 5, 3.0, code="e")

    def said(settings=(), tokens=1_000_000, loss=3.0, **facts):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        new = write_run(folder, 5, loss, tokens=tokens, settings=settings, **facts)
        return table(f"base={tmp_path}/e[15]", f"other={names[1]}", f"other={new}")[1]

    assert "WARNING" not in said(settings={"out_dir": "elsewhere"})
    assert "b has the code and the settings of" in table(f"a={names[0]}", f"b={names[1]}")[1]
    assert "had different devices" in said(device="another")
    assert "runs were trained on different data" in said(data="x")
    assert "different held-out rows" in said(held_out="x")
    assert "different held-out rows" in said(settings={"eval_rows": 9})
    assert "the runs of other differ in code" in said(code="x")
    assert "the runs of other differ in lr" in said(settings={"lr": 0.2})
    assert "other has 8,000 to 10,000 tokens/s" in said(tokens=800_000)
    assert "other guesses no better than by token frequency" in said(loss=6.7)
    # what cannot be compared is named; a byte-order mark harms nothing
    path = tmp_path / "lr[1e-3]"
    write_run(path / "a", 5, 3.0, changed_at_resume=["seed", "out_dir"])
    write_run(path / "b", 5, np.nan)
    write_run(path / "c", 5, 3.0, finished_at_step=70)
    write_run(path / "d", 5, 3.0)
    (path / "d/run.json").write_text('{"settings": {}}')
    write_run(path / "e", 1, 3.0, changed_at_resume=["lr", "init"])
    log = (path / "e/log.csv").read_text()
    (path / "e/log.csv").write_text(log.strip(), "utf-8-sig")
    (_, other), text = table(f"base={tmp_path}/e[15]", f"other={path}/*")
    flaws = {"a": "got another seed", "b": "diverged", "c": "has a log.csv without the end"}
    for name, why in (flaws | {"d": "has no run.json of this version: began_from is"}).items():
        assert f"/{name} ({why}" in text
    assert other[1] == "1"
    stopped = write_run(tmp_path / "stopped", 0, 3.0, finished_at_step=50)
    for arguments in (["nowhere"], [f"a={tmp_path}/[er]0"], [names[0], stopped], ["--help"]):
        with pytest.raises(SystemExit, match=r"[a-z]"):
            table(*arguments)


@pytest.mark.slow
def test_real_runs(tmp_path, data_dir, table):
    """Two seeds of Muon, one of AdamW."""
    changes = {"muon.0": {}, "adamw": {"optimizer": "adamw"}, "muon.1": {"seed": 1}}
    for name, own in changes.items():
        folders = {"data_dir": data_dir, "out_dir": tmp_path / name}
        script("train.py", **SMALL_MODEL | folders | own, max_steps=6)
    (muon, adamw), said = table(*(tmp_path / name for name in changes))
    assert table_cells((tmp_path / "compare.md").read_text()) == [muon, adamw]
    ends = {name: runlog.read_log(tmp_path / name)[-1]["val_loss_15"] for name in changes}
    assert adamw[8] == f"{ends['adamw'] - ends['muon.0']:+.3f}; no verdict, for it is one pair"
    losses = sorted(loss for name, loss in ends.items() if name != "adamw")
    assert muon[6] == f"{np.mean(losses):.3f} ({losses[0]:.3f} to {losses[1]:.3f})"
    assert muon[4] == adamw[4] == "6" and "differ in" not in said
