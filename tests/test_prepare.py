"""prepare.py: rows beside a second implementation, kinds of text, slips, faults, kills, the Hub."""

import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line, put
from hub import StandIn
from transformers import AutoTokenizer

import prepare as module
from nanocram import sources
from nanocram.tokenizer import CLS, SEP

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


def train_and_held_out(texts, folder):
    """([(text, ids)], [(text, ids)]) by transformers and a direct reading of the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = [], []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        (held_out if is_held_out(text) else train).append((text, ids))
    return train, held_out


def rows_by_hand(documents, T=128):
    stream = [t for _, ids in documents for t in [*ids, SEP]]
    return [[CLS, *stream[i : i + T - 1]] for i in range(0, len(stream) - T + 2, T - 1)]


def rows_by_batches(texts, folder):
    """[rows of each batch], where a batch has 30,000 characters; the rest of each is dropped."""
    batches = [[]]
    for text in texts:
        if sum(map(len, batches[-1])) >= 30000:
            batches.append([])
        batches[-1].append(text)
    train = [train_and_held_out(batch, folder)[0] for batch in batches]
    return [np.array(rows_by_hand(documents), np.uint16) for documents in train]


def check_rows(folder, texts):
    """Assert that a folder has the rows of texts; return what train_and_held_out() finds."""
    train, held_out = train_and_held_out(texts, folder)
    assert as_set(rows_of(folder)) == as_set(np.array(rows_by_hand(train), np.uint16))
    assert as_set(rows_of(folder, "val.bin")) == as_set(np.array(rows_by_hand(held_out), np.uint16))
    return train, held_out


# Rows


def test_rows_equal_a_second_implementation(data_dir, corpus):
    train, val = check_rows(data_dir, documents_of(corpus))
    rows, val_rows = rows_of(data_dir), rows_of(data_dir, "val.bin")
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


def test_rows_by_a_vocabulary_that_is_there(tmp_path, data_dir, corpus, prepare):
    """Its size and its normalisation are its own; the rows equal those that it was made with."""
    begin = {"tokenizer": str(data_dir), "vocab_size": 32768}
    meta = prepare(tmp_path / "again", corpus, **begin)
    assert meta["vocab_size"] == 600 and same(tmp_path / "again", data_dir)
    prepare(tmp_path / "longer", corpus, **begin, seq_len=300)
    train, _ = train_and_held_out(documents_of(corpus), data_dir)
    rows = rows_of(tmp_path / "longer", T=300)
    assert as_set(rows) == as_set(np.array(rows_by_hand(train, 300), np.uint16))
    slips = [({"vocab_size": 700}, "--vocab_size=600"), ({"normalisation": "none"}, "=ascii")]
    for changed, message in slips:
        with pytest.raises(SystemExit, match=f"type .*{message}"):
            prepare(tmp_path / "x", corpus, **(begin | changed))
    prepare(tmp_path / "again", corpus, **begin | {"tokenizer": f"{data_dir}/"})  # is finished
    with pytest.raises(SystemExit, match="was made with tokenizer=''"):
        prepare(data_dir, corpus, **begin)


def write_kinds(folder, corpus):
    """The text of corpus as files of every kind, under their names."""
    texts = corpus.read_text().split("\n\n")
    lines = "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts)
    with gzip.open(folder / "a.txt.gz", "wt", newline="\r\n") as f:
        f.write(corpus.read_text())
    table = pyarrow.table({"x": range(len(texts)), "body": texts})
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pyarrow.CompressedOutputStream(folder / "f.txt.zst", "zstd") as f:
        f.write(corpus.read_bytes())
    (folder / "g.json").write_text(json.dumps([{"body": text} for text in texts], indent=1))
    (folder / "h.log").write_text(corpus.read_text())
    with open(folder / "I.CSV", "w", newline="", encoding="utf-8-sig") as f:
        csv.writer(f).writerows([("id", "body"), *enumerate(texts)])


def test_every_kind_of_file_is_read(tmp_path, corpus, prepare):
    """All copies of a text are held out, or none is."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_kinds(folder, corpus)
    n = len(list(folder.iterdir()))
    # a file that two globs match is read once
    source = f"{folder}/*,{folder}/a.*,{folder}/h.log"
    counts = prepare(tmp_path / "out", source, text_column="body")["counts"]
    texts = documents_of(corpus)
    train, _ = check_rows(tmp_path / "out", texts * n)
    assert (counts["read"], counts["kept"]) == (n * len(texts), len(train))


