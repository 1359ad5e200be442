import csv
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SMALL_MODEL, script
from hypothesis import given
from hypothesis import strategies as st

import race
from nanocram.configurator import assignments, configure, settings

CURVES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 1)), min_size=2, max_size=12)


def rows(curve):
    """A log with falling losses from steps (seconds, fall), with training rows between."""
    times, falls = np.cumsum(curve, axis=0).T
    losses = 20 - falls
    between = [{"elapsed_s": t + 0.01, "loss": 1.0} for t in times]
    held_out = [{"elapsed_s": t, "val_loss_15": v} for t, v in zip(times, losses, strict=True)]
    return [row for pair in zip(held_out, between, strict=True) for row in pair], times, losses


@given(CURVES, st.floats(0, 1))
def test_time_to_a_loss_is_numpys_interpolation(curve, share):
    log, times, losses = rows(curve)
    loss = losses[-1] + share * (losses[0] - losses[-1])
    assert race.time_to(log, loss) == pytest.approx(np.interp(-loss, -losses, times), rel=1e-6)
    assert race.time_to(log, losses[-1] - 0.1) is None
    assert race.time_to(log, losses[0] + 0.1) == times[0]


@given(CURVES, st.floats(0.2, 5), st.integers(0, 3))
def test_a_slower_clock_is_slower_by_that_factor(curve, factor, cut):
    """The same losses at times a factor apart; it does not matter which of the two ends earlier."""
    log, _, _ = rows(curve)
    slow = [row | {"elapsed_s": row["elapsed_s"] * factor} for row in log]
    short = slow[: max(4, len(slow) - 2 * cut)]
    assert race.times_faster(log, short) == pytest.approx(factor)
    assert race.times_faster(short, log) == pytest.approx(1 / factor)


