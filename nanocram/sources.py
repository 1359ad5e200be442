"""Texts out of files, from any place on: .txt, .jsonl, .csv, .parquet, here or on the Hub.

A file of the Hub is read in blocks. A few connections fetch the next ones meanwhile, and each block
is asked for again until it comes, for an hour: whoever reads sees a slow file, never a broken line.
"""

import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
import threading
import time
from concurrent.futures import Future

from nanocram import safety

KINDS = {".parquet": "parquet"}
for packed in ("", ".gz", ".zst"):
    KINDS |= {".txt" + packed: "text", ".log" + packed: "text"}
    KINDS |= {".jsonl" + packed: "json", ".json" + packed: "json"}
    KINDS |= {".csv" + packed: "csv", ".tsv" + packed: "tsv"}
HUB = "hf://"  # how the address of a file of the Hub begins
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size
LONGEST_CELL = 1 << 24  # characters; what is longer is a quote that nothing closes
# Each block is two requests; the Hub allows an address a few thousand in five minutes.
BLOCK = 8 << 20  # bytes
AHEAD = 4  # blocks that are fetched while one is read
PATIENCE = 3600.0  # seconds of silence after which a line is given up
LONGEST_PAUSE = 60.0  # seconds between two tries; the first is one


def file_kind(path):
    """text, json, csv, tsv or parquet, by the name of a file; None for all others."""
    return next((kind for ending, kind in KINDS.items() if path.lower().endswith(ending)), None)


def hub_name(name):
    """(data set, config or None) of a Hub source, NAME or NAME:CONFIG."""
    name, _, config = name.partition(":")
    return name, config or None


# The Hub: which files a data set has, a file in blocks, patience


class Silence(Exception):
    """The Hub gave no answer for PATIENCE seconds."""


last_told = -LONGEST_PAUSE  # when patiently() last said that it waits


def is_passing(error):
    """Whether an error of the Hub's libraries may be gone in a while: no answer, or a busy one."""
    causes = []  # datasets wraps what the line said
    while error:
        causes.append(error)
        error = error.__cause__ or error.__context__
    is_offline = any("OfflineModeIsEnabled" in repr(cause) for cause in causes)
    return not is_offline and any(map(is_of_the_line, causes))


def is_of_the_line(error):
    """Whether one error, without what caused it, is about a connection or a busy server."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status:
        return status in (408, 429) or status >= 500
    # Another thread may close the session they share, where a connection has failed.
    is_closed = isinstance(error, RuntimeError) and "closed" in str(error)
    is_lost = isinstance(error, ConnectionError | TimeoutError)
    return is_closed or is_lost or type(error).__module__.startswith(("http", "requests"))


def patiently(ask):
    """What ask() returns. As long as the Hub cannot answer it is called again, with growing pauses.

    One line a minute says so. Raises Silence after PATIENCE seconds, any other error at once."""
    from tqdm import tqdm

    global last_told
    begin = time.monotonic()
    pause = 1.0
    while True:
        try:
            return ask()
        except Exception as error:
            if not is_passing(error):
                raise
            why = f"{type(error).__name__}: {safety.first_line(error, 100)}"
            now = time.monotonic()
            left = begin + PATIENCE - now
            if left <= 0:
                silent = f"no answer from the Hub for {PATIENCE / 60:.0f} minutes ({why})"
                raise Silence(silent) from error
            if now - last_told >= LONGEST_PAUSE:
                last_told = now
                tried = f"it is asked again for another {left / 60:.0f} minutes"
                tqdm.write(f"no answer from the Hub, is there a network? {tried} ({why})")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def explain(error):
    """What went wrong with a source, in one line, and what helps."""
    kind = type(error).__name__
    said = " ".join(str(error).split())[:300]
    why = f"{kind}: {said}"
    if "OfflineModeIsEnabled" in why:
        return f"{why}: unset HF_HUB_OFFLINE, or give files of your own"
    if "gated" in why.lower() or "restricted" in why:
        return f"{why}: accept its terms on its page at the Hub, then type: hf auth login"
    if "NotFound" in kind or "doesn't exist" in said:
        return f"{why}: check the name; for a private one type: hf auth login"
    if "Config name is missing" in said or "BuilderConfig" in said:
        return f"{why}: name one as NAME:CONFIG"
    return why


def in_background(function, *args):
    """A Future of function(*args), called in a thread that does not keep a process from ending."""
    future = Future()

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@functools.cache
def hub():
    """The Hub as a file system; one for all threads, for it remembers what it has looked up."""
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # what it would say, patiently() says
    return HfFileSystem()


def hub_files(name):
    """Addresses of the files of a Hub data set, NAME or NAME:CONFIG, at its revision of now.

    Raises ValueError where it has no training split, or files of a kind that is not read."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    hub()
    path, config = hub_name(name)
    builder = patiently(lambda: datasets.load_dataset_builder(path, config))
    splits = dict(builder.config.data_files or {})
    if "train" not in splits:
        raise ValueError(f"it has no split 'train', but {', '.join(map(str, splits)) or 'none'}")
    files = [str(file) for file in splits["train"]]
    unknown = [file for file in files if not file_kind(file)]
    if unknown:
        known = "only .parquet, .jsonl, .json, .csv, .tsv and .txt, also as .gz and .zst, are"
        raise ValueError(f"{os.path.basename(unknown[0])} cannot be read, {known}")
    return files


