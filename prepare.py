"""Raw text to a tokenizer and rows of tokens: data_dir gets tokenizer.json, train.bin, val.bin and, last, meta.json.

    python prepare.py                                                       # FineWeb-Edu, for the day-long run
    python prepare.py --source='texts/*.txt.gz' --data_dir=data/mine        # your own: .txt(.gz) .jsonl(.gz) .parquet
    python prepare.py config/tiny.py                                        # the embedded corpus, in seconds

A text file is cut into documents at blank lines. Everything is written into DATA_DIR.partial, which becomes data_dir
in one rename at the end: a killed run leaves nothing that looks finished, and running again starts over.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanocram import safety
from nanocram.configurator import configure, require, settings
from nanocram.safety import Lock, beside, write_beside
from nanocram.tokenizer import CLS, MASK, SEP, Tokenizer, normalise, train_tokenizer

# what to read
data_dir = "data/fineweb_edu"  # the folder to write
source = "HuggingFaceFW/fineweb-edu"  # a glob of local files, or the name of a Hub data set
source_config = "sample-10BT"  # which configuration of the Hub data set; '' = its only one
text_column = "text"  # where .jsonl, .parquet and Hub data sets keep the text
max_docs = 0  # stop after reading this many documents; 0 = all
max_tokens = 0  # stop after this many tokens, counted before the filter; 0 = all
# text to tokens
normalisation = "ascii"  # ascii: lower case, no accents, as the paper | plain: any script, cased
vocab_size = 32768  # entries of the byte-level BPE vocabulary, 4 special tokens included
vocab_sample_mb = 100  # MB of text, taken evenly from all files, that the vocabulary is trained on
# tokens to rows
seq_len = 128  # tokens in a row, the leading [CLS] included
filter_ratio = 0.25  # keep a document if tokens < ratio x characters (paper 4.4); 0 = keep all
dedup = False  # drop exact copies of earlier documents
order = "shuffle"  # shuffle | curriculum: rows with most sentence ends first (paper 4.4)
val_share = 0.01  # share of documents held out for val.bin, chosen by a hash of their text
val_tokens = 1000000  # at most this many tokens are held out; later candidates go to train.bin
threads = 0  # tokenizer threads, 0 = one per core; the result does not depend on it

if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a typo are answered at once
    configure(globals())

KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
MAX_DOCUMENT = (
    1 << 20
)  # characters; a text file without blank lines is cut, or it would have to fit into memory
BUCKETS = 128  # files that rows are spread over before they are put in order: memory stays at 1/128 of the data
OURS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "train.bin",
    "val.bin",
    "meta.json",
    "*.tmp",
    "bucket-*",
)


def source_files(pattern):
    """The local files that pattern names, sorted; [] if it names a Hub data set instead."""
    files = sorted(f for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))
    kinds = [file_kind(f) for f in files]
    if None in kinds:
        sys.exit(
            f"{files[kinds.index(None)]} is of no known kind: rename it to .txt or .jsonl (.gz), or .parquet"
        )
    if not files and (
        file_kind(pattern) or any(c in pattern for c in "*?[") or os.path.isdir(pattern)
    ):
        sys.exit(
            f'no file matches source={pattern}: give a glob in quotes, like --source="texts/*.txt"'
        )
    return files


def file_kind(path):
    return KINDS.get(os.path.splitext(path.removesuffix(".gz"))[1])


def open_stream(path):
    """The texts of one local file (of a .txt its lines) or, where path is '', of the Hub data set, one by one."""
    import datasets

    datasets.logging.set_verbosity(
        datasets.logging.CRITICAL
    )  # what it would say of a broken file we say at the end
    kind, column = file_kind(path), "text" if file_kind(path) == "text" else text_column
    if path:
        options = {"encoding_errors": "replace"} if kind == "text" else {}
        stream = datasets.load_dataset(
            kind, data_files=[path], split="train", streaming=True, **options
        )
    else:
        stream = datasets.load_dataset(source, source_config or None, split="train", streaming=True)
    for table in stream.with_format("arrow").iter(batch_size=256):
        if column not in table.column_names:
            have = ", ".join(table.column_names)
            raise ValueError(f"no column {column!r}, it has {have}: type --text_column=NAME")
        yield from (text or "" for text in table[column].to_pylist())


def join_lines(lines):
    """Documents from the lines of a text file: blank lines end them, and so does MAX_DOCUMENT."""
    document, size = [], 0
    for line in lines:
        document.append(line)
        size += len(line)
        if not line.strip() or size > MAX_DOCUMENT:
            yield "\n".join(document)
            document, size = [], 0
    yield "\n".join(document)


def documents(paths, errors, limit=0):
    """Lists of documents of about 1 MB from every path in turn; limit > 0 takes that many characters from each.

    A file that cannot be read, or not to its end, is noted in errors ({path: why}), and the next one follows.
    """
    for path in paths:
        batch, size, taken = [], 0, 0
        try:
            texts = open_stream(path)
            for text in map(str.strip, join_lines(texts) if file_kind(path) == "text" else texts):
                if text:
                    batch.append(text)
                    size += len(text)
                if size >= 1 << 20:
                    yield batch
                    batch, size, taken = [], 0, taken + size
                if limit and taken + size >= limit:
                    break
        except Exception as e:  # whatever the readers of gzip, JSON, parquet or the Hub raise
            errors[path or source] = (
                f"{type(e).__name__}: {(str(e) or 'no reason given').splitlines()[0]:.200}"
            )
        yield batch


def text_hash(text):
    """64 bits that stand for a document: they decide what is held out, and find exact copies."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little"
    )


