import csv
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line, put, script
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import prepare as module
import train
from nanocram import partial
from nanocram.partial import pack
from nanocram.sources import HubFile, read_texts, split_documents
from nanocram.tokenizer import CLS, SEP, Tokenizer
from prepare import text_hash

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


@given(
    st.lists(st.lists(st.integers(4, 99), max_size=40), max_size=20),
    st.integers(2, 17),
    st.integers(1, 5),
)
def test_packing_keeps_every_token_once_and_in_order(documents, T, pieces):
    stream = np.array([t for d in documents for t in [*d, SEP]], dtype=np.uint16)
    rest = np.zeros(0, np.uint16)
    rows = []
    for piece in np.array_split(stream, pieces):  # whatever the batches
        new, rest = pack([rest, piece], T)
        rows.append(new)
    rows = np.concatenate(rows)
    assert (rows[:, 0] == CLS).all()
    assert len(rest) < T - 1
    assert [*rows[:, 1:].flatten(), *rest] == [*stream]


def documents_and_reference(corpus, folder, share=0.2):
    """(train, held out), each [(text, ids)], by transformers and a direct reading of the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train = []
    val = []
    for text in map(str.strip, corpus.read_text().split("\n\n")):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        held_out = text_hash(text) < share * 2**64
        (val if held_out else train).append((text, ids))
    return train, val


def chunks(documents, T=128):
    stream = [t for _, ids in documents for t in [*ids, SEP]]
    return [[CLS, *stream[i : i + T - 1]] for i in range(0, len(stream) - T + 2, T - 1)]


def median_ratio(documents):
    """The middle one of tokens / characters: a filter that drops half of the documents."""
    ratios = sorted(len(ids) / len(text) for text, ids in documents)
    return ratios[len(ratios) // 2]


def test_rows_equal_a_second_implementation(data_dir, corpus):
    train, val = documents_and_reference(corpus, data_dir)
    rows = rows_of(data_dir)
    val_rows = rows_of(data_dir, "val.bin")
    assert as_set(rows) == as_set(np.array(chunks(train), np.uint16))
    assert as_set(val_rows) == as_set(np.array(chunks(val), np.uint16))
    assert rows.tolist() != chunks(train)  # shuffled

    meta = json.loads((data_dir / "meta.json").read_text())
    counts = meta["counts"]
    assert counts["kept"] == len(train)
    assert counts["held_out"] == len(val)
    assert counts["tokens"] == sum(len(ids) + 1 for _, ids in train)
    assert counts["rows"] == len(rows)
    assert counts["val_rows"] == len(val_rows)
    assert meta["vocab_size"] == 600
    assert meta["seq_len"] == 128


def test_other_processes_tokenize_alike(tmp_path, corpus, prepare, data_dir, monkeypatch):
    put(monkeypatch, module, ALONE=2, BATCH=5000)
    prepare(tmp_path / "out", corpus, threads=2)
    assert same(tmp_path / "out", data_dir)


@pytest.mark.parametrize("order", ["shuffle", "curriculum"])
def test_how_much_is_taken_at_a_time_changes_nothing(tmp_path, corpus, prepare, monkeypatch, order):
    prepare(tmp_path / "whole", corpus, order=order)
    monkeypatch.setattr(module, "BATCH", 9000)
    monkeypatch.setattr(partial, "CHUNK", 3000)
    monkeypatch.setattr(partial, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(partial, "MOVED", 20000)
    prepare(tmp_path / "pieces", corpus, order=order)
    assert same(tmp_path / "whole", tmp_path / "pieces")


def test_the_curriculum_begins_with_most_full_stops(tmp_path, corpus, data_dir, prepare):
    prepare(tmp_path / "sorted", corpus, order="curriculum")
    rows = rows_of(tmp_path / "sorted")
    assert as_set(rows) == as_set(rows_of(data_dir))
    assert same(tmp_path / "sorted", data_dir, ["val.bin"])
    tokenizer = AutoTokenizer.from_pretrained(data_dir)
    # The paper's code counts the token "." itself, not those that contain one.
    stops = [tokenizer.convert_ids_to_tokens(row).count(".") for row in rows]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] > stops[-1]


def test_the_filter_leaves_the_held_out_rows_alone(tmp_path, corpus, data_dir, prepare, capsys):
    train, _ = documents_and_reference(corpus, data_dir)
    meta = prepare(tmp_path / "filtered", corpus, filter_ratio=median_ratio(train))
    assert 0 < meta["counts"]["filtered"] < len(train)
    assert "WARNING: less than 80 % were kept" in capsys.readouterr().out
    assert same(tmp_path / "filtered", data_dir, ["val.bin"])


@pytest.mark.parametrize("mode", ["ascii", "plain"])
def test_the_threshold_follows_the_vocabulary_unless_it_is_set(monkeypatch, mode):
    def threshold(size, ratio=-1.0):
        put(monkeypatch, module, vocab_size=size, normalisation=mode, filter_ratio=ratio)
        return module.filter_threshold()

    sizes = (4096, 8192, 16384, 32768)
    values = [threshold(size) for size in sizes]
    assert values == sorted(values, reverse=True)  # larger vocabularies need fewer tokens
    # Between two sizes it is between their values, beyond the last it stays.
    assert values[2] > threshold(20000) > values[3] == threshold(65536)
    assert [threshold(size, 0.0) for size in sizes] == [0.0] * 4
    assert threshold(4096, 0.25) == threshold(600, 0.25) == 0.25


def test_a_small_vocabulary_has_no_filter_unless_it_is_set(tmp_path, corpus, prepare, capsys):
    meta = prepare(tmp_path / "out", corpus, filter_ratio=-1.0)
    assert (meta["filter_threshold"], meta["counts"]["filtered"]) == (0.0, 0)
    note = "note: below 4,096 entries the paper's filter has no known threshold: all is kept"
    assert note in capsys.readouterr().out
    prepare(tmp_path / "off", corpus)  # as SMALL_DATA has it
    assert same(tmp_path / "out", tmp_path / "off") and note not in capsys.readouterr().out


def test_copies(tmp_path, corpus, data_dir, prepare):
    twice = tmp_path / "twice.txt"
    twice.write_text(corpus.read_text() + "\n\n\n" + corpus.read_text())
    train, val = documents_and_reference(corpus, data_dir)
    kept = prepare(tmp_path / "kept", twice)["counts"]
    assert kept["kept"] == 2 * len(train)
    assert kept["held_out_copies"] == len(val)
    once = prepare(tmp_path / "once", twice, dedup=True)["counts"]
    assert once["kept"] == once["duplicates"] == len(train)
    assert same(tmp_path / "kept", tmp_path / "once", ["val.bin"])


def test_what_becomes_of_documents(monkeypatch):
    """Every outcome, and which one comes first where several would do."""
    put(monkeypatch, module, dedup=True, val_tokens=5, filter_ratio=0.25)
    low = 0
    high = 2**64 - 1  # never held out
    documents = [
        (low, 100, 3, "held_out"),
        (low, 100, 3, "held_out_copies"),
        (low + 1, 100, 4, "kept"),  # 4 + 3 tokens are too many
        (low + 1, 100, 4, "duplicates"),
        (low + 2, 100, 2, "held_out"),  # but these fit
        (high, 100, 26, "filtered"),
        (high, 100, 26, "duplicates"),
        (high - 1, 100, 25, "kept"),  # the [SEP] does not count
        (high - 2, 0, 1, "empty"),
        (high - 2, 0, 1, "empty"),
    ]
    count = Counter({"sources": {}})
    given = [("x", key, length, np.full(n, SEP, np.uint16)) for key, length, n, _ in documents]
    chosen = [outcome for outcome, *_ in module.choose(given, count, set(), set())]
    assert chosen == [outcome for *_, outcome in documents]
    assert count["read"] == len(documents)
    assert sum(count[outcome] for outcome in module.OUTCOMES) == len(documents)
    assert (count["tokens"], count["characters"]) == (29, 200)
    assert (count["val_tokens"], count["val_characters"]) == (5, 200)
    assert (count["tokens_read"], count["characters_read"]) == (95, 800)
    of_x = count["sources"]["x"]
    assert all(of_x[name] == count[name] for name in ("read", "tokens", "characters_read", "kept"))


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
    (folder / "h.log").write_text(corpus.read_text())
    (folder / "g.json").write_text(json.dumps([{"body": text} for text in texts], indent=1))
    with open(folder / "I.CSV", "w", newline="", encoding="utf-8-sig") as f:
        csv.writer(f).writerows([("id", "body"), *enumerate(texts)])


KINDS = [
    "a.txt.gz",
    "b.jsonl",
    "c.parquet",
    "d.jsonl.gz",
    "e.jsonl.zst",
    "f.txt.zst",
    "g.json",
    "h.log",
    "I.CSV",
]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, corpus, data_dir, prepare, name):
    write_kinds(tmp_path, corpus)
    prepare(tmp_path / "out", tmp_path / name, text_column="body")
    assert same(tmp_path / "out", data_dir)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": b}\n', "line 3, column 10: Expecting value"),
        ("a.csv", 'text,id\n"a ""b"" c",1\n"d" e,2\n', "line 3: ',' expected"),
        ("a.csv", 'text,id\nab,1\n"cd,2\nef,3\n', "line 3: unexpected end of data"),
        ("a.csv", "text;id\nab;1\n", "its first line has no commas (text;id): write it with"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(why)):
        list(read_texts(str(tmp_path / name), "text"))


def test_quotes_and_bytes_that_are_no_utf8(tmp_path):
    """A quote is one in a .tsv; a row without the cell has no text."""
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"open\n2\n3\tend"\textra\n')
    assert [text for text, _ in read_texts(str(path), "text")] == ['"open', None, 'end"']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xfcber"}\n')
    assert [text for text, _ in read_texts(str(path), "text")] == ["a", "\ufffdber"]


@pytest.fixture
def folder_with_bad_files(tmp_path, corpus):
    """Of three files one breaks off, and one has no texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(corpus, folder / "b.txt")
    whole = gzip.compress(corpus.read_bytes())
    (folder / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), folder / "c.parquet")
    return folder


