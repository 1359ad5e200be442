"""What this machine is: device and precision, how fast it multiplies matrices, versions."""

import contextlib
import hashlib
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch


def pick(device, dtype):
    """(torch.device, torch.dtype of the matrix products); "auto" takes the best native one."""
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        sys.exit(f"dtype={dtype} is unknown: choose auto, bfloat16, float16 or float32")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.mps.is_available(), "cpu": True}
    if device == "auto":
        # A GPU that torch cannot use would mean a day on the CPU. If it was hidden, that is meant.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        # a card's driver; in WSL2, where /dev/dxg stands for any card, that of an NVIDIA one
        drivers = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
        has_driver = any(Path(name).exists() for name in drivers) and not hidden
        device = "cuda" if has_driver else next(name for name in available if available[name])
    if not available.get(device):
        advice = "type --device=cpu, or install a build for the driver that nvidia-smi shows"
        sys.exit(f"torch {torch.__version__} cannot use device={device}: {advice}")
    if dtype == "auto":
        without = "float16" if device == "cuda" else "float32"
        dtype = "bfloat16" if native_bf16(device) else without
    elif dtype == "bfloat16" and device != "mps" and not native_bf16(device):
        print("WARNING: bfloat16 is emulated here: slow, and not compiled on a GPU: drop --dtype")
    return torch.device(device), getattr(torch, dtype)


@contextlib.contextmanager
def float32_products(precision):
    """Within it, or in a function that it decorates, matrix products in float32 have torch's
    precision of this name. "high" may take TF32, off by 5e-4: enough to train, not to compare."""
    before = "highest"
    with contextlib.suppress(RuntimeError):  # a fork sets torch's newer .fp32_precision
        before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def training_kernels():
    """TF32, and attention without cuDNN: its gradients have been NaN on Hopper cards (pytorch issue
    196678), and it plans anew for each shape of fine-tuning. An H100 gains 1.3 % by it, no NaN."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with float32_products("high"):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def native_bf16(device):
    """Whether a device computes in bfloat16; emulated it is up to 20 times slower."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_cpu = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device == "cpu" and has_cpu


def free_host_bytes():
    """Bytes of free memory in the host; infinite where the system does not tell."""
    free = math.inf
    with contextlib.suppress(OSError, TypeError):
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def now():
    """Seconds by a clock that goes on while the machine sleeps, where the system has one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def timed(device, work, *args):
    """(seconds until the device had done work(*args), what that returned)."""
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    start = time.perf_counter()
    result = work(*args)
    synchronize()
    return time.perf_counter() - start, result


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product on this machine, the best of several: for the MFU."""
    n, runs = (8192, range(20)) if device.type == "cuda" else (2048, range(1))
    if device.type == "cpu" and dtype != torch.float32 and not native_bf16("cpu"):
        n = n // 4  # emulated, the large one takes a minute
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.empty_like(a)  # one result for all, or each would take memory of its own
    seconds = [timed(device, lambda: [torch.mm(a, a, out=b) for _ in runs])[0] for _ in range(5)]
    return 2 * n**3 * len(runs) / min(seconds)


def device_name(device):
    """What a torch.device is, like "cuda: NVIDIA H200"."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{device.type}: {found[1] if found else platform.processor() or platform.machine()}"


def code_hash():
    """A hash of the scripts and of nanocram/ as they are on the disk, edits included."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("*.py"), *root.glob("nanocram/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def describe(device):
    """Versions, hardware, commit and date: a dict of strings and numbers for run.json."""
    commit = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
        command = "git describe --always --dirty --abbrev=40 --match=//".split()
        here = Path(__file__).parent
        commit = subprocess.check_output(command, cwd=here, text=True, stderr=subprocess.DEVNULL)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": commit.strip(),
        "code": code_hash(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
