"""The GLUE benchmark (arXiv 1804.07461): tasks, files, metrics, the store of results, tables.

    python -c "from nanocram import glue; print(glue.read('rte', 'dev', 'path/to/GLUE')[0][:2])"

An official download is a folder with TASK/train.tsv and so on.
"""

import csv
import gzip
import hashlib
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanocram.safety import append_text, first_line, lock, write_text


@dataclass(frozen=True)
class Task:
    """A task: its columns in the official files and on the Hub, its labels, metrics and sizes."""

    folder: str
    texts: tuple  # columns with the sentence, or with both
    label: str  # column with the label
    labels: tuple  # the names of labels 0, 1, …; none for a regression
    metrics: tuple  # the paper's choice first
    rows: dict  # {split: rows of the official file}
    hub_texts: tuple = ()  # where the Hub has other names


def sizes(train, dev):
    return {"train": train, "dev": dev}


PAIR = ("sentence1", "sentence2")
STRINGS = ("#1 String", "#2 String")
QUESTIONS = ("question1", "question2")
ANSWERED = ("question", "sentence")
PREMISE = ("premise", "hypothesis")
YES = ("0", "1")
ENTAILED = ("entailment", "not_entailment")
THREE = ("entailment", "neutral", "contradiction")
ACC = ("accuracy",)
F1 = ("f1", "accuracy")

# fmt: off
MNLI_SIZES = {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832}
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", YES, ("matthews",), sizes(8551, 1043)),
    "sst2": Task("SST-2", ("sentence",), "label", YES, ACC, sizes(67349, 872)),
    "mrpc": Task("MRPC", STRINGS, "Quality", YES, F1, sizes(3668, 408), PAIR),
    "stsb": Task("STS-B", PAIR, "score", (), ("pearson", "spearman"), sizes(5749, 1500)),
    "qqp": Task("QQP", QUESTIONS, "is_duplicate", YES, F1, sizes(363846, 40430)),
    "mnli": Task("MNLI", PAIR, "gold_label", THREE, ACC, MNLI_SIZES, PREMISE),
    "qnli": Task("QNLI", ANSWERED, "label", ENTAILED, ACC, sizes(104743, 5463)),
    "rte": Task("RTE", PAIR, "label", ENTAILED, ACC, sizes(2490, 277)),
    "wnli": Task("WNLI", PAIR, "label", YES, ACC, sizes(635, 71)),
}

# The nine numbers of the paper's mean, in the order of the table: {heading: (task, score)}.
NINE = {
    "CoLA": ("cola", "matthews"), "SST-2": ("sst2", "accuracy"), "MRPC": ("mrpc", "f1"),
    "STS-B": ("stsb", "pearson"), "QQP": ("qqp", "f1"), "MNLI-m": ("mnli", "accuracy"),
    "MNLI-mm": ("mnli", "accuracy_mm"), "QNLI": ("qnli", "accuracy"), "RTE": ("rte", "accuracy"),
}
# Dev scores of Geiping and Goldstein (arXiv 2212.14034) in that order, then their mean of nine; the
# best of five pre-trainings is that of their model card (JonasGeiping/crammed-bert).
REFERENCES = {
    "RoBERTa-base": "60.2 93.7 91.4 90.4 88.3 86.6 86.4 92.1 77.3 85.1",
    "BERT-base": "56.5 91.9 89.3 86.7 87.7 83.2 83.4 90.6 59.2 80.9",
    "crammed BERT, median of five": "51.8 – – – – – – – – 80.4",
    "crammed BERT, best of five": "53.3 92.0 88.9 87.4 87.5 84.1 84.6 90.2 58.5 80.7",
    "BERT-base, no pre-training": "0.0 79.9 77.9 17.8 68.6 34.1 34.1 50.0 47.3 45.5",
}
# fmt: on


def read(name, split, glue_dir):
    """(texts, labels) of a split: [(sentence,) or (first, second), …] and an array (N,).

    It reads the official files in glue_dir, or the Hub if that is ''. Exits with one line if
    something is missing or damaged."""
    task = TASKS[name]
    texts, labels = read_tsv(name, split, glue_dir) if glue_dir else read_hub(name, split)
    if not texts:
        sys.exit(f"{task.folder}, {split}: there is not one row in it, fetch it again")
    return texts, np.array(labels, np.int64 if task.labels else np.float64)


