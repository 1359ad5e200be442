"""prepare.py: rows beside a second implementation, kinds of text, slips, faults, kills, the Hub."""

import csv
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line, put, script
from hub import StandIn
from transformers import AutoTokenizer

import prepare as module
import train
from nanocram.tokenizer import CLS, SEP, Tokenizer

SLOW = pytest.mark.slow
FILES = ("tokenizer.json", "train.bin", "val.bin")


@pytest.fixture
def prepare(monkeypatch):
    """A function that runs prepare.py's main() in this process; it returns meta.json."""

    def run(folder, source, **other):
        values = SMALL_DATA | {"data_dir": str(folder), "source": str(source)} | other
        with monkeypatch.context() as patch:
            for name, value in values.items():
                assert type(getattr(module, name)) is type(value), name
                patch.setattr(module, name, value)
            module.main()
        return json.loads((folder / "meta.json").read_text())

    return run


def rows_of(folder, name="train.bin", T=128):
    return np.fromfile(folder / name, np.uint16).reshape(-1, T)


def as_set(rows):
    return sorted(map(bytes, rows))


def same(first, second, names=FILES):
    """Whether two folders have equal files."""
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def documents_of(path):
    return [text.strip() for text in path.read_text().split("\n\n")]


def is_held_out(text, share=0.2):
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def train_and_held_out(corpus, folder):
    """([(text, ids)], [(text, ids)]) by transformers and a direct reading of the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = []
    for text in documents_of(corpus):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        documents.append((text, ids))
    held_out = [document for document in documents if is_held_out(document[0])]
    return [document for document in documents if document not in held_out], held_out


def rows_by_hand(documents, T=128):
    stream = [t for _, ids in documents for t in [*ids, SEP]]
    return [[CLS, *stream[i : i + T - 1]] for i in range(0, len(stream) - T + 2, T - 1)]


# Rows


def test_rows_equal_a_second_implementation(data_dir, corpus):
    train, val = train_and_held_out(corpus, data_dir)
    rows, val_rows = rows_of(data_dir), rows_of(data_dir, "val.bin")
    assert as_set(rows) == as_set(np.array(rows_by_hand(train), np.uint16))
    assert as_set(val_rows) == as_set(np.array(rows_by_hand(val), np.uint16))
    assert rows.tolist() != rows_by_hand(train)  # shuffled

    meta = json.loads((data_dir / "meta.json").read_text())
    n_tokens = sum(len(ids) + 1 for _, ids in train)
    assert meta["vocab_size"] == 600 and meta["seq_len"] == 128
    assert meta["counts"] == {
        "read": len(train) + len(val),
        "kept": len(train),
        "filtered": 0,
        "held_out": len(val),
        "empty": 0,
        "not_utf8": 0,
        "tokens": n_tokens,
        "characters": meta["counts"]["characters"],
        "val_tokens": sum(len(ids) + 1 for _, ids in val),
        "val_characters": meta["counts"]["val_characters"],
        "rows": len(rows),
        "val_rows": len(val_rows),
        "dropped_tokens": n_tokens % 127,
        "val_dropped_tokens": sum(len(ids) + 1 for _, ids in val) % 127,
    }
    for name, checksum in meta["sha256"].items():
        assert hashlib.sha256((data_dir / name).read_bytes()).hexdigest() == checksum


def write_kinds(folder, corpus):
    """The text of corpus as files of every kind, under their names."""
    texts = corpus.read_text().split("\n\n")
    lines = "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts)
    with gzip.open(folder / "a.txt.gz", "wt", newline="\r\n") as f:
        f.write(corpus.read_text())
    (folder / "b.jsonl").write_text(lines)
    table = pyarrow.table({"x": range(len(texts)), "body": texts})
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name, text in (("e.jsonl.zst", lines), ("f.txt.zst", corpus.read_text())):
        with pyarrow.CompressedOutputStream(folder / name, "zstd") as f:
            f.write(text.encode())
    (folder / "g.json").write_text(json.dumps([{"body": text} for text in texts], indent=1))
    (folder / "h.log").write_text(corpus.read_text())
    with open(folder / "I.CSV", "w", newline="", encoding="utf-8-sig") as f:
        csv.writer(f).writerows([("id", "body"), *enumerate(texts)])


KINDS = "a.txt.gz b.jsonl c.parquet d.jsonl.gz e.jsonl.zst f.txt.zst g.json h.log I.CSV".split()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, corpus, data_dir, prepare, name):
    write_kinds(tmp_path, corpus)
    prepare(tmp_path / "out", tmp_path / name, text_column="body")
    assert same(tmp_path / "out", data_dir)


@pytest.fixture
def five_files(tmp_path, corpus, monkeypatch):
    """A glob of five files, each a part of its own."""
    put(monkeypatch, module, SMALL=1)
    texts = documents_of(corpus)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("\n\n".join(texts[8 * i : 8 * i + 8]))
    return f"{tmp_path}/?.txt"


def test_the_number_of_processes_changes_nothing(tmp_path, five_files, prepare, corpus, data_dir):
    for n in (1, 2, 4):
        meta = prepare(tmp_path / f"{n}", five_files, processes=n)
        assert same(tmp_path / f"{n}", tmp_path / "1")
    of_one = json.loads((data_dir / "meta.json").read_text())["counts"]
    assert meta["counts"]["characters"] == of_one["characters"]
    expected = []
    for i in range(5):  # the rest of each part is dropped
        documents, _ = train_and_held_out(tmp_path / f"{i}.txt", tmp_path / "1")
        expected.append(np.array(rows_by_hand(documents), np.uint16))
    rows = rows_of(tmp_path / "1")
    assert as_set(rows) == as_set(np.concatenate(expected))
    first = set(as_set(expected[0]))  # its rows are spread over the whole
    places = [i for i, row in enumerate(rows) if bytes(row) in first]
    assert abs(np.mean(places) / len(rows) - 0.5) < 4 * 0.29 / np.sqrt(len(places))


def test_the_curriculum_begins_with_most_full_stops(tmp_path, five_files, prepare):
    prepare(tmp_path / "shuffled", five_files)
    prepare(tmp_path / "sorted", five_files, order="curriculum")
    rows = rows_of(tmp_path / "sorted")
    assert as_set(rows) == as_set(rows_of(tmp_path / "shuffled"))
    assert same(tmp_path / "sorted", tmp_path / "shuffled", ["val.bin"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sorted")
    # The paper's code counts the token "." itself, not those that contain one.
    stops = [tokenizer.convert_ids_to_tokens(row).count(".") for row in rows]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] > stops[-1]


def test_the_filter_leaves_the_held_out_rows_alone(tmp_path, corpus, data_dir, prepare):
    train, _ = train_and_held_out(corpus, data_dir)
    ratios = sorted(len(ids) / len(text) for text, ids in train)
    middle = ratios[len(ratios) // 2]
    counts = prepare(tmp_path / "filtered", corpus, filter_ratio=middle)["counts"]
    assert counts["filtered"] == pytest.approx(len(train) / 2, abs=len(train) / 6)
    assert counts["kept"] + counts["filtered"] == len(train)
    assert same(tmp_path / "filtered", data_dir, ["val.bin"])


@pytest.mark.parametrize("mode", ["ascii", "plain"])
def test_the_threshold_follows_the_vocabulary_unless_it_is_set(monkeypatch, mode):
    def threshold(size, ratio=-1.0):
        put(monkeypatch, module, vocab_size=size, normalisation=mode, filter_ratio=ratio)
        return module.filter_threshold()

    sizes = (4096, 8192, 16384, 32768)
    values = [threshold(size) for size in sizes]
    assert values == sorted(values, reverse=True)  # larger vocabularies need fewer tokens
    assert values[2] > threshold(20000) > values[3] == threshold(65536)
    assert threshold(600) == 0 and [threshold(size, 0.0) for size in sizes] == [0.0] * 4
    assert threshold(4096, 0.25) == threshold(600, 0.25) == 0.25


def test_copies_of_what_is_held_out_stay_out_of_training(tmp_path, corpus, data_dir, prepare):
    (tmp_path / "twice.txt").write_text(corpus.read_text() + "\n\n\n" + corpus.read_text())
    train, val = train_and_held_out(corpus, data_dir)
    counts = prepare(tmp_path / "out", tmp_path / "twice.txt")["counts"]
    assert (counts["kept"], counts["held_out"]) == (2 * len(train), 2 * len(val))


def test_what_is_held_out_beyond_the_limit_is_dropped(tmp_path, corpus, data_dir, prepare):
    counts = prepare(tmp_path / "out", corpus, val_tokens=1000)["counts"]
    assert counts["val_rows"] == 1000 // 127
    assert counts["val_dropped_tokens"] == counts["val_tokens"] - 127 * counts["val_rows"] > 0
    assert same(tmp_path / "out", data_dir, ["train.bin"])
    assert set(as_set(rows_of(tmp_path / "out", "val.bin"))) < set(
        as_set(rows_of(data_dir, "val.bin"))
    )


def test_the_vocabulary_is_trained_on_every_source(tmp_path, prepare):
    """The most frequent word of each is an entry."""
    for name, word in (("a", "zyxomma"), ("b", "quokkish")):
        texts = [f"{word} {i} {word} the quick fox" for i in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    prepare(tmp_path / "out", f"{tmp_path}/a.txt, {tmp_path}/b.txt", vocab_size=300)
    vocabulary = Tokenizer(tmp_path / "out/tokenizer.json").encoding.token_byte_values()
    assert b" zyxomma" in vocabulary and b" quokkish" in vocabulary


def test_each_line_is_a_document(tmp_path, corpus, prepare):
    """As the same lines in a .jsonl, whatever the line ends."""
    lines = [line for line in corpus.read_text().splitlines() if line.strip()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    (tmp_path / "unix.txt").write_bytes("\n\n".join(lines).encode())
    (tmp_path / "windows.txt").write_bytes("\r\n".join(lines).encode() + b"\r\n")
    wanted = prepare(tmp_path / "wanted", tmp_path / "a.jsonl")["counts"]
    assert wanted["read"] == len(lines)
    for name in ("unix", "windows"):
        counts = prepare(tmp_path / name, tmp_path / f"{name}.txt", documents="lines")["counts"]
        assert same(tmp_path / name, tmp_path / "wanted") and counts["read"] == len(lines)


def test_text_as_it_is_keeps_every_byte(tmp_path, prepare):
    """What transformers and the bytes of the rows say; spaces, tabs, line breaks, case, accents."""
    texts = [f"Straße {i}:\n\tx  =  [{i}] ;\n\n\n    ende\u2028 \t" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    out = tmp_path / "out"
    settings = {"normalisation": "none", "vocab_size": 260, "seq_len": 8}
    counts = prepare(out, tmp_path / "a.jsonl", **settings)["counts"]
    tokenizer, ours = AutoTokenizer.from_pretrained(out), Tokenizer(out / "tokenizer.json")
    for text in texts[:20]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids and ours.decode(ids) == text
        assert len(ids) == len(text.encode())  # bytes alone
    assert counts["characters"] + counts["val_characters"] == sum(map(len, texts))


# Text that is not as it should be


def test_half_an_emoji_and_wrong_bytes_are_counted(tmp_path, corpus, prepare, capsys):
    texts = documents_of(corpus)
    lines = [json.dumps({"text": text}) for text in texts]
    lines[3] = json.dumps({"text": texts[3] + " \ud83d."})
    lines[7] = json.dumps({"text": texts[7] + " \U0001f600."})
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(lines).encode() + '\n{"text": "grüße"}\n'.encode("latin-1"))
    counts = prepare(tmp_path / "out", path, normalisation="plain")["counts"]
    assert counts["not_utf8"] == 2
    assert "2 documents have U+FFFD" in capsys.readouterr().out
    texts[3] += " \ufffd."
    texts[7] += " \U0001f600."
    texts.append("gr\ufffd\ufffde")
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(tmp_path / "wanted", path, normalisation="plain")
    assert same(tmp_path / "out", tmp_path / "wanted")


def test_a_look_before_the_work(tmp_path, corpus, prepare, capfd):
    """Text that the defaults would spoil ends before it is read, and by what to type."""
    german = "Die {} größten Vögel über den Dächern; schöne Grüße aus Köln an Jürgen, Käthe.\n\n"
    (tmp_path / "german.txt").write_text("".join(german.format(i) for i in range(400)))
    prepare(tmp_path / "german", tmp_path / "german.txt", vocab_size=280)
    assert "--normalisation=plain" in capfd.readouterr().out
    prepare(tmp_path / "english", corpus)
    assert "WARNING" not in capfd.readouterr().out
    (tmp_path / "greek.txt").write_text("ο ταχύς σκύλος πηδά a\n\n" * 400)
    rng = random.Random(0)
    lines = ["".join(rng.choices("bcdfghjklmnpqrstvwxz", k=16)) for _ in range(20000)]
    (tmp_path / "log.txt").write_text("\n\n".join(lines))
    with pytest.raises(SystemExit, match="type --normalisation=plain"):
        prepare(tmp_path / "out", tmp_path / "greek.txt", vocab_size=262)
    log = {"source": tmp_path / "log.txt", "vocab_size": 4096}
    with pytest.raises(SystemExit, match="type --filter_ratio=0"):
        prepare(tmp_path / "out", filter_ratio=-1.0, **log)
    assert not (tmp_path / "out").exists()
    prepare(tmp_path / "out", **log)  # what they said helps, in the same folder


def test_what_cannot_be_read_leaves_the_set_unfinished_until_it_is_mended(
    tmp_path, five_files, prepare, capsys
):
    """A broken gzip and a bad line; the other parts are done, and stay."""
    path, out = tmp_path / "1.txt", tmp_path / "out"
    texts = documents_of(path)
    path.unlink()
    whole = gzip.compress((tmp_path / "3.txt").read_bytes())
    (tmp_path / "3.txt").unlink()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "1.jsonl").write_text(lines)
    (tmp_path / "3.txt.gz").write_bytes(whole)
    source = f"{tmp_path}/?.[tj]*"
    prepare(tmp_path / "whole", source)
    (tmp_path / "1.jsonl").write_text(lines + "{bad\n")
    (tmp_path / "3.txt.gz").write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            prepare(out, source)
        assert re.search(r"3\.txt\.gz could not be read to its end \(EOFError", str(end.value))
        assert "rerun the command" in str(end.value) and not out.exists()
        assert "1.jsonl could not be read to its end (ValueError: line 9, column 2" in (
            capsys.readouterr().out
        )
        done = sorted(path.name for path in (tmp_path / "out.partial").glob("part-*.json"))
        assert done == ["part-00000.json", "part-00002.json", "part-00004.json"]
    with pytest.raises(SystemExit, match="was begun with order='shuffle'"):
        prepare(out, source, order="curriculum")
    (tmp_path / "1.jsonl").write_text(lines)
    (tmp_path / "3.txt.gz").write_bytes(whole)
    capsys.readouterr()
    prepare(out, source)
    assert "going on: 3 of 5 parts are done" in capsys.readouterr().out
    assert same(out, tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_finished_set_is_kept(tmp_path, corpus, data_dir, prepare, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in data_dir.iterdir()}
    prepare(data_dir, corpus)
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was made with order='shuffle': delete it"):
        prepare(data_dir, corpus, order="curriculum")
    shutil.copy(corpus, tmp_path / "more.txt")
    with pytest.raises(SystemExit, match=r"was made with .*files="):
        prepare(data_dir, f"{corpus},{tmp_path}/more.txt")
    assert before == {path.name: path.stat().st_mtime_ns for path in data_dir.iterdir()}


@pytest.fixture
def folder_of_slips(tmp_path, corpus, monkeypatch):
    """A working folder with texts that cannot be prepared and folders that cannot be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(corpus.read_bytes())
    (tmp_path / "utf16.txt").write_text(corpus.read_text(), encoding="utf-16")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words.\n")
    (tmp_path / "a.doc").write_text("x")
    lines = [line for line in corpus.read_text().splitlines() if line]
    (tmp_path / "single.txt").write_text("\n".join(lines[:2000]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.bin").write_text("precious")
    (tmp_path / "strange.partial").mkdir()
    (tmp_path / "strange.partial" / "thesis.tex").write_text("precious")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), "numbers.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), "column.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "values, message",
    [
        ({"source": "*.csv"}, "no file matches"),
        ({"source": "nowhere.txt"}, "no file matches"),
        ({"source": "mine"}, "no file matches"),
        ({"source": "corpus.txt,"}, "no file matches '': give globs in quotes"),
        ({"source": "empty.txt"}, "no text in empty.txt"),
        ({"source": "a.doc"}, "a.doc is of no kind that is read"),
        ({"source": "utf16.txt"}, "iconv -f UTF-16"),
        ({"source": "numbers.parquet"}, "no text: type --text_column=NAME"),
        ({"source": "column.parquet"}, "it has body: type --text_column=NAME"),
        ({"source": "nobody/nothing"}, "could not read nobody/nothing (ConnectionError"),
        ({"source": "short.txt"}, "the text yields only"),
        ({"source": "single.txt"}, "held out of 1 documents (paragraphs): delete "),
        ({"source": "short.txt", "vocab_size": 260, "val_share": 1e-9}, "less than one row of 128"),
        ({"val_share": 0.0}, "val_share=0.0 cannot work"),
        ({"vocab_size": 70000}, "vocab_size=70000 cannot work"),
        ({"max_tokens": -1}, "max_tokens=-1 cannot work"),
        ({"order": "random"}, "order=random cannot work"),
        ({"data_dir": "mine"}, "is not a new or an empty folder"),
        ({"data_dir": "strange"}, "was not written by prepare.py"),
    ],
)
def test_slips_are_one_line(folder_of_slips, prepare, values, message):
    values = {"source": "corpus.txt", "data_dir": "out"} | values
    with pytest.raises(SystemExit) as end:
        prepare(values.pop("data_dir"), values.pop("source"), **values)
    assert message in str(end.value) and "\n" not in str(end.value)
    assert not (folder_of_slips / "out").exists()
    assert (folder_of_slips / "mine" / "train.bin").read_text() == "precious"
    assert (folder_of_slips / "strange.partial" / "thesis.tex").read_text() == "precious"


