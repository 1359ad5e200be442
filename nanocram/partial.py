"""What there is so far of a data set: files that only grow, and a journal of how far they are.

    {"places": {"a.txt": {"file": 0, "document": 1200, …}}, "counts": {…},
     "sizes": {"bucket-007": 51200, …}, …}

After a kill the files are cut back to what the journal says, and all goes on from there, to the
same bytes.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter

import numpy as np

from nanocram import safety
from nanocram.tokenizer import CLS, PAD, SEP

# Bounds on memory:
CHUNK = 1 << 23  # tokens to collect before they are packed into rows
OPEN = 64  # rows that a whole record may still get into
BUCKETS = 128  # files that the rows go into, put in order one by one
# Other:
MOVED = 1 << 28  # bytes of rows that stand in two files while train.bin is written
SAVE_EVERY = 60.0  # seconds between two journals: as much is lost by a kill
# What is written here, by name.
FILES = ("train.bin", "val.bin", "bucket-*", "journal.json", "held_out-*", "seen-*")


def pack(pieces, length):
    """Rows (n, length), each [CLS] and length - 1 of the tokens in pieces; and the rest (r,)."""
    tokens = np.concatenate(pieces)
    used = len(tokens) // (length - 1) * (length - 1)
    rows = tokens[:used].reshape(-1, length - 1)
    return np.insert(rows, 0, CLS, axis=1), tokens[used:]


def pack_whole(records, length, open_rows):
    """Rows (n, length) of whole records: [CLS] record [CLS] record … and [PAD] to the end.

    Each record, ids that end with [SEP], goes into the fullest of open_rows (lists of ids) where it
    fits. Where it fits into none, and OPEN are open, the fullest is closed: it is one of the rows.
    So rows depend on the order of all records, not on how they are shared out over calls."""
    closed = []
    for ids in records:
        fits = [row for row in open_rows if len(row) + 1 + len(ids) <= length]
        if fits:
            row = max(fits, key=len)
        else:
            if len(open_rows) >= OPEN:
                fullest = max(range(OPEN), key=lambda i: len(open_rows[i]))
                closed.append(open_rows.pop(fullest))
            row = []
            open_rows.append(row)
        row += [CLS, *ids.tolist()]
    return padded(closed, length)


def padded(rows, length):
    """Lists of ids as an array (n, length), with [PAD] behind each."""
    whole = [row + [PAD] * (length - len(row)) for row in rows]
    return np.array(whole, np.uint16).reshape(-1, length)


def write_journal(folder, journal):
    safety.write_text(folder / "journal.json", json.dumps(journal, indent=1))


class Partial:
    """A data set that is being written into a folder, from where its journal says on.

    full_stop: the token of which the first rows have most; None: rows are shuffled.
    packed: rows are cut from one stream of tokens; else they hold whole records."""

    def __init__(self, folder, journal, seq_len, full_stop=None, packed=True):
        self.folder, self.journal = folder, journal
        self.packed = packed
        self.seq_len, self.full_stop = seq_len, full_stop
        count = journal["counts"]
        by_source = {name: Counter(part) for name, part in count["sources"].items()}
        self.count = Counter(count) | {"sources": by_source}
        self.rng = np.random.default_rng()
        self.rng.bit_generator.state = journal["rng"]
        self.saved = time.monotonic()
        self.joined = set()  # names of buckets that stand in train.bin by now

        self.cut_back()
        # What is not in rows yet: ids, or rows of whole records that have room for more.
        self.kept = [np.array(journal["rest"], np.uint16)] if packed else []
        self.open_rows = [] if packed else journal["rest"]
        self.n_kept = sum(map(len, self.kept))
        self.held_out = []  # ids, as many as there are new ones
        self.new_keys = {"held_out-keys": [], "seen-keys": []}
        self.keys = {name: set(self.read(name, np.uint64).tolist()) for name in self.new_keys}

    def cut_back(self):
        """Bring the files to where the journal was written."""
        sizes = self.journal["sizes"]
        for name, size in sizes.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                sys.exit(f"{path} has lost bytes: delete {self.folder} to start over")
            os.truncate(path, size)
        for path in self.folder.iterdir():
            if path.name not in sizes and path.suffix != ".json":
                path.unlink()

    def read(self, name, dtype):
        path = self.folder / name
        return np.frombuffer(path.read_bytes() if path.exists() else b"", dtype)

    def append(self, name, array):
        with open(self.folder / name, "ab") as f:
            f.write(array)  # tofile() and fromfile() are silent where a disk fails

    def hold_out(self, ids, key):
        """Take a document for val.bin, and the hash that its copies have."""
        self.held_out.append(ids)
        self.new_keys["held_out-keys"].append(key)

    def keep(self, ids):
        """Take a document for train.bin."""
        self.kept.append(ids)
        self.n_kept += len(ids)
        if self.n_kept >= CHUNK:
            self.flush()

    def flush(self):
        """Append what was taken to the files; rows go to the buckets, in the order set."""
        if self.packed:
            rows, rest = pack(self.kept, self.seq_len)
            self.kept = [rest]
        else:
            rows = pack_whole(self.kept, self.seq_len, self.open_rows)
            self.kept = []
        self.n_kept = sum(map(len, self.kept))
        self.put_into_buckets(rows)
        if self.held_out:
            self.append("held_out-tokens", np.concatenate(self.held_out))
            self.held_out = []
        for name, keys in self.new_keys.items():
            if keys:
                self.append(name, np.array(keys, np.uint64))
                keys.clear()

    def put_into_buckets(self, rows):
        if self.full_stop is None:
            bucket = self.rng.integers(BUCKETS, size=len(rows))
        else:
            n_stops = (rows == self.full_stop).sum(axis=1)
            bucket = np.maximum(BUCKETS - 1 - n_stops, 0)  # the first ones have most full stops
        for i in np.unique(bucket):
            self.append(f"bucket-{i:03}", rows[bucket == i])

    def save(self):
        """Write the journal, behind the bytes that it speaks of."""
        self.flush()
        known, sizes = self.journal["sizes"], {}
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".json", ".tmp") or path.name in self.joined:
                continue
            sizes[path.name] = path.stat().st_size
            if sizes[path.name] != known.get(path.name):
                with open(path, "r+b") as f:
                    os.fsync(f.fileno())
        rest = self.kept[0].tolist() if self.packed else self.open_rows
        self.journal |= {"sizes": sizes, "counts": self.count, "rest": rest}
        self.journal["rng"] = self.rng.bit_generator.state
        write_journal(self.folder, self.journal)
        self.saved = time.monotonic()

    def is_due(self):
        return time.monotonic() - self.saved >= SAVE_EVERY

    def join_buckets(self):
        """Join the bucket files into train.bin.

        To be shuffled, rows went into buckets at random: shuffling each shuffles them all."""
        to_delete, size = [], 0
        for path in sorted(self.folder.glob("bucket-*")):
            with open(path, "rb") as bucket, open(self.folder / "train.bin", "ab") as out:
                if self.full_stop is None:
                    rows = np.frombuffer(bucket.read(), np.uint16).reshape(-1, self.seq_len)
                    out.write(self.rng.permutation(rows))
                else:  # a few buckets hold most of the rows: they need not fit into memory
                    shutil.copyfileobj(bucket, out, 1 << 24)
            self.joined.add(path.name)
            to_delete.append(path)
            size += path.stat().st_size
            if size >= MOVED:
                self.save()
                for path in to_delete:
                    path.unlink()
                to_delete, size = [], 0

    def finish(self):
        """Write train.bin and val.bin; what led to them stays, for the journal speaks of it."""
        self.flush()
        self.put_into_buckets(padded(self.open_rows, self.seq_len))
        self.open_rows = []
        self.join_buckets()
        held_out = self.read("held_out-tokens", np.uint16)
        if self.packed:
            rows, _ = pack([held_out], self.seq_len)
        else:
            open_rows = []
            records = np.split(held_out, np.flatnonzero(held_out == SEP) + 1)[:-1]
            closed = pack_whole(records, self.seq_len, open_rows)
            rows = np.concatenate([closed, padded(open_rows, self.seq_len)])
        # A generator of its own: val.bin depends on nothing but the held-out documents.
        shuffled = np.random.default_rng(0).permutation(rows)
        (self.folder / "val.bin").write_bytes(shuffled)
