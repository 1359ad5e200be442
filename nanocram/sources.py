"""Texts out of files: .txt, .log, .jsonl, .json, .csv, .tsv (also .gz or .zst), .parquet."""

import csv
import gzip
import io
import itertools
import json
import re
from pathlib import Path

from nanocram.safety import say_once

HUB = "hf://"  # how the address of a Hub file begins
BLOCK = 16 << 20  # bytes of a Hub file in one request; the next one comes while one is read
CELL = 1 << 24  # characters of a cell at most; a longer one is a quote that nothing closes
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size


def file_kind(path):
    """text, json, csv, tsv or parquet, by a file's name; None for all others."""
    end = re.search(r"\.(txt|log|jsonl?|csv|tsv)(\.gz|\.zst)?$|\.(parquet)$", path.lower())
    kind = end and (end[1] or end[3])
    return {"txt": "text", "log": "text", "jsonl": "json"}.get(kind, kind)


def hub():
    from huggingface_hub import HfFileSystem, logging

    logging.set_verbosity(logging.CRITICAL)  # prepare.py says what is to be said
    return HfFileSystem()


def hub_files(name):
    """[[address, bytes]] of the training files of a Hub data set, NAME or NAME:CONFIG, as of now;
    raises ValueError where there are none, or of a kind that is not read."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    path, _, config = name.partition(":")
    fs = hub()  # first, for it silences the library
    splits = datasets.load_dataset_builder(path, config or None).config.data_files or {}
    if "train" not in splits:
        raise ValueError(f"it has no split 'train', but {', '.join(map(str, splits)) or 'none'}")
    files = [str(file) for file in splits["train"]]
    if unknown := [file for file in files if not file_kind(file)]:
        raise ValueError(f"{unknown[0]} is of no kind that is read")
    folders = {file.rpartition("/")[0] for file in files}
    sizes = {HUB + entry["name"]: entry["size"] for name in folders for entry in fs.ls(name)}
    return [[file, sizes.get(file, 0)] for file in files]


def explain(error):
    """What went wrong with a source, in one line, and what helps, where that is known."""
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
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


def files_in(folder):
    """What to type to read the files of a folder, or what the datasets library saved in it."""
    if any(Path(folder).glob("*.arrow")) or any(Path(folder).glob("*/*.arrow")):
        return "in Python type datasets.load_from_disk('its split').to_parquet('new.parquet')"
    return f"name its files, as in '{Path(folder, '*.txt')}'"


def open_bytes(path):
    """A file to read and to seek in; one of the Hub is streamed in blocks as if it lay here."""
    if not path.startswith(HUB):
        return open(path, "rb")
    ahead = {"cache_type": "background", "cache_options": {"maxblocks": 4}}
    return hub().open(path, "rb", block_size=BLOCK, **ahead)


def read_texts(file, path, column, by_line=False):
    """The documents of an open file; '' for a record without text. A ValueError names the line."""
    if file_kind(path) == "text":
        return filter(str.strip, split_documents(open_text(file, path), by_line))
    rows = read_rows(file, path, dict.fromkeys(column.split(","), str))
    return (" ".join(filter(None, cells)) for cells in rows)


def read_rows(file, path, types):
    """Yield the values of each record of an open file, by {column: types that it may have}."""
    readers = {"csv": table_rows, "tsv": table_rows, "json": json_rows, "parquet": parquet_rows}
    if file_kind(path) not in readers:
        raise ValueError("it has no columns: make it a .csv (in Excel: CSV UTF-8), .tsv or .jsonl")
    return readers[file_kind(path)](file, path, types)


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
        advice = "iconv -f UTF-16 -t UTF-8 OLD > NEW, with no BOM -f UTF-16LE"
        raise ValueError(f"it looks like UTF-16: type {advice}")
    newline = "\n" if file_kind(path) in ("csv", "tsv") else ""  # a row may hold a lone \r
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=newline)


def split_documents(file, by_line=False):
    """Yield documents, some blank; they end at blank lines, or at all lines, or at MAX_DOCUMENT."""
    document = ""
    while line := file.readline(MAX_DOCUMENT):
        document += line
        if by_line or not line.strip() or len(document) >= MAX_DOCUMENT:
            yield document
            document = ""
    yield document


def json_rows(file, path, types):
    """Rows of the objects in the lines of a file, or in the one list that it is."""
    file = open_text(file, path)
    first = file.readline()
    is_list = first.lstrip().startswith("[")
    parts = json.loads(first + file.read()) if is_list else itertools.chain([first], file)
    names = None
    numbered = (pair for pair in enumerate(parts, 1) if is_list or pair[1].strip())
    for number, part in numbered:
        try:
            record = part if is_list else json.loads(part.rstrip())
            if not isinstance(record, dict):
                raise ValueError(f"{json.dumps(record):.40} is no object: take it out")
            names = names or check_columns(types, record)
            yield [check_type(record.get(name), name, types[name]) for name in types]
        except json.JSONDecodeError as e:
            why = f"line {number}, column {e.colno} is no whole object: {e.msg}"
            hint = "; if it goes on in the next line, type jq -c . OLD > NEW.jsonl"
            raise ValueError(why + hint * (e.pos == len(e.doc))) from None
        except ValueError as e:
            raise ValueError(f"{'record' if is_list else 'line'} {number}: {e}") from None


def table_rows(file, path, types):
    """Rows of a table. A .csv is as RFC 4180 has it; in a .tsv a line is a row, a quote is text."""
    file, is_tsv = open_text(file, path), file_kind(path) == "tsv"
    header = file.readline(CELL)
    if "\r" in header.rstrip("\r\n"):
        raise ValueError(f"its lines end in CR: type tr '\\r' '\\n' < OLD > NEW.{file_kind(path)}")
    lines = itertools.chain([header], file)
    if is_tsv:
        rows = (line.rstrip("\r\n").split("\t") for line in lines)
        rule = "a .tsv line has its tabs, a quote is text: if quotes enclose cells, name it .csv"
    else:
        bare = re.sub('"[^"]*"', "", header).strip("\r\n") or header
        delimiter = next((sign for sign in ",;\t|" if sign in bare), ",")
        csv.field_size_limit(CELL)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        rule = f"quote a cell that has {delimiter!r}, a quote or a line break, with no space "
        rule += 'outside, and double the quotes in it ("" and not \\")'
    quoted_cell = re.compile(("" if is_tsv else " +") + '"[^"]*(""[^"]*)*"?$')  # or its first line
    names, begin = None, 1  # the line where the row begins
    try:
        for cells in rows:
            if not any(cells) or (not names and cells[0][:4].lower() == "sep="):
                pass  # a blank line, or Excel's first one
            elif not names:
                names = [*map(str.strip, cells)]
                hint = rule if '"' in "".join(names) else "if line 1 is no header, put one above it"
                check_columns(types, names, f"; {hint}")
                places = [names.index(column) for column in types]
                width = max(i for i, name in enumerate(names, 1) if name)
            elif len(cells) > len(names) or any(cells[width:]) or (is_tsv and len(cells) < width):
                raise csv.Error(f"it has {len(cells)} cells, and the header {width}")
            else:
                if any(map(quoted_cell.match, cells)):
                    say_once(f"{path}: some quotes around cells stay as they are: {rule}")
                yield [cells[i] if i < len(cells) else None for i in places]
            begin = begin + 1 if is_tsv else rows.line_num + 1
    except csv.Error as e:
        plain = {"new-line": "a bare CR stands in it", "end of data": "its quote is never closed"}
        why = next((words for part, words in plain.items() if part in str(e)), e)
        raise ValueError(f"line {begin}: {why}: {rule}") from None


def parquet_rows(file, _, types):
    """pre_buffer=False: else Arrow fetches groups of rows, with all columns, ahead: several GB."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    check_columns(types, table.schema_arrow.names)
    for batch in table.iter_batches(256, columns=[*types], use_threads=False):
        for row in batch.to_pylist():
            yield [check_type(row[name], name, types[name]) for name in types]


def check_type(value, column, types):
    if not isinstance(value, types | None):
        what = "text" if types is str else "label"
        advice = f"type --{what}_column=NAME, or make it a string or null"
        raise ValueError(f"{column!r} is {value!r:.40}, no {what}: {advice}")
    if isinstance(value, str) and not value.isascii():
        # U+FFFD for lone surrogates, which JSON may hold and UTF-8 may not
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def check_columns(columns, names, hint=""):
    """Return names, a list or an object; raise ValueError if a column is not in them, or twice."""
    for column in columns:
        if list(names).count(column) > 1:
            raise ValueError(f"two columns are named {column!r}: rename one")
        if column in names:
            continue
        for name, part in names.items() if isinstance(names, dict) else ():
            if isinstance(part, list) and part and isinstance(part[0], dict) and column in part[0]:
                hint = f", or jq -c '.[{json.dumps(name)}][]' OLD > NEW.jsonl"
        have = " ".join(", ".join(map(str, names)).split())[:300]
        option = "--text_column=NAME" + " or --label_column=NAME" * (len(columns) > 1)
        raise ValueError(f"no column {column!r}, it has {have}: type {option}{hint}")
    return names