def test_a_process_ends_in_one_line_and_a_link_is_followed(folder_of_slips, corpus, data_dir):
    done = script("prepare.py", cwd=folder_of_slips, source="*.csv", **SMALL_DATA)
    assert done.returncode == 1 and "no file matches" in last_line(done)
    (folder_of_slips / "disk").mkdir()
    (folder_of_slips / "linked").symlink_to("disk")
    names = {"source": "c?rpus.txt", "data_dir": "linked"}
    done = script("prepare.py", cwd=folder_of_slips, **SMALL_DATA, **names)
    assert done.returncode == 0, done.stdout
    assert same(folder_of_slips / "disk", data_dir) and (folder_of_slips / "linked").is_symlink()
    command = last_line(done).split()[2:]
    assert command[:3] == ["python", "train.py", "config/tiny.py"]
    names = [flag.removeprefix("--").partition("=")[0] for flag in command[3:]]
    assert set(names) <= set(train.SETTINGS) and "data_dir" in names


def test_recipes_that_share_a_data_set_prepare_it_alike():
    """Read by Python itself, each in the settings as they are."""
    known = {name: getattr(module, name) for name in module.SETTINGS}
    others = {name: getattr(train, name) for name in train.SETTINGS}
    prepared = {}
    for path in (ROOT / "config").glob("*.py"):
        values = others | known
        exec(path.read_text(encoding="utf-8"), {}, values)
        values = {name: values[name] for name in known}
        assert prepared.setdefault(values["data_dir"], values) == values, path
    crammed = prepared["data/crammed"]
    assert crammed["source"] == "monology/pile-uncopyrighted"
    assert crammed["max_tokens"] == pytest.approx(5.53e9, rel=1e-3)  # the paper's data card
    assert prepared["data/unfiltered"]["filter_ratio"] == 0
    assert "edu" not in module.source  # a pre-trained model chose FineWeb-Edu: against the rules


