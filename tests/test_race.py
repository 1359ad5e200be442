import contextlib
import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SMALL_MODEL, last_line, script
from hypothesis import given
from hypothesis import strategies as st

import race
from nanocram.configurator import assignments, configure, settings

CURVES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 1)), min_size=2, max_size=12)


def falling(curve):
    """(evaluations, times, losses) of [(seconds, fall of the loss), ...]."""
    times, falls = np.cumsum(curve, axis=0).T
    losses = 20 - falls
    log = []
    for time, loss in zip(times, losses, strict=True):
        log.append({"elapsed_s": time, "val_loss_15": loss})
    return log, times, losses


@given(CURVES, st.floats(0, 1))
def test_time_to_a_loss_is_numpys_interpolation(curve, share):
    log, times, losses = falling(curve)
    loss = losses[-1] + share * (losses[0] - losses[-1])
    assert race.time_to(log, loss) == pytest.approx(np.interp(-loss, -losses, times), rel=1e-6)
    assert race.time_to(log, losses[-1] - 0.1) is None
    assert race.time_to(log, losses[0] + 0.1) == times[0]


@given(CURVES, st.floats(0.2, 5), st.integers(0, 3))
def test_a_slower_clock_is_slower_by_that_factor(curve, factor, cut):
    """The same losses at times a factor apart; it does not matter which of the two ends earlier."""
    log, _, _ = falling(curve)
    slow = [row | {"elapsed_s": row["elapsed_s"] * factor} for row in log]
    short = slow[: max(2, len(slow) - cut)]
    assert race.times_faster(log, short) == pytest.approx(factor)
    assert race.times_faster(short, log) == pytest.approx(1 / factor)


def shrunken(recipe):
    """What --shrink=4,3,64 makes of one of our recipes."""
    values = settings(ROOT / "train.py") | assignments(ROOT / "config" / recipe)
    return race.shrunken({name: value for name, (value, _) in values.items()}, 4, 3, 64)


def test_the_rule_that_shrinks_recipes():
    assert shrunken("crammed.py") == {
        "n_layer": 4,
        "n_narrow": 0,
        "n_head": 4,
        "n_embd": 256,
        "n_inner": 512,
        "micro_batch": 32,
        "batch_size": 128,
        "batch_start": 32,
        "lr": 0.003,
    }


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bert.py", {"n_layer": 3, "n_embd": 256, "n_inner": 1024, "batch_size": 32}),
        ("izsak.py", {"n_layer": 6, "n_head": 5, "n_embd": 320, "n_inner": 1344}),
        ("narrow.py", {"n_layer": 4, "n_narrow": 3, "lr": 0.004}),  # beside Muon lr stays
    ],
)
def test_other_recipes_shrink_too(recipe, expected):
    assert shrunken(recipe).items() >= expected.items()


def test_a_shrunken_model_keeps_two_layers_one_of_them_whole():
    sizes = {"n_layer": 16, "n_narrow": 12, "n_head": 1, "n_embd": 64, "n_inner": 64}
    batch = {"batch_size": 32, "batch_start": 32, "lr": 1, "optimizer": "adam"}
    two = race.shrunken(sizes | batch, 8, 1, 1)
    assert (two["n_layer"], two["n_narrow"]) == (2, 1)


def start(*args, **flags):
    """Run race.py in this process as its command line would; all settings are put back."""
    args = [*map(str, args), *(f"--{name}={value}" for name, value in flags.items())]
    with pytest.MonkeyPatch.context() as patch:
        for module in (race, race.train):
            for name in settings(module.__file__):
                patch.setattr(module, name, getattr(module, name))
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["race.py", *args])
        patch.setattr(race, "FLAGS", [arg for arg in args if arg.startswith("--")])
        configure(vars(race), race.FLAGS, also="train.py")
        race.main()


