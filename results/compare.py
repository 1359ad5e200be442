"""Variants of a training run beside each other: losses, differences with their errors, a picture.

    python results/compare.py base='out/base/*' lion='out/lion/*'    # NAME=PATTERN of runs
    python results/compare.py out/base out/lion                      # folders of runs, or runs

A run is an out_dir of train.py. Runs given without a name form one variant if only their seeds
differ. Each variant is compared with the first one, over the seeds that both have: the mean
difference ± its standard error; "better" and "worse" are by Student's t (two-sided, 0.05).
compare.md, compare.png go into the folder that holds all the runs.
"""

import contextlib
import glob
import itertools
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
from scipy import stats

from nanocram import safety
from nanocram.facts import read_facts
from nanocram.runlog import read_log

LOSS = "val_loss_15"  # what is compared
# Runs are equally long from this share on. By the clock both had their whole budget; 1 % of the
# tokens of a short run may be worth 0.01 nats.
EQUAL = {"elapsed_s": 0.95, "tokens": 0.99}
WIDEST = 0.25  # share of a run between two evaluations that a straight line may cross
# what run.json must have; those of older versions may lack some
NEEDED = "began_from code data device finished_at_step frequency_loss held_out parameters".split()
# settings in which the runs of a variant may differ
FREE = "seed out_dir init micro_batch checkpoint_minutes snapshots wandb_project".split()
HEADING = (
    "| variant | seeds | parameters | tokens/s, all in | steps | tokens | held-out loss at 15 % "
    "| difference at equal clock | at equal tokens |"
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

    @property
    def changed(self):
        """The settings that a resume changed, as far as they matter."""
        changed = set(self.facts.get("changed_at_resume", []))
        return sorted(changed - {*FREE})

    def flaw(self):
        """Why it cannot be compared; "" if it can."""
        facts, settings = self.facts, self.facts.get("settings", {})
        if not facts:
            return "has a damaged run.json"
        if facts.get("finished_at_step", 0) is None:
            return "is unfinished"
        missing = [name for name in NEEDED if facts.get(name) is None]
        missing += [name for name in ("seed", "eval_rows") if name not in settings]
        if missing:
            return f"has no run.json of this version: {missing[0]} is missing"
        last, wanted = self.evals[-1]["step"] if self.evals else 0, facts["finished_at_step"]
        if last > wanted:  # it was resumed
            return "is unfinished"
        if last < wanted:
            return "has a log.csv without the end, or one that cannot be read"
        if not all(math.isfinite(line[LOSS]) for line in self.evals):
            return "diverged"
        is_mixed = "seed" in self.facts.get("changed_at_resume", [])
        return "got another seed at a resume" if is_mixed else ""

    def kind(self):
        """{name: value} of all in which runs of one variant should not differ."""
        facts = self.facts
        kind = {k: v for k, v in facts.get("settings", {}).items() if k not in FREE}
        kind |= {name: facts.get(name) for name in ("data", "device", "code")}
        return kind | {"init": facts.get("began_from"), "what a resume changed": self.changed}


def find_runs(argument):
    """(name or '', [Run]) of a command's argument; exits if none of them is finished."""
    name, _, pattern = argument.partition("=")
    if not pattern or "/" in name or os.path.exists(argument):
        name, pattern = "", argument
    runs, is_single = [], False
    exact = glob.glob(pattern.replace("[", "[[]"))  # of a folder lr[1e-3]
    for path in sorted(exact or glob.glob(pattern)):
        is_run = os.path.exists(f"{path}/run.json")
        is_single |= is_run
        for folder in [path] if is_run else sorted(glob.glob(f"{glob.escape(path)}/*")):
            if os.path.exists(f"{folder}/run.json"):
                lines = [line for line in read_log(folder) if {LOSS, "tokens"} <= line.keys()]
                evals = [line for line in lines if line["step"]]
                runs.append(Run(folder, read_facts(folder), evals))
    if not runs:
        sys.exit(f"{pattern} holds no run: name out_dirs of train.py, as in base='out/base/*'")
    if all(run.flaw() for run in runs):
        sys.exit(f"{pattern} has no whole run: {runs[0].folder} {runs[0].flaw()}; leave them out")
    return name or ("" if is_single else pattern), runs


def find_variants(arguments):
    """({name: its runs, by seed}, {name: folders that cannot be compared, and why}); exits if a
    seed is there twice."""
    variants, names, flawed = {}, {}, {}
    for name, runs in map(find_runs, arguments):
        for run in runs:
            # without a name runs of one kind are a variant, called after the first one
            called = name or names.setdefault(str(sorted(run.kind().items())), run.folder)
            if not (name or run.facts):
                called = "every variant"  # for it may have been one of any
            if flaw := run.flaw():
                flawed.setdefault(called, []).append(f"{run.folder} ({flaw})")
            else:
                variants.setdefault(called, []).append(run)
    for name, runs in variants.items():
        runs.sort(key=lambda run: run.seed)
        for one, other in itertools.pairwise(runs):
            if one.seed == other.seed:
                which = f"{name} has seed {one.seed} twice, in {one.folder} and {other.folder}"
                sys.exit(f"{which}: leave one out, or give each variant a name: base='out/base/*'")
    return variants, flawed


def difference(run, base, column):
    """(loss of run less that of base where both have come equally far by column, the share of its
    schedule that the longer run had done there). NaN where its evaluations are too far apart."""
    at = min(run.end[column], base.end[column])
    losses, shares = [], []
    for one in (run, base):
        x = np.array([line[column] for line in one.evals])
        y = np.array([line[LOSS] for line in one.evals])
        share = at / x[-1]
        if share > EQUAL[column]:
            loss, share = y[-1], 1.0
        else:
            i = np.searchsorted(x, at)
            near = i > 0 and x[i] - x[i - 1] <= WIDEST * x[-1]
            loss = np.interp(at, x, y) if near else np.nan
        losses.append(loss)
        shares.append(share)
    return losses[0] - losses[1], min(shares)


def pairs(runs, base_runs):
    """[(run, run of the base)] of the seeds that both have."""
    of_base = {run.seed: run for run in base_runs}
    return [(run, of_base[run.seed]) for run in runs if run.seed in of_base]


def compare(runs, base_runs, column, is_whole):
    """A cell of the table: what runs differ from the base by, and whether that can be believed,
    which it cannot where runs are missing."""
    found = [difference(*pair, column) for pair in pairs(runs, base_runs)]
    if not found:
        return "no seed in common"
    values, shares = zip(*found, strict=True)
    if np.isnan(values).any():
        return "unknown: it takes more --evals"
    said = f"{np.mean(values):+.3f}"
    if len(values) > 1:
        said += f" ± {stats.sem(values):.3f} of {len(values)} pairs"
    if min(shares) < 1:
        return f"{said}; no verdict, for the longer run was only {min(shares) * 100:.0f} % done"
    if len(values) == 1 or not is_whole:
        return f"{said}; no verdict, for {'it is one pair' if is_whole else 'runs are missing'}"
    # of equal pairs t is 0 / 0
    is_believed = np.any(values) and stats.ttest_1samp(values, 0).pvalue < 0.05
    which = "better" if np.mean(values) < 0 else "worse"
    return f"{said}: {which if is_believed else 'cannot be told apart'}"


def table_line(name, runs, base_runs, is_whole):
    """A line of the table: means over seeds."""
    losses = [run.end[LOSS] for run in runs]
    loss = f"{np.mean(losses):.3f}"
    if len(runs) > 1:
        loss += f" ({min(losses):.3f} to {max(losses):.3f})"
    cells = [name, f"{len(runs)}", f"{runs[0].facts['parameters'] / 1e6:.1f}M"]
    cells += [f"{np.mean([speed(run) for run in runs]):,.0f}"]
    cells += [f"{np.mean([run.end['step'] for run in runs]):,.0f}"]
    cells += [f"{np.mean([run.end['tokens'] for run in runs]) / 1e6:.1f}M", loss]
    is_base = runs is base_runs
    cells += ["–" if is_base else compare(runs, base_runs, c, is_whole) for c in EQUAL]
    return f"| {' | '.join(cells)} |"


def speed(run):
    """Tokens per second of the whole budget, with compiling, evaluations and saves."""
    return run.end["tokens"] / run.end["elapsed_s"]


def warnings(variants, flawed):
    """What would mislead."""
    for name, folders in flawed.items():
        yield f"left out of {name}: {', '.join(folders)}"
    everyone = [run for runs in variants.values() for run in runs]
    if len({run.facts["data"] for run in everyone}) > 1:
        yield "the runs were trained on different data"
    rows = {(run.facts["held_out"], run.facts["settings"]["eval_rows"]) for run in everyone}
    if len(rows) > 1:
        yield "the runs have different held-out rows: their losses do not compare"
    if len({run.facts["device"] for run in everyone}) > 1:
        yield "the runs had different devices: equal clock is not equal work"
    base_runs, *_ = variants.values()
    for name, runs in variants.items():
        kinds = [run.kind() for run in runs]
        differs = [k for k in kinds[0] if len({str(kind.get(k)) for kind in kinds}) > 1]
        if differs:
            yield f"the runs of {name} differ in {', '.join(differs)}"
        if changed := sorted({key for run in runs for key in run.changed}):
            yield f"of {name} a resume changed {', '.join(changed)}"
        speeds = [speed(run) for run in runs]
        if max(speeds) > 1.1 * min(speeds):
            span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
            what_helps = "repeat it on an idle machine, or with --max_steps"
            yield f"{name} has {span} tokens/s, so equal clock is not equal work: {what_helps}"
        alone = {run.seed for run in runs} ^ {run.seed for run in base_runs}
        if alone:
            yield f"{name} and the first variant do not both have seeds {sorted(alone)}"
        if runs is not base_runs and kinds[0] == base_runs[0].kind():
            yield f"{name} has the code and the settings of the first variant"
        by_frequency = [run.facts["frequency_loss"] for run in runs]
        if any(run.end[LOSS] >= b for run, b in zip(runs, by_frequency, strict=True)):
            yield f"{name} guesses no better than by token frequency: train longer"
    if len(variants) > 2:
        yield "of many variants one may look better by chance: about one in twenty"


@safety.extra("compare.png")
def draw(variants, path):
    """Held-out losses by time and by tokens; the differences, seed by seed."""
    from matplotlib.figure import Figure

    base_runs, *_ = variants.values()
    beside = {name: pairs(runs, base_runs) for name, runs in list(variants.items())[1:]}
    beside = {name: found for name, found in beside.items() if found}
    n_panels = 3 if beside else 2
    figure = Figure(figsize=(4.4 * n_panels, 4.2), dpi=120, layout="constrained")
    by_time, by_tokens, *others = figure.subplots(1, n_panels)
    for i, (name, runs) in enumerate(variants.items()):
        style = {"color": f"C{i % 10}", "lw": 1.2, "marker": "o", "ms": 3}
        for number, run in enumerate(runs):
            losses = [line[LOSS] for line in run.evals]
            for axes, column in ((by_time, "elapsed_s"), (by_tokens, "tokens")):
                x = [line[column] for line in run.evals]
                axes.plot(x, losses, label=None if number else name, **style)
    by_time.set(xscale="log", xlabel="seconds", ylabel="held-out loss at 15 % masked (nats)")
    by_tokens.set(xscale="log", xlabel="tokens")
    by_time.legend(frameon=False, fontsize=8)
    for axes in others:
        axes.axhline(0, color="0.5", lw=1)
        for i, found in enumerate(beside.values()):
            values = [run.end[LOSS] - base.end[LOSS] for run, base in found]
            axes.plot(np.full(len(values), i), values, "o", color="0.5")
            error = stats.sem(values) if len(values) > 1 else 0
            axes.errorbar(i + 0.15, np.mean(values), error, fmt="s", color="k", capsize=4)
        axes.set_xticks(range(len(beside)), beside)
        axes.set(xlim=(-0.5, len(beside) - 0.5), ylabel="last loss less the first variant's (nats)")
        axes.set_title("a dot a seed; ■ their mean ± its error", fontsize=9)
    for axes in figure.axes:
        axes.grid(alpha=0.25, which="both")
        axes.tick_params(which="both", labelsize=8)
    safety.write_beside(path, lambda temporary: figure.savefig(temporary, format="png"))


def main():
    with contextlib.suppress(AttributeError):  # a notebook's takes any character
        sys.stdout.reconfigure(errors="replace")
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__.strip())
    variants, flawed = find_variants(arguments)
    base, *_ = variants
    lines = [HEADING, "| --- |" + " ---: |" * 8]
    for name, runs in variants.items():
        is_whole = not flawed.keys() & {name, base, "every variant"}
        lines.append(table_line(name, runs, variants[base], is_whole))
    lines += ["", *(f"WARNING: {said}" for said in warnings(variants, flawed))]
    table = "\n".join(lines)
    parents = [Path(run.folder).resolve().parent for runs in variants.values() for run in runs]
    folder = Path(os.path.commonpath(parents))
    if folder == folder.parent:  # of two disks, say
        folder = parents[0]
    print(table)
    with safety.extra("compare.md"):
        safety.write_text(folder / "compare.md", table + "\n")
        print(f"{folder}: compare.md (this table), compare.png")
    draw(variants, folder / "compare.png")


if __name__ == "__main__":
    main()
