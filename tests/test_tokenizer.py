import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import AutoTokenizer

from nanocram.data import fill_masks
from nanocram.tokenizer import (
    CLS,
    MASK,
    SEP,
    Tokenizer,
    normalise,
    normaliser_steps,
    train_tokenizer,
)

PROSE = st.text(alphabet="abAB \u3000\x1c éÉ01.,;'\"`-—“”… \t\n[MASK]()", max_size=200)


@pytest.fixture(scope="module", params=["ascii", "plain", "none"])
def tokenizer_files(request, tmp_path_factory, texts):
    """A folder with the files of a trained vocabulary, for each normalisation."""
    folder = tmp_path_factory.mktemp(request.param)
    train_tokenizer(texts[:60], 2000, request.param, folder)
    return folder


@pytest.fixture(scope="module")
def pair(tokenizer_files):
    """(our Tokenizer, transformers' AutoTokenizer) of one vocabulary."""
    ours = Tokenizer(tokenizer_files / "tokenizer.json")
    return ours, AutoTokenizer.from_pretrained(tokenizer_files)


def agree(pair, text):
    ours, theirs = pair
    ids = ours.encode(text).tolist()
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert not {0, 1, 2, 3} & set(ids)
    assert ours.decode(ids) == normalise(text, ours.mode)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_ids_equal_transformers_on_any_text(pair, text):
    agree(pair, text)


@settings(max_examples=300, deadline=None)
@given(PROSE)
def test_ids_equal_transformers_on_prose(pair, text):
    agree(pair, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a" * 5000,
        " " * 5000,
        "\r\n\t" * 2000,
        "def f(x):\r\n\treturn  x\n\n",
        "." * 5000,
        "1" * 5000,
        "é" * 500,
        "日本語" * 300,
        "e\u0301" * 300,
        "\x00\x01\x7f",
        "👩‍👩‍👧 family",
        "[MASK] [CLS]",
        "ſ K İ ς",
    ],
)
def test_ids_equal_transformers_on_the_awkward(pair, text):
    agree(pair, text)


def test_real_documents(pair, texts):
    for text in texts[60:70]:
        agree(pair, text)


def test_a_million_spaces_and_a_million_letters(pair):
    ours, _ = pair
    for text in (" " * 10**6, "x" * 10**6):
        assert ours.decode(ours.encode(text)) == normalise(text, ours.mode)
    assert ours.encode("x" * 10**6).size > 10**6 / 24 / 24


def test_special_ids_and_templates(pair):
    ours, theirs = pair
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    assert theirs.convert_tokens_to_ids(special) == [0, 1, 2, 3]
    roles = [theirs.pad_token, theirs.cls_token, theirs.sep_token, theirs.mask_token]
    assert roles == special
    a = ours.encode("a b").tolist()
    b = ours.encode("c.").tolist()
    assert theirs("a b")["input_ids"] == [CLS, *a, SEP]
    assert theirs("a b", "c.")["input_ids"] == [CLS, *a, SEP, *b, SEP]
    assert sorted(theirs("a")) == ["attention_mask", "input_ids"]


def test_a_mask_in_a_sentence_leaves_its_neighbours_as_in_running_text(pair):
    ours, theirs = pair
    ids = theirs("the door of the [MASK] is open.")["input_ids"]
    at = ids.index(MASK)
    assert ids[1:at] == ours.encode("the door of the").tolist()
    assert ids[at + 1 : -1] == ours.encode(" is open.").tolist()
    assert theirs("open the [MASK].")["input_ids"][-2] == ours.encode("door.").tolist()[-1]


