"""--vocab_file: tokens of the user's own, one a line."""

import json

import numpy as np
import pytest
from conftest import SMALL_MODEL, last_line, script
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, pipeline

import prepare
from nanocram.data import load_meta
from nanocram.tokenizer import CLS, PAD, SEP, UNK, Tokenizer, read_vocabulary, write_vocabulary

WORDS = ["E5", "E22", "GET", "ACGT", "é", "日本", "e\u0301", "E2", "."]
LETTERS = [*"ACDEFGHIKLMNPQRSTVWY", "é", "."]
ODD_SPACES = "\t\n\r\x0b\x1c\x1f\x85\xa0\u1680\u2003\u2028\u200b\u3000\ufeff"


@pytest.fixture(scope="module", params=[WORDS, LETTERS], ids=["words", "letters"])
def pair(request, tmp_path_factory):
    """(our Tokenizer, transformers' AutoTokenizer, the tokens) of one vocabulary."""
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(request.param, folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    return Tokenizer(folder / "tokenizer.json"), theirs, request.param


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ids_and_offsets_are_transformers(pair, data):
    ours, theirs, tokens = pair
    parts = st.sampled_from([*tokens, " ", *ODD_SPACES, "X", "E", "\U0001f600"])
    text = "".join(data.draw(st.lists(parts, max_size=40)))
    batch = theirs(text, return_offsets_mapping=True)
    assert batch["input_ids"] == [CLS, *ours.encode(text).tolist(), SEP]
    for i, (start, end) in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
        known = text[start:end] in tokens
        assert known or i in (UNK, CLS, SEP)
        if i > UNK:
            assert text[start:end] == tokens[i - UNK - 1]


def test_what_goes_in_comes_out(pair):
    ours, theirs, tokens = pair
    between = "" if len(tokens[0]) == 1 else " "
    text = between.join(tokens)
    ids = ours.encode(text).tolist()
    assert ids == list(range(UNK + 1, UNK + 1 + len(tokens)))
    assert ours.decode(ids) == theirs.decode(ids) == text
    assert theirs.unk_token_id == UNK and theirs.pad_token_id == PAD
    assert theirs("[MASK]")["input_ids"] == [CLS, theirs.mask_token_id, SEP]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"A\nB\nA\n", "line 3: 'A' stands on line 1 already"),
        (b"A\n\nB", "line 2: is empty"),
        (b"", "line 1: is empty"),
        (b"A\n[MASK]\n", "line 2: [MASK] is in every vocabulary"),
        (b"A\nB C\n", "line 2: 'B C' has white space"),
        (b"A\n\xfc\n", "in UTF-8"),
        (None, "No such file"),
        ("\n".join(map(str, range(70000))).encode(), "65531 at most"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "v").write_bytes(content)
    with pytest.raises(SystemExit) as raised:
        read_vocabulary(tmp_path / "v")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_windows_line_ends_and_a_bom_are_no_part_of_a_token(tmp_path):
    (tmp_path / "v").write_bytes(b"\xef\xbb\xbfA\r\nB\r\n")
    assert read_vocabulary(tmp_path / "v") == ["A", "B"]


@pytest.mark.parametrize(("tokens", "text"), [("ACD", "AC DX\nXA"), (["A", "C1"], "A X C1\nX A")])
def test_what_a_vocabulary_lacks_is_named(tmp_path, capsys, monkeypatch, tokens, text):
    """White space is between tokens, whatever they are."""
    write_vocabulary(list(tokens), tmp_path)
    monkeypatch.setattr(prepare, "vocab_file", "v")
    prepare.check_vocabulary([text], Tokenizer(tmp_path / "tokenizer.json"))
    n_tokens = 6 if tokens == "ACD" else 5
    assert f"lacks {2 / n_tokens:.2%} of the tokens, most of all X: each" in capsys.readouterr().out


def test_from_event_ids_to_a_folder_that_transformers_asks(tmp_path):
    """Each event is followed by the next number; a few events are in no vocabulary."""
    rng = np.random.default_rng(0)
    lines = []
    for first in rng.integers(0, 20, 600):
        lines.append(" ".join(f"E{(first + i) % 20}" for i in range(rng.integers(5, 12))))
    lines[7] += " E99"
    (tmp_path / "events.txt").write_text("\n".join(lines))
    (tmp_path / "v").write_text("\n".join(f"E{i}" for i in range(20)))
    names = {"data_dir": tmp_path / "data", "seq_len": 32}
    done = script(
        "prepare.py",
        source=tmp_path / "events.txt",
        vocab_file=tmp_path / "v",
        documents="lines",
        pack=False,
        val_share=0.1,
        **names,
    )
    assert done.returncode == 0, done.stdout
    assert "1 tokens" in done.stdout and "E99" in done.stdout
    meta = load_meta(tmp_path / "data", vocab_size=25)
    assert meta["counts"]["unknown"] == 1
    n_ids = sum(len(line.split()) + 1 for line in lines)
    assert meta["counts"]["tokens_read"] == n_ids

    sizes = SMALL_MODEL | {"vocab_size": 25, "lr": 0.01, "batch_ramp": 0.0, "samples": ""}
    done = script("train.py", **sizes, **names, max_steps=150, out_dir=tmp_path / "out")
    assert done.returncode == 0, done.stdout
    guess = pipeline("fill-mask", model=str(tmp_path / "out"))("E3 E4 [MASK] E6 E7")
    assert guess[0]["token_str"] == "E5"
    again = script("prepare.py", source=tmp_path / "events.txt", vocab_file=tmp_path / "v", **names)
    assert again.returncode and "was made with" in last_line(again)
    assert json.loads((tmp_path / "out/tokenizer.json").read_text())["model"]["type"] == "WordLevel"
