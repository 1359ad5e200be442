"""What a day on a card holds, by arithmetic: nothing here was measured on a card.

    python results/cards.py                                        # the cards of the README
    python results/cards.py --tflops=100 --tb_per_s=1.2 --gb=31.8  # yours, by what it sustains
    python results/cards.py --cards=8 --micro_batch=128            # eight of each, linked by NVLink
    python results/cards.py --cards=2 --link_gb_per_s=5            # two of each, without

A step of train.py's defaults is taken apart into what it multiplies, what it moves and how often it
starts a kernel, and a card's time is the sum of the three, as if nothing overlapped. Compiling,
evaluating and saving, some 1 % of a day, are left out.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from nanocram.configurator import configure, require

# fmt: off
tflops = 0.0            # TFLOP/s that your card sustains in products of 768 columns; 0 = the table
tb_per_s = 0.0          # TB/s of memory that it sustains
gb = 0.0                # GiB of its memory, as torch sees them
products_in = "bfloat16"  # or float16, where it has no bfloat16
cards = 1               # how many there are
link_gb_per_s = 400.0   # GB/s that a sum over the cards moves through each one's link
micro_batch = 256       # rows, where they fit
# fmt: on
configure(globals())
require(globals(), {"tflops": (0, 1e6), "tb_per_s": (0, 1e6), "gb": (0, 1e6), "cards": (1, 10**6)})
require(globals(), {"link_gb_per_s": (0.001, 1e6), "micro_batch": (1, 2**20)})
if products_in not in ("bfloat16", "float16"):
    sys.exit(f"products_in={products_in} is unknown: type bfloat16 or float16")
if products_in == "float16" and not tflops:
    sys.exit("--products_in is of your card: type --tflops, --tb_per_s and --gb too")
if len({tflops > 0, tb_per_s > 0, gb > 0}) > 1:
    sys.exit("a card has --tflops, --tb_per_s and --gb: type all three")

# A step, compiled for sm_90, as traced on a stubbed card, where kernels and sizes are real and no
# number is: 2026-11-24, torch 2.13.0, commit 0605cec.
PRODUCTS = 583e6  # FLOP a token, in matrix products
# Bytes a token, by fused kernels and by attention. Cards without bfloat16 take float16, and add up
# the residual stream in float32.
MOVED = {"bfloat16": 1_244e3 + 499e3, "float16": 1_658e3 + 335e3}
SUMMED = 1.435e9  # bytes a micro-batch, by sums of gradients
LAUNCHES = 957  # a micro-batch: 387 of them fused kernels, 291 products
UPDATE_PRODUCTS = 1.885e12  # FLOP a step: Muon's, of 96 matrices (by its formula)
UPDATE_MOVED = 8.0e9  # bytes a step: the optimisers' states, the norm, casts
UPDATE_LAUNCHES = {"bfloat16": 364, "float16": 764}
# Of a step, by rows of a micro-batch.
PEAK_GIB = {"bfloat16": {128: 7.2, 256: 12.6}, "float16": {128: 7.8, 256: 14.0}}
FLOP = 601e6  # of the model a token, for MFU
PARAMETERS = 119_595_776
MUON_PARAMETERS = 94_371_840  # of them in blocks' matrices
LAUNCH_SECONDS = 2e-6  # that a kernel costs a card beside its work, its queue being full (assumed)

# Fine-tuning, eager: eight tasks, five epochs, five seeds side by side, steps of 16 rows.
GLUE_ROWS = 25 * (8_551 + 67_349 + 3_668 + 5_749 + 363_846 + 392_702 + 104_743 + 2_490)
GLUE_TOKENS = 40  # in a row, in the mean (assumed)
GLUE_MOVED = 4_278e3  # bytes a token (traced)
GLUE_STEP_MOVED = 28 * PARAMETERS  # bytes: AdamW
GLUE_LAUNCHES = 1_435  # a step (traced)
HOST_SECONDS = 8e-6  # of Python and torch, for one of them (assumed)

# What cards sustain, all assumed: TFLOP/s in products of this width, TB/s; GiB; the datasheet's
# TFLOP/s; and in which dtype.
CARDS = {
    "H100 80 GB": (620, 2.8, 79.1, 989, "bfloat16"),
    "A100 80 GB": (240, 1.7, 79.1, 312, "bfloat16"),
    "A100 40 GB": (240, 1.3, 39.4, 312, "bfloat16"),
    "RTX 4090": (150, 0.9, 23.5, 165, "bfloat16"),
    "RTX 3090": (62, 0.82, 23.5, 71, "bfloat16"),
    "L4": (60, 0.26, 22.0, 121, "bfloat16"),
    "T4": (30, 0.25, 14.6, 65, "float16"),
}


def seconds(card, flop, moved, launches):
    rate, bandwidth, *_ = card
    return flop / (1e12 * rate) + moved / (1e12 * bandwidth) + launches * LAUNCH_SECONDS


def rows_that_fit(rows, card):
    """(rows of a micro-batch, GiB of a step) by train.py's halving, from so many rows on.

    A twentieth of the card stays free, and half a GiB is the driver's."""
    _, _, room, _, dtype = card
    peak = PEAK_GIB[dtype]
    per_row = (peak[256] - peak[128]) / 128
    rest = peak[128] - 128 * per_row
    while rows > 1 and rest + rows * per_row > 0.95 * room - 0.5:
        rows //= 2
    return rows, rest + rows * per_row


