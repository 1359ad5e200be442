"""Which size does a budget want? isoFLOP curves, their lowest points, and where they lead.

    python results/isoflop.py    # reads isoflop.csv, prints the tables, draws isoflop.png

Approach 2 of Chinchilla (arXiv 2203.15556): for each budget a parabola through the held-out losses
in the logarithm of the parameters, then a line through the logarithms of the optima. A parabola is
local: it goes through the lowest size and at most two neighbours on either side.
"""

import csv
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DRAWS = 2000
DEFAULTS = {"lr": "0.004", "batch_rows": "32", "vocab_size": "4096"}
KINDS = ("parameters", "parameters_without_embedding")


def load():
    with open(HERE / "isoflop.csv", newline="") as f:
        return list(csv.DictReader(f))


def curves(runs, kind, neighbours=2):
    """{budget: (ln sizes, losses)} of the runs at the defaults, a value for each run."""
    found = {}
    for run in runs:
        if all(run[name] == value for name, value in DEFAULTS.items()):
            point = (np.log(float(run[kind])), float(run["val_loss_15"]))
            found.setdefault(float(run["budget_flops"]), []).append(point)
    for budget, points in found.items():
        x, y = np.array(sorted(points)).T
        sizes = np.unique(x)
        lowest = np.argmin([y[x == size].mean() for size in sizes])
        near = np.isin(x, sizes[max(0, lowest - neighbours) : lowest + neighbours + 1])
        found[budget] = (x[near], y[near])
    return {b: (x, y) for b, (x, y) in sorted(found.items()) if len(np.unique(x)) > 2}


def lowest_point(x, y):
    """(ln size, loss, curvature) at a parabola's lowest point; each size weighs the same."""
    runs_of_size = (x[:, None] == x).sum(1)
    a, b, c = np.polyfit(x, y, 2, w=runs_of_size**-0.5)
    return -b / (2 * a), c - b * b / (4 * a), a


def line(found):
    """(exponent, ln size at 1 FLOP) of size ~ budget^exponent."""
    return np.polyfit(np.log(list(found)), [lowest_point(x, y)[0] for x, y in found.values()], 1)


def bootstrap(found):
    """(optima, lines), a row a draw: residuals of all runs, redrawn onto the parabolas.

    They hold the spread of seeds and what is no parabola. Scaled up for the three numbers that
    each parabola has taken from them; draws without a lowest point are drawn again."""
    rng = np.random.default_rng(0)
    at = {}
    for budget, (x, y) in found.items():
        bottom, loss, a = lowest_point(x, y)
        at[budget] = loss + a * (x - bottom) ** 2
    residuals = np.concatenate([y - at[budget] for budget, (_, y) in found.items()])
    n = len(residuals)
    residuals *= np.sqrt(n / (n - 3 * len(found)))
    optima, lines = [], []
    while len(lines) < DRAWS:
        drawn = {b: (x, at[b] + rng.choice(residuals, len(x))) for b, (x, _) in found.items()}
        lowest = [lowest_point(x, y) for x, y in drawn.values()]
        if all(a > 0 for *_, a in lowest):
            optima.append([bottom for bottom, *_ in lowest])
            lines.append(line(drawn))
    return np.array(optima), np.array(lines), residuals.std()


def wanted_sizes(budgets, kind="parameters"):
    """The parameters that FLOPs want, (low, middle, high) for each budget: 95 % intervals."""
    found = curves(load(), kind)
    _, lines, _ = bootstrap(found)
    logs = np.log(budgets)
    drawn = np.exp(np.outer(lines[:, 0], logs) + lines[:, 1:])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return list(zip(low, np.exp(np.polyval(line(found), logs)), high, strict=True))


def print_curves(runs, kind):
    found = curves(runs, kind)
    optima, lines, spread = bootstrap(found)
    print(f"\n{kind}: residuals of {spread:.3f} nats\n")
    print(
        "| FLOPs | optimum | 95 % | loss there | tokens each | 4 × too small | 2 × too small",
        end="",
    )
    print(" | 2 × too large | 4 × too large |\n| --- |" + " ---: |" * 8)
    everything = curves(runs, kind, neighbours=99)
    for i, (budget, (x, y)) in enumerate(found.items()):
        bottom, loss, _ = lowest_point(x, y)
        low, high = np.exp(np.percentile(optima[:, i], [2.5, 97.5])) / 1e6
        same = [run for run in runs if float(run["budget_flops"]) == budget]
        same.sort(key=lambda run: float(run[kind]))
        sizes = [np.log(float(run[kind])) for run in same]
        tokens = np.exp(np.interp(bottom, sizes, [np.log(float(run["tokens"])) for run in same]))
        cells = [f"{budget:g}", f"{np.exp(bottom) / 1e6:.2f}M", f"{low:.2f}–{high:.2f}M"]
        cells += [f"{loss:.3f}", f"{tokens / np.exp(bottom):.0f}"]
        x, y = everything[budget]
        x, y = np.unique(x), [y[x == size].mean() for size in np.unique(x)]
        for factor in (1 / 4, 1 / 2, 2, 4):
            away = np.interp(bottom + np.log(factor), x, y, np.nan, np.nan) - loss
            cells.append("–" if np.isnan(away) else f"+{away:.2f}")
        print("| " + " | ".join(cells) + " |")
    low, high = np.percentile(lines[:, 0], [2.5, 97.5])
    print(f"\nsize ~ FLOPs^{line(found)[0]:.2f}, 95 % from {low:.2f} to {high:.2f}")


def print_checks(runs):
    """Runs with another batch, other rates or another vocabulary, beside the same at the defaults."""
    print("\n| FLOPs | size | changed | nats per character | at the defaults |")
    print("| --- | --- | --- | ---: | ---: |")
    shape = ("budget_flops", "n_layer", "n_embd")
    for run in runs:
        changed = [f"{name}={run[name]}" for name in DEFAULTS if run[name] != DEFAULTS[name]]
        if not changed:
            continue
        same = [
            float(other["val_nats_per_char"])
            for other in runs
            if all(other[name] == run[name] for name in shape)
            and all(other[name] == value for name, value in DEFAULTS.items())
            and other["val_nats_per_char"]
        ]
        size = f"{run['n_layer']} × {run['n_embd']}"
        cells = [run["budget_flops"], size, ", ".join(changed), run["val_nats_per_char"]]
        cells.append(f"{np.mean(same):.4f}" if same else "–")
        print("| " + " | ".join(cells) + " |")


def draw(runs):
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        everything = curves(runs, kind, neighbours=99)
        for i, (budget, (x, y)) in enumerate(curves(runs, kind).items()):
            ax.plot(*np.exp([everything[budget][0]]), everything[budget][1], "o", c=f"C{i}", ms=4)
            bottom, loss, a = lowest_point(x, y)
            smooth = np.linspace(x.min() - 0.2, x.max() + 0.2, 50)
            ax.plot(np.exp(smooth), loss + a * (smooth - bottom) ** 2, c=f"C{i}", lw=1)
            label = f"{budget:g} FLOPs: {np.exp(bottom) / 1e6:.2f}M"
            ax.plot(np.exp(bottom), loss, "*", c=f"C{i}", ms=11, label=label)
        ax.set(xscale="log", xlabel=kind.replace("_", " "))
        ax.legend(frameon=False)
    axes[0].set_ylabel("held-out loss, 15 % masked")
    fig.tight_layout()
    fig.savefig(HERE / "isoflop.png", dpi=110)


if __name__ == "__main__":
    for kind in KINDS:
        print_curves(load(), kind)
    print_checks(load())
    draw(load())
