"""Raw text to a tokenizer and rows of tokens.

    python prepare.py                                                  # FineWeb, for a day
    python prepare.py --source='texts/*.txt.gz' --data_dir=data/mine   # or .jsonl(.gz), .parquet
    python prepare.py config/tiny.py                                   # the embedded corpus

All is written into DATA_DIR.partial and renamed to data_dir at the end: after a kill, run it again.
"""

import functools
import glob
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanocram import safety
from nanocram.configurator import configure, require, settings
from nanocram.tokenizer import CLS, SEP, Tokenizer, normalise, train_tokenizer

# fmt: off
# what to read
data_dir = "data/fineweb"             # the folder to write
# globs of local files, Hub data sets as NAME or NAME:CONFIG; commas between several
source = "HuggingFaceFW/fineweb:sample-10BT"
weights = ""                          # of the sources, as 3,1, until one ends; '' = read all to end
text_column = "text"                  # where .jsonl, .parquet and Hub data sets keep the text
max_docs = 0                          # stop after reading this many documents; 0 = all
max_tokens = 0                        # stop after this many tokens, before the filter; 0 = all
max_rows = 0                          # stop once so many rows are kept, behind the filter; 0 = all
# text to tokens
normalisation = "ascii"               # ascii: lower case, no accents (paper) | plain: any script
vocab_size = 32768                    # entries of the byte-level BPE vocabulary, 4 of them special
vocab_sample_mb = 100                 # MB of text to train it on, from all sources and files
# tokens to rows
seq_len = 128                         # tokens in a row, the leading [CLS] included
filter_ratio = -1.0                   # keep if tokens < ratio x characters; -1 = paper's; 0 = all
dedup = False                         # drop exact copies; takes about 80 bytes a document in memory
order = "shuffle"                     # shuffle | curriculum: most full stops first (paper 4.4)
val_share = 0.01                      # share of documents held out for val.bin, by a hash of them
val_tokens = 1000000                  # at most this many tokens are held out, all others trained on
threads = 0                           # of the tokenizer; 0 = one per core; no result depends on it
# fmt: on

# Before the heavy imports, so that --help and a typo are answered at once.
if __name__ == "__main__":
    configure(globals())

KINDS = {".txt": "text", ".txt.gz": "text", ".parquet": "parquet"}
KINDS |= dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz"), "json")
SHARDS = 32  # of a Hub data set, that the vocabulary's sample comes from
# What to do at errors of datasets, by a word of what they say.
HINTS = {"zstd": "type pip install zstandard", "Config": "name one as NAME:CONFIG"}
# The paper's 0.25 (section 4.4) counts the tokens of ALBERT's vocabulary, two special ones too, in
# the raw text. With ENTRIES[i] in ours, LIKE_ALBERT[i] drops as many documents: measured, see
# results/README.md. Between them we interpolate, beyond them the last one holds. Fewer entries have
# none: at 1,024 the trend would drop 3 % of the embedded corpus and 85 % of Wikipedia and books.
ENTRIES = (4096, 8192, 16384, 32768)
LIKE_ALBERT = {"ascii": (0.307, 0.275, 0.252, 0.237), "plain": (0.325, 0.290, 0.264, 0.246)}
# Bounds on memory:
MAX_DOCUMENT = 1 << 20  # characters; a text file without blank lines is cut at this size
WAITING = 256  # documents that wait for a thread
CHUNK = 1 << 23  # tokens to collect before they are packed into rows
BUCKETS = 128  # files that the rows go into, put in order one by one
# What this script writes, and may delete in the folder of a run that was killed.
OURS = ("tokenizer*.json", "train.bin", "val.bin", "meta.json", "*.tmp", "bucket-*")
# The counts of meta.json: what became of the documents, and what they add up to.
OUTCOMES = ("held_out", "held_out_copies", "duplicates", "filtered", "empty", "kept")
SIZES = ("tokens", "characters", "val_tokens", "val_characters", "tokens_read", "characters_read")


def file_kind(path):
    """text, json or parquet, by the name of a file; None for all others."""
    return next((kind for ending, kind in KINDS.items() if path.endswith(ending)), None)


def hub_name(name):
    """(data set, config or None) of a Hub source, NAME or NAME:CONFIG."""
    name, _, config = name.partition(":")
    return name, config or None


