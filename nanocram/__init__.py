"""What the scripts share. First of all: how many threads compute, and how they wait."""

import contextlib
import os
from pathlib import Path


def count_cores():
    """The cores that this process may use, by its affinity and by a container's quota."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup 2, or "max": no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        n = min(n, max(1, quota // period))
    return n


# libgomp reads these when torch is loaded. Its threads spin for milliseconds before they sleep; on
# a busy machine that takes the cores from those that they wait for: steps took twice as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
if count_cores() < (os.cpu_count() or 1):
    os.environ.setdefault("OMP_NUM_THREADS", str(count_cores()))
