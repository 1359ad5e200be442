"""Texts out of files: .txt, .log, .jsonl, .json, .csv, .tsv (also .gz or .zst), .parquet."""

import codecs
import csv
import gzip
import io
import itertools
import json
import re
from pathlib import Path

from nanocram.safety import say_once

CELL = 1 << 24  # characters of a cell at most; a longer one is a quote that nothing closes
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size
NOT_UTF8 = set()  # paths of the files with such bytes, of those that were read
# the first bytes of files that are no text, whatever their names: what they are, what to type
SIGNS = {
    rb"version https://git-lfs": "a pointer of git LFS: type git lfs pull",
    rb"\x1f\x8b": "gzip: type gzip -dc < OLD > NEW",
    rb"PK\x03\x04": "a zip archive or an Excel file: unzip it, or save it as CSV UTF-8",
    rb".{257}ustar(\0|  \0)": "a tar archive: type tar -xf OLD",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32: type iconv -f UTF-32 -t UTF-8 OLD > NEW",
    rb"\xff\xfe|\xfe\xff": "UTF-16: type iconv -f UTF-16 -t UTF-8 OLD > NEW",
}


def file_kind(path):
    """text, json, csv, tsv or parquet, by a file's name; None for all others."""
    end = re.search(r"\.(txt|log|jsonl?|csv|tsv)(\.gz|\.zst)?$|\.(parquet)$", path.lower())
    kind = end and (end[1] or end[3])
    return {"txt": "text", "log": "text", "jsonl": "json"}.get(kind, kind)


def files_in(folder):
    """What to type to read the files of a folder, or what the datasets library saved in it."""
    if any(Path(folder).glob("*.arrow")) or any(Path(folder).glob("*/*.arrow")):
        return "in Python type datasets.load_from_disk('its split').to_parquet('new.parquet')"
    names = (path.name for path in Path(folder).rglob("*") if file_kind(path.name))
    ending = Path(next(names, "a.txt")).suffix
    return f"name its files, as in '{Path(folder, '**', '*' + ending)}'"


def read_texts(file, path, column, by_line=False):
    """The documents of an open file; '' for a record without text. A ValueError names the line."""
    if file_kind(path) == "text":
        return filter(str.strip, split_documents(open_text(file, path), by_line))
    rows = read_rows(file, path, dict.fromkeys(column.split(","), str))
    return (" ".join(filter(None, cells)) for cells, _ in rows)


def read_rows(file, path, types, whole=False):
    """Yield ([the value of each column], the record as a dict) of an open file, by {column: types
    that it may have}. Of parquet only these columns are read unless the record is to be whole."""
    readers = {"csv": table_rows, "tsv": table_rows, "json": json_rows, "parquet": parquet_rows}
    for place, record in readers[file_kind(path)](file, path, types, whole):
        yield [check_type(record.get(name), name, types[name], place) for name in types], record


def check_begin(begin, expected=None):
    """Raise a ValueError if a file's first bytes are those of a kind that is not expected."""
    for sign, kind in SIGNS.items():
        if sign != expected and re.match(sign, begin, re.DOTALL):
            raise ValueError(f"it is {kind}")


def check_text(begin):
    """Raise a ValueError if a file's first bytes, those of UTF-8 with NULs apart, are no text's."""
    check_begin(begin)
    for i, name in enumerate(("UTF-16BE", "UTF-16LE")):
        high = begin[i::2]  # of UTF-16 these bytes are 0, and those of other scripts but Chinese
        if b"\0" in high and sum(byte <= 32 for byte in high) > 0.9 * len(high):
            raise ValueError(f"it is {name}: type iconv -f {name} -t UTF-8 OLD > NEW")
    n_lost = begin.decode("utf-8", "replace").count("\ufffd") - begin.count("\ufffd".encode())
    if b"\0" in begin and n_lost > len(begin) / 50:
        raise ValueError("it is no text, whatever its name says")


def open_text(file, path):
    """The characters of an open file; every end of a line stays as it is, and bytes that are not
    UTF-8 become U+FFFD. Raises a ValueError if it is no text."""
    if path.lower().endswith((".gz", ".zst")):
        check_begin(file.read(512), rb"\x1f\x8b" * path.lower().endswith(".gz"))
        file.seek(0)
    if path.lower().endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    if path.lower().endswith(".zst"):
        import pyarrow

        file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    file = io.BufferedReader(file, 1 << 20)
    check_text(file.peek())

    def replace(error):
        say_once(f"WARNING: {path} has bytes that are not UTF-8, and become U+FFFD")
        NOT_UTF8.add(path)
        codecs.register_error("replace and say", codecs.replace_errors)  # faster
        return codecs.replace_errors(error)

    NOT_UTF8.discard(path)
    codecs.register_error("replace and say", replace)  # for the file that was opened last
    newline = "\n" if file_kind(path) in ("csv", "tsv") else ""  # a row may hold a lone \r
    return io.TextIOWrapper(file, "utf-8-sig", "replace and say", newline)


