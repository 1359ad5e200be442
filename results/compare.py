"""Variants of a training run beside each other: losses, differences with their errors, a picture.

    python results/compare.py base='out/base/*' lion='out/lion/*'    # NAME=PATTERN of runs
    python results/compare.py out/base out/lion                      # folders of runs, or runs

A run is an out_dir of train.py. Single runs without a name that differ in nothing but their seed
are one variant. The others are compared with the first one, seed by seed: the mean difference ± its
standard error. "lower" and "higher" are by Student's t (two-sided, 0.05), over the seeds that both
have. Written into the folder that holds all the runs: compare.md, compare.csv, compare.png.
"""

import csv
import glob
import io
import itertools
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
from scipy import stats

from nanocram import runlog, safety

LOSS = "val_loss_15"  # what is compared
EQUAL = 0.95  # runs whose lengths differ by less are equally long
WIDEST = 0.25  # share of a run between two evaluations that a straight line may cross
# settings that belong to the way or to the machine, not to what is compared
NOT_OURS = ("seed", "out_dir", "init", "micro_batch", "checkpoint_minutes", "wandb_project")
HEADING = (
    "| variant | seeds | parameters | tokens/s, all in | steps | tokens | held-out loss at 15 % "
    "| at 25 % | difference at equal clock | at equal tokens |"
)


@dataclass
class Run:
    """An out_dir of train.py."""

    folder: str
    facts: dict  # run.json
    evals: list  # the lines of log.csv with held-out losses, behind the first step

    @property
    def seed(self):
        return self.facts["settings"]["seed"]

    @property
    def end(self):
        return self.evals[-1]

    def kind(self):
        """{name: value} of all in which runs of one variant should not differ."""
        facts = self.facts
        kind = {k: v for k, v in facts["settings"].items() if k not in NOT_OURS}
        kind |= {name: facts[name] for name in ("data", "device")}
        kind["code"] = facts.get("code", facts["commit"])
        return kind | {"init": facts["began_from"]}


def find_runs(argument):
    """(name or '', [finished Run]) of a command's argument; names the unfinished ones."""
    name, _, pattern = argument.partition("=")
    if not pattern or "/" in name:
        name, pattern = "", argument
    runs, is_single = [], False
    for path in sorted(glob.glob(pattern)):
        is_run = os.path.exists(f"{path}/run.json")
        is_single |= is_run
        for folder in [path] if is_run else sorted(glob.glob(f"{path}/*")):
            if facts := runlog.read_facts(folder):
                lines = runlog.read_log(folder)
                evals = [line for line in lines if LOSS in line and line["step"]]
                runs.append(Run(folder, facts, evals))
    if not runs:
        sys.exit(f"{pattern} holds no run: name the --out_dir of train.py, or a folder of them")
    finished = []
    for run in runs:
        if run.evals and run.facts.get("finished_at_step") == run.end["step"]:
            finished.append(run)
        else:
            print(f"left out: {run.folder} was stopped, or diverged: it has no end")
    return name or ("" if is_single else pattern), finished


def find_variants(arguments):
    """{name: its runs, by seed}; exits if a seed is there twice."""
    variants, names = {}, {}
    for name, runs in map(find_runs, arguments):
        for run in runs:
            # without a name runs of one kind are a variant, called after the first one
            called = name or names.setdefault(str(sorted(run.kind().items())), run.folder)
            variants.setdefault(called, []).append(run)
    for name, runs in variants.items():
        runs.sort(key=lambda run: run.seed)
        for one, other in itertools.pairwise(runs):
            if one.seed == other.seed:
                which = f"{name} has seed {one.seed} twice, in {one.folder} and {other.folder}"
                sys.exit(f"{which}: give each variant a name, as in base='out/base/*'")
    if not variants:
        sys.exit("no run is finished: there is nothing to compare")
    return variants


def difference(run, base, column):
    """(loss of run less that of base where both have come equally far by column, share of its way
    that the longer one has behind it there). NaN where its evaluations are too far apart."""
    at = min(run.end[column], base.end[column])
    losses, shares = [], []
    for one in (run, base):
        x = np.array([line[column] for line in one.evals])
        y = np.array([line[LOSS] for line in one.evals])
        share = at / x[-1]
        if share > EQUAL:
            at_end = 1.0
            loss = y[-1]
        else:
            at_end = share
            i = np.searchsorted(x, at)
            near = i > 0 and x[i] - x[i - 1] <= WIDEST * x[-1]
            loss = np.interp(at, x, y) if near else np.nan
        losses.append(loss)
        shares.append(at_end)
    return losses[0] - losses[1], min(shares)


def pairs(runs, base_runs):
    """[(run, run of the base)] of the seeds that both have."""
    of_base = {run.seed: run for run in base_runs}
    return [(run, of_base[run.seed]) for run in runs if run.seed in of_base]


def compare(runs, base_runs, column):
    """A cell of the table: what runs differ from the base by, and whether that can be believed."""
    found = [difference(*pair, column) for pair in pairs(runs, base_runs)]
    if not found:
        return "no seed in common"
    values, shares = zip(*found, strict=True)
    if np.isnan(values).any():
        return "unknown: it takes more --evals"
    said = f"{np.mean(values):+.3f}"
    if len(values) > 1:
        said += f" ± {stats.sem(values):.3f}"
    if min(shares) < 1:
        return f"{said}, with the longer run only {min(shares) * 100:.0f} % done"
    if len(values) == 1:
        return f"{said}, one pair"
    # of equal pairs t is 0 / 0
    is_believed = np.any(values) and stats.ttest_1samp(values, 0).pvalue < 0.05
    which = "lower" if np.mean(values) < 0 else "higher"
    return f"{said}, {which if is_believed else 'cannot be told apart'}"


