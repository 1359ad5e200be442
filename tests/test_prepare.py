"""prepare.py: rows beside a second implementation, kinds of text, faults, kills, the Hub."""

import csv
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, flags, prepare, put, script, wait_for
from forked import Forked
from hub import serve
from transformers import AutoTokenizer

import prepare as module
from nanocram import hub, sources
from nanocram.tokenizer import CLS, SEP, Tokenizer, normalise

FILES = ("tokenizer.json", "train.bin", "val.bin")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
# zstd: magic number, a window of 512 MB, one raw block
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\x98" + ((5 << 3) | 1).to_bytes(3, "little") + b"text\n"


def rows_of(folder, name="train.bin"):
    return np.fromfile(folder / name, np.uint16).reshape(-1, 128)


def as_set(rows):
    return sorted(map(bytes, rows))


def same(first, second, names=FILES):
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def documents_of(path):
    return [text.strip() for text in path.read_text().split("\n\n")]


def is_held_out(text, share=0.2):
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def train_and_held_out(texts, folder):
    """([(text, ids)], [(text, ids)]) by transformers and a direct reading of the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = [], []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        (held_out if is_held_out(text) else train).append((text, ids))
    return train, held_out


def rows_by_hand(documents):
    stream = [t for _, ids in documents for t in [*ids, SEP]]
    rows = [[CLS, *stream[i : i + 127]] for i in range(0, len(stream) - 126, 127)]
    return np.array(rows, np.uint16)


def check_rows(folder, texts):
    """Assert that a folder has the rows of texts; return what train_and_held_out() finds."""
    train, held_out = train_and_held_out(texts, folder)
    assert as_set(rows_of(folder)) == as_set(rows_by_hand(train))
    assert as_set(rows_of(folder, "val.bin")) == as_set(rows_by_hand(held_out))
    return train, held_out


def test_rows_equal_a_second_implementation(data_dir, corpus):
    train, val = check_rows(data_dir, documents_of(corpus))
    rows, val_rows = rows_of(data_dir), rows_of(data_dir, "val.bin")
    assert rows.tolist() != rows_by_hand(train).tolist()  # shuffled

    meta = json.loads((data_dir / "meta.json").read_text())
    n_tokens, n_val_tokens = (sum(len(ids) + 1 for _, ids in part) for part in (train, val))
    assert meta["vocab_size"] == 600 and meta["seq_len"] == 128
    wanted = dict(read=len(train) + len(val), kept=len(train), held_out=len(val))
    wanted |= dict(tokens=n_tokens, val_tokens=n_val_tokens, rows=len(rows), val_rows=len(val_rows))
    wanted |= dict(dropped_tokens=n_tokens % 127, val_dropped_tokens=n_val_tokens % 127)
    wanted |= dict(words=sum(len(text.split()) for text, _ in train))
    assert wanted.items() <= meta["counts"].items()
    for name, checksum in meta["sha256"].items():
        assert hashlib.sha256((data_dir / name).read_bytes()).hexdigest() == checksum


def test_rows_by_a_vocabulary_that_is_there(tmp_path, data_dir, corpus, capsys):
    """Its size is its own; the rows equal those that it was made with. A finished set is kept."""
    again = tmp_path / "again"
    settings = {"tokenizer": str(data_dir), "vocab_size": 32768}
    meta = prepare(again, corpus, **settings)
    assert meta["vocab_size"] == 600 and same(again, data_dir)
    before = {path: path.stat().st_mtime_ns for path in again.iterdir()}
    prepare(again, corpus, **settings | {"tokenizer": f"{data_dir}/"})
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in again.iterdir()}
    # of other text of the same size it is not finished
    edited = shutil.copy2(corpus, tmp_path / "edited.txt")
    prepare(tmp_path / "mine", edited)
    edited.write_text(corpus.read_text("utf-8").replace("a", "b"), "utf-8")
    with pytest.raises(SystemExit, match=r"other files, .*edited\.txt: delete it"):
        prepare(tmp_path / "mine", edited)


def test_every_kind_of_file_is_read(tmp_path, corpus, capsys):
    """All copies of a text are held out, or none is. A file is read once, whatever its names."""
    texts = documents_of(corpus)
    lines = "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(corpus.read_bytes().replace(b"\n", b"\r\n")))
    table = pyarrow.table({"x": range(len(texts)), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    in_zstd = pyarrow.compress(corpus.read_bytes(), "zstd", asbytes=True)
    (tmp_path / "d.log.zst").write_bytes(in_zstd)
    (tmp_path / "e.json").write_text(json.dumps([{"body": text} for text in texts], indent=1))
    with open(tmp_path / "F.CSV", "w", newline="", encoding="utf-8-sig") as f:
        csv.writer(f).writerows([("sep=", ""), ("id", "body"), *enumerate(texts)])  # by Excel
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "empty.txt").touch()
    globs = f"{tmp_path}/a.*,{tmp_path}/**"
    counts = prepare(tmp_path / "out", globs, text_column="body")["counts"]
    train, _ = check_rows(tmp_path / "out", texts * 6)
    assert (counts["read"], counts["kept"]) == (6 * len(texts), len(train))
    assert re.search("names that lead to .*\nfiles without a byte: 1", capsys.readouterr().out)


@pytest.fixture
def five_files(tmp_path, corpus, monkeypatch):
    """A glob of five files, each several batches, which may span two of them."""
    put(monkeypatch, module, BATCH=30000)
    texts = documents_of(corpus)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("\n\n".join(texts[8 * i : 8 * i + 8]))
    return f"{tmp_path}/?.txt"


def test_rows_are_those_of_each_batch_in_either_order(tmp_path, five_files, corpus):
    """A batch has 30,000 characters or a little more; less than a row at its end is dropped."""
    mixed, ordered = tmp_path / "shuffle", tmp_path / "curriculum"
    for folder in (mixed, ordered):
        prepare(folder, five_files, order=folder.name)
    batches = [[]]
    for text in documents_of(corpus):
        if sum(map(len, batches[-1])) >= 30000:
            batches.append([])
        batches[-1].append(text)
    expected = [rows_by_hand(train_and_held_out(batch, mixed)[0]) for batch in batches]
    rows = rows_of(mixed)
    assert len(expected) > 3 and as_set(rows) == as_set(np.concatenate(expected))
    # the first batch's are spread over the whole
    places = [i for i, row in enumerate(rows) if row.tolist() in expected[0].tolist()]
    assert abs(np.mean(places) / len(rows) - 0.5) < 4 * 0.29 / np.sqrt(len(places))
    assert same(ordered, mixed, ["val.bin"]) and as_set(rows_of(ordered)) == as_set(rows)
    # most full stops first; the paper's code counts the token ".", not those that contain one
    words_of = AutoTokenizer.from_pretrained(ordered).convert_ids_to_tokens
    stops, wanted = ([words_of(row).count(".") for row in rows_of(x)] for x in (ordered, mixed))
    assert stops == sorted(wanted, reverse=True) != wanted


def test_the_filter_leaves_the_held_out_rows_alone(tmp_path, corpus, data_dir):
    train, _ = train_and_held_out(documents_of(corpus), data_dir)
    # between two ratios: no rounding decides
    ratios = sorted(len(ids) / len(normalise(text, "ascii")) for text, ids in train)
    n_kept = len(ratios) // 2
    middle = (ratios[n_kept - 1] + ratios[n_kept]) / 2
    counts = prepare(tmp_path / "filtered", corpus, filter_ratio=middle)["counts"]
    assert (counts["kept"], counts["filtered"]) == (n_kept, len(train) - n_kept)
    assert same(tmp_path / "filtered", data_dir, ["val.bin"])


@pytest.mark.parametrize("mode", ["plain", "none"])
def test_no_held_out_document_has_a_copy_in_train(tmp_path, corpus, monkeypatch, mode):
    """Copies that differ in case and spaces, in any batch, are held out by what they share."""
    put(monkeypatch, module, BATCH=30000)
    text = " ".join(corpus.read_text().split())
    texts = [f"{i} ÉTÉ {text[60 * i : 60 * i + 55]}".strip() for i in range(1500)]
    copies = [text.swapcase().replace(" ", "\xa0 ") for text in texts]
    (tmp_path / "a.txt").write_text("\n".join([*texts[:700], *copies, *texts[700:]]))
    settings = {"documents": "lines", "normalisation": mode, "vocab_size": 400}
    counts = prepare(tmp_path / "new", tmp_path / "a.txt", **settings)["counts"]
    by_key = sum(is_held_out("".join(text.lower().split())) for text in texts)
    assert counts["held_out"] == 2 * by_key
    decode = Tokenizer(tmp_path / "new/tokenizer.json").decode
    whole = {}
    for name in FILES[1:]:
        parts = [decode(row).split("[SEP]")[1:-1] for row in rows_of(tmp_path / "new", name)]
        whole[name] = {"".join(part.lower().split()) for row in parts for part in row}
    assert len(whole["val.bin"]) > 60 and not whole["val.bin"] & whole["train.bin"]


def test_how_many_documents_are_held_out(tmp_path, corpus, capsys):
    """200 rows of a small text, but never more than a tenth. Names may have signs of the shell."""
    text = " ".join(corpus.read_text().split())
    texts = [f"{i} {text[7 * i : 7 * i + 80]}".strip() for i in range(20000)]
    (tmp_path / "a, b.txt").write_text("\n".join(texts), newline="\r\n")
    settings = {"documents": "lines", "val_share": 0.0, "vocab_size": 300, "vocab_sample_mb": 1}
    meta = prepare(tmp_path / "my texts; ls", tmp_path / "a, b.txt", **settings)
    assert f"'--data_dir={tmp_path}/my texts; ls'" in capsys.readouterr().out
    counts = meta["counts"]
    assert counts["read"] == len(texts) and 150 < counts["val_rows"] < 900
    held_out = [text for text in texts if is_held_out(text, meta["val_share"])]
    assert counts["held_out"] == len(held_out) and 0 < meta["val_share"] <= 0.1
    few = prepare(tmp_path / "few", corpus, val_share=0.0, val_tokens=300)
    assert few["val_share"] == 0.1 and few["counts"]["val_rows"] == 300 // 127


def test_text_as_it_is_keeps_every_byte(tmp_path, capsys):
    texts = [f"Straße {i}:\n\tx  =  [{i}] ;\n\n\n    ende\u2028 \t" for i in range(300)]
    records = [{"text": text} for text in texts] + 307 * [{"content": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"normalisation": "none", "vocab_size": 260, "seq_len": 8}  # bytes alone
    counts = prepare(tmp_path / "out", tmp_path / "a.jsonl", **settings)["counts"]
    assert (counts["read"], counts["empty"]) == (607, 307)
    assert "300 of 607 documents have a text in 'text'" in capsys.readouterr().out
    assert counts["characters"] + counts["val_characters"] == sum(map(len, texts))
    n_tokens = sum(len(text.encode()) + 1 for text in texts)  # with a [SEP] each
    assert counts["tokens"] + counts["val_tokens"] == n_tokens


@pytest.mark.parametrize(
    "name, content, wanted",
    [
        ("a.csv", 'id,text,,\n1,ok,,\n2, "a, b",\n', "4 cells, and the header 2, none for 'b\"'"),
        ("a.csv", 'id,text\n1,"He said \\"no\\""\n', "line 2: "),
        ("a.csv", "text,id,text\nbody,1,n/a\n", "two columns are named 'text': rename one"),
        ("a.csv", 'text,id\n"a\nb",1\n"Great,2\nok,3\n', "line 4: its quote is never closed"),
        ("a.csv", f"text\n{'long' * 300}\n", "line 2: "),
        ("a.csv", "text,id\none,1\rtwo,2\n", "line 2: a bare CR stands in it"),
        ("a.csv", '"3","Wall St."\n"4","b"\n', "line 1 is to be the header"),
        ("a.tsv", "text\tid\rone\t1\rtwo\t2\r", "type tr '\\r' '\\n' < OLD > NEW.tsv"),
        ("a.tsv", '"text"\t"label"\n"a"\t"b"\n', "name it .csv"),
        ("a.tsv", "id\ttext\n1\tok\n2\ttwo\nlines\n", "line 4: it has 1 cells, and the header 2"),
        ("a.csv", "text,id\na,1,,\nb\n", ("a", "b")),
        ("a.txt.zst", LONG_WINDOW, "zstd -d --long=31"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": NaN}\n', "line 3: 'text' is nan, no text"),
        ("a.json", '[{"text": "a"}, ["b"]]', 'record 2: ["b"] is no object: take it out'),
        ("a.json", '{"y": [{"text": "a"}], "z": [{}], "x": ["text"]}', """jq -c '.["y"][]' OLD"""),
        ("a.json", '{\n "text": "a"\n}\n{\n "text": "b"\n}', "jq -c . OLD > NEW.jsonl"),
        ("a.jsonl", '{"text": "a"},\n{"text": "b"}\n', "line 1, column 14 is no whole object"),
        ("a.txt", "one\r\r" + 250 * "abcd\n", ["one\r\r", 200 * "abcd\n", 50 * "abcd\n"]),
        ("a.csv", '"sep=;"\r\nid;text\r\n1;"a; b"\r\n2; "a\r\n', ("a; b", ' "a')),
        ("a.csv", 'text|"a, b"\n"C:\\"", b\\"|1\n"""c"""|2\n', ['C:\\", b\\', '"c"']),
        ("a.csv", 'a;b, text ,,\n1,"5"" pipe",,\n2,5" pipe\n3\n,,,\n', ['5" pipe', '5" pipe', ""]),
        ("a.tsv", 'id\ttext\n1\ta\rb\r\n2\t"No," I say\r\n3\t\r\n', ["a\rb", '"No," I say', ""]),
        ("a.tsv", 'id\ttext\n1\t"He said ""no"""\n', ('"He said ""no"""',)),
        # half an emoji, and a byte that is no UTF-8
        ("a.jsonl", b'{"text": "\\ud83d."}\n{"text": "\xfcber"}\n', ("\ufffd.", "\ufffdber")),
        *(("a.csv", "“Да, мы”\r\n".encode(f"utf-16{x}"), f"UTF-16{x} -t") for x in ("LE", "BE")),
        *(("a.csv", "text\r\n".encode(x), f"iconv -f {x} -t UTF-8") for x in ("UTF-16", "UTF-32")),
        ("a.txt", "请问，要去哪里？\n".encode("utf-16-le"), "it is no text"),
        ("a.txt", "ein\0 ü\0\0 \ufffd", ["ein\0 ü\0\0 \ufffd"]),
        ("a.csv", b"PK\3\4\x14\0\0\0", "unzip it"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"", mtime=0), mtime=0), "gzip -dc"),
        ("a.log.gz", gzip.compress(bytes(257) + b"ustar\0", mtime=0), "tar -xf OLD"),
        *((f"a.{end}", LFS, "git lfs pull") for end in ("txt", "tsv", "json.gz", "parquet")),
    ],
)
def test_a_table_is_read_as_it_is_or_refused(monkeypatch, name, content, wanted):
    """No text is lost in silence: one line says what is wrong, or that quotes stay (a tuple)."""
    said = []
    put(monkeypatch, sources, CELL=1000, MAX_DOCUMENT=1000, say_once=said.append)
    file = io.BytesIO(content if isinstance(content, bytes) else content.encode())
    try:
        found = list(sources.read_texts(file, name, "text"))
    except Exception as e:  # whatever a reader raises
        found = ": ".join(hub.explain(e))
    if isinstance(wanted, str):
        assert wanted in found and "\n" not in found and ("jq" in found) == ("jq" in wanted)
    else:
        assert found == [*wanted] and bool(said) == isinstance(wanted, tuple)


