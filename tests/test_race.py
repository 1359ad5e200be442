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
from conftest import ROOT, SMALL_MODEL, put
from hypothesis import given
from hypothesis import strategies as st

import race
from nanocram.configurator import configure

CONFIG = ROOT / "config"
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


@contextlib.contextmanager
def settings_put_back():
    with pytest.MonkeyPatch.context() as patch:
        for module in (race, race.train):
            put(patch, module, **{name: getattr(module, name) for name in module.SETTINGS})
        yield patch


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("crammed", {"n_layer": 4, "n_embd": 128, "n_inner": 256, "batch_size": 512, "lr": 0.001}),
        ("bert", {"n_layer": 3, "n_embd": 128, "n_inner": 512, "batch_size": 32, "dropout": 0.1}),
        ("izsak", {"n_layer": 6, "n_embd": 128, "n_inner": 682, "batch_start": 256}),
        ("narrow", {"n_layer": 4, "n_narrow": 3, "batch_size": 256, "batch_start": 64}),
    ],
)
def test_recipes_are_shrunk_by_a_recipe(recipe, expected):
    (argv,) = race.parse_contenders([f"{CONFIG}/{recipe}.py+{CONFIG}/shrunk.py"]).values()
    with settings_put_back():
        values = race.set_train(argv)
        race.train.check_settings()
    assert values.items() >= (expected | {"n_head": 2, "micro_batch": 32}).items()


def start(*args, **flags):
    """Run race.py in this process as its command line would."""
    args = [*map(str, args), *(f"--{name}={value}" for name, value in flags.items())]
    with settings_put_back() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["race.py", *args])
        patch.setattr(race, "FLAGS", [arg for arg in args if arg.startswith("--")])
        configure(vars(race), race.FLAGS, also=race.train)
        race.main()


TINY = "config/tiny.py"


@pytest.mark.parametrize(
    ("args", "culprit"),
    [
        (["config/nowhere.py"], "config/nowhere.py"),
        ([f"{TINY}+config/nowhere.py"], "config/nowhere.py"),
        ([], "recipe"),
        ([TINY, TINY], "once"),
        ([TINY, "--lr", "3"], "--lr=VALUE"),
        ([TINY, "--data_dir=nowhere"], "nowhere"),
        ([TINY, "--n_layers=3"], "did you mean n_layer?"),
        ([f"{TINY}+muon"], "tiny+muon: "),
        ([TINY, f"{TINY}+lrr=1"], "tiny+lrr=1: "),
        ([TINY, f"{TINY}+lr=fast"], "tiny+lr=fast: "),
        ([TINY, f"{TINY}+optimizer=adamx"], "optimizer=adamx"),
        ([TINY, f"{TINY}+evals=3"], "evals is one for all"),
        ([TINY, f"{TINY}+init=resume"], "init is one for all"),
        ([TINY, f"{TINY}+lr=1", "--lr=2"], "lr is one for all"),
        ([TINY, "--seed=3"], "--seeds"),
        ([TINY, "--seeds=0"], "seeds=0"),
        ([TINY, "--budget_hours=0"], "budget"),
        ([TINY, "--n_head=3"], "n_head=3"),
    ],
)
def test_slips_are_one_line(tmp_path, data_dir, args, culprit):
    if not any(arg.startswith("--data_dir") for arg in args):
        args = [*args, f"--data_dir={data_dir}"]
    with pytest.raises(SystemExit) as end:
        start(*args, out_dir=tmp_path / "race")
    assert culprit in str(end.value) and "\n" not in str(end.value)
    assert not (tmp_path / "race").exists()


def test_no_run_takes_what_another_has_compiled(tmp_path, monkeypatch):
    caches = []

    def fails(command, env, **options):
        caches.append(Path(env["TORCHINDUCTOR_CACHE_DIR"]))
        assert not any(caches[-1].iterdir())
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(race.subprocess, "run", fails)
    for _ in range(2):
        with pytest.raises(SystemExit, match="did not come to its end"):
            race.run_train(["mine.py"], {"out_dir": str(tmp_path / "mine"), "compile": True}, "")
    assert caches[0] != caches[1]
    assert not any(cache.exists() for cache in caches)


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