def table_line(name, runs, base_runs):
    """A line of the table: medians over seeds."""

    def median(number):
        return statistics.median(number(run) for run in runs)

    losses = [run.end[LOSS] for run in runs]
    loss = f"{statistics.median(losses):.3f}"
    if len(runs) > 1:
        loss += f" ({min(losses):.3f} to {max(losses):.3f})"
    cells = [name, f"{len(runs)}", f"{median(lambda run: run.facts['parameters']) / 1e6:.1f}M"]
    cells += [f"{median(speed):,.0f}", f"{median(lambda run: run.end['step']):,.0f}"]
    cells += [f"{median(lambda run: run.end['tokens']) / 1e6:.1f}M", loss]
    cells += [f"{median(lambda run: run.end['val_loss_25']):.3f}"]
    columns = ("elapsed_s", "tokens")
    is_base = runs is base_runs
    cells += ["–" if is_base else compare(runs, base_runs, column) for column in columns]
    return f"| {' | '.join(cells)} |"


def speed(run):
    """Tokens per second of the whole budget, with compiling, evaluations and saves."""
    return run.end["tokens"] / run.end["elapsed_s"]


def warnings(variants):
    """What would mislead."""
    everyone = [run for runs in variants.values() for run in runs]
    if len({run.facts["data"] for run in everyone}) > 1:
        yield "the runs were trained on different data"
    rows = {(run.facts.get("held_out"), run.facts["settings"]["eval_rows"]) for run in everyone}
    if len(rows) > 1:
        yield "the runs have different held-out rows: their losses do not compare"
    for name, runs in variants.items():
        kinds = [run.kind() for run in runs]
        differs = [k for k in kinds[0] if len({str(kind.get(k)) for kind in kinds}) > 1]
        if differs:
            yield f"the runs of {name} differ in {', '.join(differs)}"
        speeds = [speed(run) for run in runs]
        if max(speeds) > 1.1 * min(speeds):
            span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
            yield f"{name} has {span} tokens/s: equal clock was not equal computing"
        by_frequency = [run.facts.get("frequency_loss", np.inf) for run in runs]
        if any(run.end[LOSS] >= b for run, b in zip(runs, by_frequency, strict=True)):
            yield f"{name} guesses no better than by token frequency: train longer"
    if len(variants) > 2:
        yield "of twenty comparisons without any difference one is called lower or higher"


def draw(variants, path):
    """Held-out losses by time and by tokens; the differences, seed by seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("no picture: pip install matplotlib")
    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    by_time, by_tokens, beside = figure.subplots(1, 3)
    base_runs = next(iter(variants.values()))
    for i, (name, runs) in enumerate(variants.items()):
        style = {"color": f"C{i % 10}", "lw": 1.2, "marker": "o", "ms": 3}
        for number, run in enumerate(runs):
            losses = [line[LOSS] for line in run.evals]
            for axes, column in ((by_time, "elapsed_s"), (by_tokens, "tokens")):
                x = [line[column] for line in run.evals]
                axes.plot(x, losses, label=None if number else name, **style)
        found = [run.end[LOSS] - base.end[LOSS] for run, base in pairs(runs, base_runs)]
        if i and found:
            beside.plot(np.full(len(found), i), found, "o", color=style["color"], alpha=0.5)
            error = stats.sem(found) if len(found) > 1 else 0
            beside.errorbar(i + 0.15, np.mean(found), error, fmt="s", color="k", capsize=4)
    by_time.set(xscale="log", xlabel="seconds", ylabel="held-out loss at 15 % masked (nats)")
    by_tokens.set(xscale="log", xlabel="tokens")
    by_time.legend(frameon=False, fontsize=8)
    beside.axhline(0, color="0.5", lw=1)
    beside.set_xticks(range(1, len(variants)), list(variants)[1:])
    beside.set(xlim=(0.5, len(variants)), ylabel="difference of the last losses (nats)")
    beside.set_title("a dot a seed; ■ their mean ± its error", fontsize=9)
    for axes in figure.axes:
        axes.grid(alpha=0.25, which="both")
    safety.write_beside(path, lambda temporary: figure.savefig(temporary, format="png"))


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__.strip())
    variants = find_variants(arguments)
    base_runs = next(iter(variants.values()))
    lines = [HEADING, "| --- |" + " ---: |" * 9]
    lines += [table_line(name, runs, base_runs) for name, runs in variants.items()]
    lines += ["", *(f"WARNING: {said}" for said in warnings(variants))]
    table = "\n".join(lines)
    parents = [Path(run.folder).resolve().parent for runs in variants.values() for run in runs]
    folder = Path(os.path.commonpath(parents))
    print(f"{table}\n{folder}: compare.md (this table), compare.csv, compare.png")
    safety.write_text(folder / "compare.md", table + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("step", "tokens", "elapsed_s", LOSS, "val_loss_25")
    writer.writerow(["variant", "folder", "seed", *columns])
    for name, runs in variants.items():
        for run in runs:
            writer.writerow([name, run.folder, run.seed, *(run.end[c] for c in columns)])
    safety.write_text(folder / "compare.csv", text.getvalue())
    draw(variants, folder / "compare.png")


if __name__ == "__main__":
    main()
