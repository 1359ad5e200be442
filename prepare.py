"""Raw text to a tokenizer and rows of tokens, one part of the input at a time.

    python prepare.py                                                  # FineWeb, for a day
    python prepare.py --source='texts/*.txt.gz' --data_dir=data/mine   # or .jsonl, .csv, .parquet
    python prepare.py config/tiny.py                                   # the embedded corpus

Each process takes a part, a file or several small ones, and writes its rows, shuffled, to a file in
DATA_DIR.partial; at the end these are merged. Rerun the command to continue after a kill; the
output is identical.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from nanocram import safety, sources
from nanocram.settings import configure, prepare_streams
from nanocram.sources import HUB, explain, file_kind, open_bytes, read_texts
from nanocram.tokenizer import CLS, MODES, SEP, Tokenizer, normalise, train_tokenizer

# fmt: off
# what to read
data_dir = "data/fineweb"             # the folder to write
# globs of local files, Hub data sets as NAME or NAME:CONFIG; commas between several
source = "HuggingFaceFW/fineweb:sample-10BT"
max_tokens = 0                        # stop reading the Hub after keeping this many; 0 = read all
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
val_share = 0.0001                    # share of documents held out for val.bin, by their hash
val_tokens = 1000000                  # in val.bin at most; what else is held out is dropped
processes = 0                         # parts read at a time; 0 = one per core; same result
# fmt: on

SETTINGS = configure(globals())

# The paper's 0.25 (section 4.4) counts the tokens of ALBERT's vocabulary. For a vocabulary of
# ENTRIES[i], the ratio LIKE_ALBERT[i] drops as many documents (measured: results/README.md).
# Between them we interpolate, above them the last one holds. Smaller vocabularies have no filter:
# at 1,024 entries the trend would drop 85 % of Wikipedia and books.
ENTRIES = (4096, 8192, 16384, 32768)
LIKE_ALBERT = {"ascii": (0.307, 0.275, 0.252, 0.237), "plain": (0.325, 0.290, 0.264, 0.246)}
CHUNK = 1 << 25  # tokens whose rows are shuffled in memory and written together
SMALL = 64 << 20  # local files share a part until it has so many bytes
PAUSE, TRIES = 60.0, 60  # seconds before the Hub is asked again, and how often
MERGED = 1 << 25  # tokens of train.bin that are merged and written at a time
COUNTS = (
    "read kept filtered held_out empty not_utf8 tokens characters val_tokens val_characters"
).split()
OTHER = ("data_dir", "processes")  # settings that change no row
progress = []  # bytes read of each part, shared by all processes


# What to read


def find_files():
    """{source: [[path, bytes]]} of local files, sorted; [] for a Hub data set."""
    found, seen = {}, set()
    names = [source] if os.path.isfile(source) else source.split(",")
    for name in (os.path.expanduser(name.strip()) for name in names):
        if name == "data/sample.txt.gz" and not os.path.isfile(name):  # from another folder
            name = os.path.join(os.path.dirname(__file__), name)
        matches = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
        paths = sorted(filter(os.path.isfile, set(matches)))
        is_pattern = not name or glob.escape(name) != name
        if not paths and (is_pattern or file_kind(name) or os.path.isdir(name)):
            sys.exit(f"no file matches {name!r}: give globs in quotes, --source='a/*.txt,b.jsonl'")
        for path in paths:
            if not file_kind(path):
                kinds = ".txt, .log, .jsonl, .json, .csv, .tsv, each also .gz or .zst, or .parquet"
                sys.exit(f"{path} is of no kind that is read: make it one of {kinds}")
        new = [path for path in paths if path not in seen]  # globs may overlap
        seen.update(new)
        if new or not paths:
            found[name] = [[path, os.path.getsize(path)] for path in new]
    return found


def make_parts(files):
    """[[path, bytes]] of each part, in a fixed order.

    With max_tokens all Hub files are one part: one process reads them in order up to there."""
    every = list(itertools.chain(*files.values()))
    from_hub = [file for file in every if file[0].startswith(HUB)]
    parts = [from_hub] if max_tokens and from_hub else [[file] for file in from_hub]
    size = SMALL  # so that the first local file begins a part
    for path, n_bytes in every:
        if not path.startswith(HUB):
            if size >= SMALL:
                parts.append([])
                size = 0
            parts[-1].append([path, n_bytes])
            size += n_bytes
    return parts


def texts_from(files, state):
    """Yield (text, bytes read so far), from the place in state on, and advance state.

    Where a file cannot be read to its end, state["error"] says why, and nothing more comes."""
    before = sum(n_bytes for _, n_bytes in files[: state["file"]])
    for path, n_bytes in files[state["file"] :]:
        try:
            with open_bytes(path) as file:
                texts = read_texts(file, path, text_column, documents == "lines")
                for text in itertools.islice(texts, state["document"], None):
                    state["document"] += 1
                    bare = text.strip()
                    if bare and normalisation == "none":
                        bare = text.strip("\r\n")
                    yield bare, before + file.tell()
        except Exception as e:  # whatever the readers of gzip, JSON, parquet or the Hub raise
            state["error"] = f"{path} could not be read to its end ({explain(e)})"
            # the Hub may answer in a while; a reader's ValueError stays
            state["is_lost"] = path.startswith(HUB) and not isinstance(e, ValueError)
            return
        state.update(file=state["file"] + 1, document=0)
        before += n_bytes


def is_held_out(text):
    """Decide by the text alone, so that every copy of a held-out document stays out of training."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_share * 2**64


