import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
def pair(request, tmp_path_factory, texts):
    """(our Tokenizer, transformers' AutoTokenizer) of one trained vocabulary, for each normalisation."""
    folder = tmp_path_factory.mktemp(request.param)
    train_tokenizer(texts[:60], 2000, request.param, folder)
    return Tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)


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
    for text in texts[60:80]:
        agree(pair, text)


def test_a_million_spaces_and_a_million_letters(pair):
    ours, _ = pair
    assert ours.encode(" " * 10**6).size == 0
    assert ours.encode("x" * 10**6).size > 10**6 / 24 / 24
    assert ours.decode(ours.encode("x" * 10**6)) == " " + "x" * 10**6


def test_special_ids_and_templates(pair):
    ours, theirs = pair
    assert [
        theirs.pad_token_id,
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
    ] == [0, 1, 2, 3]
    a, b = ours.encode("a b").tolist(), ours.encode("c.").tolist()
    assert theirs("a b")["input_ids"] == [CLS, *a, SEP]
    assert theirs("a b", "c.")["input_ids"] == [CLS, *a, SEP, *b, SEP]
    assert sorted(theirs("a")) == ["attention_mask", "input_ids"]


def test_a_mask_in_a_sentence_leaves_its_neighbours_as_in_running_text(pair):
    ours, theirs = pair
    ids = theirs("the door of the [MASK] is open.")["input_ids"]
    at = ids.index(MASK)
    assert (
        ids[1:at] == ours.encode("the door of the").tolist()
        and ids[at + 1 : -1] == ours.encode("is open.").tolist()
    )
    assert theirs("open the [MASK].")["input_ids"][-2] == ours.encode("door.").tolist()[-1]


def test_normalisation_follows_the_paper():
    assert (
        normalise("``Naïve''  Café,\n\tÆon — Ωmega “x” ‘y’ K", "ascii")
        == '"naive" cafe, on-- mega"x"\'y\' k'
    )
    assert (
        normalise("Do n't stop .", "ascii")
        == normalise("do n't  stop.", "ascii")
        == " do n't stop."
    )
    assert normalise("Ünïcode STAYS , here", "plain") == " Ünïcode STAYS, here"
    assert normalise(" \n ", "ascii") == normalise("日本", "ascii") == ""


@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from(["ascii", "plain"]))
def test_normalisation_equals_the_tokenizers_library(text, mode):
    import json

    from tokenizers import Tokenizer as Library
    from tokenizers import models

    spec = json.loads(Library(models.BPE()).to_str()) | {"normalizer": normaliser_steps(mode)}
    assert Library.from_str(json.dumps(spec)).normalizer.normalize_str(text) == normalise(
        text, mode
    )


def test_digits_punctuation_and_words_never_share_a_token(pair):
    ours, _ = pair
    for i in range(4, ours.vocab_size):
        entry = ours.encoding.decode_single_token_bytes(i).decode("utf-8", "replace").strip()
        kinds = {
            "digit" if c.isdigit() else "letter" if c.isalpha() else "mark"
            for c in entry
            if c.isascii()
        }
        assert len(kinds) <= 1, entry
        assert sum(c.isdigit() for c in entry) <= 2, entry


def test_a_foreign_file_is_refused(tmp_path, pair):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(ValueError, match="prepare the data again"):
        Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer(tmp_path / "nowhere.json")


def test_too_little_text_names_a_size_that_works(tmp_path):
    for texts, advice in (
        ([], "260 entries: give more text"),
        (["ab ab"], r"type --vocab_size=26\d, or give more"),
    ):
        with pytest.raises(SystemExit, match=advice):
            train_tokenizer(texts, 600, "plain", tmp_path)
