"""How fast is training here, and how close is that to the machine's limit?

    python bench.py                                  # train.py's defaults
    python bench.py config/tiny.py --profile=True    # the slowest operators too
    python bench.py config/offload.py --n_layer=8    # streamed from host memory

Settings are train.py's, rows are random. A figure is a median and the range of the middle 80 %.
"""

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from nanocram.settings import assign, configure

# fmt: off
profile = False            # also print the slowest operators of three steps
bench_steps = 20           # optimiser steps to measure, after the warm-up
# fmt: on

import torch

import train

SETTINGS = configure(globals(), also=train)

from nanocram import machine, safety
from nanocram.data import Rows
from nanocram.tokenizer import SPECIAL

DISCARDED = 3  # of the measured steps, the first: clocks and caches have yet to find their level
MIDDLE = 0.5  # the progress to measure at: at 0 what zero_init made 0 would stay so, and be fast


class RandomRows(Rows):
    """Random tokens by Zipf's law with Mandelbrot's offset (the ten commonest of 4,096 are 19.8 %,
    in text 20.4 %): sums into few rows of the embeddings' gradient wait for each other on a GPU."""

    def __init__(self, seq_len, dev):
        self.seq_len, self.dev, self.count = seq_len, dev, 4096
        ranks = 1 + torch.arange(train.vocab_size - len(SPECIAL))
        drawn = torch.multinomial(1 / (ranks + 2.7), self.count * seq_len, replacement=True)
        self.tokens = len(SPECIAL) + drawn.view(self.count, seq_len)

    def read(self, start, n):
        return self.tokens[torch.arange(start, start + n) % self.count]


def new_run():
    dev, amp_dtype = machine.pick(train.device, train.dtype)
    train.check_settings(dev)
    print("data         rows of random tokens, whatever data_dir has")
    return train.Run(RandomRows(train.seq_len, dev), {}, None, dev, amp_dtype)


def median_and_range(values):
    low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):,.0f} ({low:,.0f} to {high:,.0f})"


def step_of(run, micro_batches):
    assign(vars(train), {"batch_ramp": 0.0, "batch_size": micro_batches * run.micro_batch})
    train.train_step(run, MIDDLE)


def measure_speed(run):
    """Print the first step, tokens/s and MFU."""
    dev = run.device
    full_batch = train.batch_size
    run.clock.start()
    setup_seconds, _ = machine.timed(dev, train.set_up, run, run.rows.read(0, run.small_pass))
    if dev.type == "cuda":  # the search holds memory that a step does not
        torch.cuda.reset_peak_memory_stats()
    first, *others = [machine.timed(dev, step_of, run, 1)[0] for _ in range(4)]
    print(f"first step   {first + setup_seconds:.1f} s, compiling and finding micro_batch included")
    # steps of about 2 s, or less, between two measurements of the yardstick
    n_micro = max(1, min(full_batch // run.micro_batch, int(2 / min(others))))
    n_rows = n_micro * run.micro_batch
    limit = machine.matmul_rate(dev, run.amp_dtype)
    seconds = [machine.timed(dev, step_of, run, n_micro)[0] for _ in range(DISCARDED + bench_steps)]
    limit = max(limit, machine.matmul_rate(dev, run.amp_dtype))
    speeds = [n_rows * train.seq_len / s for s in seconds[DISCARDED:]]
    print(f"tokens/s     {median_and_range(speeds)}: {bench_steps} steps of {n_rows} rows")
    flops = statistics.median(speeds) * run.model.flops_per_token(*train.row_shape(MIDDLE))
    # the fewer rows a step has, the larger is the share of the update, which counts as no FLOPs
    said = f"{flops / limit:.1%} of {limit / 1e12:.3g} TFLOP/s, a large product's here"
    print(f"MFU          {said}; at {n_rows} rows a step (a full batch has {full_batch})")


def print_memory(run):
    """Print the peak of memory: of the GPU, or of the whole process, where Linux tells."""
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    elif (status := Path("/proc/self/status")).exists():
        peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])
    else:
        return
    print(f"memory       {peak / 2**30:.2f} GiB at the peak, with micro_batch={run.micro_batch}")


def print_slowest(run):
    """Print the operators, and the kernels of a GPU, that three steps spend most time in."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step_of(run, 1)
    events = profiler.key_averages()
    # a kernel and the operator that started it have the same time, which containers often hide
    has_kernels = any(event.self_device_time_total for event in events)
    order = "self_device_time_total" if has_kernels else "self_cpu_time_total"
    print(events.table(sort_by=order, row_limit=20, max_name_column_width=50))


@machine.training_kernels()
def main():
    if bench_steps < 2:
        sys.exit(f"bench_steps={bench_steps} gives no range: type 2 or more")
    run = new_run()
    where = f"{machine.device_name(run.device)}, {torch.get_num_threads()} threads"
    print(f"machine      {where}, torch {torch.__version__}, {run.amp_dtype}")
    n_params = sum(p.numel() for p in run.model.parameters())
    print(f"model        {n_params:,} parameters, {run.flops_per_token / 1e6:,.2f} MFLOP a token")
    measure_speed(run)
    print_memory(run)
    if run.state.skipped:
        print(f"WARNING: {run.state.skipped} steps had no finite gradient: lower the learning rate")
    if profile:
        print_slowest(run)


if __name__ == "__main__":
    safety.run(main, "bench.py", "nothing was kept", "type a smaller --micro_batch")
