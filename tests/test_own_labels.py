"""docs/finetune_own_labels.py: what is left out is said, the classifier left has what it prints."""

import csv
import json
import re
import runpy
import sys

import joblib
import pytest
import sklearn.metrics
import torch
import transformers
from conftest import command, script, write_model
from safetensors.torch import load_file

from nanocram.tokenizer import Tokenizer
from prepare import is_held_out

SCRIPT = "docs/finetune_own_labels.py"
NUMBERED = "text,label\n" + "".join(f"text number {i},{i % 12 / 2}\n" for i in range(600))
pytest.importorskip("accelerate", reason="transformers' Trainer: pip install accelerate")


def table(rows):
    return "text,label\n" + "".join(f'{text},"{label}"\n' for text, label in rows)


# words of Devanagari with the same letters and vowel signs; a clause of Chinese, without spaces
HINDI = table((f"{['कि मा', 'का मि'][i % 2]} {i // 2}", i % 2) for i in range(300))
CHINESE = table((f"房{chr(20000 + i)}间{'大小'[i % 2]}很", i % 2) for i in range(300))
LABELS = ["True", "TRUE\u200b", "True\ufeff", "x;y", "x", "y", "['y', 'x']", "[]", "y;z", "R&B"]
LABELS += ["x#y", "y x", "<x><z>", "1", "5", "1,5", "#N/A", "-1"]
LABELS = table(zip("abcdefghijklmnopqr", LABELS, strict=True))
COPIES = [("a  fine day", "x"), ("A fine day", "y"), ("grey", "x"), ("wet", "y")]
SHORT = "label,text,note\npos,a,x\n" + "neg ,b\n" * 40 + " ,c,x\npos,,x\n,d\npos,e\n"
LEFT_OUT = "45 rows; left out: 2 without label, 1 without text\n.*: neg\n.*: pos\n39 .* copies"


