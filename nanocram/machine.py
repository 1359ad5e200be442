"""What this machine is: its device and precision, how fast it multiplies matrices, its versions.

    python -c "from nanocram import machine; print(machine.pick('auto', 'auto'))"

None of it is needed to understand a step of training.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

# Dense bf16 products (fp16 where a card has no bf16) summed in fp32, in TFLOP/s, as the vendors
# promise them. One entry adds your card.
# fmt: off
DATASHEET = {
    "B200": 2250, "H200": 989, "H100": 989, "H100 PCIe": 756, "A100": 312, "A100 PCIe": 312,
    "L40S": 362, "L4": 121, "A10": 125, "A6000": 155, "5090": 210, "4090": 165, "3090": 71,
    "2080 Ti": 54, "V100": 125, "T4": 65,
}
# fmt: on
VARIANTS = {"PCIe", "NVL", "Ti", "SUPER", "Laptop", "D", "MIG"}  # these make a card another one
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a container or a batch job, which may have a limit of its own
DRIVER = Path("/dev/nvidiactl")  # exists on Linux with a card of NVIDIA's, in containers given one
ON_WINDOWS = sys.platform == "win32" or "microsoft" in platform.release()  # or in its Linux


def pick(device, dtype):
    """(torch.device, torch.dtype of the matrix products); "auto" takes the best native one.

    Exits with one line if there is no such device. Sets what suits our work there, too."""
    has_cuda = torch.cuda.is_available()
    has_mps = torch.backends.mps.is_available()
    available = {"cuda": has_cuda, "mps": has_mps, "cpu": True}
    if device == "auto":
        # A GPU that torch cannot use would mean a day on the CPU. Who hides it asks for that.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if not has_cuda and not hidden and has_driver():
            explain_missing_gpu()
        device = next(name for name in available if available[name])
    if not available[device]:
        sys.exit(f"device={device}, but this build of torch sees no such device: type --device=cpu")
    if device == "cuda":
        # A card may be too old, or too new, for this build of torch: its first kernel fails then.
        try:
            torch.ones(1, device=device)
        except RuntimeError as e:
            if "out of memory" in str(e):
                full = "other processes fill this GPU (nvidia-smi lists them)"
                sys.exit(f"{full}: end them, or set CUDA_VISIBLE_DEVICES to another card's number")
            reason = str(e).partition("\n")[0]
            trouble = f"torch {torch.__version__} cannot use this {torch.cuda.get_device_name()}"
            other = "if it is too old, install a torch for an older CUDA (docs/questions.md)"
            sys.exit(f"{trouble}: {reason}; {other}, or type --device=cpu")
        if ON_WINDOWS:
            # A full card would go on with the host's memory, many times slower, and raise nothing.
            free, total = torch.cuda.mem_get_info()
            ours = torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction(0.95 * (free + ours) / total)
    if dtype == "auto":
        no_bf16 = "float16" if device == "cuda" else "float32"
        dtype = "bfloat16" if native_bf16(device) else no_bf16

    torch.set_float32_matmul_precision("high")  # TF32
    # torch >= 2.11 prefers cuDNN's attention on Hopper cards. Gradients of it have been NaN there
    # (pytorch issue 196678 with a mask, NVIDIA/cudnn-frontend 1072 without), and it plans anew for
    # each of the many shapes of fine-tuning.
    torch.backends.cuda.enable_cudnn_sdp(False)
    keep_freed_memory()
    return torch.device(device), getattr(torch, dtype)


def has_driver():
    """Whether NVIDIA's driver tells of a card, whatever torch sees of it."""
    return DRIVER.exists() or (ON_WINDOWS and bool(shutil.which("nvidia-smi")))


