"""GLUE's metrics beside their definitions, its files with their traps, tables and store."""

import csv
import gzip
import json
import math
import warnings
from fractions import Fraction

import datasets
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanocram import glue

OFFICIAL = ROOT.parent / "shared/data/glue"
needs_glue = pytest.mark.skipif(
    not OFFICIAL.exists(), reason="the official GLUE files are not part of the project"
)


def pairs_of_lists(values, shortest=1):
    """Two lists of equal length."""
    sizes = st.integers(shortest, 60)
    return sizes.flatmap(lambda n: st.tuples(lists(values, n), lists(values, n)))


def lists(values, n):
    """Lists of n, all drawn from one of the strategies."""
    return st.one_of(*(st.lists(each, min_size=n, max_size=n) for each in values))


few = st.sampled_from([0.0, 0.5, 1.25, 4.0])  # many ties, often constant
numbers = st.one_of(few, st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6))


def found(name, labels, answers):
    """The scores of answers, numbers of classes or values; no warning is shown."""
    answers = np.array(answers)
    outputs = answers[:, None] if name == "stsb" else np.eye(2)[answers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = glue.score(name, np.array(labels), outputs)
    assert all(type(value) is float for value in scores.values())  # as JSON wants them
    return scores


def fractions(labels, answers):
    """Accuracy, F1 and Matthews' correlation in percent, by their definitions, in fractions."""
    pairs = list(zip(labels, answers, strict=True))
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (0, 1), (1, 0)))
    f1 = Fraction(2 * tp, 2 * tp + fp + fn) if tp else 0
    square = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    matthews = (tp * tn - fp * fn) / math.sqrt(square) if square else 0
    return [float(100 * value) for value in (Fraction(tp + tn, len(pairs)), f1, matthews)]


@settings(deadline=None)
@given(pairs_of_lists([st.integers(0, 1)], shortest=2))
@example(([1, 1, 1], [1, 1, 1]))
@example(([0, 0], [0, 0]))
@example(([0, 0], [1, 1]))
@example(([0, 1, 0], [1, 1, 1]))
def test_metrics_of_classes_are_their_definitions(both):
    accuracy, f1, matthews = fractions(*both)
    assert found("mrpc", *both) == pytest.approx({"f1": f1, "accuracy": accuracy}, abs=1e-9)
    assert found("cola", *both) == pytest.approx({"matthews": matthews}, abs=1e-9)


def test_matthews_of_a_large_set():
    rng = np.random.default_rng(0)
    # The four sums multiply to 10^21: int64 would overflow.
    both = rng.integers(0, 2, (2, 400_000))
    _, _, wanted = fractions(*both.tolist())
    assert found("cola", *both)["matthews"] == pytest.approx(wanted, abs=1e-9)


def centred(values):
    """Values less their mean, in fractions."""
    values = [Fraction(value) for value in values]
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def correlation(xs, ys):
    """Pearson's coefficient in percent, in fractions but for the root; 0 for a constant."""
    xs, ys = centred(xs), centred(ys)
    square = sum(x * x for x in xs) * sum(y * y for y in ys)
    both = sum(x * y for x, y in zip(xs, ys, strict=True))
    if not square:
        return 0.0
    return math.copysign(100 * math.sqrt(both * both / square), both)


def ranks(values):
    """The rank of each value, the mean rank for equal ones."""
    return [sum(v < x for v in values) + (values.count(x) + 1) / 2 for x in values]