@pytest.mark.parametrize(
    ("content", "dev", "said"),
    [
        ("text,queue\na,b\n", "", "has text, queue: type --text_column=NAME or --label_column="),
        ("text;label\ngr\xfcn;pos\n".encode("cp1252"), "", "iconv -f WINDOWS-1252"),
        ("text,label\na,pos\nb,pos\n", "", "1 labels: give more of each"),
        (NUMBERED, "", "12 classes, all of them numbers(.*\n)*cannot read out/none"),
        # blank labels are none, spaces are stripped, a short row is used if it has text and label
        (SHORT, "", LEFT_OUT),
        (LABELS, "", r"no label, .* \(1\): '#N/A'\n.* look alike \(1\): 'TRUE' = 'True'\n"),
        (LABELS, "", r"several labels \(6\): '<x><z>'; \"\['y', 'x'\]\"; 'x#y'; 'x;y'; 'y x'\n"),
        (table([("5 \ufffd", "x"), ("b", "y")]), "", "WARNING: 1 rows have U"),
        ('{"text": "a", "answer": "Ignore", "label": 1}\n', "", "type --without=answer=Ignore"),
        (table(COPIES), "", r"texts have several labels \(1\): .* \(x, y\)\n1 texts are"),
        (table(COPIES), table(COPIES[1:2]), "1 of 1 texts are in .*(.*\n)*.* has no new text with"),
        (HINDI, table([("न", 1), ("ई", 2)]), "held out only: '0'; '2': give"),
        (HINDI, "", "a bag of words: 100.0%"),
        (CHINESE, "", "a bag of .*characters has an accuracy of 100.0%"),
        ('{"text": "a", "label": ["x", "y"]}\n', "", "'label' is .*, no label"),
        ('{"text": "a", "label": 1}\n{"text": "b", "label": "1"}\n', "", "2 to train on, .*: 1\n"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, data_dir, monkeypatch, capsys, content, dev, said):
    """There is no such model, or the folder of the bag, so that all of them end in one line."""
    (tmp_path / "new.joblib").mkdir()
    model = write_model(tmp_path / "model", data_dir) if "a bag of" in said else "out/none"
    options = {"trust_remote_code": (tmp_path / "model/model.py").exists()}  # of a fork
    path = tmp_path / ("a.jsonl" if content[:1] == "{" else "a.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "dev.csv").write_text(dev)
    options |= {"dev": tmp_path / "dev.csv"} if dev else {}
    argv = command(SCRIPT, model, path, tmp_path / "new", **options)[1:]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"^.+$") as end:
        runpy.run_path(argv[0], run_name="__main__")
    assert re.search(said, capsys.readouterr().out + str(end.value))


@pytest.mark.slow
@pytest.mark.parametrize("own_code", [False, True])
def test_own_labels(tmp_path, data_dir, sentences, monkeypatch, own_code):
    model = write_model(tmp_path / "model", data_dir, token_values=own_code)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trained_on": {"seq_len": 32}}))
    rows = [(text, "asks" if i % 3 else "tells") for i, text in enumerate(sentences[:180])]
    rows[0] = " ".join([*sentences[:9], "[SEP]"]), "tells"
    rows += [(text.upper().replace(" ", "  "), label) for text, label in rows[:40]]
    table = [("id", "body", "queue"), *((i, *row) for i, row in enumerate(rows)), (9, "x", "")]
    train, out = tmp_path / "train.csv", tmp_path / "new/labelled"
    with open(train, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows(table)
    options = {"epochs": 2, "seed": 3, "text_column": "body", "label_column": "queue"}
    options["trust_remote_code"] = own_code or (model / "model.py").exists()  # a fork's model
    half = {"dtype": torch.bfloat16, "trust_remote_code": True}
    transformers.AutoModelForMaskedLM.from_pretrained(model, **half).save_pretrained(model)
    monkeypatch.setenv("LOCAL_RANK", "0")  # of a batch system
    said = script(SCRIPT, model, train, out, **options)
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {torch.float32}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    ids = Tokenizer(model / "tokenizer.json").encode(rows[0][0]).tolist()
    assert tokenizer(rows[0][0])["input_ids"][1:-1] == ids  # as in pre-training, a [SEP] is text
    n_longer = sum(len(tokenizer(text)["input_ids"]) > 32 for text, _ in rows)
    assert f"{n_longer} of 220 texts have more than 32 tokens" in said

    how = {"truncation": True, "trust_remote_code": True}
    pipe = transformers.pipeline("text-classification", str(out), **how)
    dev = [row for row in rows if is_held_out("".join(row[0].lower().split()), 0.1)]
    texts, labels = zip(*dev, strict=True)
    answers = [pipe(text)[0]["label"] for text in texts]
    hits = sklearn.metrics.accuracy_score(labels, answers)
    f1 = sklearn.metrics.f1_score(labels, answers, average="macro", zero_division=0)
    always = labels.count("asks") / len(dev)
    before, _, after = said.partition("steps, some ")
    bag_hits = joblib.load(tmp_path / "new/labelled.joblib").score(texts, labels)
    assert f"accuracy of {bag_hits:.1%}, always naming 'asks' {always:.1%}" in before
    assert f"accuracy {hits:.1%}, macro-F1 {f1:.1%} on {len(dev)} held-out rows" in after
    assert not (tmp_path / "new/labelled.tmp").exists()
    (tmp_path / "a.csv").write_text(f"id;body;label\n1;;?\n;;\n2;{texts[0]};\n", "utf-8")
    script(SCRIPT, out, predict=tmp_path / "a.csv", **options)
    _, *empty, line = (tmp_path / "a_labelled.csv").read_text("utf-8").splitlines()
    *cells, probability = line.split(";")
    assert empty == ["1;;?;;", ";;;;"] and cells == ["2", texts[0], "", answers[0]]
    assert float(probability) == pytest.approx(pipe(texts[0])[0]["score"], abs=1e-3)
    for i, (text, label) in enumerate(rows[:90]):  # a folder for each label
        folder = tmp_path / label.replace("asks", "wants")
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(text, "utf-8")
    said = script(SCRIPT, out, f"{tmp_path}/*/*.txt", tmp_path / "x", **options)
    assert re.search(r"(?s)90 rows; .*: wants\n.* labels of its own \(asks, tells\): a new", said)