TINY = "config/tiny.py"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["config/nowhere.py"], "config/nowhere.py not found: name a recipe"),
        ([], "name at least one recipe, each of them once"),
        ([TINY, TINY], "name at least one recipe, each of them once"),
        ([TINY, "--lr", "3"], "--lr has no value: write --lr=VALUE"),
        ([TINY, "--data_dir=nowhere"], "not found: run python prepare.py --data_dir=nowhere"),
        ([TINY, "--n_layers=3"], "race.py has no setting n_layers; did you mean n_layer?"),
        ([f"{TINY}+muon"], "tiny+muon: --muon has no value: write --muon=VALUE"),
        ([TINY, f"{TINY}+lrr=1"], "tiny+lrr=1: command line: train.py has no setting lrr"),
        ([TINY, f"{TINY}+lr=fast"], "tiny+lr=fast: command line: lr='fast' should be of"),
        ([TINY, f"{TINY}+optimizer=adamx"], "adamx: optimizer=adamx cannot work: it must"),
        ([TINY, f"{TINY}+evals=3"], "evals is one for all contenders"),
        ([TINY, f"{TINY}+init=resume"], "init is one for all contenders"),
        ([TINY, f"{TINY}+seed=3"], "seed is one for all contenders"),
        ([TINY, f"{TINY}+out_dir=x"], "out_dir is one for all contenders"),
        ([TINY, f"{TINY}+lr=1", "--lr=2"], "lr is one for all contenders"),
        ([TINY, "--shrink=4,3"], "shrink=4,3 should be three numbers, like 4,3,64"),
        ([TINY, "--shrink=4,x,0"], "shrink=4,x,0 should be three numbers"),
        ([TINY, "--shrink=4,3,1.2.3"], "shrink=4,3,1.2.3 should be three numbers"),
        ([TINY, "--seed=3"], "seed is for race.py to set"),
        ([TINY, "--init=resume"], "init is for race.py to set"),
        ([TINY, "--seeds=0"], "seeds=0 cannot work: it must be between 1 and 1000"),
        ([TINY, "--budget_hours=0"], "tiny: a budget of 0 trains nothing"),
        ([TINY, "--n_head=3"], "n_embd=128 must be an even multiple of n_head=3"),
    ],
)
def test_slips_are_one_line(tmp_path, data_dir, args, message):
    if not any(arg.startswith("--data_dir") for arg in args):
        args = [*args, f"--data_dir={data_dir}"]
    with pytest.raises(SystemExit) as end:
        start(*args, out_dir=tmp_path / "race")
    assert message in str(end.value)
    assert "\n" not in str(end.value)


def test_a_typo_at_the_command_line():
    done = script("race.py", TINY, "--n_layers=3")
    assert done.returncode == 1
    assert last_line(done).endswith("race.py has no setting n_layers; did you mean n_layer?")


def test_no_run_takes_what_another_has_compiled(tmp_path, monkeypatch):
    caches = []

    def fails(command, env, **options):
        caches.append(Path(env["TORCHINDUCTOR_CACHE_DIR"]))
        assert not any(caches[-1].iterdir())
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(race.subprocess, "run", fails)
    for _ in range(2):
        with pytest.raises(SystemExit, match="did not come to its end"):
            race.run_train(["mine.py"], {"out_dir": str(tmp_path / "mine")}, "")
    assert caches[0] != caches[1]
    assert not any(cache.exists() for cache in caches)


