"""Raw text to a tokenizer and rows of tokens.

    python prepare.py                                                  # FineWeb, for a day
    python prepare.py --source='texts/*.txt.gz' --data_dir=data/mine   # or .jsonl, .csv, .parquet
    python prepare.py config/tiny.py                                   # the embedded corpus

All is written into DATA_DIR.partial and renamed to data_dir at the end. After a kill, or where the
line broke, the same command goes on; DATA_DIR.partial/journal.json says how far it is.
"""

import contextlib
import copy
import functools
import glob
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from nanocram import partial, safety, sources
from nanocram.configurator import configure, require
from nanocram.partial import Partial, write_journal
from nanocram.sources import HUB, explain, file_kind, hub_name
from nanocram.tokenizer import (
    SEP,
    SPECIAL_OR_UNKNOWN,
    UNK,
    Tokenizer,
    normalise,
    read_vocabulary,
    train_tokenizer,
    write_vocabulary,
)

# fmt: off
# what to read
data_dir = "data/fineweb"             # the folder to write
# globs of local files, Hub data sets as NAME or NAME:CONFIG; commas between several
source = "HuggingFaceFW/fineweb:sample-10BT"
weights = ""                          # of the sources, as 3,1, until one ends; '' = read all to end
text_column = "text"                  # where .jsonl, .csv, .parquet and the Hub have the text
documents = "paragraphs"              # of a .txt: paragraphs (a blank line ends one) | lines
max_docs = 0                          # stop after reading this many documents; 0 = all
max_tokens = 0                        # stop after this many tokens, before the filter; 0 = all
max_hub_tokens = 0                    # the same where a source is the Hub's: own files end
max_rows = 0                          # stop once so many rows are kept, behind the filter; 0 = all
# text to tokens
# ascii: lower case, no accents (paper) | plain: any script | none: as it is, line breaks too
normalisation = "ascii"
vocab_size = 32768                    # entries of the byte-level BPE vocabulary, 4 of them special
vocab_file = ""                       # or your own tokens, one a line: words, or all characters
vocab_sample_mb = 100                 # MB of text to train it on, from all sources and files
# tokens to rows
seq_len = 128                         # tokens in a row, the leading [CLS] included
pack = True                           # False: records stay whole, and see no other; rest is padding
filter_ratio = -1.0                   # keep if tokens < ratio x characters; -1 = paper's; 0 = all
dedup = False                         # drop exact copies; takes about 80 bytes a document in memory
order = "shuffle"                     # shuffle | curriculum: most full stops first (paper 4.4)
val_share = 0.01                      # share of documents held out for val.bin, by a hash of them
val_tokens = 1000000                  # at most this many tokens are held out, all others trained on
threads = 0                           # processes that tokenize; 0 = one per core; same result
accept_partial = False                # finish with what there is, where text cannot be read
# fmt: on

SETTINGS = configure(globals())  # their names

SHARDS = 32  # of a Hub data set, that the vocabulary's sample comes from
# The paper's 0.25 (section 4.4) counts the tokens of ALBERT's vocabulary, two special ones too, in
# the raw text. With ENTRIES[i] in ours, LIKE_ALBERT[i] drops as many documents: measured, see
# results/README.md. Between them we interpolate, beyond them the last one holds. Fewer entries have
# none: at 1,024 the trend would drop 3 % of the embedded corpus and 85 % of Wikipedia and books.
ENTRIES = (4096, 8192, 16384, 32768)
LIKE_ALBERT = {"ascii": (0.307, 0.275, 0.252, 0.237), "plain": (0.325, 0.290, 0.264, 0.246)}
# Bounds on memory:
BATCH = 1 << 18  # characters that a process tokenizes at a time
WAITING = 8  # batches that wait for each process
# Other:
ALONE = 16  # batches before there are other processes, which take half a second to start
LOOK = 1000  # documents of the vocabulary's sample that are looked at ...
LOOKED_AT = 10000  # ... and characters of each
FORECAST_AFTER = 10.0  # seconds of tokenizing
AGAIN = "the same command goes on once it can be read; --accept_partial=True leaves its rest out"
# The place in a source: in its files; of the file the part that was read; characters by weight.
START = {"file": 0, "document": 0, "part": 0.0, "taken": 0.0, "ended": False}
START |= {"blank": 0, "not_utf8": 0, "no_text": 0}  # and how many of its documents were so
START |= {"first_not_utf8": ""}  # a path
# What this script writes, and may delete in the folder of a run that was killed.
OURS = ("tokenizer*.json", "meta.json", "sample-*.json", "*.tmp", *partial.FILES)
# The counts of meta.json: what became of the documents, and what they add up to.
OUTCOMES = ("held_out", "held_out_copies", "duplicates", "filtered", "empty", "kept")
SIZES = ("tokens", "characters", "val_tokens", "val_characters", "tokens_read", "characters_read")
# Records longer than a row, and what the rows lack of them; what vocab_file does not have.
SIZES += ("cut", "cut_tokens", "unknown")
NOT_COMPARED = ("data_dir", "threads", "accept_partial")  # settings that change no row


