"""GLUE's metrics beside scikit-learn's, its files with their traps, its table and store."""

import json
import multiprocessing

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from conftest import table_cells

from nanocram import glue


def found(name, labels, answers):
    """The scores of answers, numbers of classes or values."""
    answers = np.array(answers)
    outputs = answers[:, None] if name == "stsb" else np.eye(2)[answers]
    scores = glue.score(name, np.array(labels), outputs)
    assert all(type(value) is float for value in scores.values())  # as JSON wants them
    return scores


@pytest.mark.filterwarnings("error")
def test_metrics_are_scikit_learns_and_scipys():
    rng = np.random.default_rng(0)
    many = rng.integers(0, 2, (2, 400_000))  # MCC's four sums multiply to 10^21
    for labels, answers in (many, ([0, 1], [0, 0]), ([0, 1], [1, 1]), ([0, 0], [1, 1])):
        mrpc = found("mrpc", labels, answers)
        f1 = sklearn.metrics.f1_score(labels, answers, zero_division=0)
        accuracy = sklearn.metrics.accuracy_score(labels, answers)
        assert mrpc == pytest.approx({"f1": 100 * f1, "accuracy": 100 * accuracy})
        matthews = 100 * sklearn.metrics.matthews_corrcoef(labels, answers)
        assert found("cola", labels, answers)["matthews"] == pytest.approx(matthews, rel=1e-6)
    scores, predicted = rng.normal(size=(2, 1000)).round(1)
    stsb = found("stsb", scores, predicted)
    assert stsb["pearson"] == pytest.approx(100 * np.corrcoef(scores, predicted)[0, 1])
    ranks = [scipy.stats.rankdata(values) for values in (scores, predicted)]
    assert stsb["spearman"] == pytest.approx(100 * np.corrcoef(*ranks)[0, 1])
    assert found("stsb", scores, np.ones(1000)) == {"pearson": 0.0, "spearman": 0.0}


def test_every_official_file_is_read(glue_files):
    folder, written = glue_files
    for name, task in glue.TASKS.items():
        for split in task.rows:
            texts, labels = glue.read(name, split, folder)
            names = [task.labels[n] if task.labels else f"{n:.3f}" for n in labels]
            assert list(zip(texts, names, strict=True)) == written[task.folder, split]
            assert labels.dtype == (np.int64 if task.labels else np.float64)


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_nothing_in_a_line_is_special_but_tabs(tmp_path, end):
    rows = [('"an opening quote', "and a \x85 strange\u2028line end"), ('two "" marks"', "")]
    lines = ["index\tsentence1\tsentence2\tlabel", "9\ttoo few columns"]  # as QQP has a few
    lines += [f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(rows)]
    data = end.join(lines).encode()  # without a line end behind the last
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE/dev.tsv").write_bytes(data)
    texts, labels = glue.read("rte", "dev", tmp_path)
    assert texts == rows and labels.tolist() == [0] * len(rows)


BROKEN = [("rte", "0\ta\tb\tmaybe", "line 2"), ("stsb", "0\ta\tb\tnan", "line 2.*nan")]


@pytest.mark.parametrize(("task", "rows", "named"), [("rte", "", "0 whole rows"), *BROKEN])
def test_a_broken_file_is_one_line(tmp_path, task, rows, named):
    path = tmp_path / glue.TASKS[task].folder / "dev.tsv"
    path.parent.mkdir()
    path.write_text(f"index\tsentence1\tsentence2\t{glue.TASKS[task].label}\n{rows}")
    with pytest.raises(SystemExit, match=f"^.*{path.parent.name}.*{named}.*$"):
        glue.read(task, "dev", tmp_path)


def runs(name="x", seed=0, **scores):
    """One run for each task, of the official size."""
    official = {"name": name, "seed": seed, "in_train": {}, "data": "official"}
    return [
        official | {"task": task, "rows": glue.TASKS[task].rows, "scores": values}
        for task, values in scores.items()
    ]


def cells(name, some_runs):
    """The cells of a line of the table, by the heading of their column."""
    (line,) = [line for line in table_cells(glue.table(some_runs)) if line[0].startswith(name)]
    return dict(zip(["name", *glue.NINE, "mean of 9"], line, strict=True))


