"""What this machine is: the device, the precision it does natively, how fast it multiplies matrices, its versions.

python -c "from nanocram import machine; print(machine.pick('auto', 'auto'))"
python -c "from nanocram import machine; print(machine.describe(machine.pick('auto', 'auto')[0]))"
"""

import contextlib
import ctypes
import functools
import math
import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

# Dense bf16 products (fp16 where a card has no bf16) summed in fp32, in TFLOP/s, from the vendors' datasheets.
DATASHEET = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H100 PCIe": 756,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "A6000": 155,
    "5090": 210,
    "4090": 165,
    "3090": 71,
    "2080 Ti": 54,
    "V100": 125,
    "T4": 65,
}
VARIANTS = {
    "PCIe",
    "NVL",
    "Ti",
    "SUPER",
    "Laptop",
    "D",
    "MIG",
}  # words that make a card another one
DRIVER = Path(
    "/dev/nvidiactl"
)  # there where Linux has a card of NVIDIA's, and a container was given it


def pick(device, dtype):
    """(torch.device, torch.dtype of the matrix products) for two settings; "auto" takes the best native one.

    Exits with one line if there is no such device. It sets what suits our work there, too: TF32 for float32 products,
    no attention by cuDNN, on a CPU a C library that keeps freed memory."""
    backends = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in backends and not backends[device]():
        sys.exit(
            f"device={device}, but this build of torch sees no such device: type --device=auto"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in (
        "",
        "-1",
    )  # by the user: then it is meant
    if (
        device == "auto"
        and torch.version.cuda
        and DRIVER.exists()
        and not (torch.cuda.is_available() or hidden)
    ):
        sys.exit(
            f"torch cannot use this machine's GPU: update its driver for CUDA {torch.version.cuda}, or "
            "take a torch for an older CUDA from pytorch.org, or type --device=cpu"
        )
    if device == "auto":
        device = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if dtype == "auto":
        dtype = "bfloat16" if native_bf16(device) else "float16" if device == "cuda" else "float32"
    torch.set_float32_matmul_precision("high")
    # torch >= 2.11 prefers cuDNN's attention on Hopper cards. Gradients of it have been NaN there (pytorch issue 196678
    # with a mask, NVIDIA/cudnn-frontend 1072 without), and it plans anew for each of the many shapes of fine-tuning
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cpu":
        keep_freed_memory()
    return torch.device(device), getattr(torch, dtype)


@functools.cache
def native_bf16(device):
    """Whether a "cuda", "mps" or "cpu" has instructions for bfloat16; without, torch is up to 20 times slower in it."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tests = [
        getattr(torch.cpu, name, bool)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return device == "cpu" and any(test() for test in tests)


def keep_freed_memory():
    """Have glibc reuse freed memory at once instead of handing it to the system and asking for it anew.

    On a CPU this gave 6 to 20 % more tokens/s to eager steps, of 1M parameters as of 120M; to compiled ones of 120M
    nothing. The process stays as large as it once was."""
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks too come from the heap ...
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks


def timed(dev, work, *args):
    """(seconds until the device had done work(*args), what that returned)."""
    wait = (lambda: None) if dev.type == "cpu" else getattr(torch, dev.type).synchronize
    wait()
    start = time.perf_counter()
    result = work(*args)
    wait()
    return time.perf_counter() - start, result


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product on this machine, the best of several tries: the yardstick of MFU."""
    n, repeats = (8192, 20) if device.type == "cuda" else (2048, 1)
    a = torch.randn(n, n, device=device).to(dtype)
    best, tries, end = math.inf, 0, time.perf_counter() + 0.7
    while tries < 3 or time.perf_counter() < end:  # other work slows some of them down
        start = time.perf_counter()
        for _ in range(repeats):
            b = a @ a
        b[0, 0].item()  # waits until the device is done
        best, tries = min(best, time.perf_counter() - start), tries + 1
    return 2 * n**3 * repeats / best


def datasheet_rate(name):
    """FLOP/s that the vendor promises for the card of that name, 0 where we do not know."""
    words = set(re.split("[ -]", name))
    cards = {card: set(card.split()) for card in DATASHEET}
    return max(
        (1e12 * DATASHEET[c] for c, w in cards.items() if w <= words and not words & VARIANTS - w),
        default=0.0,
    )


def peak_bytes(device):
    """The most memory that was in use at a time: on the card, or by this process; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource  # there is none on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def kept_bytes(forward, parameters):
    """Bytes that forward() keeps for the backward pass; each storage once, the parameters not at all."""
    own, kept = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
        return tensor.detach()  # the tensor itself would keep the graph that keeps it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result  # not before: until here no storage can have been freed, and its address used again
    return sum(kept.values())


@contextlib.contextmanager
def power_meter(device):
    """A list that fills with the card's power in watts, two readings a second, while the block runs."""
    watts, done = [], threading.Event()

    def read():
        identity = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"  # CUDA_VISIBLE_DEVICES changes the numbers
        query = ["nvidia-smi", identity, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        with contextlib.suppress(
            OSError, ValueError
        ):  # no such program; "[N/A]", a driver that does not tell
            while not done.wait(0.5):
                watts.append(float(subprocess.run(query, capture_output=True, text=True).stdout))

    reader = threading.Thread(target=read) if device.type == "cuda" else None
    if reader:
        reader.start()
    try:
        yield watts
    finally:
        done.set()
        if reader:
            reader.join()


def processor():
    """What the processor calls itself; on Linux platform.processor() says nothing of use."""
    with contextlib.suppress(OSError):
        if found := re.search(
            r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        ):
            return found[1]
    return platform.processor() or platform.machine()


def describe(device):
    """The date, versions, hardware and the commit of this code, as a dict of strings and numbers."""
    try:
        here = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], **here
        ).stdout.strip()
    except OSError:  # no git
        commit = ""
    name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    hardware = {
        "system": platform.platform(),
        "device": f"{device.type}: {name}",
        "cores": os.cpu_count(),
    }
    made = {"commit": commit or "unknown", "date": time.strftime("%Y-%m-%d", time.gmtime())}
    return {**versions, **hardware, "threads": torch.get_num_threads(), **made}