def step_seconds(card, rows, of_micro_batch, n):
    """Of an optimiser step of so many rows on n cards."""
    tokens = 128 * of_micro_batch
    *_, dtype = card
    moved = tokens * MOVED[dtype] + SUMMED
    one = seconds(card, tokens * PRODUCTS, moved, LAUNCHES)
    rounds = math.ceil(rows / of_micro_batch / n)  # in the last one some may idle
    update = seconds(card, UPDATE_PRODUCTS / n, UPDATE_MOVED, UPDATE_LAUNCHES[dtype])
    if n > 1:
        # Gradients in 4 bytes and updates of Muon's matrices in 2 go into a buffer, over the link
        # and back: of a sum over n cards a link carries 2 (n - 1) / n.
        summed = 4 * PARAMETERS + 2 * MUON_PARAMETERS
        update += 2 * (n - 1) / n * summed / (1e9 * link_gb_per_s)
        update += seconds(card, 0, 4 * summed, 0)
    return rounds * one + update


def rows_of_step(progress):
    """train.batch_rows() at its defaults, but for micro_batch."""
    micro_batches = int(4096 * progress / (0.6 * micro_batch)) + 1
    return min(4096, max(1024, micro_batch * micro_batches))


def day(card):
    """(tokens, rows of a micro-batch, GiB, share of as many single cards' speed, hours of GLUE)."""
    rows, peak = rows_that_fit(micro_batch, card)
    moments = [rows_of_step((i + 0.5) / 1000) for i in range(1000)]
    speeds = [128 * n / step_seconds(card, n, rows, cards) for n in moments]
    tokens = 86_400 * sum(speeds) / 1000
    # Of the full batch; the default's micro-batches on the single card.
    alone = step_seconds(card, 4096, rows_that_fit(256, card)[0], 1)
    share = alone / cards / step_seconds(card, 4096, rows, cards)
    of_step = 16 * GLUE_TOKENS
    moved = of_step * GLUE_MOVED + GLUE_STEP_MOVED
    on_card = seconds(card, of_step * PRODUCTS, moved, GLUE_LAUNCHES)
    on_host = GLUE_LAUNCHES * HOST_SECONDS / 5
    return tokens, rows, peak, share, GLUE_ROWS / 16 * max(on_card, on_host) / 3600


def main():
    mine = {"yours": (tflops, tb_per_s, gb, 0, products_in)}
    print(
        "| card | TFLOP/s, TB/s | tokens/s | of the datasheet | tokens in a day | a parameter",
        end="",
    )
    print(" | micro_batch, GiB | batch_size | GLUE, hours | of single cards |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, card in (mine if tflops else CARDS).items():
        tokens, rows, peak, share, hours = day(card)
        rate = tokens / 86_400
        mfu = f"{rate * FLOP / (cards * 1e12 * card[3]):.0%}" if card[3] else "–"
        # nanochat: the best batch grows with tokens to 0.383. From 4,096 rows at 10B, not tried.
        best = 2 ** round(12 + 0.383 * math.log2(tokens / 10e9))
        label = f"{cards} × {name}" if cards > 1 else name
        cells = [label, f"{card[0]:g}, {card[1]:g}", f"{rate:,.0f}", mfu, f"{tokens / 1e9:.1f}B"]
        cells += [f"{tokens / PARAMETERS:.0f}", f"{rows}, {peak:.1f}", f"{best:,}"]
        cells += [f"{hours:.1f}", f"{share:.0%}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
