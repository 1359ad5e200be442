"""GLUE's metrics against scikit-learn and scipy, its files with all their traps, its averages and its submissions."""

import csv
import gzip
import warnings

import datasets
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from conftest import LEADERBOARD, ROOT, check_submission
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanocram import glue

OFFICIAL = ROOT.parent / "shared/data/glue"
needs_glue = pytest.mark.skipif(
    not OFFICIAL.exists(), reason="the official GLUE files are not part of the project"
)

classes = st.integers(1, 60).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 1), min_size=n, max_size=n)] * 2)
)
few = st.sampled_from([0.0, 0.5, 1.25, 4.0])  # many ties, often constant
numbers = st.one_of(few, st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6))


def pair_of_lists(n):
    return st.tuples(
        *[st.one_of(*(st.lists(values, min_size=n, max_size=n) for values in (few, numbers)))] * 2
    )


scores = st.integers(3, 60).flatmap(pair_of_lists)


@settings(deadline=None)
@given(classes)
@example(([1, 1, 1], [1, 1, 1]))
@example(([0, 0], [0, 0]))
@example(([0, 0], [1, 1]))
@example(([0, 1, 0], [1, 1, 1]))
def test_metrics_of_classes_are_scikit_learns(both):
    labels, predicted = map(np.array, both)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of the degenerate ones
        assert glue.accuracy(labels, predicted) == pytest.approx(
            sklearn.metrics.accuracy_score(*both), abs=1e-12
        )
        assert glue.f1(labels, predicted) == pytest.approx(
            sklearn.metrics.f1_score(*both), abs=1e-12
        )
        assert glue.matthews(labels, predicted) == pytest.approx(
            sklearn.metrics.matthews_corrcoef(*both), abs=1e-12
        )


def test_matthews_of_a_large_set():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(
        0, 2, (2, 400_000)
    )  # the four sums multiply to 10^21: int64 would overflow
    wanted = sklearn.metrics.matthews_corrcoef(labels, predicted)
    assert glue.matthews(labels, predicted) == pytest.approx(wanted, abs=1e-12)


