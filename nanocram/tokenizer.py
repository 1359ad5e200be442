"""Text to token ids and back: one normalisation, one byte-level BPE, kept in one tokenizer.json with two readers.

    python -c "from nanocram.tokenizer import Tokenizer; print(Tokenizer('data/tiny/tokenizer.json').encode('Hello, world!'))"
    python -c "from transformers import AutoTokenizer as A; print(A.from_pretrained('data/tiny')('Hello, world!'))"

The tokenizers library trains the vocabulary and defines the file, so transformers loads it with no code of ours;
tiktoken, several times faster, is what prepare.py, train.py and finetune_glue.py use. The ids are equal on any
text but one that spells a special token: there transformers makes that token, as its users expect of "[MASK]".
"""

import functools
import json
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np

PAD, CLS, SEP, MASK = range(4)
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]

# Each rule is applied twice, by Python here and by the tokenizers library from tokenizer.json. Both must agree on every
# string, so the rules name their characters one by one: \s and \w mean different things to different regex engines.

SPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"  # what str.split() splits at
BEFORE_PUNCTUATION = r" (?=[!-/:-@\[-`{-~])"
FOLD = (  # typographic characters to the ASCII ones they stand for; all others without one are dropped, as in the paper
    ("[\u2018-\u201b\u2032\u02bc]", "'"),
    ("[\u201c-\u201f\u2033\xab\xbb]", '"'),
    ("[\u2010-\u2013\u2212]", "-"),
    ("[\u2014\u2015]", "--"),
    ("\u2026", "..."),
    (SPACE, " "),
)
# Words, groups of at most two digits, punctuation; each run is bounded, since tiktoken fails on a run of 10^6 spaces.
PATTERN = r" ?[\p{L}\p{M}]{1,24}| ?\p{N}{1,2}| ?[^\s\p{L}\p{M}\p{N}]{1,8}|\s{1,8}"


NOT_ASCII = re.compile("[^\x00-\x7f]{1,16}")  # bounded, so that the cache below is


@functools.lru_cache(1 << 16)
def to_ascii(run):
    """What a run of characters outside ASCII becomes. To look at such runs alone made normalise() twice as fast."""
    for pattern, replacement in FOLD:
        run = re.sub(pattern, replacement, run)
    return unicodedata.normalize("NFD", run).encode("ascii", "ignore").decode("ascii")


def normalise(text, mode):
    """Text as the vocabulary sees it: one space before every word, the first too, and none before punctuation.

    "do n't stop ." and "Do n't stop." become the same tokens, as they do in BERT's WordPiece, which GLUE needs: its
    tasks space their punctuation differently. Mode "ascii" is the paper's (section 4.4): quotes unified, NFD, lower
    case, accents and everything outside ASCII removed. Mode "plain" keeps case, accents and every script.
    """
    if mode == "ascii":
        if not text.isascii():
            text = NOT_ASCII.sub(lambda match: to_ascii(match[0]), text)
        text = text.lower().replace("``", '"').replace("''", '"')
    text = " ".join(text.split())
    return re.sub(BEFORE_PUNCTUATION, "", " " + text) if text else ""


def normaliser_steps(mode):
    """The same normalisation as the "normalizer" of a tokenizer.json."""

    def replace(pattern, content, kind="Regex"):
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    to_ascii = [
        *(replace(*rule) for rule in FOLD),
        {"type": "NFD"},
        replace(NOT_ASCII.pattern, ""),
        {"type": "Lowercase"},
        replace("``", '"', "String"),
        replace("''", '"', "String"),
    ]
    spaces = [
        replace(SPACE, " "),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": " "},
        replace(BEFORE_PUNCTUATION, ""),
    ]
    return {"type": "Sequence", "normalizers": (to_ascii if mode == "ascii" else []) + spaces}


def byte_of_char():
    """{character: byte} of the printable alphabet in which byte-level vocabularies are written (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def train_tokenizer(texts, size, mode, folder):
    """Train a byte-level BPE on an iterable of texts; write tokenizer.json and tokenizer_config.json into folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((normalise(t, mode) for t in texts), trainer)
    got = tokenizer.get_vocab_size()
    if got < size:
        less = (
            f"type --vocab_size={got}, or " if got > 260 else ""
        )  # 260: bytes and special tokens, no text at all
        sys.exit(f"the text yields a vocabulary of only {got} entries: {less}give more text")
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", pair, special_tokens=ends
    )

    spec = json.loads(tokenizer.to_str())
    spec["normalizer"] = normaliser_steps(mode)
    # tiktoken merges any two neighbours whose union is in the vocabulary, lowest id first, and takes a piece that is an
    # entry as it is. In the terms of tokenizer.json: every split of every entry is a merge, in the order of the ids.
    vocab = spec["model"]["vocab"]
    splits = (
        (token[:i], token[i:])
        for token in sorted(set(vocab) - set(SPECIAL), key=vocab.get)
        for i in range(1, len(token))
    )
    spec["model"] |= {
        "merges": [list(s) for s in splits if s[0] in vocab and s[1] in vocab],
        "ignore_merges": True,
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    roles = {f"{s[1:-1].lower()}_token": s for s in SPECIAL}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    config |= {"clean_up_tokenization_spaces": False, "split_special_tokens": False, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


class Tokenizer:
    """tiktoken reading a tokenizer.json of ours; safe in threads. "[MASK]" in a text is text like any other."""

    def __init__(self, path):
        """Raises ValueError if path is no tokenizer.json written by this file."""
        import tiktoken

        try:
            spec = json.loads(Path(path).read_text(encoding="utf-8"))
            modes = [m for m in ("ascii", "plain") if normaliser_steps(m) == spec["normalizer"]]
            self.mode = modes[0]
            to_byte = byte_of_char()
            vocab = {k: v for k, v in spec["model"]["vocab"].items() if k not in SPECIAL}
            ranks = {bytes(to_byte[c] for c in token): rank for token, rank in vocab.items()}
            self.encoding = tiktoken.Encoding(
                "nanocram",
                pat_str=PATTERN,
                mergeable_ranks=ranks,
                special_tokens={s: i for i, s in enumerate(SPECIAL)},
            )
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
            raise ValueError(
                f"{path} is not a tokenizer.json of prepare.py ({e!r:.80}): prepare the data again"
            ) from e
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text):
        """Ids (n,) of a text, uint16, special tokens never among them."""
        text = normalise(text, self.mode)
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in ids])


def truncated(lengths, limit):
    """How much of one or two texts of these lengths fits into limit tokens: the longer gives first."""
    short = min(*lengths, limit // 2) if len(lengths) == 2 else 0
    long = min(max(lengths), limit - short)
    return (
        [long]
        if len(lengths) == 1
        else [short, long]
        if lengths[0] <= lengths[1]
        else [long, short]
    )