def test_the_settings_of_the_raced_runs(raced):
    for name, optimizer, lr in zip(NAMES, ("muon", "adamw"), (0.004, 0.002), strict=True):
        chosen = race.load_run(raced[0] / f"{name}-0")[0]["settings"]
        assert [chosen[key] for key in ("log_every", "vocab_size", "evals")] == [3, 600, 2]
        assert (chosen["optimizer"], chosen["lr"]) == (optimizer, lr)


def test_what_is_there_already_is_not_run_again(raced, capsys, monkeypatch):
    folder, args, options, printed = raced
    monkeypatch.setattr(race.subprocess, "run", None)
    start(*args, **options)
    assert table_rows(capsys.readouterr().out) == table_rows(printed)
    assert not (folder / "mine-0.1").exists()


@pytest.fixture
def again(raced, tmp_path, monkeypatch):
    """A run that is over: (its run.json, a function of settings and data: whether it runs anew)."""
    folder = shutil.copytree(raced[0] / "mine-0", tmp_path / "mine-0")
    facts, _ = race.load_run(folder)
    facts["settings"]["out_dir"] = str(folder)
    monkeypatch.setattr(race.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))

    def runs_anew(values, data=facts["data"]):
        (folder / "run.json").write_text(json.dumps(facts))
        (tmp_path / "mine-0.txt").write_text("over")
        try:
            race.run_train(["mine.py"], values, data)
        except SystemExit as end:
            assert "did not come to its end" in str(end)
            assert not (tmp_path / "mine-0.txt").exists()
            return True
        return False

    return facts, runs_anew


def test_what_differs_is_run_again(again):
    """Another setting, other data."""
    facts, runs_anew = again
    values = dict(facts["settings"])
    assert not runs_anew(values)
    assert runs_anew(values | {"log_every": 6})
    assert runs_anew(values, "other data")


def test_a_setting_that_is_new_since_had_its_default(again):
    facts, runs_anew = again
    values = dict(facts["settings"])
    del facts["settings"]["zero_init"]
    assert not runs_anew(values)
    assert runs_anew(values | {"zero_init": not values["zero_init"]})


def test_a_run_of_other_code_is_named(again, capsys):
    """It is kept: whoever edits a comment loses no race of hours."""
    facts, runs_anew = again
    assert not runs_anew(facts["settings"])
    assert "by code" not in capsys.readouterr().out
    facts["code"] = "0123456789abcdef"
    assert not runs_anew(facts["settings"])
    assert "mine-0 is there already\nit is by code 0123456789abcdef" in capsys.readouterr().out


def test_what_a_run_itself_had_to_change_is_known_again(again):
    """The micro_batch that was halved, compile where nothing compiles."""
    facts, runs_anew = again
    asked = facts["settings"] | {"compile": True}
    facts["asked_compile"] = True
    facts["settings"] |= {"micro_batch": 2, "compile": False}
    assert not runs_anew(asked)
    for micro_batch in (2, 16):
        assert runs_anew(asked | {"micro_batch": micro_batch})


def test_a_run_that_did_not_come_to_its_end_is_run_again(again, tmp_path):
    facts, runs_anew = again
    runs_anew(facts["settings"] | {"log_every": 6})  # which fails
    with pytest.raises(SystemExit):
        race.run_train(["mine.py"], facts["settings"], facts["data"])


def test_evaluations_alone_are_what_a_race_compares(raced):
    _, rows = race.load_run(raced[0] / "mine-0")
    assert len(rows) == 3 and all("val_loss_15" in row for row in rows)
    assert len(race.record.read_log(raced[0] / "mine-0")) > len(rows)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_without_its_log_is_named(raced, tmp_path, is_there):
    folder = shutil.copytree(raced[0] / "mine-0", tmp_path / "mine-0")
    log = (folder / "log.csv").read_text()
    (folder / "log.csv").write_text(log.partition("\n")[2])
    if not is_there:
        (folder / "log.csv").unlink()
    with pytest.raises(SystemExit, match=r"mine-0 has lost its log\.csv"):
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
