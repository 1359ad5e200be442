"""Fine-tune a model folder on labels of your own, with transformers' Trainer.

    pip install transformers accelerate
    python docs/finetune_own_labels.py out/tiny train.tsv dev.tsv out/labelled

A line of a file is a text, a tab and its label; the first line names the columns. Then OUT is for
pipeline("text-classification", OUT). --fresh=1 leaves the pre-training out: what was it worth?
--pooling=cls reads [CLS] alone, which pre-training never predicts, not the mean over all tokens.
Each label is a class. For others take out both checks of `names`, put another metric in place of
accuracy(), and in place of **words
    for scores: num_labels=1, problem_type="regression"; encode() has float(name) as label
    for several labels a text: num_labels=N, problem_type="multi_label_classification"; encode() has
    a list of N numbers, 0.0 or 1.0
"""

import argparse
import json
import os
import sys

from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers import AutoModelForSequenceClassification as Classifier

lines = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
for name in ("model", "train", "dev", "out"):
    parser.add_argument(name)
defaults = {"lr": 1e-3, "epochs": 3, "batch": 16, "seed": 0, "fresh": 0, "pooling": "mean"}
for name, value in defaults.items():
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
    """[(text, label), …] of a TSV file."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # quotes mean nothing here
            rows = [line.rstrip("\n").split("\t") for line in file]
    except (OSError, ValueError) as e:
        sys.exit(f"{path} cannot be read as UTF-8: {e}")
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            sys.exit(f"{path}, line {number} has {len(row)} columns: give a text, a tab, a label")
    if len(rows) < 2:
        sys.exit(f"{path} has no text: its first line names the columns, the others are read")
    return rows[1:]


def encode(rows):
    """What Trainer takes; a text that is too long for the model is cut."""
    label_of = config.label2id
    return [tokenizer(text, truncation=True) | {"label": label_of[name]} for text, name in rows]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()}


train, dev = read(options.train), read(options.dev)
names = sorted({name for _, name in train})
if len(names) > max(2, len(train) // 2):
    few = f"{options.train} has {len(names)} labels in {len(train)} rows"
    sys.exit(f"{few}: the label stands behind the tab, and is a class, no number or list")
unknown = sorted({name for _, name in dev}.difference(names))
if unknown:
    sys.exit(f"{options.dev} has labels that {options.train} lacks: {', '.join(unknown[:5])}")

set_seed(options.seed)  # of the new layer; Trainer has it for the order of the rows
words = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
tokenizer = AutoTokenizer.from_pretrained(options.model)
config = AutoConfig.from_pretrained(options.model, classifier_pooling=options.pooling, **words)
if options.fresh:
    model = Classifier.from_config(config)
else:
    model = Classifier.from_pretrained(options.model, config=config)

settings = {"learning_rate": options.lr, "num_train_epochs": options.epochs, "seed": options.seed}
settings["per_device_train_batch_size"] = options.batch
settings["warmup_steps"] = len(train) * options.epochs // options.batch // 10
unfinished = os.path.normpath(options.out) + ".tmp"  # renamed once it is whole
arguments = TrainingArguments(unfinished, save_strategy="no", report_to="none", **settings)
data = {"train_dataset": encode(train), "eval_dataset": encode(dev)}
trainer = Trainer(model, arguments, **data, processing_class=tokenizer, compute_metrics=accuracy)
trainer.train()
share = trainer.evaluate()["eval_accuracy"]
trainer.save_model()
os.rename(unfinished, options.out)
print(f"{options.out}: accuracy {100 * share:.1f} %")