# The Hub, faults and kills: prepare.py as a process, against a stand-in

# Everything is small, so that a small data set is many blocks, chunks and pieces.
SMALL = {"sources.BLOCK": 20000, "prepare.SMALL": 1, "prepare.CHUNK": 60, "prepare.MERGED": 50}
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import prepare
from nanocram import safety, sources
from nanocram.settings import configure
for name, value in json.loads(os.environ["CONSTANTS"]).items():  # in its other processes, too
    module, name = name.split(".")
    setattr(globals()[module], name, value)
if __name__ == "__main__":
    configure(vars(prepare), sys.argv[1:])
    safety.run(prepare.main, prepare.data_dir, "rerun the command to go on")
"""
CONFIGS = """---
configs:
- config_name: part
  data_files:
  - split: train
    path: sample/*
- config_name: all
  data_files:
  - split: train
    path: data/*
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory, texts):
    """A StandIn with data sets as FineWeb, C4, the Pile are laid out; a gated one, an empty one."""
    root = tmp_path_factory.mktemp("hub")
    some = [text[:6000] for text in texts[:240]]
    shards = [some[i::3] for i in range(3)]
    web = root / "datasets/some/web"
    (web / "sample").mkdir(parents=True)
    (web / "README.md").write_text(CONFIGS)
    for folder in ("some/gated", "some/c4", "some/pile", "some/other"):
        (root / "datasets" / folder).mkdir(parents=True)
    for i, shard in enumerate(shards):
        table = pyarrow.table({"id": range(len(shard)), "text": shard})
        pyarrow.parquet.write_table(table, web / f"sample/{i:03}.parquet", row_group_size=7)
        lines = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in shard).encode()
        (root / f"datasets/some/c4/train-{i:05}-of-00003.json.gz").write_bytes(gzip.compress(lines))
        packed = root / f"datasets/some/pile/train-{i}.jsonl.zst"
        with pyarrow.CompressedOutputStream(packed, "zstd") as out:
            out.write(lines)
    (root / "datasets/some/gated/.gated").write_text("")
    pyarrow.parquet.write_table(table, root / "datasets/some/gated/train.parquet")
    (root / "datasets/some/other/test.jsonl").write_bytes(lines)
    stand_in = StandIn(root)
    yield stand_in
    stand_in.stop()


@pytest.fixture(scope="module")
def begin(tmp_path_factory, hub):
    """A function that starts prepare.py on the stand-in; its output goes into a pipe."""
    home = tmp_path_factory.mktemp("script")
    (home / "small_prepare.py").write_text(SCRIPT)
    processes = []

    def start(folder, source="some/web:part", constants=(), **settings):
        values = SMALL_DATA | {"source": source, "data_dir": folder, "processes": 2} | settings
        flags = [f"--{name}={value}" for name, value in values.items()]
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(home / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"CONSTANTS": json.dumps(SMALL | dict(constants))}
        command = [sys.executable, home / "small_prepare.py", *flags]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, cwd=home, **pipe))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def no_faults(request):
    if "hub" in request.fixturenames:
        stand_in = request.getfixturevalue("hub")
        stand_in.fault = None
        stand_in.requests.clear()


def end_of(process):
    """The process when it has ended, with its output as .stdout."""
    said, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, said)


def done_well(process):
    done = end_of(process)
    assert done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="module")
def expected(tmp_path_factory, begin, hub):
    """The folder that local copies of some/web's files give."""
    out = tmp_path_factory.mktemp("expected") / "out"
    done_well(begin(out, f"{hub.root}/datasets/some/web/sample/*.parquet", processes=1))
    return out


SOURCES = ["some/web:part", *(pytest.param(f"some/{n}", marks=SLOW) for n in ("c4", "pile"))]


@pytest.mark.parametrize("source", SOURCES)
def test_data_sets_are_read_as_their_files_are(tmp_path, begin, expected, source):
    done_well(begin(tmp_path / "out", source))
    assert same(tmp_path / "out", expected)


def test_max_tokens_reads_what_it_needs_of_the_hub(tmp_path, begin, hub, corpus):
    """The first files in their order, whatever the processes; own files are read whole."""
    source = f"some/web:part,{corpus}"
    counts = []
    for n in (1, 2):
        out = tmp_path / f"{n}"
        done_well(begin(out, source, max_tokens=30000, processes=n, vocab_sample_mb=1))
        assert same(out, tmp_path / "1")
        counts.append(json.loads((out / "meta.json").read_text())["counts"])
    done_well(begin(tmp_path / "own", str(corpus)))
    own = json.loads((tmp_path / "own/meta.json").read_text())["counts"]
    assert own["read"] == 40
    first = pyarrow.parquet.read_table(hub.root / "datasets/some/web/sample/000.parquet")
    from_hub = counts[0]["read"] - own["read"]
    assert 0 < from_hub < first.num_rows
    mean = np.mean([len(text.as_py()) for text in first["text"]])
    assert from_hub * mean / 4 < 2 * 30000 / (1 - SMALL_DATA["val_share"])


@pytest.mark.slow
def test_bodies_that_break_off_are_asked_for_again(tmp_path, begin, hub, expected):
    cut = iter([False, False, True] * 4)
    hub.fault = lambda path: "cut" if path.startswith("/cdn/") and next(cut, False) else None
    done_well(begin(tmp_path / "out"))
    assert not any(cut)
    assert same(tmp_path / "out", expected)


def reading_has_begun(folder):
    """Whether a part has a state."""
    return any(Path(f"{folder}.partial").glob("part-*.json"))


def break_the_line(hub, is_time, answer, seconds=1e9):
    """Answer files' bytes with a fault, for some seconds from when is_time() on."""
    since = []

    def fault(path):
        if not path.startswith("/cdn/"):
            return None
        if not since and is_time():
            since.append(time.monotonic())
        return answer if since and time.monotonic() < since[0] + seconds else None

    hub.fault = fault


@SLOW
@pytest.mark.parametrize("where", ["the vocabulary", "the rows", "nowhere"])
def test_a_silent_hub_is_waited_for(tmp_path, begin, hub, expected, where):
    """For a minute it is busy, or there is no server."""
    out = tmp_path / "out"
    if where != "nowhere":
        is_rows = where == "the rows"
        break_the_line(hub, lambda: not is_rows or reading_has_begun(out), 503, 60)
    process = begin(out)
    if where == "nowhere":
        while not reading_has_begun(out):
            time.sleep(0.01)
        hub.stop()
        time.sleep(60)
        hub.start()
    done = done_well(process)
    assert 1 <= done.stdout.count("the Hub does not answer") <= 3
    assert same(out, expected)


def children_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids):
    end = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_ctrl_c_ends_in_one_line_and_the_same_command_goes_on(tmp_path, begin, hub, expected):
    """While it waits for a line that is dead."""
    break_the_line(hub, lambda: reading_has_begun(tmp_path / "out"), 503)
    process = begin(tmp_path / "out")
    while not reading_has_begun(tmp_path / "out") and process.poll() is None:
        time.sleep(0.01)
    children = children_of(process)
    for pid in (process.pid, *children):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    done = end_of(process)
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert last_line(done) == "stopped: rerun the command to go on"
    wait_for_end(children)
    hub.fault = None
    done_well(begin(tmp_path / "out"))
    assert same(tmp_path / "out", expected)


def kill(process):
    """kill -9, and its other processes end by themselves."""
    children = children_of(process)
    process.kill()
    end_of(process)
    wait_for_end(children)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=SLOW)])
def test_kills_at_any_moment_change_nothing(tmp_path, begin, hub, expected, kills):
    """Each time the same command is killed once more, or comes to its end."""
    rng, out = random.Random(0), tmp_path / "out"
    while kills:
        process = begin(out)
        while process.poll() is None and not reading_has_begun(out):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.5))
        kills -= process.poll() is None
        kill(process)
        if out.exists():
            assert same(out, expected)
            shutil.rmtree(out)
    done_well(begin(out))
    assert same(out, expected)


def test_kills_in_the_merge_change_nothing(tmp_path, begin, expected, hub):
    out = tmp_path / "out"
    local = f"{hub.root}/datasets/some/web/sample/*.parquet"
    slow = {"prepare.MERGED": 1}
    for n_bytes in (1, 30000, 100000):
        process = begin(out, local, slow)
        path = tmp_path / "out.partial/out/train.bin"
        while process.poll() is None and not (path.exists() and path.stat().st_size >= n_bytes):
            time.sleep(0.001)
        assert process.poll() is None
        kill(process)
        assert not out.exists()
    done_well(begin(out, local))
    assert same(out, expected)


@pytest.mark.parametrize(
    "source, message",
    [
        ("some/gated", "hf auth login"),
        ("some/web", "NAME:CONFIG"),
        ("some/nothing", "check the name"),
        ("some/other", "it has no split 'train', but test"),
    ],
)
def test_what_the_hub_refuses_is_told_once(tmp_path, begin, source, message):
    done = end_of(begin(tmp_path / "out", source))
    assert done.returncode == 1
    assert message in last_line(done) and done.stdout.count(message) == 1
    assert "Traceback" not in done.stdout
