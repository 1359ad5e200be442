import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line, script
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import prepare as module
from nanocram.tokenizer import CLS, SEP
from prepare import SeenHashes, join_lines, pack, text_hash


def rows_of(folder, name="train.bin", T=128):
    return np.fromfile(folder / name, np.uint16).reshape(-1, T)


def as_set(rows):
    return sorted(map(bytes, rows))


def prepare(folder, source, **other):
    done = script("prepare.py", source=source, data_dir=folder, **(SMALL_DATA | other))
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "meta.json").read_text()), done.stdout


@given(
    st.lists(st.lists(st.integers(4, 99), max_size=40), max_size=20),
    st.integers(2, 17),
    st.integers(1, 5),
)
def test_packing_keeps_every_token_once_and_in_order(documents, T, pieces):
    stream = np.array([t for d in documents for t in [*d, SEP]], dtype=np.uint16)
    rest, rows = np.zeros(0, np.uint16), []
    for piece in np.array_split(stream, pieces):  # whatever the batches
        new, rest = pack(np.concatenate((rest, piece)), T)
        rows.append(new)
    rows = np.concatenate(rows)
    assert (rows[:, 0] == CLS).all() and len(rest) < T - 1
    assert [*rows[:, 1:].flatten(), *rest] == [*stream]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12))
def test_seen_hashes_is_a_set(batches):
    ours, reference = SeenHashes(), set()
    for batch in batches:
        new = ours.add(np.array(batch, dtype=np.uint64))
        for value, is_new in zip(batch, new, strict=True):
            assert is_new == (value not in reference)
            reference.add(value)
    assert sum(map(len, ours.arrays)) == len(reference)
    assert len(ours.arrays) <= 8


