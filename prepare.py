"""Raw text to a tokenizer and rows of tokens, one batch of documents at a time.

    python prepare.py                                                  # FineWeb, for a day
    python prepare.py --source='texts/*.txt.gz' --data_dir=data/mine   # or .jsonl, .csv, .parquet
    python prepare.py config/tiny.py                                   # the embedded corpus

Rerun the command to continue after a kill; the output is identical.
"""

import functools
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shlex
import signal
import sys
import threading
import time
import unicodedata
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
import nanocram
from nanocram import hub, safety, sources
from nanocram.hub import HUB, explain, open_bytes
from nanocram.settings import adopt, check, configure, recipes
from nanocram.sources import file_kind, read_texts
from nanocram.tokenizer import CLS, GONE, MODES, SEP, Tokenizer, train_tokenizer, with_stand_ins

# fmt: off
# what to read
data_dir = "data/fineweb"             # the folder to write
# globs of local files, Hub data sets as NAME or NAME:CONFIG; commas between several
source = "HuggingFaceFW/fineweb:sample-10BT"
max_tokens = 0                        # stop reading the Hub once so many are kept; 0 = read all
text_column = "text"                  # where .jsonl, .csv, .parquet and the Hub have the text
documents = "paragraphs"              # of a .txt: paragraphs (a blank line ends one) | lines
# text to tokens
# ascii: lower case, no accents (paper) | plain: any script | none: as it is, line breaks too
normalisation = "ascii"
tokenizer = ""                        # a data or model folder with the vocabulary; '' = train one
vocab_size = 32768                    # entries of the byte-level BPE, 4 special; 260 = bytes alone
vocab_sample_mb = 100                 # million characters to train it on, shared by the sources
# tokens to rows
seq_len = 128                         # tokens in a row, the leading [CLS] included
filter_ratio = -1.0                   # keep if tokens < ratio x characters; -1 = paper's; 0 = all
order = "shuffle"                     # shuffle | curriculum: most full stops first (paper 4.4)
val_share = 0.0                       # share of documents held out, by hash; 0 = by the text's size
val_tokens = 1000000                  # in val.bin at most; what else is held out is dropped
# fmt: on

SETTINGS = configure(globals())

BATCH = 1 << 23  # characters
PAUSE, TRIES = 60.0, 60  # seconds before the Hub is asked again, and how often
MERGED = 1 << 26  # tokens of train.bin that are merged and written at a time
load_tokenizer = functools.cache(Tokenizer)  # once in a process


def describe(path):
    """[path, bytes, time of change]"""
    stat = os.stat(path)
    return [path, stat.st_size, stat.st_mtime_ns]


def find_files(source):
    """{name: [describe(path)]} of a source's local files, sorted; [] for a Hub data set."""
    found, seen, n_again, n_empty = {}, set(), 0, 0
    names = [source] if os.path.isfile(source) else source.split(",")
    for name in (os.path.expanduser(name.strip()) for name in names):
        if name == "data/sample.txt.gz" and not os.path.isfile(name):  # from another folder
            name = os.path.join(os.path.dirname(__file__), name)
        exact = glob.glob(name.replace("[", "[[]"), recursive=True)  # of a folder lr[1e-3]
        matches = [name] if os.path.isfile(name) else exact or glob.glob(name, recursive=True)
        real = {path: os.path.realpath(path) for path in sorted(set(matches))}  # of ends of links
        paths = [path for path in real if not os.path.isdir(real[path])]
        if matches and not paths:
            sys.exit(f"{matches[0]} is a folder: {sources.files_in(matches[0])}")
        if not paths and (not name or glob.escape(name) != name or file_kind(name)):
            sys.exit(f"no file matches {name!r}: give globs in quotes, as in 'a/*.txt,b.jsonl'")
        new = []
        for path in paths:
            if real[path] in seen:  # by another glob, or links in a circle
                continue
            if not file_kind(path):
                sys.exit(f"{path} is of no kind that is read: use .txt, .jsonl, .parquet or .csv")
            if not os.access(path, os.R_OK):
                sys.exit(f"{path} cannot be read: its link leads nowhere, or you may not read it")
            seen.add(real[path])
            new.append(describe(path))
        if new or not paths:
            found[name] = new
        n_again += len(paths) - len(new)
        n_empty += sum(size == 0 for _, size, _ in new)
    if n_again:
        safety.say(f"names that lead to files which are read already: {n_again}")
    if n_empty:
        safety.say(f"files without a byte: {n_empty}")
    return found


