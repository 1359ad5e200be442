"""The GLUE benchmark (arXiv 1804.07461): tasks, files, metrics, the store of results, tables."""

import csv
import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from nanocram.facts import write_card
from nanocram.safety import first_line, lock, write_text


class Task(NamedTuple):
    folder: str
    texts: tuple  # columns with the sentence, or with both
    labels: tuple  # the names of labels 0, 1, …; none for a regression
    metrics: tuple  # the paper's choice first
    rows: dict  # {split: rows of the official file}
    label: str = "label"  # column with the label


PAIR = ("sentence1", "sentence2")
STRINGS = ("#1 String", "#2 String")
QUESTIONS = ("question1", "question2")
YES = ("0", "1")
ENTAILED = ("entailment", "not_entailment")
THREE = ("entailment", "neutral", "contradiction")
ACC = ("accuracy",)
F1 = ("f1", "accuracy")

# fmt: off
MNLI_SIZES = {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832}
TASKS = {
    "cola": Task("CoLA", ("sentence",), YES, ("matthews",), {"train": 8551, "dev": 1043}),
    "sst2": Task("SST-2", ("sentence",), YES, ACC, {"train": 67349, "dev": 872}),
    "mrpc": Task("MRPC", STRINGS, YES, F1, {"train": 3668, "dev": 408}, "Quality"),
    "stsb": Task("STS-B", PAIR, (), ("pearson", "spearman"), {"train": 5749, "dev": 1500}, "score"),
    "qqp": Task("QQP", QUESTIONS, YES, F1, {"train": 363846, "dev": 40430}, "is_duplicate"),
    "mnli": Task("MNLI", PAIR, THREE, ACC, MNLI_SIZES, "gold_label"),
    "qnli": Task("QNLI", ("question", "sentence"), ENTAILED, ACC, {"train": 104743, "dev": 5463}),
    "rte": Task("RTE", PAIR, ENTAILED, ACC, {"train": 2490, "dev": 277}),
    "wnli": Task("WNLI", PAIR, YES, ACC, {"train": 635, "dev": 71}),
}

# The nine numbers of the paper's mean, in the order of the table: {heading: (task, score)}.
NINE = {
    "CoLA": ("cola", "matthews"), "SST-2": ("sst2", "accuracy"), "MRPC": ("mrpc", "f1"),
    "STS-B": ("stsb", "pearson"), "QQP": ("qqp", "f1"), "MNLI-m": ("mnli", "accuracy"),
    "MNLI-mm": ("mnli", "accuracy_mm"), "QNLI": ("qnli", "accuracy"), "RTE": ("rte", "accuracy"),
}
# Dev scores of Geiping and Goldstein (arXiv 2212.14034) in that order, then their mean; the best of
# five pre-trainings is that of their model card (JonasGeiping/crammed-bert).
REFERENCES = {
    "RoBERTa-base": "60.2 93.7 91.4 90.4 88.3 86.6 86.4 92.1 77.3 85.1",
    "BERT-base": "56.5 91.9 89.3 86.7 87.7 83.2 83.4 90.6 59.2 80.9",
    "crammed BERT, median of five": "51.8 – – – – – – – – 80.4",
    "crammed BERT, best of five": "53.3 92.0 88.9 87.4 87.5 84.1 84.6 90.2 58.5 80.7",
    "BERT-base, no pre-training": "0.0 79.9 77.9 17.8 68.6 34.1 34.1 50.0 47.3 45.5",
}
# fmt: on
EXPLANATION = """\
- Medians over seeds, scores after the last epoch, in percent: Matthews' correlation (CoLA), F1
  (MRPC, QQP), Pearson's correlation (STS-B), accuracy (the rest).
- † as published: arXiv 2212.14034; best of five runs: crammed-bert's model card.
"""


def read(name, split, glue_dir):
    """(texts, labels) of a split: [(sentence,) or (first, second), …] and an array (N,), from the
    official files in glue_dir, or from the Hub if that is ''. Exits if it is missing or damaged."""
    if not glue_dir:
        return read_hub(name, split)
    task = TASKS[name]
    path = Path(glue_dir) / task.folder / f"{split}.tsv"
    if not path.exists():
        sys.exit(f"{path} not found: name another --glue_dir ('' = Hub), or --tasks without {name}")
    header = ["source", "label", "mark", "sentence"] if name == "cola" else None  # others have one
    texts, labels, n_short = [], [], 0
    with open(path, encoding="utf-8-sig", newline="\n") as f:
        rows = csv.DictReader(f, header, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for row in rows:
                if None in row:  # DictReader's key for cells beyond the header
                    raise ValueError("too many columns")
                if None in row.values():  # its value for missing cells
                    n_short += 1
                    continue  # a few of QQP's rows end too soon; the Hub has left them out, too
                texts.append(tuple(row[column] for column in task.texts))
                label = row[task.label]
                labels.append(task.labels.index(label) if task.labels else float(label))
                if not 0 <= labels[-1] <= 5:  # STS-B's scores; numbers of classes are below 3
                    raise ValueError(f"no score is {label}")
            if n_short >= len(texts):  # with a header, say, where the official file has none
                raise ValueError(f"{len(texts)} whole rows, {n_short} with too few columns")
        except (OSError, ValueError, LookupError, csv.Error) as e:
            sys.exit(f"{path}, line {rows.line_num} ({e!r:.80}): fetch the official file")
    return texts, np.array(labels)


def read_hub(name, split):
    """read() from nyu-mll/glue on the Hub, where labels are numbers already."""
    try:
        from datasets import load_dataset

        rows = load_dataset("nyu-mll/glue", name, split=split.replace("dev", "validation"))
        texts = rows.remove_columns(["label", "idx"])[:]  # {column: its texts}
        return list(zip(*texts.values(), strict=True)), np.array(rows["label"][:])
    except Exception as e:  # no package, no network, no such data set: each raises something else
        sys.exit(f"no {name} from the Hub ({first_line(e)}): name a --glue_dir of official files")


def facts(splits):
    """Facts of {split: (texts, labels)} for a run: rows, those also in train, a checksum."""
    train, digest = set(splits["train"][0]), hashlib.sha256()
    found = {"rows": {}, "in_train": {}}
    for split, (texts, labels) in splits.items():
        digest.update(repr((texts, labels.tolist())).encode("utf-8", "replace"))
        found["rows"][split] = len(texts)
        if split != "train":
            found["in_train"][split] = sum(text in train for text in texts)
    return found | {"data": digest.hexdigest()[:16]}


def score(name, labels, outputs):
    """{metric: score} of a task's outputs (N, n_outputs) as percentages, as GLUE reports them."""
    functions = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}
    functions |= {"pearson": lambda *x: pearsonr(*x)[0], "spearman": lambda *x: spearmanr(*x)[0]}
    task = TASKS[name]
    answers = outputs.argmax(1) if task.labels else outputs[:, 0]
    # Constant answers have no correlation and perhaps no F1; they earn 0, without a warning.
    with warnings.catch_warnings(action="ignore"):
        values = {metric: functions[metric](labels, answers) for metric in task.metrics}
    return {metric: 100 * float(np.nan_to_num(value)) for metric, value in values.items()}


