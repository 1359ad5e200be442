"""docs/finetune_own_labels.py: what is left out is said, the classifier left has what it prints."""

import csv
import json
import re
import runpy
import sys

import joblib
import pytest
import sklearn.metrics
import transformers
from conftest import command, script, write_model

from nanocram.tokenizer import Tokenizer
from prepare import is_held_out

SCRIPT = "docs/finetune_own_labels.py"
NUMBERED = "text,label\n" + "".join(f"text number {i},{i % 12 / 2}\n" for i in range(600))
pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")


# test_prepare.py has more of what is wrong in a table
@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("text,queue\na,pos\n", "it has text, queue: type --text_column=NAME or --label_column="),
        ("text;label\ngr\xfcn;pos\n".encode("cp1252"), "iconv -f WINDOWS-1252"),
        ("text,label\na,pos\nb,pos\n", "1 labels: give more of each"),
        (NUMBERED, "12 classes, all of them numbers(.*\n)*cannot read out/none"),
        # blank labels are none, spaces are stripped, a short row is used if it has text and label
        (
            "label,text,note\npos,a,x\n" + "neg ,b\n" * 40 + " ,c,x\npos,,x\n,d\npos,e\n",
            "45 rows; left out: 2 without label, 1 without text\n.*: neg\n.*: pos\n42 rows",
        ),
    ],
)
def test_what_is_wrong_in_a_table_of_labels_is_said(tmp_path, monkeypatch, capsys, table, said):
    """There is no such model, so that all of them end in one line."""
    path = tmp_path / "a.csv"
    path.write_bytes(table if isinstance(table, bytes) else table.encode())
    argv = command(SCRIPT, "out/none", path, tmp_path / "new")[1:]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(argv[0], run_name="__main__")
    assert re.search(said, capsys.readouterr().out + str(end.value))
    assert "\n" not in str(end.value)


@pytest.mark.slow
def test_own_labels(tmp_path, data_dir, sentences):
    model = write_model(tmp_path / "model", data_dir)
    more = {"trained_on": {"seq_len": 32}, "model_max_length": 128}  # each file has one of them
    for path in (model / "config.json", model / "tokenizer_config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    rows = [(text, "asks" if i % 3 else "tells") for i, text in enumerate(sentences[:180])]
    rows[0] = " ".join([*sentences[:9], "[SEP]"]), "tells"
    rows += rows[:20]  # copies are on one side
    table = [("id", "body", "queue"), *((i, *row) for i, row in enumerate(rows)), (9, "x", "")]
    train, out = tmp_path / "train.csv", tmp_path / "new/labelled"
    with open(train, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows(table)
    options = {"epochs": 2, "seed": 3, "text_column": "body", "label_column": "queue"}
    said = script(SCRIPT, model, train, out, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = Tokenizer(model / "tokenizer.json").encode(rows[0][0]).tolist()
    assert tokenizer(rows[0][0])["input_ids"][1:-1] == ids  # as in pre-training, a [SEP] is text
    lengths = [len(tokenizer(text)["input_ids"]) for text, _ in rows]
    for limit in (32, 128):
        n_longer = sum(n > limit for n in lengths)
        assert f"{n_longer} of 200 texts have more than {limit} tokens" in said
    assert re.search(r"\d+ steps, some [\d.]+ minutes more", said)

    pipe = transformers.pipeline("text-classification", model=str(out), truncation=True)
    dev = [row for row in rows if is_held_out(row[0], 0.1)]
    texts, labels = zip(*dev, strict=True)
    answers = [pipe(text)[0]["label"] for text in texts]
    hits = sklearn.metrics.accuracy_score(labels, answers)
    f1 = sklearn.metrics.f1_score(labels, answers, average="macro", zero_division=0)
    always = labels.count("asks") / len(dev)
    before, _, after = said.partition("steps, some ")
    bag = joblib.load(tmp_path / "new/labelled.joblib")
    bag_hits = sklearn.metrics.accuracy_score(labels, bag.predict(texts))
    assert f"accuracy of {bag_hits:.1%}, always naming 'asks' {always:.1%}" in before
    assert f"accuracy {hits:.1%}, macro-F1 {f1:.1%} on {len(dev)} held-out rows" in after
    assert not (tmp_path / "new/labelled.tmp").exists()
