"""Text to token ids and back: one normalisation, one byte-level BPE, one file with two readers.

The tokenizers library trains tokenizer.json, which transformers loads; tiktoken reads it for the
scripts, several times faster. The ids differ only in a text that spells a special token.
"""

import functools
import json
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken

from nanocram import safety

PAD, CLS, SEP, MASK = range(4)
SPECIAL = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}
MODES = ("ascii", "plain", "none")  # see normalise()

# Words, one or two digits, punctuation, white space; all bounded: tiktoken fails on 10^6 spaces.
PATTERN = r" ?[\p{L}\p{M}]{1,24}| ?\p{N}{1,2}| ?[^\s\p{L}\p{M}\p{N}]{1,8}|\s{1,8}"

# Python applies these rules here, the tokenizers library from its file. Both must agree on every
# string: no \s or \w, which differ between regex engines. SPACE is what str.split() splits at.
SPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"
BEFORE_PUNCTUATION = r" (?=[!-/:-@\[-`{-~])"
NOT_ASCII = "[^\x00-\x7f]{1,16}"  # bounded, so that the cache of to_ascii() is
# Typographic characters become the ASCII ones they stand for; the paper's code deletes them. Of the
# others NFKD leaves what is ASCII: e of é, fi of a ligature, 2 of a raised one. All else goes.
LETTERS = {"[æÆ]": "ae", "[œŒ]": "oe", "ß": "ss", "[øØ]": "o", "[łŁ]": "l", "ı": "i"}
SIGNS = {"€": "EUR", "£": "GBP", "±": "+-", "×": "x", "≤": "<=", "≥": ">=", "≠": "!=", "½": " 1/2"}
FOLD = {
    "[\u2018-\u201b\u2032\u02bb\u02bc\xb4]": "'",
    "[\u201c-\u201f\u2033\xab\xbb]": '"',
    "[\u2010-\u2013\u2212\u207b\u208b]": "-",
    "[\u2014\u2015]": "--",
    **(LETTERS | SIGNS),
    SPACE: " ",
}
# other fractions, which would join a number before them, and what a newer Unicode decomposes
GONE = "[\xbc\xbe\u2150-\u215f\u2189\ua7f0-\ua7ff\U00010000-\U0010ffff]"

# The alphabet of byte-level vocabularies (GPT-2's) has a character for each byte: printable ones
# stand for themselves, the others follow from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(OTHERS)}


def with_stand_ins(text, form="NFKC"):
    """A text in which mode "ascii" strips or drops just the characters outside ASCII."""
    for pattern, stand_in in FOLD.items():
        text = re.sub(pattern, stand_in, text)
    return unicodedata.normalize(form, text)


@functools.lru_cache(1 << 16)
def to_ascii(run):
    folded = with_stand_ins(re.sub(GONE, "", run), "NFKD")
    return folded.encode("ascii", "ignore").decode("ascii")


def normalise(text, mode):
    """Text as the vocabulary sees it: a space before every word, none before ASCII punctuation.
    "ascii" is the paper's (section 4.4) but for FOLD and NFKD: lower case, quotes unified, accents
    and all else outside ASCII removed. "plain" keeps every script. "none" is the text as it is."""
    if mode == "none":
        return text
    if mode == "ascii":
        # Looking only at the runs outside ASCII made this function twice as fast.
        if not text.isascii():
            text = re.sub(NOT_ASCII, lambda match: to_ascii(match[0]), text)
        text = text.lower().replace("``", '"').replace("''", '"')
    text = " ".join(["", *text.split()])
    # "do n't stop ." and "Do n't stop." become the same tokens, as they do in BERT's WordPiece.
    # GLUE needs it: its tasks space their punctuation differently.
    return re.sub(BEFORE_PUNCTUATION, "", text)


def normaliser_steps(mode):
    """normalise() as the "normalizer" of a tokenizer.json; None where it does nothing."""
    if mode == "none":
        return None

    def replace(pattern, content, kind="Regex"):
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    steps = []
    if mode == "ascii":
        steps += [replace(GONE, "")] + [replace(*pair) for pair in FOLD.items()]
        steps += [{"type": "NFKD"}, replace(NOT_ASCII, ""), {"type": "Lowercase"}]
        steps += [replace("``", '"', "String"), replace("''", '"', "String")]
    steps += [replace(SPACE, " "), {"type": "Strip", "strip_left": True, "strip_right": True}]
    steps += [{"type": "Prepend", "prepend": " "}, replace(BEFORE_PUNCTUATION, "")]
    return {"type": "Sequence", "normalizers": steps}