def test_one_bad_file_among_good_ones(tmp_path, data_dir, prepare, capsys, folder_with_bad_files):
    meta = prepare(tmp_path / "out", folder_with_bad_files / "*", accept_partial=True)
    printed = capsys.readouterr().out
    whole_counts = json.loads((data_dir / "meta.json").read_text())["counts"]
    assert not meta["complete"]
    assert meta["counts"]["held_out"] == whole_counts["held_out"]
    assert 40 < meta["counts"]["read"] < 80  # what stands before the break is read
    assert sorted(os.path.basename(p) for p in meta["errors"]) == ["a.txt.gz", "c.parquet"]
    assert "\nfrom " not in printed  # one source has nothing to add to the sums
    assert printed.count("a.txt.gz could not be read to its end: EOFError") == 1
    assert "no column 'text', it has x: type --text_column=NAME" in printed


def test_what_json_may_hold(tmp_path, corpus, prepare, capsys):
    """Half an emoji becomes U+FFFD; records whose text is elsewhere are told of."""
    texts = documents_of(corpus)
    lines = [json.dumps({"text": text}) for text in texts]
    lines[3] = json.dumps({"text": texts[3] + " \ud83d."})
    lines[7] = json.dumps({"text": texts[7] + " \U0001f600."})
    lines += [json.dumps({"body": "elsewhere"})] * 5
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    meta = prepare(tmp_path / "out", path, normalisation="plain")
    assert meta["counts"]["read"] == len(texts)
    said = capsys.readouterr().out
    assert "5 records have no 'text'" in said and "1 documents have U+FFFD" in said
    texts[3] += " \ufffd."
    texts[7] += " \U0001f600."
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(tmp_path / "wanted", path, normalisation="plain")
    assert same(tmp_path / "out", tmp_path / "wanted")