def test_a_run_whose_micro_batch_was_halved_is_known_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(race.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    folder = tmp_path / "mine"
    asked = {"out_dir": str(folder), "micro_batch": 8}
    folder.mkdir()
    facts = {"settings": asked | {"micro_batch": 2}, "asked_micro_batch": 8, "data": "rows"}
    (folder / "run.json").write_text(json.dumps(facts))
    (tmp_path / "mine.txt").write_text("over")
    race.run_train(["mine.py"], asked, "rows")
    assert "is there already" in capsys.readouterr().out
    for micro_batch in (2, 16):
        with pytest.raises(SystemExit, match="did not come to its end"):
            race.run_train(["mine.py"], asked | {"micro_batch": micro_batch}, "rows")
        (tmp_path / "mine.txt").write_text("over")


NAMES = ["mine", "mine+optimizer=adamw+lr=2e-3"]


@pytest.fixture(scope="module")
def raced(tmp_path_factory, data_dir):
    """(folder, arguments, options, output) of a race of two contenders, one of them changed."""
    folder = tmp_path_factory.mktemp("raced")
    for_all = ("eval_rows", "evals", "vocab_size")
    lines = [f"{name} = {value!r}\n" for name, value in SMALL_MODEL.items() if name not in for_all]
    (folder / "mine.py").write_text("".join(lines))
    args = [folder / "mine.py", f"{folder}/mine.py+optimizer=adamw+lr=2e-3"]
    options = {
        "data_dir": data_dir,
        "out_dir": folder / "race",
        "max_steps": 4,
        "seeds": 1,
        "evals": 2,
        "eval_rows": 16,
        "log_every": 3,
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        start(*args, **options)
    return folder / "race", args, options, printed.getvalue()


def table_rows(text):
    """The cells of a markdown table, its head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_the_table_and_the_csv_of_a_race(raced):
    folder, _, _, printed = raced
    table = table_rows(printed)
    assert table == table_rows((folder / "race.md").read_text())
    assert [row[0] for row in table] == NAMES
    assert float(table[0][-1]) == 1.0
    for name, cells, row in zip(NAMES, table, read_csv(folder / "race.csv"), strict=True):
        facts, log = race.load_run(folder / f"{name}-0")
        assert float(cells[6].split()[0]) == pytest.approx(log[-1]["val_loss_15"], abs=1e-3)
        assert int(cells[4].replace(",", "")) == log[-1]["step"]
        assert row["recipe"] == name
        for column in ("val_loss_15", "val_loss_25", "step", "tokens", "elapsed_s"):
            assert float(row[column]) == log[-1][column]
        assert (row["seed"], row["budget_hours"]) == ("0", "0.1")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"])
        assert row["device"].startswith("cpu: ")
        assert int(row["threads"]) >= 1
        assert row["commit"] == re.sub("^([0-9a-f]{7})[0-9a-f]{33}", r"\1", facts["commit"])
    assert (folder / "race.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_the_raced_runs(raced, name):
    facts, _ = race.load_run(raced[0] / f"{name}-0")
    chosen = facts["settings"]
    assert [chosen[key] for key in ("log_every", "vocab_size", "evals")] == [3, 600, 2]
    if name == "mine":
        assert (chosen["optimizer"], chosen["lr"]) == ("muon", 0.004)
    else:
        assert (chosen["optimizer"], chosen["lr"]) == ("adamw", 0.002)


def test_what_is_there_already_is_not_run_again(raced, capsys, monkeypatch):
    folder, args, options, printed = raced
    monkeypatch.setattr(race.subprocess, "run", None)
    start(*args, **options)
    again = capsys.readouterr().out
    assert again.count("is there already") == 2
    assert table_rows(again) == table_rows(printed)
    assert not (folder / "mine-0.1").exists()


@pytest.mark.parametrize("change", ["settings", "data", "end"])
def test_what_differs_is_run_again(raced, tmp_path, monkeypatch, change):
    """Another setting, other data, or a run that did not come to its end."""
    folder, _, _, _ = raced
    facts, _ = race.load_run(folder / "mine-0")
    values = facts["settings"] | {"out_dir": str(tmp_path / "mine-0")}
    data = facts["data"]
    shutil.copytree(folder / "mine-0", tmp_path / "mine-0")
    (tmp_path / "mine-0" / "run.json").write_text(json.dumps(facts | {"settings": values}))
    (tmp_path / "mine-0.txt").write_text("")
    started = []

    def fails(command, **options):
        started.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(race.subprocess, "run", fails)
    race.run_train(["mine.py"], values, data)
    assert not started
    if change == "settings":
        values = values | {"log_every": 6}
    elif change == "data":
        data = "other data"
    else:
        (tmp_path / "mine-0.txt").unlink()
    with pytest.raises(SystemExit, match="did not come to its end"):
        race.run_train(["mine.py"], values, data)
    assert len(started) == 1


def test_evaluations_alone_are_what_a_race_compares(raced):
    _, rows = race.load_run(raced[0] / "mine-0")
    assert len(rows) == 3 and all("val_loss_15" in row for row in rows)
    assert len(race.record.read_log(raced[0] / "mine-0")) > len(rows)


def test_a_run_without_its_log_is_named(raced, tmp_path):
    folder = shutil.copytree(raced[0] / "mine-0", tmp_path / "mine-0")
    log = (folder / "log.csv").read_text()
    (folder / "log.csv").write_text(log.partition("\n")[2])
    with pytest.raises(SystemExit, match=r"mine-0 has lost its log\.csv: delete the folder"):
        race.load_run(folder)
    (folder / "log.csv").unlink()
    with pytest.raises(SystemExit, match=r"mine-0 has lost its log\.csv: delete the folder"):
        race.load_run(folder)


def test_seeds_are_medians_with_a_range(raced):
    facts, rows = race.load_run(raced[0] / "mine-0")
    worse = [row | {"val_loss_15": row["val_loss_15"] + 1, "step": 9} for row in rows]
    runs = {"one": [(facts, rows), (facts, worse)], "two": [(facts, rows), (facts, rows)]}
    loss = rows[-1]["val_loss_15"]
    one, two = table_rows("\n".join(race.markdown_table(runs)))
    assert one[6] == f"{loss + 0.5:.3f} ({loss:.3f} to {loss + 1:.3f})"
    assert two[6] == f"{loss:.3f} ({loss:.3f} to {loss:.3f})"
    assert (one[-1], two[-1]) == ("1.00", f"{(1 + race.times_faster(rows, worse)) / 2:.2f}")
