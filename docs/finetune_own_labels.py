"""Fine-tune a model folder on labels of your own, with transformers' Trainer; label new texts.

python docs/finetune_own_labels.py out/mine tickets.csv out/labelled --label_column=queue
python docs/finetune_own_labels.py out/labelled --predict=new.csv
"""

import argparse
import codecs
import collections
import functools
import itertools
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import unicodedata
import urllib.parse
from pathlib import Path

import joblib
import pandas
import transformers
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import f1_score
from sklearn.model_selection import PredefinedSplit, cross_val_score
from sklearn.pipeline import make_pipeline, make_union
from sklearn.svm import LinearSVC

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanocram import machine, model_folder, safety, sources
from nanocram.settings import read_ranks
from prepare import copy_key, describe, find_files, has_copies, is_held_out, is_lost

# cells that mean: no label, as blank ones do; annotators' words for a row that is no good
BLANK = "#n/a #nv #name? #ref! #value! #div/0! n/a na nan <na> null none ? - . -1 -1.0".split()
BLANK += ["k.a.", "unlabeled", "unlabelled", "todo"]
REJECTED = "reject rejected ignore ignored discard discarded skip skipped was_cancelled".split()

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("model")
for name in ("train", "out"):
    parser.add_argument(name, nargs="?", default="")
defaults = {"dev": "", "text_column": "text", "label_column": "label", "pooling": "mean"}
defaults |= {"lr": 1e-3, "epochs": 3, "batch": 16, "seed": 0, "fresh": 0}
defaults |= {"predict": ""}  # a table to label
for name, value in defaults.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
parser.add_argument("--without", action="append", default=[])  # rows: FIELD=VALUE,VALUE
parser.add_argument("--trust_remote_code", choices=("True", "False"), default="False")
args, more = parser.parse_known_args()
if more:
    sys.exit(f"{more[0]} is no option, or one name too many: put a pattern of names in quotes")
if read_ranks()[2] > 1:
    sys.exit("this script is one process: start it without torchrun")
