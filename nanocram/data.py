"""Rows of tokens to batches: masked ones for pre-training, ragged ones for fine-tuning.

A .bin file is a bare array of uint16, shape (rows, seq_len); meta.json beside it says what it is.
"""

import hashlib
import shlex
import sys

import numpy as np
import torch

from nanocram.safety import read_json
from nanocram.tokenizer import CLS, MASK, SEP

IGNORE = -100  # the label of a position that does not count, as in torch and transformers


def load_meta(folder, **wanted):
    """meta.json of a data set as a dict; exits if the set is unfinished or has other values."""
    again = f"run python prepare.py {shlex.quote(f'--data_dir={folder}')} (and your flags)"
    meta = read_json(folder / "meta.json", again)
    for name, value in wanted.items():
        if meta[name] != value:
            sys.exit(f"{folder} has {name}={meta[name]}, not {value}: type --{name}={meta[name]}")
    sizes = [path.stat().st_size for path in folder.glob("train.bin")]  # too large for a checksum
    paths = [*folder.glob("val.bin"), *folder.glob("tokenizer.json")]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    is_whole = sizes == [2 * meta["counts"]["rows"] * meta["seq_len"]] and len(sums) == 2
    if not (is_whole and sums.items() <= meta["sha256"].items() and "words" in meta["counts"]):
        sys.exit(f"{folder} is damaged, or of another version: delete it, then {again}")
    return meta


class Rows:
    """The rows of a .bin file in an endless cycle, which begins where seed says: 0 at the first."""

    def __init__(self, path, seq_len, dev="cpu", seed=0, vocab_size=1 << 16):
        self.path, self.seq_len, self.dev = path, seq_len, torch.device(dev)
        self.vocab_size = vocab_size
        self.count = path.stat().st_size // (2 * seq_len)
        self.begin = int(np.random.default_rng(seed).integers(self.count)) if seed else 0

    def __len__(self):
        return self.count

    def read(self, start, n):
        """n rows from start on, int64 (n, seq_len); behind the last row comes the first again. No
        memory map: a failing disk would kill the process without a message."""
        numbers = (self.begin + np.arange(start, start + n)) % self.count
        stretches = np.split(numbers, 1 + np.flatnonzero(numbers[1:] == 0))  # of rows side by side
        places = [(2 * rows[0] * self.seq_len, len(rows) * self.seq_len) for rows in stretches]
        parts = [np.fromfile(self.path, np.uint16, size, offset=at) for at, size in places]
        tokens = np.concatenate(parts)
        if len(tokens) != n * self.seq_len:
            sys.exit(f"{self.path} cannot be read to its end: see to the disk, then --init=resume")
        if tokens.max() >= self.vocab_size:
            sys.exit(f"{self.path} is damaged: delete its folder, then run prepare.py")
        return torch.from_numpy(tokens.astype(np.int64).reshape(n, self.seq_len))

    def fetch(self, start, n):
        """n rows from start on, on the device; they are the caller's to change."""
        rows = self.read(start, n)
        if self.dev.type != "cuda":
            return rows.to(self.dev)
        return rows.pin_memory().to(self.dev, non_blocking=True)  # the CPU does not wait


def log_frequencies(rows, vocab_size):
    """ln of each token's share (V,) of the first 4M tokens of Rows, and one more of each."""
    read = rows.read(0, min(len(rows), 2**22 // rows.seq_len))[:, 1:]  # without [CLS]
    counts = 1.0 + torch.bincount(read.flatten(), minlength=vocab_size)
    return (counts / counts.sum()).log()


def held_out(rows, batch_size):
    """{column of log.csv: [(ids, positions, labels), ...]} of held-out rows (N, T), at 15 and 25 %,
    in one shape, which is compiled: rows without labels fill the last batch."""
    N, T = rows.shape
    K = round(0.25 * T)
    # The masks depend on a row's number and T alone: losses of any two recipes compare.
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.rand(T - 1, generator=generator) for _ in range(N)])
    positions = torch.stack([row.topk(K).indices for row in scores]) + 1  # (N, K)
    tokens = rows.gather(1, positions)
    batch_size = min(batch_size, N)
    filled = torch.arange(N + -N % batch_size) % N  # whole batches: a few rows are there twice
    sets = {}
    for rate in (15, 25):
        kept = torch.arange(K) >= round(rate * T / 100)  # not masked at this rate
        ids = rows.scatter(1, positions, torch.where(kept, tokens, MASK))[filled]
        labels = tokens.masked_fill(kept, IGNORE)[filled]
        labels[N:] = IGNORE
        parts = (x.split(batch_size) for x in (ids, positions[filled], labels))
        sets[f"val_loss_{rate}"] = list(zip(*parts, strict=True))
    return sets


