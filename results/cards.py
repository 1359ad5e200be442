"""What a day on a card holds, by arithmetic. Of the cards only an H100 was measured.

    python results/cards.py    # the table of docs/gpu.md; for your card, add a line to CARDS

A step of train.py's defaults is taken apart into what it multiplies, what it moves and how often it
starts a kernel, and a card's time is the sum of the three, as if nothing overlapped. Compiling,
evaluating and saving, some 1 % of a day, are left out. The size that a day wants is the line of
isoflop.py, continued over four orders of magnitude.

Before one was at hand, 620 TFLOP/s and 2.8 TB/s were assumed for an H100. The forecast of 604,000
tokens/s for full batches was 2 % too high: products are faster, bytes slower than assumed.
"""

import math

import isoflop

# A step, compiled for sm_90, as traced on a stubbed card, where kernels and sizes are real and no
# number is: 2026-11-24, torch 2.13.0, commit 0605cec, at 32 masked tokens a row (25 %).
PRODUCTS = 583e6  # FLOP a token, in matrix products
# Bytes a token, by fused kernels and by attention. Cards without bfloat16 take float16, and add up
# the residual stream in float32.
MOVED = {"bfloat16": 1_244e3 + 499e3, "float16": 1_658e3 + 335e3}
SUMMED = 1.435e9  # bytes a micro-batch, by sums of gradients
LAUNCHES = 957  # a micro-batch: 387 of them fused kernels, 291 products
UPDATE_PRODUCTS = 1.885e12  # FLOP a step: Muon's, of 96 matrices (by its formula)
UPDATE_MOVED = 8.0e9  # bytes a step: the optimisers' states, the norm, casts
UPDATE_LAUNCHES = {"bfloat16": 364, "float16": 764}
PEAK_GIB = {"bfloat16": {128: 7.2, 256: 12.6}, "float16": {128: 7.8, 256: 14.0}}  # by rows
FLOP = 601e6  # of the model a token, for MFU; 596e6 in the mean of a day
PARAMETERS = 119_595_776
LAUNCH_SECONDS = 2e-6  # that a kernel costs a card beside its work, its queue being full

# Fine-tuning, eager: eight tasks, five epochs, five seeds side by side, steps of 16 rows.
GLUE_ROWS = 25 * (8_551 + 67_349 + 3_668 + 5_749 + 363_846 + 392_702 + 104_743 + 2_490)
GLUE_TOKENS = 40  # in a row, in the mean (assumed)
GLUE_MOVED = 4_278e3  # bytes a token (traced)
GLUE_STEP_MOVED = 28 * PARAMETERS  # bytes: AdamW
GLUE_LAUNCHES = 1_435  # a step (traced)
HOST_SECONDS = 27e-6  # of Python and torch, for one of them (one host with 16 virtual cores)

# What cards sustain, all assumed but for the H100: how many there are; TFLOP/s in products of this
# width, TB/s; GiB; the datasheet's TFLOP/s; in which dtype; GB/s of each one's link to the others.
# The H100's products are as profiled, its bytes such that bench.py's 589,558 tokens/s come out.
CARDS = {
    "T4": (1, 30, 0.25, 14.6, 65, "float16", 0),
    "2 × T4": (2, 30, 0.25, 14.6, 65, "float16", 5),
    "L4": (1, 60, 0.26, 22.0, 121, "bfloat16", 0),
    "RTX 3090": (1, 62, 0.82, 23.5, 71, "bfloat16", 0),
    "RTX 4090": (1, 150, 0.9, 23.5, 165, "bfloat16", 0),
    "A100 40 GB": (1, 240, 1.3, 39.4, 312, "bfloat16", 0),
    "A100 80 GB": (1, 240, 1.7, 79.1, 312, "bfloat16", 0),
    "H100 80 GB": (1, 690, 2.3, 79.1, 989, "bfloat16", 0),
}

# The recipes of the day by their parameters; '' is what train.py does without one.
RECIPES = {119_595_776: "", 327_246_848: "config/day_330m.py"}


def seconds(card, flop, moved, launches):
    _, rate, bandwidth, *_ = card
    return flop / (1e12 * rate) + moved / (1e12 * bandwidth) + launches * LAUNCH_SECONDS


def micro_batch(card):
    """Rows, by the halving of train.py; a twentieth of the card and half a GiB stay free."""
    _, _, _, room, _, dtype, _ = card
    peak = PEAK_GIB[dtype]
    per_row = (peak[256] - peak[128]) / 128
    rest = peak[128] - 128 * per_row
    rows = 256
    while rows > 1 and rest + rows * per_row > 0.95 * room - 0.5:
        rows //= 2
    return rows


def step_seconds(card, rows):
    """Of an optimiser step of so many rows."""
    n, *_, dtype, link = card
    tokens = 128 * micro_batch(card)
    one = seconds(card, tokens * PRODUCTS, tokens * MOVED[dtype] + SUMMED, LAUNCHES)
    rounds = math.ceil(rows / micro_batch(card) / n)  # in the last one some may idle
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
    on_card = seconds(card, tokens * PRODUCTS, moved, GLUE_LAUNCHES)
    on_host = GLUE_LAUNCHES * HOST_SECONDS / 5
    return GLUE_ROWS / 16 * max(on_card, on_host) / 3600


def main():
    print("| card | sustains, TFLOP/s and TB/s | of its datasheet | tokens in a day", end=" ")
    print("| per parameter, of 120M | `micro_batch` | GLUE, hours | a day wants | we would take |")
    print("| --- |" + " ---: |" * 6 + " --- | --- |")
    speeds = {name: tokens_per_second(card) for name, card in CARDS.items()}
    wanted = isoflop.wanted_sizes([86_400 * speed * FLOP for speed in speeds.values()])
    for (name, card), sizes in zip(CARDS.items(), wanted, strict=True):
        n, rate, bandwidth, _, datasheet, *_ = card
        tokens = 86_400 * speeds[name]
        cells = [name, f"{rate:g}, {bandwidth:g}"]
        cells += [f"{100 * speeds[name] * FLOP / (n * 1e12 * datasheet):.0f} %"]
        cells += [f"{tokens / 1e9:.1f}B", f"{tokens / PARAMETERS:.0f}", f"{micro_batch(card)}"]
        low, middle, high = (f"{float(f'{size / 1e6:.2g}'):g}M" for size in sizes)
        cells += [f"{glue_hours(card):.1f}", f"{middle} ({low} to {high})"]
        # The smallest one in the interval: it costs least to fine-tune and to run.
        recipe = RECIPES[min([n for n in RECIPES if n >= sizes[0]], default=max(RECIPES))]
        cells += [f"`{recipe}`" if recipe else "the default, 120M"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
