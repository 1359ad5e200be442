"""Fine-tune a model folder on labels of your own, with transformers' Trainer.

python docs/finetune_own_labels.py out/mine tickets.csv out/labelled --label_column=queue
"""

import argparse
import collections
import signal
import sys
import time
from pathlib import Path

import joblib
import transformers
from sklearn import feature_extraction, linear_model, metrics, pipeline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanocram import machine, safety, sources
from prepare import is_held_out

parser = argparse.ArgumentParser(usage=__doc__)
for name in ("model", "train", "out"):
    parser.add_argument(name)
defaults = {"dev": "", "text_column": "text", "label_column": "label", "pooling": "mean"}
defaults |= {"lr": 1e-3, "epochs": 3, "batch": 16, "seed": 0, "fresh": 0}
for name, value in defaults.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()
out = Path(args.out)
if out.exists():
    sys.exit(f"{out} exists: name a new folder")
out.parent.mkdir(parents=True, exist_ok=True)
times = []  # when each step ended


class Forecast(transformers.TrainerCallback):
    def on_step_end(self, _, state, control, **more):
        times.append(time.monotonic())
        if len(times) == 11:
            minutes = (times[10] - times[0]) / 600 * (state.max_steps - 11)
            sources.say_once(f"{state.max_steps} steps, some {minutes:.1f} minutes more")


def read(path):
    """[[text, label], ...] of a table, without the rows that lack one, which are counted."""
    try:
        if sources.file_kind(path) not in ("csv", "tsv"):
            raise ValueError("it is no .csv and no .tsv file")
        with open(path, "rb") as file:
            columns = [*args.text_column.split(","), args.label_column]
            found = list(sources.table_rows(file, path, columns))
    except (OSError, ValueError) as e:
        sys.exit(f"{path}: {e}")
    rows = [[" ".join(filter(None, texts)).strip(), (y or "").strip()] for *texts, y in found]
    if sum("\ufffd" in text + label for text, label in rows) > len(rows) / 100:
        sys.exit(f"{path} is not UTF-8: type iconv -f WINDOWS-1252 -t UTF-8 {path} > NEW")
    no_text, no_label = (sum(not row[i] for row in rows) for i in (0, 1))
    print(f"{path}: {len(rows)} rows; left out: {no_label} without label, {no_text} without text")
    return [row for row in rows if all(row)]


train, dev = read(args.train), read(args.dev) if args.dev else []
if not args.dev:  # a tenth, which has what prepare.py held out
    dev = [row for row in train if is_held_out(row[0], 0.1)]
    train = [row for row in train if not is_held_out(row[0], 0.1)]
n_train, n_dev = (collections.Counter(label for _, label in rows) for rows in (train, dev))
names = sorted(n_train | n_dev)
print(*(f"{n_train[x]:9,} to train on, {n_dev[x]:7,} held out: {x}" for x in names[:50]), sep="\n")
if not (dev and len(n_train) > 1 and len(names) <= max(2, len(train) // 2)):
    sys.exit(f"{len(train)} rows, {len(dev)} held out, {len(names)} labels: give more of each")
digits = [name.strip("-+").replace(",", "").replace(".", "") for name in names]
if len(names) >= 10 and all(map(str.isdecimal, digits)):
    print(f"WARNING: {len(names)} classes, all of them numbers: is {args.label_column} a label?")
words = feature_extraction.text.TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
bag = pipeline.make_pipeline(words, linear_model.LogisticRegression(C=100, max_iter=1000))
bag_hits = bag.fit(*zip(*train, strict=True)).score(*zip(*dev, strict=True))
always = n_dev[largest := max(n_train, key=n_train.get)] / len(dev)
saved = out.with_name(out.name + ".joblib")
safety.write_beside(saved, lambda path: joblib.dump(bag, path))
print(f"a bag of words has an accuracy of {bag_hits:.1%}, always naming {largest!r} {always:.1%}")
print(f"{saved} has the bag of words: if it will do, press Ctrl-C")
signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback

device, dtype = machine.pick("auto", "auto")  # without cuDNN's attention
label2id = {name: i for i, name in enumerate(names)}
fields = {"id2label": dict(enumerate(names)), "classifier_pooling": args.pooling}
try:
    config = transformers.AutoConfig.from_pretrained(args.model, label2id=label2id, **fields)
    # "[SEP]" in a text is text, as in pre-training
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, split_special_tokens=True)
except (OSError, ValueError) as e:  # no such folder, or no architecture of transformers
    sys.exit(f"cannot read {args.model}: {str(e).splitlines()[0]}")
transformers.set_seed(args.seed)
transformers.logging.set_verbosity_error()  # it tells that the classifier is new
auto = transformers.AutoModelForSequenceClassification
model = auto.from_config(config) if args.fresh else auto.from_pretrained(args.model, config=config)
lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text, _ in train + dev]
trained = getattr(config, "trained_on", {}).get("seq_len", 10**9)
unseen = "its pre-training had no rows so long, see docs/own_text.md"
for limit, what in ((trained, unseen), (tokenizer.model_max_length, "they are cut there")):
    if n := sum(length > limit for length in lengths):
        print(f"{n} of {len(lengths)} texts have more than {limit} tokens: {what}")
train, dev = (
    [tokenizer(text, truncation=True) | {"label": label2id[label]} for text, label in rows]
    for rows in (train, dev)
)
unfinished = out.with_name(out.name + ".tmp")  # renamed once it is whole
settings = {"learning_rate": args.lr, "num_train_epochs": args.epochs, "seed": args.seed}
settings |= {"per_device_train_batch_size": args.batch, "bf16": str(dtype) == "torch.bfloat16"}
settings |= {"warmup_steps": 0.1, "use_cpu": device.type == "cpu", "report_to": "none"}
settings = transformers.TrainingArguments(unfinished, save_strategy="no", **settings)
trainer = transformers.Trainer(model, settings, None, train, None, tokenizer, callbacks=[Forecast])
trainer.train()
scores, labels, _ = trainer.predict(dev)
trainer.save_model(unfinished)
unfinished.rename(out)
answers = scores.argmax(-1)
hits = (answers == labels).mean()
f1 = metrics.f1_score(labels, answers, average="macro", zero_division=0)
print(f"{out}: accuracy {hits:.1%}, macro-F1 {f1:.1%} on {len(dev)} held-out rows")
if hits <= max(bag_hits, always):
    print("WARNING: that is no better than without a BERT: take the bag of words, or train longer")