def test_the_mean_is_of_the_nine_numbers_and_what_is_partial_is_marked():
    full = {"cola": {"matthews": 50.0}, "sst2": {"accuracy": 90.0}}
    full |= {"mrpc": {"f1": 88.0, "accuracy": 84.0}, "stsb": {"pearson": 86.0, "spearman": 85.0}}
    full |= {"qqp": {"f1": 87.0, "accuracy": 90.0}, "mnli": {"accuracy": 82.0, "accuracy_mm": 83.0}}
    full |= {"qnli": {"accuracy": 89.0}, "rte": {"accuracy": 60.0}}
    row = cells("x", runs(**full, wnli={"accuracy": 1.0}))
    assert row["mean of 9"] == f"{(50 + 90 + 88 + 86 + 87 + 82 + 83 + 89 + 60) / 9:.1f}"
    assert row["MRPC"] == "88.0" and row["MNLI-mm"] == "83.0" and row["RTE"] == "60.0"
    some = cells("x", runs(mnli=full["mnli"], cola=full["cola"]))
    assert some["mean of 9"] == f"{(50 + 82 + 83) / 3:.1f} (3 of 9)" and some["RTE"] == "–"
    partial = runs(**full)
    partial[4]["rows"] = {"train": 100, "dev": 40430}
    row = cells("x", partial)
    assert (row["QQP"], row["MNLI-m"], row["mean of 9"]) == ("87.0*", "82.0", "79.4*")
    assert "QQP: 100 train rows; the official file has 363,846" in glue.table(partial)
    # more rows than official, and a dev set that was trained on, are no protocol either
    partial[2]["rows"] = {"train": 4076, "dev": 408}
    one = [("c", "d")], np.zeros(1)
    found = glue.facts({"train": ([("a", "b"), *one[0]], np.zeros(2)), "dev": one})
    partial[3] |= {"in_train": {"dev": 1500 * found["in_train"]["dev"]}}
    row = cells("x", partial)
    assert (row["MRPC"], row["STS-B"], row["RTE"]) == ("88.0*", "86.0*", "60.0")
    assert "STS-B: 1,500 of 1,500 dev rows are in train" in glue.table(partial)
    # medians never mix runs on several sets of data: those on the last one count
    mixed = [run for score in (99.0, 60.0, 98.0) for run in runs(rte={"accuracy": score})]
    mixed[1] |= {"data": "other", "constant": True}
    assert cells("x", mixed[:2])["RTE"] == "60.0*" and cells("x", mixed)["RTE"] == "98.5"
    assert "RTE: 1 of 1 seeds gave each row the same answer" in glue.table(mixed[:2])
    # medians are over seeds and score by score
    three = []
    for seed, matched in enumerate((70.0, 95.0, 80.0)):
        three += runs(seed=seed, mnli={"accuracy": matched, "accuracy_mm": 100 - matched})
    row = cells("x", three)
    assert row["MNLI-m"] == "80.0" and row["MNLI-mm"] == "20.0" and row["name"] == "x; seeds: 3"
    three[0]["scores"] = {}  # it diverged
    assert cells("x", three)["MNLI-m"] == "87.5*"


def add_one(folder, seed, accuracy=50.0):
    glue.add_runs(folder, *runs(seed=seed, rte={"accuracy": accuracy}))


def test_processes_that_add_runs_at_once_lose_none(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(add_one, [(tmp_path, seed) for seed in range(30)])
    assert sorted(run["seed"] for run in glue.read_runs(tmp_path).values()) == [*range(30)]
    assert "; seeds: 30 " in (tmp_path / "glue.md").read_text()
    # one that is added again replaces the first
    for seed in range(20):
        add_one(tmp_path, seed, 60.0)
    path, stored = tmp_path / "glue.jsonl", [*glue.read_runs(tmp_path).values()]
    assert [json.loads(line) for line in path.read_text().splitlines()] == stored
    assert sum(run["scores"]["accuracy"] for run in stored) == 20 * 60 + 10 * 50
    assert "; seeds: 30 " in glue.table(stored) and cells("x", stored)["RTE"] == "60.0"
    # a line that is no run is named, and stays
    path.write_text("precious\n")
    with pytest.raises(SystemExit, match="line 1 is no run"):
        add_one(tmp_path, 0)
    assert path.read_text() == "precious\n"
