"""Rows of tokens to batches: masked ones for pre-training, ragged ones for fine-tuning.

    python -c "from nanocram import data; print(data.load_meta('data/tiny')['counts'])"
    python -c "import numpy as np; print(np.fromfile('data/tiny/train.bin', 'u2').reshape(-1, 128))"

A .bin file is a bare array of uint16, shape (rows, seq_len); meta.json beside it says what it is.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

from nanocram.tokenizer import CLS, MASK, PAD, SEP

IGNORE = -100  # the label of a position that does not count, as in torch and transformers


def load_meta(folder, **wanted):
    """meta.json of a data set as a dict.

    Exits with one line if the data set is incomplete, damaged, or has other values than wanted."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        sys.exit(f"{path} not found: run python prepare.py --data_dir={folder} (and your recipe)")
    try:
        meta = json.loads(path.read_text("utf-8"))
        checksums = meta["sha256"]  # the last thing that prepare.py does
    except (ValueError, LookupError, TypeError):
        sys.exit(f"{path} is no finished data set: delete {folder} and run prepare.py again")
    for name, value in wanted.items():
        have = meta[name]
        if have != value:
            way_out = f"type --{name}={have} or prepare anew"
            sys.exit(f"{folder} is of {name}={have}, not {value}: {way_out}")
    # train.bin is too large to hash. Rows refuses it where it is short or of another vocabulary.
    for name in ("val.bin", "tokenizer.json"):
        file = path.with_name(name)
        right = checksums[name]
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != right:
            sys.exit(f"{file} is missing or not the one of meta.json: run prepare.py again")
    return meta


class Rows:
    """A .bin file as an endless stream of rows, in the same order every epoch.

    Read by position, not by memory map: a file that shrinks in mid-run is one line, not a crash."""

    def __init__(self, path, count, seq_len, vocab_size, dev="cpu"):
        self.path = Path(path)
        self.count = count
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.dev = torch.device(dev)
        self.fetched = {}  # {(start, n): those rows, on the device or on their way}
        self.read(count - 1, 1)  # a file that is too short shows at once

    def prefetch(self, start, n):
        """Read n rows and queue them for the device, so that fetch() has them there."""
        self.fetch(start, n)

    def fetch(self, start, n):
        """n rows from start on, on the device."""
        if (start, n) not in self.fetched:
            rows = self.read(start, n)
            on_gpu = self.dev.type == "cuda"
            if on_gpu:
                rows = rows.pin_memory()
            self.fetched = {(start, n): rows.to(self.dev, non_blocking=on_gpu)}
        return self.fetched[start, n]

    def read(self, start, n):
        """n rows from start on, int64 (n, seq_len); behind the last row comes the first again."""
        parts = []
        end = start + n
        row_bytes = 2 * self.seq_len
        try:
            with open(self.path, "rb") as f:  # np.fromfile() takes a failing disk for the end
                while start < end:
                    at = start % self.count
                    take = min(end - start, self.count - at)
                    f.seek(at * row_bytes)
                    parts.append(f.read(take * row_bytes))
                    start += take
        except FileNotFoundError:
            self.refuse("is missing")
        except OSError as e:  # which file it was, read() does not say
            raise OSError(e.errno, e.strerror, str(self.path)) from None
        content = b"".join(parts)
        if len(content) != n * row_bytes:
            self.refuse("is shorter than meta.json says")
        tokens = np.frombuffer(content, np.uint16)
        if tokens.max() >= self.vocab_size:
            self.refuse("has tokens beyond the vocabulary")
        return torch.from_numpy(tokens.astype(np.int64).reshape(n, self.seq_len))

    def refuse(self, why):
        sys.exit(f"{self.path} {why}: delete its folder and prepare anew")


def round_up(n, multiple):
    """The least multiple that is no less than n."""
    return (n + multiple - 1) // multiple * multiple


def is_packed(meta):
    """Whether rows are cut from one stream, without padding; older data sets' are."""
    return meta.get("settings", {}).get("pack", True)


def record_numbers(rows):
    """The number of each token's record, (B, T), in rows (B, T) of whole records; 0 at padding."""
    return (rows == CLS).cumsum(1) * (rows != PAD)


def spare_padding(rows, scores, slot):
    """(scores, slot) by which padding and the [CLS] of records are never predicted.

    rows (B, T) of whole records; scores (B, T − 1) choose places, the highest first. slot (K,),
    the number of a choice, becomes (B, K): half a row of padding stretches it to twice as much, so
    that the row has half as many labels."""
    is_text = (rows != PAD) & (rows != CLS)
    is_text = is_text[:, 1:]  # a row's first [CLS] has no score
    share = is_text.float().mean(1, keepdim=True)
    return scores.masked_fill(~is_text, -1.0), (slot + 0.5) / share


