r"""German paragraphs with their authors and decades, and what a bag of their characters knows.

    git clone --depth=1 https://github.com/COST-ELTeC/ELTeC-deu
    python results/german.py ELTeC-deu german      # german/novels.txt, authors.csv, decades.csv
    python prepare.py config/tiny.py --source=german/novels.txt --normalisation=plain \
      --filter_ratio=0 --data_dir=data/german
    python train.py config/tiny.py --data_dir=data/german --out_dir=out/german --budget_hours=0.5
    python docs/finetune_own_labels.py out/german german/authors.csv out/authors --epochs=6

The same with decades.csv; --fresh=1 begins with fresh weights, also for Chinese reviews of hotels:

    git clone --depth=1 https://github.com/SophonPlus/ChineseNlpCorpus
    mv ChineseNlpCorpus/datasets/*/*_htl_all.csv hotels.csv
    python -m zipfile -e ChineseNlpCorpus/datasets/*/*_10_cats.zip .
    python prepare.py config/tiny.py --source='hotels.csv,online_shopping_10_cats.csv' \
      --text_column=review --normalisation=plain --filter_ratio=0 --data_dir=data/chinese
    python train.py config/tiny.py --data_dir=data/chinese --out_dir=out/chinese --budget_hours=0.5
    python docs/finetune_own_labels.py out/chinese hotels.csv out/hotels --text_column=review

The texts are in the public domain; the mark-up of ELTeC (10.5281/zenodo.4662482) is CC BY 4.0.
"""

import csv
import random
import sys
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

from sklearn import feature_extraction, linear_model, metrics, pipeline

sys.path.insert(0, str(Path(__file__).parent.parent))
from prepare import is_held_out

TEI = "{http://www.tei-c.org/ns/1.0}"
# fmt: off
YEARS = {  # of the first edition; all quote by »«, for other quotes would tell an author
    "DEU001": 1845, "DEU016": 1846, "DEU020": 1846, "DEU005": 1855, "DEU011": 1855,
    "DEU038": 1864, "DEU042": 1865, "DEU040": 1866, "DEU028": 1870, "DEU044": 1876,
    "DEU035": 1878, "DEU061": 1888, "DEU056": 1889, "DEU062": 1895, "DEU067": 1895,
    "DEU054": 1898, "DEU076": 1907, "DEU089": 1909, "DEU082": 1915, "DEU078": 1919,
}
# fmt: on


def one_line(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


def flat(element):
    """The text of an element: a space around lines of verse, none for a page's break."""
    parts = [element.text or ""]
    for child in element:
        gap = " " if child.tag == TEI + "l" else ""
        parts += [gap, flat(child), gap, child.tail or ""]
    return "".join(parts)


def read(path):
    """(surname of the author, [paragraph, …]) of a novel, its first 600,000 characters."""
    root = ET.parse(path).getroot()
    author = one_line(root.find(f".//{TEI}titleStmt/{TEI}author").text)
    body, kept, size = root.find(f"{TEI}text/{TEI}body"), [], 0
    for paragraph in filter(None, (one_line(flat(p)) for p in body.iter(TEI + "p"))):
        size += len(paragraph)
        if size > 600_000:
            break
        kept.append(paragraph)
    return author.split(",")[0], kept


def main(source, folder):
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    documents, rows = [], []
    for name, year in YEARS.items():
        author, paragraphs = read(source / "level1" / f"{name}.xml")
        documents += paragraphs
        fit = list(dict.fromkeys(p for p in paragraphs if 200 <= len(p) <= 700))
        rows += [(p, author, f"{year // 10 * 10}s") for p in rng.sample(fit, min(300, len(fit)))]
    rng.shuffle(rows)
    (folder / "novels.txt").write_text("\n\n".join(documents) + "\n", "utf-8")
    for column, name in enumerate(("authors", "decades"), 1):
        with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([("text", "label"), *((row[0], row[column]) for row in rows)])
        sides = [[], []]
        for row in rows:
            sides[is_held_out(row[0], 0.1)].append((row[0], row[column]))
        characters = feature_extraction.text.TfidfVectorizer(
            analyzer="char_wb", ngram_range=(2, 5), min_df=2, sublinear_tf=True
        )
        bag = pipeline.make_pipeline(characters, linear_model.LogisticRegression(C=100))
        bag.fit(*zip(*sides[0], strict=True))
        texts, labels = zip(*sides[1], strict=True)
        answers = bag.predict(texts)
        f1 = metrics.f1_score(labels, answers, average="macro")
        accuracy = metrics.accuracy_score(labels, answers)
        print(
            f"{name}: a bag of characters has {accuracy:.1%}, macro-F1 {f1:.1%}, {len(texts)} rows"
        )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
