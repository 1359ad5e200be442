"""Sentence vectors from a model folder, taught by pairs of your own, with sentence-transformers.

    pip install sentence-transformers accelerate
    python docs/sentence_vectors.py out/tiny pairs.tsv out/vectors

A line of the file is a text, a tab and a text that means the same: a question and its answer, two
log lines of one incident; the first line names the columns. Every tenth pair is held out, to see
how often a text's nearest one is its partner. Then OUT is for SentenceTransformer(OUT).encode().
"""

import argparse
import json
import os
import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

lines = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
for name in ("model", "pairs", "out"):
    parser.add_argument(name)
for name, value in {"lr": 5e-4, "epochs": 1, "batch": 64, "seed": 0}.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
options = parser.parse_args()
if os.path.exists(options.out):  # it may be the model's own
    sys.exit(f"{options.out} exists: name a new folder")


config_file = os.path.join(options.model, "config.json")
if os.path.exists(config_file):  # else it is a name on the Hub
    with open(config_file, encoding="utf-8") as file:
        if json.load(file).get("model_type") == "nanocram":
            sys.exit(f"{options.model} is no ModernBERT: transformers cannot read its architecture")


def read(path):
    """[(text, text of the same meaning), …] of a TSV file."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # quotes mean nothing here
            rows = [line.rstrip("\n").split("\t") for line in file]
    except (OSError, ValueError) as e:
        sys.exit(f"{path} cannot be read: {e}")
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            sys.exit(f"{path}, line {number} has {len(row)} columns: give a text, a tab, a text")
    return rows[1:]


def found(model, pairs):
    """Percent of the first texts whose nearest second text, by the cosine, is their own."""
    firsts, seconds = (
        model.encode(texts, normalize_embeddings=True) for texts in zip(*pairs, strict=True)
    )
    nearest = (firsts @ seconds.T).argmax(1)
    return 100 * (nearest == range(len(pairs))).mean()


pairs = read(options.pairs)
held_out = pairs[::10]
train = [pair for i, pair in enumerate(pairs) if i % 10]
model = SentenceTransformer(options.model)  # the mean over a text's tokens
before = found(model, held_out)

# The other texts of a batch are what a text's partner has to be nearer than.
settings = {"learning_rate": options.lr, "num_train_epochs": options.epochs, "seed": options.seed}
settings["per_device_train_batch_size"] = options.batch
settings["warmup_steps"] = len(train) * options.epochs // options.batch // 10
unfinished = os.path.normpath(options.out) + ".tmp"  # renamed once it is whole
arguments = TrainingArguments(unfinished, save_strategy="no", report_to="none", **settings)
firsts, seconds = zip(*train, strict=True)
data = Dataset.from_dict({"anchor": firsts, "positive": seconds})
loss = MultipleNegativesRankingLoss(model)
SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()
model.save_pretrained(unfinished)
os.rename(unfinished, options.out)
after = found(model, held_out)
of = f"of {len(held_out):,} held-out texts the partner was the nearest"
print(f"{options.out}: {of} for {before:.1f} % before training, for {after:.1f} % after")
