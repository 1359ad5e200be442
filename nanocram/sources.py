"""Texts out of files: .txt, .log, .jsonl, .json, .csv, .tsv (each also .gz or .zst) and .parquet.

A file of the Hub is streamed in blocks as if it lay here.
"""

import codecs
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re

KINDS = {
    ".txt": "text",
    ".log": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
HUB = "hf://"  # how the address of a Hub file begins
BLOCK = 16 << 20  # bytes of a Hub file in one request; the next one comes while one is read
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size


def file_kind(path):
    """text, json, csv, tsv or parquet, by a file's name; None for all others."""
    stem, ending = os.path.splitext(path.lower())
    if ending in (".gz", ".zst"):
        kind = KINDS.get(os.path.splitext(stem)[1])
        return kind if kind != "parquet" else None
    return KINDS.get(ending)


# The Hub


@functools.cache
def hub():
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # prepare.py says what is to be said
    return HfFileSystem()


def hub_files(name):
    """[[address, bytes]] of the training files of a Hub data set, NAME or NAME:CONFIG, as of now.

    Raises ValueError where it has no training split or files of a kind that is not read."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    path, _, config = name.partition(":")
    fs = hub()
    builder = datasets.load_dataset_builder(path, config or None)
    splits = dict(builder.config.data_files or {})
    if "train" not in splits:
        raise ValueError(f"it has no split 'train', but {', '.join(map(str, splits)) or 'none'}")
    files = [str(file) for file in splits["train"]]
    unknown = [file for file in files if not file_kind(file)]
    if unknown:
        raise ValueError(f"{unknown[0]} is of no kind that is read")
    folders = sorted({os.path.dirname(file) for file in files})
    sizes = {HUB + entry["name"]: entry["size"] for name in folders for entry in fs.ls(name)}
    return [[file, sizes.get(file, 0)] for file in files]


def explain(error):
    """What went wrong with a source, in one line, and what helps, where that is known."""
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    hints = {
        "offlinemode": "unset HF_HUB_OFFLINE, or give files of your own",
        "gated": "accept its terms on its page at the Hub, then type: hf auth login",
        "(config name is missing|builderconfig)": "name one as NAME:CONFIG",
        r"\w*notfound": "check the name; for a private one type: hf auth login",
    }
    found = (hint for words, hint in hints.items() if re.search(rf"\b{words}", why, re.IGNORECASE))
    return why, next(found, "")


# The texts of a file


def open_bytes(path):
    """A file here or on the Hub, to read and to seek in."""
    if not path.startswith(HUB):
        return open(path, "rb")
    ahead = {"cache_type": "background", "cache_options": {"maxblocks": 4}}
    return hub().open(path, "rb", block_size=BLOCK, **ahead)


def read_texts(file, path, column, by_line=False):
    """The documents of an open file, each a str; "" for a record without text.

    Raises ValueError with the line where it is broken, or whatever a reader raises."""
    kind = file_kind(path)
    if kind == "parquet":
        yield from parquet_texts(file, column)
        return
    if path.lower().endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    if path.lower().endswith(".zst"):
        import pyarrow

        file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    file = io.BufferedReader(file, 1 << 20)
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError("it is UTF-16: iconv -f UTF-16 -t UTF-8 makes it text")
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")
    if kind == "text":
        yield from filter(str.strip, split_documents(text, by_line))
        return
    records = json_records(text) if kind == "json" else table_records(text, kind)
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"{record!r:.40} is no object with columns")
        if number == 0:
            check_column(column, record)
        yield checked(record.get(column), column)


def split_documents(file, by_line=False):
    """Yield documents: one ends at a blank line, or at each line if by_line, or at MAX_DOCUMENT
    characters. Some may be blank."""
    document, size = [], 0
    for line in iter(functools.partial(file.readline, MAX_DOCUMENT), ""):
        document.append(line)
        size += len(line)
        if by_line or not line.strip() or size >= MAX_DOCUMENT:
            yield "".join(document)
            document, size = [], 0
    yield "".join(document)


def json_records(file):
    """The objects in the lines of an open file, or in the one list that it is."""
    first = file.readline()
    if first.lstrip().startswith("["):
        yield from json.loads(first + file.read())
        return
    for number, line in enumerate(itertools.chain([first], file), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as e:
                raise ValueError(f"line {number}, column {e.colno}: {e.msg}") from None
            yield record


def table_records(file, kind):
    """The rows of an open table. In a csv a cell may stand in quotes; in a tsv a quote is text."""
    csv.field_size_limit(1 << 24)  # what is longer is a quote that nothing closes
    strict = {"strict": True} if kind == "csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    rows = csv.DictReader(file, **strict)
    try:
        yield from rows
    except csv.Error as e:
        raise ValueError(f"line {rows.line_num + 1}: {e}") from None


def parquet_texts(file, column):
    """pre_buffer=False: else Arrow fetches groups of rows, with all columns, ahead: several GB."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    check_column(column, table.schema_arrow.names)
    for batch in table.iter_batches(256, columns=[column], use_threads=False):
        for text in batch.column(0).to_pylist():
            yield checked(text, column)


def checked(text, column):
    """text with U+FFFD for lone surrogates, which UTF-8 cannot hold; ValueError if it is no str."""
    if not isinstance(text, str | None):
        raise ValueError(f"{column!r} holds {text!r:.40}, no text: type --text_column=NAME")
    if text and not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text or ""


def check_column(column, names):
    if column not in names:
        have = ", ".join(map(str, names))
        raise ValueError(f"no column {column!r}, it has {have}: type --text_column=NAME")