@settings(deadline=None)
@given(scores)
@example(([1.0, 2.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]))
@example(([1.0, 1.0, 1.0], [1.0, 2.0, 2.0]))
@example(([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
def test_correlations_are_scipys(both):
    labels, predicted = map(np.array, both)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ours, theirs in (
            (glue.pearson, scipy.stats.pearsonr),
            (glue.spearman, scipy.stats.spearmanr),
        ):
            assert ours(labels, predicted) == pytest.approx(
                theirs(*both).statistic, abs=1e-12, nan_ok=True
            )


def test_scores_are_percentages_and_constant_answers_earn_nothing():
    labels, outputs = np.array([0.0, 2.5, 5.0]), np.array([[1.0], [2.0], [4.0]])
    wanted = 100 * scipy.stats.pearsonr(labels, outputs[:, 0]).statistic
    assert glue.score("stsb", labels, outputs) == {
        "pearson": pytest.approx(wanted),
        "spearman": pytest.approx(100),
    }
    assert glue.score("stsb", labels, np.ones((3, 1))) == {"pearson": 0, "spearman": 0}
    assert glue.score("mrpc", np.array([1, 0, 1]), np.array([[0, 1], [0, 1], [1, 0]])) == {
        "f1": pytest.approx(50),
        "accuracy": pytest.approx(100 / 3),
    }


def test_every_official_file_is_read(glue_files):
    folder, written = glue_files
    for name, task in glue.TASKS.items():
        for split in task.rows:
            texts, labels = glue.read(name, split, folder)
            wanted = written[task.folder, split]
            assert texts == [pair for pair, _ in wanted]
            if split.startswith("test"):
                assert labels is None
            elif name == "stsb":
                assert labels.dtype.kind == "f" and labels.tolist() == [
                    float(label) for _, label in wanted
                ]
            else:
                assert [task.labels[n] for n in labels] == [label for _, label in wanted]
    texts, labels = glue.read("ax", "diagnostic", folder)
    assert labels is None and all(a == b for a, b in texts)


ROWS = [
    ('"an opening quote', "and a \x85 strange\u2028line end"),
    ('two "" marks"', "x"),
    ("", "an empty first"),
    ("é", "ü \x1c"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_nothing_in_a_line_is_special_but_tabs(tmp_path, packed, end):
    lines = [
        "index\tsentence1\tsentence2\tlabel",
        *(f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(ROWS)),
    ]
    data = end.join(lines).encode()  # without a line end behind the last
    (tmp_path / "RTE").mkdir()
    path = tmp_path / "RTE" / ("dev.tsv.gz" if packed else "dev.tsv")
    path.write_bytes(gzip.compress(data) if packed else data)
    texts, labels = glue.read("rte", "dev", tmp_path)
    assert texts == ROWS and labels.tolist() == [0] * len(ROWS)


def test_rows_with_too_few_columns_are_left_out_of_qqp_but_for_its_test_set(tmp_path, capsys):
    lines = [
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "0\t1\t2\ta\tb\t1",
        "1\t1\t2\ta",
        "2\t1\t2\tc\td\t0",
    ]
    (tmp_path / "QQP").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"QQP/{split}.tsv").write_text("\n".join(lines))
    for split in ("train", "dev"):
        texts, labels = glue.read("qqp", split, tmp_path)
        assert texts == [("a", "b"), ("c", "d")] and labels.tolist() == [1, 0]
        assert "left out 1 rows" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"test.tsv, line 3: 4 columns where the header has 6"):
        glue.read("qqp", "test", tmp_path)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("rte", "index\tsentence1\tsentence2\tlabel\n", "there is not one row in it"),
        ("rte", "", "has no column 'sentence1'"),
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe",
            "line 2: label 'maybe' is not entailment",
        ),
        ("sst2", "sentence\tlabel\na\t1\nb\t2", "line 3: label '2' is not 0 or 1"),
        (
            "stsb",
            "sentence1\tsentence2\tscore\na\tb\t5.1",
            "label '5.1' is not a number from 0 to 5",
        ),
        (
            "stsb",
            "sentence1\tsentence2\tscore\na\tb\tnan",
            "label 'nan' is not a number from 0 to 5",
        ),
        ("cola", "gj04\t1\t\tA sentence.\ngj04\t3\t\tAnother.", "line 2: label '3' is not 0 or 1"),
        ("rte", b"\xff\xfe", "is damaged"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, task, content, message):
    path = tmp_path / glue.TASKS[task].folder / "dev.tsv"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as e:
        glue.read(task, "dev", tmp_path)
    assert (
        message in str(e.value)
        and glue.TASKS[task].folder in str(e.value)
        and "\n" not in str(e.value)
    )
    with pytest.raises(FileNotFoundError, match=r"train\.tsv not found"):
        glue.read(task, "train", tmp_path)


def test_the_hubs_form_gives_the_same(glue_files, monkeypatch):
    """datasets.Dataset objects with the columns and label numbers of nyu-mll/glue, in place of a network."""
    folder, written = glue_files
    columns = {
        "mnli": ("premise", "hypothesis"),
        "ax": ("premise", "hypothesis"),
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
        if name == "ax":
            return datasets.Dataset.from_dict(
                {"premise": ["a"], "hypothesis": ["b"], "label": [-1], "idx": [0]}
            )
        rows = written[glue.TASKS[name].folder, split.replace("validation", "dev")]
        texts = zip(*(pair for pair, _ in rows), strict=True)
        data = dict(
            zip(columns.get(name, ("sentence1", "sentence2")), map(list, texts), strict=True)
        )
        number = float if name == "stsb" else names.get(name, ["0", "1"]).index
        data["label"] = [-1 if label is None else number(label) for _, label in rows]
        return datasets.Dataset.from_dict(data | {"idx": list(range(len(rows)))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, task in glue.TASKS.items():
        for split in task.rows:
            texts, labels = glue.read(name, split, "")
            wanted_texts, wanted_labels = glue.read(name, split, folder)
            assert texts == wanted_texts and np.array_equal(labels, wanted_labels)
    assert glue.read("ax", "diagnostic", "") == ([("a", "b")], None)

    def fails(*args, **kwargs):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(FileNotFoundError) as e:
        glue.read("rte", "train", "")
    assert (
        "no route to host" in str(e.value)
        and "--glue_dir" in str(e.value)
        and "\n" not in str(e.value)
    )


@needs_glue
def test_the_official_files_have_their_official_sizes():
    seen = 0
    for name, task in glue.TASKS.items():
        for split, n in task.rows.items():
            try:
                texts, labels = glue.read(name, split, OFFICIAL)
            except FileNotFoundError:
                continue
            assert len(texts) == n and (labels is None or len(labels) == n), (name, split)
            path = OFFICIAL / task.folder / f"{split}.tsv"
            with open(path, newline="", encoding="utf-8-sig") as f:
                rows = list(csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE))[
                    -n:
                ]  # without the header
            column = {
                text: rows[0].index(text) for text in texts[0]
            }  # where the texts of the first row stand
            assert texts == [tuple(row[column[text]] for text in texts[0]) for row in rows]
            if labels is not None:
                at = 1 if name == "cola" else 0 if name == "mrpc" else -1
                wanted = [
                    float(row[at]) if name == "stsb" else task.labels.index(row[at]) for row in rows
                ]
                assert labels.tolist() == wanted
            seen += 1
    assert seen >= 22
    assert len(glue.read("ax", "diagnostic", OFFICIAL)[0]) == 1104
    _, labels = glue.read("mnli", "dev_matched", OFFICIAL)
    assert np.bincount(labels).tolist() == [3479, 3123, 3213]  # entailment, neutral, contradiction
    _, labels = glue.read("mnli", "dev_mismatched", OFFICIAL)
    assert np.bincount(labels).tolist() == [3463, 3129, 3240]


def runs(**scores):
    """One run for each task, of the official size."""
    rows = {
        name: {s: n for s, n in task.rows.items() if "test" not in s}
        for name, task in glue.TASKS.items()
    }
    facts = {
        "seed": 0,
        "data": "official",
        "rows_per_second": 1.0,
        "padded": 0.0,
        "predictions": {},
    }
    facts |= {"date": "2026-01-01", "device": "cpu"}
    return [{"task": name, "rows": rows[name], "scores": s, **facts} for name, s in scores.items()]


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


def test_the_three_averages():
    nine = (50 + 90 + 88 + 86 + 87 + 82 + 83 + 89 + 60) / 9
    eight = (50 + 90 + (88 + 84) / 2 + (86 + 85) / 2 + (87 + 90) / 2 + (82 + 83) / 2 + 89 + 60) / 8
    found = glue.means(glue.medians(runs(**FULL, wnli={"accuracy": 1.0})))
    assert found["mean of 9"] == (pytest.approx(nine), 9, 9)
    assert found["without CoLA"] == (pytest.approx((nine * 9 - 50) / 8), 8, 8)
    assert found["mean of 8 tasks"] == (pytest.approx(eight), 8, 8)
    some = glue.means(glue.medians(runs(mnli=FULL["mnli"], cola=FULL["cola"])))
    assert some["mean of 9"] == (pytest.approx((50 + 82 + 83) / 3), 3, 9)
    assert some["mean of 8 tasks"] == (pytest.approx((50 + 82.5) / 2), 2, 8)
    assert glue.means({})["mean of 9"] == (None, 0, 9)


def test_the_published_means_are_the_mean_of_nine():
    full = [(nine, mean) for _, nine, mean in glue.REFERENCES if None not in nine]
    assert len(full) == 3
    for nine, mean in full:
        assert np.mean(nine) == pytest.approx(mean, abs=0.1)


def test_the_mean_without_cola_is_whole_when_only_cola_is_partial():
    partial = [
        run | {"rows": run["rows"] | ({"train": 100} if run["task"] == "cola" else {})}
        for run in runs(**FULL)
    ]
    (line,) = [line for line in glue.table({"part": partial}) if line.startswith("part")]
    assert "50.0*" in line and "79.4*" in line and " 83.1 " in line


def test_medians_are_taken_score_by_score():
    values = [{"f1": f, "accuracy": 100 - f} for f in (70.0, 90.0, 80.0)]
    three = [run | {"seed": i} for i, value in enumerate(values) for run in runs(mrpc=value)]
    assert glue.medians(three) == {"mrpc": {"f1": 80.0, "accuracy": 20.0}}
    assert glue.medians(three[:2]) == {"mrpc": {"f1": 80.0, "accuracy": 20.0}}
    other = [run | {"data": "another"} for run in runs(mrpc={"f1": 1.0, "accuracy": 2.0})]
    assert glue.medians(three + other) == {
        "mrpc": {"f1": 1.0, "accuracy": 2.0}
    }  # never of different data


def test_the_table_marks_what_is_partial():
    partial = [
        run | {"rows": run["rows"] | ({"train": 100} if run["task"] == "qqp" else {})}
        for run in runs(**FULL)
    ]
    results = {"whole": runs(**FULL), "part": partial, "rest": runs(rte=FULL["rte"])}
    whole, part, rest = (
        next(line for line in glue.table(results) if line.startswith(k)) for k in results
    )
    assert "*" not in whole and " of " not in whole and "79.4" in whole
    assert "87.0*" in part and "82.0*" not in part and part.count("79.4*") == 1
    assert "60.0 (1 of 9)" in rest and "60.0 (1 of 8)" in rest
    text = "\n".join(glue.table(results))
    assert "* QQP: train: 100 of 363,846 rows" in text and "(n of m): a partial mean" in text
    page = glue.page(results)
    for heading in (
        "## whole",
        "| RoBERTa-base † ",
        "whole; seeds: 1",
        " spearman |",
        "\\* QQP: train: 100 of",
    ):
        assert heading in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {14, 11}  # as many cells in every row of a table


def test_a_submission_has_the_official_rows_and_labels(tmp_path, capsys):
    rng, runs = np.random.default_rng(0), {}
    assert sorted(glue.SUBMISSION) == sorted(LEADERBOARD)
    for name, (task, split) in glue.SUBMISSION.items():
        run = runs.setdefault(
            task, {"task": task, "seed": 0, "data": 0, "scores": {"any": 1.0}, "predictions": {}}
        )
        run["predictions"][name] = ""
        task = glue.AX if name == "AX.tsv" else glue.TASKS[task]
        n = task.rows[split]
        assert n == LEADERBOARD[name][0]
        outputs = rng.normal(2, 3, (n, task.n_outputs))
        path = tmp_path / "seed0" / name
        glue.write_predictions(path, task, outputs)
        words = [line.split("\t")[1] for line in path.read_text().splitlines()[1:]]
        if task.labels:
            assert [task.labels.index(w) for w in words] == outputs.argmax(1).tolist()
            assert {*words} == LEADERBOARD[name][1]
        else:
            assert [float(w) for w in words] == pytest.approx(
                np.clip(outputs[:, 0], 0, 5), abs=5.1e-4
            )
    glue.write_submission(tmp_path, runs.values())
    assert "also wants" not in capsys.readouterr().out
    check_submission(tmp_path / "submission.zip", {name: n for name, (n, _) in LEADERBOARD.items()})


def test_a_submission_takes_the_median_seed_of_those_that_answered(tmp_path, capsys):
    found = [
        {
            "task": "rte",
            "seed": seed,
            "data": 0,
            "scores": {"accuracy": score},
            "predictions": {"RTE.tsv": ""},
        }
        for seed, score in enumerate((55.0, 70.0, 60.0, 99.0, 98.0))
    ]
    for run in found[3:]:
        run["predictions"] = {}
    for seed in range(3):
        glue.write_predictions(
            tmp_path / f"seed{seed}/RTE.tsv", glue.TASKS["rte"], np.eye(2)[[seed % 2]]
        )
    glue.write_submission(tmp_path, found)
    printed = capsys.readouterr().out
    assert "submission.zip: seed2/RTE.tsv" in printed and "also wants CoLA.tsv" in printed
    check_submission(tmp_path / "submission.zip", {"RTE.tsv": 1})
