"""What this machine sustains; of a GPU, as flags for cards.py.

    python results/rates.py    # then python results/cards.py --tflops=… --tb_per_s=… --gb=…

Products are those of a block of train.py's default; memory is read and written by sums of two
vectors that no cache holds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import nanocram.configurator  # noqa: F401  before torch: it sets up torch's allocator

# isort: split
import torch

from nanocram import machine

SHAPES = [(768, 768)] * 4 + [(768, 3072), (1536, 768)]  # of a block's weights, as they multiply
SECONDS = 1.0  # of each measurement, after as much to warm up


def best_rate(device, amount, work):
    """amount / seconds of the fastest tenth: other work slows some tries down."""
    times = []
    for _ in range(2):  # the second time counts
        times.clear()
        while sum(times) < SECONDS:
            times.append(machine.timed(device, work)[0])
    fastest = sorted(times)[: len(times) // 10 + 1]
    return amount * len(fastest) / sum(fastest)


def product_rate(device, dtype, rows):
    """FLOP/s of products with so many rows on the left."""
    factors = [(torch.randn(rows, k), torch.randn(k, n)) for k, n in SHAPES]
    factors = [(left.to(device, dtype), right.to(device, dtype)) for left, right in factors]

    def multiply():
        for left, right in factors:
            left @ right

    flop = sum(2 * rows * k * n for k, n in SHAPES)
    return best_rate(device, flop, multiply)


def memory_rate(device, n_bytes):
    """Bytes/s that the sum of two vectors of n_bytes reads and writes."""
    a = torch.ones(n_bytes // 4, device=device)
    b, total = torch.ones_like(a), torch.empty_like(a)
    return best_rate(device, 3 * n_bytes, lambda: torch.add(a, b, out=total))


def main():
    device, dtype = machine.pick("auto", "auto")
    on_gpu = device.type == "cuda"
    rows, n_bytes = (256 * 128, 2**30) if on_gpu else (8 * 128, 2**27)
    teraflops = product_rate(device, dtype, rows) / 1e12
    terabytes = memory_rate(device, n_bytes) / 1e12
    found = f"{teraflops:.3g} TFLOP/s in {dtype}, {terabytes:.3g} TB/s"
    print(f"{machine.describe(device)['device']}: {found}")
    if on_gpu:
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        half = " --products_in=float16" if dtype == torch.float16 else ""
        flags = f"--tflops={teraflops:.3g} --tb_per_s={terabytes:.3g} --gb={gib:.1f}{half}"
        print(f"python results/cards.py {flags}")


if __name__ == "__main__":
    main()
