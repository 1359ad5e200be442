"""Texts out of files: .txt, .log, .jsonl, .json, .csv, .tsv (each also .gz or .zst) and .parquet.

A file of the Hub is streamed in blocks as if it lay here.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
from pathlib import Path

from nanocram.safety import say_once

HUB = "hf://"  # how the address of a Hub file begins
BLOCK = 16 << 20  # bytes of a Hub file in one request; the next one comes while one is read
CELL = 1 << 24  # characters of a cell at most; a longer one is a quote that nothing closes
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size

# what makes a .csv of RFC 4180 of a table with other quotes; backslashes before no quote stay
LINES = 'open(0, encoding="utf-8-sig", newline="")'
ESCAPED_LINES = rf'(re.sub(r"(\\+)(?![\\\"])", r"\1\1", line) for line in {LINES})'
ROWS = "csv.reader({}, strict=True, delimiter={})"
SCRIPT = f"import csv, re, sys; csv.writer(sys.stdout).writerows({ROWS})"
AS_CSV = f"type python -c '{SCRIPT}' < OLD > NEW.csv"


def file_kind(path):
    """text, json, csv, tsv or parquet, by a file's name; None for all others."""
    kind = os.path.splitext(re.sub(r"\.(gz|zst)$", "", path.lower()))[1][1:]
    kind = {"txt": "text", "log": "text", "jsonl": "json"}.get(kind, kind)
    is_read = kind in ("text", "json", "csv", "tsv") or path.lower().endswith(".parquet")
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
    """What to type to read the files of a folder."""
    some = itertools.islice(Path(folder).rglob("*"), 10000)
    paths = sorted(some, key=lambda path: ("train" not in path.parts, path))
    saved = next((path.parent for path in paths if path.suffix == ".arrow"), None)
    if saved:  # by the datasets library
        table = f'datasets.load_from_disk("{saved}").to_parquet("{saved}.parquet")'
        return f"type python -c 'import datasets; {table}', and name the new file"
    found = next((path for path in paths if file_kind(path.name)), Path(folder, "a.txt"))
    return f"name its files, as in '{found.with_stem('*')}'"


def open_bytes(path):
    """A file here or on the Hub, to read and to seek in."""
    if not path.startswith(HUB):
        return open(path, "rb")
    ahead = {"cache_type": "background", "cache_options": {"maxblocks": 4}}
    return hub().open(path, "rb", block_size=BLOCK, **ahead)


def read_texts(file, path, column, by_line=False):
    """The documents of an open file, each a str; "" for a record without text.

    Raises ValueError with the line where it is broken, or whatever a reader raises."""
    if file_kind(path) == "text":
        return filter(str.strip, split_documents(open_text(file, path), by_line))
    rows = read_rows(file, path, dict.fromkeys(column.split(","), str))
    return (" ".join(filter(None, cells)) for cells in rows)


def read_rows(file, path, types):
    """Yield the values of each record of an open file, by {column: types that it may have}."""
    readers = {"csv": table_rows, "tsv": table_rows, "json": json_rows, "parquet": parquet_rows}
    if file_kind(path) not in readers:
        kinds = ".csv (in Excel: CSV UTF-8), .tsv, .jsonl, .json or .parquet"
        raise ValueError(f"it has no columns: make it a {kinds}")
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
    new = f"OLD > NEW{os.path.splitext(re.sub('.(gz|zst)$', '', path.lower()))[1]}"
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in begin:
        advice = f"iconv -f UTF-16 -t UTF-8 {new}, with no BOM -f UTF-16LE"
        raise ValueError(f"it looks like UTF-16: type {advice}")
    is_table = file_kind(path) in ("csv", "tsv")
    if is_table and b"\r" in begin and b"\n" not in begin:
        raise ValueError(f"its lines end in a bare CR: type tr '\\r' '\\n' < {new}")
    newline = "\n" if is_table else ""  # a row may hold a lone \r
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=newline)


def split_documents(file, by_line=False):
    """Yield documents: one ends at a blank line, or at each line if by_line, or at MAX_DOCUMENT
    characters. Some may be blank."""
    document, size = [], 0
    while line := file.readline(MAX_DOCUMENT):
        document.append(line)
        size += len(line)
        if by_line or not line.strip() or size >= MAX_DOCUMENT:
            yield "".join(document)
            document, size = [], 0
    yield "".join(document)


def json_rows(file, path, types):
    """Rows of the objects in the lines of a file, or in the one list that it is."""
    file = open_text(file, path)
    first = file.readline()
    is_list = first.lstrip().startswith("[")
    parts = json.loads(first + file.read()) if is_list else itertools.chain([first], file)
    names = None
    for number, record in enumerate(parts, 1):
        try:
            if not is_list:
                if not record.strip():
                    continue
                record = read_object(record, file, types)
            if not isinstance(record, dict):
                raise ValueError(f"{json.dumps(record):.40} is no object: take it out")
            names = names or check_columns(types, record)
            yield [check_type(record.get(name), name, types[name]) for name in types]
        except ValueError as e:  # of a JSONDecodeError its msg, without a line within the line
            where = f"record {number}" if is_list else f"line {number}"
            where += f", column {e.colno} is no whole object" if hasattr(e, "colno") else ""
            raise ValueError(f"{where}: {getattr(e, 'msg', e)}") from None


