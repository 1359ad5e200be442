"""What a day on a card holds, by arithmetic. Of the cards only an H100 was measured.

    python results/cards.py    # the table of docs/gpu.md; for your card, add a line to CARDS

A step of train.py's defaults is taken apart into what it multiplies, what it moves and how often it
starts a kernel, and a card's time is the sum of the three, as if nothing overlapped. Compiling,
evaluating and saving, some 1 % of a day, are left out. The size that a day wants is the line of
isoflop.py, continued over four orders of magnitude.

Before one was at hand, 620 TFLOP/s and 2.8 TB/s were assumed for an H100. The forecast of 606,000
tokens/s for full batches was 3 % too high: products are faster, bytes slower than assumed.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import isoflop

# A step, compiled for sm_90, as traced on a stubbed card, where kernels and sizes are real and no
# number is: 2026-11-27, torch 2.13.0, commit de4382c, at 32 masked tokens a row (25 %).
PRODUCTS = 583e6  # FLOP a token, in matrix products
# Bytes a token, by fused kernels and by attention. Cards without bfloat16 take float16, and add up
# the residual stream in float32.
MOVED = {"bfloat16": 1_263e3 + 499e3, "float16": 1_685e3 + 335e3}
SUMMED = 1.435e9  # bytes a micro-batch, by sums of gradients
LAUNCHES = 1_045  # a micro-batch: 420 of them fused kernels, 339 products
UPDATE_PRODUCTS = 1.957e12  # FLOP a step: Muon's, of 112 matrices
UPDATE_MOVED = 8.0e9  # bytes a step: the optimisers' states, the norm, casts
UPDATE_LAUNCHES = {"bfloat16": 303, "float16": 767}
PEAK_GIB = {"bfloat16": {128: 7.2, 256: 12.6}, "float16": {128: 7.9, 256: 14.0}}  # by rows
FLOP = 601e6  # of the model a token, for MFU; 596e6 in the mean of a day
PARAMETERS = 119_620_352
LAUNCH_SECONDS = 2e-6  # that a kernel costs a card beside its work, its queue being full

# Fine-tuning, eager, as the README has it: five epochs, steps of 16 rows; five seeds of the small
# tasks side by side, then one seed of the large ones.
SMALL_TASKS = 8_551 + 67_349 + 3_668 + 5_749 + 2_490  # rows: CoLA, SST-2, MRPC, STS-B, RTE
LARGE_TASKS = 392_702, 363_846, 104_743  # MNLI, QQP, QNLI
GLUE_TOKENS = 40  # in a row, in the mean (assumed)
GLUE_MOVED = 4_278e3  # bytes a token (traced)
GLUE_STEP_MOVED = 28 * PARAMETERS  # bytes: AdamW
GLUE_LAUNCHES = 1_435  # a step (traced)
GLUE_GIB = 3.3  # a process: 2.9 reserved (on a stubbed card), the rest is CUDA's (assumed)
HOST_SECONDS = 27e-6  # of Python and torch, for one of them (one host with 16 virtual cores)

# Shares of a datasheet's TFLOP/s in products of this width that cards sustain, from pessimistic to
# optimistic. All are assumed, but for the H100's: its products are as profiled, its bytes such that
# bench.py's 589,558 tokens/s come out of the counts of its commit, 5a7f4f8, with 256 rows.
COOL = (0.35, 0.60)  # 70 W do not hold the clock of the datasheet
GEFORCE = (0.70, 0.92)  # their power holds it, and boards run above it
SERVER = (0.60, 0.80)  # large products reach 80 %; these are 768 wide
BYTES = (0.65, 0.90)  # the H100's kernels have 0.69, a plain copy 0.9
MEASURED = (0.70, 0.70)

# How many there are; the datasheet's TFLOP/s (float32 sums) and TB/s; GiB; the dtype; GB/s of each
# one's link to the others; the shares of both.
CARDS = {
    "T4": (1, 65, 0.320, 14.6, "float16", 0, COOL, BYTES),
    "2 × T4": (2, 65, 0.320, 14.6, "float16", 5, COOL, BYTES),
    "L4": (1, 121, 0.300, 22.0, "bfloat16", 0, COOL, BYTES),
    "RTX 3090": (1, 71, 0.936, 23.5, "bfloat16", 0, GEFORCE, BYTES),
    "RTX 4090": (1, 165, 1.008, 23.5, "bfloat16", 0, GEFORCE, BYTES),
    "A100 40 GB": (1, 312, 1.555, 39.4, "bfloat16", 0, SERVER, BYTES),
    "A100 80 GB": (1, 312, 2.039, 79.1, "bfloat16", 0, SERVER, BYTES),
    "H100 80 GB": (1, 989, 3.350, 79.1, "bfloat16", 0, MEASURED, (0.69, 0.69)),
}

# The recipes of the day by their parameters; '' is what train.py does without one.
RECIPES = {119_620_352: "", 327_304_192: "config/day_330m.py"}


def sustained(name, optimism):
    """(cards, TFLOP/s, TB/s, GiB, dtype, GB/s of the link) of CARDS; optimism from 0 to 1."""
    n, *sheet, memory, dtype, link, products, moved = CARDS[name]
    shares = [low + optimism * (high - low) for low, high in (products, moved)]
    rates = [of_sheet * share for of_sheet, share in zip(sheet, shares, strict=True)]
    return n, *rates, memory, dtype, link


def seconds(card, flop, moved, launches):
    _, rate, bandwidth, *_ = card
    return flop / (1e12 * rate) + moved / (1e12 * bandwidth) + launches * LAUNCH_SECONDS


def micro_batch(card):
    """Rows, by the rule of train.py: what fits in 90 % of a card, without half a GiB of CUDA's."""
    n, _, _, room, dtype, _ = card
    units = 0.9 * (room - 0.5) // PEAK_GIB[dtype][256]
    if n > 1 or units < 2:
        return 256 if units else 128
    return 1024 if units >= 4 else 512