def find_sources():
    """{name: paths} of the parts of source: local files, sorted; [name] for a Hub data set.

    Exits if a file or a data set would be read twice."""
    found, named_by = {}, {}
    for name in (part.strip() for part in source.split(",")):
        matches = set(glob.glob(name, recursive=True))  # "**/**" gives the same one twice
        paths = sorted(filter(os.path.isfile, matches))
        for path in paths:
            if not file_kind(path):
                kinds = ".txt, .log, .jsonl, .csv, .tsv, each also as .gz or .zst, or .parquet"
                how = "and see docs/questions.md for FASTA, Markdown, HTML and PDF"
                sys.exit(f"{path} is of no known kind: make it one of {kinds}, {how}")
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


def trimmed(text):
    """A document without the white space around it: '' of one that has nothing else, or is None.

    With normalisation "none" only the line breaks around it go, which are the file's."""
    bare = (text or "").strip()
    return text.strip("\r\n") if bare and normalisation == "none" else bare


def up_to(limit, texts):
    """The texts that are neither empty nor None, trimmed, until they have limit characters."""
    taken = 0
    for text in texts:
        text = trimmed(text)
        if text:
            yield text
        taken += len(text)
        if taken >= limit:
            return


def read_documents(files, place, errors):
    """The documents of a source's files from place on, which is kept up to date.

    A file that cannot be read is noted in errors, {path: why}, and ends the source. With
    accept_partial it ends only that file; but where the Hub is silent, all the rest."""
    while place["file"] < len(files):
        path = files[place["file"]]
        if path not in errors:
            after = place["file"] + 1
            if after < len(files):
                sources.open_ahead(files[after])
            try:
                begin = place["document"]
                texts = sources.read_texts(path, text_column, begin, documents == "lines")
                for text, part in texts:
                    place["no_text"] += text is None
                    text = trimmed(text)
                    place.update(document=place["document"] + 1, part=part)
                    place["blank"] += not text
                    if "\ufffd" in text:
                        place["not_utf8"] += 1
                        place["first_not_utf8"] = place["first_not_utf8"] or path
                    if text:
                        yield text
            except Exception as e:  # whatever the readers of gzip, JSON, parquet or the Hub raise
                errors[path] = explain(e)
                tell(f"WARNING: {path} could not be read to its end: {errors[path]}")
                if isinstance(e, sources.Silence):  # nor will the others be
                    errors.update(dict.fromkeys(files[place["file"] :], errors[path]))
                if not accept_partial:
                    return
        place.update(file=place["file"] + 1, document=0, part=0.0)


def tell(line):
    """print() would write into the progress bar."""
    from tqdm import tqdm

    tqdm.write(line)


def in_turns(files, share, state):
    """(name, text) of all sources' documents: next is who had the fewest characters for its weight.

    Without weights turns are equal, and go to the others where one ends. With weights the first to
    end ends all, so that the mix is what they say. All ends where one cannot be read. state, with
    places and errors, is kept up to date."""
    places, errors = state["places"], state["errors"]
    readers = {name: read_documents(files[name], places[name], errors) for name in files}
    readers = {name: reader for name, reader in readers.items() if not places[name]["ended"]}
    while readers:
        name = min(readers, key=lambda name: places[name]["taken"])
        text = next(readers[name], None)
        if text is not None:
            places[name]["taken"] += len(text) / share[name]
            yield name, text
            continue
        if errors and not accept_partial:
            return
        places[name]["ended"] = True
        if weights:
            return
        del readers[name]


def in_batches(documents, state):
    """(names, texts) of BATCH characters or more, each with what state was behind them."""
    names, texts, size = [], [], 0
    for name, text in documents:
        names.append(name)
        texts.append(text)
        size += len(text)
        if size >= BATCH:
            yield names, texts, copy.deepcopy(state)
            names, texts, size = [], [], 0
    yield names, texts, copy.deepcopy(state)


def text_hash(text):
    """64 bits that stand for a document: they decide what is held out, and find exact copies."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def may_be_held_out(hash_of_text):
    """Whether a document may go into val.bin; the vocabulary is never trained on it."""
    return hash_of_text < val_share * 2**64


@functools.cache
def tokenizer_at(path):
    return Tokenizer(path)


def encode(texts, path):
    """(hashes, normalised characters, lengths, ids (n,) uint16) of texts; a [SEP] ends each one's.

    Needs no setting: it is called in other processes, where they have their defaults."""
    tokenizer = tokenizer_at(path)
    hashes, characters, pieces = [], [], []
    for text in texts:
        normal = normalise(text, tokenizer.mode)
        ids = tokenizer.encoding.encode_to_numpy(normal, disallowed_special=())
        hashes.append(text_hash(text))
        characters.append(len(normal))
        pieces.append(np.append(ids, SEP).astype(np.uint16))
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
    return hashes, characters, [len(piece) for piece in pieces], ids


def documents_of(names, encoded):
    """(name, hash, normalised characters, ids) of each document that encode() has tokenized."""
    hashes, characters, lengths, ids = encoded
    end = 0
    for name, key, n_characters, length in zip(names, hashes, characters, lengths, strict=True):
        yield name, key, n_characters, ids[end : end + length]
        end += length


def usable_cores():
    """How many cores this process may use; a batch job may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def begin_process():
    """What a tokenizing process does first: it ends with its parent, and by nothing but that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def start_processes(n):
    """A pool of n processes. Nothing forks, so it is the same on every system."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n, mp_context=spawn, initializer=begin_process)
    # A Ctrl-C is for this process, once they are there: they inherit that it is blocked, and here,
    # where any thread may get it, it is noted.
    noted = []
    handler = signal.signal(signal.SIGINT, lambda *of: noted.append(of))
    can_block = hasattr(signal, "pthread_sigmask")  # Windows cannot
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if can_block else None
    try:
        for _ in range(n):
            pool.submit(os.getpid)
    finally:
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if noted:
        pool.shutdown()
        raise KeyboardInterrupt
    return pool