def documents_and_reference(corpus, folder, share=0.2):
    """(train ids, held-out ids) per document, by transformers' tokenizer and a direct reading of the rules."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, val = [], []
    for text in map(str.strip, corpus.read_text().split("\n\n")):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        (val if text_hash(text) < share * 2**64 else train).append((text, ids))
    return train, val


def chunks(documents, T=128):
    stream = [t for _, ids in documents for t in [*ids, SEP]]
    return [[CLS, *stream[i : i + T - 1]] for i in range(0, len(stream) - T + 2, T - 1)]


def test_rows_equal_a_second_implementation(data_dir, corpus):
    train, val = documents_and_reference(corpus, data_dir)
    meta = json.loads((data_dir / "meta.json").read_text())
    assert as_set(rows_of(data_dir)) == as_set(np.array(chunks(train), np.uint16))
    assert as_set(rows_of(data_dir, "val.bin")) == as_set(np.array(chunks(val), np.uint16))
    assert rows_of(data_dir).tolist() != chunks(train)  # shuffled
    counts = meta["counts"]
    assert counts["kept"] == len(train) and counts["held_out"] == len(val)
    assert counts["tokens"] == sum(len(ids) + 1 for _, ids in train)
    assert counts["rows"] == len(rows_of(data_dir)) and counts["val_rows"] == len(
        rows_of(data_dir, "val.bin")
    )
    assert meta["vocab_size"] == 600 and meta["seq_len"] == 128


def test_threads_change_nothing(tmp_path, corpus):
    prepare(tmp_path / "one", corpus, threads=1)
    prepare(tmp_path / "many", corpus, threads=5)
    for name in ("tokenizer.json", "train.bin", "val.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()


def test_curriculum_and_filter_leave_the_held_out_rows_alone(tmp_path, corpus, data_dir):
    meta, _ = prepare(tmp_path / "sorted", corpus, order="curriculum")
    rows = rows_of(tmp_path / "sorted")
    assert as_set(rows) == as_set(rows_of(data_dir))
    tokenizer = AutoTokenizer.from_pretrained(data_dir)
    ends = [
        sum(any(c in word for c in ".!?") for word in tokenizer.convert_ids_to_tokens(row))
        for row in rows
    ]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]

    train, _ = documents_and_reference(corpus, data_dir)
    ratios = sorted(len(ids) / len(text) for text, ids in train)
    limit = ratios[len(ratios) // 2]
    meta, printed = prepare(tmp_path / "filtered", corpus, filter_ratio=limit)
    assert 0 < meta["counts"]["filtered"] < len(train)
    assert "WARNING: less than 80 % were kept" in printed
    for name in ("sorted", "filtered"):
        assert (tmp_path / name / "val.bin").read_bytes() == (data_dir / "val.bin").read_bytes()


def test_copies(tmp_path, corpus, data_dir):
    twice = tmp_path / "twice.txt"
    twice.write_text(corpus.read_text() + "\n\n\n" + corpus.read_text())
    train, val = documents_and_reference(corpus, data_dir)
    kept, _ = prepare(tmp_path / "kept", twice)
    assert kept["counts"]["kept"] == 2 * len(train) and kept["counts"]["held_out_copies"] == len(
        val
    )
    once, _ = prepare(tmp_path / "once", twice, dedup=True)
    assert once["counts"]["kept"] == len(train) == once["counts"]["duplicates"]
    assert as_set(rows_of(tmp_path / "kept", "val.bin")) == as_set(
        rows_of(tmp_path / "once", "val.bin")
    )


def test_every_kind_of_file_gives_the_same_rows(tmp_path, corpus, data_dir):
    texts = corpus.read_text().split("\n\n")
    with gzip.open(tmp_path / "a.txt.gz", "wt", newline="\r\n") as f:
        f.write(corpus.read_text())
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"id": 1, "body": t}) + "\n" for t in texts)
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"x": range(len(texts)), "body": texts}), tmp_path / "c.parquet"
    )
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as f:
        f.write((tmp_path / "b.jsonl").read_bytes())
    for name in ("a.txt.gz", "b.jsonl", "c.parquet", "d.jsonl.gz"):
        prepare(tmp_path / name[0], tmp_path / name, text_column="body")
        for file in ("tokenizer.json", "train.bin", "val.bin"):
            assert (tmp_path / name[0] / file).read_bytes() == (data_dir / file).read_bytes(), name


def test_one_bad_file_among_good_ones(tmp_path, corpus, data_dir):
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(corpus, folder / "b.txt")
    whole = gzip.compress(corpus.read_bytes())
    (folder / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), folder / "c.parquet")
    meta, printed = prepare(tmp_path / "out", folder / "*")
    assert (tmp_path / "out" / "val.bin").read_bytes() == (data_dir / "val.bin").read_bytes()
    assert sorted(os.path.basename(p) for p in meta["errors"]) == ["a.txt.gz", "c.parquet"]
    assert "a.txt.gz could not be read to its end: EOFError" in printed
    assert "no column 'text', it has x: type --text_column=NAME" in printed


def test_the_size_of_a_file_that_cannot_be_read_is_no_reason_to_stop(tmp_path, monkeypatch):
    for name, content in (
        ("a.txt", b"x" * 40),
        ("b.txt.gz", gzip.compress(b"y" * 999)),
        ("c.txt.gz", b"no gzip" * 9),
    ):
        (tmp_path / name).write_bytes(content)
    sizes = [module.raw_size(str(tmp_path / name)) for name in ("a.txt", "b.txt.gz", "c.txt.gz")]
    assert sizes == [40, 999, 63]
    parts = [gzip.compress(os.urandom(n)) for n in (3000, 2)]
    (tmp_path / "parts.txt.gz").write_bytes(b"".join(parts))
    assert module.raw_size(str(tmp_path / "parts.txt.gz")) == sum(
        map(len, parts)
    )  # the trailer says 2
    texts = pyarrow.table(
        {"text": [f"{i} times the same" for i in range(50_000)], "x": np.random.rand(50_000)}
    )
    pyarrow.parquet.write_table(texts, tmp_path / "d.parquet", compression="zstd")
    size = os.path.getsize(tmp_path / "d.parquet")
    assert (
        0.9
        < module.raw_size(str(tmp_path / "d.parquet"))
        / sum(len(t) for t in texts["text"].to_pylist())
        < 2
    ), size

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert module.raw_size(str(tmp_path / "a.txt")) == 40


def test_limits(tmp_path, corpus):
    few, _ = prepare(tmp_path / "few", corpus, max_docs=30)
    assert few["counts"]["read"] == 30
    short, _ = prepare(tmp_path / "short", corpus, max_tokens=40000)
    assert 40000 <= short["counts"]["tokens_read"] < 40000 + 3000
    assert (
        short["counts"]["tokens_read"] == short["counts"]["tokens"] + short["counts"]["val_tokens"]
    )


def test_a_limit_on_tokens_holds_out_the_same_whatever_the_filter(tmp_path, corpus, data_dir):
    train, _ = documents_and_reference(corpus, data_dir)
    median = sorted(len(ids) / len(text) for text, ids in train)[len(train) // 2]
    for name, ratio in (("loose", 0.0), ("strict", median)):
        meta, _ = prepare(tmp_path / name, corpus, filter_ratio=ratio, max_tokens=40000)
        assert (meta["counts"]["filtered"] > 0) == (name == "strict")
    assert (tmp_path / "loose" / "val.bin").read_bytes() == (
        tmp_path / "strict" / "val.bin"
    ).read_bytes()


@given(st.lists(st.sampled_from(["a", "bb", "", "  "])))
def test_blank_lines_end_documents(lines):
    ours = [d.strip() for d in join_lines(lines) if d.strip()]
    theirs = [p.strip() for p in re.split(r"\n[ \n]*\n", "\n".join(lines)) if p.strip()]
    assert ours == theirs


def test_a_text_without_blank_lines_is_cut(monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENT", 10)
    assert [d.split("\n") for d in join_lines(["abcd"] * 7)] == [
        ["abcd"] * 3,
        ["abcd"] * 3,
        ["abcd"],
    ]


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_finished_and_the_next_one_completes(
    tmp_path, corpus, data_dir
):
    folder = tmp_path / "data"
    flags = [f"--{k}={v}" for k, v in SMALL_DATA.items()]
    command = [
        sys.executable,
        str(ROOT / "prepare.py"),
        f"--source={corpus}",
        f"--data_dir={folder}",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not folder.with_name("data.partial").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists() and folder.with_name("data.partial").exists()
    _, printed = prepare(folder, corpus)
    assert (
        "leftover of a run that did not finish" in printed
        and not folder.with_name("data.partial").exists()
    )
    for name in ("tokenizer.json", "train.bin", "val.bin"):
        assert (folder / name).read_bytes() == (data_dir / name).read_bytes()


def test_a_finished_set_is_kept(tmp_path, corpus, data_dir):
    before = {p.name: p.stat().st_mtime_ns for p in data_dir.iterdir()}
    same = script("prepare.py", source=corpus, data_dir=data_dir, **SMALL_DATA)
    assert same.returncode == 0 and "nothing to do" in last_line(same)
    other = script(
        "prepare.py", source=corpus, data_dir=data_dir, **(SMALL_DATA | {"order": "curriculum"})
    )
    assert (
        other.returncode == 1
        and "other settings (order 'shuffle' -> 'curriculum')" in last_line(other)
    )
    assert before == {p.name: p.stat().st_mtime_ns for p in data_dir.iterdir()}


def test_slips_are_one_line(tmp_path, corpus):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words.\n")
    (tmp_path / "a.doc").write_text("x")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.bin").write_text("precious")
    strange, linked = tmp_path / "strange.partial", tmp_path / "linked"
    (tmp_path / "aim").mkdir()
    linked.symlink_to(tmp_path / "aim")
    words = [line for line in corpus.read_text().splitlines() if line][:2000]
    (tmp_path / "single.txt").write_text("\n".join(words))
    strange.mkdir()
    (strange / "thesis.tex").write_text("precious")
    cases = [
        (dict(source=tmp_path / "*.csv"), "no file matches"),
        (dict(source=tmp_path / "nowhere.txt"), "no file matches"),
        (dict(source=tmp_path / "a.doc"), "is of no known kind"),
        (dict(source=tmp_path / "empty.txt"), "no text in"),
        (dict(source="nobody/nothing"), "no text in nobody/nothing; nobody/nothing: "),
        (dict(source=tmp_path / "short.txt"), "the text yields a vocabulary of only"),
        (
            dict(source=tmp_path / "single.txt"),
            "of 1 documents was held out: type --val_share=0.5, or give",
        ),
        (dict(source=corpus, data_dir=linked), "is a link or a mount point"),
        (
            dict(source=tmp_path / "short.txt", vocab_size=261, val_share=1e-9),
            "fewer than one row of 128",
        ),
        (dict(source=corpus, val_share=1e-8), "type --val_share=1e-07"),
        (dict(source=corpus, vocab_size=70000), "vocab_size=70000 cannot work"),
        (
            dict(source=corpus, order="random"),
            "order=random cannot work: it must be shuffle or curriculum",
        ),
        (dict(source=corpus, data_dir=mine), "is no data set of prepare.py"),
        (dict(source=corpus, data_dir=tmp_path / "strange"), "files that prepare.py did not write"),
        (dict(source=corpus, data_dir=corpus / "below"), "File exists"),
    ]
    for settings_, message in cases:
        done = script("prepare.py", **(SMALL_DATA | {"data_dir": tmp_path / "out"} | settings_))
        assert done.returncode == 1 and message in last_line(done), (settings_, done.stdout)
        assert "Traceback" not in done.stdout
        assert not (tmp_path / "out").exists()
    assert (mine / "train.bin").read_text() == (strange / "thesis.tex").read_text() == "precious"
