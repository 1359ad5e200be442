"""The GLUE benchmark (arXiv 1804.07461): its tasks and files, metrics, published scores, tables and submissions.

    python -c "from nanocram import glue; print(glue.read('rte', 'dev', 'path/to/GLUE')[0][:2])"     # the official download
    python -c "from nanocram import glue; print(glue.read('rte', 'dev', '')[1][:20])"                # the Hub's copy

An official download is a folder with TASK/train.tsv and so on, each file plain or gzipped (.tsv.gz).
"""

import gzip
import hashlib
import json
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanocram.safety import Lock, write_beside


@dataclass(frozen=True)
class Task:
    """A task: its folder, its columns in the official files and on the Hub, its labels, metrics and official sizes."""

    folder: str
    texts: tuple  # columns with the sentence, or with both
    label: str
    labels: tuple  # the names of labels 0, 1, …; none for a regression
    metrics: tuple  # the paper's choice first
    rows: dict  # {split: rows of the official file}
    hub_texts: tuple = ()  # where the Hub has other names

    @property
    def n_outputs(self):
        return max(1, len(self.labels))


PAIR, BINARY, ENTAILED = ("sentence1", "sentence2"), ("0", "1"), ("entailment", "not_entailment")
THREE = ("entailment", "neutral", "contradiction")
MNLI_ROWS = {
    "train": 392702,
    "dev_matched": 9815,
    "dev_mismatched": 9832,
    "test_matched": 9796,
    "test_mismatched": 9847,
}


def fingerprint(*parts):
    """16 hexadecimal digits that stand for parts: bytes, or anything with a text of its own."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
    return digest.hexdigest()[:16]


def sizes(train, dev, test):
    return {"train": train, "dev": dev, "test": test}


TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", BINARY, ("matthews",), sizes(8551, 1043, 1063)),
    "sst2": Task("SST-2", ("sentence",), "label", BINARY, ("accuracy",), sizes(67349, 872, 1821)),
    "mrpc": Task(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        BINARY,
        ("f1", "accuracy"),
        sizes(3668, 408, 1725),
        PAIR,
    ),
    "stsb": Task("STS-B", PAIR, "score", (), ("pearson", "spearman"), sizes(5749, 1500, 1379)),
    "qqp": Task(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        BINARY,
        ("f1", "accuracy"),
        sizes(363846, 40430, 390965),
    ),
    "mnli": Task(
        "MNLI", PAIR, "gold_label", THREE, ("accuracy",), MNLI_ROWS, ("premise", "hypothesis")
    ),
    "qnli": Task(
        "QNLI",
        ("question", "sentence"),
        "label",
        ENTAILED,
        ("accuracy",),
        sizes(104743, 5463, 5463),
    ),
    "rte": Task("RTE", PAIR, "label", ENTAILED, ("accuracy",), sizes(2490, 277, 3000)),
    "wnli": Task("WNLI", PAIR, "label", BINARY, ("accuracy",), sizes(635, 71, 146)),
}
AX = Task(
    "AX", PAIR, "", THREE, (), {"diagnostic": 1104}, ("premise", "hypothesis")
)  # predicted by an MNLI model

# The nine numbers of the paper's mean, in the order of the table: (heading, task, name of the score).
NINE = (
    ("CoLA", "cola", "matthews"),
    ("SST-2", "sst2", "accuracy"),
    ("MRPC", "mrpc", "f1"),
    ("STS-B", "stsb", "pearson"),
    ("QQP", "qqp", "f1"),
    ("MNLI-m", "mnli", "accuracy"),
    ("MNLI-mm", "mnli", "accuracy_mm"),
    ("QNLI", "qnli", "accuracy"),
    ("RTE", "rte", "accuracy"),
)
# Published dev scores in that order, and the mean as published; None: not published.
SOURCE = "Geiping and Goldstein, arXiv 2212.14034"
REFERENCES = (
    ("RoBERTa-base", (60.2, 93.7, 91.4, 90.4, 88.3, 86.6, 86.4, 92.1, 77.3), 85.1),
    ("BERT-base", (56.5, 91.9, 89.3, 86.7, 87.7, 83.2, 83.4, 90.6, 59.2), 80.9),
    ("crammed BERT, one day", (51.8, *(None,) * 8), 80.4),
    ("BERT-base, no pre-training", (0.0, 79.9, 77.9, 17.8, 68.6, 34.1, 34.1, 50.0, 47.3), 45.5),
)


def read(name, split, glue_dir):
    """(texts [(sentence,) or (first, second), …], labels) of a split; labels is an array, or None in a test set.

    From the official files in glue_dir, or from the Hub where that is ''. Raises FileNotFoundError if there is no such
    file, ValueError if it is not as it should be; either says what to do."""
    task = AX if name == "ax" else TASKS[name]
    texts, labels = read_tsv(task, split, glue_dir) if glue_dir else read_hub(name, task, split)
    if not texts:
        raise ValueError(
            f"{task.folder}, {split}: there is not one row in it, fetch the file again"
        )
    return texts, labels


def find(task, split, glue_dir):
    """The path of a split's file."""
    folders = [
        Path(glue_dir) / task.folder,
        *([Path(glue_dir) / "diagnostic"] if task is AX else []),
    ]  # both are used
    for path in (folder / f"{split}.tsv{end}" for folder in folders for end in ("", ".gz")):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{folders[0]}/{split}.tsv not found: fetch it, or name a --glue_dir that has it"
    )