def encode_all(batches, path, spent):
    """(documents_of() a batch, its state), in order, by processes: normalise() holds the GIL.

    Adds the seconds in which nothing but the tokenizing was waited for to spent["tokenizing"]."""
    n = threads or usable_cores()
    alone = math.inf if n == 1 else ALONE
    waiting = deque()
    pool = None

    def wait_for(names, future, state):
        start = time.perf_counter()
        encoded = encode(*future) if isinstance(future, tuple) else future.result()
        spent["tokenizing"] += time.perf_counter() - start
        return documents_of(names, encoded), state

    try:
        for number, (names, texts, state) in enumerate(batches):
            if number < alone:
                yield wait_for(names, (texts, path), state)
                continue
            pool = pool or start_processes(n)
            waiting.append((names, pool.submit(encode, texts, path), state))
            if len(waiting) > WAITING * n:
                yield wait_for(*waiting.popleft())
        while waiting:
            yield wait_for(*waiting.popleft())
    except BrokenProcessPool:
        sys.exit("a tokenizing process was ended, perhaps for want of memory: type --threads=1")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def filter_threshold():
    """Tokens for each character from which on a document is dropped; 0 where none is."""
    if filter_ratio >= 0:
        return filter_ratio
    if vocab_size < ENTRIES[0] or normalisation not in LIKE_ALBERT:
        return 0.0
    return float(np.interp(np.log2(vocab_size), np.log2(ENTRIES), LIKE_ALBERT[normalisation]))


@functools.cache
def reads_the_hub(source):
    return any(not file_kind(paths[0]) for paths in find_sources().values())


def hub_limit():
    """max_hub_tokens where a data set of the Hub is read, which may have no end; else 0."""
    return max_hub_tokens if max_hub_tokens > 0 and reads_the_hub(source) else 0


def limit_reached(count):
    """The setting that ends the reading by now; '' for none."""
    if max_docs > 0 and count["read"] >= max_docs:
        return "max_docs"
    if max_tokens > 0 and count["tokens_read"] >= max_tokens:
        return "max_tokens"
    if 0 < hub_limit() <= count["tokens_read"]:
        return "max_hub_tokens"
    if max_rows > 0 and count["tokens"] >= max_rows * (seq_len - 1):
        return "max_rows"
    return ""


def choose(documents, count, held_out, seen):
    """Yield (outcome, hash, ids) of (source, hash, characters, ids), outcome one of OUTCOMES.

    Adds all up in count, and by source too; stops at max_docs, max_tokens or max_rows. Hashes of
    what was held out and, for dedup, seen are added to these sets."""
    ratio = filter_threshold()
    by_source = count["sources"]
    for name, key, characters, ids in documents:
        if name not in by_source:
            by_source[name] = Counter(tokens=0, val_tokens=0)
        of_source = by_source[name]
        n_ids = len(ids)
        n_tokens = n_ids - 1  # without the [SEP] at the end
        if not n_tokens:
            outcome = "empty"
        elif key in held_out:  # a copy in train.bin would make the held-out loss a lie
            outcome = "held_out_copies"
        elif may_be_held_out(key) and count["val_tokens"] + n_ids <= val_tokens:
            outcome = "held_out"
            held_out.add(key)
            count["val_tokens"] += n_ids
            count["val_characters"] += characters
            of_source["val_tokens"] += n_ids
        elif key in seen:
            outcome = "duplicates"
        elif ratio and n_tokens >= ratio * characters:
            outcome = "filtered"
        else:
            outcome = "kept"
            count["tokens"] += n_ids
            count["characters"] += characters
            of_source["tokens"] += n_ids
        if dedup:
            seen.add(key)
        if not pack and n_ids >= seq_len and outcome in ("kept", "held_out"):
            ids = np.append(ids[: seq_len - 2], np.uint16(SEP))  # and the [CLS] before it
            count["cut"] += 1
            if outcome == "kept":
                count["cut_tokens"] += n_ids - len(ids)
        if vocab_file:
            count["unknown"] += int((ids == UNK).sum())
        count["tokens_read"] += n_ids
        count["characters_read"] += characters
        of_source["characters_read"] += characters
        for each in (count, of_source):
            each["read"] += 1
            each[outcome] += 1
        yield outcome, key, ids
        if limit_reached(count):
            return


