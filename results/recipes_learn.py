"""The picture of the six recipes, recipes_learn.png, from recipes_learn.csv.

python results/recipes_learn.py   # pip install matplotlib
"""

import csv
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
FREQUENCIES = 6.79  # nats: the unigrams of train.bin, by arithmetic
CURVES = [  # run, what is drawn, colour, line
    ("crammed_fixed_triangle", "crammed, scale fixed", "C0", "-"),
    ("crammed_learnt_triangle", "crammed, as it is: scale learnt", "C0", "--"),
    ("bert_fixed_0.001_no_decay", "bert, sines of a fixed scale, no decay", "C1", "-"),
    ("bert_learned_0.001_no_decay_long", "bert, no decay", "C1", "--"),
    ("bert_minimal_train_fixed", "bert_minimal_train, scale fixed", "C2", "-"),
    ("bert_minimal_arch", "bert_minimal_arch, as it is", "C3", "-"),
    ("izsak_fixed", "izsak, sines of a fixed scale", "C4", "-"),
    ("narrow", "narrow, as it is", "C5", "-"),
]

losses = {}  # {run: [(millions of tokens, held-out loss)]}
for row in csv.DictReader((HERE / "recipes_learn.csv").read_text().splitlines()):
    point = (int(row["tokens"]) / 1e6, float(row["val_loss_15"]))
    losses.setdefault(row["run"], []).append(point)

figure = Figure((9.6, 4.9), layout="constrained")
axes = figure.subplots()
for run, label, colour, line in CURVES:
    # what comes before the plateau, the fall from the loss of fresh weights, is left out
    tokens, loss = zip(*[(t, nats) for t, nats in losses[run] if nats < 6.9], strict=True)
    axes.plot(tokens, loss, line, color=colour, label=label)
for nats, text in ((FREQUENCIES, "words' frequencies"), (FREQUENCIES - 1, "a nat below")):
    axes.axhline(nats, color="0.5", linestyle=":", linewidth=1)
    axes.text(35.5, nats + 0.02, text, ha="right", color="0.4", fontsize=8)
axes.set(xlim=(0, 36), ylim=(3.9, 7.05), ylabel="held-out loss at 15 % masked (nats)")
last_tokens, last_loss = losses["bert_learned_0.001_no_decay_long"][-1]
axes.set_xlabel(f"tokens, millions (bert, no decay, goes on to {last_tokens:.0f}: {last_loss:.2f})")
axes.grid(alpha=0.3)
axes.legend(fontsize=8, frameon=False, loc="lower right")
figure.savefig(HERE / "recipes_learn.png", dpi=100)
