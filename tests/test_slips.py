"""Users' slips: each script ends in one line that says what to type, and leaves files alone."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_DATA, SMALL_MODEL, flags, write_model

from nanocram import machine

BASE = {
    "prepare.py": SMALL_DATA | {"source": "corpus.txt", "data_dir": "out"},
    "train.py": SMALL_MODEL | {"data_dir": "data", "out_dir": "out", "max_steps": 1},
    "finetune_glue.py": {"model": "model", "glue_dir": "glue", "device": "cpu"},
    "bench.py": SMALL_MODEL | {"data_dir": "data"},
}
# flags, which come after those of BASE, and what the line holds
SLIPS = {
    "prepare.py": [
        ("--source=*.tsv", "no file matches '*.tsv'"),
        ("--source=nobody/nothing", "could not read nobody/nothing (ConnectionError"),
        ("--source=a/b,c/d --max_tokens=9", "name one --source"),
        ("--source=notes.odt", "notes.odt is of no kind that is read"),
        ("--source=single.txt", "held out of 1 documents (paragraphs): delete"),
        ("--source=corpus.txt --seq_len=65536", "0 rows kept, 0 held out of 40 documents"),
        ("--source=*.txt", "link.txt cannot be read"),
        ("--order=random", "order=random cannot work: type shuffle or curriculum"),
        ("--tokenizer=data --vocab_size=700", "type --vocab_size=600"),
        ("--data_dir=mine", "is not a new or an empty folder: choose another --data_dir"),
        ("--data_dir=data --source=corpus.txt --seq_len=64", "delete it or choose another"),
        # the embedded corpus is found from any folder
        ("config/tiny.py --tokenizer=mine", "mine/tokenizer.json is not a tokenizer.json of"),
    ],
    "train.py": [
        ("--n_layer", "write a setting as --name=value"),
        ("--budget_hours=0 --max_steps=0", "type --budget_hours=24"),
        ("--batch_size=20", "type batch_size and batch_start that are multiples of"),
        ("--schedule=wave", "schedule=wave is unknown"),
        ("--seq_len=64", "type --seq_len=128"),
        ("--vocab_size=32768", "type --vocab_size=600"),
        ("--optimizer=none", "optimizer=none is unknown"),
        ("--mask_rate=0", "mask_rate=0.0 cannot work: type 0.001 to 0.9"),
        ("--mask_token_share=0.8 --random_token_share=0.3", "random_token_share=0.3 cannot"),
        ("--data_dir=nowhere", "run python prepare.py --data_dir=nowhere"),
        ("--data_dir=noise", "train.bin is damaged: delete its folder, then run prepare.py"),
        ("--data_dir=half", "meta.json is missing or damaged: run python prepare.py"),
        ("--init=resume", "ckpt.pt not found: name the --out_dir"),
        ("--init=scrach", "init must be scratch, resume, auto or a model folder: scrach is no"),
        ("--init=model --n_embd=64", "type --n_embd=32"),
        ("--init=model --out_dir=model", "init=model is in out_dir: choose another"),
        ("--init=model --data_dir=nowhere", "give prepare.py --tokenizer=model"),
        ("--out_dir=mine", "mine exists and holds no run of train.py: choose another --out_dir"),
        ("--max_epochs=0.001", "the budget ends at step 0: to go on, type a larger --max_"),
        ("--snapshots=1M,2M", "snapshots=1M,2M: type millions of words, such as --snapshots=1,2.5"),
        ("--samples=none", "samples: each sentence needs one [MASK]"),
        ("--offload=True", "type --optimizer=adamw"),
        ("--offload=True --optimizer=adamw --n_embd=400000", "GB more than are free: type"),
        ("--out_dir=\udcf6", "is not UTF-8: type PYTHONUTF8=1 in front, or take another name"),
        ("--device=cuda", "cannot use device=cuda: type --device=cpu, or install"),
    ],
    "finetune_glue.py": [
        ("--tasks=cola,sts-b", "there is no task 'sts-b': choose from"),
        ("--model=nowhere", "nowhere not found: name the folder"),
        ("--glue_dir=nowhere", "nowhere/CoLA/train.tsv not found"),
        ("--baseline=hf:nowhere", "transformers cannot load nowhere"),
        ("--glue_seq_len=136", "type --glue_seq_len=128"),
    ],
    "bench.py": [
        ("--bench_steps=1", "bench_steps=1 gives no range: type 2 or more"),
        ("--n_head=3", "n_embd=32 cannot work: type a multiple of 6"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus, data_dir):
    """A working folder: data, a model, texts that cannot be prepared, and what is precious."""
    path = tmp_path_factory.mktemp("slips")
    shutil.copytree(data_dir, path / "data")
    for name in ("noise", "half"):
        shutil.copytree(data_dir, path / name)
    (path / "noise/train.bin").write_bytes(b"\xff" * (data_dir / "train.bin").stat().st_size)
    (path / "half/meta.json").write_text("{")
    write_model(path / "model", data_dir)
    text = corpus.read_text()
    (path / "corpus.txt").write_text(text)
    (path / "single.txt").write_text(text.replace("\n\n", "\n"))
    (path / "notes.odt").write_text("A few words.\n")
    (path / "link.txt").symlink_to("gone.txt")
    (path / "mine").mkdir()
    (path / "mine/thesis.tex").write_text("precious")
    return path


@pytest.mark.parametrize(
    ("name", "slip", "words"), [(name, *row) for name, rows in SLIPS.items() for row in rows]
)
def test_a_slip_ends_in_one_line(folder, monkeypatch, name, slip, words):
    """Nothing is finished, and no file of another is touched."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *flags(**BASE[name]), *slip.split()])
    monkeypatch.delitem(sys.modules, "train")  # for a new one: bench.py changes it
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)  # takes seconds
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert words in end.value.code and "\n" not in end.value.code
    finished = "out/meta.json" if name == "prepare.py" else "out"
    assert not Path(finished).exists()
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]
    shutil.rmtree("out", ignore_errors=True)
