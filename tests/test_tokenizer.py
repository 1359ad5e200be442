import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import AutoTokenizer

from nanocram.tokenizer import (
    CLS,
    MASK,
    SEP,
    Tokenizer,
    normalise,
    normaliser_steps,
    train_tokenizer,
)

PROSE = st.text(alphabet="abAB éÉ01.,;'\"`-—“”… \t\n[MASK]()", max_size=200)


@pytest.fixture(scope="module", params=["ascii", "plain"])
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
    assert ours.encode(" " * 10**6).size == 0
    assert ours.encode("x" * 10**6).size > 10**6 / 24 / 24
    assert ours.decode(ours.encode("x" * 10**6)) == " " + "x" * 10**6


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
    assert ids[at + 1 : -1] == ours.encode("is open.").tolist()
    assert theirs("open the [MASK].")["input_ids"][-2] == ours.encode("door.").tolist()[-1]


def test_normalisation_follows_the_paper():
    odd = "``Naïve''  Café,\n\tÆon — Ωmega “x” ‘y’ K"
    assert normalise(odd, "ascii") == '"naive" cafe, on-- mega"x"\'y\' k'
    assert normalise("Do n't stop .", "ascii") == " do n't stop."
    assert normalise("do n't  stop.", "ascii") == " do n't stop."
    assert normalise("Ünïcode STAYS , here", "plain") == " Ünïcode STAYS, here"
    assert normalise(" \n ", "ascii") == ""
    assert normalise("日本", "ascii") == ""


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


def other_normaliser(spec):
    spec["normalizer"]["normalizers"].pop()


def no_vocabulary(spec):
    del spec["model"]["vocab"]


def no_byte_level(spec):
    spec["model"]["vocab"]["日"] = 2000


@pytest.mark.parametrize("damage", [other_normaliser, no_vocabulary, no_byte_level])
def test_a_damaged_file_is_refused(tmp_path, tokenizer_files, damage):
    spec = json.loads((tokenizer_files / "tokenizer.json").read_text(encoding="utf-8"))
    damage(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(SystemExit, match="prepare the data again"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["", "[]", "3", '{"model": {"vocab": {}}}'])
def test_a_foreign_file_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(SystemExit, match="prepare the data again"):
        Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(SystemExit, match="not a tokenizer"):
        Tokenizer(tmp_path / "nowhere.json")


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
