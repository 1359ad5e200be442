"""Finished runs of train.py beside each other: a table and a picture.

    for o in muon adamw; do
      python train.py config/tiny.py --optimizer=$o --out_dir=out/first/$o
    done
    python results/compare.py out/first/muon out/first/adamw

Runs that differ in nothing but seed and out_dir are one line of the table, under the first one's
name: medians, and the range of the losses. Runs of equal seed, of edited code, have a line each.
Both are written beside the first run, as compare.md and compare.png.
"""

import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from nanocram import runlog, safety

LOSS = "val_loss_15"  # what is compared
HEADING = (
    "| run | parameters | tokens/s | steps | tokens "
    "| held-out loss at 15 % masked | at 25 % | times sooner than the first |"
)


def load_run(folder):
    """(run.json, the rows of log.csv that have held-out losses); exits if there are none."""
    facts = runlog.read_facts(folder)
    rows = [row for row in runlog.read_log(folder) if LOSS in row]
    if not facts or not rows:
        sys.exit(f"{folder} holds no run with held-out losses: name the --out_dir of train.py")
    return facts, rows


def group_seeds(folders):
    """{name: [(facts, rows), ...]} of runs that differ only in their seeds."""
    groups = {}
    for folder in folders:
        facts, rows = load_run(folder)
        # init and micro_batch belong to the way, not to the recipe
        ignored = ("seed", "out_dir", "init", "micro_batch")
        recipe = {name: v for name, v in facts["settings"].items() if name not in ignored}
        recipe = str(sorted(recipe.items())) + facts["device"]
        # equal seeds are of edited code: a line each
        seeds = [other["settings"]["seed"] for _, other, _ in groups.get(recipe, [])]
        if facts["settings"]["seed"] in seeds:
            recipe += folder
        groups.setdefault(recipe, []).append((folder, facts, rows))
    result = {}
    for runs in groups.values():
        name = runs[0][0] + (f", {len(runs)} seeds" if len(runs) > 1 else "")
        result[name] = [(facts, rows) for _, facts, rows in runs]
    return result


def time_to(rows, loss):
    """Seconds until the held-out loss, straight between evaluations, first is as low as loss."""
    for before, row in itertools.pairwise(rows):
        if row[LOSS] <= loss < before[LOSS]:
            share = (before[LOSS] - loss) / (before[LOSS] - row[LOSS])
            return before["elapsed_s"] + share * (row["elapsed_s"] - before["elapsed_s"])
    return rows[0]["elapsed_s"]


def times_sooner(rows, other_rows):
    """How many times sooner than another a run is at the lowest loss that both reach."""
    loss = max(min(row[LOSS] for row in log) for log in (rows, other_rows))
    return time_to(other_rows, loss) / time_to(rows, loss)


def table_line(name, runs, first_runs):
    """A line of the table: medians over seeds."""
    ends = [rows[-1] for _, rows in runs]
    losses = [end[LOSS] for end in ends]
    loss = f"{statistics.median(losses):.3f}"
    if len(runs) > 1:
        loss += f" ({min(losses):.3f} to {max(losses):.3f})"
    loss_25 = statistics.median(end["val_loss_25"] for end in ends)
    speed = statistics.median(end["tokens"] / end["elapsed_s"] for end in ends)
    steps = statistics.median(end["step"] for end in ends)
    tokens = statistics.median(end["tokens"] for end in ends)
    # each seed beside one of the first line's
    pairs = zip(runs, first_runs, strict=False)
    sooner = statistics.median(times_sooner(rows, first) for (_, rows), (_, first) in pairs)
    return (
        f"| {name} | {runs[0][0]['parameters'] / 1e6:.1f}M | {speed:,.0f} | {steps:,.0f} "
        f"| {tokens / 1e6:.1f}M | {loss} | {loss_25:.3f} | {sooner:.2f} |"
    )


def draw(groups, path):
    """Held-out losses by time and by tokens."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("no picture: pip install matplotlib")
    figure = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    panels = {"elapsed_s": "seconds", "tokens": "tokens"}
    for axes, column in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for i, (name, runs) in enumerate(groups.items()):
            for number, (_, rows) in enumerate(runs):
                begun = [row for row in rows if row["tokens"]]  # a logarithmic axis has no 0
                points = [row[column] for row in begun], [row[LOSS] for row in begun]
                axes.plot(*points, color=f"C{i}", lw=1.2, label=None if number else name)
        axes.set(xscale="log", xlabel=panels[column])
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("held-out loss at 15 % masked (nats)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    safety.write_beside(path, lambda temporary: figure.savefig(temporary, format="png"))


def main():
    folders = sys.argv[1:]
    if not folders or folders[0].startswith("-"):
        sys.exit(__doc__.strip())
    groups = group_seeds(folders)
    runs = [run for runs in groups.values() for run in runs]
    if len({facts["data"] for facts, _ in runs}) > 1:
        print("WARNING: the runs have different data: their losses do not compare")
    first_runs = next(iter(groups.values()))
    lines = [HEADING, "| --- |" + " ---: |" * 7]
    lines += [table_line(name, runs, first_runs) for name, runs in groups.items()]
    table = "\n".join(lines)
    beside = Path(folders[0]).absolute().parent
    print(f"{table}\n\n{beside}: compare.md (this table), compare.png")
    safety.write_text(beside / "compare.md", table + "\n")
    draw(groups, beside / "compare.png")


if __name__ == "__main__":
    main()