def read_tsv(task, split, glue_dir):
    """read() from an official file: tab-separated, nothing is quoted, perhaps a byte order mark; CoLA has no header."""
    path = find(task, split, glue_dir)
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as e:
        raise ValueError(f"{path} is damaged ({e!r:.80}): fetch it again") from None
    lines = [
        line.rstrip("\r") for line in text.split("\n")
    ]  # not splitlines(): texts may hold other line separators
    bare = task.folder == "CoLA" and "test" not in split
    header = ["source", "label", "mark", "sentence"] if bare else lines.pop(0).split("\t")
    labelled = "test" not in split and task is not AX
    wanted = [*task.texts, task.label] if labelled else task.texts
    if missing := [column for column in wanted if column not in header]:
        raise ValueError(
            f"{path} has no column {missing[0]!r}: it is not the official file, fetch that"
        )
    texts, labels, broken = [], [], 0
    for number, line in enumerate(lines, 1 if bare else 2):
        fields = line.split("\t")
        if not line.strip():
            continue
        if (
            len(fields) < len(header) and task.folder == "QQP" and split != "test"
        ):  # as the Hub does, which has none
            broken += 1
            continue
        if len(fields) != len(header):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} columns where the header has {len(header)}"
            )
        texts.append(tuple(fields[header.index(column)] for column in task.texts))
        if labelled:
            labels.append(
                parse_label(task, fields[header.index(task.label)], f"{path}, line {number}")
            )
    if broken:
        print(f"{path}: left out {broken} rows with too few columns")
    return texts, label_array(task, labels) if labelled else None


def parse_label(task, value, where):
    """The number of a label as it stands in a file or on the Hub; raises ValueError if it is out of range."""
    if task.labels and str(value) in task.labels:
        return task.labels.index(str(value))
    try:
        if not task.labels and 0 <= float(value) <= 5:
            return float(value)
    except ValueError:
        pass
    raise ValueError(
        f"{where}: label {value!r} is not {' or '.join(task.labels) or 'a number from 0 to 5'}"
    )


def read_hub(name, task, split):
    """read() from nyu-mll/glue on the Hub."""
    try:
        from datasets import load_dataset

        part = split.replace("dev", "validation").replace("diagnostic", "test")
        rows = load_dataset("nyu-mll/glue", name, split=part)
        columns = [rows[column][:] for column in task.hub_texts or task.texts]
        labels = rows["label"][:]
    except (
        Exception
    ) as e:  # no package, no network, no such data set: each of them raises something else
        reason = (str(e).strip() or repr(e)).splitlines()[0]
        hint = "point --glue_dir to a folder with the official files"
        raise FileNotFoundError(f"cannot get {name} from the Hub ({reason:.120}): {hint}") from None
    texts = list(zip(*columns, strict=True))
    if "test" in split or name == "ax":
        return texts, None
    names = [task.labels[n] if task.labels and 0 <= n < len(task.labels) else n for n in labels]
    found = [parse_label(task, v, f"{task.folder}, {split}, row {i}") for i, v in enumerate(names)]
    return texts, label_array(task, found)