def take(documents, so_far):
    """Add documents, as encode_all() has them, to what there is so far, up to a limit."""
    held_out, seen = so_far.keys.values()
    for outcome, key, ids in choose(documents, so_far.count, held_out, seen):
        if outcome == "held_out":
            so_far.hold_out(ids, key)
        if outcome == "kept":
            so_far.keep(ids)
        if dedup:
            so_far.new_keys["seen-keys"].append(key)


def finish_counts(count, folder):
    """Complete the counts of meta.json; exits where there is too little for a row."""
    for name, file in (("rows", "train.bin"), ("val_rows", "val.bin")):
        path = folder / file
        count[name] = path.stat().st_size // (2 * seq_len) if path.exists() else 0
    in_rows = count["tokens"] - count["cut_tokens"]
    places = count["rows"] * (seq_len - 1)
    if pack:
        count["left_over"] = in_rows - places
    elif places:
        count["filled"] = in_rows / places  # what is no padding, nor the [CLS] of later records
    count["kept_share"] = count["kept"] / max(1, count["kept"] + count["filtered"])
    if not count["rows"]:
        few = f"{count['tokens']} tokens are fewer than one row of {seq_len}"
        sys.exit(f"{few}: give more text, or --filter_ratio=0")
    if not count["val_rows"]:
        few = f"less than one row was held out of {count['read']} documents"
        larger = f"--val_share={min(0.5, 10 * val_share):g} --val_tokens={10 * val_tokens}"
        ends, lines = "each line is one", ""
        if documents == "paragraphs":
            ends, lines = "blank lines end them", ", or --documents=lines if each line is one"
        anew = f"delete {folder}, then type {larger}{lines}, or give more text"
        sys.exit(f"{few} ({ends}): {anew}")


def sample_of(path, number, limit, folder):
    """Texts of about limit characters from a file. What comes from the Hub is kept in folder.

    A file that breaks off ends all, or, with accept_partial, gives what stands before."""
    kept = folder / f"sample-{number:05}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    texts = []
    found = sources.read_texts(path, text_column, 0, documents == "lines")
    try:
        for text in up_to(limit, (text for text, _ in found)):
            texts.append(text)
    except Exception as e:  # whatever the readers raise
        if not accept_partial or isinstance(e, sources.Silence):  # nor would the other files come
            sys.exit(f"could not read {path} ({explain(e)}): {AGAIN}")
        tell(f"WARNING: the vocabulary lacks a part of {path}: {explain(e)}")
        return texts
    if path.startswith(HUB):
        safety.write_text(kept, json.dumps(texts))
    return texts