def step_seconds(card, rows):
    """Of an optimiser step of so many rows."""
    n, *_, dtype, link = card
    in_pass = micro_batch(card) if rows % micro_batch(card) == 0 else 256
    tokens = 128 * in_pass
    one = seconds(card, tokens * PRODUCTS, tokens * MOVED[dtype] + SUMMED, LAUNCHES)
    rounds = math.ceil(rows / in_pass / n)  # in the last one some may idle
    update = seconds(card, UPDATE_PRODUCTS, UPDATE_MOVED, UPDATE_LAUNCHES[dtype])
    if n > 1:
        # Gradients in 4 bytes go into a buffer, over the link and back: of a sum over n cards a
        # link carries 2 (n - 1) / n.
        summed = 4 * PARAMETERS
        update += 2 * (n - 1) / n * summed / (1e9 * link) + seconds(card, 0, 4 * summed, 0)
    return rounds * one + update


def tokens_per_second(card):
    """The mean over a day of train.batch_rows() at its defaults."""
    ramp = [256 * (int(4096 * i / 1000 / (0.6 * 256)) + 1) for i in range(1000)]
    rows = [min(4096, max(1024, n)) for n in ramp]
    return sum(128 * n / step_seconds(card, n) for n in rows) / 1000


def glue_hours(card):
    tokens = 16 * GLUE_TOKENS
    moved = tokens * GLUE_MOVED + GLUE_STEP_MOVED
    on_card = seconds(card, tokens * PRODUCTS, moved, GLUE_LAUNCHES)  # a step
    on_host = GLUE_LAUNCHES * HOST_SECONDS
    at_once = min(5, card[3] // GLUE_GIB)
    small = SMALL_TASKS * max(5 * on_card, math.ceil(5 / at_once) * on_host)
    large = max(sum(LARGE_TASKS) * on_card, max(LARGE_TASKS) * on_host)
    return 5 / 16 * (small + large) / 3600


def main():
    print("| card | products, TFLOP/s | bytes, TB/s | tokens in a day | per parameter", end=" ")
    print("| lowest point (95 %) | recipe | `micro_batch` | GLUE, hours |")
    print("| --- |" + " ---: |" * 5 + " --- | ---: | ---: |")
    middle = {name: tokens_per_second(sustained(name, 0.5)) for name in CARDS}
    wanted = isoflop.wanted_sizes([86_400 * speed * FLOP for speed in middle.values()])
    for name, sizes in zip(CARDS, wanted, strict=True):
        ends = [sustained(name, optimism) for optimism in (0, 1)]
        tokens = [86_400 * tokens_per_second(card) for card in ends]
        cells = [name, span(f"{card[1]:.3g}" for card in ends)]
        cells += [span(f"{card[2]:.2g}" for card in ends)]
        cells += [span(f"{n / 1e9:.1f}B" for n in tokens)]
        cells += [span(f"{n / PARAMETERS:.0f}" for n in tokens)]
        low, lowest, high = (f"{float(f'{size / 1e6:.2g}'):g}M" for size in sizes)
        cells += [f"{lowest} ({low} to {high})"]
        # The smallest one in the interval: it costs least to fine-tune and to run.
        recipe = RECIPES[min([n for n in RECIPES if n >= sizes[0]], default=max(RECIPES))]
        cells += [f"`{recipe}`" if recipe else "the default, 120M"]
        cells += [f"{micro_batch(ends[0])}", span(f"{glue_hours(card):.1f}" for card in ends)]
        print("| " + " | ".join(cells) + " |")


def span(ends):
    return " to ".join(dict.fromkeys(ends))


if __name__ == "__main__":
    main()
