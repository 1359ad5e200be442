import pytest
import torch
from conftest import model_config
from torch.nn.functional import cross_entropy

from model import MaskedLM
from nanocram import pairs
from nanocram.tokenizer import CLS, MASK, SEP

SIZES = dict(vocab_size=90, max_seq_len=40, n_layer=2, n_head=2, n_embd=32, n_inner=24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = MaskedLM(model_config(**SIZES)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


class Words:
    """A tokenizer of words: each has the id that its first letter gives."""

    def encode(self, text):
        return torch.tensor([4 + ord(word[0]) % 80 for word in text.split()])


def test_each_token_is_masked_in_turn(model):
    sentences = [[5, 6, 7], [8, 9], [7, 6, 5], [10]]
    wanted = []
    for tokens in sentences:
        nats = 0.0
        for i, token in enumerate(tokens):
            hidden = [*tokens[:i], MASK, *tokens[i + 1 :]]
            logits = model(torch.tensor([[CLS, *hidden, SEP]]))[:, i + 1]
            nats -= cross_entropy(logits, torch.tensor([token])).item()
        wanted.append(nats)
    assert pairs.log_likelihoods(model, sentences).tolist() == pytest.approx(wanted, rel=1e-4)


def test_a_tie_counts_as_wrong_and_a_pair_turned_round_the_other_way(model, monkeypatch):
    pair = ("apes bite cats", "cats go")
    found = {"a pair": [pair], "turned": [pair[::-1]], "ties": [("do it", "do it")]}
    monkeypatch.setattr(pairs, "load", lambda: found)
    shares = pairs.score(model, Words())
    assert sorted([shares["a pair"], shares["turned"]]) == [0, 1]
    assert shares["ties"] == 0
