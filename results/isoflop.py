r"""Which size does a budget want? isoFLOP curves, their lowest points, and where they lead.

    python results/isoflop.py    # reads isoflop.csv, prints the tables, draws isoflop.png

Approach 2 of Chinchilla (arXiv 2203.15556): for each budget a parabola through the held-out losses
in the logarithm of the parameters, then a line through the logarithms of the optima. A parabola is
local: it goes through the lowest size and at most two neighbours on either side. A run of it:

    python prepare.py --source=large.txt.gz --data_dir=data/iso --vocab_size=4096
    OMP_NUM_THREADS=1 python train.py --data_dir=data/iso --vocab_size=4096 --max_steps=3402 \
      --n_layer=3 --n_embd=128 --n_head=4 --n_inner=256 --batch_ramp=0 --batch_size=32 \
      --batch_start=32 --micro_batch=32 --evals=1 --compile=False
"""

import csv
import os
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DRAWS = 2000
DAY = 12.6e9 * 596e6  # FLOPs of a day of an RTX 4090: by cards.py 12.6B tokens of 596 MFLOP
DEFAULTS = {"lr": "0.004", "batch_rows": "32"}


def load(default=True, vocab_size="4096"):
    """The rows of isoflop.csv at the defaults, or those that change one.

    A pilot's rows are left out: how many heads its models had is not known."""
    with open(HERE / "isoflop.csv", newline="") as f:
        runs = [run for run in csv.DictReader(f) if run["seed"] != "pilot"]
    runs = [run for run in runs if run["vocab_size"] == vocab_size]
    return [run for run in runs if default == all(run[k] == DEFAULTS[k] for k in DEFAULTS)]


def curves(kind, vocab_size="4096"):
    """{budget: (ln sizes, losses)}, a value for each run. kind: a column, of what sizes count."""
    points = {}
    for run in load(vocab_size=vocab_size):
        point = (np.log(float(run[kind])), float(run["val_loss_15"]))
        points.setdefault(float(run["budget_flops"]), []).append(point)
    found = {budget: np.array(sorted(points[budget])).T for budget in sorted(points)}
    return {budget: (x, y) for budget, (x, y) in found.items() if len(set(x)) > 2}


def mean_losses(x, y):
    """(ln sizes, mean losses), a value for each size."""
    sizes = np.unique(x)
    return sizes, np.array([y[x == size].mean() for size in sizes])


def parabola(x, y):
    """(polynomial, lowest point, which runs it goes through); each size weighs the same."""
    sizes, means = mean_losses(x, y)
    lowest = np.argmin(means)
    near = np.isin(x, sizes[max(0, lowest - 2) : lowest + 3])
    runs_of_size = (x[near, None] == x[near]).sum(1)
    curve = np.poly1d(np.polyfit(x[near], y[near], 2, w=runs_of_size**-0.5))
    return curve, -curve[1] / (2 * curve[2]), near


def line(found, optima=None):
    """(exponent, ln size at 1 FLOP) of size ~ budget^exponent; of each row of optima, if given."""
    if optima is None:
        optima = np.array([[parabola(x, y)[1] for x, y in found.values()]])
    return np.polyfit(np.log(list(found)), optima.T, 1)