def is_candidate(h):
    """Whether a document of hash h may be held out; it is never used to train the vocabulary."""
    return h < val_share * 2**64


class SeenHashes:
    """A set of 64-bit hashes at 8 bytes each, 16 while it grows: sorted arrays that merge as they get equal."""

    def __init__(self):
        self.arrays = []

    def add(self, hashes):
        """Put hashes (n,) uint64 in; which of them were not there before, (n,) bool, first occurrences only."""
        new = np.zeros(len(hashes), dtype=bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        for array in self.arrays:
            i = np.searchsorted(array, hashes)
            new &= array[np.minimum(i, len(array) - 1)] != hashes
        merged = np.sort(hashes[new])
        while self.arrays and len(merged) and len(self.arrays[-1]) <= 2 * len(merged):
            merged = np.concatenate((self.arrays.pop(), merged))
            merged.sort()
        self.arrays += [merged] if len(merged) else []
        return new


def encode_all(batches, tokenizer, n_threads):
    """For each batch of documents, in order: [(hash, characters, ids with a [SEP] at the end)], made by threads."""

    def encode(batch):
        out = []
        for text in batch:
            plain = normalise(text, tokenizer.mode)
            ids = tokenizer.encoding.encode_to_numpy(plain, disallowed_special=())
            out.append((text_hash(text), len(plain), np.append(ids, SEP).astype(np.uint16)))
        return out

    waiting, pool = deque(), ThreadPoolExecutor(n_threads)  # tiktoken works outside the GIL
    try:
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * n_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def pack(tokens, length):
    """Rows (n, length) of [CLS] and length − 1 tokens each, cut from tokens (m,), and what is left over (r,)."""
    n = len(tokens) // (length - 1)
    rows = np.full((n, length), CLS, dtype=np.uint16)
    rows[:, 1:] = tokens[: n * (length - 1)].reshape(n, length - 1)
    return rows, tokens[n * (length - 1) :]


def spread(rows, folder, rng, is_end):
    """Append rows to the bucket files: at random (shuffle), or by their number of sentence ends (curriculum)."""
    if order == "shuffle":
        bucket = rng.integers(BUCKETS, size=len(rows))
    else:
        bucket = BUCKETS - 1 - np.minimum(is_end[rows].sum(axis=1), BUCKETS - 1)
    rows = rows[np.argsort(bucket, kind="stable")]
    start = 0
    for b, n in enumerate(np.bincount(bucket, minlength=BUCKETS)):
        if n:
            with open(folder / f"bucket-{b:03}", "ab") as f:
                rows[start : start + n].tofile(f)
        start += n


def gather(folder, rng):
    """Join the bucket files into train.bin, each shuffled in memory, which together is a uniform shuffle."""
    with open(folder / "train.bin", "wb") as out:
        for path in sorted(folder.glob("bucket-*")):
            if order == "shuffle":
                rows = np.fromfile(path, dtype=np.uint16).reshape(-1, seq_len)
                rows[rng.permutation(len(rows))].tofile(out)
            else:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 24)
            path.unlink()