def make_vocabulary(files, share, folder):
    """Train the vocabulary on texts of every source; its files go into folder."""
    if not vocab_file:
        print(f"training a vocabulary of {vocab_size} entries, from {vocab_sample_mb} MB at most")
    texts = []
    number = 0
    for name, paths in files.items():
        size = share[name] * vocab_sample_mb * 10**6
        chosen = paths
        if paths[0].startswith(HUB):  # the first may be the oldest: take some from many
            places = np.linspace(0, len(paths) - 1, min(len(paths), SHARDS), dtype=int)
            chosen = [paths[i] for i in places]
        some = []
        for path in chosen:
            number += 1
            some += sample_of(path, number, size // len(chosen), folder)
        if not some:
            sys.exit(f"no text in {name}: give other text")
        texts += some
    to_train_on = [text for text in texts if not may_be_held_out(text_hash(text))]
    some = texts[:: max(1, len(texts) // LOOK)]
    check_normalisation(some)
    if vocab_file:
        write_vocabulary(read_vocabulary(vocab_file), folder)
    else:
        train_tokenizer(to_train_on, vocab_size, normalisation, folder)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    if vocab_file:
        check_vocabulary(some, tokenizer)
    check_filter(some, tokenizer)


def check_vocabulary(texts, tokenizer):
    """Say which tokens of some texts a vocab_file lacks; exit where it lacks most."""
    missing, n_tokens = Counter(), 0
    for text in texts:
        found = tokenizer.encoding.split(text[:LOOKED_AT])
        missing.update(token for token in found if token not in tokenizer.encoding.numbers)
        n_tokens += len(found)
    share = missing.total() / max(1, n_tokens)
    most = " ".join(token[:40] for token, _ in missing.most_common(5))
    said = f"{vocab_file} lacks {share:.2%} of the tokens, most of all {most}"
    if share > 0.5:
        longest = max(tokenizer.encoding.numbers, key=len)
        if len(longest) > 1:
            said += f" ({longest!r} has several characters, so only white space splits text)"
        sys.exit(f"{said}: put them in, or leave --vocab_file out and have one trained")
    if missing:
        print(f"WARNING: {said}: each becomes [UNK]")


def check_normalisation(texts):
    """Warn where it takes more than a hundredth of some texts, exit where it takes most."""
    if normalisation != "ascii":
        return
    # Letters outside ASCII lose their accents, or go; other signs have stand-ins.
    text = "".join(text[:LOOKED_AT] for text in texts)
    lost = sum(char.isalpha() for char in text if char > "\x7f") / len(text)
    said = f"the normalisation strips or drops {lost:.1%} of the characters"
    if lost > 0.5:
        sys.exit(f"{said}: type --normalisation=plain")
    if lost > 0.01:
        print(f"WARNING: {said}: --normalisation=plain keeps them")


def check_filter(texts, tokenizer):
    """Say how long some texts are; exit where the filter would drop most, unless it was set."""
    ratios, lengths = [], []
    for text in texts:
        begin = text[:LOOKED_AT]
        n_tokens = len(tokenizer.encode(begin))
        ratios.append(n_tokens / max(1, len(normalise(begin, normalisation))))
        lengths.append(n_tokens * len(text) / len(begin))
    long = np.mean(np.array(lengths) > seq_len - 2)
    of_each = f"{np.median(lengths):,.0f} tokens each, the median; {long:.0%} fill more than a row"
    print(f"a look at {len(texts):,} documents: {of_each}")
    cut = np.maximum(np.array(lengths) - (seq_len - 2), 0).sum() / max(1, np.sum(lengths))
    if not pack and cut > 0.02:
        said = f"of records that are longer than a row {cut:.0%} of all tokens would be cut"
        lines = "" if documents == "lines" else ", --documents=lines if each line is a record"
        print(f"WARNING: {said}: a larger --seq_len{lines}, or --pack=True keeps them")
    threshold = filter_threshold()
    dropped = np.mean(np.array(ratios) >= threshold) if threshold else 0.0
    said = f"the filter, meant for English prose, would drop {dropped:.0%} of the documents"
    if dropped > 0.5 and filter_ratio < 0:
        sys.exit(f"{said}: type --filter_ratio=0")
    if dropped > 0.1:  # on English prose it is some 6 %
        print(f"WARNING: {said}: --filter_ratio=0 turns it off")


def begin_folder(goal, wanted):
    """(DATA_DIR.folder, its journal), or no journal where nothing was begun with these settings.

    Exits if goal is finished or cannot be written. Foreign files are never deleted."""
    meta = goal / "meta.json"
    if meta.exists():
        have, is_complete = read_settings(meta, goal)
        if have == wanted and is_complete:
            print(f"{goal} is finished already, with these very settings: nothing to do")
            sys.exit(0)
        if have == wanted and accept_partial:
            print(f"{goal} is finished already, with a part of the text: nothing to do")
            sys.exit(0)
        if have == wanted:
            part = f"{goal} holds a part of the text, errors in {meta} says what is missing"
            sys.exit(f"{part}: delete it to prepare all, or choose another --data_dir")
        other = differences(have, wanted)
        sys.exit(f"{goal} was made with {other}: delete it or choose another --data_dir")
    if goal.is_symlink() or os.path.ismount(goal):
        sys.exit(f"{goal} is a link or a mount point: name a folder in it as --data_dir")
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        sys.exit(f"{goal} exists and is no data set of prepare.py: choose another --data_dir")

    folder = Path(f"{goal.absolute()}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not any(map(path.match, OURS)):
            sys.exit(f"{path} was not written by prepare.py: move it away first")
    for name in ("meta.json", "journal.json"):  # with meta.json all is there but the new name
        if (folder / name).exists():
            have, _ = read_settings(folder / name, folder)
            journal = json.loads((folder / name).read_text())
            # What an older journal has not counted:
            journal["counts"] = dict.fromkeys(SIZES, 0) | journal["counts"]
            for place in journal.get("places", {}).values():
                place.update(START | place)
            if have == wanted:
                return folder, journal
            if journal["counts"]["read"]:
                other = differences(have, wanted)
                was = f"{folder} was begun with {other}"
                sys.exit(f"{was}: give that to go on, delete it, or choose another --data_dir")
    if any(folder.iterdir()):
        print(f"removing {folder}, the leftover of a run that did not finish")
    shutil.rmtree(folder)
    folder.mkdir()
    return folder, {}


def read_settings(path, folder):
    """(settings, whether all text was read) of a meta.json or journal; exits if it is broken."""
    try:
        found = json.loads(path.read_text())
        # A setting that is newer than the data had its default.
        newer = {name: value for name, value in SETTINGS.items() if name not in NOT_COMPARED}
        return newer | found["settings"], found.get("complete", not found["errors"])
    except (ValueError, LookupError, TypeError, AttributeError):
        sys.exit(f"{path} is broken: delete {folder} or choose another --data_dir")


def differences(have, wanted):
    """How have differs from wanted, in the terms of have: its settings, or else its files."""
    names = [name for name in have | wanted if have.get(name) != wanted.get(name)]
    if names != ["files"]:
        return ", ".join(f"{name}={have.get(name)!r:.40}" for name in names if name != "files")
    before, now = (dict(settings.get("files", [])) for settings in (have, wanted))  # {path: bytes}
    found = [f"{path} of {size:,} bytes" for path, size in before.items() if now.get(path) != size]
    found += [f"no {path}" for path in now if path not in before]
    return ", ".join(found[:3])


def begin_journal(folder, wanted, found):
    """The journal of a run that has read nothing yet; asks the Hub for its data sets' files."""
    files = {}
    for name, paths in found.items():
        files[name] = paths
        if not file_kind(paths[0]):
            try:
                files[name] = sources.hub_files(name)
            except Exception as e:
                folder.rmdir()
                sys.exit(f"could not read {name} ({explain(e)})")
    journal = {
        "settings": wanted,
        "files": files,  # those of the Hub at the revision that they had at the beginning
        "places": {name: dict(START) for name in files},
        "has_vocabulary": False,
        "all_read": False,
        "limit": "",  # the setting that ended the reading
        "errors": {},  # {path: why}, of files that could not be read, or not to their end
        "counts": dict.fromkeys(("read", *OUTCOMES, *SIZES), 0) | {"sources": {}},
        "rest": [],  # ids that were too few for a row
        "rng": np.random.default_rng(0).bit_generator.state,
        "sizes": {},  # {file: bytes}
    }
    write_journal(folder, journal)
    return journal


def finish_folder(folder, goal, meta):
    """Bring all files to the disk, write meta.json with their checksums, rename the folder."""
    if not (folder / "meta.json").exists():
        meta["sha256"] = {}
        for name in ("tokenizer.json", "tokenizer_config.json", "train.bin", "val.bin"):
            with open(folder / name, "r+b") as f:
                meta["sha256"][name] = hashlib.file_digest(f, "sha256").hexdigest()
                os.fsync(f.fileno())
        safety.write_text(folder / "meta.json", json.dumps(meta, indent=2))
    whole = {"meta.json", *meta["sha256"]}
    for path in sorted(folder.iterdir()):
        if path.name not in whole:
            path.unlink()
    if goal.exists():
        goal.rmdir()  # it is empty, as begin_folder() saw
    os.rename(folder, goal)


def share_read(files, share, places, count):
    """Which share of all that is to be read has been read, in [0, 1]; 0 where it is unknown."""
    characters, parts = [], []
    for name, paths in files.items():
        place = places[name]
        # The files of a Hub data set are about equally large.
        sizes = [1 if path.startswith(HUB) else os.path.getsize(path) for path in paths]
        at = place["file"]
        read = sum(sizes[:at]) + (sizes[at] * place["part"] if at < len(sizes) else 0)
        parts.append(read / max(1, sum(sizes)))
        characters.append(place["taken"] * share[name])
    if weights:  # the first source to end ends all
        shares_read = [max(parts)]
    elif all(parts):
        all_characters = sum(n / part for n, part in zip(characters, parts, strict=True))
        shares_read = [sum(characters) / all_characters]
    else:
        shares_read = [0]
    kept_rows = count["tokens"] / (seq_len - 1)
    limits = ((max_docs, "read"), (max_tokens, "tokens_read"), (hub_limit(), "tokens_read"))
    for limit, n in limits:
        if limit > 0:
            shares_read.append(count[n] / limit)
    if max_rows > 0:
        shares_read.append(kept_rows / max_rows)
    return max(shares_read)


class Forecast:
    """How much disk and time the whole takes, once some seconds of the real work are over."""

    def __init__(self, spent):
        self.spent = spent  # {"tokenizing": seconds in which it was waited for}
        self.begun = 0.0
        self.told = False

    def begin(self, count):
        self.begun = time.monotonic()
        self.tokens = count["tokens_read"]
        self.before = {"the network": sources.HubFile.waited} | self.spent

    def is_due(self):
        return self.begun and not self.told and time.monotonic() - self.begun > FORECAST_AFTER

    def say(self, share, count, folder):
        """Print it; returns the tokens that there are in all, None where that is unknown."""
        self.told = True
        seconds = time.monotonic() - self.begun
        rate = (count["tokens_read"] - self.tokens) / seconds
        now = {"the network": sources.HubFile.waited} | self.spent
        waits = {name: now[name] - self.before[name] for name in now}
        waits["unpacking the text, in one process"] = seconds - sum(waits.values())
        bound = max(waits, key=waits.get)
        speed = f"at {rate / 1e6:,.2f}M tokens/s, which {bound} limits"
        free = shutil.disk_usage(folder).free
        if not share:
            has = f"{free / 1e9:,.0f} GB are free"
            tell(f"1,000M tokens take 2 GB of disk ({has}) and {1e9 / rate / 60:,.0f} min {speed}")
            return None
        tokens = count["tokens_read"] / share
        left = (tokens - count["tokens_read"]) / rate  # seconds
        time_left = f"{left / 60:,.0f} min" if left > 120 else f"{left:,.0f} s"
        size = f"about {tokens / 1e6:,.0f}M tokens, {2 * tokens / 1e6:,.0f} MB of disk"
        missing = 2 * (tokens - count["tokens_read"]) - free
        warning = f"; WARNING: only {free / 1e6:,.0f} MB are free there" if missing > 0 else ""
        tell(f"{size}: another {time_left} {speed}{warning}")
        return tokens


def read_all(files, share, so_far):
    """Read, tokenize and write rows until the text ends, or a limit; a journal is kept."""
    from tqdm import tqdm

    journal, count = so_far.journal, so_far.count
    state = {name: copy.deepcopy(journal[name]) for name in ("places", "errors")}
    if not accept_partial:
        state["errors"].clear()  # it is tried again
    if count["read"]:
        print(f"going on behind {count['read']:,} documents, {count['tokens_read']:,} tokens")
    spent = {"tokenizing": 0.0}
    forecast = Forecast(spent)
    batches = in_batches(in_turns(files, share, state), state)
    encoded = encode_all(batches, so_far.folder / "tokenizer.json", spent)
    look = {"unit": " tokens", "unit_scale": True, "desc": "tokenizing", "disable": None}
    with tqdm(initial=count["tokens_read"], **look) as bar, contextlib.closing(encoded):
        for number, (documents, state_behind) in enumerate(encoded):
            take(documents, so_far)
            journal |= state_behind
            bar.update(count["tokens_read"] - bar.n)
            if limit_reached(count):
                is_ended = all(place["ended"] for place in journal["places"].values())
                if next(documents, None) or not is_ended:
                    journal["limit"] = limit_reached(count)
                return
            if number == ALONE:
                forecast.begin(count)
            if forecast.is_due():
                part = share_read(files, share, journal["places"], count)
                bar.total = forecast.say(part, count, so_far.folder)
            if so_far.is_due():
                so_far.save()
    if journal["errors"] and not accept_partial:
        so_far.save()
        path = next(iter(journal["errors"]))
        sys.exit(f"{path} could not be read to its end: {AGAIN}")


def good_for(tokens):
    """The commands that see so many tokens ten times: lines of advice.

    Two CPU cores with AMX see 69,279 tokens a second with config/tiny.py and 34,191 with
    small.py (measured, README.md); config/domain.py takes 78 MFLOP a token, of an RTX 3090's 28
    TFLOP/s."""
    seen = 10 * tokens
    recipe, speed = ("tiny", 69279) if tokens < 5e6 else ("small", 34191)
    data = f"--data_dir={data_dir} --vocab_size={vocab_size} --seq_len={seq_len}"
    data += f" --max_seq_len={seq_len}" if seq_len > 512 else ""
    data += f" --out_dir=out/{Path(data_dir).name}"
    hours = max(0.05, seen / speed / 3600)
    command = f"python train.py config/{recipe}.py --budget_hours={hours:.3g} {data}"
    lines = [f"two CPU cores with AMX (without bfloat16: 4 to 7 times as long): {command}"]
    if tokens > 5e8:
        lines.append(f"a GPU: python train.py --budget_hours=24 {data}")
    elif tokens > 1e7:
        hours = max(0.1, seen * 78e6 / 28e12 / 3600)
        command = f"python train.py config/domain.py --budget_hours={hours:.2g} {data}"
        lines.append(f"a GPU, by arithmetic: {command} (other sizes: in the recipe)")
    return lines


def print_summary(count, journal, goal, seconds):
    """What was read, what was kept and why not, what came out."""
    reasons = ("filtered", "duplicates", "empty", "held_out_copies")
    dropped = ", ".join(f"{count[reason]} {reason.replace('_', ' ')}" for reason in reasons)
    length = count["characters"] / count["tokens"]
    print(f"documents   {count['read']} read, {count['held_out']} held out, {count['kept']} kept")
    print(f"dropped     {dropped}")
    blank = sum(place["blank"] for place in journal["places"].values())
    if blank and documents == "lines":
        print(f"            and {blank} blank lines")
    no_text = sum(place["no_text"] for place in journal["places"].values())
    if no_text > 0.01 * count["read"]:
        said = f"{no_text} records have no {text_column!r}"
        print(f"WARNING: {said}: is their text in another column?")
    elif no_text:
        print(f"            and {no_text} records without {text_column!r}")
    not_utf8 = sum(place["not_utf8"] for place in journal["places"].values())
    if not_utf8:
        firsts = [place["first_not_utf8"] for place in journal["places"].values()]
        first = next((f", the first in {path}" for path in firsts if path), "")
        said = f"{not_utf8} documents have U+FFFD, where they were not UTF-8{first}"
        print(f"WARNING: {said}: iconv -f WINDOWS-1252 -t UTF-8 mends files of an older time")
    if len(count["sources"]) > 1:
        for name, part in count["sources"].items():
            size = f"{part['tokens']:,} tokens and {part['val_tokens']:,} held out"
            print(f"from        {name}: {part['read']} read, {part['kept']} kept, {size}")
    print(f"tokens      {count['tokens']:,}, {length:.2f} characters each")
    print(f"rows        {count['rows']:,}, {count['val_rows']:,} held out, of {seq_len} tokens")
    if not pack:
        print(f"            {1 - count['filled']:.1%} of them is padding, and what begins a record")
    if count["cut"]:
        long = f"{count['cut']} records were longer than a row, and cut"
        lost = f"{count['cut_tokens']:,} tokens are lost"
        print(f"WARNING: {long}: {lost}; a larger --seq_len has more room")
    if count["unknown"]:
        share = count["unknown"] / count["tokens_read"]
        print(f"WARNING: {count['unknown']:,} tokens ({share:.2%}) are not in {vocab_file}: [UNK]")
    for line in good_for(count["rows"] * seq_len):
        print(f"ten passes  {line}")
    print(f"written     {goal} in {seconds:.1f} s")
    if count["kept_share"] < 0.8:
        meant = "the filter is meant for English prose"
        print(f"WARNING: less than 80 % were kept: {meant}; --filter_ratio=0 turns it off")
    if journal["errors"]:
        said = "sources or files were not read to their end"
        print(f"WARNING: {len(journal['errors'])} {said}: errors in {goal}/meta.json names them")
    limit, places = journal["limit"], journal["places"]
    # Documents are read ahead: if all sources have ended, the limit came among the last ones.
    all_ended = all(place["ended"] for place in places.values())
    for name, paths in journal["files"].items():
        is_cut = all_ended or not places[name]["ended"]
        if limit and is_cut:
            at = min(places[name]["file"], len(paths) - 1)
            where = f"in file {at + 1} of {len(paths)}, {paths[at]}"
            print(f"note: {limit} ended the reading {where}; --{limit}=0 reads all")


def main():
    global vocab_size, normalisation
    start = time.perf_counter()
    least, orders = 260, ("shuffle", "curriculum")  # a trained vocabulary has all bytes
    if vocab_file:  # its tokens are spelt as the text is, and none need be a full stop
        words = read_vocabulary(vocab_file)
        vocab_size = len(words) + len(SPECIAL_OR_UNKNOWN)
        normalisation = "none"
        least, orders = 6, ("shuffle",)
    # fmt: off
    require(globals(), {
        "vocab_size": (least, 65536), "vocab_sample_mb": (1, 4000), "seq_len": (8, 65536),
        "filter_ratio": (-1, 10), "val_share": (1e-9, 0.5), "val_tokens": (seq_len, 10**8),
        "threads": (0, 4096), "normalisation": ("ascii", "plain", "none"),
        "documents": ("paragraphs", "lines"),
        "order": orders,
    })
    # fmt: on
    if max_rows > 0 and not pack:
        sys.exit("max_rows counts rows without padding: with --pack=False type --max_tokens=N")
    found = find_sources()
    share = shares(found)
    if filter_ratio < 0 and not filter_threshold():
        where = "below 4,096 entries" if normalisation in LIKE_ALBERT else "with no normalisation"
        print(f"note: {where} the paper's filter has no known threshold: all is kept")
    if filter_ratio < 0 and vocab_size > ENTRIES[-1]:
        print("note: the filter has the threshold of 32,768 entries: --filter_ratio sets another")
    if "fineweb-edu" in source.lower():
        print("note: a pre-trained model chose FineWeb-Edu, which the challenge's rules exclude")
    paths = [path for paths in found.values() for path in paths if file_kind(path)]
    goal = Path(data_dir)
    # Two data sets with equal settings and files are equal.
    wanted = {name: globals()[name] for name in SETTINGS}
    for name in NOT_COMPARED:
        del wanted[name]
    wanted["files"] = [[path, os.path.getsize(path)] for path in paths]
    if vocab_file:
        wanted["vocabulary"] = text_hash("\n".join(words))

    with safety.lock(safety.lock_file(goal)):
        folder, journal = begin_folder(goal, wanted)
        if (folder / "meta.json").exists():  # killed at its very end
            finish_folder(folder, goal, journal)
            return
        journal = journal or begin_journal(folder, wanted, found)
        files = journal["files"]
        if not journal["has_vocabulary"]:
            make_vocabulary(files, share, folder)
            journal["has_vocabulary"] = True
            write_journal(folder, journal)
        tokenizer = Tokenizer(folder / "tokenizer.json")
        full_stop = None
        if order == "curriculum":  # it counts "." alone, as the paper's code: no "?", no '."'
            full_stop = tokenizer.encoding.encode_single_token(".")
        so_far = Partial(folder, journal, seq_len, full_stop, pack)
        if not journal["all_read"]:
            read_all(files, share, so_far)
            journal["all_read"] = True
        count = so_far.count
        so_far.finish()
        finish_counts(count, folder)
        count["unread_files"] = len(journal["errors"])
        meta = {"vocab_size": vocab_size, "seq_len": seq_len, "dtype": "uint16"}
        meta |= {"filter_threshold": filter_threshold(), "complete": not journal["errors"]}
        meta |= {"settings": wanted, "counts": count, "errors": journal["errors"]}
        finish_folder(folder, goal, meta)
    print_summary(count, journal, goal, time.perf_counter() - start)


if __name__ == "__main__":
    advice = "the same command goes on"
    safety.run(main, data_dir, advice, lambda: "--vocab_sample_mb=10")