def read_object(line, file, types):
    """The value of a line. Raises ValueError, with what helps if it goes on in the next ones."""
    try:
        return json.loads(line)
    except ValueError:
        text, value, end = (line + file.read(1 << 26)).strip(), None, 0
        with contextlib.suppress(ValueError):
            value, end = json.JSONDecoder().raw_decode(text)
        if isinstance(value, dict) and "\n" in text[:end]:
            check_columns(types, value)
            raise ValueError("an object of several lines: type jq -c . OLD > NEW.jsonl") from None
        raise


def table_rows(file, path, types):
    """Rows of a table. A .csv is as RFC 4180 has it; in a .tsv a line is a row, a quote is text."""
    file, is_csv = open_text(file, path), file_kind(path) == "csv"
    header, above, delimiter = file.readline(), 0, "\t"
    if is_csv:
        bare = re.sub('"[^"]*"', "", header)
        delimiter = next((sign for sign in ",;\t|" if sign in bare), ",")
        if of_excel := re.fullmatch(r'"?sep=(.)"?\s*', header, re.IGNORECASE):
            delimiter, header, above = of_excel[1], file.readline(), 1
        if delimiter != ",":
            say_once(f"{path}: its cells are separated by {delimiter!r}, as in its header")
    sign = re.escape(delimiter)
    escaped = re.compile(rf'\\"[^"{sign}\r\n]')
    late_quote = re.compile(rf'(^|{sign}) +"[^"{sign}\r\n]')
    # the begin or the end of a quoted cell with a line break; quotes within are doubled
    torn = re.compile(r'[^"\t]*(""[^"\t]*)*"(\t|$)|(.*\t)?"[^"\t]*(""[^"\t]*)*$')
    if_quoted = f"if its cells are quoted, {AS_CSV.format(LINES, json.dumps(delimiter))}"
    escapes = rf'{json.dumps(delimiter)}, escapechar="\\", doublequote=False'
    if_escaped = f'if \\" stands for a quote, {AS_CSV.format(ESCAPED_LINES, escapes)}'

    def check_quotes(line):
        if is_csv and ' "' in line and late_quote.search(line):
            raise csv.Error("a space stands before a quote")
        if '\\"' in line and escaped.search(line):
            say_once(f'{path}: \\" stays as it is; {if_escaped}')
        cells = [] if is_csv or '"' not in line else line.strip().split("\t")
        quoted = [cell[1:-1] for cell in cells if len(cell) > 1 and cell[0] == cell[-1] == '"']
        if len(cells) == len(quoted) > 1 or any('""' in cell for cell in quoted):
            say_once(f"{path}: quotes around cells stay as they are; {if_quoted}")
        return line

    csv.field_size_limit(CELL)
    lines = map(check_quotes, itertools.chain([header], file))
    by_tabs = (line.rstrip("\r\n").split("\t") for line in lines)
    rows = csv.reader(lines, delimiter=delimiter, strict=True) if is_csv else by_tabs
    names, begin = None, above + 1  # the line where the row begins
    try:
        for cells in rows:
            if not any(cells):
                pass  # a blank line
            elif names is None:
                names = [name.strip() for name in cells]
                advice = "if the first line is no header, put one above it"
                advice = if_quoted if not is_csv and header.startswith('"') else advice
                check_columns(types, names, f"; {advice}")
                places = [names.index(column) for column in types]
                n_named = max(i for i, name in enumerate(names, 1) if name)
            elif len(cells) > len(names) or any(cells[n_named:]):
                raise csv.Error(f"it has {len(cells)} cells, and the header {n_named}")
            elif not is_csv and len(cells) < len(names) and torn.match("\t".join(cells)):
                raise csv.Error("a .tsv has no quoted cells")
            else:
                yield [cells[i] if i < len(cells) else None for i in places]
            begin = above + rows.line_num + 1 if is_csv else begin + 1
    except csv.Error as e:
        rule = f"quote a cell that has {delimiter!r}, a quote or a line break; double its quotes"
        if "field limit" in str(e):
            e, rule = f"a cell has more than {CELL:,} characters", "close its quote, or use .jsonl"
        if "new-line character" in str(e):
            e, rule = "a bare CR stands in it", "type tr '\\r' '\\n' < OLD > NEW.csv"
        if "expected after" in str(e):
            rule = f"double a cell's quotes; {if_escaped}"
        raise ValueError(f"line {begin}: {e}: {rule if is_csv else if_quoted}") from None


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
    """Raise ValueError where a column is not in names, which may be an object with a list of those
    that are meant, or is there twice. Returns names."""
    for column in columns:
        if column not in names:
            for name, part in names.items() if isinstance(names, dict) else ():
                first = part[0] if isinstance(part, list) and part else None
                if isinstance(first, dict) and column in first:
                    path = f".{name}[]" if name.isidentifier() else f".[{json.dumps(name)}][]"
                    hint = f", or jq -c '{path}' OLD > NEW.jsonl"
            have = " ".join(", ".join(map(str, names)).split())[:300]
            option = "--text_column=NAME" + " or --label_column=NAME" * (len(columns) > 1)
            raise ValueError(f"no column {column!r}, it has {have}: type {option}{hint}")
        if list(names).count(column) > 1:
            raise ValueError(f"two columns are named {column!r}: rename one")
    return names
