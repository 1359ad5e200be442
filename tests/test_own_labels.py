"""docs/finetune_own_labels.py: what is left out is said, the classifier left has what it prints."""

import csv
import json
import random
import re
import runpy
import subprocess
import sys
import time

import joblib
import pytest
import sklearn.metrics
import transformers
from conftest import ROOT, script
from test_finetune_glue import model_folder
from test_prepare import is_held_out

SCRIPT = "docs/finetune_own_labels.py"


def write(path, rows, delimiter=","):
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@pytest.fixture
def slip(tmp_path, monkeypatch, capsys):
    """A function that runs the script on a table that ends it: (what it printed, its last line)."""
    pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")

    def run(name, content, **options):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        flags = [f"--{key}={value}" for key, value in options.items()]
        command = [SCRIPT, tmp_path / "none", tmp_path / name, tmp_path / "out", *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")
        return capsys.readouterr().out, str(end.value)

    return run


def rows_of(n, labels=("pos", "neg")):
    return "".join(f"text number {i},{labels[i % len(labels)]}\n" for i in range(n))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "text,label\nGood, cheap,pos\nslow,neg\n", "line 2: it has 3 cells"),
        ("a.csv", 'text,label\nok,neg\n"Great movie,pos\nok,neg\n', "line 3: "),
        ("a.csv", 'text,label\n"He said \\"hi\\", ok",pos\nok,neg\n', "line 2: "),
        ("a.csv", "text,label,label\na,Ann,pos\n", "two columns are named 'label'"),
        (
            "a.csv",
            "text,queue\na,pos\n",
            "it has text, queue: type --text_column=NAME or --label_column=NAME",
        ),
        ("a.csv", "text;label\ngr\xfcn;pos\n".encode("cp1252"), "iconv -f WINDOWS-1252"),
        ("a.xlsx", b"PK\0", "no .csv and no .tsv"),
        ("a.csv", "text,label\na,pos\nb,pos\n", "1 labels: give more of each"),
        ("a.csv", "text,label\nGreat, cheap,\nok,neg\n", "line 2: it has 3 cells"),
        ("a.csv", "text,label,\nfine, really,pos\n", "line 2: it has 3 cells"),
        ("a.csv", 'text,label\n "a\nb",pos\n', "line 2: a space stands before a quote"),
        ("a.csv", "text,label\n" + rows_of(300) + "a,\nb, \n", "none"),  # no such model
    ],
)
def test_a_table_of_labels_that_would_mislead_is_refused(slip, name, content, message):
    _, end = slip(name, content)
    assert message in end and "\n" not in end


def test_rows_that_are_left_out_are_counted(slip):
    """Blank labels are none, spaces are stripped, a short row is used if it has text and label."""
    table = "label,text,note\npos,a,x\n" + "neg ,b\n" * 40 + " ,c,x\npos,,x\n,d\npos,e\n"
    said, _ = slip("a.csv", table)
    assert "a.csv: 45 rows; left out: 2 without label, 1 without text" in said
    assert [line.split(": ")[1] for line in said.splitlines() if "held out: " in line] == [
        "neg",
        "pos",
    ]
    windows = "text\tlabel\n" + "".join(f"text {i}\r\t{i % 2}\r\n" for i in range(400))
    said, _ = slip("a.tsv", windows)
    assert "left out: 0 without label, 0 without text" in said
    said, _ = slip("a.csv", "text,label\n" + rows_of(600, [f"{i / 2:.1f}" for i in range(12)]))
    assert "12 classes, all of them numbers" in said


@pytest.mark.slow
def test_own_labels(tmp_path, data_dir, sentences):
    pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")
    model = model_folder(tmp_path / "model", data_dir)
    facts = {"config": {"trained_on": {"seq_len": 32}}}
    facts["tokenizer_config"] = {"model_max_length": 128}
    for name, more in facts.items():
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    rows = [(text, "asks" if i % 3 else "tells") for i, text in enumerate(sentences[:180])]
    rows[0] = " ".join(sentences[:9]), "tells"
    rows += rows[:20]  # copies are on one side
    random.Random(3).shuffle(rows)
    table = [("id", "body", "queue"), *((i, *row) for i, row in enumerate(rows)), (9, "x", "")]
    train, out = write(tmp_path / "train.csv", table, ";"), tmp_path / "new/labelled"
    options = {"seed": 3, "text_column": "body", "label_column": "queue"}
    dev = [row for row in rows if is_held_out(row[0], 0.1)]

    # one that is killed leaves no OUT, and the same command may come again
    flags = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, ROOT / SCRIPT, model, train, out, "--epochs=100000", *flags]
    with subprocess.Popen(command) as killed:
        while not (tmp_path / "new/labelled.tmp").exists() and killed.poll() is None:
            time.sleep(0.1)
        killed.kill()
    assert not out.exists()
    done = script(SCRIPT, model, train, out, epochs=2, **options)
    assert done.returncode == 0, done.stdout
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(text)["input_ids"]) for text, _ in rows]
    for limit, what in ((32, "had no rows so long"), (128, "they are cut there")):
        n_longer = sum(n > limit for n in lengths)
        assert re.search(rf"{n_longer} of 200 texts .*\b{limit}\b.*{what}", done.stdout)
    assert re.search(r"\d+ steps, some [\d.]+ minutes more", done.stdout)

    pipe = transformers.pipeline("text-classification", model=str(out), truncation=True)
    answers = [pipe(text)[0]["label"] for text, _ in dev]
    labels = [label for _, label in dev]
    hits = sum(a == b for a, b in zip(answers, labels, strict=True)) / len(dev)
    f1 = sklearn.metrics.f1_score(labels, answers, average="macro", zero_division=0)
    always = labels.count("asks") / len(dev)
    before, _, after = done.stdout.partition("steps, some ")
    bag = joblib.load(tmp_path / "new/labelled.joblib")
    bag_hits = sum(bag.predict([text])[0] == label for text, label in dev) / len(dev)
    for expected in (f"accuracy of {bag_hits:.1%}", f"always naming 'asks' {always:.1%}"):
        assert expected in before
    assert f"accuracy {hits:.1%}, macro-F1 {f1:.1%} on {len(dev)} held-out rows" in after
    assert not (tmp_path / "new/labelled.tmp").exists()
