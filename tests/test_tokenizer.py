import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanocram.tokenizer import Tokenizer, bounded, normalise, train_tokenizer

AT_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
PROSE = st.text(alphabet="abAB \u3000\x1c éÉ01.,;'\"`-—“”… \t\n[MASK]()", max_size=200)
AWKWARD = ["", " " * 5000, "a" * 5000, "1" * 5000, "\r\n\t" * 2000, "日本語" * 300]
AWKWARD += ["e\u0301" * 300, "\x00\x01\x7f", "👩‍👩‍👧 family", "[MASK] [CLS]"]
AWKWARD += ["ſ K İ ς ǆ ﬃ ½ ⅓ x⁻² ① ℡ ＡＢ ´ ¨ ꟲ 𝐀 🄬 \U0001fbf0"]


@pytest.fixture(scope="module", params=["ascii", "plain", "none"])
def pair(request, tmp_path_factory, texts):
    """(our Tokenizer, transformers' AutoTokenizer) of a vocabulary, for each normalisation."""
    folder = tmp_path_factory.mktemp(request.param)
    train_tokenizer(texts[:60], 2000, request.param, folder)
    return Tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)


def agree(pair, text):
    ours, theirs = pair
    ids = ours.encode(text).tolist()
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert not {0, 1, 2, 3} & set(ids)
    normal = normalise(text, ours.mode)
    assert ours.decode(ids) == normal
    added = " " if ours.mode != "none" else ""  # before the first word
    assert theirs.decode(ids) == normal.removeprefix(added)


@settings(max_examples=300, **AT_ANY_SPEED)
@given(st.text(max_size=300) | PROSE)
def test_ids_equal_transformers_on_any_text(pair, text):
    agree(pair, text)


def test_ids_equal_transformers_on_awkward_and_on_real_text(pair, texts):
    """test_finetune_glue.py has where transformers puts [CLS] and [SEP]."""
    for text in [*AWKWARD, *texts[60:70]]:
        agree(pair, text)
    _, theirs = pair
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    assert theirs.convert_tokens_to_ids(special) == [0, 1, 2, 3]
    assert [theirs.pad_token, theirs.cls_token, theirs.sep_token, theirs.mask_token] == special
    assert sorted(theirs("a")) == ["attention_mask", "input_ids"]


def test_where_words_begin(pair, texts):
    """Letters and digits without a space in front go on; a text's first word may lack one."""
    ours, _ = pair
    begins = ours.begins_word()
    assert all(begins[:4])  # the special ones
    words = re.findall("[a-zA-Z]{1,24}", " ".join(texts[60:62]))
    counts = {"x" * 90: 1, "1234567": 1, "naïve œuvre": 2, "stop! (now)": 4}
    for text, n_words in [*counts.items(), (" ".join(words), len(words))]:
        assert sum(begins[i] for i in ours.encode(" " + text)) == n_words, text


@settings(max_examples=300, **AT_ANY_SPEED)
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


def test_normalisation_follows_the_paper():
    odd = "``Naïve''  Café,\n\tÆon — Ωmega “x” ‘y’ K"
    assert normalise(odd, "ascii") == '"naive" cafe, aeon-- mega"x"\'y\' k'
    signs = "ﬁrst oﬃcer, €5 ± 2, x² ≤ 10⁻⁵, 1½ cups, ＡＢＣ, e\u0301te\u0301, Straße"
    plain = " first officer, eur5+- 2, x2<= 10-5, 1 1/2 cups, abc, ete, strasse"
    assert normalise(signs, "ascii") == plain and normalise("1⅓ 𝐀 😀", "ascii") == " 1"
    assert normalise("Do n't stop .", "ascii") == " do n't stop."
    assert normalise("do n't  stop.", "ascii") == " do n't stop."
    assert normalise("Ünïcode STAYS , here", "plain") == " Ünïcode STAYS, here"
    assert normalise(" \n ", "ascii") == normalise("日本", "ascii") == ""
    assert normalise(odd, "none") == odd


def test_a_file_that_normalises_or_splits_text_otherwise_is_refused(data_dir, tmp_path):
    path = tmp_path / "tokenizer.json"
    whole = (data_dir / "tokenizer.json").read_text("utf-8")
    for part, other in (('"NFKD"', '"NFD"'), ("{N}{1,2}", "{N}{1,3}")):
        path.write_text(whole.replace(part, other), "utf-8")
        with pytest.raises(SystemExit, match=r"ValueError.*prepare the data again"):
            Tokenizer(path)


def test_not_all_words_are_trained_on_where_they_all_differ():
    proteins = np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRS"), (600, 20000))
    read = list(bounded([*map("".join, proteins), *600 * ["a b"]], "none"))
    assert 8e6 < sum(map(len, read)) < 9e6 and "a b" in read
