"""What one change of the step brings on this machine, where no flag of bench.py makes it.

    python results/variants.py cudnn                   # and bench.py's flags behind it
    python results/variants.py autotune --bench_steps=10

What it prints is bench.py's; compare with bench.py's own figures of the same minutes. A change that
gains is only then worth a race: none of these computes the same to the bit.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench  # before torch: it sets up torch's allocator

# isort: split
import torch

import train
from nanocram import machine, safety


def cudnn():
    """cuDNN's attention, which torch prefers on Hopper cards; see test_gpu.py for gradients."""
    pick = machine.pick

    def pick_cudnn(device, dtype):
        picked = pick(device, dtype)
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        return picked

    machine.pick = pick_cudnn


def autotune():
    """Products and fused kernels by the fastest of several candidates; compiling takes longer."""
    torch.compile = functools.partial(torch.compile, mode="max-autotune-no-cudagraphs")


VARIANTS = {change.__name__: change for change in (cudnn, autotune)}

if __name__ == "__main__":
    name, *flags = sys.argv[1:] or [""]
    if name not in VARIANTS:
        sys.exit(f"type one of {', '.join(VARIANTS)}, and flags of bench.py behind it")
    bench.configure(vars(bench), flags, also=train)
    VARIANTS[name]()
    safety.run(bench.main, "variants.py", "nothing was kept", lambda: "a smaller --micro_batch")
