"""The GLUE benchmark (arXiv 1804.07461): tasks, files, metrics, tables, submissions, results.

    python -c "from nanocram import glue; print(glue.read('rte', 'dev', 'path/to/GLUE')[0][:2])"

An official download is a folder with TASK/train.tsv and so on.
"""

import csv
import gzip
import hashlib
import json
import sys
import warnings
import zipfile
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from nanocram.safety import first_line, lock, write_beside, write_text


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


def sizes(train, dev, test):
    return {"train": train, "dev": dev, "test": test}


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
MNLI_SIZES = {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832,
              "test_matched": 9796, "test_mismatched": 9847}
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", YES, ("matthews",), sizes(8551, 1043, 1063)),
    "sst2": Task("SST-2", ("sentence",), "label", YES, ACC, sizes(67349, 872, 1821)),
    "mrpc": Task("MRPC", STRINGS, "Quality", YES, F1, sizes(3668, 408, 1725), PAIR),
    "stsb": Task("STS-B", PAIR, "score", (), ("pearson", "spearman"), sizes(5749, 1500, 1379)),
    "qqp": Task("QQP", QUESTIONS, "is_duplicate", YES, F1, sizes(363846, 40430, 390965)),
    "mnli": Task("MNLI", PAIR, "gold_label", THREE, ACC, MNLI_SIZES, PREMISE),
    "qnli": Task("QNLI", ANSWERED, "label", ENTAILED, ACC, sizes(104743, 5463, 5463)),
    "rte": Task("RTE", PAIR, "label", ENTAILED, ACC, sizes(2490, 277, 3000)),
    "wnli": Task("WNLI", PAIR, "label", YES, ACC, sizes(635, 71, 146)),
}
# The diagnostic set has no training data of its own: a model of MNLI answers it.
WITH_AX = {**TASKS, "ax": Task("AX", PAIR, "", THREE, (), {"diagnostic": 1104}, PREMISE)}

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

# {file of a submission: (task whose model answers, task of the texts, split)}
SUBMISSION = {f"{TASKS[name].folder}.tsv": (name, name, "test") for name in TASKS if name != "mnli"}
SUBMISSION["MNLI-m.tsv"] = ("mnli", "mnli", "test_matched")
SUBMISSION["MNLI-mm.tsv"] = ("mnli", "mnli", "test_mismatched")
SUBMISSION["AX.tsv"] = ("mnli", "ax", "diagnostic")


def parts(name, with_tests):
    """{name: (task, split) of its texts}: what a fine-tuning reads.

    A labelled split has its own name ("train", "dev"), a test set that of the file which its
    answers become ("CoLA.tsv")."""
    found = {split: (name, split) for split in TASKS[name].rows if is_labelled(split)}
    if with_tests:
        for file, (answered_by, task, split) in SUBMISSION.items():
            if answered_by == name:
                found[file] = (task, split)
    return found


def read(name, split, glue_dir):
    """(texts, labels) of a split: [(sentence,) or (first, second), …] and an array (N,).

    It reads the official files in glue_dir, or the Hub if that is ''; labels of test sets are None.
    Exits with one line if something is missing or damaged."""
    task = WITH_AX[name]
    texts, labels = read_tsv(name, split, glue_dir) if glue_dir else read_hub(name, split)
    if not texts:
        sys.exit(f"{task.folder}, {split}: there is not one row in it, fetch it again")
    if not is_labelled(split):
        return texts, None
    return texts, np.array(labels, np.int64 if task.labels else np.float64)


def is_labelled(split):
    return split.startswith(("train", "dev"))


def official_file(name, split, glue_dir):
    """The path of a split in glue_dir, plain or gzipped; None where it is not there."""
    wanted = Path(glue_dir) / WITH_AX[name].folder / f"{split}.tsv"
    places = [wanted, wanted.with_name(f"{split}.tsv.gz")]
    if split == "diagnostic":  # downloads call the folder by either name
        places += [Path(glue_dir) / split / place.name for place in places]
    return next((place for place in places if place.exists()), None)


def read_tsv(name, split, glue_dir):
    """read() from an official file: columns between tabs, and nothing is quoted."""
    task = WITH_AX[name]
    path = official_file(name, split, glue_dir)
    if path is None:
        missing = f"{glue_dir}/{task.folder}/{split}.tsv not found"
        other = "name another --glue_dir ('' is the Hub)"
        sys.exit(f"{missing}: fetch it, {other}, or leave {name} out of --tasks")

    labelled = is_labelled(split)
    is_bare = task.folder == "CoLA" and labelled  # the one file without a header
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
                    # A few of QQP's rows end too soon; the Hub has left them out, too.
                    if labelled:
                        continue
                    raise ValueError("too few columns")
                texts.append(tuple(row[column] for column in task.texts))
                if labelled:
                    label = row[task.label]
                    labels.append(number_of[label] if task.labels else float(label))
                    if not 0 <= labels[-1] <= 5:  # STS-B's scores; numbers of classes are below 3
                        raise ValueError(f"no score is {label}")
        except (OSError, EOFError, ValueError, LookupError, csv.Error) as e:
            sys.exit(f"{path}, line {rows.line_num} ({e!r:.80}): fetch the official file")
    return texts, labels