def label_array(task, labels):
    return np.array(labels, np.int64 if task.labels else np.float64)


def accuracy(labels, predicted):
    return float(np.mean(labels == predicted))


def f1(labels, predicted):
    """F1 of class 1; 0 where there is neither a 1 to be found nor one predicted."""
    found = np.sum((labels == 1) & (predicted == 1))
    total = np.sum(labels == 1) + np.sum(predicted == 1)
    return float(2 * found / total) if total else 0.0


def matthews(labels, predicted):
    """Matthews' correlation coefficient of two classes; 0 where it is undefined, one side having one class only."""
    n = [[float(np.sum((labels == a) & (predicted == b))) for b in (0, 1)] for a in (0, 1)]
    (tn, fp), (fn, tp) = n
    bottom = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / bottom**0.5 if bottom else 0.0


def pearson(labels, predicted):
    """Correlation coefficient; nan where one side is constant."""
    x, y = (np.asarray(v, np.float64) for v in (labels, predicted))
    if (x == x[0]).all() or (y == y[0]).all():
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(np.dot(x / np.linalg.norm(x), y / np.linalg.norm(y)), -1, 1))


def spearman(labels, predicted):
    """Pearson's coefficient of the ranks, the mean rank for equal values."""

    def ranks(values):
        _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[which]

    return pearson(ranks(labels), ranks(predicted))


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def score(name, labels, outputs):
    """{metric: score} of a task's outputs (N, n_outputs) as percentages, as GLUE reports them."""
    predicted = decide(TASKS[name], outputs)
    values = {metric: METRICS[metric](labels, predicted) for metric in TASKS[name].metrics}
    return {
        metric: 100 * (0.0 if np.isnan(v) else v) for metric, v in values.items()
    }  # constant answers earn nothing


def decide(task, outputs):
    """The answers: numbers of classes, or the scores of a regression."""
    return outputs.argmax(1) if task.labels else outputs[:, 0]


def by_task(runs):
    """{task: its runs, by seed}; where some were on other data, those on the data of the last one."""
    result = {}
    for task in TASKS:
        if found := [run for run in runs if run["task"] == task]:
            alike = (run for run in found if run["data"] == found[-1]["data"])
            result[task] = sorted(alike, key=lambda run: run["seed"])
    return result


def medians(runs):
    """{task: {score: median over the seeds}} of runs, [{"task", "seed", "rows", "data", "scores"}, …]."""
    scores = {task: [run["scores"] for run in found] for task, found in by_task(runs).items()}
    return {
        t: {k: float(np.median([s[k] for s in found])) for k in found[0]}
        for t, found in scores.items()
    }


def means(scores):
    """{name: (mean, of how many, of how many at best)} of {task: {score: value}}, in the three customary ways.

    "mean of 9" is the paper's, of the nine numbers of the table; then the same without CoLA; and the mean of the eight
    tasks, the scores of a task averaged first, as the leaderboard does."""
    nine = {heading: scores[task][key] for heading, task, key in NINE if task in scores}
    tasks = [
        np.mean([*scores[task].values()])
        for task in dict.fromkeys(task for _, task, _ in NINE)
        if task in scores
    ]
    ways = {
        "mean of 9": ([*nine.values()], 9),
        "without CoLA": ([v for k, v in nine.items() if k != "CoLA"], 8),
        "mean of 8 tasks": (tasks, 8),
    }
    return {
        name: (float(np.mean(found)) if found else None, len(found), n)
        for name, (found, n) in ways.items()
    }


def shortfall(runs):
    """{task: ["train: 24,739 of 392,702 rows", …]} of the tasks whose training or dev data were not the whole."""
    result = {}
    for task, found in by_task(runs).items():
        official = TASKS[task].rows
        short = [
            f"{s}: {n:,} of {official[s]:,} rows"
            for s, n in found[0]["rows"].items()
            if n < official[s]
        ]
        if short:
            result[task] = short
    return result


