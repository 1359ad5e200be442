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
DEFAULTS = {"lr": "0.004", "batch_rows": "32"}


def load(default=True, vocab_size="4096"):
    """The rows of isoflop.csv at the defaults, or those that change one.

    A pilot's rows are left out: how many heads its models had is not known."""
    with open(HERE / "isoflop.csv", newline="") as f:
        runs = [run for run in csv.DictReader(f) if run["seed"] != "pilot"]
    runs = [run for run in runs if run["vocab_size"] == vocab_size]
    return [run for run in runs if default == all(run[k] == DEFAULTS[k] for k in DEFAULTS)]


def curves(kind, neighbours=2, vocab_size="4096"):
    """{budget: (ln sizes, losses)}, a value for each run. kind: a column, of what sizes count."""
    points = {}
    for run in load(vocab_size=vocab_size):
        point = (np.log(float(run[kind])), float(run["val_loss_15"]))
        points.setdefault(float(run["budget_flops"]), []).append(point)
    found = {}
    for budget in sorted(points):
        x, y = np.array(sorted(points[budget])).T
        sizes = np.unique(x)
        lowest = np.argmin([y[x == size].mean() for size in sizes])
        near = np.isin(x, sizes[max(0, lowest - neighbours) : lowest + neighbours + 1])
        if len(sizes) > 2:
            found[budget] = (x[near], y[near])
    return found


def lowest_point(x, y):
    """(ln size, loss, curvature) at a parabola's lowest point; each size weighs the same."""
    runs_of_size = (x[:, None] == x).sum(1)
    a, b, c = np.polyfit(x, y, 2, w=runs_of_size**-0.5)
    return -b / (2 * a), c - b * b / (4 * a), a


def line(found, optima=None):
    """(exponent, ln size at 1 FLOP) of size ~ budget^exponent; of each row of optima, if given."""
    if optima is None:
        optima = np.array([[lowest_point(x, y)[0] for x, y in found.values()]])
    return np.polyfit(np.log(list(found)), optima.T, 1)


def bootstrap(found):
    """(optima, standard deviation of a residual); optima have a row a draw.

    Residuals of all runs are redrawn onto the parabolas. They hold the spread of seeds and what is
    no parabola, and are scaled up for the three numbers that each parabola took from them. A draw
    without a lowest point is drawn again."""
    rng = np.random.default_rng(0)
    at = {}
    for budget, (x, y) in found.items():
        bottom, loss, a = lowest_point(x, y)
        at[budget] = loss + a * (x - bottom) ** 2
    residuals = np.concatenate([y - at[budget] for budget, (_, y) in found.items()])
    n = len(residuals)
    residuals *= np.sqrt(n / (n - 3 * len(found)))
    optima = []
    while len(optima) < DRAWS:
        drawn = {b: (x, at[b] + rng.choice(residuals, len(x))) for b, (x, _) in found.items()}
        lowest = [lowest_point(x, y) for x, y in drawn.values()]
        if all(a > 0 for *_, a in lowest):
            optima.append([bottom for bottom, *_ in lowest])
    return np.array(optima), residuals.std()


def wanted_sizes(budgets, kind="parameters"):
    """The parameters that FLOPs want, (low, middle, high) for each budget: 95 % intervals."""
    found = curves(kind)
    optima, _ = bootstrap(found)
    exponents, sizes_at_1 = line(found, optima)
    logs = np.log(budgets)
    drawn = np.exp(np.outer(exponents, logs) + sizes_at_1[:, None])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return list(zip(low, np.exp(np.polyval(line(found), logs)), high, strict=True))