def read_hub(name, split):
    """read() from nyu-mll/glue on the Hub, where labels are numbers already."""
    task = WITH_AX[name]
    try:
        from datasets import load_dataset

        hub_split = split.replace("dev", "validation").replace("diagnostic", "test")
        rows = load_dataset("nyu-mll/glue", name, split=hub_split)
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


# Tables of runs, {"task", "seed", "rows", "data", "scores", …}, as they stand in glue.json.
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


def write_answers(path, task, outputs):
    """Write one file of a submission: a header, then number and official label of each row."""
    answers = decide(task, outputs)
    if task.labels:
        labels = [task.labels[number] for number in answers]
    else:
        labels = [f"{value:.3f}" for value in answers.clip(0, 5)]
    lines = [f"{i}\t{label}" for i, label in enumerate(labels)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(["index\tprediction", *lines, ""]))


def written_answers(splits, folder):
    """{file of a submission: fingerprint of its test set and of what it says, '' if missing}."""
    result = {}
    for file in SUBMISSION:
        if file in splits:
            path = folder / file
            source = splits[file]["source"]
            result[file] = fingerprint(source, path.read_bytes()) if path.exists() else ""
    return result


def write_submission(folder, runs):
    """Zip each task's files of the seed with the median score; say what is not there.

    folder/seed0/CoLA.tsv and so on are there already; each run's "predictions" names its files."""
    chosen = {}
    answered = [run for run in runs if run["predictions"]]
    for found in runs_by_task(answered).values():
        ranked = sorted(found, key=lambda run: next(iter(run["scores"].values())))
        middle = ranked[(len(ranked) - 1) // 2]
        chosen |= {file: f"seed{middle['seed']}/{file}" for file in middle["predictions"]}

    def write(temporary):
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, path in chosen.items():
                archive.write(folder / path, file)

    folder.mkdir(parents=True, exist_ok=True)
    write_beside(folder / "submission.zip", write)
    print(f"{folder}/submission.zip: {', '.join(chosen.values()) or 'empty'}")
    missing = [file for file in SUBMISSION if file not in chosen]
    if missing:
        print(f"the leaderboard also wants {', '.join(missing)}: name their --tasks")


# The store: glue.json, {"systems": [{"system", "weights", "protocol", "machine", "runs"}, …]}.
IDENTITY = ("system", "weights", "protocol")


def read_entries(folder):
    """The list under "systems" in a folder's glue.json; exits if the file is not ours."""
    path = Path(folder) / "glue.json"
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))["systems"]
    except (ValueError, LookupError, TypeError) as e:
        sys.exit(f"{path} is broken ({e!r:.80}): move it away, and type the same again")


def find_entry(entries, wanted):
    """The one with the name, weights and protocol of wanted; if there is none, a new one."""
    for entry in entries:
        if all(entry[key] == wanted[key] for key in IDENTITY):
            return entry
    entries.append({**wanted, "runs": []})
    return entries[-1]


def stored_runs(folder, entry):
    """The runs in glue.json of what has the name, weights and protocol of entry."""
    return find_entry(read_entries(folder), entry)["runs"]


def runs_by_name(folder):
    """{name: runs} of all that is in glue.json, in its order; equal names are made different.

    A name holds every setting that is not the paper's."""
    result = {}
    for entry in read_entries(folder):
        name = entry["system"]
        while name in result:
            name += " (other weights or precision)"
        result[name] = entry["runs"]
    return result


def results_lock(folder):
    """The lock on a folder's glue.json and glue.md; exits if they are not ours."""
    folder = Path(folder)
    if (folder / "glue.md").exists() and not (folder / "glue.json").exists():
        sys.exit(f"{folder}/glue.md is there without a glue.json: it is not ours, move it away")
    return lock(folder / ".glue.lock", wait=True)


def add_runs(folder, entry, runs):
    """Add runs to glue.json, in place of those of equal task, seed and data; draw glue.md anew."""
    identity = itemgetter("task", "seed", "data")
    folder = Path(folder)
    new = [identity(run) for run in runs]
    with results_lock(folder):  # other processes may be at other tasks
        entries = read_entries(folder)
        stored = find_entry(entries, entry)
        stored["runs"] = [run for run in stored["runs"] if identity(run) not in new] + runs
        write_text(folder / "glue.json", json.dumps({"systems": entries}, indent=1))
        write_text(folder / "glue.md", markdown_page(runs_by_name(folder)))