def write_rows(tokenizer, paths, total_bytes, folder, errors):
    """Read, tokenize, choose, pack and order all documents; the counts that go into meta.json."""
    from tqdm import tqdm

    entries = map(tokenizer.encoding.decode_single_token_bytes, range(tokenizer.vocab_size))
    is_end = np.array(
        [i > MASK and any(c in b".!?" for c in entry) for i, entry in enumerate(entries)]
    )
    outcomes = ("read", "held_out", "held_out_copies", "duplicates", "filtered", "empty", "kept")
    sizes = (
        "tokens",
        "characters",
        "val_tokens",
        "val_characters",
        "tokens_read",
        "characters_read",
    )
    count = dict.fromkeys(outcomes + sizes, 0)
    rng = np.random.default_rng(0)
    held_out, seen, val, train, pending = set(), SeenHashes(), [], [], 0
    bar = tqdm(
        total=total_bytes or None, unit="B", unit_scale=True, desc="tokenizing", disable=None
    )
    for batch in encode_all(documents(paths, errors), tokenizer, threads or os.cpu_count()):
        fresh = (
            seen.add(np.array([h for h, _, _ in batch], dtype=np.uint64))
            if dedup
            else [True] * len(batch)
        )
        for (h, characters, ids), new in zip(batch, fresh, strict=True):
            if (max_docs and count["read"] >= max_docs) or (
                max_tokens and count["tokens_read"] >= max_tokens
            ):
                break
            count["read"] += 1
            count["tokens_read"] += len(ids)
            count["characters_read"] += characters
            if len(ids) < 2:
                count["empty"] += 1
            elif h in held_out:  # a copy in train.bin would make the held-out loss a lie
                count["held_out_copies"] += 1
            elif is_candidate(h) and count["val_tokens"] + len(ids) <= val_tokens:
                held_out.add(h)
                val.append(ids)
                count["held_out"] += 1
                count["val_tokens"] += len(ids)
                count["val_characters"] += characters
            elif not new:
                count["duplicates"] += 1
            elif filter_ratio and len(ids) - 1 >= filter_ratio * characters:
                count["filtered"] += 1
            else:
                train.append(ids)
                pending += len(ids)
                count["kept"] += 1
                count["tokens"] += len(ids)
                count["characters"] += characters
        if pending >= 1 << 23:
            rows, rest = pack(np.concatenate(train), seq_len)
            spread(rows, folder, rng, is_end)
            train, pending = [rest], len(rest)
        bar.set_postfix_str(f"{count['tokens'] / 1e6:.1f}M tokens", refresh=False)
        bar.update(sum(characters for _, characters, _ in batch))
        if (max_docs and count["read"] >= max_docs) or (
            max_tokens and count["tokens_read"] >= max_tokens
        ):
            break
    bar.close()
    rows, rest = pack(np.concatenate([*train, np.zeros(0, np.uint16)]), seq_len)
    spread(rows, folder, rng, is_end)
    gather(folder, rng)
    val_rows, _ = pack(np.concatenate([*val, np.zeros(0, np.uint16)]), seq_len)
    rng_val = np.random.default_rng(
        0
    )  # its own, so that val.bin depends on nothing but the held-out documents
    val_rows[rng_val.permutation(len(val_rows))].tofile(folder / "val.bin")
    count["rows"] = (folder / "train.bin").stat().st_size // (2 * seq_len)
    count["val_rows"] = len(val_rows)
    count["left_over"] = len(rest)
    count["kept_share"] = count["kept"] / max(1, count["kept"] + count["filtered"])
    if not count["rows"]:
        sys.exit(
            f"{count['tokens']} tokens are fewer than one row of {seq_len}: give more text, or --filter_ratio=0"
        )
    if not count["val_rows"]:
        sys.exit(
            f"less than a row of {count['read']} documents was held out: type --val_share="
            f"{min(0.5, 10 * val_share):g}, or give more; blank lines divide a text file into documents"
        )
    return count