def bootstrap(found):
    """(optima, standard deviation of a residual); optima have a row a draw.

    Residuals of all runs are redrawn onto the parabolas, or beside one onto the size's mean. They
    hold the spread of seeds and what is no parabola, and are scaled up for the three numbers that
    each parabola took from them. Each draw chooses its runs anew; one without a lowest point is
    drawn again."""
    rng = np.random.default_rng(0)
    at, residuals = {}, []
    for budget, (x, y) in found.items():
        curve, _, near = parabola(x, y)
        at[budget] = np.where(near, curve(x), np.interp(x, *mean_losses(x, y)))
        residuals.extend((y - curve(x))[near])
    n = len(residuals)
    residuals = np.array(residuals) * np.sqrt(n / (n - 3 * len(found)))
    optima = []
    while len(optima) < DRAWS:
        drawn = [parabola(x, at[b] + rng.choice(residuals, len(x))) for b, (x, _) in found.items()]
        if all(curve[2] > 0 for curve, *_ in drawn):
            optima.append([bottom for _, bottom, _ in drawn])
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
        curve, bottom, _ = parabola(x, y)
        low, high = np.exp(np.percentile(optima[:, i], [2.5, 97.5])) / 1e6
        runs = load(vocab_size=vocab_size)
        same = [run for run in runs if float(run["budget_flops"]) == budget]
        seen = sorted((np.log(float(run[kind])), np.log(float(run["tokens"]))) for run in same)
        tokens = np.exp(np.interp(bottom, *np.array(seen).T))
        cells = [f"{budget:.0e}".replace("+", ""), f"{np.exp(bottom) / 1e6:.2f}M"]
        cells += [f"{low:.2f}M to {high:.2f}M", f"{curve(bottom):.3f}"]
        cells += [f"{tokens / np.exp(bottom):.0f}"]
        # between sizes that were run, along straight lines: a parabola is wrong so far away
        for factor in (1 / 4, 1 / 2, 2, 4):
            loss = np.interp(bottom + np.log(factor), *mean_losses(x, y), np.nan, np.nan)
            cells.append("–" if np.isnan(loss) else f"+{loss - curve(bottom):.2f}")
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


def laws():
    """Laws floor + a × FLOPs^b through the lowest losses, in nats per character: [(floor, function
    of FLOPs, b, by how much it misses one of them at most)]."""
    logged = [run for run in load() if run["val_nats_per_char"]]
    per_nat = float(logged[0]["val_nats_per_char"]) / float(logged[0]["val_loss_15"])
    found = curves("parameters")
    losses = []
    for x, y in found.values():
        curve, bottom, _ = parabola(x, y)
        losses.append(curve(bottom) * per_nat)
    result = []
    for floor in (0, 0.1, 0.2, 0.3, 0.4, 0.5):
        line = np.polyfit(np.log(list(found)), np.log(np.array(losses) - floor), 1)

        def law(flops, floor=floor, line=line):
            return floor + np.exp(np.polyval(line, np.log(flops)))

        missed = np.abs(law(np.array(list(found))) - losses).max()
        result.append((floor, law, line[0], missed))
    return result


def print_forecast():
    """What laws() say of two longer runs, a loose test, and of a day."""
    ends = []
    for name in ("ten_hours", "h100_nine_minutes"):
        with open(HERE / f"{name}.csv", newline="") as f:
            last = list(csv.DictReader(f))[-1]
        ends.append((name, float(last["flops"]), last["val_nats_per_char"]))
    ends.append(("a day", DAY, "not measured"))
    print("\nNats per character\n")
    print("| floor | exponent | misses the lowest losses by up to |", end="")
    print("".join(f" {name}, {flops:.2g} FLOPs: {end} |" for name, flops, end in ends))
    print("| ---: |" + " ---: |" * 5)
    for floor, law, exponent, missed in laws():
        print(f"| {floor} | {exponent:.3f} | {missed:.3f} |", end="")
        print("".join(f" {law(flops):.3f} |" for _, flops, _ in ends))


def draw():
    os.environ.pop("MPLBACKEND", None)  # of a notebook, whose packages may be elsewhere
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2))
    for i, (budget, (x, y)) in enumerate(curves("parameters").items()):
        curve, bottom, near = parabola(x, y)
        ax.plot(np.exp(x) / 1e6, y, "o", c=f"C{i}", ms=4)
        smooth = np.linspace(x[near].min() - 0.1, x[near].max() + 0.1, 50)
        ax.plot(np.exp(smooth) / 1e6, curve(smooth), c=f"C{i}", lw=1)
        label = f"{budget:.0e} FLOPs: {np.exp(bottom) / 1e6:.2f}M".replace("+", "")
        ax.plot(np.exp(bottom) / 1e6, curve(bottom), "*", c=f"C{i}", ms=11, label=label)
    ax.set(xscale="log", xlabel="million parameters", ylabel="held-out loss, 15 % masked")
    sizes = [0.25, 0.5, 1, 2, 4, 8]
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.xaxis.set_minor_locator(plt.NullLocator())
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(HERE / "isoflop.png", dpi=110)


if __name__ == "__main__":
    print_curves("parameters")
    print_curves("parameters_without_embedding")
    print_curves("parameters", vocab_size="16384")
    print_checks()
    print_forecast()
    draw()