def test_the_rule_that_shrinks_recipes():
    def small(name):
        values = settings(ROOT / "train.py") | assignments(ROOT / "config" / name)
        return race.shrunken({key: value for key, (value, _) in values.items()}, 4, 3, 64)

    assert small("crammed.py") == {
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
    assert {k: small("bert.py")[k] for k in ("n_layer", "n_embd", "n_inner", "batch_size")} == {
        "n_layer": 3,
        "n_embd": 256,
        "n_inner": 1024,
        "batch_size": 32,
    }
    assert {k: small("izsak.py")[k] for k in ("n_layer", "n_head", "n_embd", "n_inner")} == {
        "n_layer": 6,
        "n_head": 5,
        "n_embd": 320,
        "n_inner": 1344,
    }
    assert [small("narrow.py")[k] for k in ("n_layer", "n_narrow", "lr")] == [
        4,
        3,
        0.004,
    ]  # Muon's rates stay
    two = race.shrunken(
        {
            "n_layer": 16,
            "n_narrow": 12,
            "n_head": 1,
            "n_embd": 64,
            "n_inner": 64,
            "batch_size": 32,
            "batch_start": 32,
            "lr": 1,
            "optimizer": "adam",
        },
        8,
        1,
        1,
    )
    assert (two["n_layer"], two["n_narrow"]) == (2, 1)


def test_slips_are_one_line(tmp_path, data_dir, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = "config/tiny.py"
    for args, message in (
        (["config/nowhere.py"], "config/nowhere.py not found: name a recipe"),
        (
            [f"{small}+muon", f"--data_dir={data_dir}"],
            "tiny+muon: command line: train.py has no setting muon",
        ),
        ([], "name at least one recipe, each of them once"),
        ([small, small], "name at least one recipe, each of them once"),
        ([small, "--lr", "3"], "--lr has no value: write --lr=VALUE"),
        (
            [small, "--data_dir=nowhere"],
            "nowhere holds no data: run python prepare.py --data_dir=nowhere first",
        ),
        ([small, "--n_layers=3"], "race.py has no setting n_layers; did you mean n_layer?"),
        (["--plot=nowhere"], "nowhere holds no finished run of train.py"),
        (
            [small, f"{small}+lrr=1", f"--data_dir={data_dir}"],
            "tiny+lrr=1: command line: train.py has no setting lrr",
        ),
        (
            [small, f"{small}+lr=fast", f"--data_dir={data_dir}"],
            "tiny+lr=fast: command line: lr='fast' should be of",
        ),
        (
            [small, f"{small}+optimizer=adamx", f"--data_dir={data_dir}"],
            "adamx: optimizer=adamx cannot work: it must",
        ),
        ([small, f"{small}+evals=3", f"--data_dir={data_dir}"], "evals is one for all contenders"),
        (
            [small, f"{small}+init=resume", f"--data_dir={data_dir}"],
            "init is one for all contenders",
        ),
        ([small, f"{small}+seed=3", f"--data_dir={data_dir}"], "seed is one for all contenders"),
        (
            [small, f"{small}+lr=1", f"--data_dir={data_dir}", "--lr=2"],
            "lr is one for all contenders",
        ),
        (
            [small, f"--data_dir={data_dir}", "--shrink=4,3"],
            "shrink=4,3 should be three numbers, like 4,3,64",
        ),
        (
            [small, f"--data_dir={data_dir}", "--shrink=4,x,0"],
            "shrink=4,x,0 should be three numbers",
        ),
        ([small, f"--data_dir={data_dir}", "--seed=3"], "seed is for race.py to set"),
        (
            [small, f"--data_dir={data_dir}", "--n_head=3"],
            "n_embd=128 must be an even multiple of n_head=3",
        ),
    ):
        flags = [*(arg for arg in args if arg.startswith("--")), f"--out_dir={tmp_path / 'race'}"]
        own = {name: getattr(race, name) for name in settings(race.__file__)}
        try:
            monkeypatch.setattr(sys, "argv", ["race.py", *args])
            monkeypatch.setattr(race, "FLAGS", flags)
            with pytest.raises(SystemExit) as e:
                configure(vars(race), flags, also="train.py")
                race.main()
        finally:
            vars(race).update(own)
        assert message in str(e.value) and "\n" not in str(e.value)


def test_no_run_takes_what_another_has_compiled(tmp_path, monkeypatch):
    caches = []

    def fails(command, env, **options):
        caches.append(env["TORCHINDUCTOR_CACHE_DIR"])
        assert not any(Path(caches[-1]).iterdir())
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(race.subprocess, "run", fails)
    for _ in range(2):
        with pytest.raises(SystemExit, match="did not come to its end"):
            race.run(
                race.Contender("mine", "mine.py", {}), {"out_dir": str(tmp_path / "mine")}, {}, ""
            )
    assert caches[0] != caches[1] and not any(Path(cache).exists() for cache in caches)


def test_a_race(tmp_path, data_dir):
    """Two contenders, one of them a changed recipe; once more, and nothing is run again; then drawn from folders."""
    model = {k: v for k, v in SMALL_MODEL.items() if k not in ("eval_rows", "evals", "vocab_size")}
    recipe = tmp_path / "mine.py"
    recipe.write_text("".join(f"{name} = {value!r}\n" for name, value in model.items()))
    options = {
        "data_dir": data_dir,
        "out_dir": tmp_path / "race",
        "budget_hours": 4 / 3600,
        "seeds": 1,
        "evals": 3,
        "eval_rows": 16,
        "log_every": 5,
    }
    contenders = [recipe, f"{recipe}+optimizer=adamw+lr=2e-3"]
    done = script("race.py", *contenders, **options)
    assert done.returncode == 0, done.stdout
    names = ["mine", "mine+optimizer=adamw+lr=2e-3"]
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[0].strip() for row in table] == names and float(table[0][-1]) == 1.0
    with open(tmp_path / "race" / "race.csv") as f:
        runs = list(csv.DictReader(f))
    for name, row, made in zip(names, table, runs, strict=True):
        facts, log = race.load_run(tmp_path / "race" / f"{name}-0")
        assert facts["settings"]["optimizer"] == ("adamw" if "adamw" in name else "muon")
        assert [facts["settings"][k] for k in ("log_every", "vocab_size", "evals")] == [5, 600, 3]
        assert float(row[6].split()[0]) == pytest.approx(log[-1]["val_loss_15"], abs=1e-3)
        assert made["recipe"] == name and float(made["val_loss_15"]) == log[-1]["val_loss_15"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", made["date"])
        assert made["device"].startswith("cpu: ") and int(made["threads"]) >= 1
    assert facts["settings"]["lr"] == 0.002
    assert (tmp_path / "race" / "race.png").read_bytes()[:4] == b"\x89PNG"
    again = script("race.py", *contenders, **options)
    assert again.stdout.count("is there already") == 2 and "| mine |" in again.stdout
    assert not (tmp_path / "race" / "mine-0.1").exists()
    folder, values = (
        tmp_path / "race" / "mine-0",
        race.load_run(tmp_path / "race" / "mine-0")[0]["settings"],
    )
    assert race.is_done(folder, values, facts["data"]) and not race.is_done(
        folder, values, "other data"
    )
    assert not race.is_done(folder, values | {"log_every": 6}, facts["data"])
    folders = ",".join(
        str(shutil.copytree(tmp_path / "race" / f"{n}-0", tmp_path / n[-1])) for n in names
    )
    drawn = script("race.py", plot=folders, out_dir=tmp_path / "drawn")
    assert drawn.returncode == 0 and "| e |" in drawn.stdout and "| 3 |" in drawn.stdout, (
        drawn.stdout
    )
    assert (tmp_path / "drawn" / "race.png").exists()
    for seed, optimizer in enumerate(("muon", "muon", "adamw")):  # seeds of one recipe are one line
        shutil.copytree(folders.split(",")[0], again := tmp_path / f"both-{seed}")
        text = json.dumps(
            facts | {"settings": facts["settings"] | {"seed": seed, "optimizer": optimizer}}
        )
        (again / "run.json").write_text(text)
    drawn = script(
        "race.py",
        plot=",".join(f"{tmp_path}/both-{i}" for i in (1, 2, 0)),
        out_dir=tmp_path / "drawn",
    )
    assert [drawn.stdout.count(f"| {tmp_path}/both-{i} |") for i in range(3)] == [1, 0, 1], (
        drawn.stdout
    )
    with open(tmp_path / "drawn" / "race.csv") as f:
        assert [row["seed"] for row in csv.DictReader(f)] == ["0", "1", "2"]
