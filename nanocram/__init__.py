"""What the scripts share. First of all: threads, how many and how they wait, and freed memory."""

import contextlib
import ctypes
import os
from pathlib import Path

# the cores that this process may use, by its affinity and by a container's quota
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # cgroup 2, cgroup 1
    with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
        texts = [Path("/sys/fs/cgroup", file).read_text() for file in files]
        quota, period = map(int, " ".join(texts).split())
        if 0 < quota < cores * period:
            cores = max(1, quota // period)
            os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # else libgomp takes them all

# libgomp reads this when torch is loaded. Its threads spin for milliseconds before they sleep; on a
# busy machine they take the cores of those that they wait for (results/README.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# have glibc keep freed memory: eager CPU steps gained 6 to 20 % of tokens/s
with contextlib.suppress(OSError, AttributeError):  # another system, another C library
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(-4, 0)  # M_MMAP_MAX: large blocks too come from the heap ...
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: ... which never shrinks