class HubFile(io.RawIOBase):
    """A file of the Hub to read and seek in; its first and its last block are fetched at once."""

    waited = 0.0  # seconds in which a reader had to wait for blocks of any file

    def __init__(self, address):
        super().__init__()
        self.address = address
        self.at = 0
        self.blocks = {}  # {number: Future of its bytes}
        self.opened = in_background(self.look_up)

    def look_up(self):
        """The size in bytes. Begins to fetch where readers do: an index of parquet comes last."""
        size = patiently(lambda: hub().info(self.address)["size"])
        for number in {0, max(0, size - 1) // BLOCK}:
            self.blocks[number] = in_background(self.fetch, number, size)
        return size

    def fetch(self, number, size):
        """The bytes of a block of the file."""
        start = number * BLOCK
        length = min(BLOCK, size - start)

        def ask():
            with hub().open(self.address, "rb", cache_type="none") as file:
                file.seek(start)
                found = file.read(length)
            if len(found) < length:
                raise ConnectionError(f"{len(found)} bytes came of {length}")
            return found

        return patiently(ask) if length > 0 else b""

    @property
    def size(self):
        return self.result_of(self.opened)

    @staticmethod
    def result_of(future):
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            HubFile.waited += time.perf_counter() - start

    def block(self, number):
        """The bytes of a block; who comes from the one before gets the next ones fetched, too."""
        wanted = [number]
        if number - 1 in self.blocks:
            last = (self.size - 1) // BLOCK
            wanted = range(number, min(number + AHEAD, last) + 1)
        for i in wanted:
            if i not in self.blocks:
                self.blocks[i] = in_background(self.fetch, i, self.size)
        found = self.result_of(self.blocks[number])
        for i in list(self.blocks):
            if not number - 1 <= i <= number + AHEAD:
                del self.blocks[i]
        return found

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=os.SEEK_SET):
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = base + offset
        return self.at

    def readinto(self, buffer):
        """At most the rest of a block: io.BufferedReader asks again for what is missing."""
        if self.at >= self.size:
            return 0
        number, offset = divmod(self.at, BLOCK)
        part = memoryview(self.block(number))[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


opened_ahead = {}  # {address: HubFile}


def open_ahead(path):
    """Begin to fetch a file of the Hub that will be read next."""
    if path.startswith(HUB):
        opened_ahead[path] = HubFile(path)


def open_bytes(path):
    """(file object, size) of a local file or one of the Hub."""
    if not path.startswith(HUB):
        return open(path, "rb"), os.path.getsize(path)
    file = opened_ahead.pop(path, None) or HubFile(path)
    return io.BufferedReader(file, 1 << 20), file.size


# The texts of a file


def read_texts(path, column, start=0, by_line=False):
    """(text or None, share of the file that was read) of its documents from number start on.

    Those of a text file end at blank lines or, by_line, with each line."""
    kind = file_kind(path)
    if kind == "parquet" and not path.startswith(HUB):
        yield from parquet_texts(path, column, start)
        return
    file, size = open_bytes(path)
    with file:
        if kind == "parquet":
            yield from parquet_texts(file, column, start)
            return
        content = unpacked(path, file)
        if kind == "json":
            texts = json_texts(content, column)
        elif kind in ("csv", "tsv"):
            texts = table_texts(as_text(content), column, kind)
        else:
            texts = split_documents(as_text(content), by_line)
        for text in itertools.islice(texts, start, None):
            yield text, file.tell() / max(1, size)


def unpacked(path, file):
    """The open bytes of a file as they are once they are unpacked, by its name."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20)
    if path.lower().endswith(".zst"):
        import pyarrow

        packed = pyarrow.PythonFile(file, mode="r")
        return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"), 1 << 20)
    return file


def as_text(file):
    """An open file as text, whatever its line ends; what is no UTF-8 becomes U+FFFD."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")