def split_documents(file, by_line=False):
    """Yield documents, some blank; they end at blank lines, or at all lines, or at MAX_DOCUMENT."""
    document = ""
    while line := file.readline(MAX_DOCUMENT):
        document += line
        if by_line or not line.strip() or len(document) >= MAX_DOCUMENT:
            yield document
            document = ""
    yield document


def json_rows(file, path, types, _):
    """The objects in the lines of a file, or in the one list that it is, each with its place."""
    file = open_text(file, path)
    first = file.readline()
    is_list = first.lstrip().startswith("[")
    parts = [first + file.read()] if is_list else itertools.chain([first], file)
    names = None
    for line, part in enumerate(parts, 1):
        if not part or part.isspace():
            continue
        try:
            found = json.loads(part.rstrip())
        except json.JSONDecodeError as e:
            why = f"line {line + e.lineno - 1}, column {e.colno} is no whole object: {e.msg}"
            goes_on = "; if it goes on in the next line, type jq -c . OLD > NEW.jsonl"
            hint = goes_on * (e.pos == len(e.doc)) or "; docs/own_text.md has other formats"
            raise ValueError(why + hint) from None
        for number, record in enumerate(found if is_list else [found], 1):
            place = f"record {number}" if is_list else f"line {line}"
            if not isinstance(record, dict):
                raise ValueError(f"{place}: {json.dumps(record):.40} is no object: take it out")
            names = names or check_columns(types, record)
            yield place, record


def table_rows(file, path, types, whole):
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
    names, begin, n_wide = None, 1, 0  # the line where the row begins
    try:
        for cells in rows:
            is_row = any(cells) or (whole and names and len(cells) > is_tsv)
            if not is_row or (not names and cells[0][:4].lower() == "sep="):
                pass  # a blank line, or Excel's first one
            elif not names:
                names = [*map(str.strip, cells)]
                hint = rule if '"' in "".join(names) else "line 1 is to be the header"
                width = max(i for i, name in enumerate(names, 1) if name)
                check_columns([*types, *names[: width * whole]], names, f"; {hint}")
            elif (more := "".join(cells[width:]).strip()) or (is_tsv and len(cells) < width):
                what = f", none for {more!r:.40}" * bool(more)
                raise csv.Error(f"it has {len(cells)} cells, and the header {width}{what}")
            else:
                if any(map(quoted_cell.match, cells)):
                    say_once(f"{path}: some quotes around cells stay as they are: {rule}")
                n_wide += len(cells) > len(names)
                yield f"line {begin}", dict(zip(names[:width], cells, strict=False))
            begin = begin + 1 if is_tsv else rows.line_num + 1
        if n_wide:
            say_once(f"{path}: blank cells beyond the header are left out, of {n_wide} rows")
    except csv.Error as e:
        plain = {"new-line": "a bare CR stands in it", "end of data": "its quote is never closed"}
        why = next((words for part, words in plain.items() if part in str(e)), e)
        raise ValueError(f"line {begin}: {why}: {rule}") from None


def parquet_rows(file, _, types, whole):
    """pre_buffer=False: else Arrow fetches groups of rows, with all columns, ahead: several GB."""
    import pyarrow.parquet

    check_begin(file.read(512))
    file.seek(0)
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    names = table.schema_arrow.names
    check_columns([*types, *(names if whole else ())], names)
    batches = table.iter_batches(256, columns=None if whole else [*types], use_threads=False)
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def check_type(value, column, types, place):
    if not isinstance(value, types | None):
        what = "text" if types is str else "label"
        advice = f"type --{what}_column=NAME, or make it a string or null"
        raise ValueError(f"{place}: {column!r} is {value!r:.40}, no {what}: {advice}")
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
            one = part and isinstance(part, list) and part[0]
            if isinstance(one, dict) and one.keys() >= {*columns}:
                hint = f", or jq -c '.[{json.dumps(name)}][]' OLD > NEW.jsonl"
        have = " ".join(", ".join(map(str, names)).split())[:300]
        option = "--text_column=NAME" + " or --label_column=NAME" * (len(columns) > 1)
        raise ValueError(f"no column {column!r}, it has {have}: type {option}{hint}")
    return names