@torch.no_grad()
def estimate_loss(run, batches):
    """Nats per predicted token of a train.Run over batches of held_out()."""
    run.model.eval()
    means = (run.loss_fn(*(t.to(run.device) for t in batch))["loss"] for batch in batches)
    total = sum(mean * batch[2].numel() for mean, batch in zip(means, batches, strict=True))
    count = sum((labels != IGNORE).sum() for _, _, labels in batches)
    run.model.train()
    return total.item() / count.item()


def evaluate(run, held_out_sets):
    """{column of log.csv: held-out loss}."""
    losses = {name: estimate_loss(run, batches) for name, batches in held_out_sets.items()}
    # nats per character can be compared between vocabularies
    tokens_per_char = run.meta["counts"]["val_tokens"] / run.meta["counts"]["val_characters"]
    losses["val_nats_per_char"] = losses["val_loss_15"] * tokens_per_char
    return losses


@torch.no_grad()
def fill_masks(model, tokenizer, sentence, device="cpu"):
    """The three likeliest words, [(word, probability)], for the one [MASK] of a sentence."""
    before, after = sentence.split("[MASK]", 1)
    half = model.config.max_seq_len // 2 - 2  # tokens on each side that surely fit
    # The mask stands for a word and the space before it, as it does in transformers.
    before = tokenizer.encode(before.rstrip()).tolist()[-half:]
    after = tokenizer.encode(after).tolist()[:half]
    ids = torch.tensor([[CLS, *before, MASK, *after, SEP]], device=device)
    position = torch.tensor([[len(before) + 1]], device=device)
    was_training = model.training
    logits = model.eval()(ids, position)  # (1, 1, V)
    model.train(was_training)
    top = logits[0, 0].float().softmax(-1).topk(3)
    words = [tokenizer.decode([i]).strip() for i in top.indices.tolist()]
    return list(zip(words, top.values.tolist(), strict=True))


class Ragged:
    """Rows of any length on the device; a step moves only its rows' numbers there. rows: N pairs of
    ids and the length of the first text; labels (N,); pad: the id behind the end of a row."""

    def __init__(self, rows, labels, pad, two_types, dev):
        self.two_types, self.dev = two_types, dev
        self.length, first = np.array([(len(ids), first) for ids, first in rows]).T
        self.width = self.length + -self.length % 8  # a multiple of 8
        padded = np.full((len(rows), self.width.max()), pad, np.int32)
        for row, (ids, _) in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        arrays = {"ids": padded, "length": self.length, "first": first, "labels": labels.tolist()}
        # a list becomes int64 or float32; mps has no float64
        self.tensors = {name: torch.as_tensor(x, device=dev) for name, x in arrays.items()}

    def batch(self, rows):
        """(inputs, labels) of rows, by transformers' names, (B, T) and (B,). attention_mask is None
        where nothing is padded; token_type_ids are there if a model has two."""
        T = int(self.width[rows].max())
        which = torch.from_numpy(rows).to(self.dev, non_blocking=self.dev.type == "cuda")
        at = torch.arange(T, device=self.dev)
        real = at < self.tensors["length"][which, None]  # (B, T)
        inputs = {"input_ids": self.tensors["ids"][which, :T].long()}
        inputs["attention_mask"] = None if self.length[rows].min() == T else real.long()
        if self.two_types:
            second = at >= self.tensors["first"][which, None]
            inputs["token_type_ids"] = (second & real).long()
        return inputs, self.tensors["labels"][which]


def batches_by_length(length, size, seed):
    """One epoch: row numbers in batches of similar length, in random order; a rest is dropped. Rows
    are sorted in some 8 pools or more, of at most 64 batches: each epoch a row meets others."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(length))
    rows = rows[: max(size, len(rows) // size * size)]
    pool_size = size * min(64, max(1, len(rows) // size // 8))
    rows = rows[np.lexsort((length[rows], np.arange(len(rows)) // pool_size))]  # pool by pool
    batches = np.split(rows, range(size, len(rows), size))
    return [batches[i] for i in rng.permutation(len(batches))]