def read_tsv(name, split, glue_dir):
    """read() from an official file, plain or gzipped: columns between tabs, nothing is quoted."""
    task = TASKS[name]
    path = Path(glue_dir) / task.folder / f"{split}.tsv"
    if not path.exists():
        path = path.with_name(f"{split}.tsv.gz")
    if not path.exists():
        missing = f"{glue_dir}/{task.folder}/{split}.tsv not found"
        other = "name another --glue_dir ('' is the Hub)"
        sys.exit(f"{missing}: fetch it, {other}, or leave {name} out of --tasks")

    is_bare = task.folder == "CoLA"  # the one task whose files have no header
    header = ["source", "label", "mark", "sentence"] if is_bare else None
    number_of = {label: i for i, label in enumerate(task.labels)}
    texts, labels = [], []
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8-sig", newline="\n") as f:
        rows = csv.DictReader(f, header, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for row in rows:
                if None in row:  # DictReader's key for cells beyond the header
                    raise ValueError("too many columns")
                if None in row.values():  # its value for missing cells
                    continue  # a few of QQP's rows end too soon; the Hub has left them out, too
                texts.append(tuple(row[column] for column in task.texts))
                label = row[task.label]
                labels.append(number_of[label] if task.labels else float(label))
                if not 0 <= labels[-1] <= 5:  # STS-B's scores; numbers of classes are below 3
                    raise ValueError(f"no score is {label}")
        except (OSError, EOFError, ValueError, LookupError, csv.Error) as e:
            sys.exit(f"{path}, line {rows.line_num} ({e!r:.80}): fetch the official file")
    return texts, labels


def read_hub(name, split):
    """read() from nyu-mll/glue on the Hub, where labels are numbers already."""
    task = TASKS[name]
    try:
        from datasets import load_dataset

        rows = load_dataset("nyu-mll/glue", name, split=split.replace("dev", "validation"))
        columns = [rows[column][:] for column in task.hub_texts or task.texts]
        return list(zip(*columns, strict=True)), rows["label"][:]
    except Exception as e:  # no package, no network, no such data set: each raises something else
        reason = f"cannot get {name} from the Hub ({first_line(e, 300)})"
        sys.exit(f"{reason}: name a --glue_dir with the official files")


def fingerprint(*parts):
    """16 hexadecimal digits of SHA-256 over parts: bytes as they are, all else as str()."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
    return digest.hexdigest()[:16]


def decide(task, outputs):
    """The answers in outputs (N, n_outputs): numbers of classes, or the scores of a regression."""
    return outputs.argmax(1) if task.labels else outputs[:, 0]


def score(name, labels, outputs):
    """{metric: score} of a task's outputs (N, n_outputs) as percentages, as GLUE reports them."""
    # Here, for they take seconds to import, and reading or drawing a table needs neither.
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    functions = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}
    functions["pearson"] = lambda *both: pearsonr(*both).statistic
    functions["spearman"] = lambda *both: spearmanr(*both).statistic
    task = TASKS[name]
    answers = decide(task, outputs)
    # Constant answers have no correlation and perhaps no F1; they earn 0, without a warning.
    with warnings.catch_warnings(action="ignore"):
        values = {metric: functions[metric](labels, answers) for metric in task.metrics}
    return {metric: 100 * float(np.nan_to_num(value)) for metric, value in values.items()}


# Tables of runs, {"task", "seed", "rows", "data", "scores", …}, as they stand in glue.jsonl.
def runs_by_task(runs):
    """{task: its runs, sorted by seed}; only those on the same data as the task's last run."""
    result = {}
    for task in TASKS:
        found = [run for run in runs if run["task"] == task]
        if found:
            same_data = [run for run in found if run["data"] == found[-1]["data"]]
            result[task] = sorted(same_data, key=lambda run: run["seed"])
    return result


def median(runs, key):
    return float(np.median([run["scores"][key] for run in runs]))


def missing_rows(run):
    """What a run's labelled data lacked: "train: 24,739 of 392,702 rows; …", or ''."""
    short = []
    for split, rows in run["rows"].items():
        official = TASKS[run["task"]].rows[split]
        if rows < official:
            short.append(f"{split}: {rows:,} of {official:,} rows")
    return "; ".join(short)


def table_row(name, runs):
    """The cells of a line: name and seeds, nine medians, two means; * where rows are missing."""
    by_task = runs_by_task(runs)
    counts = [len(found) for found in by_task.values()]
    least, most = min(counts), max(counts)
    seeds = f"{least}" if least == most else f"{least} to {most}"
    cells = [f"{name}; seeds: {seeds}"]
    nine, eight = [], []
    mark = ""
    for task, key in NINE.values():
        if task not in by_task:
            cells.append("–")
            continue
        star = "*" if missing_rows(by_task[task][0]) else ""
        mark = mark or star
        nine.append(median(by_task[task], key))
        cells.append(f"{nine[-1]:.1f}{star}")

    # The leaderboard averages all scores of a task first; like the paper we leave WNLI out.
    for task, found in by_task.items():
        if task != "wnli":
            eight.append(np.mean([median(found, key) for key in found[0]["scores"]]))
    for values, whole in ((nine, 9), (eight, 8)):
        partial = "" if len(values) == whole else f" ({len(values)} of {whole})"
        cells.append(f"{np.mean(values):.1f}{mark}{partial}" if values else "–")
    return cells