def filter_threshold():
    """Documents with at least so many tokens per character are dropped; 0: none is."""
    if filter_ratio >= 0:
        return filter_ratio
    if vocab_size < ENTRIES[0] or normalisation not in LIKE_ALBERT:
        return 0.0
    return float(np.interp(np.log2(vocab_size), np.log2(ENTRIES), LIKE_ALBERT[normalisation]))


def make_vocabulary(parts, folder):
    """Train it on parts, one of each source, or copy it; exit where it does not suit the text."""
    how = f"is that of {tokenizer}" if tokenizer else f"is made of {vocab_sample_mb} MB at most"
    print(f"the vocabulary, {vocab_size} entries, {how}")
    sample = []
    for files in parts:
        left = vocab_sample_mb * 1e6 / len(parts)
        state = {"file": 0, "document": 0}
        for text, _ in texts_from(files, state):
            sample.append(text)
            left -= len(text)
            if left <= 0:
                break
        if "error" in state:
            sys.exit(f"{state['error']}: rerun the command once it can be read")
    if not sample:
        sys.exit(f"no text in {source}: give other text")

    begins = [text[:10000] for text in sample[:: max(1, len(sample) // 1000)]]
    if normalisation == "ascii":
        check_normalisation(begins)
    if tokenizer:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            safety.write_text(folder / name, (Path(tokenizer) / name).read_text("utf-8"))
    else:
        to_train_on = (text for text in sample if not is_held_out(text))
        train_tokenizer(to_train_on, vocab_size, normalisation, folder)
    if filter_ratio < 0 and filter_threshold():
        check_filter(begins, folder / "tokenizer.json")


def check_normalisation(texts):
    """Exit where it would spoil most of some texts, warn where it takes a hundredth."""
    # Letters outside ASCII lose their accents, or go; other signs have stand-ins.
    lost = sum(char.isalpha() for text in texts for char in text if char > "\x7f")
    share = lost / sum(map(len, texts))
    said = f"normalisation=ascii strips or drops {share:.1%} of the characters"
    if share > 0.5:
        sys.exit(f"{said}: type --normalisation=plain")
    if share > 0.01:
        print(f"WARNING: {said}: --normalisation=plain keeps them")


def check_filter(texts, path):
    """Exit where the paper's filter would drop most of some texts; of English prose it is 6 %."""
    vocabulary = Tokenizer(path)
    normal = [normalise(text, vocabulary.mode) for text in texts]
    ratios = [len(vocabulary.encode_normal(text)) / max(1, len(text)) for text in normal]
    dropped = np.mean(np.array(ratios) >= filter_threshold())
    if dropped > 0.5:
        path.unlink()
        said = f"the filter, meant for English prose, would drop {dropped:.0%} of the documents"
        sys.exit(f"{said}: type --filter_ratio=0")


# One part, in another process


def begin_process(settings, shared):
    """Set up a new process: give it the settings, and let it end with its parent."""
    globals().update(settings, progress=shared)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_streams()

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@contextlib.contextmanager
def new_processes(n, n_parts=0):
    """(pool of n processes, which end with the block; the bytes that they read of each part)."""
    spawn = multiprocessing.get_context("spawn")  # the same on every system
    shared = spawn.Array("d", n_parts, lock=False)
    settings = {name: globals()[name] for name in SETTINGS}
    pool = ProcessPoolExecutor(n, spawn, begin_process, (settings, shared))
    try:
        # Ctrl-C is for this process: start all others now, ignoring it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(n):
            pool.submit(os.getpid)
        signal.signal(signal.SIGINT, handler)
        yield pool, shared
    except BrokenProcessPool:
        advice = "rerun with --processes=1, or with --vocab_sample_mb=10"
        sys.exit(f"a worker process was killed, probably out of memory: {advice}")
    finally:
        for child in multiprocessing.active_children():
            child.kill()


def read_state(folder, number, files):
    """How far a part is; one whose files have changed begins anew."""
    path = folder / f"part-{number:05}.json"
    state = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if state.get("files") == files:
        return state
    return {"files": files, "done": False, "file": 0, "document": 0, "chunks": [], "counts": {}}


def process_part(number, files, folder, pause=0.0):
    """Write a part's rows, shuffled by chunks, and return its state; go on from its last chunk."""
    time.sleep(pause)
    state = read_state(folder, number, files)
    count = Counter(state["counts"])
    stem = folder / f"part-{number:05}"
    n_rows = sum(map(sum, state["chunks"]))
    for ending, size in ((".train", 2 * seq_len * n_rows), (".val", 2 * count["val_tokens"])):
        with open(f"{stem}{ending}", "ab") as f:
            f.truncate(size)  # what came after the last state
    vocabulary = Tokenizer(folder / "tokenizer.json")
    threshold = filter_threshold()
    limit = max_tokens if files[0][0].startswith(HUB) else 0
    kept, held_out, n_kept = [], [], 0

    for text, position in texts_from(files, state):
        if limit and count["tokens"] >= limit:
            break
        normal = normalise(text, vocabulary.mode)
        ids = np.append(vocabulary.encode_normal(normal), np.uint16(SEP))
        count["read"] += 1
        count["not_utf8"] += "\ufffd" in text
        if len(ids) == 1:
            count["empty"] += 1
        elif is_held_out(text):
            held_out.append(ids)
            count["held_out"] += 1
            count["val_tokens"] += len(ids)
            count["val_characters"] += len(normal)
        elif threshold and len(ids) - 1 >= threshold * len(normal):
            count["filtered"] += 1
        else:
            kept.append(ids)
            n_kept += len(ids)
            count["kept"] += 1
            count["tokens"] += len(ids)
            count["characters"] += len(normal)

        if n_kept >= CHUNK:
            write_chunk(stem, number, vocabulary, kept, held_out, state, count)
            kept, held_out, n_kept = [], [], 0
        progress[number] = 4 * count["tokens"] if limit else position  # see size_of()

    if "error" not in state:
        state["done"] = True
        write_chunk(stem, number, vocabulary, kept, held_out, state, count)
        progress[number] = size_of(files)
    return state


def write_chunk(stem, number, vocabulary, kept, held_out, state, count):
    """Append a chunk's rows and the held-out ids to a part's files, then write its state."""
    rows = in_rows(kept)
    np.random.default_rng([number, len(state["chunks"])]).shuffle(rows)
    stops = np.zeros(len(rows), np.int64)
    if order == "curriculum":  # it counts "." alone, as the paper's code: no "?", no '."'
        stops = (rows == vocabulary.encoding.encode_single_token(".")).sum(axis=1)
        rows = rows[np.argsort(-stops, kind="stable")]
    for ending, array in ((".train", rows), (".val", np.concatenate([NO_IDS, *held_out]))):
        with open(f"{stem}{ending}", "ab") as f:
            f.write(array)
            f.flush()
            os.fsync(f.fileno())
    state["chunks"].append(np.bincount(stops).tolist())  # rows by their number of full stops
    state["counts"] = count
    safety.write_text(stem.with_suffix(".json"), json.dumps(state))


NO_IDS = np.zeros(0, np.uint16)


def in_rows(pieces):
    """Rows (n, seq_len), each [CLS] and the next ids of the pieces; less than a row is dropped."""
    ids = np.concatenate([NO_IDS, *pieces])
    n_rows = len(ids) // (seq_len - 1)
    rows = np.full((n_rows, seq_len), CLS, np.uint16)
    rows[:, 1:] = ids[: n_rows * (seq_len - 1)].reshape(n_rows, seq_len - 1)
    return rows


# All parts


def size_of(files):
    """Bytes of a part, for the progress bar; of one that max_tokens ends, four for each token."""
    if max_tokens and files[0][0].startswith(HUB):
        return 4 * max_tokens
    return sum(n_bytes for _, n_bytes in files)


def process_parts(parts, folder):
    """The states of all parts, by several processes; exits if one could not be read to its end."""
    from tqdm import tqdm

    states = [read_state(folder, i, files) for i, files in enumerate(parts)]
    to_do = [i for i, state in enumerate(states) if not state["done"]]
    if len(to_do) < len(parts):
        print(f"going on: {len(parts) - len(to_do)} of {len(parts)} parts are done")
    n_cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # a batch job may not use all
        n_cores = len(os.sched_getaffinity(0))
    n = max(1, min(processes or n_cores, len(to_do)))
    bar = tqdm(total=sum(size_of(parts[i]) for i in to_do), unit="B", unit_scale=True, disable=None)
    with new_processes(n, len(parts)) as (pool, n_read), bar:
        futures = {pool.submit(process_part, i, parts[i], folder): i for i in to_do}
        running, tries = set(futures), Counter()
        while running:
            done, running = wait(running, 0.5, FIRST_COMPLETED)
            bar.update(sum(n_read) - bar.n)
            for future in done:
                i = futures[future]
                state = states[i] = future.result()
                place = i, state["file"], state["document"]
                if state.get("is_lost") and tries[place] < TRIES:
                    if not tries[place]:
                        bar.write(f"{state['error']}: it is tried again each minute, {TRIES} times")
                    tries[place] += 1
                    again = pool.submit(process_part, i, parts[i], folder, PAUSE)
                    futures[again] = i
                    running.add(again)
    errors = [state["error"] for state in states if "error" in state]
    for error in errors[:-1]:
        print(error)
    if errors:
        sys.exit(f"{errors[-1]}: rerun the command once it can be read, it goes on from there")
    return states


def merge(states, folder, path):
    """Write train.bin: a list with each chunk's number once for each of its rows is shuffled, and
    says from which chunk the next row comes.

    The chunks are shuffled already."""
    chunks, counts = [], []  # [file, byte in it], rows by their number of full stops
    for number, state in enumerate(states):
        offset = 0
        for n_rows in state["chunks"]:
            chunks.append([folder / f"part-{number:05}.train", offset])
            counts.append(n_rows)
            offset += 2 * seq_len * sum(n_rows)
    numbers = np.arange(len(chunks), dtype=np.uint16 if len(chunks) < 65536 else np.uint32)
    rng = np.random.default_rng(0)
    levels = []
    for n_stops in reversed(range(max(map(len, counts)))):
        repeats = [n_rows[n_stops] if n_stops < len(n_rows) else 0 for n_rows in counts]
        levels.append(rng.permutation(np.repeat(numbers, repeats)))
    chunk_of_row = np.concatenate(levels or [numbers[:0]])
    with open(path, "wb") as f:
        n = max(1, MERGED // seq_len)
        for start in range(0, len(chunk_of_row), n):
            some = chunk_of_row[start : start + n]
            rows = np.empty((len(some), seq_len), np.uint16)
            by_chunk = np.argsort(some, kind="stable")
            ends = np.cumsum(np.bincount(some, minlength=len(chunks)))
            for chunk, places in zip(chunks, np.split(by_chunk, ends[:-1]), strict=True):
                if len(places):
                    file, offset = chunk
                    ids = np.fromfile(file, np.uint16, seq_len * len(places), offset=offset)
                    rows[places] = ids.reshape(-1, seq_len)
                    chunk[1] += ids.nbytes
            f.write(rows)
    return len(chunk_of_row)


def finish(states, folder, goal, settings):
    """Merge the parts into DATA_DIR, which appears whole; return the counts of meta.json."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    count = {}
    for name in COUNTS:
        count[name] = sum(state["counts"].get(name, 0) for state in states)
    count["rows"] = merge(states, folder, out / "train.bin")
    parts = [folder / f"part-{number:05}.val" for number in range(len(states))]
    rows = in_rows([np.frombuffer(path.read_bytes(), np.uint16) for path in parts])
    rows = np.random.default_rng(0).permutation(rows)[: val_tokens // (seq_len - 1)]
    (out / "val.bin").write_bytes(rows)
    count["val_rows"] = len(rows)
    # less than a row at the end of a chunk; what was held out beyond val_tokens
    count["dropped_tokens"] = count["tokens"] - count["rows"] * (seq_len - 1)
    count["val_dropped_tokens"] = count["val_tokens"] - count["val_rows"] * (seq_len - 1)
    if not count["rows"]:
        few = f"{count['tokens']} tokens are less than one row of {seq_len}"
        sys.exit(f"{few}: delete {folder}, then give more text, or --filter_ratio=0")
    if not count["val_rows"]:
        few = f"less than one row was held out of {count['read']} documents ({documents})"
        larger = min(0.5, max(0.01, 10 * val_share))
        sys.exit(f"{few}: delete {folder}, then type --val_share={larger:g}, or give more text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, out)
    meta = {"settings": settings, "vocab_size": vocab_size, "seq_len": seq_len, "counts": count}
    meta["sha256"] = {}
    for path in sorted(out.iterdir()):
        with open(path, "r+b") as f:
            meta["sha256"][path.name] = hashlib.file_digest(f, "sha256").hexdigest()
            os.fsync(f.fileno())
    safety.write_text(out / "meta.json", json.dumps(meta, indent=2))
    if goal.exists():
        goal.rmdir()  # it is empty
    os.rename(out, goal)
    # plan.json goes last: by it a rerun knows what a kill leaves here
    for path in folder.iterdir():
        if path.name != "plan.json":
            path.unlink()
    shutil.rmtree(folder)
    return count


def differences(have, wanted):
    """The settings that differ; one that is newer than have had its default then."""
    have = SETTINGS | have
    names = [name for name in wanted if have[name] != wanted[name]]
    return ", ".join(f"{name}={have[name]!r:.60}" for name in names)


def begin_folder(folder, settings, files):
    """Add the files of Hub data sets to files; folder keeps their revision for a rerun."""
    path = folder / "plan.json"
    if path.exists():
        plan = json.loads(path.read_text("utf-8"))
        other = differences(plan["settings"], settings)
        if not other:
            files.update(plan["hub"])
            return
        if any(folder.glob("part-*.json")):
            sys.exit(f"{folder} was begun with {other}: give that to go on, or delete it")
        shutil.rmtree(folder)
    elif folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()):
        sys.exit(f"{folder} was not written by prepare.py: move it away first")
    hub = {}
    for name in files:
        if not files[name]:
            try:
                hub[name] = sources.hub_files(name)
            except Exception as e:  # whatever the Hub's libraries raise
                sys.exit(f"could not read {name} ({explain(e)})")
    folder.mkdir(parents=True, exist_ok=True)
    safety.write_text(path, json.dumps({"settings": settings, "hub": hub}, indent=1))
    files.update(hub)


def check_settings():
    allowed = {
        "normalisation": MODES,
        "documents": ("paragraphs", "lines"),
        "order": ("shuffle", "curriculum"),
        "vocab_size": range(260, 65537),
        "seq_len": range(8, 65537),
        "val_tokens": range(seq_len, 10**9),
        "max_tokens": range(10**15),
    }
    for name, values in allowed.items():
        if globals()[name] not in values:
            is_range = isinstance(values, range)
            what = f"{values[0]} to {values[-1]}" if is_range else " or ".join(values)
            sys.exit(f"{name}={globals()[name]} cannot work: type {what}")
    if not 0 < val_share <= 0.5:
        sys.exit(f"val_share={val_share} cannot work: it must be above 0, and 0.5 at most")


def adopt_vocabulary():
    """Set normalisation and vocab_size to those of tokenizer's; return its checksum."""
    path = Path(tokenizer) / "tokenizer.json"
    theirs = Tokenizer(path)
    for name, value in (("normalisation", theirs.mode), ("vocab_size", theirs.vocab_size)):
        if globals()[name] not in (value, SETTINGS[name]):
            sys.exit(f"{name}={globals()[name]}, but {path} has {value}: type --{name}={value}")
        if globals()[name] != value:
            print(f"{name} = {value!r}  (of {tokenizer})")
        globals()[name] = value
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def next_command(tokens):
    """The command that trains a model of a size for so many tokens."""
    flags = [f"--data_dir={data_dir}", f"--vocab_size={vocab_size}", f"--seq_len={seq_len}"]
    out = Path(data_dir).name
    if tokenizer and Path(tokenizer, "model.safetensors").exists():
        flags[1] = f"--init={tokenizer}"
        out = f"{Path(tokenizer).name}_{out}"
    elif seq_len > 512:
        flags += [f"--max_seq_len={seq_len}"]
    flags += [f"--out_dir=out/{out}"]
    sizes = [(5e6, "tiny"), (1e8, "small"), (5e8, "domain")]
    recipe = next((f" config/{name}.py" for most, name in sizes if tokens < most), "")
    return f"python train.py{recipe} {shlex.join(flags)}"


def main():
    begin = time.perf_counter()
    check_settings()
    files = find_files()
    if max_tokens and list(files.values()).count([]) > 1:
        sys.exit("max_tokens would read the first data set of the Hub alone: name one --source")
    adopted = adopt_vocabulary() if tokenizer else ""
    settings = {k: globals()[k] for k in SETTINGS if k not in OTHER} | {"tokenizer": adopted}
    goal = Path(data_dir).resolve()  # what a link names
    lock = safety.lock(goal)
    folder = goal.with_name(f"{goal.name}.partial")
    wanted = settings | {"files": list(itertools.chain(*files.values()))}
    if (goal / "meta.json").exists():
        other = differences(json.loads((goal / "meta.json").read_text("utf-8"))["settings"], wanted)
        if other:
            sys.exit(f"{data_dir} was made with {other}: delete it or choose another --data_dir")
        if (folder / "plan.json").exists():
            shutil.rmtree(folder)  # a kill left it
        print(f"{data_dir} is finished, with these settings: nothing to do")
        return
    if goal.exists() and (not goal.is_dir() or goal.is_mount() or any(goal.iterdir())):
        sys.exit(f"{data_dir} is not a new or an empty folder: choose another --data_dir")
    begin_folder(folder, settings, files)
    if not (folder / "tokenizer.json").exists():
        firsts = [make_parts({name: found})[0] for name, found in files.items()]
        with new_processes(1) as (pool, _):  # its memory ends with it, and its readers
            pool.submit(make_vocabulary, firsts, folder).result()
    states = process_parts(make_parts(files), folder)
    print("merging")
    count = finish(states, folder, goal, wanted)
    del lock
    length = count["characters"] / count["tokens"]
    kept = f"{count['kept']} kept, {count['filtered']} filtered, {count['empty']} empty"
    print(f"documents   {count['read']} read, {kept}, {count['held_out']} held out")
    print(f"tokens      {count['tokens']:,}, {length:.2f} characters each")
    print(f"rows        {count['rows']:,}, {count['val_rows']:,} held out, of {seq_len} tokens")
    print(f"written     {data_dir} in {time.perf_counter() - begin:.1f} s")
    if count["not_utf8"]:
        few = f"{count['not_utf8']} documents have U+FFFD, where they are not UTF-8"
        print(f"WARNING: {few}: iconv -f WINDOWS-1252 -t UTF-8 mends files of an older time")
    print(f"next        {next_command(count['rows'] * seq_len)}")


if __name__ == "__main__":
    safety.run(main, data_dir, "rerun the command to go on", "rerun with --processes=1")
