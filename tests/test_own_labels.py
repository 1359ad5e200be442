"""docs/finetune_own_labels.py: the classifier that is left gives the accuracy that is said."""

import csv
import json
import random
import re
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
    facts = {"config": {"trained_on": {"seq_len": 32}}}
    facts["tokenizer_config"] = {"model_max_length": 128}
    for name, more in facts.items():
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    rows = [(text, "asks" if i % 2 else "tells") for i, text in enumerate(sentences[:80])]
    rows[0] = " ".join(sentences[:9]), "tells"
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(text)["input_ids"]) for text, _ in rows]
    for limit, what in ((32, "has seen no rows so long"), (128, "are cut")):
        n_longer = sum(n > limit for n in lengths)
        assert re.search(rf"{n_longer} of 80 texts .*\b{limit}\b.*{what}", done.stdout)
    pipe = transformers.pipeline("text-classification", model=str(out))
    hits = [pipe(text)[0]["label"] == label for text, label in dev]
    assert f"{sum(hits) / len(hits):.1%} on {len(dev)} rows" in last_line(done)
    assert not (tmp_path / "labelled.tmp").exists()