def read_file(path, skipped):
    """Yield (number from 1, text, bytes read so far) of a file's documents behind skipped ones."""
    edges = "\r\n" if normalisation == "none" else None  # None strips all white space
    tries = 0
    while True:
        try:
            with open_bytes(path) as file:
                texts = enumerate(read_texts(file, path, text_column, documents == "lines"), 1)
                for number, text in itertools.islice(texts, skipped, None):
                    yield number, text.strip() and text.strip(edges), file.tell()
                    skipped, tries = number, 0
            return
        except Exception as e:  # whatever the readers of gzip, JSON, parquet or the Hub raise
            why, hint = explain(e)
            why = f"{path} could not be read to its end ({why})"
            # the Hub may answer in a while; what it refuses and a reader's ValueError stay
            if hint or isinstance(e, ValueError) or not path.startswith(HUB) or tries == TRIES:
                sys.exit(f"{why}: {hint or 'rerun the command once it is mended'}")
            if not tries:
                safety.say(f"{why}: it is tried again each minute, {TRIES} times")
            tries += 1
            time.sleep(PAUSE)


def read_batches(files, place, least=None):
    """Yield batches of least characters from a place on, [number of a file, of a document in it]:
    (texts, {place where to go on, bytes read so far, whether they are of the Hub}). None mixes text
    of local files with the Hub's, of which max_tokens are read."""
    first, skipped = place
    before = sum(n_bytes for _, n_bytes, *_ in files[:first])
    of_hub = [path.startswith(HUB) for path, *_ in files]
    texts, size = [], 0
    for i, (path, n_bytes, *_) in enumerate(files[first:], first):
        limit = min(BATCH, (of_hub[i] and max_tokens // 16) or BATCH)  # a 64th of its characters
        for number, text, position in read_file(path, skipped):
            texts.append(text)
            size += max(len(text), 64)  # an empty str takes that, too
            if size >= (limit if least is None else least):
                yield texts, {"place": [i, number], "bytes": before + position, "hub": of_hub[i]}
                texts, size = [], 0
        if not of_hub[i] and describe(path) != [*files[i]]:
            sys.exit(f"{path} changed while it was read: rerun the command, or read a copy of it")
        before, skipped = before + n_bytes, 0
        if texts and of_hub[i : i + 2] != 2 * [of_hub[i]]:
            yield texts, {"place": [i + 1, 0], "bytes": before, "hub": of_hub[i]}
            texts, size = [], 0


def copy_key(text):
    """The bytes that copies share which differ in case, white space and Unicode's form alone."""
    # lower() does the same to ASCII, in a sixth of the time
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return "".join(folded.split()).encode("utf-8", "replace")


def has_copies(texts):
    """Whether some texts differ in case, white space and Unicode's form alone."""
    texts = {text.replace("\r\n", "\n") for text in texts}
    # by the first 30 bytes of a key, which 30 words have, for whole keys take eight times as long
    begins = [hash(copy_key(" ".join(text.split(None, 30)[:30]))[:30]) for text in texts]
    shared = {begin for begin, n in Counter(begins).items() if n > 1}
    alike = [text for text, begin in zip(texts, begins, strict=True) if begin in shared]
    return len({hash(copy_key(text)) for text in alike}) < len(alike)


def is_held_out(text, val_share, by_key=False):
    """Decide by the text alone, or by its copy_key(), so that its copies are held out, too."""
    data = copy_key(text) if by_key else text.replace("\r\n", "\n").encode("utf-8", "replace")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_share * 2**64


def filter_threshold():
    """Documents with at least so many tokens a character are dropped, of which the paper's 0.25
    counts ALBERT's (section 4.4). Ours are fitted to drop as many: see docs/how_it_works.md."""
    if filter_ratio >= 0 or vocab_size < 4096 or normalisation == "none":
        return max(0.0, filter_ratio) or 1e9  # drop none
    least, slope = (0.237, 0.011) if normalisation == "ascii" else (0.246, 0.014)
    halvings = max(0.0, 15 - np.log2(vocab_size))
    return round(least + slope * halvings + 0.0041 * halvings**2, 3)


def make_vocabulary(files, folder):
    """Train it on the first texts of each source, or copy it. Returns what is_held_out() takes."""
    said = tokenizer or f"{vocab_sample_mb} MB at most; a lower --vocab_sample_mb saves memory"
    print(f"vocabulary  {vocab_size} entries, of {said}")
    sample, size, n_documents = [], 0, 0  # of all text, roughly
    for paths in files.values():
        parts = read_batches(paths, [0, 0], vocab_sample_mb * 1e6 / len(files))
        for texts, batch in itertools.islice(parts, 1):
            n_characters = sum(map(len, texts))
            scale = max(1, sum(n_bytes for _, n_bytes, *_ in paths) / max(1, batch["bytes"]))
            if max_tokens and batch["hub"]:
                scale = min(scale, 4 * max_tokens / max(1, n_characters))
            size += scale * n_characters
            n_documents += scale * len(texts)
            sample += texts
    n_read, sample = len(sample), [*filter(None, sample)]
    if not sample:
        sys.exit(f"no text in {source}: give other text")
    if len(sample) < n_read / 2:
        said = f"{len(sample)} of {n_read} documents have a text in {text_column!r}"
        print(f"WARNING: {said}: see Labels in docs/own_text.md if others have it elsewhere")
    # hold out 1 %, less of a large text, up to 10 % so that it makes 200 rows and 8 documents
    least = max(200 * seq_len * 4 / size, 8 / n_documents)  # four characters are a token
    chosen = max(1e-4, min(0.01, 4 * val_tokens / size), min(0.1, least))
    # without copies by_key would move rows for nothing
    rule = {"val_share": val_share or float(f"{chosen:.1g}"), "by_key": has_copies(sample)}
    to_train_on = [text for text in sample if not is_held_out(text, **rule)]
    held_out = 1 - sum(map(len, to_train_on)) / sum(map(len, sample))
    said = f"{held_out:.0%} of the text is held out: give more documents, or --documents=lines"
    if not (to_train_on or tokenizer):
        sys.exit(said)
    if held_out > 3 * rule["val_share"] + 0.05:
        print(f"WARNING: {said}")
    begins = [text[:10000] for text in sample[:: max(1, len(sample) // 500)]]
    paths = {path for path, *_ in itertools.chain(*files.values())}
    if paths & sources.NOT_UTF8 and np.mean([*map(is_lost, begins)]) > 0.5:
        advice = "if they are of Western Europe, type iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
        sys.exit(f"most texts are not UTF-8: {advice}")
    if normalisation == "ascii":
        check_normalisation(begins)
    if tokenizer:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            safety.write_text(folder / name, (Path(tokenizer) / name).read_text("utf-8"))
    else:
        with safety.ends_at_once():
            train_tokenizer(to_train_on, vocab_size, normalisation, folder)
    if filter_ratio < 0 and filter_threshold() < 1:
        vocabulary = Tokenizer(folder / "tokenizer.json")
        normal = [vocabulary.normalise(text) for text in begins]
        ratios = [len(vocabulary.encode_normal(text)) / max(1, len(text)) for text in normal]
        if (dropped := np.mean(np.array(ratios) >= filter_threshold())) > 0.5:  # of prose: 6 %
            sys.exit(f"the filter would drop {dropped:.0%} of the documents: type --filter_ratio=0")
    return rule


def is_lost(text):
    """Whether most of a text's characters outside ASCII are U+FFFD."""
    return 2 * text.count("\ufffd") > len(text) - len(text.encode("ascii", "ignore"))


def check_normalisation(texts):
    """Exit where it would spoil most of some texts, warn where it takes a hundredth."""
    texts = [with_stand_ins(re.sub(GONE, "\ufffd", text)) for text in texts]
    share = sum(char > "\x7f" for text in texts for char in text) / sum(map(len, texts))
    hit = np.mean([not word.isascii() for text in texts for word in text.split()])
    said = f"normalisation=ascii drops {share:.1%} of the characters, in {hit:.1%} of the words"
    if share > 0.5 or hit > 0.8:
        sys.exit(f"{said}: type --normalisation=plain")
    if max(share, hit / 2) > 0.01:
        print(f"WARNING: {said}: --normalisation=plain keeps them")


def begin_process(settings):
    """Set up a process to make rows: it has imported this file anew, and ends with its parent."""
    globals().update(settings)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def process_batch(number, batch, folder, rule):
    """Write the rows of its texts, shuffled, and their held-out ids, then batch; return that."""
    stem = folder / f"batch-{number:05}"
    texts = pickle.loads(stem.with_suffix(".texts").read_bytes())
    vocabulary = load_tokenizer(folder / "tokenizer.json")
    normals = [vocabulary.normalise(text) for text in texts]
    pieces = [np.append(vocabulary.encode_normal(normal), np.uint16(SEP)) for normal in normals]
    n_tokens, n_characters = (np.array([*map(len, parts)]) for parts in (pieces, normals))
    reasons = {  # not to keep a text, the first that holds
        "empty": n_tokens == 1,
        "held_out": [is_held_out(text, **rule) for text in texts],
        "filtered": n_tokens - 1 >= filter_threshold() * n_characters,
    }
    fate = np.select([*reasons.values()], [*reasons], "kept")
    kept, held_out = fate == "kept", fate == "held_out"
    count = {"read": len(texts), "not_utf8": sum("\ufffd" in text for text in texts)}
    count |= {name: int((fate == name).sum()) for name in ("kept", *reasons)}
    ids = np.concatenate(pieces)
    train_ids, val_ids = (ids[np.repeat(chosen, n_tokens)] for chosen in (kept, held_out))
    count |= {"tokens": len(train_ids), "characters": int(n_characters[kept].sum())}
    count["words"] = sum(len(text.split()) for text in itertools.compress(texts, kept))
    count |= {"val_tokens": len(val_ids), "val_characters": int(n_characters[held_out].sum())}

    rows = np.random.default_rng(number).permutation(in_rows(train_ids))
    stop = vocabulary.encoding.encode_single_token(".")  # as the paper's code: no "?", no '."'
    stops = (rows == stop).sum(axis=1) * (order == "curriculum")
    rows = rows[np.argsort(-stops, kind="stable")]
    safety.write_beside(stem.with_suffix(".train"), rows.tofile)
    safety.write_beside(stem.with_suffix(".val"), val_ids.tofile)
    batch |= {"rows": np.bincount(stops).tolist(), "counts": count}  # rows by their full stops
    safety.write_text(stem.with_suffix(".json"), json.dumps(batch))
    stem.with_suffix(".texts").unlink()
    return batch


def in_rows(ids):
    """Rows (n, seq_len), each [CLS] and the next ids; less than a row is dropped."""
    whole = len(ids) // (seq_len - 1) * (seq_len - 1)
    return np.insert(ids[:whole].reshape(-1, seq_len - 1), 0, CLS, axis=1)


def hub_tokens(batches):
    return max_tokens and sum(batch["counts"]["tokens"] for batch in batches if batch["hub"])


def process_batches(files, folder, rule, settings):
    """What is known of each batch, in order; exits if a file cannot be read to its end."""
    sums = [""]  # of the first 0, 1, 2 files
    for file in files:
        sums.append(hashlib.blake2b(f"{sums[-1]}{file}".encode(), digest_size=8).hexdigest())
    batches, running, wanted = [], [], max_tokens or np.inf
    # go on behind finished batches, up to the first that is of other files
    while (path := folder / f"batch-{len(batches):05}.json").exists():
        batch = safety.read_json(path, f"delete {folder}, then rerun the command")
        if hub_tokens(batches) >= wanted or batch["checksum"] not in sums:
            break
        batches.append(batch)
    if n_found := len([*folder.glob("batch-*.json")]):
        print(f"going on behind {len(batches)} finished batches in a row, of {n_found}")
    total = max_tokens or sum(n_bytes for _, n_bytes, *_ in files)
    bar = safety.Bar(total=total, unit="tokens" if max_tokens else "B", unit_scale=True)
    to_come = read_batches(files, batches[-1]["place"] if batches else [0, 0])
    spawn = multiprocessing.get_context("spawn")  # the same on every system
    n = min(nanocram.cores, 14)  # reading feeds no more
    with ProcessPoolExecutor(n, spawn, begin_process, (settings,)) as pool, bar:
        try:
            while hub_tokens(batches) < wanted:
                for texts, batch in itertools.islice(to_come, n + 2 - len(running)):  # two wait
                    file, document = batch["place"]
                    batch["checksum"] = sums[file + (document > 0)]
                    number = len(batches) + len(running)
                    # by a file: to send much may hang if a process dies (Python's issue 94777)
                    (folder / f"batch-{number:05}.texts").write_bytes(pickle.dumps(texts))
                    # Ctrl-C waits until then, and for good in a process that submit() begins
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                    running.append(pool.submit(process_batch, number, batch, folder, rule))
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                if not running:
                    break
                batches.append(running.pop(0).result())
                bar.update((hub_tokens(batches) if max_tokens else batches[-1]["bytes"]) - bar.n)
        except BrokenExecutor:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            # a broken pool would wait for ever for one that it was about to begin
            for process in multiprocessing.active_children():
                process.kill()
            sys.exit("one of its processes ended early: rerun, behind taskset -c 0 to save memory")
    return batches


def merge(batches, folder):
    """Write train.bin: the next row is of a random batch, by the rows that each has left."""
    read = [0] * len(batches)  # bytes of each batch
    numbers = np.arange(len(batches), dtype=np.min_scalar_type(len(batches)))
    rng = np.random.default_rng(0)
    by_stops = itertools.zip_longest(*(batch["rows"] for batch in batches), fillvalue=0)
    levels = [rng.permutation(np.repeat(numbers, n_rows)) for n_rows in reversed([*by_stops])]
    batch_of_row = np.concatenate([numbers[:0], *levels])
    with open(folder / "train.bin", "wb") as f:
        n = max(1, MERGED // seq_len)
        for some in np.split(batch_of_row, range(n, len(batch_of_row), n)):
            rows = np.empty((len(some), seq_len), np.uint16)
            places = np.argsort(some, kind="stable")  # of each batch in turn, in their order
            chosen, firsts = np.unique(some[places], return_index=True)
            for number, its_places in zip(chosen, np.split(places, firsts[1:]), strict=False):
                file = folder / f"batch-{number:05}.train"
                ids = np.fromfile(file, np.uint16, seq_len * len(its_places), offset=read[number])
                rows[its_places] = ids.reshape(-1, seq_len)
                read[number] += ids.nbytes
            f.write(rows)
    return len(batch_of_row)


def finish(batches, folder, settings, rule, begin):
    """Merge the batches, write meta.json, by which the folder is finished, and print its counts."""
    count = {name: sum(batch["counts"][name] for batch in batches) for name in batches[0]["counts"]}
    count["rows"] = merge(batches, folder)
    held_out = [np.fromfile(folder / f"batch-{i:05}.val", np.uint16) for i in range(len(batches))]
    rows = np.random.default_rng(0).permutation(in_rows(np.concatenate(held_out)))
    rows = rows[: val_tokens // (seq_len - 1)]
    rows.tofile(folder / "val.bin")
    count["val_rows"] = len(rows)
    # less than a row at the end of a batch; what was held out beyond val_tokens
    count["dropped_tokens"] = count["tokens"] - count["rows"] * (seq_len - 1)
    count["val_dropped_tokens"] = count["val_tokens"] - count["val_rows"] * (seq_len - 1)
    if not (count["rows"] and count["val_rows"]):
        few = f"{count['rows']} rows kept, {count['val_rows']} held out of {count['read']}"
        more = "more text, --documents=lines, a larger --val_share or --filter_ratio=0"
        sys.exit(f"{few} documents ({documents}): delete {folder}, then give {more}")
    meta = {"settings": settings, "vocab_size": vocab_size, "seq_len": seq_len}
    meta |= rule | {"counts": count, "sha256": {}}
    for name in ("tokenizer.json", "tokenizer_config.json", "train.bin", "val.bin"):
        with open(folder / name, "r+b") as f:
            meta["sha256"][name] = hashlib.file_digest(f, "sha256").hexdigest()
            safety.sync(f)
    safety.write_text(folder / "meta.json", json.dumps(meta, indent=2))
    length = count["characters"] / count["tokens"]
    kept = f"{count['kept']} kept, {count['filtered']} filtered, {count['empty']} empty"
    print(f"documents   {count['read']} read, {kept}, {count['held_out']} held out")
    print(f"tokens      {count['tokens']:,} of {length:.2f} characters, {count['words']:,} words")
    print(f"rows        {count['rows']:,}, {count['val_rows']:,} held out, of {seq_len} tokens")
    print(f"written     {data_dir} in {time.perf_counter() - begin:.1f} s")
    if n := count["not_utf8"]:
        print(f"WARNING: {n} documents have U+FFFD, which stands for characters that were lost")
    print(f"next        {next_command(count['rows'] * seq_len)}")


def differences(have, wanted):
    """The settings that differ, in words; one that a fork has added had its default then."""
    have = SETTINGS | have
    other = {k: f"{k}={have[k]!r:.60}" for k, value in wanted.items() if have[k] != value}
    if other.pop("files", "") and "source" not in other:
        changed = (file[0] for file in wanted["files"] if file not in have["files"])
        other["files"] = f"other files, {next(changed, 'and more of them')}"
    return ", ".join(other.values())


def begin_folder(folder, settings, files):
    """The plan, by which a rerun goes on: settings, the Hub's files, soon all files and a rule."""
    names, path = safety.names_in(folder), folder / "plan.json"
    if path.name in names:
        plan = safety.read_json(path, f"delete {folder}, then rerun the command")
        if not (other := differences(plan["settings"], settings)):
            return plan
        if any(folder.glob("batch-*.json")):
            sys.exit(f"{data_dir} was begun with {other}: give that to go on, or delete it")
    elif names:
        sys.exit(f"{data_dir} is not a new or an empty folder: choose another --data_dir")
    plan = {"settings": settings, "hub": {}}
    for name, local in files.items():
        if not local:
            try:
                plan["hub"][name] = hub.files_of(name)
            except Exception as e:  # whatever the Hub's libraries raise
                why, hint = explain(e)
                sys.exit(f"could not read {name} ({why}): {hint or 'rerun it later'}")
    safety.write_text(path, json.dumps(plan, indent=1))
    return plan


def next_command(tokens):
    """The command that trains by the same recipes, or a model of a size for so many tokens."""
    flags = [f"--data_dir={data_dir}", f"--vocab_size={vocab_size}", f"--seq_len={seq_len}"]
    out = Path(data_dir).name
    if tokenizer and Path(tokenizer, "config.json").exists():
        flags[1] = f"--init={tokenizer}"
        out = f"{Path(tokenizer).name}_{out}"
    elif seq_len > 512:
        flags += [f"--max_seq_len={seq_len}"]
    flags += [f"--out_dir=out/{out}"]
    sizes = [(5e6, "tiny"), (1e8, "small"), (5e8, "domain")]
    by_size = [f"config/{name}.py" for most, name in sizes if tokens < most]
    return shlex.join(["python", "train.py", *(recipes or by_size[:1]), *flags])


def main():
    begin = time.perf_counter()
    allowed = {
        "normalisation": MODES,
        "documents": ("paragraphs", "lines"),
        "order": ("shuffle", "curriculum"),
        "vocab_size": (260, 65536),
        "seq_len": (8, 65536),
        "val_tokens": (seq_len, 10**9),
        "max_tokens vocab_sample_mb": (0, 10**15),
        "filter_ratio": (-1, np.inf),
        "val_share": (0, 0.5),
    }
    check(globals(), allowed)
    files = find_files(source)
    if max_tokens and list(files.values()).count([]) > 1:
        sys.exit("max_tokens would read the first data set of the Hub alone: name one --source")
    path = Path(tokenizer) / "tokenizer.json"
    if tokenizer:
        theirs = Tokenizer(path)
        adopt(globals(), {"normalisation": theirs.mode, "vocab_size": theirs.vocab_size}, path)
    settings = {name: globals()[name] for name in SETTINGS}
    settings["tokenizer"] = tokenizer and f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    del settings["data_dir"]  # it changes no row
    wanted = settings | {"files": list(itertools.chain(*files.values()))}
    folder = Path(data_dir).resolve()  # what a link names
    _lock = safety.lock(folder)  # until main() ends
    if (folder / "meta.json").exists():
        meta = safety.read_json(folder / "meta.json", f"delete {folder}, then rerun the command")
        if other := differences(meta["settings"], wanted):
            sys.exit(f"{data_dir} was made with {other}: delete it or choose another --data_dir")
        print(f"{data_dir} is finished, with these settings: nothing to do")
    else:
        plan = begin_folder(folder, settings, files)
        files |= plan["hub"]
        every = sorted(itertools.chain(*files.values()), key=lambda file: file[0].startswith(HUB))
        print(f"reading     {sum(size for _, size, *_ in every) / 1e6:,.1f} MB, {len(every)} files")
        if "rule" not in plan:
            plan |= {"files": every, "rule": make_vocabulary(files, folder)}
            safety.write_text(folder / "plan.json", json.dumps(plan, indent=1))
        elif plan["files"] != every:
            print(f"WARNING: files have changed: for their vocabulary delete {data_dir}, rerun")
        rule = plan["rule"]
        print(f"held out    {100 * rule['val_share']:g} % of the documents")
        batches = process_batches(every, folder, rule, settings)
        print("merging")
        finish(batches, folder, wanted, rule, begin)
    for path in (*folder.glob("batch-[0-9]*"), folder / "plan.json"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    safety.run(main, data_dir, "rerun it to go on", "lower --vocab_sample_mb, in a new folder")
