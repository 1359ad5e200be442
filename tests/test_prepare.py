import gzip
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line, put, script
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import prepare as module
from nanocram.configurator import assignments, settings
from nanocram.tokenizer import CLS, SEP, Tokenizer
from prepare import pack, split_documents, text_hash

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


def test_threads_change_nothing(tmp_path, corpus, prepare, data_dir):
    for threads in (1, 5):
        prepare(tmp_path / f"{threads}", corpus, threads=threads)
        assert same(tmp_path / f"{threads}", data_dir)


@pytest.mark.parametrize("order", ["shuffle", "curriculum"])
def test_how_much_is_taken_at_a_time_changes_nothing(tmp_path, corpus, prepare, monkeypatch, order):
    prepare(tmp_path / "whole", corpus, order=order)
    monkeypatch.setattr(module, "WAITING", 3)
    monkeypatch.setattr(module, "CHUNK", 3000)
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
    count = Counter()
    given = [("x", key, length, np.full(n, SEP, np.uint16)) for key, length, n, _ in documents]
    chosen = [outcome for outcome, _ in module.choose(given, count)]
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


@pytest.mark.parametrize("name", ["a.txt.gz", "b.jsonl", "c.parquet", "d.jsonl.gz"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, corpus, data_dir, prepare, name):
    write_kinds(tmp_path, corpus)
    prepare(tmp_path / "out", tmp_path / name, text_column="body")
    assert same(tmp_path / "out", data_dir)


def test_one_bad_file_among_good_ones(tmp_path, corpus, data_dir, prepare, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(corpus, folder / "b.txt")
    whole = gzip.compress(corpus.read_bytes())
    (folder / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), folder / "c.parquet")
    meta = prepare(tmp_path / "out", folder / "*")
    printed = capsys.readouterr().out
    whole_counts = json.loads((data_dir / "meta.json").read_text())["counts"]
    assert meta["counts"]["held_out"] == whole_counts["held_out"]
    assert 40 < meta["counts"]["read"] < 80  # what stands before the break is read
    assert sorted(os.path.basename(p) for p in meta["errors"]) == ["a.txt.gz", "c.parquet"]
    assert "\nfrom " not in printed  # one source has nothing to add to the sums
    assert printed.count("a.txt.gz could not be read to its end: EOFError") == 1
    assert "no column 'text', it has x: type --text_column=NAME" in printed


@pytest.mark.parametrize("is_there", [True, False])
def test_zstd_files_are_read_or_the_way_to_read_them_is_told(
    tmp_path, corpus, data_dir, prepare, monkeypatch, capsys, is_there
):
    write_kinds(tmp_path, corpus)
    path = tmp_path / "e.jsonl.zst"
    if is_there:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress((tmp_path / "b.jsonl").read_bytes()))
        prepare(tmp_path / "out", path, text_column="body")
        assert same(tmp_path / "out", data_dir)
    else:
        path.write_bytes(b"(\xb5/\xfd")
        monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
        with pytest.raises(SystemExit, match=r"could not read .*pip install zstandard"):
            prepare(tmp_path / "out", path)
        assert "zstd not supported; type pip install zstandard\n" in capsys.readouterr().out


def documents_of(path):
    return [text.strip() for text in path.read_text().split("\n\n")]


def put_as_source(monkeypatch, lengths):
    """Make documents of these lengths what the sources give; {name: [texts]}."""
    texts = {}
    for name, sizes in lengths.items():
        texts[name] = [f"{name}{i}".ljust(size, ".") for i, size in enumerate(sizes)]
    monkeypatch.setattr(module, "read_documents", lambda name, errors: iter(texts[name]))
    return texts


LENGTHS = st.lists(st.integers(5, 60), max_size=30)