def key(run):
    """What identifies a run; its name tells weights and settings that are not the paper's."""
    return run["name"], run["task"], run["seed"], run["data"]


def read_runs(folder):
    """{key: run} of a folder's glue.jsonl; exits if a line is no run."""
    path = Path(folder) / "glue.jsonl"
    text = path.read_bytes() if path.exists() else b""
    found = {}
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        try:
            run = json.loads(line)
            found[key(run)] = run
        except (ValueError, LookupError, TypeError):
            sys.exit(f"{path}, line {number} is no run of this version: take it out")
    return found


def add_runs(folder, *new):
    """Add runs to glue.jsonl; draw all of it in glue.md and the card; return read_runs()."""
    _lock = lock(Path(folder, "glue"), timeout=600)  # several processes may fine-tune one model
    runs = read_runs(folder)
    for run in new:
        runs.pop(key(run), None)  # the last one stands last
        runs[key(run)] = run
    write_text(Path(folder, "glue.jsonl"), "".join(json.dumps(run) + "\n" for run in runs.values()))
    drawn = table(runs.values())
    write_text(Path(folder, "glue.md"), f"# GLUE\n\n{drawn}")
    if runs:
        write_card(folder, drawn)
    return runs


def flaws(runs):
    """Why a task has a * in the table, line by line: its data, and seeds that learnt nothing."""
    task, notes = TASKS[runs[0]["task"]], []
    for split, n in runs[0]["rows"].items():
        if n != task.rows[split]:
            notes.append(f"{n:,} {split} rows; the official file has {task.rows[split]:,}")
        n_in_train = runs[0]["in_train"].get(split, 0)
        if n_in_train > 0.02 * n:  # 1.5 % of CoLA's official ones are
            notes.append(f"{n_in_train:,} of {n:,} {split} rows are in train")
    if n_diverged := sum(run.get("scores") == {} for run in runs):
        notes.append(f"{n_diverged} of {len(runs)} seeds diverged, left out")
    if n_constant := sum(run.get("constant", False) for run in runs):
        notes.append(f"{n_constant} of {len(runs)} seeds gave each row the same answer")
    return [f"{task.folder}: {note}" for note in notes]


def table_row(name, tasks):
    """The cells of a line: name and number of seeds, nine medians, their mean."""
    counts = sorted({len(runs) for runs in tasks.values()})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    medians, cells = [], dict.fromkeys(NINE, "–")
    for heading, (task, metric) in NINE.items():
        if task in tasks:
            scores = [run["scores"][metric] for run in tasks[task] if run["scores"]]
            medians.append(np.median(scores or np.nan))  # NaN if all have diverged
            cells[heading] = f"{medians[-1]:.1f}{'*' if flaws(tasks[task]) else ''}"
    star = "*" if "*" in "".join(cells.values()) else ""
    mean = f"{np.mean(medians):.1f}{star}" if medians else "–"
    mean += f" ({len(medians)} of 9)" * (len(medians) < 9)
    return [f"{name}; seeds: {seeds}", *cells.values(), mean]


def table(runs):
    """The table of runs in Markdown, published scores below, and what its marks mean."""
    # by name and task, those on the data of the last run: others do not compare
    last = {(run["name"], run["task"]): run["data"] for run in runs}
    groups = {}
    for run in runs:
        if run["data"] == last[run["name"], run["task"]]:
            groups.setdefault(run["name"], {}).setdefault(run["task"], []).append(run)
    rows = [["GLUE, dev sets", *NINE, "mean of 9"], ["---"] + ["---:"] * 10]
    notes = []
    for name, tasks in groups.items():
        rows.append(table_row(name, tasks))
        notes += [f"- \\* {flaw}" for found in tasks.values() for flaw in flaws(found)]
    rows += [[f"{name} †", *cells.split()] for name, cells in REFERENCES.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(n) for cell, n in zip(others, widths[1:], strict=True)]
        lines.append(f"| {first.ljust(widths[0])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *dict.fromkeys(notes), EXPLANATION])