def print_curves(kind, vocab_size="4096"):
    found = curves(kind, vocab_size=vocab_size)
    optima, spread = bootstrap(found)
    print(f"\n{kind}, {vocab_size} entries; residuals have a deviation of {spread:.3f} nats\n")
    away = ("4 × too small", "2 × too small", "2 × too large", "4 × too large")
    print("| FLOPs | lowest at | 95 % | loss | tokens for each |", " | ".join(away), "|")
    print("| --- |" + " ---: |" * 8)
    for i, (budget, (x, y)) in enumerate(found.items()):
        bottom, loss, _ = lowest_point(x, y)
        low, high = np.exp(np.percentile(optima[:, i], [2.5, 97.5])) / 1e6
        runs = load(vocab_size=vocab_size)
        same = [run for run in runs if float(run["budget_flops"]) == budget]
        seen = sorted((np.log(float(run[kind])), np.log(float(run["tokens"]))) for run in same)
        tokens = np.exp(np.interp(bottom, *np.array(seen).T))
        cells = [f"{budget:.0e}".replace("+", ""), f"{np.exp(bottom) / 1e6:.2f}M"]
        cells += [f"{low:.2f}M to {high:.2f}M", f"{loss:.3f}", f"{tokens / np.exp(bottom):.0f}"]
        # between sizes that were run, along straight lines: a parabola is wrong so far away
        x, y = curves(kind, 99, vocab_size)[budget]
        sizes = np.unique(x)
        means = [y[x == size].mean() for size in sizes]
        for factor in (1 / 4, 1 / 2, 2, 4):
            higher = np.interp(bottom + np.log(factor), sizes, means, np.nan, np.nan) - loss
            cells.append("–" if np.isnan(higher) else f"+{higher:.2f}")
        print("| " + " | ".join(cells) + " |")
    if len(found) > 1:
        low, high = np.percentile(line(found, optima)[0], [2.5, 97.5])
        print(f"\nsize ~ FLOPs^{line(found)[0, 0]:.2f}, 95 % from {low:.2f} to {high:.2f}")


def print_checks():
    """Runs that change a default, beside the same size at the defaults."""
    print("\n| FLOPs | size | changed | nats per character | at the defaults |")
    print("| --- | --- | --- | ---: | ---: |")
    at_defaults = {}
    for run in load():
        if run["val_nats_per_char"]:
            size = run["budget_flops"], run["n_layer"], run["n_embd"]
            at_defaults.setdefault(size, []).append(float(run["val_nats_per_char"]))
    for run in load(default=False):
        size = run["budget_flops"], run["n_layer"], run["n_embd"]
        changed = ", ".join(f"{k}={run[k]}" for k in DEFAULTS if run[k] != DEFAULTS[k])
        beside = f"{np.mean(at_defaults[size]):.4f}" if size in at_defaults else "–"
        here = f"{float(run['val_nats_per_char']):.4f}"
        print(f"| {size[0]} | {size[1]} × {size[2]} | {changed} | {here} | {beside} |")


def draw():
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2))
    everything = curves("parameters", neighbours=99)
    for i, (budget, (x, y)) in enumerate(curves("parameters").items()):
        ax.plot(np.exp(everything[budget][0]) / 1e6, everything[budget][1], "o", c=f"C{i}", ms=4)
        bottom, loss, a = lowest_point(x, y)
        smooth = np.linspace(x.min() - 0.1, x.max() + 0.1, 50)
        ax.plot(np.exp(smooth) / 1e6, loss + a * (smooth - bottom) ** 2, c=f"C{i}", lw=1)
        label = f"{budget:.0e} FLOPs: {np.exp(bottom) / 1e6:.2f}M".replace("+", "")
        ax.plot(np.exp(bottom) / 1e6, loss, "*", c=f"C{i}", ms=11, label=label)
    ax.set(xscale="log", xlabel="million parameters", ylabel="held-out loss, 15 % masked")
    ax.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    ax.xaxis.set_minor_locator(plt.NullLocator())
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(HERE / "isoflop.png", dpi=110)


if __name__ == "__main__":
    print_curves("parameters")
    print_curves("parameters_without_embedding")
    print_curves("parameters", vocab_size="16384")
    print_checks()
    draw()
