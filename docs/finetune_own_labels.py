"""Fine-tune a model folder on labels of your own, with transformers' Trainer.

    pip install transformers accelerate
    python docs/finetune_own_labels.py out/mine tickets.csv out/labelled
    python docs/finetune_own_labels.py out/mine train.tsv out/labelled --dev=dev.tsv

A .csv or .tsv file has the columns text and label. Without --dev, one row in ten is held out. Then
OUT is for pipeline("text-classification", OUT). --fresh=1 leaves the pre-training out: what is it
worth? --pooling=cls reads [CLS] alone, not the mean of all tokens.
"""

import argparse
import csv
import math
import os
import random
import sys

from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers import AutoModelForSequenceClassification as Classifier

parser = argparse.ArgumentParser(usage=__doc__)
for name in ("model", "train", "out"):
    parser.add_argument(name)
defaults = {"dev": "", "lr": 1e-3, "epochs": 3, "batch": 16, "seed": 0, "fresh": 0}
for name, value in (defaults | {"pooling": "mean"}).items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()
if os.path.exists(args.out):
    sys.exit(f"{args.out} exists: name a new folder")


def read(path):
    """[(text, label), ...] of a .csv file, or of a .tsv file, in which quotes mean nothing."""
    csv.field_size_limit(1 << 24)
    dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.endswith(".tsv") else {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, **dialect)
            return [(row["text"], row["label"]) for row in table if None not in row.values()]
    except (OSError, ValueError, KeyError, csv.Error) as e:
        sys.exit(f"{path}: {e!r}: give a UTF-8 file with the columns text and label")


rows = read(args.train)
random.Random(args.seed).shuffle(rows)
n_dev = 0 if args.dev else (len(rows) + 9) // 10
dev, train = read(args.dev) if args.dev else rows[:n_dev], rows[n_dev:]
names = sorted({name for _, name in train + dev})
if not (dev and 2 <= len(names) <= max(2, len(train) // 2)):
    sys.exit(f"{len(train)} rows with {len(names)} labels: give at least two labels, each a class")

set_seed(args.seed)
label2id = {name: i for i, name in enumerate(names)}
words = {"id2label": dict(enumerate(names)), "label2id": label2id}
try:
    config = AutoConfig.from_pretrained(args.model, classifier_pooling=args.pooling, **words)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
except (OSError, ValueError) as e:  # no such folder, or no architecture of transformers
    sys.exit(f"cannot read {args.model}: {str(e).splitlines()[0]}")
model = Classifier.from_config(config)
if not args.fresh:
    model = Classifier.from_pretrained(args.model, config=config)


# say which texts are cut, and which reach positions that pre-training has not seen
lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text, _ in train + dev]
trained = getattr(config, "trained_on", {}).get("seq_len", math.inf)
longest = tokenizer.model_max_length
n_longer, n_cut = (sum(n > limit for n in lengths) for limit in (trained, longest))
if n_longer and trained < longest and not args.fresh:
    said = f"{args.model} has seen no rows so long: docs/own_text.md tells what helps"
    print(f"{n_longer} of {len(lengths)} texts have more than {trained} tokens; {said}")
if n_cut:
    print(f"{n_cut} of {len(lengths)} texts have more than {longest} tokens, and are cut there")


def encode(rows):
    return [tokenizer(text, truncation=True) | {"label": label2id[name]} for text, name in rows]


unfinished = os.path.normpath(args.out) + ".tmp"  # renamed once it is whole
settings = {"learning_rate": args.lr, "num_train_epochs": args.epochs, "seed": args.seed}
settings["per_device_train_batch_size"] = args.batch
settings["warmup_steps"] = len(train) * args.epochs // args.batch // 10
settings = TrainingArguments(unfinished, save_strategy="no", report_to="none", **settings)
trainer = Trainer(model, settings, train_dataset=encode(train), processing_class=tokenizer)
trainer.train()
predicted = trainer.predict(encode(dev))
accuracy = (predicted.predictions.argmax(-1) == predicted.label_ids).mean()
trainer.save_model(unfinished)
os.rename(unfinished, args.out)
print(f"{args.out}: accuracy {accuracy:.1%} on {len(dev)} rows that it was not trained on")
