"""Minimal pairs: which of two sentences does a model take for the likelier one?

    python -c "from nanocram import pairs; print(pairs.load()['reflexives'][0])"

Such pairs differ in one point of grammar (BLiMP, arXiv 1912.00582). What a masked language model
gives a sentence is its pseudo-log-likelihood (arXiv 1910.14659): each token is masked in turn, and
the log-probabilities of the true ones are added up. A check in seconds, without fine-tuning.
"""

from pathlib import Path

import torch

from nanocram.tokenizer import CLS, MASK, SEP

FILE = Path(__file__).parent / "pairs.txt"


def load():
    """{phenomenon: [(good sentence, bad sentence), …]}."""
    _, *blocks = FILE.read_text(encoding="utf-8").strip().split("\n\n")
    found = {}
    for block in blocks:
        name, *lines = block.splitlines()
        found[name] = [tuple(line.split("  |  ")) for line in lines]
    return found


@torch.no_grad()
def log_likelihoods(model, sentences, device="cpu"):
    """The pseudo-log-likelihood in nats, (N,), of N sentences, each a list of ids."""
    total = torch.zeros(len(sentences))
    model.eval()
    for length in {len(ids) for ids in sentences}:  # rows of one length need no padding
        chosen = [i for i, ids in enumerate(sentences) if len(ids) == length]
        ids = torch.tensor([[CLS, *sentences[i], SEP] for i in chosen], device=device)
        ids = ids.repeat_interleave(length, dim=0)  # a row for each token to be masked
        positions = torch.arange(1, length + 1, device=device).repeat(len(chosen))[:, None]
        logits = model(ids.scatter(1, positions, MASK), positions)[:, 0]
        nats = logits.float().log_softmax(-1).gather(1, ids.gather(1, positions))
        total[chosen] = nats.view(-1, length).sum(1).cpu()
    model.train()
    return total


def score(model, tokenizer, device="cpu"):
    """{phenomenon: share of its pairs whose good sentence is the likelier}; a tie counts as wrong.

    It is empty where the model cannot take rows as long as these sentences are."""
    found = load()
    sentences = [text for pairs in found.values() for pair in pairs for text in pair]
    sentences = [tokenizer.encode(text).tolist() for text in sentences]
    if max(map(len, sentences)) + 2 > model.config.max_seq_len:
        return {}
    good, bad = log_likelihoods(model, sentences, device).view(-1, 2).unbind(1)
    right = (good > bad).float().split([len(pairs) for pairs in found.values()])
    return {name: part.mean().item() for name, part in zip(found, right, strict=True)}