def find_sources():
    """{name: paths} of the parts of source: local files, sorted; [name] for a Hub data set.

    Exits if a file or a data set would be read twice."""
    found, named_by = {}, {}
    for name in (part.strip() for part in source.split(",")):
        matches = set(glob.glob(name, recursive=True))  # "**/**" gives the same one twice
        paths = sorted(filter(os.path.isfile, matches))
        for path in paths:
            if not file_kind(path):
                kinds = ".txt(.gz), .jsonl(.gz, .zst) or .parquet"
                sys.exit(f"{path} is of no known kind: rename it to {kinds}")
        is_pattern = not name or re.search(r"[*?\[{}]", name)
        if not paths and (is_pattern or file_kind(name) or os.path.isdir(name)):
            how = 'give globs in quotes, like --source="a/*.txt,b.jsonl"; ? stands for a comma'
            sys.exit(f"no file matches {name!r}: {how}")
        identities = [os.path.abspath(path) for path in paths] or [hub_name(name)]
        for identity in identities:
            if identity in named_by:
                both = f"{named_by[identity]!r} and {name!r} name the same text"
                sys.exit(f"{both}: give each file and data set of --source once")
            named_by[identity] = name
        found[name] = paths or [name]
    return found


def shares(names):
    """{name: its share of the text}, from weights; equal shares where there are none."""
    try:
        numbers = [float(number) for number in weights.split(",")] if weights else [1] * len(names)
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or not 0 < min(numbers) <= max(numbers) < math.inf:
        how = f"give one positive number for each source, {len(names)} in all, commas between"
        sys.exit(f"weights={weights}: {how}")
    return {name: number / sum(numbers) for name, number in zip(names, numbers, strict=True)}


def split_documents(file):
    """The documents of an open text file.

    One ends at a blank line, or with the line by which it has MAX_DOCUMENT characters. Of a longer
    line, which may be the whole file, no more than that is taken at a time."""
    document, size = [], 0
    for line in iter(functools.partial(file.readline, MAX_DOCUMENT), ""):
        document.append(line)
        size += len(line)
        if not line.strip() or size >= MAX_DOCUMENT:
            yield "".join(document)
            document, size = [], 0
    yield "".join(document)


def up_to(limit, texts):
    """The texts that are neither empty nor None, stripped, until they have limit characters."""
    taken = 0
    for text in texts:
        text = (text or "").strip()
        if text:
            yield text
        taken += len(text)
        if taken >= limit:
            return


def column_texts(stream):
    """What text_column of a streamed data set holds."""
    for table in stream.with_format("arrow").iter(batch_size=256):
        if text_column not in table.column_names:
            have = ", ".join(table.column_names)
            raise ValueError(f"no column {text_column!r}, it has {have}: type --text_column=NAME")
        yield from table[text_column].to_pylist()