@pytest.mark.parametrize("values", [[1, 2], [b"a", b"b"]])
def test_a_column_of_parquet_that_is_no_text(tmp_path, prepare, values):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
    with pytest.raises(SystemExit, match=r"which is no text: type --text_column=NAME"):
        prepare(tmp_path / "out", path)


def test_a_part_is_never_called_the_whole(tmp_path, prepare, capsys, folder_with_bad_files):
    out, source = tmp_path / "out", folder_with_bad_files / "*"
    for _ in range(3):
        with pytest.raises(SystemExit, match="--accept_partial=True") as end:
            prepare(out, source)
        assert end.value.code != 0 and not out.exists()
    assert prepare(out, source, accept_partial=True)["errors"]
    with pytest.raises(SystemExit, match=r"out holds a part of the text, errors in .*meta\.json"):
        prepare(out, source)
    with pytest.raises(SystemExit) as end:
        prepare(out, source, accept_partial=True)
    assert end.value.code == 0


def test_it_goes_on_once_a_file_can_be_read(
    tmp_path, corpus, data_dir, prepare, capsys, monkeypatch
):
    """The vocabulary is done, one source is read, the other breaks off: then its file is whole."""
    texts = documents_of(corpus)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:20]))
    path = tmp_path / "b.jsonl"
    path.write_text("".join(lines[20:]))
    prepare(tmp_path / "whole", f"{tmp_path}/a.txt,{path}")
    read_texts, is_broken = module.sources.read_texts, True

    def read(name, column, start=0, by_line=False):
        found = read_texts(name, column, start)
        for number, pair in enumerate(found, start):
            if is_broken and name == str(path) and number == 13 and made.exists():
                raise OSError("the disk has a bad sector")
            yield pair

    made = tmp_path / "out.partial/tokenizer.json"  # not while the vocabulary's sample is read
    put(monkeypatch, module.sources, read_texts=read)
    with pytest.raises(SystemExit, match=r"b\.jsonl could not be read to its end"):
        prepare(tmp_path / "out", f"{tmp_path}/a.txt,{path}")
    journal = json.loads((tmp_path / "out.partial/journal.json").read_text())
    assert journal["places"][str(path)]["document"] == 13
    assert 0 < journal["counts"]["read"] < 40 and list(journal["errors"]) == [str(path)]
    is_broken = False
    with pytest.raises(SystemExit, match="partial was begun with order='shuffle': give that to go"):
        prepare(tmp_path / "out", f"{tmp_path}/a.txt,{path}", order="curriculum")
    path.write_text("".join(lines[20:]) + "\n")
    size = path.stat().st_size - 1
    with pytest.raises(SystemExit, match=rf"was begun with {path} of {size:,} bytes: give that"):
        prepare(tmp_path / "out", f"{tmp_path}/a.txt,{path}")
    path.write_text("".join(lines[20:]))
    capsys.readouterr()
    meta = prepare(tmp_path / "out", f"{tmp_path}/a.txt,{path}")
    assert f"going on behind {journal['counts']['read']} documents" in capsys.readouterr().out
    assert meta["complete"] and not meta["errors"]
    assert same(tmp_path / "out", tmp_path / "whole")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "train.bin", "val.bin", "meta.json"
    }  # fmt: skip


