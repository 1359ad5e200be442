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
def test_own_labels(tmp_path, data_dir, sentences):
    pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")
    model = model_folder(tmp_path / "model", data_dir)
    rows = [(text, "asks" if i % 2 else "tells") for i, text in enumerate(sentences[:80])]
    train, out = write(tmp_path / "train.csv", rows), tmp_path / "labelled"
    options = {"epochs": 1, "seed": 3}
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