def bounded(texts, mode):
    """Yield normalised texts, from all parts of a list, until their distinct words have 8 MB. The
    trainer takes 80 times as much, 5 GB for 60 MB of proteins; 100 MB of novels have 2 MB."""
    words, size = set(), 0
    for part in range(32):
        is_near = 32 * size >= 8e6 * part  # each part has fewer new words than the one before
        for text in texts[part::32]:
            normal = normalise(text[: 1 << 22], mode)
            yield normal
            words.update(re.findall(r"[^\W\d_]{1,24}", normal) if is_near else ())
        size = sum(len(word.encode("utf-8", "replace")) for word in words)
        if size > 8e6:
            safety.say(f"vocabulary  of {part + 1}/32 of that: more words would take memory")
            break


def train_tokenizer(texts, size, mode, folder):
    """Train byte-level BPE of size entries; exits if the texts do not yield so many."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    # decode() leaves out the space that normalise() puts before the first word. Offsets leave out
    # that of every word: with it the collator for whole words took a whole row for one word.
    prefixed = mode != "none"
    strip = [decoders.Strip(" ", 1, 0)] * prefixed
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *strip])
    offsets = processors.ByteLevel(add_prefix_space=prefixed, trim_offsets=True, use_regex=False)
    single, pair = "[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    template = processors.TemplateProcessing(single, pair, [("[CLS]", CLS), ("[SEP]", SEP)])
    tokenizer.post_processor = processors.Sequence([offsets, template])
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL], show_progress=False)
    trainer.initial_alphabet = byte_level.alphabet()
    tokenizer.train_from_iterator(bounded(texts, mode) if size > 260 else (), trainer)
    if (got := tokenizer.get_vocab_size()) < size:
        sys.exit(f"the text yields only {got} entries: type --vocab_size={got}, or give more text")
    spec = json.loads(tokenizer.to_str())
    spec["normalizer"] = normaliser_steps(mode)
    # tiktoken takes an entry as it is, and merges any two neighbours whose union is one, lowest id
    # first. In the terms of tokenizer.json: every split of every entry is a merge, by its id.
    vocab = spec["model"]["vocab"]
    entries = sorted(vocab.keys() - SPECIAL.keys(), key=vocab.get)
    splits = ([entry[:i], entry[i:]] for entry in entries for i in range(1, len(entry)))
    merges = [parts for parts in splits if vocab.keys() >= {*parts}]
    spec["model"] |= {"merges": merges, "ignore_merges": True}
    # A word of running text has the space before it in its token, so a [MASK] for it takes it too.
    # The other normalisations drop that space, this one would leave it as a token of its own.
    spec["added_tokens"][MASK]["lstrip"] = not prefixed
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
    }
    config |= {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}  # pad_token and so on
    safety.write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2))
    safety.write_text(folder / "tokenizer.json", json.dumps(spec, ensure_ascii=False))


def copy_tokenizer(source, folder, longest):
    """Copy its files to folder, with the length at which transformers has to cut."""
    config = safety.read_json(Path(source, "tokenizer_config.json"), "make the folder anew")
    config["model_max_length"] = longest
    safety.write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2))
    safety.write_text(folder / "tokenizer.json", Path(source, "tokenizer.json").read_text("utf-8"))


class Tokenizer:
    """tiktoken reading a tokenizer.json of ours. "[MASK]" is text as any other."""

    def __init__(self, path):
        """Exits with one line if path is no tokenizer.json written by this file."""
        try:
            spec = json.loads(Path(path).read_text(encoding="utf-8"))
            modes = [mode for mode in MODES if normaliser_steps(mode) == spec["normalizer"]]
            # many files of others have no normaliser either, but split the words otherwise
            split = spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]
            if not modes or split != {"Regex": PATTERN}:
                raise ValueError("its text is normalised or split otherwise")
            self.mode = modes[0]
            self.normalise = functools.partial(normalise, mode=self.mode)
            vocab = spec["model"]["vocab"]
            words = vocab.keys() - SPECIAL.keys()
            ranks = {bytes(BYTE_OF[char] for char in word): vocab[word] for word in words}
            parts = {"pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": SPECIAL}
            self.encoding = tiktoken.Encoding("nanocram", **parts)
            self.vocabulary = self.mode, ranks  # all that decides the ids of a text
        except Exception as e:  # there are many ways to be another file
            what = f"not a tokenizer.json of prepare.py ({e!r:.80})"
            sys.exit(f"{path} is {what}: name another folder, or prepare the data again")
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text):
        """Ids (n,) of a text, uint16, special tokens never among them."""
        return self.encode_normal(self.normalise(text))

    def encode_normal(self, text):
        """encode() of a text that normalise() has seen."""
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in ids])

    def begins_word(self):
        """For each entry, whether a word begins there. Letters, digits and parts of a character
        without a space in front go on with what is before them, be it a bracket or a quote."""
        begins = [self.decode([i])[0] for i in range(self.vocab_size)]
        return [unicodedata.category(char)[0] not in "LMN" and char != "\ufffd" for char in begins]
