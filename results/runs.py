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
NAMES = [
    "3 minutes, two CPU cores\n1.0M parameters",
    "an hour, one CPU core\n4.7M parameters",
    "10 hours, one CPU core, older start\n12.0M parameters",
    "9 minutes, one H100, older start\n48.3M parameters",
]


def evaluations(name, run=None):
    """(FLOPs, nats per character) of the evaluations in NAME.csv, behind the first step."""
    with open(HERE / f"{name}.csv", newline="") as f:
        lines = [line for line in csv.DictReader(f) if line.get("run") == run]
    lines = [line for line in lines if line["val_nats_per_char"] and int(line["step"])]
    return np.array([(float(line["flops"]), float(line["val_nats_per_char"])) for line in lines]).T


def main():
    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    logs = [evaluations("runs", "tiny"), evaluations("runs", "small")]
    logs += [evaluations("ten_hours"), evaluations("h100_nine_minutes")]
    beside = {"textcoords": "offset points", "fontsize": 9}
    for i, (name, (flops, nats)) in enumerate(zip(NAMES, logs, strict=True)):
        end, style = (flops[-1], nats[-1]), {"color": f"C{i}", "ha": "right"} | beside
        axes.plot(flops, nats, c=f"C{i}", lw=1.2)
        axes.plot(*end, "o", c=f"C{i}")
        axes.annotate(f"{name}: {nats[-1]:.2f}", end, (-2, -28), **style)

    flops = np.geomspace(2e13, isoflop.DAY)
    forecasts = np.array([law(flops) for _, law, _, _ in isoflop.laws()])
    axes.fill_between(flops, forecasts.min(0), forecasts.max(0), color="0.88", lw=0)
    said = "a day, one RTX 4090: not run;\nsmall runs lead to "
    low, *_, high = sorted(forecasts[:, -1])
    said += f"{low:.2f} to {high:.2f}"
    axes.annotate(said, (isoflop.DAY, (low + high) / 2), (4, -10), color="0.4", **beside)
    axes.set(xscale="log", ylim=(0.3, 1.2), xlim=(7e10, 1e22))
    axes.set(xlabel="FLOPs of training", ylabel="held-out loss, nats per character")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(HERE / "runs.png")


if __name__ == "__main__":
    main()