def read_texts(path, limit=math.inf):
    """The texts of a local file or of a Hub data set, at most about limit characters of them."""
    kind = file_kind(path)
    if kind == "text":
        open_text = gzip.open if path.endswith(".gz") else open
        with open_text(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from up_to(limit, split_documents(file))
        return

    import datasets

    # What it would say of a broken file, read_documents() says.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if kind:
        options = {"path": kind, "data_files": [path]}
    else:
        name, config = hub_name(path)
        options = {"path": name, "name": config}
    stream = datasets.load_dataset(**options, split="train", streaming=True)
    parts = [stream]
    if limit < math.inf:  # the first files of a data set may be its oldest: take some from many
        n = stream.num_shards
        chosen = np.linspace(0, n - 1, min(n, SHARDS)).astype(int)
        parts = [stream.shard(n, int(i)) for i in chosen]
    for part in parts:
        yield from up_to(limit / len(parts), column_texts(part))


def read_documents(paths, errors, limit=math.inf):
    """The documents of every path in turn, at most about limit characters from each.

    A warning is printed once for a file that cannot be read to its end; errors notes why."""
    from tqdm import tqdm

    for path in paths:
        try:
            yield from read_texts(path, limit)
        except Exception as e:  # whatever the readers of gzip, JSON, parquet or the Hub raise
            why = f"{type(e).__name__}: {safety.first_line(e, 200)}"
            hints = [hint for word, hint in HINTS.items() if word in why]
            why = "; ".join([why, *hints])
            if path not in errors:  # print() would write into the progress bar
                tqdm.write(f"WARNING: {path} could not be read to its end: {why}")
            errors[path] = why


def in_turns(sources, share, errors):
    """(name, text) of all sources' documents: next is who had the fewest characters for its weight.

    Without weights turns are equal, and go to the others where one ends. With weights the first to
    end ends all, so that the mix is what they say."""
    readers = {name: read_documents(paths, errors) for name, paths in sources.items()}
    taken = dict.fromkeys(sources, 0.0)  # characters / share
    while readers:
        name = min(readers, key=taken.get)
        text = next(readers[name], None)
        if text is not None:
            taken[name] += len(text) / share[name]
            yield name, text
        elif weights:
            return
        else:
            del readers[name]


def text_hash(text):
    """64 bits that stand for a document: they decide what is held out, and find exact copies."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def may_be_held_out(hash_of_text):
    """Whether a document may go into val.bin; the vocabulary is never trained on it."""
    return hash_of_text < val_share * 2**64


def encode(name, text, tokenizer):
    """(name, hash, normalised characters, ids (n,) uint16 up to a [SEP]) of a source's text."""
    normal = normalise(text, tokenizer.mode)
    ids = tokenizer.encoding.encode_to_numpy(normal, disallowed_special=())
    return name, text_hash(text), len(normal), np.append(ids, SEP).astype(np.uint16)


def usable_cores():
    """How many cores this process may use; a batch job may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def encode_all(documents, tokenizer):
    """encode() of each (name, text), in order, by threads: tiktoken works outside the GIL."""
    waiting = deque()
    pool = ThreadPoolExecutor(threads or usable_cores())
    try:
        for name, text in documents:
            waiting.append(pool.submit(encode, name, text, tokenizer))
            if len(waiting) > WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # the pool's own `with` would tokenize all that waits: 25 s more after a Ctrl-C
        pool.shutdown(cancel_futures=True)


def filter_threshold():
    """Tokens for each character from which on a document is dropped; 0 where none is."""
    if filter_ratio >= 0:
        return filter_ratio
    if vocab_size < ENTRIES[0]:
        return 0.0
    return float(np.interp(np.log2(vocab_size), np.log2(ENTRIES), LIKE_ALBERT[normalisation]))


def choose(documents, count):
    """Yield (outcome, ids) of documents (source, hash, characters, ids), outcome one of OUTCOMES.

    Adds all up in count, and by source too; stops at max_docs, max_tokens or max_rows."""
    held_out, seen = set(), set()  # hashes
    ratio = filter_threshold()
    by_source = defaultdict(lambda: Counter(tokens=0, val_tokens=0))
    count["sources"] = by_source  # meta.json has it beside the numbers
    for name, key, characters, ids in documents:
        n_tokens = len(ids) - 1  # without the [SEP] at the end
        if not n_tokens:
            outcome = "empty"
        elif key in held_out:  # a copy in train.bin would make the held-out loss a lie
            outcome = "held_out_copies"
        elif may_be_held_out(key) and count["val_tokens"] + len(ids) <= val_tokens:
            outcome = "held_out"
            held_out.add(key)
            count.update(val_tokens=len(ids), val_characters=characters)
            by_source[name]["val_tokens"] += len(ids)
        elif key in seen:
            outcome = "duplicates"
        elif ratio and n_tokens >= ratio * characters:
            outcome = "filtered"
        else:
            outcome = "kept"
            count.update(tokens=len(ids), characters=characters)
            by_source[name]["tokens"] += len(ids)
        if dedup:
            seen.add(key)
        count[outcome] += 1
        count.update(read=1, tokens_read=len(ids), characters_read=characters)
        by_source[name].update({"read": 1, outcome: 1, "characters_read": characters})
        yield outcome, ids
        enough_docs = max_docs > 0 and count["read"] >= max_docs
        enough_tokens = max_tokens > 0 and count["tokens_read"] >= max_tokens
        enough_rows = max_rows > 0 and count["tokens"] >= max_rows * (seq_len - 1)
        if enough_docs or enough_tokens or enough_rows:
            return


def pack(pieces, length):
    """Rows (n, length), each [CLS] and length - 1 of the tokens in pieces; and the rest (r,)."""
    tokens = np.concatenate(pieces)
    used = len(tokens) // (length - 1) * (length - 1)
    rows = tokens[:used].reshape(-1, length - 1)
    return np.insert(rows, 0, CLS, axis=1), tokens[used:]


def spread_rows(pieces, full_stop, rng, folder):
    """Append the rows of pieces to the bucket files, in the order set; returns the tokens left."""
    rows, rest = pack(pieces, seq_len)
    if order == "shuffle":
        bucket = rng.integers(BUCKETS, size=len(rows))
    else:  # most full stops first
        bucket = np.maximum(BUCKETS - 1 - (rows == full_stop).sum(axis=1), 0)
    for i in np.unique(bucket):
        with open(folder / f"bucket-{i:03}", "ab") as f:
            f.write(rows[bucket == i])  # tofile() and fromfile() are silent where a disk fails
    return rest


def join_buckets(rng, folder):
    """Join the bucket files into train.bin.

    To be shuffled, rows went into buckets at random: shuffling each shuffles them all."""
    with open(folder / "train.bin", "wb") as out:
        for path in sorted(folder.glob("bucket-*")):
            if order == "shuffle":
                rows = np.frombuffer(path.read_bytes(), np.uint16).reshape(-1, seq_len)
                out.write(rng.permutation(rows))
            else:  # a few buckets hold most of the rows: they need not fit into memory
                with open(path, "rb") as bucket:
                    shutil.copyfileobj(bucket, out, 1 << 24)
            path.unlink()


def write_data(documents, tokenizer, total, folder):
    """Write train.bin and val.bin into folder; returns the counts of meta.json.

    total: tokens to read, for the progress bar; math.inf where no end is known."""
    from tqdm import tqdm

    count = Counter(dict.fromkeys(("read", *OUTCOMES, *SIZES), 0))
    rng = np.random.default_rng(0)
    # The curriculum counts the entry "." alone, as the paper's code: no "?", no "...", no '."'.
    full_stop = tokenizer.encoding.encode_single_token(".")

    held_out = []
    kept, n_kept = [], 0  # ids that are not in rows yet, and how many
    look = {"unit": " tokens", "unit_scale": True, "desc": "tokenizing", "disable": None}
    with tqdm(total=total, **look) as bar:
        for outcome, ids in choose(documents, count):
            if outcome == "held_out":
                held_out.append(ids)
            if outcome == "kept":
                kept.append(ids)
                n_kept += len(ids)
            if n_kept >= CHUNK:
                rest = spread_rows(kept, full_stop, rng, folder)
                kept, n_kept = [rest], len(rest)
            bar.update(count["tokens_read"] - bar.n)

    count["rows"], count["left_over"] = divmod(count["tokens"], seq_len - 1)
    count["val_rows"] = count["val_tokens"] // (seq_len - 1)
    count["kept_share"] = count["kept"] / max(1, count["kept"] + count["filtered"])
    if not count["rows"]:
        few = f"{count['tokens']} tokens are fewer than one row of {seq_len}"
        sys.exit(f"{few}: give more text, or --filter_ratio=0")
    if not count["val_rows"]:
        few = f"less than one row was held out of {count['read']} documents (blank lines end them)"
        larger = f"--val_share={min(0.5, 10 * val_share):g} --val_tokens={10 * val_tokens}"
        sys.exit(f"{few}: type {larger}, or give more text")

    spread_rows(kept, full_stop, rng, folder)
    join_buckets(rng, folder)
    rows, _ = pack(held_out, seq_len)
    # A generator of its own: val.bin depends on nothing but the held-out documents.
    (folder / "val.bin").write_bytes(np.random.default_rng(0).permutation(rows))
    return count


def make_vocabulary(sources, share, errors, folder):
    """(Tokenizer, texts): trained on these texts of every source; its files go into folder."""
    print(f"training a vocabulary of {vocab_size} entries, from {vocab_sample_mb} MB at most")
    texts = []
    for name, paths in sources.items():
        limit = share[name] * vocab_sample_mb * 10**6 // len(paths)
        some = list(read_documents(paths, errors, limit))
        stream_broke_off = name in errors and not file_kind(name)
        if not some or stream_broke_off:
            reasons = "; ".join(errors[path] for path in paths if path in errors)
            if reasons:
                sys.exit(f"could not read {name} ({reasons}): run again, or give other text")
            sys.exit(f"no text in {name}: give other text")
        texts += some
    to_train_on = [text for text in texts if not may_be_held_out(text_hash(text))]
    train_tokenizer(to_train_on, vocab_size, normalisation, folder)
    return Tokenizer(folder / "tokenizer.json"), texts


def begin_folder(goal, wanted):
    """A new, empty DATA_DIR.partial; exits if goal is finished or cannot be written.

    What a killed run left in it goes, foreign files never do."""
    meta = goal / "meta.json"
    if meta.exists():
        try:
            have = dict(json.loads(meta.read_text())["settings"])
        except (ValueError, LookupError, TypeError):
            sys.exit(f"{meta} is broken: delete {goal} or choose another --data_dir")
        if have == wanted:
            print(f"{goal} is finished already, with these very settings: nothing to do")
            sys.exit(0)
        names = have | wanted
        other = [f"{k}={have.get(k)!r:.40}" for k in names if have.get(k) != wanted.get(k)]
        sys.exit(f"{goal} was made with {', '.join(other)}: delete it or choose another --data_dir")
    if goal.is_symlink() or os.path.ismount(goal):
        sys.exit(f"{goal} is a link or a mount point: name a folder in it as --data_dir")
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        sys.exit(f"{goal} exists and is no data set of prepare.py: choose another --data_dir")

    partial = Path(f"{goal.absolute()}.partial")
    if partial.exists():
        for path in partial.iterdir():
            if not any(map(path.match, OURS)):
                sys.exit(f"{path} was not written by prepare.py: move it away first")
        print(f"removing {partial}, the leftover of a run that did not finish")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def finish_folder(partial, goal, meta):
    """Bring all files to the disk, write meta.json with their checksums, rename the folder."""
    meta["sha256"] = {}
    for path in sorted(partial.iterdir()):
        with open(path, "r+b") as f:
            meta["sha256"][path.name] = hashlib.file_digest(f, "sha256").hexdigest()
            os.fsync(f.fileno())
    safety.write_text(partial / "meta.json", json.dumps(meta, indent=2))
    if goal.exists():
        goal.rmdir()  # it is empty, as begin_folder() saw
    os.rename(partial, goal)


def text_bytes(path):
    """Bytes of text in a source's file, about: 2.7 for each packed one (measured, but for zstd).

    Infinite for a data set of the Hub."""
    if not file_kind(path):
        return math.inf
    return os.path.getsize(path) * (2.7 if path.endswith((".gz", ".zst", ".parquet")) else 1)


def print_estimate(texts, tokenizer, total_bytes, folder):
    """Say, from timing about 1 MB of texts, how much disk and time the rows will take.

    Returns how many tokens they are; math.inf where no end is known."""
    n_docs, n_tokens, n_bytes = 0, 0, 0
    drawn = np.random.default_rng(0).permutation(len(texts))  # they stand source by source
    start = time.perf_counter()
    for i in drawn:
        n_docs += 1
        n_tokens += len(tokenizer.encode(texts[i])) + 1
        n_bytes += len(texts[i].encode("utf-8", "replace"))
        if n_bytes > 1e6:
            break
    n_threads = threads or usable_cores()
    rate = n_threads * n_tokens / (time.perf_counter() - start)  # tokens/s
    tokens = total_bytes * n_tokens / n_bytes
    for limit in (max_tokens, max_rows * seq_len, max_docs * n_tokens / n_docs):
        if limit > 0:
            tokens = min(tokens, limit)
    free = shutil.disk_usage(folder).free
    if tokens == math.inf:
        has = f"{free / 1e9:,.0f} GB are free there"
        print(f"no end is known: 1,000M tokens take 2 GB of disk ({has}) and {1e9 / rate:,.0f} s")
        return tokens
    needs = f"{2 * tokens / 1e6:,.0f} MB of disk and {tokens / rate:,.0f} s"
    warning = f"; WARNING: only {free / 1e6:,.0f} MB are free there" if free < 2 * tokens else ""
    print(f"about {tokens / 1e6:,.1f}M tokens: {needs}{warning}", flush=True)
    return tokens


def print_summary(count, errors, goal, seconds):
    """What was read, what was kept and why not, what came out."""
    reasons = ("filtered", "duplicates", "empty", "held_out_copies")
    dropped = ", ".join(f"{count[reason]} {reason.replace('_', ' ')}" for reason in reasons)
    length = count["characters"] / count["tokens"]
    print(f"documents   {count['read']} read, {count['held_out']} held out, {count['kept']} kept")
    print(f"dropped     {dropped}")
    if len(count["sources"]) > 1:
        for name, part in count["sources"].items():
            size = f"{part['tokens']:,} tokens and {part['val_tokens']:,} held out"
            print(f"from        {name}: {part['read']} read, {part['kept']} kept, {size}")
    print(f"tokens      {count['tokens']:,}, {length:.2f} characters each")
    print(f"rows        {count['rows']:,}, {count['val_rows']:,} held out, of {seq_len} tokens")
    print(f"written     {goal} in {seconds:.1f} s")
    if count["kept_share"] < 0.8:
        meant = "the filter is meant for English prose"
        print(f"WARNING: less than 80 % were kept: {meant}; --filter_ratio=0 turns it off")
    if errors:
        said = "sources or files were not read to their end"
        print(f"WARNING: {len(errors)} {said}: errors in {goal}/meta.json names them")
    if any(name.strip() in errors for name in source.split(",")):  # not one of many that match
        sys.exit(f"{goal} holds what could be read: use it, or delete it and run again")


def main():
    start = time.perf_counter()
    # fmt: off
    require(globals(), {
        "vocab_size": (260, 65536), "vocab_sample_mb": (1, 4000), "seq_len": (8, 65536),
        "filter_ratio": (-1, 10), "val_share": (1e-9, 0.5), "val_tokens": (seq_len, 10**8),
        "threads": (0, 4096), "normalisation": ("ascii", "plain"),
        "order": ("shuffle", "curriculum"),
    })
    # fmt: on
    sources = find_sources()
    share = shares(sources)
    if filter_ratio < 0 and not filter_threshold():
        print("note: below 4,096 entries the paper's filter has no known threshold: all is kept")
    if filter_ratio < 0 and vocab_size > ENTRIES[-1]:
        print("note: the filter has the threshold of 32,768 entries: --filter_ratio sets another")
    if "fineweb-edu" in source.lower():
        print("note: a pre-trained model chose FineWeb-Edu, which the challenge's rules exclude")
    paths = [path for paths in sources.values() for path in paths]
    files = [path for path in paths if file_kind(path)]
    goal = Path(data_dir)
    # Two data sets with equal settings and files are equal.
    wanted = {name: globals()[name] for name in settings(__file__)}
    del wanted["data_dir"], wanted["threads"]
    wanted["files"] = [[path, os.path.getsize(path)] for path in files]

    with safety.lock(safety.lock_file(goal)):
        partial = begin_folder(goal, wanted)
        sizes = {name: sum(map(text_bytes, parts)) for name, parts in sources.items()}
        total_bytes = sum(sizes.values())
        if weights:  # the first source to end ends all
            total_bytes = min(sizes[name] / share[name] for name in sources)
        errors = {}  # {path: why}, of files that could not be read, or not to their end
        tokenizer, texts = make_vocabulary(sources, share, errors, partial)
        n_tokens = print_estimate(texts, tokenizer, total_bytes, partial)
        del texts
        documents = encode_all(in_turns(sources, share, errors), tokenizer)
        if max_rows > 0:
            n_tokens = math.inf  # what is read for so many is not known before
        count = write_data(documents, tokenizer, n_tokens, partial)
        meta = {"vocab_size": vocab_size, "seq_len": seq_len, "dtype": "uint16"}
        meta |= {"filter_threshold": filter_threshold()}
        meta |= {"settings": wanted, "counts": count, "errors": errors}
        finish_folder(partial, goal, meta)
    print_summary(count, errors, goal, time.perf_counter() - start)


if __name__ == "__main__":
    advice = "nothing finished was written, run again to start over"
    safety.run(main, data_dir, advice, lambda: "--vocab_sample_mb=10")