def table(results):
    """The table as lines of Markdown; results are {name: runs}."""
    rows = [["GLUE, dev sets", *NINE, "mean of 9", "mean of 8 tasks"]]
    rows += [table_row(name, runs) for name, runs in results.items()]
    rows += [[f"{name} †", *cells.split(), "–"] for name, cells in REFERENCES.items()]
    return markdown(rows)


def footnotes(results):
    """What the marks in the table mean, line by line."""
    notes = []
    for runs in results.values():
        for task, found in runs_by_task(runs).items():
            short = missing_rows(found[0])
            if short:
                notes.append(f"* {TASKS[task].folder}: {short}")
    notes.append("† as published: arXiv 2212.14034; best of five days: crammed-bert's model card")
    return list(dict.fromkeys(notes))


def markdown(rows):
    """Rows of cells, the heading first, as lines of Markdown with aligned columns."""
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    columns = zip(*rows, rule, strict=True)
    width, *widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in [rows[0], rule, *rows[1:]]:
        cells = [cell.rjust(n) for cell, n in zip(others, widths, strict=True)]
        lines.append(f"| {first.ljust(width)} | {' | '.join(cells)} |")
    return lines


def seed_spread(runs):
    """How far the seeds of each score lie apart, as lines of Markdown."""
    rows = [["task", "score", "median", "lowest", "highest", "seeds"]]
    for task, found in runs_by_task(runs).items():
        for key in found[0]["scores"]:
            values = [run["scores"][key] for run in found]
            cells = [f"{value:.1f}" for value in (median(found, key), min(values), max(values))]
            rows.append([TASKS[task].folder, key, *cells, f"{len(found)}"])
    return markdown(rows)


EXPLANATION = """\
- Medians over seeds, scores after the last epoch, in percent: Matthews' correlation (CoLA), F1
  (MRPC, QQP), Pearson's correlation (STS-B), accuracy (the rest).
- *mean of 9*: the paper's, of these nine numbers. *mean of 8 tasks*: all scores of a task averaged
  first, as the leaderboard does it, accuracy beside F1 and Spearman beside Pearson included."""


def markdown_page(results):
    """The table, its notes and the spread of each score."""
    lines = ["# GLUE", "", *table(results), ""]
    lines += ["- " + note.replace("*", "\\*") for note in footnotes(results)] + [EXPLANATION]
    for name, runs in results.items():
        made = dict.fromkeys(f"{run['date']} on {run['device']}" for run in runs)
        lines += ["", f"## {name}", "", *seed_spread(runs), "", ", ".join(made)]
    return "\n".join([*lines, ""])


# The store: glue.jsonl, to which each run adds a line. What it was a run of, in these fields:
IDENTITY = ("system", "weights", "settings")
SHOWN = {"rows", "scores", "date", "device"}  # what a page says of it


def read_runs(folder, warn=False):
    """The runs in a folder's glue.jsonl, the last of each identity, task, seed and data.

    warn: name the lines that are no run, be it of a kill or of an editor."""
    path = Path(folder) / "glue.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            run = json.loads(line)
            key = json.dumps([run[name] for name in (*IDENTITY, "task", "seed", "data")])
            is_known = run["task"] in TASKS and run.keys() >= SHOWN
        except (ValueError, LookupError, TypeError):
            is_known = False
        if not is_known:
            if warn:
                print(f"{path}, line {number} is no run: left out")
            continue
        found.pop(key, None)  # a run that is added again is the last one
        found[key] = run
    return list(found.values())


def runs_by_name(runs):
    """{name: its runs}; the names of what differs in weights or precision are made different.

    A name holds every setting that is not the paper's."""
    result = {}
    for run in runs:
        name = run["system"]
        while name in result and any(result[name][0][key] != run[key] for key in IDENTITY):
            name += " (other weights or precision)"
        result.setdefault(name, []).append(run)
    return result


def results_lock(folder):
    """The lock on a folder's glue.jsonl and glue.md; exits if glue.md is not ours."""
    folder = Path(folder)
    if (folder / "glue.json").exists() and not (folder / "glue.jsonl").exists():
        sys.exit(f"{folder} has glue.json of an older version: move it and glue.md away")
    if (folder / "glue.md").exists() and not (folder / "glue.jsonl").exists():
        sys.exit(f"{folder}/glue.md is there without a glue.jsonl: it is not ours, move it away")
    return lock(folder / ".glue.lock", wait=True)


def add_runs(folder, runs):
    """Add runs to glue.jsonl, a line each, and draw glue.md anew."""
    folder = Path(folder)
    lines = "".join(json.dumps(run) + "\n" for run in runs)
    with results_lock(folder):  # other processes may be at other tasks
        append_text(folder / "glue.jsonl", lines)
        write_text(folder / "glue.md", markdown_page(runs_by_name(read_runs(folder))))