def repeated(text):
    return "".join(f"{i} {text}\n\n" for i in range(100, 500))


FRENCH = repeated("les élèves français étaient déçus à l'école, et la dame au café aussi")
LOST = "WARNING: normalisation=ascii drops 12.3% of the characters"  # 9 of 73
WORDS = np.random.default_rng(0).choice(list("bcdfghjklmnpqrstvwxz"), (20000, 16))
LOG = "\n\n".join(map("".join, WORDS))
ONE = next(x for i in range(100) if is_held_out(x := " ".join(500 * [f"morning {i}"])))


@pytest.mark.parametrize(
    "text, said, settings",
    [
        (FRENCH, LOST, {}),
        (repeated("good 𝐦𝐨𝐫𝐧𝐢𝐧𝐠 to all of you ☂ at 2° and to the dog"), "WARNING", {}),
        (repeated("it’s “½” of €5 – the ﬁrst x² ≤ 3 … of Æsop"), "", {"vocab_size": 290}),
        (repeated("उन्होंने बच्चों को ७ कहानियाँ सुनाईं"), "type --normalisation=plain", {}),
        (ONE, "100% of the text is held out: give more documents", {}),
        (repeated("5 \ufffd"), "WARNING: 400 doc", {"normalisation": "plain", "vocab_size": 265}),
        (FRENCH.encode("cp1252"), "most texts are not UTF-8: .* iconv -f WINDOWS-1252", {}),
        (LOG, "type --filter_ratio=0", {"vocab_size": 4096, "filter_ratio": -1.0}),
    ],
)
def test_a_look_before_the_work(tmp_path, capfd, text, said, settings):
    """Text that the defaults would spoil is warned of, or ends before it is read."""
    path = tmp_path / "a.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    settings = {"source": path, "vocab_size": 280} | settings
    if said and said[:7] != "WARNING":
        with pytest.raises(SystemExit, match=said):
            prepare(tmp_path / "out", **settings)
        return
    prepare(tmp_path / "out", **settings)
    printed = capfd.readouterr().out
    assert said in printed and ("WARNING" in printed) == bool(said)