def held_out(rows, batch, packed=True):
    """{rate: [(ids, positions, labels), …]} of held-out rows (N, T), at rates of 15 and 25 %.

    Not packed, each has records too. Both rates share positions and shapes: one compiled graph
    serves both. Rows without labels fill up the last batch."""
    N, T = rows.shape
    k = round(0.25 * T)
    # The masks of a row depend on its number and T alone: losses compare between runs of any recipe
    # with equal N.
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.rand(T - 1, generator=generator) for _ in range(N)])
    slot = torch.arange(k)
    if not packed:
        scores, slot = spare_padding(rows, scores, slot)
    positions = torch.stack([row.topk(k).indices for row in scores]) + 1  # (N, k)
    tokens = rows.gather(1, positions)
    batch = min(batch, N)
    filled = torch.arange(round_up(N, batch)) % N  # numbers of rows, a few repeated at the end
    sets = {}
    for rate in (15, 25):
        kept = slot >= round(rate * T / 100)  # not masked at this rate
        ids = rows.scatter(1, positions, torch.where(kept, tokens, MASK))[filled]
        labels = tokens.masked_fill(kept, IGNORE)[filled]
        labels[N:] = IGNORE
        tensors = [ids, positions[filled], labels]
        if not packed:
            tensors.append(record_numbers(rows)[filled])
        parts = (x.split(batch) for x in tensors)
        sets[rate] = list(zip(*parts, strict=True))
    return sets


@torch.no_grad()
def fill_masks(model, tokenizer, sentence, device="cpu"):
    """The three likeliest words, [(word, probability)], for the one [MASK] of a sentence."""
    before, after = sentence.split("[MASK]", 1)
    # The mask stands for a word and the space before it, as it does in transformers.
    before = tokenizer.encode(before.rstrip()).tolist()
    after = tokenizer.encode(after).tolist()
    ids = torch.tensor([[CLS, *before, MASK, *after, SEP]], device=device)
    position = torch.tensor([[len(before) + 1]], device=device)
    was_training = model.training
    logits = model.eval()(ids, position)  # (1, 1, V)
    model.train(was_training)
    top = logits[0, 0].float().softmax(-1).topk(3)
    words = [tokenizer.decode([i]).strip() for i in top.indices.tolist()]
    return list(zip(words, top.values.tolist(), strict=True))


class Ragged:
    """Rows of any length on the device; a step moves only the numbers of its rows there.

    Made of arrays: "ids" (all rows, one behind the other), "length" and "first" (tokens of a row,
    and of its first text), "labels" (one a row, or none)."""

    def __init__(self, arrays, pad, two_types, dev):
        self.length = arrays["length"]
        self.pad = pad
        self.two_types = two_types
        self.dev = dev
        start = np.cumsum(self.length) - self.length
        self.ids = torch.from_numpy(arrays["ids"]).to(dev)
        self.start = torch.from_numpy(start).to(dev)
        self.end = torch.from_numpy(start + self.length).to(dev)
        self.first_end = torch.from_numpy(start + arrays["first"]).to(dev)
        labels = torch.from_numpy(arrays["labels"])
        self.labels = (labels.float() if labels.is_floating_point() else labels).to(dev)

    def batch(self, rows):
        """((ids, attention_mask, token_type_ids), labels) of rows, (B, T) and (B,).

        attention_mask is None where nothing is padded, token_type_ids without a second type."""
        T = int(round_up(self.length[rows].max(), 8))
        which = torch.from_numpy(rows).to(self.dev, non_blocking=self.dev.type == "cuda")
        at = self.start[which, None] + torch.arange(T, device=self.dev)  # (B, T) places in self.ids
        real = at < self.end[which, None]
        second = at >= self.first_end[which, None]
        ids = self.ids[at.clamp_(max=len(self.ids) - 1)].long().masked_fill_(~real, self.pad)
        attention_mask = None if self.length[rows].min() == T else real
        token_type_ids = (second & real).long() if self.two_types else None
        labels = self.labels[which] if len(self.labels) else None
        return (ids, attention_mask, token_type_ids), labels


def batches_by_length(length, size, seed):
    """One epoch: row numbers in batches of similar length, in random order; a rest is dropped.

    Rows are shuffled, then sorted in pools of at most 64 batches, in about 8 pools or more, so that
    a row changes its company."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(length))
    if len(rows) > size:
        rows = rows[: len(rows) - len(rows) % size]
    pool_size = size * min(64, max(1, len(rows) // size // 8))
    pools = [rows[i : i + pool_size] for i in range(0, len(rows), pool_size)]
    rows = np.concatenate([pool[np.argsort(length[pool], kind="stable")] for pool in pools])
    batches = np.split(rows, range(size, len(rows), size))
    return [batches[i] for i in rng.permutation(len(batches))]