def explain_missing_gpu():
    """Say why torch does not see this machine's GPU; exits where torch is a build for GPUs."""
    version = f"torch {torch.__version__}"
    if not torch.version.cuda:
        print(f"WARNING: {version} is for CPUs and leaves the GPU unused (docs/questions.md)")
        return
    try:
        torch.cuda.init()
        reason = "it finds none"
    except (RuntimeError, AssertionError) as e:
        reason = str(e).partition(". ")[0]  # torch's advice follows, a paragraph of it
    driver = f"update its driver for CUDA {torch.version.cuda}"
    older = "install a torch for an older CUDA (docs/questions.md)"
    said = f"{version} cannot use this machine's GPU: {reason}"
    sys.exit(f"{said}; {driver}, or {older}, or type --device=cpu")


def native_bf16(device):
    """Whether "cuda", "mps" or "cpu" computes in bfloat16; emulated it is up to 20 times slower."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # a torch may lack either
    checks = [getattr(torch.cpu, name) for name in names if hasattr(torch.cpu, name)]
    return any(check() for check in checks)


def keep_freed_memory():
    """Have glibc reuse freed memory at once instead of handing it back and asking for it anew.

    On a CPU this gave 6 to 20 % more tokens/s to eager steps, of 1M parameters as of 120M; to
    compiled ones of 120M nothing. The process stays as large as it once was."""
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks too come from the heap ...
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks


def free_bytes(device):
    """Bytes of memory that are free on a torch.device; infinite where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with contextlib.suppress(OSError, TypeError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())
        free = 1024 * int(found[1])
    with contextlib.suppress(OSError, ValueError, TypeError):  # "max": a container without a limit
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        # What is used includes cached files; the kernel gives up those not read lately.
        cached = re.search(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.M)
        free = min(free, limit - used + int(cached[1]))
    return free


def timed(device, work, *args):
    """(seconds until the device had done work(*args), what that returned)."""
    synchronize = getattr(torch, device.type).synchronize  # a CPU has one that does nothing
    synchronize()
    start = time.perf_counter()
    result = work(*args)
    synchronize()
    return time.perf_counter() - start, result


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product on this machine: the yardstick of MFU."""
    n, repeats = (8192, 20) if device.type == "cuda" else (2048, 1)
    if device.type == "cpu" and dtype != torch.float32 and not native_bf16("cpu"):
        n = n // 4  # emulated, the large one takes a minute
    a = torch.randn(n, n, device=device).to(dtype)

    def multiply():
        for _ in range(repeats):
            a @ a

    # Other work slows some tries down: the best one counts.
    seconds = []
    end = time.perf_counter() + 0.7
    while len(seconds) < 3 or time.perf_counter() < end:
        seconds.append(timed(device, multiply)[0])
    return 2 * n**3 * repeats / min(seconds)


def datasheet_rate(name):
    """FLOP/s that the vendor promises for the card of that name, 0 where we do not know."""
    words = set(re.split("[ -]", name.replace("PCIE", "PCIe")))
    for card, teraflops in DATASHEET.items():
        wanted = set(card.split())
        if wanted <= words and not words & (VARIANTS - wanted):
            return 1e12 * teraflops
    return 0.0


def peak_bytes(device):
    """The most memory in use at a time, on the card or by this process; 0 where none tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0


def processor():
    """What the processor calls itself; on Linux platform.processor() says nothing of use."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def device_name(device):
    """What a torch.device is, like "cuda: NVIDIA H200"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return f"{device.type}: {name}"


def code_hash(script):
    """A fingerprint of the code that makes a run of a script, a path: it, model.py and nanocram/.

    A race or a fine-tuning that is there already may be of other code than today's."""
    nanocram = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (Path(script), nanocram.parent / "model.py", *sorted(nanocram.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def describe(device):
    """Versions, hardware, commit of this code and the date: a dict of strings and numbers."""
    commit = ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    command.append("--match=//")  # matches no tag, so that the hash is printed
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no git, or a disk that hangs
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip()
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"numpy": np.__version__, "system": platform.platform()}
    facts |= {"device": device_name(device), "cores": os.cpu_count()}
    facts |= {"threads": torch.get_num_threads(), "commit": commit or "unknown"}
    return facts | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