@given(LENGTHS, LENGTHS, LENGTHS, st.tuples(*[st.integers(1, 9)] * 3))
def test_turns_are_as_long_as_the_weights_say(first, second, third, weights):
    sources = {name: name for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        texts = put_as_source(patch, dict(zip("abc", (first, second, third), strict=True)))
        patch.setattr(module, "weights", "")
        everything = list(module.in_turns(sources, module.shares(sources), {}))
        patch.setattr(module, "weights", ",".join(map(str, weights)))
        mixed = list(module.in_turns(sources, module.shares(sources), {}))
    for name in "abc":
        assert [text for source, text in everything if source == name] == texts[name]
        given_out = [text for source, text in mixed if source == name]
        assert given_out == texts[name][: len(given_out)]
    # One of them was read to its end, and nowhere is one more than a document ahead of its share.
    ended = [sum(source == name for source, _ in mixed) == len(texts[name]) for name in "abc"]
    assert any(ended)
    turns = dict.fromkeys("abc", 0.0)
    for name, text in mixed:
        turns[name] += len(text) / weights["abc".index(name)]
        assert max(turns.values()) - min(turns.values()) <= 60 / min(weights)


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


def test_weights_set_the_mix_of_a_data_set(tmp_path, prepare, two_sources, monkeypatch):
    estimated = []
    print_estimate = module.print_estimate

    def estimate(texts, tokenizer, total_bytes, folder):
        estimated.append(total_bytes)
        return print_estimate(texts, tokenizer, total_bytes, folder)

    monkeypatch.setattr(module, "print_estimate", estimate)
    source = f"{two_sources}/a.txt,{two_sources}/b?.jsonl"
    parts = prepare(tmp_path / "out", source, weights="1,3")["counts"]["sources"].values()
    few, many = (part["characters_read"] for part in parts)
    assert abs(3 * few - many) <= 3 * 4000
    assert [part["read"] for part in parts][1] == 15  # the first to end
    assert estimated == [pytest.approx(few + many, rel=0.2)]
    prepare(tmp_path / "all", source)
    assert estimated[1] > 1.3 * estimated[0]


def test_the_vocabulary_is_trained_on_every_source(tmp_path, prepare):
    """The most frequent word of each is an entry."""
    for name, word in (("a", "zyxomma"), ("b", "quokkish")):
        texts = [f"{word} {i} {word} the quick fox" for i in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    prepare(tmp_path / "out", f"{tmp_path}/a.txt,{tmp_path}/b.txt", vocab_size=300)
    vocabulary = Tokenizer(tmp_path / "out/tokenizer.json").encoding.token_byte_values()
    assert b" zyxomma" in vocabulary and b" quokkish" in vocabulary


def put_on_hub(monkeypatch, texts, *lengths):
    """Put a data set of texts in place of the Hub's; its n-th reading breaks off at lengths[n]."""
    lengths = iter(lengths)

    def read(length):
        for text in texts[:length]:
            yield {"title": "x", "text": text}
        if length < len(texts):
            raise ConnectionError("the line is dead")

    def load_dataset(path, name, split, streaming):
        assert (path, name, split, streaming) == ("some/texts", "part", "train", True)
        length = next(lengths)
        return datasets.IterableDataset.from_generator(read, gen_kwargs={"length": length})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_data_set_of_the_hub(tmp_path, corpus, data_dir, prepare, monkeypatch):
    put_on_hub(monkeypatch, corpus.read_text().split("\n\n"), 40, 40)
    meta = prepare(tmp_path / "out", "some/texts:part")
    assert same(tmp_path / "out", data_dir)
    assert meta["settings"]["files"] == []


def hub_of_files(monkeypatch, folder):
    """Put the folders of a folder in place of the Hub's data sets; returns a list of what is asked.

    They are read by the library itself, each .parquet a shard."""
    asked = []
    load_dataset = datasets.load_dataset

    def load(path, name=None, **options):
        if path == "json":
            return load_dataset(path, **options)
        asked.append((path, name))
        there_is = None if name == "part" else name
        return load_dataset(str(folder / path), there_is, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_the_sample_of_a_hub_data_set_is_spread_over_its_shards(tmp_path, monkeypatch):
    (tmp_path / "some/texts").mkdir(parents=True)
    for i in range(7):
        table = pyarrow.table({"text": [f"shard {i} document {j:3}" for j in range(300)]})
        pyarrow.parquet.write_table(table, tmp_path / f"some/texts/train-{i:05}-of-00007.parquet")
    asked = hub_of_files(monkeypatch, tmp_path)
    everything = list(module.read_texts("some/texts:part"))
    assert everything == [f"shard {i} document {j:3}" for i in range(7) for j in range(300)]
    monkeypatch.setattr(module, "SHARDS", 3)
    sample = list(module.read_texts("some/texts", limit=3 * 200))
    assert [text[:7] for text in sample] == 10 * ["shard 0"] + 10 * ["shard 3"] + 10 * ["shard 6"]
    assert asked == [("some/texts", name) for name in ("part", None)]


def test_a_hub_data_set_and_files_of_ones_own(
    tmp_path, corpus, prepare, monkeypatch, capsys, two_sources
):
    (tmp_path / "some/texts").mkdir(parents=True)
    table = pyarrow.table({"text": documents_of(corpus)[:25]})
    pyarrow.parquet.write_table(table, tmp_path / "some/texts/train.parquet")
    hub_of_files(monkeypatch, tmp_path)
    own = f"{two_sources}/b?.jsonl"
    meta = prepare(tmp_path / "out", f"some/texts:part,{own}")
    assert [part["read"] for part in meta["counts"]["sources"].values()] == [25, 15]
    sizes = [[str(p), p.stat().st_size] for p in sorted(two_sources.glob("b?.jsonl"))]
    assert meta["settings"]["files"] == sizes
    with pytest.raises(SystemExit, match=r"not read some/texts:half \(.*BuilderConfig.*\): run"):
        prepare(tmp_path / "other", f"{own},some/texts:half")
    wrong = "BuilderConfig 'half' not found. Available: ['default']; name one as NAME:CONFIG\n"
    assert wrong in capsys.readouterr().out


def test_a_stream_that_breaks_off(tmp_path, corpus, prepare, monkeypatch, capsys):
    texts = 10 * corpus.read_text().split("\n\n")
    out = tmp_path / "out"
    put_on_hub(monkeypatch, texts, 300)
    why = "ConnectionError: the line is dead"
    dead = f"WARNING: some/texts:part could not be read to its end: {why}\n"
    with pytest.raises(SystemExit, match=r"not read some/texts:part \(.*\): run again, or"):
        prepare(out, "some/texts:part")
    assert not out.exists() and capsys.readouterr().out.count(dead) == 1

    put_on_hub(monkeypatch, texts, len(texts), 300)
    with pytest.raises(SystemExit, match="out holds what could be read: use it, or delete it"):
        prepare(out, "some/texts:part")
    assert capsys.readouterr().out.count(dead) == 1
    meta = json.loads((out / "meta.json").read_text())
    assert meta["errors"] == {"some/texts:part": why}
    assert 0 < meta["counts"]["read"] <= 300


@pytest.mark.parametrize("weights", ["", "1,1"])
def test_that_a_stream_broke_off_is_told_at_once(tmp_path, corpus, monkeypatch, capsys, weights):
    texts = 10 * documents_of(corpus)
    (tmp_path / "own.txt").write_text("\n\n".join(texts))
    put_on_hub(monkeypatch, texts, 300)
    put(monkeypatch, module, weights=weights)
    hub = "some/texts:part"
    sources = {hub: [hub], "own": [f"{tmp_path}/own.txt"]}
    names, said = [], ""
    for name, _ in module.in_turns(sources, module.shares(sources), {}):
        names.append(name)
        if not said:
            said = capsys.readouterr().out
            told_at = len(names)
    said += capsys.readouterr().out
    why = "ConnectionError: the line is dead"
    assert said == f"WARNING: {hub} could not be read to its end: {why}\n"
    if weights:
        assert told_at == len(names) < 2 * 300 + 40
    else:
        assert told_at < 2 * 300 + 40 < len(names) == names.count(hub) + len(texts)


def test_the_size_of_the_text_is_about_right(tmp_path, corpus):
    write_kinds(tmp_path, corpus)
    shutil.copy(corpus, tmp_path / "e.txt")
    size = corpus.stat().st_size
    assert module.text_bytes(f"{tmp_path}/e.txt") == size
    for name in ("a.txt.gz", "d.jsonl.gz", "c.parquet"):
        assert 0.6 < module.text_bytes(f"{tmp_path}/{name}") / size < 2, name


@pytest.mark.parametrize(
    "total_bytes, max_tokens, free, message",
    [
        (10**9, 0, 1e12, "about {all:,.1f}M tokens: {disk:,.0f} MB of disk and "),
        (10**9, -1, 1e12, "about {all:,.1f}M tokens: {disk:,.0f} MB of disk and "),
        (10**9, 10**6, 1e12, "about 1.0M tokens: 2 MB of disk and "),
        (math.inf, 10**6, 1e6, "; WARNING: only 1 MB are free there"),
        (math.inf, 0, 1e12, "1,000M tokens take 2 GB of disk (1,000 GB are free there) and "),
    ],
)
def test_the_estimate(
    monkeypatch, capsys, tmp_path, data_dir, texts, total_bytes, max_tokens, free, message
):
    monkeypatch.setattr(module, "max_tokens", max_tokens)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    tokenizer, some = Tokenizer(data_dir / "tokenizer.json"), texts[:3]
    n_tokens = sum(1 + len(tokenizer.encode(text)) for text in some)  # each has a [SEP]
    tokens = total_bytes * n_tokens / sum(len(text.encode()) for text in some)
    limited = tokens if max_tokens < 1 else min(tokens, max_tokens)
    assert module.print_estimate(some, tokenizer, total_bytes, tmp_path) == limited
    said = capsys.readouterr().out
    assert message.format(all=tokens / 1e6, disk=2 * tokens / 1e6) in said
    assert re.search(r"and [\d,]+ s", said) and said.count("\n") == 1


def test_the_estimate_is_drawn_from_all_sources(capsys, tmp_path, data_dir):
    tokenizer = Tokenizer(data_dir / "tokenizer.json")
    sources = [" ".join(["the"] * 250), " ".join(["zqx"] * 250)]  # 999 characters each
    few, many = (len(tokenizer.encode(text)) + 1 for text in sources)
    assert 2 * few < many
    module.print_estimate([sources[0]] * 2000 + [sources[1]] * 2000, tokenizer, 10**9, tmp_path)
    said = float(re.search(r"about ([\d,.]+)M", capsys.readouterr().out)[1].replace(",", ""))
    assert said == pytest.approx((few + many) / 2 / 999 * 1000, rel=0.1)


def test_the_estimate_is_by_bytes(tmp_path, data_dir):
    """A Cyrillic letter has two."""
    tokenizer = Tokenizer(data_dir / "tokenizer.json")
    tokenizer.mode = "plain"
    texts = ["слово за слово " * 20] * 9
    n_tokens = sum(1 + len(tokenizer.encode(text)) for text in texts)
    total_bytes = sum(len(text.encode()) for text in texts)
    assert module.print_estimate(texts, tokenizer, total_bytes, tmp_path) == n_tokens


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
    monkeypatch.setattr(module, "MAX_DOCUMENT", 10)
    cut = list(split_documents(io.StringIO("\n".join(["abcd"] * 5))))
    assert cut == ["abcd\nabcd\n", "abcd\nabcd\n", "abcd"]
    line = "0123456789" * 5 + "end"
    cut = list(split_documents(io.StringIO(f"abc\n{line}\nxyz")))
    assert max(map(len, cut)) < 2 * 10 and "".join(cut) == f"abc\n{line}\nxyz"


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_finished_and_the_next_one_completes(
    tmp_path, corpus, data_dir, prepare, capsys
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
    assert "leftover of a run that did not finish" in capsys.readouterr().out
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


def test_a_question_mark_stands_for_a_comma_in_a_name(tmp_path, corpus, data_dir, prepare):
    shutil.copy(corpus, tmp_path / "one, two.txt")
    prepare(tmp_path / "out", f"{tmp_path}/one? two.txt")
    assert same(tmp_path / "out", data_dir)


def test_the_challenge_is_kept_unless_one_is_told(tmp_path, prepare, capsys):
    assert "edu" not in settings(module.__file__)["source"][0]
    with pytest.raises(SystemExit, match="could not read HuggingFaceFW/fineweb-edu"):
        prepare(tmp_path / "out", "HuggingFaceFW/fineweb-edu")
    assert "a pre-trained model chose FineWeb-Edu, which the chall" in capsys.readouterr().out


def test_recipes_that_share_a_data_set_prepare_it_alike():
    known = settings(module.__file__)
    prepared = {}
    for path in (ROOT / "config").glob("*.py"):
        values = {name: value for name, (value, _) in assignments(path).items() if name in known}
        folder = values.setdefault("data_dir", known["data_dir"][0])
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
        ({"source": "single.txt"}, "was held out of 1 documents (blank lines end them): type "),
        (
            {"source": "short.txt", "vocab_size": 261, "val_share": 1e-9},
            "fewer than one row of 128",
        ),
        ({"val_share": 1e-8}, "type --val_share=1e-07"),
        ({"vocab_size": 70000}, "vocab_size=70000 cannot work"),
        ({"threads": -1}, "threads=-1 cannot work"),
        ({"vocab_sample_mb": 0}, "vocab_sample_mb=0 cannot work"),
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