@pytest.fixture
def five_files(tmp_path, corpus, monkeypatch):
    """A glob of five files, each several batches, which may span two of them."""
    put(monkeypatch, module, BATCH=30000)
    texts = documents_of(corpus)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("\n\n".join(texts[8 * i : 8 * i + 8]))
    return f"{tmp_path}/?.txt"


def test_the_number_of_processes_changes_nothing(tmp_path, five_files, prepare):
    for n in (1, 3):
        prepare(tmp_path / f"{n}", five_files, processes=n)
    assert same(tmp_path / "3", tmp_path / "1")
    texts = [text for i in range(5) for text in documents_of(tmp_path / f"{i}.txt")]
    expected = rows_by_batches(texts, tmp_path / "1")
    assert len(expected) > 3
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
    train, _ = train_and_held_out(documents_of(corpus), data_dir)
    ratios = sorted(len(ids) / len(text) for text, ids in train)
    middle = ratios[len(ratios) // 2]
    counts = prepare(tmp_path / "filtered", corpus, filter_ratio=middle)["counts"]
    assert counts["filtered"] == pytest.approx(len(train) / 2, abs=len(train) / 6)
    assert counts["kept"] + counts["filtered"] == len(train)
    assert same(tmp_path / "filtered", data_dir, ["val.bin"])


def test_how_many_documents_are_held_out(tmp_path, corpus, prepare):
    """By the size of the text, where no share is typed: 200 rows and eight documents of a small
    one, 1M tokens of a large one, and never more than a tenth."""
    text = " ".join(corpus.read_text().split())
    texts = [f"{i} {text[7 * i : 7 * i + 80]}" for i in range(20000)]
    (tmp_path / "log.txt").write_text("\n".join(texts))
    settings = {"documents": "lines", "val_share": 0.0, "vocab_size": 300, "vocab_sample_mb": 1}
    meta = prepare(tmp_path / "out", tmp_path / "log.txt", **settings)
    counts = meta["counts"]
    assert counts["read"] == len(texts) and 150 < counts["val_rows"] < 900
    held_out = [text for text in texts if is_held_out(text.strip(), meta["val_share"])]
    assert counts["held_out"] == len(held_out) and 0 < meta["val_share"] <= 0.1
    assert prepare(tmp_path / "few", corpus, val_share=0.0)["val_share"] == 0.1
    shares = {1e6: 0.1, 4e7: 0.01, 4e8: 0.01, 4e9: 0.001, 4e10: 1e-4, 4e12: 1e-4}
    assert {size: module.choose_share(size, size / 3000) for size in shares} == shares
    assert module.choose_share(1e8, 100) == 0.08  # long documents


def test_each_line_is_a_document(tmp_path, corpus, prepare):
    lines = [line.strip() for line in corpus.read_text().splitlines() if line.strip()]
    (tmp_path / "windows.txt").write_bytes("\r\n".join(lines).encode() + b"\r\n")
    prepare(tmp_path / "out", tmp_path / "windows.txt", documents="lines")
    check_rows(tmp_path / "out", lines)


def test_text_as_it_is_keeps_every_byte(tmp_path, prepare):
    """Spaces, tabs, line breaks, case, accents."""
    texts = [f"Straße {i}:\n\tx  =  [{i}] ;\n\n\n    ende\u2028 \t" for i in range(300)]
    records = [{"text": text} for text in texts] + 7 * [{"content": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"normalisation": "none", "vocab_size": 260, "seq_len": 8}  # bytes alone
    counts = prepare(tmp_path / "out", tmp_path / "a.jsonl", **settings)["counts"]
    assert (counts["read"], counts["empty"]) == (307, 7)
    assert counts["characters"] + counts["val_characters"] == sum(map(len, texts))
    n_tokens = sum(len(text.encode()) + 1 for text in texts)  # with a [SEP] each
    assert counts["tokens"] + counts["val_tokens"] == n_tokens


# Text that is not as it should be


def texts_in(path):
    with open(path, "rb") as file:
        return list(sources.read_texts(file, str(path), "text"))


def test_quotes_half_an_emoji_and_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"open\n2\n3\tend"\n')
    assert texts_in(path) == ['"open', "", 'end"']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\\ud83d."}\n{"text": "\xfcber"}\n')
    assert texts_in(path) == ["\ufffd.", "\ufffdber"]


# zstd: magic number, a window of 512 MB, one raw block
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\x98" + ((5 << 3) | 1).to_bytes(3, "little") + b"text\n"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "text\nok\nI ate pie, ice cream\n", "line 3: it has 2 cells, and the header 1"),
        ("a.csv", 'id,text\n1, "a, b"\n', "line 2: a space stands before a quote"),
        ("a.csv", 'id,text\n1,ok\n2, "c"\n', "line 3: a space stands before a quote"),
        ("a.csv", "text,id,text\nbody,1,n/a\n", "two columns are named 'text': rename one"),
        ("a.csv", 'text,id\n"a\nb",1\n"Great,2\nok,3\n', "line 4: unexpected end of data"),
        ("a.csv", 'text,id\n"He said \\"hi\\", ok",1\n', "line 2: ',' expected"),
        ("a.csv", "id;text\n1;a\n2;b;c\n", "line 3: it has 3 cells"),
        ("a.csv", "text\rold\rMac\r", "line 1: new-line character"),
        ("a.tsv", 'id\ttext\n1\t"two\nlines"\n', "line 3: a .tsv has no quoted cells"),
        ("a.tsv", "id\ttext\n1\ta\tb\n", "line 2: it has 3 cells"),
        ("a.txt", "hello\nworld\n".encode("utf-16-le"), "iconv -f UTF-16 -t UTF-8"),
        ("a.csv", "text\nhello\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": NaN}\n', "line 3: 'text' is nan, no text"),
        ("a.jsonl", '{"text": "a"}\nnull\n', "line 2: null is no object: take it out"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', "make it a string or null"),
        ("a.json", '{"data": [{"text": "a"}]}', "jq -c '.data[]' OLD > NEW.jsonl"),
        ("a.txt", "日本語文章".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.csv", "text\nyes, \n", "line 2: it has 2 cells"),
        ("a.csv", 'label,text,date\npos, "so, good"\n', "line 2: a space stands before a quote"),
        ("a.json", '[{"text": "a"}, ["b"]]', 'record 2: ["b"] is no object'),
        ("a.txt.zst", LONG_WINDOW, "zstd -d --long=31"),
    ],
)
def test_a_table_that_would_lose_text_is_refused(tmp_path, prepare, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as end:
        prepare(tmp_path / "out", tmp_path / name, vocab_size=300)
    assert message in str(end.value) and "\n" not in str(end.value)


@pytest.mark.parametrize(
    "name, content, texts",
    [
        ("a.tsv", "id\ttext\n1\ta\rb\r\n2\tok\r\n", ["a\rb", "ok"]),
        ("a.tsv", "text\tlabel\nfirst\r\tpos\n\nlast\n", ["first\r", "last"]),
        ("a.csv", '\ufeffid;text\r\n1;a, b\r\n2;"c;\r\nd"\r\n', ["a, b", "c;\r\nd"]),
        ("a.csv", "id\ttext\n1\ta, b\n", ["a, b"]),
        ("a.csv", 'text , id,,\n"5"" pipe",1,,\n5" pipe\n,,,\n', ['5" pipe', '5" pipe']),
        ("a.csv", '"a;b",text\n1," ""so"" it is, ""so"""\n', [' "so" it is, "so"']),
        ("a.tsv", 'text\tnote\na 5" tv\nb\tc\n', ['a 5" tv', "b"]),
        ("a.jsonl", '{"text": "a\\r\\nb"}\r\n', ["a\r\nb"]),
        ("a.txt", "a\r\nb", ["a\r\nb"]),
        ("a.csv", "", []),
    ],
)
def test_a_table_is_read_as_it_is(tmp_path, name, content, texts):
    (tmp_path / name).write_bytes(content.encode())
    assert texts_in(tmp_path / name) == texts


def test_what_ascii_loses_is_counted(tmp_path, prepare, capfd):
    """The same in both forms of Unicode; marks, digits and signs of other scripts, too."""

    def repeated(text):
        return "".join(f"{i} {text}\n\n" for i in range(100, 500))

    french = repeated("les élèves français étaient déçus à l'école, et la dame au café aussi")
    shares = []
    for form in ("NFC", "NFD"):
        (tmp_path / form).mkdir()
        (tmp_path / form / "a.txt").write_text(unicodedata.normalize(form, french))
        prepare(tmp_path / form / "out", tmp_path / form / "a.txt", vocab_size=280)
        shares += re.findall(r"drops .* of the words", capfd.readouterr().out)
    lost = sum(char > "\x7f" for char in french) / (len(french) - 2 * 400)
    assert shares[0] == shares[1] and f"drops {lost:.1%} of the characters" in shares[0]
    (tmp_path / "old.txt").write_text(french, encoding="cp1252")
    with pytest.raises(SystemExit, match="most texts are not UTF-8: iconv -f WINDOWS-1252"):
        prepare(tmp_path / "old", tmp_path / "old.txt", vocab_size=280)
    texts = {
        "hindi": ("उन्होंने बच्चों को ७ कहानियाँ सुनाईं", "type --normalisation=plain"),
        "vietnamese": ("Tiếng Việt là ngôn ngữ của người Việt", "type --normalisation=plain"),
        "emoji": ("good morning 😀 to all of you and also to the dog", ""),
        "bold": ("good 𝐦𝐨𝐫𝐧𝐢𝐧𝐠 to all of you ☂ at 2° and to the dog", ""),
    }
    for name, (text, message) in texts.items():
        (tmp_path / f"{name}.txt").write_text(repeated(text))
        settings = {"source": tmp_path / f"{name}.txt", "vocab_size": 280}
        if message:
            with pytest.raises(SystemExit, match=message):
                prepare(tmp_path / name, **settings)
        else:
            prepare(tmp_path / name, **settings)
            assert "WARNING: normalisation=ascii" in capfd.readouterr().out
    (tmp_path / "plain.txt").write_text(repeated("it’s “½” of €5 – the ﬁrst x² ≤ 3 … of Æsop"))
    prepare(tmp_path / "plain", tmp_path / "plain.txt", vocab_size=290)
    assert "WARNING" not in capfd.readouterr().out


def test_a_text_without_blank_lines_is_cut(monkeypatch):
    put(monkeypatch, sources, MAX_DOCUMENT=10)
    cut = list(sources.split_documents(io.StringIO("\n".join(["abcd"] * 5))))
    assert cut == ["abcd\nabcd\n", "abcd\nabcd\n", "abcd"]


def test_a_look_before_the_work(tmp_path, prepare, capfd):
    """Text that the defaults would spoil ends before it is read, and by what to type."""
    german = "Die {} größten Vögel über den Dächern; schöne Grüße aus Köln an Jürgen, Käthe.\n\n"
    (tmp_path / "german.txt").write_text("".join(german.format(i) for i in range(400)))
    prepare(tmp_path / "german", tmp_path / "german.txt", vocab_size=280)
    assert "--normalisation=plain" in capfd.readouterr().out
    (tmp_path / "greek.txt").write_text("ο ταχύς σκύλος πηδά a\n\n" * 400)
    rng = random.Random(0)
    lines = ["".join(rng.choices("bcdfghjklmnpqrstvwxz", k=16)) for _ in range(20000)]
    (tmp_path / "log.txt").write_text("\n\n".join(lines))
    with pytest.raises(SystemExit, match="type --normalisation=plain"):
        prepare(tmp_path / "out", tmp_path / "greek.txt", vocab_size=262)
    log = {"source": tmp_path / "log.txt", "vocab_size": 4096}
    with pytest.raises(SystemExit, match="type --filter_ratio=0"):
        prepare(tmp_path / "out", filter_ratio=-1.0, **log)
    prepare(tmp_path / "out", **log)  # what they said helps, in the same folder


def test_what_cannot_be_read_leaves_the_set_unfinished_until_it_is_mended(
    tmp_path, five_files, prepare, capsys, monkeypatch
):
    """A bad line, then a broken gzip; what comes before them is done, and stays."""
    path, out = tmp_path / "2.txt", tmp_path / "out"
    texts = documents_of(path)
    path.unlink()
    whole = gzip.compress((tmp_path / "3.txt").read_bytes())
    (tmp_path / "3.txt").unlink()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "2.jsonl").write_text(lines)
    (tmp_path / "3.txt.gz").write_bytes(whole)
    source = f"{tmp_path}/?.[tj]*"
    prepare(tmp_path / "whole", source)
    (tmp_path / "2.jsonl").write_text(lines + "{bad\n")
    (tmp_path / "3.txt.gz").write_bytes(whole[: len(whole) // 2])
    sample = {"vocab_sample_mb": 0, "tokenizer": str(tmp_path / "whole")}
    with pytest.raises(SystemExit, match=r"2\.jsonl could not .* line 9, column 2.*: rerun"):
        prepare(out, source, **sample)
    with pytest.raises(SystemExit, match="was begun with order='shuffle'"):
        prepare(out, source, order="curriculum", **sample)
    (tmp_path / "2.jsonl").write_text(lines)
    with pytest.raises(SystemExit, match=r"3\.txt\.gz could not be read to its end \(EOFError"):
        prepare(out, source, **sample)
    (tmp_path / "3.txt.gz").write_bytes(whole)
    capsys.readouterr()
    read = []
    opened = sources.open_bytes
    put(monkeypatch, module, open_bytes=lambda path: read.append(path) or opened(path))
    prepare(out, source, **sample)
    assert str(tmp_path / "0.txt") not in read  # its rows are there
    said = capsys.readouterr().out
    assert re.search("going on behind [1-9]", said) and "files have changed" in said
    assert same(out, tmp_path / "whole")
    assert not [*out.glob("batch-*"), *out.glob("plan.json")]


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


def test_names_as_a_shell_has_them(tmp_path, corpus, monkeypatch):
    """Commas and spaces in them, ~ in each, the embedded corpus from any folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("x,y.txt", "a.txt", "b.txt"):
        shutil.copy(corpus, tmp_path / name)
    for source, names in (
        ("x,y.txt", ["x,y.txt"]),
        ("~/a.txt,~/b.txt", ["a.txt", "b.txt"]),
        ("data/sample.txt.gz", ["sample.txt.gz"]),
    ):
        monkeypatch.setattr(module, "source", source)
        files = [path for found in module.find_files().values() for path, _ in found]
        assert [Path(path).name for path in files] == names
    monkeypatch.setattr(module, "data_dir", "data/my texts; ls")
    *_, data, _, _, out = shlex.split(module.next_command(1000))
    assert data == "--data_dir=data/my texts; ls" and out == "--out_dir=out/my texts; ls"


@pytest.fixture
def folder_of_slips(tmp_path, corpus, monkeypatch):
    """A working folder with texts that cannot be prepared and folders that cannot be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(corpus.read_bytes())
    (tmp_path / "utf16.txt").write_text(corpus.read_text(), encoding="utf-16")
    (tmp_path / "short.txt").write_text("A few words.\n")
    (tmp_path / "column.csv").write_text("body;id\nab;1\n")
    lines = [line for line in corpus.read_text().splitlines() if line]
    (tmp_path / "single.txt").write_text("\n".join(lines[:2000]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.bin").write_text("precious")
    (tmp_path / "link.txt").symlink_to("gone.txt")
    return tmp_path


@pytest.mark.parametrize(
    "values, message",
    [
        ({"source": "*.tsv"}, "no file matches"),
        ({"source": "utf16.txt"}, "iconv -f UTF-16"),
        ({"source": "column.csv"}, "it has body, id: type --text_column=NAME"),
        ({"source": "nobody/nothing"}, "could not read nobody/nothing (ConnectionError"),
        ({"source": "short.txt"}, "the text yields only"),
        ({"source": "single.txt"}, "held out of 1 documents (paragraphs): delete "),
        ({"vocab_size": 70000}, "vocab_size=70000 cannot work"),
        ({"tokenizer": "mine"}, "mine/tokenizer.json is not a tokenizer.json of prepare.py"),
        ({"data_dir": "mine"}, "is not a new or an empty folder"),
        ({"data_dir": "short.txt"}, "is not a new or an empty folder"),
        ({"source": "*.txt"}, "link.txt cannot be read"),
    ],
)
def test_slips_are_one_line(folder_of_slips, prepare, values, message):
    values = {"source": "corpus.txt", "data_dir": "out"} | values
    with pytest.raises(SystemExit) as end:
        prepare(values.pop("data_dir"), values.pop("source"), **values)
    assert message in str(end.value) and "\n" not in str(end.value)
    assert not (folder_of_slips / "out" / "meta.json").exists()
    assert (folder_of_slips / "mine" / "train.bin").read_text() == "precious"


# The Hub, faults and kills: prepare.py as a process, against a stand-in

# Everything is small, so that a small data set is many blocks, batches and pieces.
SMALL = {"sources.BLOCK": 20000, "prepare.BATCH": 30000, "prepare.MERGED": 1, "prepare.PAUSE": 5}
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
def stand_in(tmp_path_factory, texts):
    """A StandIn with data sets as FineWeb and the Pile are laid out, and a gated one."""
    root = tmp_path_factory.mktemp("hub")
    some = [text[:6000] for text in texts[:240]]
    shards = [some[i::3] for i in range(3)]
    web = root / "datasets/some/web"
    (web / "sample").mkdir(parents=True)
    (web / "README.md").write_text(CONFIGS)
    for folder in ("some/gated", "some/pile"):
        (root / "datasets" / folder).mkdir(parents=True)
    for i, shard in enumerate(shards):
        table = pyarrow.table({"id": range(len(shard)), "text": shard})
        pyarrow.parquet.write_table(table, web / f"sample/{i:03}.parquet", row_group_size=7)
        lines = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in shard).encode()
        packed = root / f"datasets/some/pile/train-{i}.jsonl.zst"
        with pyarrow.CompressedOutputStream(packed, "zstd") as out:
            out.write(lines)
    (root / "datasets/some/gated/.gated").write_text("")
    pyarrow.parquet.write_table(table, root / "datasets/some/gated/train.parquet")
    stand_in = StandIn(root)
    yield stand_in
    stand_in.stop()


@pytest.fixture
def hub(stand_in):
    """The StandIn, whose faults end with a test."""
    yield stand_in
    stand_in.fault = None


@pytest.fixture(scope="module")
def begin(tmp_path_factory, stand_in):
    """A function that starts prepare.py on the stand-in; its output goes into a pipe."""
    home = tmp_path_factory.mktemp("script")
    (home / "small_prepare.py").write_text(SCRIPT)
    processes = []

    def start(folder, source="some/web:part", **settings):
        values = SMALL_DATA | {"source": source, "data_dir": folder, "processes": 2} | settings
        flags = [f"--{name}={value}" for name, value in values.items()]
        environment = os.environ | {"HF_ENDPOINT": stand_in.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(home / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"CONSTANTS": json.dumps(SMALL)}
        command = [sys.executable, home / "small_prepare.py", *flags]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pipe |= {"start_new_session": True}  # Ctrl-C is for all of its processes
        processes.append(subprocess.Popen(command, env=environment, cwd=home, **pipe))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def end_of(process):
    """The process when it and those that it began have ended, with the output as .stdout."""
    said, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, said)


def done_well(process):
    done = end_of(process)
    assert done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="module")
def files_here(stand_in):
    """A glob of some/web's files."""
    return f"{stand_in.root}/datasets/some/web/sample/*.parquet"


@pytest.fixture(scope="module")
def expected(tmp_path_factory, begin, files_here):
    """The folder that local copies of some/web's files give."""
    out = tmp_path_factory.mktemp("expected") / "out"
    done_well(begin(out, files_here, processes=1))
    return out


@SLOW
def test_a_data_set_of_packed_files_is_read_as_they_are(tmp_path, begin, expected):
    done_well(begin(tmp_path / "out", "some/pile"))
    assert same(tmp_path / "out", expected)


LIMITED = {"max_tokens": 100000, "vocab_sample_mb": 1}


@pytest.fixture(scope="module")
def limited(tmp_path_factory, begin, corpus):
    """The folder that LIMITED gives with corpus and some/web, by two processes."""
    out = tmp_path_factory.mktemp("limited") / "out"
    done_well(begin(out, f"some/web:part,{corpus}", **LIMITED))
    return out


def test_max_tokens_reads_what_it_needs_of_the_hub(limited, hub, corpus):
    """The first documents of the Hub's files, in their order; own files are read whole."""
    counts = json.loads((limited / "meta.json").read_text())["counts"]
    first = pyarrow.parquet.read_table(hub.root / "datasets/some/web/sample/000.parquet")
    of_hub = [text.as_py().strip() for text in first["text"]]
    own_text, _ = train_and_held_out(documents_of(corpus), limited)
    own = sum(len(ids) + 1 for _, ids in own_text)
    train, _ = train_and_held_out(of_hub[: counts["read"] - 40], limited)
    n_tokens = [len(ids) + 1 for _, ids in train]
    assert counts["tokens"] - own == sum(n_tokens) >= 100000 > sum(n_tokens[:-5])
    rows = set(as_set(rows_of(limited)))  # the limit costs own text none
    own_rows = rows_by_batches(documents_of(corpus), limited)
    assert rows.issuperset(as_set(np.concatenate(own_rows)))


@SLOW
def test_max_tokens_gives_the_same_rows_by_more_processes_and_after_kills(
    tmp_path, begin, corpus, limited
):
    source = f"some/web:part,{corpus}"
    done_well(begin(tmp_path / "4", source, **LIMITED, processes=4))
    assert same(tmp_path / "4", limited)
    out = tmp_path / "1"
    for n in (3, 9):
        killed = begin(out, source, **LIMITED, processes=1)
        wait_until(lambda n=n: len([*out.glob("batch-*.json")]) > n, killed)
        killed.kill()
        assert end_of(killed).returncode == -signal.SIGKILL
    done_well(begin(out, source, **LIMITED, processes=3))
    assert same(out, limited)


@SLOW
def test_bodies_that_break_off_are_asked_for_again(tmp_path, begin, hub, expected):
    cut = iter([False, False, True] * 4)
    hub.fault = lambda path: "cut" if path.startswith("/cdn/") and next(cut, False) else None
    done_well(begin(tmp_path / "out"))
    assert not any(cut)
    assert same(tmp_path / "out", expected)


def reading_has_begun(folder):
    """Whether a batch is done."""
    return any(Path(folder).glob("batch-*.json"))


def break_the_line(hub, folder, answer, seconds=1e9):
    """Answer files' bytes with a fault, for some seconds from when rows are written on."""
    since = []

    def fault(path):
        if not path.startswith("/cdn/"):
            return None
        if not since and reading_has_begun(folder):
            since.append(time.monotonic())
        return answer if since and time.monotonic() < since[0] + seconds else None

    hub.fault = fault


@SLOW
@pytest.mark.parametrize("answer", [503, "nothing"])
def test_a_silent_hub_is_waited_for(tmp_path, begin, hub, expected, answer):
    break_the_line(hub, tmp_path / "out", answer, 60)
    done = done_well(begin(tmp_path / "out"))
    assert "tried again" in done.stdout
    assert same(tmp_path / "out", expected)


def wait_until(is_time, process):
    while process.poll() is None and not is_time():
        time.sleep(0.001)


@pytest.mark.parametrize("answer", [None, pytest.param(503, marks=SLOW)])
def test_ctrl_c_ends_in_one_line_and_the_same_command_goes_on(
    tmp_path, begin, hub, files_here, expected, answer
):
    """While it reads files, and while it waits for a line that is dead."""
    out, source = tmp_path / "out", "some/web:part" if answer else files_here
    break_the_line(hub, out, answer)
    process = begin(out, source)
    wait_until(lambda: reading_has_begun(out), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    done = end_of(process)
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert last_line(done) == "stopped: rerun the command to go on"
    hub.fault = None
    done_well(begin(out, source))
    assert same(out, expected)


def test_kills_while_it_reads_and_merges_change_nothing(tmp_path, begin, files_here, expected):
    """kill -9, and its other processes end by themselves."""
    out = tmp_path / "out"
    for is_time in (lambda: reading_has_begun(out), (out / "train.bin").exists):
        process = begin(out, files_here)
        wait_until(is_time, process)
        process.kill()
        assert end_of(process).returncode == -signal.SIGKILL
        assert not (out / "meta.json").exists()
    done_well(begin(out, files_here))
    assert same(out, expected)


@SLOW
def test_twenty_kills_change_nothing(tmp_path, begin, files_here, expected):
    """At any moment: the same command is killed once more, or has come to its end."""
    rng, out = random.Random(0), tmp_path / "out"
    kills, train = 20, out / "train.bin"
    while kills:
        process = begin(out, files_here)
        before = len([*out.glob("*.json")])
        wait_until(lambda n=before: len([*out.glob("*.json")]) > n or train.exists(), process)
        time.sleep(rng.uniform(0, 0.2))
        kills -= process.poll() is None
        process.kill()
        end_of(process)
        if (out / "meta.json").exists():
            assert same(out, expected)
            shutil.rmtree(out)
        train.unlink(missing_ok=True)  # the next merge is seen by it
    done_well(begin(out, files_here))
    assert same(out, expected)


@pytest.mark.parametrize(
    "source, message", [("some/gated", "hf auth login"), ("some/web", "NAME:CONFIG")]
)
def test_what_the_hub_refuses_is_told_once(tmp_path, begin, source, message):
    done = end_of(begin(tmp_path / "out", source))
    assert done.returncode == 1
    assert message in last_line(done) and done.stdout.count(message) == 1
    assert "Traceback" not in done.stdout