os.environ.pop("LOCAL_RANK", None)  # by which Trainer would wait for others
out = Path(args.out)
if not args.predict:
    if not args.out:
        sys.exit("type MODEL TABLE NEW_FOLDER to train, or MODEL --predict=TABLE to label")
    if out.exists():
        sys.exit(f"{out} exists: name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
elif args.train or args.dev or args.without:
    sys.exit("--predict trains nothing: name no second table, no --dev, no --without")
if wrong := [rule for rule in args.without if "=" not in rule]:
    sys.exit(f"type --without={wrong[0]}=VALUE, or several values with commas between them")
trusted = {"trust_remote_code": args.trust_remote_code == "True"}
times = []  # when each step ended


class Forecast(transformers.TrainerCallback):
    def on_step_end(self, _, state, control, **more):
        times.append(time.monotonic())
        if len(times) == 11:
            minutes = (times[10] - times[0]) / 600 * (state.max_steps - 11)
            sources.say_once(f"{state.max_steps} steps, some {minutes:.1f} minutes more")


def read_file(path):
    """Yield (text, label, the whole record) of a file's rows; a label that is missing is "", and so
    are all for --predict. A folder NAME=LABEL labels its tables; a .txt is one text, which the name
    of its folder labels. Of parquet the record may have these columns alone."""
    types = dict.fromkeys(args.text_column.split(","), str)
    if args.label_column in types:
        sys.exit(f"{args.label_column} is in --text_column, too: type --label_column=NAME")
    in_folder = re.search(rf"(^|/){re.escape(args.label_column)}=([^/]*)/", path)
    label = in_folder and urllib.parse.unquote(in_folder[2])
    is_text = sources.file_kind(path) == "text"
    if not (in_folder or is_text or args.predict):
        types[args.label_column] = str | int | float
    before, whole = describe(path), bool(args.predict or args.without or in_folder)
    try:
        with open(path, "rb") as file:
            if is_text:
                label = label or Path(os.path.abspath(path)).parent.name
                yield sources.open_text(file, path).read(), label, {}
            for cells, record in () if is_text else sources.read_rows(file, path, types, whole):
                if in_folder and args.label_column in record and not args.predict:
                    sys.exit(f"{path} has a {args.label_column}, too: rename it, or its folder")
                found = cells.pop() if args.label_column in types else label
                found = "" if found is None or found != found else str(found)  # NaN
                yield " ".join(filter(None, cells)), found, record
    except Exception as e:  # whatever the readers of gzip, JSON or parquet raise
        sys.exit(f"{path}: {' '.join(str(e).split()) or repr(e)}")
    if describe(path) != before:
        sys.exit(f"{path} changed while it was read: type the command again, or give a copy of it")


def check_utf8(path, rows):
    """Exit if a hundredth of the rows of a file have lost characters that are not UTF-8."""
    texts = [f"{text}{label}" for text, label, *_ in rows]
    n_lost = sum("\ufffd" in text for text in texts)
    if path in sources.NOT_UTF8 and n_lost > len(rows) / 100 and is_lost("".join(texts)):
        advice = "if it is of Western Europe, type iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
        sys.exit(f"{path} is not UTF-8: {advice}")


def find(source):
    """Paths of local files; exits if there is none, or one that cannot have a label."""
    found = find_files(source)
    if missing := [name for name, files in found.items() if not files]:
        sys.exit(f"there is no file {missing[0]}")
    paths = [path for files in found.values() for path, *_ in files]
    if len({Path(path).parent for path in paths if sources.file_kind(path) == "text"}) == 1:
        advice = "make a table, see docs/own_text.md, or to train give a folder for each label"
        sys.exit(f"{paths[0]} has no columns: {advice}")
    return paths


def read(source):
    """[(text, label), ...] of files that prepare.py reads, without rows that lack text."""
    asked = {*args.text_column.split(","), args.label_column}
    rows, rejected, n_without = [], collections.defaultdict(set), 0
    rules = (rule.partition("=") for rule in args.without)
    without = [(name, values.split(",")) for name, _, values in rules]
    for path in find(source):
        first = len(rows)
        for text, label, record in read_file(path):
            label = " ".join(re.sub("[\u200b\u2060\ufeff]", " ", label).split())  # no width
            label = label.replace("__HIVE_DEFAULT_PARTITION__", "")
            cells = record | {args.label_column: label}
            if any(str(cells.get(name)).strip() in values for name, values in without):
                n_without += 1
                continue
            rows.append((text.strip(), label))
            for name in record.keys() - asked:
                value = str(record[name])[:20]
                word = name.lower() if value.lower() == "true" else value.lower()
                if word in REJECTED:
                    rejected[name].add(value)
        check_utf8(path, rows[first:])
    if args.without:
        said = " or ".join(args.without)
        if not n_without and source == args.train:
            sys.exit(f"no row of {source} has {said}: look at its columns and their values")
        print(f"{source}: left out: {n_without} rows that have {said}")
    for name, found in rejected.items():
        said = shlex.quote(f"--without={name}={','.join(sorted(found))}")
        print(f"WARNING: some rows were rejected, as {name} says: type {said} to leave them out")
    if n_lost := sum("\ufffd" in text + label for text, label in rows):
        print(f"WARNING: {n_lost} rows have U+FFFD, which stands for characters that were lost")
    no_text, no_label = (sum(not row[i] for row in rows) for i in (0, 1))
    print(f"{source}: {len(rows)} rows; left out: {no_label} without label, {no_text} without text")
    if not any(map(all, rows)):
        sys.exit(f"{source} has no row with a text and a label")
    return [row for row in rows if row[0]]


def split(train, dev):
    """(train, dev), rows with labels, no text on both sides. Without a file for dev, it is a tenth
    of train by prepare.py's rule: what that held out of the same file is in it."""
    known = {copy_key(text) for text, _ in train}
    if args.dev:
        new = [row for row in dev if copy_key(row[0]) not in known]
        if n_known := len(dev) - len(new):
            print(f"{args.dev}: left out: {n_known} of {len(dev)} texts are in {args.train} too")
        sides = train, new
    else:
        by_key, sides = has_copies(text for text, _ in train), ([], [])
        for row in train:
            sides[is_held_out(row[0], 0.1, by_key)].append(row)
    return ([row for row in side if row[1]] for side in sides)


def look(rows):
    """Print what a person who looks at [(text, label), ...] would doubt."""
    names = sorted({label for _, label in rows})
    alike, labels_of = collections.defaultdict(list), collections.defaultdict(dict)
    parts, n_with = {}, collections.Counter()
    for name in names:
        alike[copy_key(re.sub(r"^([-+]?\d+)\.0+$", r"\1", name))].append(name)
        cut = [part for part in re.split(r"[][<>{}()#;,|/&+'\"、，،；]", name) if part.strip()]
        cut = name.split() if len(cut) == 1 else cut
        is_number = re.fullmatch(r"[-+]?\d+[.,]?\d*", name)  # 1,5 of a rating, say
        parts[name] = frozenset(map(copy_key, [name] if is_number else cut))
        n_with.update(parts[name])
    for text, label in rows:
        labels_of[copy_key(text)][label] = text
    alone = {part for cut in parts.values() if len(cut) == 1 for part in cut}
    n_names = collections.Counter(parts.values())

    def is_several(name, cut):
        is_list = re.search("[];|；}]|^<.*>$", name) and any(n_with[part] > 1 for part in cut)
        return len(cut) > 1 and (is_list or cut <= alone or n_names[cut] > 1)

    several = [name for name, cut in parts.items() if is_several(name, cut)]
    if len(several) == 1 and several[0].replace(" ", "").isalnum():  # "not spam" may be one
        several = []
    numbers = [name for name in names if re.fullmatch(r"[-+]?\d+(\.0)?", name)]
    others = [name for name in numbers if name not in ("-1", "-1.0")]
    is_scale = len(others) in (1, 2) or any(name[0] == "-" for name in others)  # -1, 0, 1
    blank = [name for name in names if name.lower() in BLANK]
    doubts = {
        "classes may mean that there is no label, and --without leaves them out": [
            repr(name) for name in blank if not (is_scale and name in numbers)
        ],
        "classes look alike": [" = ".join(map(repr, x)) for x in alike.values() if len(x) > 1],
        "classes are several labels": [*map(repr, several)],
        "texts have several labels": [
            f"{min(x.values())!r:.40} ({', '.join(x):.80})"
            for x in labels_of.values()
            if len(x) > 1
        ],
    }
    for what, found in doubts.items():
        if found:
            print(f"WARNING: {what} ({len(found)}): {'; '.join(found[:5])}")
    if n_copies := len(rows) - len(labels_of):
        print(f"{n_copies} texts are copies of others, but for case and spaces")
    digits = [name.strip("-+").replace(",", "").replace(".", "") for name in names]
    if len(names) >= 10 and all(map(str.isdecimal, digits)):
        what = f"is {args.label_column} a label?"
        print(f"WARNING: {len(names)} classes, all of them numbers: {what}")


def say_long(tokenizer, config, texts):
    """Print how many texts are longer than the model's rows, and than it reads."""
    lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    trained = getattr(config, "trained_on", {}).get("seq_len", 10**9)
    unseen = "its pre-training had no rows so long, see docs/own_text.md"
    for limit, what in ((trained, unseen), (tokenizer.model_max_length, "they are cut there")):
        if n := sum(length > limit for length in lengths):
            print(f"{n} of {len(lengths)} texts have more than {limit} tokens: {what}")


def cannot_read(error):
    """Exit because of an error that a model folder has raised: there are many ways."""
    if "trust_remote_code" in str(error):
        sys.exit(f"{args.model} carries code: read it, then type --trust_remote_code=True")
    sys.exit(f"cannot read {args.model}: {safety.first_line(error)}")


def ask(texts):
    """[(label, probability)] of texts by a folder, or by a bag, which has no probability."""
    if args.model.endswith(".joblib"):
        return [(label, "") for label in joblib.load(args.model).predict(texts)]
    config = transformers.AutoConfig.from_pretrained(args.model, **trusted)
    if "Classification" not in str(config.architectures):
        sys.exit(f"{args.model} has no classifier: fine-tune it first, see docs/own_text.md")
    how = {"device": machine.pick("auto", "auto")[0], "batch_size": args.batch, **trusted}
    pipe = transformers.pipeline("text-classification", args.model, truncation=True, **how)
    say_long(pipe.tokenizer, config, texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # a batch has like lengths
    answers = safety.Bar(pipe(texts[i] for i in order), total=len(texts))
    found = dict(zip(order, answers, strict=True))
    return [(found[i]["label"], round(found[i]["score"], 4)) for i in range(len(texts))]


def label_table():
    """Write --predict with all its columns and rows, a label and its probability for each."""
    path, *more = find(args.predict)
    if more:
        sys.exit(f"{args.predict} names {1 + len(more)} tables: give one")
    labelled = Path(re.sub(r"\.\w+(\.gz|\.zst)?$", "", path) + "_labelled.csv")
    if labelled.exists():
        sys.exit(f"{labelled} exists: move it")
    rows = [*read_file(path)]
    check_utf8(path, rows)
    has_text = [bool(text.strip()) for text, *_ in rows]
    if not any(has_text):
        sys.exit(f"{path} has no row with a text")
    as_text = functools.partial(json.dumps, ensure_ascii=False, default=str)
    records = [
        {name: as_text(x) if isinstance(x, list | dict) else x for name, x in record.items()}
        for *_, record in rows
    ]
    table = pandas.DataFrame(records, dtype=object)
    columns = ["predicted_label", "probability"]
    if taken := [name for name in columns if name in table]:
        sys.exit(f"{path} has a column {taken[0]} already: rename it")
    try:
        answers = ask([text for text, *_ in itertools.compress(rows, has_text)])
    except Exception as e:
        cannot_read(e)
    table.loc[has_text, columns] = answers
    with open(path, "rb") as file:
        begin = file.readline(1 << 20) if path.lower().endswith(".csv") else b""
    how = {"encoding": "utf-8-sig" if begin.startswith(codecs.BOM_UTF8) else "utf-8"}
    how["sep"] = ";" if begin.count(b";") > begin.count(b",") else ","  # as Excel wants it
    how |= {"index": False, "errors": "replace"}
    try:
        safety.write_beside(labelled, lambda temporary: table.to_csv(temporary, **how))
    except OSError as e:
        print(f"WARNING: {labelled} cannot be written ({e.strerror})")
        labelled = Path(tempfile.mkdtemp(), labelled.name)  # so that the work is not lost
        table.to_csv(labelled, **how)
    counts = table["predicted_label"].value_counts()
    print(*(f"{n:9,} {label}" for label, n in counts[:50].items()), sep="\n")
    n_blank = len(rows) - len(answers)
    print(f"{labelled}: {len(rows)} rows, {n_blank} of them without text; its labels were not read")


def best_bag(rows):
    """(name, model) of the bag that is best at some 3,000 rows by cross-validation in thirds."""
    chars = map(chr, range(sys.maxunicode))  # vowel signs of India are marks, and part of a word
    marks = "".join(char for char in chars if unicodedata.category(char)[0] == "M")
    words = TfidfVectorizer(sublinear_tf=True, token_pattern=rf"[\w{marks}]+|[^\w\s{marks}]+")
    characters = TfidfVectorizer(sublinear_tf=True, analyzer="char", ngram_range=(1, 3))
    texts_of = collections.defaultdict(dict)  # without copies, which would be on both sides
    for text, label in rows:
        texts_of[label].setdefault(copy_key(text), text)
    some = []
    for label, texts in texts_of.items():
        texts = [*texts.values()]
        texts = texts[:3] + texts[3 :: 1 + len(rows) // 3000]
        some += [(text, label, i % 3) for i, text in enumerate(texts)]
    texts, labels, third = zip(*some, strict=True)
    both = make_union(words, characters)
    kinds = {"words": words, "characters": characters, "words and characters": both}
    bags = {kind: make_pipeline(x, LinearSVC(random_state=0)) for kind, x in kinds.items()}
    hits = {}
    for kind, bag in bags.items():
        hits[kind] = cross_val_score(bag, texts, labels, cv=PredefinedSplit(third)).mean()
        print(f"a bag of {kind}: {hits[kind]:.1%} by cross-validation on {len(some)} rows")
    best = max(hits, key=hits.get)
    return best, bags[best].fit(*zip(*rows, strict=True))


if args.predict:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    label_table()
    sys.exit()
train, dev = split(read(args.train), read(args.dev) if args.dev else [])
n_train, n_dev = (collections.Counter(label for _, label in rows) for rows in (train, dev))
names = sorted(n_train | n_dev)
print(*(f"{n_train[x]:9,} to train on, {n_dev[x]:7,} held out: {x}" for x in names[:50]), sep="\n")
look(train + dev)
if args.dev and not n_train.keys() & n_dev:
    advice = "give other rows, or write the labels alike"
    sys.exit(f"{args.dev} has no new text with a label of {args.train}: {advice}")
if one_sided := sorted(n_train.keys() ^ n_dev):
    some = "; ".join(f"{name!r:.40}" for name in one_sided[:5])
    print(f"WARNING: classes to train on only or held out only: {some}: give more rows of each")
pairs = collections.Counter(label for label, _ in {(y, copy_key(text)) for text, y in train})
is_enough = sum(n > 1 for n in pairs.values()) > 1  # so that no third has all texts of a class
if not (dev and is_enough and len(names) <= max(2, len(train) // 2)):
    sys.exit(f"{len(train)} rows, {len(dev)} held out, {len(names)} labels: give more of each")
device, dtype = machine.pick("auto", "auto")
transformers.logging.set_verbosity_error()  # it tells that the classifier is new
transformers.set_seed(args.seed)
auto = transformers.AutoModelForSequenceClassification
try:
    config = transformers.AutoConfig.from_pretrained(args.model, **trusted)
    known = [*config.id2label.values()]
    is_other = "Classification" in str(config.architectures) and known != names
    config.id2label, config.label2id = dict(enumerate(names)), {x: i for i, x in enumerate(names)}
    config.classifier_pooling, config.problem_type = args.pooling, None
    # "[SEP]" in a text is text, as in pre-training
    how = {"split_special_tokens": True, **trusted}
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, **how)
    if args.fresh:
        model = auto.from_config(config, **trusted)
    else:
        if Path(args.model, "model.safetensors").exists():
            model_folder.read_weights(Path(args.model))  # transformers compares no checksum
        how = {"config": config, "ignore_mismatched_sizes": is_other, **trusted}
        model, info = auto.from_pretrained(args.model, output_loading_info=True, **how)
        # only the classifier may be new, and perhaps a pooler before it
        begin = next(name for name, m in model.named_modules() if m is model.base_model) + "."
        missing = [x for x in info["missing_keys"] if x.startswith(begin) and "pooler" not in x]
        if missing:
            sys.exit(f"{args.model} is incomplete: it has no {min(missing)}")
    if is_other and not args.fresh:
        print(f"{args.model} has labels of its own ({', '.join(known[:5])}): a new head is drawn")
        trained, model = model, auto.from_config(config, **trusted)
        model.base_model.load_state_dict(trained.base_model.state_dict())
except Exception as e:
    cannot_read(e)
model.float()  # the folder may have been saved in half precision
kind, bag = best_bag(train)
bag_hits = bag.score(*zip(*dev, strict=True))
always = n_dev[largest := max(n_train, key=n_train.get)] / len(dev)
print(f"a bag of {kind} has an accuracy of {bag_hits:.1%}, always naming {largest!r} {always:.1%}")
saved = out.with_name(out.name + ".joblib")
try:
    safety.write_beside(saved, lambda path: joblib.dump(bag, path))
except OSError as e:
    sys.exit(f"{saved} cannot be written ({e.strerror}): name another folder")
print(f"{saved} has this bag: if it will do, press Ctrl-C")
signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback

say_long(tokenizer, config, [text for text, _ in train + dev])
train, dev = (
    [tokenizer(text, truncation=True) | {"label": config.label2id[label]} for text, label in rows]
    for rows in (train, dev)
)
unfinished = out.with_name(out.name + ".tmp")  # renamed once it is whole
settings = {"learning_rate": args.lr, "num_train_epochs": args.epochs, "seed": args.seed}
settings |= {"per_device_train_batch_size": args.batch, "bf16": str(dtype) == "torch.bfloat16"}
settings |= {"warmup_steps": 0.1, "use_cpu": device.type == "cpu", "report_to": "none"}
settings = transformers.TrainingArguments(unfinished, save_strategy="no", **settings)
trainer = transformers.Trainer(model, settings, None, train, None, tokenizer, callbacks=[Forecast])
with machine.training_kernels():
    trainer.train()
    scores, labels, _ = trainer.predict(dev)
try:
    trainer.save_model(unfinished)
    unfinished.rename(out)
except Exception as e:  # of its libraries each has errors of its own
    out = Path(tempfile.mkdtemp())  # so that the work is not lost
    trainer.save_model(out)
    print(f"WARNING: {unfinished} cannot be written ({safety.first_line(e)}): see {out}")
answers = scores.argmax(-1)
hits = (answers == labels).mean()
f1 = f1_score(labels, answers, average="macro", zero_division=0)
print(f"{out}: accuracy {hits:.1%}, macro-F1 {f1:.1%} on {len(dev)} held-out rows")
if hits <= max(bag_hits, always):
    print("WARNING: that is no better than without a BERT: take the bag, or train longer")
trust = ", trust_remote_code=True" * (trusted["trust_remote_code"] and hasattr(config, "auto_map"))
command = ["python", "docs/finetune_own_labels.py", str(out), "--predict=new.csv"]
for name in ("text_column", "label_column", "trust_remote_code"):
    if (value := getattr(args, name)) != parser.get_default(name):
        command.append(f"--{name}={value}")
print(f"""To use it: {shlex.join(command)}, or
import transformers
transformers.pipeline("text-classification", {str(out)!r}, truncation=True{trust})("A text.")
transformers.AutoModelForSequenceClassification.from_pretrained({str(out)!r}{trust})""")
