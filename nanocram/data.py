"""Rows of tokens to batches: masked ones from a folder of prepare.py, and batches of rows of any length.

    python -c "from nanocram import data; print(data.load_meta('data/tiny')['counts'])"
    python -c "import numpy as np; print(np.fromfile('data/tiny/train.bin', np.uint16).reshape(-1, 128)[:2])"

A .bin file is a bare array of uint16, shape (rows, seq_len); meta.json beside it says what it is.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from nanocram.tokenizer import CLS, MASK, SEP, Tokenizer

IGNORE = -100  # the label of a position that does not count, as in torch and transformers


def load_meta(folder, **wanted):
    """meta.json of folder as a dict; exits with one line if the data set is incomplete, damaged or not as wanted."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        sys.exit(
            f"{path} not found: run python prepare.py --data_dir={folder} first (or prepare.py with your recipe)"
        )
    try:
        meta = json.loads(path.read_text())
        numbers = [meta["vocab_size"], meta["seq_len"]]
        numbers += [meta["counts"][k] for k in ("rows", "val_rows", "val_tokens", "val_characters")]
        if not all(type(n) is int and n > 0 for n in numbers):
            raise ValueError("sizes that cannot be")
        (
            meta["settings"]["source"],
            meta["settings"]["normalisation"],
            meta["counts"]["kept"],
        )  # for the model card
        sums = {name: meta["sha256"][name] for name in ("train.bin", "val.bin", "tokenizer.json")}
    except (OSError, ValueError, LookupError, TypeError) as e:
        sys.exit(f"{path} is broken ({e!r:.80}): delete {folder} and run prepare.py again")
    for name, value in wanted.items():
        if meta[name] != value:
            sys.exit(
                f"{folder} has {name}={meta[name]}, this run {value}: type --{name}={meta[name]}, or prepare anew"
            )
    for name in (
        "val.bin",
        "tokenizer.json",
    ):  # small; train.bin is checked by its size, at every read
        file = Path(folder) / name
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != sums[name]:
            sys.exit(
                f"{file} is missing or not the one meta.json describes: delete {folder} and run prepare.py again"
            )
    return meta


def load_tokenizer(folder, meta):
    """The Tokenizer of folder; exits with one line if it does not fit the rows."""
    try:
        tokenizer = Tokenizer(Path(folder) / "tokenizer.json")
    except ValueError as e:
        sys.exit(str(e))
    have, wanted = tokenizer.vocab_size, meta["vocab_size"]
    if have != wanted:
        sys.exit(
            f"{folder}/tokenizer.json has {have} entries where meta.json says {wanted}: prepare the data anew"
        )
    return tokenizer


class Rows:
    """A .bin file as an endless stream of rows, the same order every epoch.

    Read by position, not by memory map: a file that shrinks under a run is then one clear line, not a crash.
    """

    def __init__(self, path, count, seq_len, vocab_size):
        self.path, self.count, self.seq_len, self.vocab_size = (
            Path(path),
            count,
            seq_len,
            vocab_size,
        )
        self.mtime = self.path.stat().st_mtime_ns if self.path.exists() else 0
        self.read(0, 1)

    def read(self, start, n):
        """Rows start … start + n − 1, wrapping at the end, as an int64 tensor (n, seq_len)."""
        wanted = self.count * self.seq_len * 2
        size = os.path.getsize(self.path) if self.path.exists() else 0
        if size != wanted:
            sys.exit(
                f"{self.path} has {size} bytes where meta.json says {wanted}: delete its folder and prepare anew"
            )
        if (
            mtime := self.path.stat().st_mtime_ns
        ) != self.mtime:  # perhaps only touched: no day ends for that
            print(
                f"WARNING: {self.path} was written to while in use, its rows may not be what meta.json describes"
            )
            self.mtime = mtime
        parts, size = [], n * self.seq_len
        while n:
            start %= self.count
            take = min(n, self.count - start)
            parts.append(
                np.fromfile(
                    self.path, np.uint16, take * self.seq_len, offset=start * self.seq_len * 2
                )
            )
            start, n = start + take, n - take
        tokens = np.concatenate(parts)
        if tokens.size != size or tokens.max() >= self.vocab_size:
            why = "ends too soon" if tokens.size != size else "has tokens beyond the vocabulary"
            sys.exit(
                f"{self.path} {why}, before row {start}: delete its folder and prepare it anew"
            )
        return torch.from_numpy(tokens.astype(np.int64).reshape(-1, self.seq_len))