def refuse_utf16(begin):
    """Raise OSError for a line that begins as a file in UTF-16 does."""
    if begin.startswith("\ufffd\ufffd") and "\0" in begin:  # its first two bytes are no UTF-8
        raise OSError("it is UTF-16: iconv -f UTF-16 -t UTF-8 makes it text")


def split_documents(file, by_line=False):
    """The documents of an open text file.

    One ends at a blank line or, by_line, at each line, or with the line by which it has
    MAX_DOCUMENT characters. A longer line, which may be the whole file, is cut there."""
    document, size = [], 0
    for line in iter(functools.partial(file.readline, MAX_DOCUMENT), ""):
        refuse_utf16(line)
        document.append(line)
        size += len(line)
        if by_line or not line.strip() or size >= MAX_DOCUMENT:
            yield "".join(document)
            document, size = [], 0
    if document:
        yield "".join(document)


def json_records(file):
    """The objects in the lines of an open file, or in the one list that it is."""
    begin = file.peek(1 << 10).decode("utf-8-sig", "replace")
    refuse_utf16(begin)
    if begin.lstrip().startswith("["):
        yield from json.loads(file.read().decode("utf-8-sig", "replace"))
        return
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig", "replace"))
        except json.JSONDecodeError as e:
            raise ValueError(f"line {number}, column {e.colno}: {e.msg}") from None
        yield record


def json_texts(file, column):
    """What column holds in the objects of an open file of JSON."""
    for number, record in enumerate(json_records(file)):
        if not isinstance(record, dict):
            raise ValueError(f"{record!r:.40} is no object with columns")
        if number == 0:
            check_column(column, record)
        text = checked(record.get(column), column)
        if text:
            # Half an emoji, as scraped JSON has it: a lone surrogate, which no UTF-8 can hold.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield text


def table_texts(file, column, kind):
    """What column holds in the rows of an open table, whose first line names the columns.

    In a csv a cell may stand in quotes, with commas and line breaks; in a tsv a quote is text."""
    csv.field_size_limit(LONGEST_CELL)
    comma = {"delimiter": ",", "strict": True}  # or else a wrong quote would take what follows
    tab = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    rows = csv.DictReader(file, **(comma if kind == "csv" else tab))
    names = rows.fieldnames or [""]
    refuse_utf16(names[0])
    if kind == "csv" and len(names) == 1 and re.search("[;\t]", names[0]):
        raise ValueError(f"its first line has no commas ({names[0]:.60}): write it with commas")
    check_column(column, names)
    try:
        for row in rows:
            yield row[column]
    except csv.Error as e:
        raise ValueError(f"line {rows.line_num + 1}: {e}") from None  # where its row begins


def parquet_texts(file, column, start):
    """(text or None, share of the rows) of a column from row start on; groups before are not read.

    pre_buffer=False: else Arrow fetches groups of rows, with all columns, ahead: several GB."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    check_column(column, table.schema_arrow.names)
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    ends = list(itertools.accumulate(sizes))
    groups = [i for i, end in enumerate(ends) if end > start]
    if not groups:
        return
    first = groups[0]
    row = ends[first] - sizes[first]  # the rows before it
    options = {"columns": [column], "use_threads": False}
    for batch in table.iter_batches(256, row_groups=groups, **options):
        for text in batch.column(0).to_pylist():
            row += 1
            if row > start:
                yield checked(text, column), row / ends[-1]


def checked(text, column):
    """text, a str or None; ValueError where a column holds something else."""
    if not isinstance(text, str | None):
        found = f"{column!r} holds {text!r:.40}, which is no text"
        raise ValueError(f"{found}: type --text_column=NAME")
    return text


def check_column(column, names):
    if column not in names:
        have = ", ".join(names)
        raise ValueError(f"no column {column!r}, it has {have}: type --text_column=NAME")
