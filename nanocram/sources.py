"""Texts out of files: .txt, .log, .jsonl, .json, .csv, .tsv (each also .gz or .zst) and .parquet.

A file of the Hub is streamed in blocks as if it lay here.
"""

import csv
import functools
import gzip
import io
import itertools
import json
import os
import re

from nanocram.safety import say_once

HUB = "hf://"  # how the address of a Hub file begins
BLOCK = 16 << 20  # bytes of a Hub file in one request; the next one comes while one is read
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size


def file_kind(path):
    """text, json, csv, tsv or parquet, by a file's name; None for all others."""
    stem, ending = os.path.splitext(path.lower())
    is_packed = ending in (".gz", ".zst")
    kind = (os.path.splitext(stem)[1] if is_packed else ending).removeprefix(".")
    kind = {"txt": "text", "log": "text", "jsonl": "json"}.get(kind, kind)
    is_read = kind in ("text", "json", "csv", "tsv") or (kind == "parquet" and not is_packed)
    return kind if is_read else None


def hub():
    from huggingface_hub import HfFileSystem, logging

    logging.set_verbosity(logging.CRITICAL)  # prepare.py says what is to be said
    return HfFileSystem()


def hub_files(name):
    """[[address, bytes]] of the training files of a Hub data set, NAME or NAME:CONFIG, as of now.

    Raises ValueError where it has no training split or files of a kind that is not read."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    path, _, config = name.partition(":")
    fs = hub()  # first, for it silences the library
    splits = datasets.load_dataset_builder(path, config or None).config.data_files or {}
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
        "(localentrynotfound|connect)": "",  # no hint, so that read_file() tries again
        "gated": "accept its terms on its page at the Hub, then type: hf auth login",
        "(config name is missing|builderconfig)": "name one as NAME:CONFIG",
        "zstd.* memory": "zstd -d --long=31 makes a file that is read",
        r"\w*notfound": "check the name; for a private one type: hf auth login",
    }
    found = (hint for words, hint in hints.items() if re.search(rf"\b{words}", why, re.IGNORECASE))
    return why, next(found, "")


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
        texts = parquet_texts(file, column)
    elif kind == "json":
        texts = json_texts(open_text(file, path), column)
    elif kind == "text":
        texts = filter(str.strip, split_documents(open_text(file, path), by_line))
    else:
        rows = table_rows(file, path, column.split(","))
        texts = (" ".join(filter(None, cells)) for cells in rows)
    for text in texts:
        if text and not text.isascii():  # U+FFFD for lone surrogates, which UTF-8 cannot hold
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield text or ""


def open_text(file, path):
    """The characters of an open file; every end of a line stays as it is."""
    if path.lower().endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    if path.lower().endswith(".zst"):
        import pyarrow

        file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    file = io.BufferedReader(file, 1 << 20)
    begin = file.peek(2)
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in begin:
        raise ValueError("it looks like UTF-16: iconv -f UTF-16 -t UTF-8, with no BOM -f UTF-16LE")
    newline = "\n" if file_kind(path) in ("csv", "tsv") else ""  # a row may hold a lone \r
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=newline)


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


def json_texts(file, column):
    """The texts of the objects in the lines of an open file, or in the one list that it is."""
    first = file.readline()
    is_list = first.lstrip().startswith("[")
    parts = json.loads(first + file.read()) if is_list else itertools.chain([first], file)
    names = None
    for number, record in enumerate(parts, 1):
        try:
            if not is_list:
                if not record.strip():
                    continue
                record = json.loads(record)
            if not isinstance(record, dict):
                raise ValueError(f"{json.dumps(record):.40} is no object: take it out")
            if names is None:
                names = list(record)
                lists = [name for name in names if isinstance(record[name], list)]
                hint = f", or jq -c '.{lists[0]}[]' OLD > NEW.jsonl" if lists else ""
                check_columns([column], names, hint)
            yield check_text(record.get(column), column)
        except ValueError as e:  # of a JSONDecodeError its msg, without a line within the line
            where = f"record {number}" if is_list else f"line {number}"
            where += f", column {e.colno} is no whole object" if hasattr(e, "colno") else ""
            raise ValueError(f"{where}: {getattr(e, 'msg', e)}") from None


def table_rows(file, path, columns):
    """The cells of each row of an open table, [str, or None where the row is short].

    A .csv is as RFC 4180 has it; in a .tsv each line is a row, and a quote is text."""
    file, is_csv = open_text(file, path), file_kind(path) == "csv"
    header = file.readline()
    bare = re.sub('"[^"]*"', "", header)
    delimiter = next((sign for sign in ",;\t" if sign in bare), ",") if is_csv else "\t"
    if is_csv and delimiter != ",":
        say_once(f"{path}: its cells are separated by {delimiter!r}, as in its header")
    late_quote = re.compile(rf'(^|{delimiter}) +"[^"{delimiter}\r\n]')

    def check_quotes(line):
        if is_csv and ' "' in line and late_quote.search(line):
            raise csv.Error("a space stands before a quote")
        return line

    csv.field_size_limit(1 << 24)  # what is longer is a quote that nothing closes
    lines = map(check_quotes, itertools.chain([header], file))
    by_tabs = (line.rstrip("\r\n").split("\t") for line in lines)
    rows = csv.reader(lines, delimiter=delimiter, strict=True) if is_csv else by_tabs
    names, begin = None, 1  # the line where the row begins
    try:
        for cells in rows:
            if not any(cells):
                pass  # a blank line
            elif names is None:
                names = [name.strip() for name in cells]
                check_columns(columns, names)
                places = [names.index(column) for column in columns]
                n_named = max(i for i, name in enumerate(names, 1) if name)
            elif len(cells) > len(names) or any(cells[n_named:]):
                raise csv.Error(f"it has {len(cells)} cells, and the header {n_named}")
            elif not is_csv and len(cells) < len(names) and re.fullmatch('[^"]*"', cells[0]):
                raise csv.Error("a .tsv has no quoted cells: write it as a .csv")
            else:
                yield [cells[i] if i < len(cells) else None for i in places]
            begin = rows.line_num + 1 if is_csv else begin + 1
    except csv.Error as e:
        rule = f": quote a cell that has {delimiter!r}, a quote or a line break; double its quotes"
        raise ValueError(f"line {begin}: {e}{rule if is_csv else ''}") from None


def parquet_texts(file, column):
    """pre_buffer=False: else Arrow fetches groups of rows, with all columns, ahead: several GB."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    check_columns([column], table.schema_arrow.names)
    for batch in table.iter_batches(256, columns=[column], use_threads=False):
        for text in batch.column(0).to_pylist():
            yield check_text(text, column)


def check_text(text, column):
    if not isinstance(text, str | None):
        advice = "type --text_column=NAME, or make it a string or null"
        raise ValueError(f"{column!r} is {text!r:.40}, no text: {advice}")
    return text


def check_columns(columns, names, hint=""):
    for column in columns:
        if column not in names:
            have = " ".join(", ".join(map(str, names)).split())[:300]
            option = "--text_column=NAME" + " or --label_column=NAME" * (len(columns) > 1)
            raise ValueError(f"no column {column!r}, it has {have}: type {option}{hint}")
        if names.count(column) > 1:
            raise ValueError(f"two columns are named {column!r}: rename one")