def documents_of(path):
    return [text.strip() for text in path.read_text().split("\n\n")]


def put_as_source(monkeypatch, lengths):
    """Make documents of these lengths what the sources give; {name: [texts]}."""
    texts = {}
    for name, sizes in lengths.items():
        texts[name] = [f"{name}{i}".ljust(size, ".") for i, size in enumerate(sizes)]
    monkeypatch.setattr(module, "read_documents", lambda name, place, errors: iter(texts[name]))
    return texts


def turns(files):
    """What in_turns() gives of files, {name: paths}, from their beginning."""
    places = {name: dict(module.START) for name in files}
    return list(module.in_turns(files, module.shares(files), {"places": places, "errors": {}}))


LENGTHS = st.lists(st.integers(5, 60), max_size=30)


@given(LENGTHS, LENGTHS, LENGTHS, st.tuples(*[st.integers(1, 9)] * 3))
def test_turns_are_as_long_as_the_weights_say(first, second, third, weights):
    sources = {name: name for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        texts = put_as_source(patch, dict(zip("abc", (first, second, third), strict=True)))
        patch.setattr(module, "weights", "")
        everything = turns(sources)
        patch.setattr(module, "weights", ",".join(map(str, weights)))
        mixed = turns(sources)
    for name in "abc":
        assert [text for source, text in everything if source == name] == texts[name]
        given_out = [text for source, text in mixed if source == name]
        assert given_out == texts[name][: len(given_out)]
    # One of them was read to its end, and nowhere is one more than a document ahead of its share.
    ended = [sum(source == name for source, _ in mixed) == len(texts[name]) for name in "abc"]
    assert any(ended)
    lengths = dict.fromkeys("abc", 0.0)
    for name, text in mixed:
        lengths[name] += len(text) / weights["abc".index(name)]
        assert max(lengths.values()) - min(lengths.values()) <= 60 / min(weights)


@pytest.fixture
def two_sources(tmp_path, corpus):
    """A text file of 25 documents and two .jsonl of 15; the three paths."""
    texts = documents_of(corpus)
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:25]))
    for name, some in (("b1.jsonl", texts[25:33]), ("b2.jsonl", texts[33:])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return tmp_path


def test_several_sources_are_one_data_set(tmp_path, corpus, prepare, two_sources, capsys):
    out = tmp_path / "out"
    names = [f"{two_sources}/a.txt", f"{two_sources}/b?.jsonl"]
    meta = prepare(out, f"{names[0]}, {names[1]}")
    train, val = documents_and_reference(corpus, out)
    assert (meta["counts"]["kept"], meta["counts"]["held_out"]) == (len(train), len(val))
    texts = documents_of(corpus)
    of_source = meta["counts"]["sources"]
    printed = capsys.readouterr().out
    assert list(of_source) == names
    for name, some in zip(names, (texts[:25], texts[25:]), strict=True):
        assert of_source[name]["read"] == len(some)
        kept = [ids for text, ids in train if text in some]
        tokens = sum(len(ids) + 1 for ids in kept)
        val_tokens = sum(len(ids) + 1 for text, ids in val if text in some)
        assert of_source[name]["kept"] == len(kept)
        assert of_source[name]["tokens"] == tokens
        assert of_source[name]["val_tokens"] == val_tokens > 0
        line = f"from        {name}: {len(some)} read, {len(kept)} kept, "
        assert line + f"{tokens:,} tokens and {val_tokens:,} held out\n" in printed


def test_weights_set_the_mix_of_a_data_set(tmp_path, prepare, two_sources):
    source = f"{two_sources}/a.txt,{two_sources}/b?.jsonl"
    parts = prepare(tmp_path / "out", source, weights="1,3")["counts"]["sources"].values()
    few, many = (part["characters_read"] for part in parts)
    assert abs(3 * few - many) <= 3 * 4000
    assert [part["read"] for part in parts][1] == 15  # the first to end


def test_the_vocabulary_is_trained_on_every_source(tmp_path, prepare):
    """The most frequent word of each is an entry."""
    for name, word in (("a", "zyxomma"), ("b", "quokkish")):
        texts = [f"{word} {i} {word} the quick fox" for i in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    prepare(tmp_path / "out", f"{tmp_path}/a.txt,{tmp_path}/b.txt", vocab_size=300)
    vocabulary = Tokenizer(tmp_path / "out/tokenizer.json").encoding.token_byte_values()
    assert b" zyxomma" in vocabulary and b" quokkish" in vocabulary


@pytest.mark.parametrize("weights", ["", "1,3"])
def test_the_share_that_was_read(tmp_path, prepare, two_sources, monkeypatch, weights):
    """What a run foresees half-way is about what there is in the end."""
    foreseen = []
    take = module.take

    def note(documents, so_far):
        take(documents, so_far)
        files, count = so_far.journal["files"], so_far.count
        share = module.share_read(files, module.shares(files), so_far.journal["places"], count)
        foreseen.append(count["characters_read"] / share if share else 0)

    put(monkeypatch, module, BATCH=5000, take=note)
    source = f"{two_sources}/a.txt,{two_sources}/b?.jsonl"
    count = prepare(tmp_path / "out", source, weights=weights, threads=1)["counts"]
    half = len(foreseen) // 2
    assert foreseen[half:] == [pytest.approx(count["characters_read"], rel=0.3)] * (
        len(foreseen) - half
    )


@pytest.mark.parametrize(
    "share, free, message",
    [
        (0.25, 1e12, "about 40M tokens, 80 MB of disk: another 60 s at 0.50M tokens/s, which "),
        (0.25, 1e7, "; WARNING: only 10 MB are free there"),
        (0.0, 1e12, "1,000M tokens take 2 GB of disk (1,000 GB are free) and 33 min at 0.50M tok"),
    ],
)
def test_the_forecast(monkeypatch, capsys, tmp_path, share, free, message):
    """10M tokens in 20 seconds, 15 of which were spent waiting for the network."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    spent = {"tokenizing": 7.0}
    forecast = module.Forecast(spent)
    forecast.begin({"tokens_read": 0})
    forecast.begun -= 20
    spent["tokenizing"] += 3
    monkeypatch.setattr(HubFile, "waited", HubFile.waited + 15)
    total = forecast.say(share, {"tokens_read": 10**7}, tmp_path)
    assert total == (pytest.approx(4e7) if share else None)
    said = capsys.readouterr().out
    assert message in said and "which the network limits" in said and said.count("\n") == 1


def test_limits(tmp_path, corpus, prepare):
    rows = prepare(tmp_path / "rows", corpus, max_rows=300)["counts"]["rows"]
    assert 300 <= rows < 300 + 3000 // 127
    few = prepare(tmp_path / "few", corpus, max_docs=30)
    assert few["counts"]["read"] == 30
    short = prepare(tmp_path / "short", corpus, max_tokens=40000)["counts"]
    assert 40000 <= short["tokens_read"] < 40000 + 3000
    everything = prepare(tmp_path / "all", corpus, max_rows=-1, max_docs=-1, max_tokens=-1)
    assert everything["counts"]["read"] == 40
    assert short["tokens_read"] == short["tokens"] + short["val_tokens"]
    assert few["complete"]  # it was asked for


def test_a_limit_for_the_hub_leaves_no_file_unread(
    tmp_path, corpus, data_dir, prepare, monkeypatch
):
    prepare(tmp_path / "all", corpus, max_hub_tokens=10)
    assert same(tmp_path / "all", data_dir)
    put(monkeypatch, module, max_hub_tokens=10, source=f"{corpus},someone/texts")
    assert module.limit_reached({"tokens_read": 10}) == "max_hub_tokens"
    assert not module.limit_reached({"tokens_read": 9})


def test_where_a_limit_ended_the_reading_of_files_is_told(prepare, two_sources, capsys):
    prepare(two_sources / "out", two_sources / "b?.jsonl", max_docs=10)
    said = capsys.readouterr().out
    assert "--max_docs=0 reads all" in said and f"file 2 of 2, {two_sources}/b2.jsonl" in said
    prepare(two_sources / "all", two_sources / "b?.jsonl", max_docs=15)
    assert "note: " not in capsys.readouterr().out


def test_a_limit_on_tokens_holds_out_the_same_whatever_the_filter(
    tmp_path, corpus, data_dir, prepare
):
    train, _ = documents_and_reference(corpus, data_dir)
    loose = prepare(tmp_path / "loose", corpus, filter_ratio=0.0, max_tokens=40000)
    ratio = median_ratio(train)
    strict = prepare(tmp_path / "strict", corpus, filter_ratio=ratio, max_tokens=40000)
    assert loose["counts"]["filtered"] == 0
    assert strict["counts"]["filtered"] > 0
    assert same(tmp_path / "loose", tmp_path / "strict", ["val.bin"])


@given(st.lists(st.sampled_from(["a", "bb", "", "  "])))
def test_blank_lines_end_documents(lines):
    ours = [d.strip() for d in split_documents(io.StringIO("\n".join(lines))) if d.strip()]
    theirs = [p.strip() for p in re.split(r"\n[ \n]*\n", "\n".join(lines)) if p.strip()]
    assert ours == theirs


def test_a_text_without_blank_lines_is_cut(monkeypatch):
    monkeypatch.setattr(module.sources, "MAX_DOCUMENT", 10)
    cut = list(split_documents(io.StringIO("\n".join(["abcd"] * 5))))
    assert cut == ["abcd\nabcd\n", "abcd\nabcd\n", "abcd"]
    line = "0123456789" * 5 + "end"
    cut = list(split_documents(io.StringIO(f"abc\n{line}\nxyz")))
    assert max(map(len, cut)) < 2 * 10 and "".join(cut) == f"abc\n{line}\nxyz"


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_finished_and_the_next_one_completes(
    tmp_path, corpus, data_dir, prepare
):
    folder = tmp_path / "data"
    partial = tmp_path / "data.partial"
    values = SMALL_DATA | {"source": corpus, "data_dir": folder}
    flags = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, str(ROOT / "prepare.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not partial.exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    assert partial.exists()

    prepare(folder, corpus)
    assert not partial.exists()
    assert same(folder, data_dir)


def test_a_finished_set_is_kept(corpus, data_dir, prepare, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in data_dir.iterdir()}
    with pytest.raises(SystemExit) as end:
        prepare(data_dir, corpus)
    assert end.value.code == 0
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was made with order='shuffle': delete it"):
        prepare(data_dir, corpus, order="curriculum")
    assert before == {path.name: path.stat().st_mtime_ns for path in data_dir.iterdir()}


def test_data_older_than_a_setting_have_its_default(tmp_path, corpus, data_dir, prepare):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    meta = json.loads((folder / "meta.json").read_text())
    del meta["settings"]["pack"], meta["settings"]["vocab_file"]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(SystemExit) as end:
        prepare(folder, corpus)
    assert end.value.code == 0
    with pytest.raises(SystemExit, match="was made with pack=True: delete it"):
        prepare(folder, corpus, pack=False)


def test_utf_16_is_told(tmp_path, corpus, prepare):
    (tmp_path / "log.txt").write_text(corpus.read_text(), encoding="utf-16")
    with pytest.raises(SystemExit, match="iconv -f UTF-16"):
        prepare(tmp_path / "data", str(tmp_path / "log.txt"))


def test_a_question_mark_stands_for_a_comma_in_a_name(tmp_path, corpus, data_dir, prepare):
    shutil.copy(corpus, tmp_path / "one, two.txt")
    prepare(tmp_path / "out", f"{tmp_path}/one? two.txt")
    assert same(tmp_path / "out", data_dir)


def test_the_challenge_is_kept_unless_one_is_told(tmp_path, prepare, capsys):
    assert "edu" not in module.source
    with pytest.raises(SystemExit, match="could not read HuggingFaceFW/fineweb-edu"):
        prepare(tmp_path / "out", "HuggingFaceFW/fineweb-edu")
    assert "a pre-trained model chose FineWeb-Edu, which the chall" in capsys.readouterr().out


def test_recipes_that_share_a_data_set_prepare_it_alike():
    """Read by Python itself, each in the settings as they are."""
    known = {name: getattr(module, name) for name in module.SETTINGS}
    others = {name: getattr(train, name) for name in train.SETTINGS}
    prepared = {}
    for path in (ROOT / "config").glob("*.py"):
        values = others | known
        exec(path.read_text(encoding="utf-8"), {}, values)
        values = {name: values[name] for name in known}
        folder = values["data_dir"]
        assert prepared.setdefault(folder, values) == values, path
    crammed = prepared["data/crammed"]
    assert crammed["source"] == "monology/pile-uncopyrighted"
    assert crammed["max_rows"] * 128 == pytest.approx(5.53e9, rel=1e-3)  # the paper's data card
    assert prepared["data/unfiltered"]["filter_ratio"] == 0


def test_an_empty_folder_is_taken(tmp_path, corpus, prepare):
    (tmp_path / "out").mkdir()
    assert prepare(tmp_path / "out", corpus)["counts"]["rows"] > 0


@pytest.mark.parametrize("meta", ["", "[]", "{}", '{"settings": 3}'])
def test_a_broken_meta_json_is_named(tmp_path, corpus, prepare, meta):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "meta.json").write_text(meta)
    with pytest.raises(SystemExit, match=r"meta\.json is broken: delete .*out or choose another"):
        prepare(tmp_path / "out", corpus)


@pytest.fixture
def folder_of_slips(tmp_path, corpus, monkeypatch):
    """A working folder with texts that cannot be prepared and folders that cannot be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(corpus.read_bytes())
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a,comma.txt").write_bytes(corpus.read_bytes())
    (tmp_path / "short.txt").write_text("A few words.\n")
    (tmp_path / "a.doc").write_text("x")
    lines = [line for line in corpus.read_text().splitlines() if line]
    (tmp_path / "single.txt").write_text("\n".join(lines[:2000]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.bin").write_text("precious")
    (tmp_path / "strange.partial").mkdir()
    (tmp_path / "strange.partial" / "thesis.tex").write_text("precious")
    (tmp_path / "aim").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "aim")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.mark.parametrize(
    "values, message",
    [
        ({"source": "*.csv"}, "no file matches"),
        ({"source": "nowhere.txt"}, "no file matches"),
        ({"source": "aim"}, "no file matches"),
        ({"source": "corpus.txt,"}, "no file matches '': give globs in quotes"),
        ({"source": "texts/{a,b}.txt"}, "no file matches 'texts/{a': give globs in quotes, like"),
        ({"source": "a,comma.txt"}, "no file matches 'comma.txt': "),
        ({"source": "corpus.txt,empty.txt"}, "no text in empty.txt"),
        (
            {"source": "corpus.txt,corpus.txt", "weights": "1,1"},
            "'corpus.txt' and 'corpus.txt' name the same text: give each file and data set of ",
        ),
        ({"source": "c*.txt, ./corpus.txt"}, "'c*.txt' and './corpus.txt' name the same text: "),
        ({"source": "**/**/c*.txt,corpus.txt"}, "'**/**/c*.txt' and 'corpus.txt' name the same"),
        ({"source": "a/b,a/b:"}, "'a/b' and 'a/b:' name the same text: "),
        ({"weights": "1,2"}, "weights=1,2: give one positive number for each source, 1 in all"),
        ({"weights": "0"}, "weights=0: give one positive"),
        ({"weights": "-1"}, "weights=-1: give one positive"),
        ({"weights": "nan"}, "weights=nan: give one positive"),
        ({"weights": "much"}, "weights=much: give one positive"),
        ({"filter_ratio": -2.0}, "filter_ratio=-2.0 cannot work"),
        ({"source": "a.doc"}, "is of no known kind"),
        ({"source": "empty.txt"}, "no text in"),
        ({"source": "nobody/nothing"}, "could not read nobody/nothing (ConnectionError"),
        ({"source": "short.txt"}, "the text yields only"),
        ({"source": "single.txt"}, "was held out of 1 documents (blank lines end them): delete "),
        (
            {"source": "short.txt", "vocab_size": 261, "val_share": 1e-9},
            "fewer than one row of 128",
        ),
        ({"val_share": 1e-8}, "type --val_share=1e-07"),
        ({"vocab_size": 70000}, "vocab_size=70000 cannot work"),
        ({"threads": -1}, "threads=-1 cannot work"),
        ({"vocab_sample_mb": 0}, "vocab_sample_mb=0 cannot work"),
        ({"max_rows": 9, "pack": False}, "with --pack=False type --max_tokens=N"),
        ({"order": "random"}, "order=random cannot work: it must be shuffle or curriculum"),
        ({"data_dir": "linked"}, "is a link or a mount point: name a folder in it"),
        ({"data_dir": "dangling"}, "is a link or a mount point: name a folder in it"),
        ({"data_dir": "mine"}, "is no data set of prepare.py"),
        ({"data_dir": "strange"}, "thesis.tex was not written by prepare.py"),
    ],
)
def test_slips_are_one_line(folder_of_slips, prepare, values, message):
    values = {"source": "corpus.txt", "data_dir": "out"} | values
    with pytest.raises(SystemExit) as end:
        prepare(values.pop("data_dir"), values.pop("source"), **values)
    said = str(end.value)
    assert message in said
    assert "\n" not in said
    assert not (folder_of_slips / "out").exists()
    assert (folder_of_slips / "mine" / "train.bin").read_text() == "precious"
    assert (folder_of_slips / "strange.partial" / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"source": "*.csv"}, "no file matches"),
        ({"data_dir": "corpus.txt/below"}, "File exists"),
    ],
)
def test_a_process_ends_in_one_line(folder_of_slips, values, message):
    values = SMALL_DATA | {"source": "corpus.txt", "data_dir": "out"} | values
    done = script("prepare.py", cwd=folder_of_slips, **values)
    assert done.returncode == 1
    assert message in last_line(done)
    assert "Traceback" not in done.stdout