@settings(deadline=None)
@given(pairs_of_lists([few, numbers], shortest=3))
@example(([1.0, 2.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]))
@example(([1.0, 1.0, 1.0], [1.0, 2.0, 2.0]))
@example(([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
def test_correlations_are_their_definitions_and_zero_where_one_side_is_constant(both):
    wanted = {"pearson": correlation(*both), "spearman": correlation(*map(ranks, both))}
    assert found("stsb", *both) == pytest.approx(wanted, abs=1e-7)


def test_every_official_file_is_read(glue_files):
    folder, written = glue_files
    for name, task in glue.TASKS.items():
        for split in task.rows:
            texts, labels = glue.read(name, split, folder)
            wanted = written[task.folder, split]
            assert texts == [pair for pair, _ in wanted]
            names = [task.labels[n] if task.labels else f"{n:.3f}" for n in labels]
            assert names == [label for _, label in wanted]
            assert labels.dtype == (np.int64 if task.labels else np.float64)


ROWS = [
    ('"an opening quote', "and a \x85 strange\u2028line end"),
    ('two "" marks"', "x"),
    ("", "an empty first"),
    ("é", "ü \x1c"),
]


@pytest.mark.parametrize(("end", "packed"), [("\n", False), ("\r\n", False), ("\n", True)])
def test_nothing_in_a_line_is_special_but_tabs(tmp_path, end, packed):
    lines = [
        "index\tsentence1\tsentence2\tlabel",
        *(f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(ROWS)),
    ]
    data = end.join(lines).encode()  # without a line end behind the last
    (tmp_path / "RTE").mkdir()
    path = tmp_path / ("RTE/dev.tsv.gz" if packed else "RTE/dev.tsv")
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    texts, labels = glue.read("rte", "dev", tmp_path)
    assert texts == ROWS and labels.tolist() == [0] * len(ROWS)


def test_rows_with_too_few_columns_are_left_out(tmp_path):
    """A few of QQP's official rows are such; the Hub has left them out, too."""
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    lines = [header, "0\t1\t2\ta\tb\t1", "1\t1\t2\ta", "2\t1\t2\tc\td\t0"]
    (tmp_path / "QQP").mkdir()
    (tmp_path / "QQP/train.tsv").write_text("\n".join(lines))
    texts, labels = glue.read("qqp", "train", tmp_path)
    assert texts == [("a", "b"), ("c", "d")] and labels.tolist() == [1, 0]


RTE = "index\tsentence1\tsentence2\tlabel\n"
STSB = "sentence1\tsentence2\tscore\na\tb\t"


@pytest.mark.parametrize(
    ("task", "content", "named"),
    [
        ("rte", RTE, "RTE"),
        ("rte", "", "RTE"),
        ("rte", "index,sentence1,sentence2,label\n0,a,b,entailment", "line 2"),
        ("rte", RTE + "0\ta\tb\tmaybe", "line 2"),
        ("rte", RTE + "0\ta\tb\tentailment\n1\ta\tb\tentailment\tx", "line 3"),
        ("sst2", "sentence\tlabel\na\t1\nb\t2", "line 3"),
        ("stsb", STSB + "5.1", "5.1"),
        ("stsb", STSB + "nan", "nan"),
        ("stsb", STSB + "x", "'x'"),
        ("cola", "gj04\t1\t\tA sentence.\ngj04\t3\t\tAnother.", "line 2"),
        ("rte", b"\xff\xfe", "RTE/dev.tsv"),
        ("rte", "x" * 200_000, "RTE/dev.tsv"),
        (
            "sst2",
            gzip.compress(b"sentence\tlabel\n" + b"a\t1\n" * 5000, mtime=0)[:40],
            "dev.tsv.gz",
        ),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, task, content, named):
    end = ".gz" if named.endswith(".gz") else ""
    path = tmp_path / glue.TASKS[task].folder / f"dev.tsv{end}"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for split, wanted in (("dev", named), ("train", "train.tsv not found")):
        with pytest.raises(SystemExit) as e:
            glue.read(task, split, tmp_path)
        text = str(e.value)
        assert wanted in text and glue.TASKS[task].folder in text and "\n" not in text


def test_the_hubs_form_gives_the_same(glue_files, monkeypatch):
    """Dataset objects with the columns and label numbers of nyu-mll/glue, in place of a network."""
    folder, written = glue_files
    columns = {
        "mnli": ("premise", "hypothesis"),
        "qqp": ("question1", "question2"),
        "qnli": ("question", "sentence"),
        "cola": ("sentence",),
        "sst2": ("sentence",),
    }
    names = {
        "mnli": ["entailment", "neutral", "contradiction"],
        "qnli": ["entailment", "not_entailment"],
        "rte": ["entailment", "not_entailment"],
    }

    def load_dataset(path, name, split):
        assert path == "nyu-mll/glue"
        rows = written[glue.TASKS[name].folder, split.replace("validation", "dev")]
        texts = zip(*(pair for pair, _ in rows), strict=True)
        data = dict(
            zip(columns.get(name, ("sentence1", "sentence2")), map(list, texts), strict=True)
        )
        number = float if name == "stsb" else names.get(name, ["0", "1"]).index
        data["label"] = [number(label) for _, label in rows]
        return datasets.Dataset.from_dict(data | {"idx": list(range(len(rows)))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, task in glue.TASKS.items():
        for split in task.rows:
            texts, labels = glue.read(name, split, "")
            wanted_texts, wanted_labels = glue.read(name, split, folder)
            assert texts == wanted_texts and np.array_equal(labels, wanted_labels)

    def fails(*args, **kwargs):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(SystemExit) as e:
        glue.read("rte", "train", "")
    text = str(e.value)
    assert "no route to host" in text and "--glue_dir" in text and "\n" not in text


@needs_glue
def test_the_official_files_have_their_official_sizes():
    seen = 0
    for name, task in glue.TASKS.items():
        for split, n in task.rows.items():
            path = OFFICIAL / task.folder / f"{split}.tsv"
            if not path.exists():
                continue
            texts, labels = glue.read(name, split, OFFICIAL)
            assert len(texts) == len(labels) == n, (name, split)
            with open(path, newline="", encoding="utf-8-sig") as f:
                rows = list(csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
            rows = rows[-n:]  # without the header
            # Where the texts of the first row stand.
            column = {text: rows[0].index(text) for text in texts[0]}
            assert texts == [tuple(row[column[text]] for text in texts[0]) for row in rows]
            at = {"cola": 1, "mrpc": 0}.get(name, -1)
            number = float if name == "stsb" else task.labels.index
            assert labels.tolist() == [number(row[at]) for row in rows]
            seen += 1
    assert seen >= 15
    _, labels = glue.read("mnli", "dev_matched", OFFICIAL)
    assert np.bincount(labels).tolist() == [3479, 3123, 3213]  # entailment, neutral, contradiction
    _, labels = glue.read("mnli", "dev_mismatched", OFFICIAL)
    assert np.bincount(labels).tolist() == [3463, 3129, 3240]


def runs(**scores):
    """One run for each task, of the official size."""
    facts = {"system": "x", "weights": "w", "settings": {"epochs": 5}, "seed": 0}
    facts |= {"data": "official", "date": "2026-01-01", "device": "cpu"}
    return [
        {"task": name, "rows": glue.TASKS[name].rows, "scores": values, **facts}
        for name, values in scores.items()
    ]


def with_few_rows(task, all_runs):
    """The same runs, but for one task that was trained on 100 rows."""
    result = []
    for run in all_runs:
        short = {"train": 100} if run["task"] == task else {}
        result.append(run | {"rows": run["rows"] | short})
    return result


def cells(name, results):
    """The cells of a line of the table, by the heading of their column."""
    heading, _, *lines = glue.table(results)
    (line,) = [line for line in lines if line.startswith(f"| {name}")]
    both = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (heading, line)]
    return dict(zip(*both, strict=True))


FULL = {
    "cola": {"matthews": 50.0},
    "sst2": {"accuracy": 90.0},
    "mrpc": {"f1": 88.0, "accuracy": 84.0},
    "stsb": {"pearson": 86.0, "spearman": 85.0},
    "qqp": {"f1": 87.0, "accuracy": 90.0},
    "mnli": {"accuracy": 82.0, "accuracy_mm": 83.0},
    "qnli": {"accuracy": 89.0},
    "rte": {"accuracy": 60.0},
}


def test_the_mean_is_of_the_nine_numbers():
    nine = (50 + 90 + 88 + 86 + 87 + 82 + 83 + 89 + 60) / 9
    found = cells("x", {"x": runs(**FULL, wnli={"accuracy": 1.0})})
    assert found["mean of 9"] == f"{nine:.1f}"
    assert found["MRPC"] == "88.0" and found["MNLI-mm"] == "83.0" and found["RTE"] == "60.0"
    some = cells("x", {"x": runs(mnli=FULL["mnli"], cola=FULL["cola"])})
    assert some["mean of 9"] == f"{(50 + 82 + 83) / 3:.1f} (3 of 9)" and some["RTE"] == "–"
    assert cells("x", {"x": runs(wnli={"accuracy": 1.0})})["mean of 9"] == "–"


def test_the_mean_of_tasks_averages_the_scores_of_a_task_first():
    eight = (50 + 90 + (88 + 84) / 2 + (86 + 85) / 2 + (87 + 90) / 2 + (82 + 83) / 2 + 89 + 60) / 8
    row = cells("x", {"x": runs(**FULL, wnli={"accuracy": 1.0})})
    assert row["mean of 8 tasks"] == f"{eight:.1f}"
    some = cells("x", {"x": runs(mnli=FULL["mnli"], cola=FULL["cola"])})
    assert some["mean of 8 tasks"] == f"{(50 + 82.5) / 2:.1f} (2 of 8)"
    assert cells("x", {"x": runs(wnli={"accuracy": 1.0})})["mean of 8 tasks"] == "–"
    short = {"x": with_few_rows("qqp", runs(**FULL))}
    assert cells("x", short)["mean of 8 tasks"] == f"{eight:.1f}*"
    assert cells("BERT-base †", {"x": runs(**FULL)})["mean of 8 tasks"] == "–"


def test_the_published_means_are_the_mean_of_nine():
    full = [values.split() for values in glue.REFERENCES.values() if "–" not in values]
    assert len(full) == 4
    for values in full:
        *nine, mean = map(float, values)
        assert len(nine) == 9 and np.mean(nine) == pytest.approx(mean, abs=0.1)


def test_the_model_card_of_crammed_bert():
    """Its scores under the heading of each task, as the card lists them; the best of five runs."""
    card = {"MNLI-m": "84.1", "MNLI-mm": "84.6", "SST-2": "92.0", "STS-B": "87.4", "RTE": "58.5"}
    card |= {"QNLI": "90.2", "QQP": "87.5", "MRPC": "88.9", "CoLA": "53.3", "mean of 9": "80.7"}
    found = cells("crammed BERT, best of five †", {"x": runs(**FULL)})
    assert {name: found[name] for name in card} == card


def test_medians_are_taken_score_by_score():
    values = [{"f1": f, "accuracy": 100 - f} for f in (70.0, 90.0, 80.0)]
    three = [run | {"seed": i} for i, value in enumerate(values) for run in runs(mrpc=value)]
    for some in (three, three[:2]):
        assert glue.median(some, "f1") == 80 and glue.median(some, "accuracy") == 20
    other = [run | {"data": "another"} for run in runs(mrpc={"f1": 1.0, "accuracy": 2.0})]
    # Never of different data.
    assert glue.runs_by_task(three + other) == {"mrpc": other}


def test_the_table_marks_what_is_partial():
    partial = with_few_rows("qqp", runs(**FULL))
    results = {"whole": runs(**FULL), "part": partial, "rest": runs(rte=FULL["rte"])}
    assert not [cell for cell in cells("whole", results).values() if "*" in cell or " of " in cell]
    part = cells("part", results)
    assert (part["QQP"], part["MNLI-m"], part["mean of 9"]) == ("87.0*", "82.0", "79.4*")
    assert cells("rest", results)["mean of 9"] == "60.0 (1 of 9)"
    outside = with_few_rows("wnli", runs(**FULL, wnli={"accuracy": 1.0}))
    assert cells("x", {"x": outside})["mean of 9"] == "79.4"  # wnli is none of the nine
    assert "* QQP: train: 100 of 363,846 rows" in glue.footnotes(results)
    assert len(glue.footnotes({"whole": runs(**FULL)})) == 1  # the published ones alone


def test_the_page_has_the_table_and_every_score():
    results = {"part": with_few_rows("qqp", runs(**FULL)), "rest": runs(rte=FULL["rte"])}
    page = glue.markdown_page(results)
    tables = [*glue.table(results), *glue.seed_spread(results["part"])]
    assert all(line in page.splitlines() for line in tables)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    # As many cells in every row of a table.
    assert {line.count("|") for line in lines} == {13, 7}


def test_the_page_shows_how_far_seeds_lie_apart():
    three = []
    for seed, score in enumerate((70.0, 95.0, 80.0)):
        three += [run | {"seed": seed} for run in runs(rte={"accuracy": score})]
    line = glue.seed_spread(three)[-1]
    row = [cell.strip() for cell in line.split("|")[1:-1]]
    assert row == ["RTE", "accuracy", "80.0", "70.0", "95.0", "3"]


@pytest.mark.parametrize("seeds", [(2, 2), (1, 3)])
def test_the_table_says_how_many_seeds(seeds):
    found = []
    for task, count in zip(("rte", "qnli"), seeds, strict=True):
        for seed in range(count):
            found += [run | {"seed": seed} for run in runs(**{task: FULL[task]})]
    wanted = "x; seeds: 2" if seeds == (2, 2) else "x; seeds: 1 to 3"
    assert cells("x", {"x": found})["GLUE, dev sets"] == wanted


# The store


def some_runs(seeds, **changes):
    """A run of RTE for each seed."""
    (run,) = runs(rte={"accuracy": 50.0})
    return [run | {"seed": seed} | changes for seed in seeds]


def test_runs_replace_those_of_the_same_task_seed_and_data(tmp_path):
    first = some_runs([0, 1])
    again = some_runs([0], scores={"accuracy": 60.0})
    other = some_runs([0], data="other")
    for new in (first, again, other):
        glue.add_runs(tmp_path, new)
    assert glue.read_runs(tmp_path) == [first[1], *again, *other]
    assert "x; seeds: 1 " in (tmp_path / "glue.md").read_text()
    lines = (tmp_path / "glue.jsonl").read_text().splitlines()  # nothing is taken out of it
    assert [json.loads(line) for line in lines] == [*first, *again, *other]


def test_equal_names_become_different(tmp_path):
    changes = [{}, {"system": "y", "weights": "b"}, {"weights": "c"}, {"settings": {"epochs": 9}}]
    for change in [*changes, {"weights": "c", "seed": 1}]:
        glue.add_runs(tmp_path, some_runs([0], **change))
    results = glue.runs_by_name(glue.read_runs(tmp_path))
    other = " (other weights or precision)"
    assert [*results] == ["x", "y", "x" + other, "x" + other + other]
    assert [run["seed"] for run in results["x" + other]] == [0, 1]
    assert f"| x{other}; seeds: 2 " in (tmp_path / "glue.md").read_text()


def test_a_cut_last_line_costs_that_run_alone(tmp_path):
    """Wherever a kill cuts it: the runs before are read, and those that come later are too."""
    path = tmp_path / "glue.jsonl"
    glue.add_runs(tmp_path, some_runs([0]))
    whole = path.read_bytes()
    glue.add_runs(tmp_path, some_runs([1], system="ü"))
    both = path.read_bytes()
    for end in range(len(whole), len(both) + 1):
        path.write_bytes(both[:end])
        glue.add_runs(tmp_path, some_runs([2]))
        seeds = [run["seed"] for run in glue.read_runs(tmp_path)]
        assert seeds == ([0, 1, 2] if end >= len(both) - 1 else [0, 2]), end


@pytest.mark.parametrize(
    "line",
    [b"precious", b"", b"[]", b"{}", b"7", b"\xff\xfe", b'{"task": "rte", "seed": 1}']
    + [json.dumps(run).encode() for run in some_runs([5], task="a fork's own")],
)
def test_a_line_that_is_no_run_is_left_out_and_stays(tmp_path, line):
    path = tmp_path / "glue.jsonl"
    path.write_bytes(line + b"\n")
    glue.add_runs(tmp_path, some_runs([0]))
    assert glue.read_runs(tmp_path) == some_runs([0])
    assert path.read_bytes().startswith(line + b"\n")
    assert "x; seeds: 1 " in (tmp_path / "glue.md").read_text()


def test_a_page_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "glue.md").write_text("precious")
    with pytest.raises(SystemExit, match=r"glue\.md"):
        glue.add_runs(tmp_path, some_runs([0]))
    assert (tmp_path / "glue.md").read_text() == "precious"
    assert not (tmp_path / "glue.jsonl").exists()
