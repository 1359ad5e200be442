"""Some 400 MB of English, of Wikipedia and of old books, without a sentence of GLUE.

    git clone https://github.com/jason-feng/wikiVisual
    git -C wikiVisual checkout 1c0fac92
    git clone https://github.com/rcdm-uga/Gutenberg_Text
    git -C Gutenberg_Text checkout a0b16d35
    python results/english.py wikiVisual Gutenberg_Text GLUE english.txt
    python prepare.py --source=english.txt --data_dir=data/english
"""

import functools
import hashlib
import random
import re
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from nanocram.glue import NINE, TASKS

ARTICLE, BOOK = 18_000, 60_000  # characters of each that are read, at most
RUN = 13  # words
COMMON = set(
    "a and as at be but by for from had he her his i in is it not of on or that the this to was "
    "were which with you".split()
)
WORD = re.compile(r"[^\W_]+")
DOC = re.compile(r'<doc id="\d+" url="\S*" title="(?!List of)[^\n]*">\n(.*?)\n</doc>', re.DOTALL)
BODY = re.compile(
    r"\*\*\* ?START OF [^\n]*\n(.*?)\n[^\n]{0,5}END OF [^\n]{0,5}PROJECT GUT", re.DOTALL | re.I
)
LEFT = re.compile(r"[{}<>|=^*\\]|\[\[|\]\]|formula_\d|http|www\.| ,")  # of markup
NOTES = re.compile(r"\[|gutenberg|transcri|e-?text|e-?book|copyright|illustrat", re.IGNORECASE)


def files(folder, pattern):
    found = sorted(Path(folder).glob(pattern), key=str)
    if not found:
        sys.exit(f"no {folder}/{pattern}: {__file__} begins with the commands that fetch it")
    return found


def is_prose(text):
    words = WORD.findall(text.lower())
    if len(words) < 8 or text[0].islower() or LEFT.search(text):
        return False
    common = sum(word in COMMON for word in words)
    return common > 0.15 * len(words) and bool(re.search(r"[.!?]\W*$", text))


def articles(folder):
    """Yield the lines of each article."""
    for path in files(folder, "text/*/wiki_*"):
        for match in DOC.finditer(path.read_text("utf-8")):
            text = match[1][:ARTICLE].rpartition("\n")[0]
            text = re.sub("[\u200b-\u200f\u2060\xad]", "", text)
            # of templates that the extractor removed
            text = re.sub(r" *\((?=[\s;,\])])[^()]*\)|[;,]? +\]", "", text)
            yield text.splitlines()


def books(folder):
    """Yield the paragraphs of each book's middle, which has no title page and no index."""
    titles = set()
    for path in files(folder, "*/*.txt"):
        text = path.read_text("utf-8-sig")
        language = re.search("\nLanguage: *(.*)", text)
        body = BODY.search(text)
        is_english = not language or language[1].strip() == "English"
        if not body or not is_english or "COPYRIGHTED" in text or path.name in titles:
            continue
        titles.add(path.name)
        text = re.sub(r"_|\[\d+\]|\{\d+\}", "", body[1])
        cut = max(0, len(text) - BOOK) // 2
        yield [unwrap(b) for b in re.split("\n\n+",text[cut : cut + BOOK])[1:-1]]

BADS=[]
def unwrap(block):
    """The paragraph of hard-wrapped lines; '' of verse, a table or a note."""
    lines = block.splitlines()
    is_verse = any(len(line) < 45 for line in lines[:-1]) or (
        len(lines) > 2 and not any(line.strip()[:1].islower() for line in lines[1:])
    )
    if is_verse or NOTES.search(block) or re.search(r"\S {3,}\S", block): BADS.append(block)
    return "" if is_verse or NOTES.search(block) or re.search(r"\S {3,}\S", block) else block
