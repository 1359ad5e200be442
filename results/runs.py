"""How far runs came: held-out nats per character over FLOPs, the picture of the README.

    python results/runs.py    # reads the CSV files that it names, draws runs.png

Lines of runs.csv are the evaluations in the log.csv of two runs. The band is where isoflop.py's
small runs lead, with floors of 0 to 0.5 nats per character.
"""

import csv
from pathlib import Path

import isoflop
import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = {  # {what it is: (its CSV file, its name there)}; a run's log.csv has no names
    "1.0M parameters, 3 minutes of two CPU cores": ("runs", "tiny"),
    "4.7M, an hour of two CPU cores": ("runs", "small"),
    "12.0M, 10 hours of one CPU core, older start": ("ten_hours", None),
    "48.3M, 9 minutes of an H100, older start": ("h100_nine_minutes", None),
}


def evaluations(file, run):
    """(FLOPs, nats per character) of the evaluations of a run, behind the first step."""
    with open(HERE / f"{file}.csv", newline="") as f:
        lines = [line for line in csv.DictReader(f) if line.get("run") == run]
    lines = [line for line in lines if line["val_nats_per_char"] and int(line["step"])]
    return np.array([(float(line["flops"]), float(line["val_nats_per_char"])) for line in lines]).T


def main():
    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    for i, (name, place) in enumerate(RUNS.items()):
        flops, nats = evaluations(*place)
        axes.plot(flops, nats, c=f"C{i}", lw=1.2, label=f"{nats[-1]:.2f}: {name}")
        axes.plot(flops[-1], nats[-1], "o", c=f"C{i}")

    flops = np.geomspace(2e13, isoflop.DAY)
    forecasts = np.array([law(flops) for _, law, _, _ in isoflop.laws()])
    low, *_, high = sorted(forecasts[:, -1])
    said = f"{low:.2f} to {high:.2f}: a day of an RTX 4090, not run, by small runs"
    axes.fill_between(flops, forecasts.min(0), forecasts.max(0), color="0.88", lw=0, label=said)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set(xscale="log", ylim=(0.3, 1.2))
    axes.set(xlabel="FLOPs of training", ylabel="held-out loss, nats per character")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(HERE / "runs.png")


if __name__ == "__main__":
    main()
