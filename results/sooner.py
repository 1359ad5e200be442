"""What makes a masked model learn sooner? The edits of sooner.csv beside their base.

    python results/sooner.py    # a table for each of RACES, the lowest loss first

Pairs share seed, rows and masks. A difference is the last held-out loss less the base's, in nats,
with its standard error where there are three pairs or more.
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

NEWER = "max_steps=1000 schedule=trapezoid mask_token_share=1 random_token_share=0 zero_init=True "
NEWER += "muon_lr=0.01 mask_rate=0.3 mask_rate_end=0.3"
SMALL = "micro_batch=32 batch_size=32 batch_start=32 max_steps=3000 compile=False"
WORDS = f"vocab_size=4096 {SMALL}"
MINIATURE = "vocab_size=2048 n_layer=3 n_head=2 n_embd=64 n_inner=128 batch_size=32 batch_start=32 "
MINIATURE += "micro_batch=32 max_steps=4096 compile=False"
START = "neighbour_heads; frequency_bias"
RACES = {  # {title: (commits, recipe, settings, edit of the base)}
    "tiny.py with the settings of 7792c35, 4.1M tokens": (
        "a6a208c",
        "config/tiny.py",
        NEWER,
        START,
    ),
    "tiny.py of a6a208c, 4.1M tokens": ("a6a208c", "config/tiny.py", "max_steps=1000", ""),
    "small.py's 4.7M parameters, 12.3M tokens": ("a6a208c fa40fa9", "config/small.py", SMALL, ""),
    "small.py with 4,096 entries": ("a5b6bf4", "config/small.py", WORDS, START),
    "tiny.py at fa40fa9, 4.1M tokens": ("fa40fa9", "config/tiny.py", "max_steps=1000", ""),
    "64 wide, 16.8M tokens": ("a6a208c", "", MINIATURE, ""),
}


def last_losses():
    """{(commit, recipe): {(edit, settings): {seed: the last held-out loss}}}."""
    runs = defaultdict(lambda: defaultdict(dict))
    with open(Path(__file__).with_name("sooner.csv"), newline="") as f:
        for line in csv.DictReader(f):
            edit = "; ".join(sorted(line["edit"].split("; ")))
            variant = edit, line["settings"]
            runs[line["commit"], line["recipe"]][variant][line["seed"]] = float(line["val_loss_15"])
    return runs


def race_of(settings):
    """The settings of a run's race: the longest that its own begin with; None if there are none."""
    races = [of_race for _, _, of_race, _ in RACES.values() if settings.startswith(of_race)]
    return max(races, key=len, default=None)


def main():
    runs = last_losses()
    for title, (commits, recipe, settings, start) in RACES.items():
        base_edit = "; ".join(sorted(start.split("; ")))
        variants = defaultdict(dict)
        for commit in commits.split():
            for variant, losses in runs[commit, recipe].items():
                variants[variant] |= losses
        base = variants[base_edit, settings]
        rows = []
        for (edit, of_run), losses in variants.items():
            extra = of_run.removeprefix(settings)
            seeds = sorted(losses.keys() & base.keys())
            if race_of(of_run) != settings or (edit, extra) == (base_edit, "") or not seeds:
                continue
            found = np.array([losses[seed] - base[seed] for seed in seeds])
            error = found.std(ddof=1) / len(found) ** 0.5 if len(found) > 2 else 0
            said = f"{found.mean():+.3f} ± {error:.3f}" if error else ""
            each = ", ".join(f"{x:+.3f}" for x in found)
            gone = [f"no {part}" for part in start.split("; ") if part and part not in edit]
            more = [part for part in edit.split("; ") if part not in start.split("; ")]
            label = "; ".join([*filter(None, more), *gone, *extra.split()])
            rows.append((found.mean(), f"| {label} | {said} | {each} |"))
        levels = ", ".join(f"{base[seed]:.3f}" for seed in sorted(base))
        print(f"\n**{title}** (base: {levels})\n\n| edit | mean | by seed |\n| --- | ---: | ---: |")
        print("\n".join(row for _, row in sorted(rows)))


if __name__ == "__main__":
    main()