def draw_masks(rows, k_max, n, vocab_size, mask_share=1.0, random_share=0.0):
    """Choose n ≤ k_max tokens to predict in each of rows (B, T), with torch's default generator of rows' device.

    The positions (B, k_max) are uniform without replacement among 1 … T − 1: never [CLS], [SEP] like any other. Of the
    first n, mask_share become [MASK] and random_share a random token; the labels (B, k_max) of the rest are IGNORE, so
    that shapes stay while the masking rate moves. Returns (ids, positions, labels).
    """
    B, T = rows.shape
    positions = (
        torch.rand(B, T - 1, device=rows.device).topk(k_max).indices + 1
    )  # (B, K), in random order
    tokens = rows.gather(1, positions)
    rank = torch.arange(k_max, device=rows.device)
    n_mask = round(n * mask_share)
    replaced = torch.where(rank < n_mask, MASK, tokens)
    if random_share:
        is_random = (rank >= n_mask) & (rank < min(n, n_mask + round(n * random_share)))
        replaced = torch.where(is_random, torch.randint_like(tokens, vocab_size), replaced)
    return rows.scatter(1, positions, replaced), positions, tokens.masked_fill(rank >= n, IGNORE)


def held_out(rows, batch):
    """{rate: [(ids, positions, labels), …]} of held-out rows (N, T) with 15 % and 25 % of their tokens [MASK].

    The masks of a row depend on its number and T alone, so losses compare between runs of any recipe with equal N. Both
    rates share positions and shapes: one static graph serves both. Rows without labels fill up the last batch.
    """
    N, T = rows.shape
    k = round(0.25 * T)
    generator = torch.Generator().manual_seed(0)
    positions = (
        torch.stack([torch.rand(T - 1, generator=generator).topk(k).indices for _ in range(N)]) + 1
    )  # (N, k)
    tokens = rows.gather(1, positions)
    batch = min(batch, N)
    fill = torch.arange(N + -N % batch) % N  # row numbers, a few repeated at the end
    sets = {}
    for rate in (15, 25):
        spare = torch.arange(k) >= round(rate * T / 100)
        ids = rows.scatter(1, positions, torch.where(spare, tokens, MASK))
        labels = tokens.masked_fill(spare, IGNORE)[fill]
        labels[N:] = IGNORE
        sets[rate] = list(
            zip(
                ids[fill].split(batch),
                positions[fill].split(batch),
                labels.split(batch),
                strict=True,
            )
        )
    return sets


@torch.no_grad()
def fill_masks(model, tokenizer, sentence, device="cpu"):
    """The three likeliest words, [(word, probability)], for the one [MASK] of a sentence, by a MaskedLM on device."""
    before, after = (tokenizer.encode(part).tolist() for part in sentence.split("[MASK]", 1))
    ids, was = torch.tensor([[CLS, *before, MASK, *after, SEP]], device=device), model.training
    logits = model.eval()(ids, torch.tensor([[len(before) + 1]], device=device))
    model.train(was)
    top = logits[0, 0].float().softmax(-1).topk(3)
    return [
        (tokenizer.decode([i]).strip(), p)
        for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


class Ragged:
    """Rows of any length on the device; batches are gathered there, so that a step moves only the numbers of its rows.

    Made of arrays: "ids" (all rows, one behind the other), "length" and "first" (tokens of a row, and of its first
    text), "labels" (one a row, or none)."""

    def __init__(self, arrays, pad, two_types, dev):
        self.length, self.pad, self.two_types, self.dev = arrays["length"], pad, two_types, dev
        start = np.cumsum(self.length) - self.length
        self.ids, self.start, self.end, self.first = (
            torch.from_numpy(a).to(dev)
            for a in (arrays["ids"], start, start + self.length, start + arrays["first"])
        )
        labels = torch.from_numpy(arrays["labels"])
        self.labels = (labels.float() if labels.is_floating_point() else labels).to(dev)

    def width(self, rows):
        """The longest of rows, rounded up to a multiple of 8."""
        return int(-(-self.length[rows].max() // 8) * 8)

    def batch(self, rows):
        """((ids, attention_mask, token_types), labels) of rows, (B, T) and (B,); no mask where nothing is padded."""
        which, T = (
            torch.from_numpy(rows).to(self.dev, non_blocking=self.dev.type == "cuda"),
            self.width(rows),
        )
        at = self.start[which, None] + torch.arange(T, device=self.dev)  # (B, T)
        real = at < self.end[which, None]
        ids = self.ids[at.clamp_(max=len(self.ids) - 1)].long().masked_fill_(~real, self.pad)
        types = ((at >= self.first[which, None]) & real).long() if self.two_types else None
        labels = self.labels[which] if len(self.labels) else None
        return (ids, None if self.length[rows].min() == T else real, types), labels


def batches_by_length(length, size, seed):
    """One epoch: shuffled row numbers in batches of similar length, in random order; an incomplete batch is dropped.

    Rows are sorted in pools of at most 64 batches, at least 8 pools an epoch, so that a row changes its company."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(length))
    rows = rows[: len(rows) - len(rows) % size] if len(rows) > size else rows
    pool = size * min(64, max(1, len(rows) // size // 8))
    pools = (rows[i : i + pool] for i in range(0, len(rows), pool))
    rows = np.concatenate([p[np.argsort(length[p], kind="stable")] for p in pools])
    epoch = np.split(rows, range(size, len(rows), size))
    return [epoch[i] for i in rng.permutation(len(epoch))]
