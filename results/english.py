"""390 MB of English: Wikipedia and old books, less what shares 13 words in a row with GLUE.

    git clone https://github.com/jason-feng/wikiVisual && git -C wikiVisual checkout 1c0fac92
    git clone https://github.com/rcdm-uga/Gutenberg_Text && git -C Gutenberg_Text checkout a0b16d35
    python results/english.py wikiVisual Gutenberg_Text GLUE english.txt  # 5 minutes, 1.5 GB

Wikipedia's text is its contributors', CC BY-SA 3.0; the books are public domain in the USA.
"""

import hashlib
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from nanocram import safety
from nanocram.glue import TASKS

ARTICLE, BOOK = slice(18_000), slice(5_000, 80_000)  # characters that are read of each
DOC = re.compile(r'<doc id="\d+" url="\S*" title="(?!List of)[^\n]*">\n(.*?\n)</doc>', re.DOTALL)
BODY = re.compile(r"\*\*\* ?START OF .*?\n(.*)\n.{0,5}END OF .{0,5}PROJECT GUT", re.S | re.I)
COPIES = re.compile("Complete Works of William|233 Short Stories")  # of what other files have
# italics, numbers of notes, and what stood beside a template, as in "Asimov (; born in 1920)"
DEBRIS = re.compile(r"[\u200a-\u200f_]|\[\d+\]|[;,]? +\]| *\((?=[\s;,\])])[^()]*\)")
MARKUP = re.compile(r'[{}<>|=^*\\\ufffd]|\[\[|\]\]|""|formula_\d|http|www\.| ,|\S {3,}\S')
# a short line in a block, as verse has, headings and notes
NOTE = re.compile(r"(?im)^.{0,49}\n|^\W*(\[|chapter|this article)|gutenberg|transcriber|\[foot")
COMMON = re.compile(r"\b(?:[Tt]he|a|and|as|at|but|by|for|he|his|I|in|is|it|of|on|that|to|was)\b")


def files(folder, pattern):
    found = sorted(Path(folder).glob(pattern), key=str)
    return found or sys.exit(f"no {folder}/{pattern}: {__file__} begins with what to type")


def documents(wiki, gutenberg):
    for path in wiki:
        for doc in DOC.finditer(path.read_text("utf-8")):
            yield "articles", "\n".join(prose(doc[1][ARTICLE].split("\n")[:-1]))
    for path in {path.name: path for path in gutenberg}.values():
        body = BODY.search(path.read_text("utf-8-sig"))
        if body and "COPYRIGHTED" not in body.string and not COPIES.search(path.name):
            yield "books", "\n".join(prose(re.split("\n\n+", body[1][BOOK])[1:-1]))


def prose(blocks):
    """Yield the blocks that are English paragraphs, each as a line."""
    for block in blocks:
        text = " ".join(DEBRIS.sub("", block).split())
        is_sentence = re.match(r"[^a-z](?:\S* ){7}.*[.!?]\W*$", text)  # of eight words or more
        is_english = len(COMMON.findall(text)) > 0.15 * len(text.split())
        if is_sentence and is_english and not MARKUP.search(block) and not NOTE.search(block):
            yield text


def runs(text):
    words = re.findall(r"[^\W_]+", text.lower())
    for i in range(len(words) - 12):
        yield hashlib.blake2b(" ".join(words[i : i + 13]).encode(), digest_size=8).digest()


def main(wiki, gutenberg, glue, out):
    wiki, gutenberg = files(wiki, "text/*/wiki_*"), files(gutenberg, "*/*.txt")
    known = set()
    for path in files(glue, "*/*.tsv"):
        for cell in re.split(r"[\t\n]|\(ROOT[^\t\n]*", path.read_text("utf-8-sig")):
            known.update(runs(cell))  # of all but MNLI's parses
    wanted = [f"{task.folder}/{split}.tsv" for task in TASKS.values() for split in task.rows]
    missing = ", ".join(name for name in wanted if not Path(glue, name).exists()) or "none"
    texts = [(kind, text) for kind, text in documents(wiki, gutenberg) if len(text) >= 500]
    random.Random(0).shuffle(texts)
    kept = [(kind, text) for kind, text in texts if known.isdisjoint(runs(text))]
    for name in ("articles", "books"):
        own = [text for kind, text in kept if kind == name]
        n_words = sum(len(text.split()) for text in own)
        print(f"{len(own):,} {name}: {sum(map(len, own)):,} characters, {n_words:,} words")
    data = b"\n\n".join(text.encode() for _, text in kept)
    safety.write_beside(Path(out), lambda path: path.write_bytes(data))
    print(f"{len(texts) - len(kept)} dropped for {len(known):,} runs of GLUE; without {missing}")
    print(f"{time.process_time():.0f} s, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("type python results/english.py wikiVisual Gutenberg_Text GLUE english.txt")
    main(*sys.argv[1:])