def test_a_broken_file_and_a_full_disk(tmp_path, five_files, capsys, monkeypatch):
    """What comes before is done, and stays, but for a file that was edited or emptied."""
    out, path = tmp_path / "out", tmp_path / "3.txt.gz"
    whole = gzip.compress((tmp_path / "3.txt").read_bytes())
    path.write_bytes(whole)
    (tmp_path / "3.txt").unlink()
    source = f"{tmp_path}/?.t*"
    prepare(tmp_path / "whole", source)
    sample = {"vocab_sample_mb": 0, "tokenizer": str(tmp_path / "whole")}
    path.write_bytes(whole[: len(whole) // 2])
    edited = (tmp_path / "2.txt").read_text()
    (tmp_path / "2.txt").write_text(edited.replace("e", "o"))
    with pytest.raises(SystemExit, match=r"3\.txt\.gz could not .* \(EOFError.*: rerun"):
        prepare(out, source, **sample)
    with pytest.raises(SystemExit, match="was begun with order='shuffle'"):
        prepare(out, source, order="curriculum", **sample)
    path.write_bytes(whole)
    (tmp_path / "2.txt").write_text(edited)
    taken = out / "batch-00002.train.tmp"
    taken.mkdir()  # where the third one would be written
    with pytest.raises(OSError, match=taken.name):
        prepare(out, source, **sample)
    taken.rmdir()
    prepare(out, source, **sample)
    said = capsys.readouterr().out
    assert re.search("going on behind [1-9]", said) and "files have changed" in said
    assert same(out, tmp_path / "whole")
    assert not [*out.glob("batch-*"), *out.glob("plan.json")]
    put(monkeypatch, module, open_bytes=lambda path: os.truncate(path, 99) or hub.open_bytes(path))
    with pytest.raises(SystemExit, match=r"0\.txt changed while it was read: rerun"):
        prepare(tmp_path / "cut", source, **sample)


def test_max_tokens_of_a_silent_hub(tmp_path, five_files, corpus, texts, capsys, monkeypatch):
    """The first documents of the Hub's files, in their order; own files are read whole."""
    errors = []  # that further reads of the Hub raise, the last one first

    class Line(io.FileIO):
        def readinto(self, buffer):
            if self.tell() and errors and (error := errors.pop()):
                raise error
            return super().readinto(memoryview(buffer)[:4096])

    def opened(path):
        on_hub = path.startswith(hub.HUB)
        return Line(path.removeprefix(hub.HUB)) if on_hub else open(path, "rb")

    paths = sorted(tmp_path.glob("?.txt"))
    listed = [[f"{hub.HUB}{path}", path.stat().st_size] for path in paths]
    put(monkeypatch, hub, files_of=lambda name: listed)
    put(monkeypatch, module, open_bytes=opened, PAUSE=0, TRIES=3)
    own_texts = [text[:2000].strip() for text in texts[60:75]]
    (tmp_path / "own.txt").write_text("\n\n".join(own_texts))
    out, source = tmp_path / "out", f"some/web,{tmp_path}/own.txt"
    counts = prepare(out, source, max_tokens=30000)["counts"]
    own, _ = train_and_held_out(own_texts, out)
    n_of_hub = counts["read"] - len(own_texts)
    train, _ = train_and_held_out(documents_of(corpus)[:n_of_hub], out)
    n_tokens = [len(ids) + 1 for _, ids in train]
    assert counts["tokens"] - sum(len(ids) + 1 for _, ids in own) == sum(n_tokens)
    assert sum(n_tokens) >= 30000 > sum(n_tokens[:-1])
    assert {*as_set(rows_of(out))}.issuperset(as_set(rows_by_hand(own)))

    # the batches under way at the end are too many: a rerun leaves them out
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        put(patch, module, merge=Mock(side_effect=KeyboardInterrupt))
        prepare(tmp_path / "again", source, max_tokens=30000)
    prepare(tmp_path / "again", source, max_tokens=30000)
    assert same(tmp_path / "again", out)

    quiet = 60 * [None]  # the vocabulary is made by then
    errors[:] = [ConnectionError("503"), None, TimeoutError(), EOFError("cut"), *quiet]
    prepare(tmp_path / "4", source, max_tokens=30000)
    assert "cut): it is tried again" in capsys.readouterr().out and not errors
    errors[:] = [*4 * [ConnectionError("dead")], *quiet]
    with pytest.raises(SystemExit, match=r"could not be read to its end .*dead.*: rerun"):
        prepare(tmp_path / "dead", source, max_tokens=30000)
    assert [*(tmp_path / "dead").glob("batch-*")]
    prepare(tmp_path / "dead", source, max_tokens=30000)
    assert same(tmp_path / "4", out) and same(tmp_path / "dead", out)


def test_the_hub_is_read_in_its_order_or_refuses_once(tmp_path, corpus, monkeypatch):
    web = tmp_path / "hub/datasets/some/web"
    (web / "sample").mkdir(parents=True)
    configs = """---
configs:
- {config_name: part, data_files: [{split: train, path: sample/*}]}
- {config_name: all, data_files: [{split: train, path: data/*}]}
---
"""
    (web / "README.md").write_text(configs)
    parts = [documents_of(corpus)[i::3] for i in range(3)]
    for i, texts in enumerate(parts):
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, web / f"sample/{i:03}.parquet", row_group_size=7)
    serve(tmp_path / "hub", monkeypatch)
    settings = SMALL_DATA | {"data_dir": tmp_path / "out"}
    *said, last = script("prepare.py", source="some/web", status=1, **settings).splitlines()
    assert "NAME:CONFIG" in last and not re.search("NAME:CONFIG|Traceback", str(said))
    script("prepare.py", source="some/web:part", **settings)
    check_rows(tmp_path / "out", [text for texts in parts for text in texts])


# Batches and pieces are small, so that a small data set is many. A vocabulary, if there is none
# yet, takes minutes of a library, in which Python sees no signal.
SMALL = """
import hashlib, sys
import prepare
from nanocram import safety
from nanocram.settings import configure

def stuck(*args):
    print("stuck")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**8)

prepare.BATCH, prepare.MERGED, prepare.train_tokenizer = 30000, 1, stuck
configure(vars(prepare), sys.argv[1:])
safety.run(prepare.main, prepare.data_dir, "rerun the command to go on")
"""


def begin(folder, source, tokenizer):
    values = SMALL_DATA | {"source": source, "data_dir": folder, "tokenizer": tokenizer}
    return Forked(ROOT, SMALL, "prepare.py", *flags(**values))


def test_ctrl_c_and_kills_change_nothing(tmp_path, five_files, data_dir):
    out = tmp_path / "out"
    first_batch = out / "batch-00000.json"
    prepare(tmp_path / "whole", five_files, tokenizer=str(data_dir))
    process = begin(out, five_files, "")
    wait_for(lambda: "stuck" in Path(process.path).read_text(), process)
    process.send_signal(signal.SIGINT)
    process.end(-signal.SIGINT)
    shutil.rmtree(out)
    process = begin(out, five_files, data_dir)
    wait_for(first_batch.exists, process, pause=0.001)
    process.send_signal(signal.SIGINT)  # as a terminal does
    said = process.end(1)
    assert "Traceback" not in said and said.endswith("\nstopped: rerun the command to go on\n")
    process = begin(out, five_files, data_dir)
    wait_for((out / "train.bin").exists, process, pause=0.001)  # it merges
    process.kill()
    process.end(-signal.SIGKILL)
    begin(out, five_files, data_dir).end()
    assert same(out, tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="no such /proc")
@pytest.mark.parametrize("what", ["a process that makes rows", "prepare.py"])
def test_none_outlives_a_kill(what, tmp_path, five_files, data_dir):
    """One writes to a pipe that nobody reads, when it is killed, or what began it."""
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out/batch-00002.train.tmp")
    process = begin(tmp_path / "out", five_files, data_dir)
    wait_for((tmp_path / "out/batch-00001.json").exists, process)
    others = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in others:
        os.kill(int(pid), signal.SIGINT)  # Ctrl-C in a terminal is not for them
    if what == "prepare.py":
        process.kill()
        process.end(-signal.SIGKILL)
    else:
        os.kill(int(others[-1]), signal.SIGKILL)
        said = process.end(1)
        assert "one of its processes ended early" in said and "Traceback" not in said
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in others))