def layout(rows, between):
    """Rows of cells as lines with aligned columns, all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return [between.join(cells).rstrip() for cells in aligned]


def markdown(rows):
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return [f"| {line} |" for line in layout([rows[0], rule, *rows[1:]], " | ")]


def summary(results):
    """(rows of cells, notes) for {label: runs}: each with its nine medians and their means, then the published ones."""
    rows, notes = [["GLUE, dev sets", *(heading for heading, _, _ in NINE), *means({})]], []
    for label, runs in results.items():
        found, short = medians(runs), shortfall(runs)
        star = {task: "*" if task in short else "" for task in TASKS}
        cells = [
            f"{found[task][key]:.1f}{star[task]}" if task in found else "–" for _, task, key in NINE
        ]
        for name, (value, n, of) in means(found).items():
            marks = max(
                star[task] for _, task, _ in NINE if task != "cola" or name != "without CoLA"
            )
            cells.append(
                "–"
                if value is None
                else f"{value:.1f}{marks}" + (f" ({n} of {of})" if n < of else "")
            )
        counts = [len(of_task) for of_task in by_task(runs).values()]
        spread = (
            f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        )
        rows.append([f"{label}; seeds: {spread}", *cells])
        notes += [f"* {TASKS[task].folder}: {'; '.join(parts)}" for task, parts in short.items()]
        if any(n < of for _, n, of in means(found).values()):
            notes.append("(n of m): a partial mean, of the n scores that there are")
    for name, nine, mean in REFERENCES:
        rows.append([f"{name} †", *("–" if v is None else f"{v:.1f}" for v in nine), f"{mean:.1f}"])
        rows[-1] += ["–" if None in nine else f"{np.mean(nine[1:]):.1f}", "–"]
    return rows, [*dict.fromkeys(notes), f"† as published: {SOURCE}"]


def table(results):
    """The lines of summary(), for a terminal."""
    rows, notes = summary(results)
    return [*layout(rows, "  "), *notes]


EXPLANATION = """
- Medians over seeds, scores after the last epoch, in percent: Matthews' correlation (CoLA), F1 (MRPC, QQP), Pearson's
  correlation (STS-B), accuracy (the rest).
- *mean of 9*: the paper's, of these nine numbers; *without CoLA*: of the other eight; *mean of 8 tasks*: all scores of
  a task averaged first, those below too."""


def page(results):
    """summary() and the spread of each score as a page of Markdown."""
    rows, notes = summary(results)
    lines = [*markdown(rows), "", *(f"- {note.replace('*', chr(92) + '*')}" for note in notes)]
    lines += EXPLANATION.strip().splitlines()
    for label, runs in results.items():
        rows = [
            [
                "task",
                "score",
                "median",
                "lowest",
                "highest",
                "seeds",
                "trained on",
                "dev rows",
                "rows/s",
                "padded",
            ]
        ]
        for task, found in medians(runs).items():
            of_task = by_task(runs)[task]
            for key, median in found.items():
                values = [run["scores"][key] for run in of_task]
                split = {"mnli": "dev_mismatched" if key.endswith("_mm") else "dev_matched"}.get(
                    task, "dev"
                )
                speed, padded = (
                    np.median([run[k] for run in of_task]) for k in ("rows_per_second", "padded")
                )
                rows.append(
                    [
                        TASKS[task].folder,
                        key,
                        f"{median:.1f}",
                        f"{min(values):.1f}",
                        f"{max(values):.1f}",
                        str(len(of_task)),
                        f"{of_task[0]['rows']['train']:,}",
                        f"{of_task[0]['rows'][split]:,}",
                        f"{speed:,.0f}",
                        f"{padded:.0%}",
                    ]
                )
        made = ", ".join(dict.fromkeys(f"{run['date']} on {run['device']}" for run in runs))
        lines += ["", f"## {label}", "", *markdown(rows), "", made]
    return "\n".join(["# GLUE", "", *lines, ""])


# The files of a submission: {file: (task whose model answers, split)}, as gluebenchmark.com wants them.
SUBMISSION = {
    **{f"{TASKS[name].folder}.tsv": (name, "test") for name in TASKS if name != "mnli"},
    "MNLI-m.tsv": ("mnli", "test_matched"),
    "MNLI-mm.tsv": ("mnli", "test_mismatched"),
    "AX.tsv": ("mnli", "diagnostic"),
}


def write_predictions(path, task, outputs):
    """Write one file of a submission: a header, then the number of each row and its label's official name."""
    answers = decide(task, outputs)
    words = (
        [task.labels[n] for n in answers]
        if task.labels
        else [f"{v:.3f}" for v in np.clip(answers, 0, 5)]
    )
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(
        path, lambda p: p.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    )