@pytest.mark.parametrize("text", ["open the [MASK] now.", "[MASK] is", "x =\t[MASK]", "a [MASK]."])
def test_fill_masks_asks_what_the_pipeline_asks(pair, text):
    ours, theirs = pair
    asked = []

    class Echo(torch.nn.Module):
        def forward(self, ids, positions):
            asked.append(ids[0].tolist())
            assert ids[0, positions.item()] == MASK
            return torch.zeros(1, 1, ours.vocab_size)

    fill_masks(Echo(), ours, text)
    assert asked == [theirs(text)["input_ids"]]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcxyz .,(01\n\té", max_size=200))
def test_offsets_in_transformers_are_those_of_the_words(pair, text):
    """Each character but white space is in a span, and no span of a word begins with a space."""
    ours, theirs = pair
    batch = theirs(text, text, return_offsets_mapping=True)  # a pair: both begin at 0
    covered = set()
    for i, (start, end) in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
        span = text[start:end]
        covered |= set(range(start, end))
        if span.isascii() and span.strip():
            assert not span[0].isspace()
            assert ours.decode([i]).strip() == normalise(span, ours.mode).strip()
    assert covered >= {i for i, c in enumerate(text) if not c.isspace()}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_transformers_decodes_what_was_normalised(pair, text):
    """Without the space that normalise() puts before the first word."""
    ours, theirs = pair
    ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    normal = normalise(text, ours.mode)
    added = " " if ours.mode != "none" else ""
    assert theirs.decode(ids) == normal.removeprefix(added)


def test_normalisation_follows_the_paper():
    odd = "``Naïve''  Café,\n\tÆon — Ωmega “x” ‘y’ K"
    assert normalise(odd, "ascii") == '"naive" cafe, on-- mega"x"\'y\' k'
    assert normalise("Do n't stop .", "ascii") == " do n't stop."
    assert normalise("do n't  stop.", "ascii") == " do n't stop."
    assert normalise("Ünïcode STAYS , here", "plain") == " Ünïcode STAYS, here"
    assert normalise(" \n ", "ascii") == ""
    assert normalise("日本", "ascii") == ""
    assert normalise(odd, "none") == odd


@pytest.fixture(scope="module")
def library_normalisers():
    """{mode: the normaliser of the tokenizers library, from our steps}."""
    normalisers = {}
    for mode in ("ascii", "plain"):
        spec = json.loads(Library(models.BPE()).to_str()) | {"normalizer": normaliser_steps(mode)}
        normalisers[mode] = Library.from_str(json.dumps(spec)).normalizer
    return normalisers


@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from(["ascii", "plain"]))
def test_normalisation_equals_the_tokenizers_library(library_normalisers, text, mode):
    assert library_normalisers[mode].normalize_str(text) == normalise(text, mode)


def kind(character):
    if character.isdigit():
        return "digit"
    return "letter" if character.isalpha() else "mark"


def test_digits_punctuation_and_words_never_share_a_token(pair):
    ours, _ = pair
    for i in range(4, ours.vocab_size):
        entry = ours.encoding.decode_single_token_bytes(i).decode("utf-8", "replace").strip()
        kinds = {kind(c) for c in entry if c.isascii()}
        assert len(kinds) <= 1, entry
        assert sum(c.isdigit() for c in entry) <= 2, entry


@pytest.mark.parametrize("damage", ["normalizer", "pre_tokenizer", "vocab", "byte", "json", "gone"])
def test_a_file_that_is_not_ours_is_refused(tmp_path, tokenizer_files, damage):
    spec = json.loads((tokenizer_files / "tokenizer.json").read_text(encoding="utf-8"))
    if damage == "normalizer":
        spec["normalizer"] = {"type": "Lowercase"}
    if damage == "pre_tokenizer":
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "."}
    if damage == "vocab":
        del spec["model"]["vocab"]
    if damage == "byte":
        spec["model"]["vocab"]["日"] = 2000
    path = tmp_path / "tokenizer.json"
    if damage != "gone":
        path.write_text(json.dumps(spec) if damage != "json" else "[]", encoding="utf-8")
    with pytest.raises(SystemExit, match="prepare the data again"):
        Tokenizer(path)


@pytest.mark.parametrize(
    "texts, advice",
    [
        ([], "only 260 entries: type --vocab_size=260, or give more"),
        (["ab ab"], r"type --vocab_size=26\d, or give more"),
    ],
)
def test_too_little_text_names_a_size_that_works(tmp_path, texts, advice):
    with pytest.raises(SystemExit, match=advice):
        train_tokenizer(texts, 600, "plain", tmp_path)