def claim(goal, wanted):
    """Make goal.partial for this run, or exit: goal is finished already, or holds what this script did not write."""
    meta = goal / "meta.json"
    if meta.exists():
        try:
            have = json.loads(meta.read_text())["settings"]
        except (ValueError, LookupError, TypeError):
            sys.exit(f"{meta} is broken: delete {goal} or choose another --data_dir")
        if have == wanted:
            print(f"{goal} is finished already, with these very settings: nothing to do")
            sys.exit(0)
        other = ", ".join(
            f"{k} {have.get(k)!r:.40} -> {v!r:.40}" for k, v in wanted.items() if have.get(k) != v
        )
        sys.exit(
            f"{goal} holds a data set with other settings ({other}): delete it or choose another --data_dir"
        )
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        sys.exit(f"{goal} exists and is no data set of prepare.py: choose another --data_dir")
    if goal.is_symlink() or os.path.ismount(goal):
        sys.exit(
            f"{goal} is a link or a mount point, which nothing can replace: name a folder in it as --data_dir"
        )
    partial = Path(f"{goal.absolute()}.partial")
    if partial.exists():
        left = list(partial.iterdir())
        if not all(any(p.match(name) for name in OURS) for p in left):
            sys.exit(f"{partial} holds files that prepare.py did not write: move them away first")
        print(f"removing {partial}, the leftover of a run that did not finish")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def raw_size(path):
    """Bytes of text in a local file, about: a parquet's footer or the trailer of a gzip (modulo 4 GiB) says it."""
    size = os.path.getsize(path)
    with (
        contextlib.suppress(Exception),
        open(path, "rb") as f,
    ):  # one that cannot be read is told of later
        if file_kind(path) == "parquet":
            from pyarrow.parquet import read_metadata

            groups = map((footer := read_metadata(f)).row_group, range(footer.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(footer.num_columns))
            return sum(
                c.total_uncompressed_size for c in columns if c.path_in_schema == text_column
            )
        if f.read(2) == b"\x1f\x8b" and size > 18:
            f.seek(-4, os.SEEK_END)
            return max(
                size, int.from_bytes(f.read(4), "little")
            )  # of several members, it is the last one's
    return size


def estimate(texts, tokenizer, total_bytes, folder):
    """Say, from timing a few texts, how much disk and time the whole will take."""
    start = time.perf_counter()
    n = sum(len(ids) for batch in encode_all([texts], tokenizer, 1) for _, _, ids in batch)
    size = sum(map(len, texts))
    rate = n / (time.perf_counter() - start) * (threads or os.cpu_count())
    tokens = min(max_tokens or math.inf, total_bytes * n / size if total_bytes else math.inf)
    if tokens == math.inf:
        return print(
            f"the stream has no known end; every 1,000M tokens take 2 GB of disk and {1e9 / rate:,.0f} s"
        )
    seconds, megabytes, free = tokens / rate, tokens * 2 / 1e6, shutil.disk_usage(folder).free
    warning = (
        f"; WARNING: only {free / 1e6:,.0f} MB are free there" if free < 1e6 * megabytes else ""
    )
    print(
        f"about {tokens / 1e6:,.1f}M tokens: {megabytes:,.0f} MB of disk and {seconds:,.0f} s{warning}"
    )


def main():
    start = time.perf_counter()
    require(
        globals(),
        {
            "vocab_size": (261, 65536),
            "vocab_sample_mb": (1, 4000),
            "seq_len": (8, 65536),
            "filter_ratio": (0, 10),
            "val_share": (1e-9, 0.5),
            "val_tokens": (seq_len, 10**8),
            "threads": (0, 4096),
            "max_docs": (0, 2**62),
            "max_tokens": (0, 2**62),
            "normalisation": ("ascii", "plain"),
            "order": ("shuffle", "curriculum"),
        },
    )
    files = source_files(source)
    goal = Path(data_dir)
    wanted = {
        name: globals()[name] for name in settings(__file__) if name not in ("data_dir", "threads")
    }
    wanted["files"] = [
        [f, os.path.getsize(f)] for f in files
    ]  # two data sets with equal settings and files are equal
    lock = Lock(beside(goal))
    partial = claim(goal, wanted)
    paths, errors = files or [""], {}
    print(
        f"training a vocabulary of {vocab_size} entries on up to {vocab_sample_mb} MB of {source}",
        flush=True,
    )
    batches = documents(paths, errors, limit=vocab_sample_mb * 10**6 // len(paths))
    first = next((batch for batch in batches if batch), None)
    if not first:
        sys.exit(
            f"no text in {source}" + "".join(f"; {path}: {why}" for path, why in errors.items())
        )
    texts = itertools.chain(first, itertools.chain.from_iterable(batches))
    train_tokenizer(
        (t for t in texts if not is_candidate(text_hash(t))), vocab_size, normalisation, partial
    )
    tokenizer = Tokenizer(partial / "tokenizer.json")
    vocab_seconds = time.perf_counter() - start
    total_bytes = sum(map(raw_size, files))
    estimate(first, tokenizer, total_bytes, partial)
    if source in errors and not files:
        sys.exit(f"the stream broke off early, run again: {errors[source]}")
    errors.clear()  # files that could not be read will be met again
    count = write_rows(tokenizer, paths, total_bytes, partial, errors)

    meta = {
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "dtype": "uint16",
        "settings": wanted,
        "counts": count,
        "errors": errors,
        "sha256": {},
    }
    for path in sorted(partial.iterdir()):
        with open(path, "r+b") as f:
            meta["sha256"][path.name] = hashlib.file_digest(f, "sha256").hexdigest()
            os.fsync(f.fileno())
    write_beside(partial / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=2)))
    if goal.exists():
        goal.rmdir()  # empty, as claim() saw: Windows renames onto nothing else
    os.rename(partial, goal)
    lock.close()
    report(count, errors, goal, vocab_seconds, time.perf_counter() - start)


