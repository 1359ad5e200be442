"""docs/finetune_own_labels.py: the classifier that is left gives the accuracy that is said."""

import csv
import random
import subprocess
import sys
import time

import pytest
import transformers
from conftest import ROOT, last_line, script
from test_finetune_glue import model_folder

SCRIPT = "docs/finetune_own_labels.py"


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("label", "text"), *((label, text) for text, label in rows)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("has_dev", [False, True])
def test_own_labels(tmp_path, data_dir, sentences, has_dev):
    pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")
    model = model_folder(tmp_path / "model", data_dir)
    rows = [(text, "asks" if i % 2 else "tells") for i, text in enumerate(sentences[:80])]
    train, out = write(tmp_path / "train.csv", rows), tmp_path / "labelled"
    options = {"epochs": 1, "seed": 3}
    if has_dev:
        dev = rows[:20]
        options["dev"] = write(tmp_path / "dev.csv", dev)
    else:
        random.Random(3).shuffle(rows)
        dev = rows[:8]

    # one that is killed leaves no OUT, and the same command may come again
    command = [sys.executable, ROOT / SCRIPT, model, train, out, "--epochs=100000"]
    with subprocess.Popen(command) as killed:
        while not (tmp_path / "labelled.tmp").exists() and killed.poll() is None:
            time.sleep(0.1)
        killed.kill()
    assert not out.exists()
    done = script(SCRIPT, model, train, out, **options)
    assert done.returncode == 0, done.stdout
    pipe = transformers.pipeline("text-classification", model=str(out))
    hits = [pipe(text)[0]["label"] == label for text, label in dev]
    assert f"{sum(hits) / len(hits):.1%} on {len(dev)} rows" in last_line(done)
    assert not (tmp_path / "labelled.tmp").exists()


@pytest.mark.slow
def test_slips_are_one_line(tmp_path, data_dir):
    model = model_folder(tmp_path / "model", data_dir)
    other = model_folder(tmp_path / "other", data_dir, activation="relu2")
    files = {
        "good": [("a", "x"), ("b", "y")] * 4,
        "numbers": [("a", i / 7) for i in range(20)],
    }
    paths = {name: write(tmp_path / f"{name}.csv", rows) for name, rows in files.items()}
    paths["no header"] = tmp_path / "bare.tsv"
    paths["no header"].write_text("a\tx\nb\ty\n", encoding="utf-8")
    out = tmp_path / "out"
    for arguments, words in (
        ((model, paths["good"], model), "name a new folder"),
        ((model, paths["no header"], out), "columns text and label"),
        ((model, paths["numbers"], out), "each a class"),
        ((model, tmp_path / "none.csv", out), "none.csv"),
        ((other, paths["good"], out), "cannot read"),
    ):
        slip = script(SCRIPT, *arguments)
        assert slip.returncode == 1 and "Traceback" not in slip.stdout, slip.stdout
        assert words in last_line(slip)
    assert not out.exists()