def predictions(splits, folder):
    """{file of a submission: fingerprint of the test set it answers and of what it says}, of those in folder."""
    paths = {file: folder / file for file in splits if file in SUBMISSION}
    return {
        file: fingerprint(splits[file]["source"], p.read_bytes())
        for file, p in paths.items()
        if p.exists()
    }


def write_submission(folder, runs):
    """Zip, of each task, the predictions of the seed with the median score; say what the leaderboard would miss.

    folder/seed0/CoLA.tsv and so on are there already; each run's "predictions" names its files."""
    chosen = {}
    for found in by_task([run for run in runs if run["predictions"]]).values():
        ranked = sorted(found, key=lambda run: next(iter(run["scores"].values())))
        median = ranked[(len(ranked) - 1) // 2]
        chosen |= {name: f"seed{median['seed']}/{name}" for name in median["predictions"]}

    def write(temporary):
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in chosen.items():
                archive.write(folder / path, name)

    folder.mkdir(parents=True, exist_ok=True)
    write_beside(folder / "submission.zip", write)
    print(f"{folder}/submission.zip: {', '.join(chosen.values()) or 'empty'}")
    if missing := [name for name in SUBMISSION if name not in chosen]:
        print(
            f"the leaderboard also wants {', '.join(missing)}: name their --tasks, and have their test files"
        )


def read_systems(folder):
    """The systems in a folder's glue.json, [{"system", "weights", "protocol", "machine", "runs"}, …]."""
    path = Path(folder) / "glue.json"
    try:
        systems = json.loads(path.read_text(encoding="utf-8"))["systems"] if path.exists() else []
        for s in systems:
            keys = "task seed rows data scores predictions date device rows_per_second padded"
            if not {"system", "weights", "protocol"} <= s.keys() or any(
                {*keys.split()} - r.keys() for r in s["runs"]
            ):
                raise ValueError("a run without all of its facts")
        return systems
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        sys.exit(f"{path} is broken ({e!r:.80}): move it away, and type the same again")


def find_system(systems, entry):
    return next(
        (s for s in systems if all(s[k] == entry[k] for k in ("system", "weights", "protocol"))),
        None,
    )


def stored_runs(folder, entry):
    """The runs of a system, told by its name, weights and protocol, that are in glue.json."""
    found = find_system(read_systems(folder), entry)
    return found["runs"] if found else []


def add_runs(folder, entry, runs):
    """Add runs to glue.json, each in place of one of the same task, seed and data, and draw glue.md anew."""
    with lock(folder):  # others may be at other tasks
        systems = put_runs(read_systems(folder), entry, runs)
        text = json.dumps({"systems": systems}, indent=1)
        write_beside(
            Path(folder) / "glue.json", lambda path: path.write_text(text, encoding="utf-8")
        )
        text = page(systems_by_name(folder))
        write_beside(Path(folder) / "glue.md", lambda path: path.write_text(text, encoding="utf-8"))


def lock(folder):
    """The lock on a folder's glue.json and glue.md; exits if they are not ours."""
    if (Path(folder) / "glue.md").exists() and not (Path(folder) / "glue.json").exists():
        sys.exit(f"{folder}/glue.md is there without a glue.json: it is not ours, move it away")
    return Lock(Path(folder) / ".glue.lock", wait=True)


def put_runs(systems, entry, runs):
    """The systems of a glue.json with runs of one of them, each in place of one of the same task, seed and data."""
    found = find_system(systems, entry)
    if found is None:
        systems.append(found := {**entry, "runs": []})

    def what(run):
        return run["task"], run["seed"], run["data"]

    found["runs"] = [r for r in found["runs"] if what(r) not in map(what, runs)] + runs
    return systems


def systems_by_name(folder):
    """{name: runs} of the systems in glue.json; those of equal names are numbered, in the order of their first runs."""
    systems, result = read_systems(folder), {}
    names = [s["system"] for s in systems]
    for i, s in enumerate(systems):
        number = f" ({names[: i + 1].count(s['system'])})" if names.count(s["system"]) > 1 else ""
        result[s["system"] + number] = s["runs"]
    return result