def lines_of(corpus):
    return [line for line in corpus.read_text().splitlines() if line.strip()]


def test_each_line_is_a_document(tmp_path, corpus, prepare, capsys):
    """As the same lines in a .jsonl, whatever the line ends; blank lines are counted."""
    lines = lines_of(corpus)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    (tmp_path / "unix.txt").write_bytes("\n\n".join(lines).encode())
    (tmp_path / "windows.txt").write_bytes("\r\n".join(lines).encode() + b"\r\n")
    wanted = prepare(tmp_path / "wanted", tmp_path / "a.jsonl")["counts"]
    assert wanted["read"] == len(lines)
    capsys.readouterr()
    for name, blank in (("unix", len(lines) - 1), ("windows", 0)):
        counts = prepare(tmp_path / name, tmp_path / f"{name}.txt", documents="lines")["counts"]
        assert same(tmp_path / name, tmp_path / "wanted")
        assert counts["read"] == len(lines)
        assert (f"{blank} blank lines" in capsys.readouterr().out) == (blank > 0)


def test_text_as_it_is_keeps_every_byte(tmp_path, prepare, monkeypatch):
    """What transformers and the bytes of the rows say; spaces, tabs, line breaks, case, accents."""
    texts = [f"Straße {i}:\n\tx  =  [{i}] ;\n\n\n    ende\u2028 \t" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    put(monkeypatch, module, order="shuffle")
    settings = {"normalisation": "none", "vocab_size": 300, "seq_len": 8, "val_tokens": 10**6}
    out = tmp_path / "out"
    prepare(out, tmp_path / "a.jsonl", **settings)
    tokenizer, ours = AutoTokenizer.from_pretrained(out), Tokenizer(out / "tokenizer.json")
    for text in texts[:20]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids and ours.decode(ids) == text
    counts = json.loads((out / "meta.json").read_text())["counts"]
    assert counts["characters"] + counts["val_characters"] == sum(map(len, texts))


def test_a_look_before_the_work(tmp_path, corpus, prepare, capsys):
    """Text that the defaults would spoil ends before it is read, and by what to type."""
    german = "Die {} größten Vögel über den Dächern; schöne Grüße aus Köln an Jürgen, Käthe.\n\n"
    (tmp_path / "german.txt").write_text("".join(german.format(i) for i in range(400)))
    prepare(tmp_path / "german", tmp_path / "german.txt", vocab_size=280)
    assert "--normalisation=plain" in capsys.readouterr().out
    prepare(tmp_path / "plain", tmp_path / "german.txt", vocab_size=280, normalisation="plain")
    prepare(tmp_path / "english", corpus)
    assert "WARNING" not in capsys.readouterr().out
    (tmp_path / "greek.txt").write_text("ο ταχύς σκύλος πηδά a\n\n" * 400)
    with pytest.raises(SystemExit, match="type --normalisation=plain"):
        prepare(tmp_path / "greek", tmp_path / "greek.txt", vocab_size=262)
    assert not (tmp_path / "greek").exists()


def test_a_filter_that_would_drop_most_ends_before_the_work(tmp_path, monkeypatch):
    put(monkeypatch, module, vocab_size=4096, filter_ratio=-1.0)
    tokenizer = SimpleNamespace(encode=lambda text: [5] * len(text))
    with pytest.raises(SystemExit, match="type --filter_ratio=0"):
        module.check_filter(["2026-11-23 19:22:13 0x7ffe 172.16.0.1"] * 9, tokenizer)
    put(monkeypatch, module, filter_ratio=0.3)  # who has set it has meant it
    module.check_filter(["2026-11-23 19:22:13 0x7ffe 172.16.0.1"] * 9, tokenizer)


def test_bytes_of_another_encoding_are_counted(tmp_path, corpus, prepare, capsys):
    content = corpus.read_bytes() + "\n\ngrüße\n\n".encode("latin-1") + "ende ß".encode()
    (tmp_path / "mixed.txt").write_bytes(content)
    prepare(tmp_path / "out", tmp_path / "mixed.txt", normalisation="plain")
    said = capsys.readouterr().out
    assert "WARNING: 1 documents have U+FFFD" in said and f"first in {tmp_path}/mixed.txt" in said