def report(count, errors, goal, vocab_seconds, seconds):
    """The summary: what was read, what was kept and why not, what came out, how fast."""
    rate, share = count["characters_read"] / 1e6 / (seconds - vocab_seconds), count["kept_share"]
    dropped = ", ".join(
        f"{count[k]} {k.replace('_', ' ')}" for k in ("duplicates", "empty", "held_out_copies")
    )
    print(f"documents   {count['read']} read, {count['held_out']} held out; dropped: {dropped}")
    print(f"filter      {share:.1%} kept: {count['kept']} documents, {count['filtered']} dropped")
    print(
        f"tokens      {count['tokens']:,}, {count['characters'] / count['tokens']:.2f} characters each"
    )
    print(
        f"rows        {count['rows']:,} to train on, {count['val_rows']:,} held out, of {seq_len} tokens"
    )
    print(
        f"time        {vocab_seconds:.1f} s for the vocabulary, {seconds - vocab_seconds:.1f} s at {rate:.1f} MB/s"
    )
    print(f"written     {goal}: {sum(path.stat().st_size for path in goal.iterdir()) / 1e6:.1f} MB")
    if share < 0.8:
        print(
            "WARNING: less than 80 % were kept: the filter is meant for English and a vocabulary of 32768 entries; "
            "type a larger --filter_ratio, or 0 for none"
        )
    for path, why in errors.items():
        print(f"WARNING: {path} could not be read to its end: {why}")
    if source in errors:  # the only source there was
        sys.exit(
            f"the text broke off: {goal} holds what came before; use it, or delete it and run again"
        )


if __name__ == "__main__":
    safety.run(
        main,
        data_dir,
        "nothing finished was written, run again to start over",
        lambda: "--vocab_sample_mb=10",
    )
