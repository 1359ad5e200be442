"""Find the micro_batch that fits in memory, and say in one line why torch cannot compile."""

import contextlib
import gc
import os
import sys

import torch

from nanocram import parallel, safety


def prepare_compiler(n_shapes):
    """Let torch.compile take loss_fn in n_shapes shapes of rows, or fail."""
    torch.compiler.reset()  # the graphs of an earlier run here count against torch's limit
    # each shape in two sizes, evaluations, and a few for edits
    torch._dynamo.config.recompile_limit = 2 * n_shapes + 4
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or all goes on uncompiled
    torch._dynamo.config.suppress_errors = False  # whatever the environment says


@contextlib.contextmanager
def compile_errors():
    """Around passes: exit in one line if torch cannot compile them, or does so in each step."""
    try:
        yield
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        sys.exit("torch compiles anew in each step: what changes in loss_fn must be a tensor")
    except torch._dynamo.exc.ShortenTraceback as e:
        if safety.is_oom(e):
            raise
        why = safety.first_line(e)
        sys.exit(f"torch.compile fails here ({why}): mend that, or type --compile=False")


def try_passes(run, take_passes, rows):
    """What take_passes() returns, or None if memory runs out; what it took is freed."""
    seconds = held = None
    before = [buffer.clone() for buffer in run.model.buffers()]  # a BatchNorm's passes change them
    try:
        # like what later steps take: sums over ranks, optimisers' states, which a resume has
        copies = (parallel.WORLD_SIZE > 1) + (0 if run.state.step else 2)
        held = [torch.empty_like(p) for p in run.model.parameters() for _ in range(copies)]
        with compile_errors():
            seconds = take_passes(run, rows)
    except Exception as e:
        if not safety.is_oom(e):
            raise
    weights = run.model.named_parameters()
    unread = ", ".join(name for name, p in weights if p.requires_grad and p.grad is None)
    if unread and seconds and run.micro_batch == run.small_pass:
        print(f"WARNING: no pass of the set-up reads {unread:.200}: it may learn nothing")
    for buffer, was in zip(run.model.buffers(), before, strict=True):
        buffer.copy_(was)
    # free the memory; inside of `except` the traceback would keep it
    del held
    run.model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is used
    return seconds


def find_micro_batch(run, take_passes, rows, largest, signals):
    """Make a train.Run's micro_batch smaller until take_passes(run, rows), which changes no weight,
    fits in memory on all ranks; return the seconds that it returns. Exits if a row is too much.
    Then one GPU doubles it while it divides largest and memory lasts; largest=0 turns that off."""
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        # Windows and WSL grant more than is free, and swap (microsoft/WSL issue 11050): set a limit
        free, total = torch.cuda.mem_get_info()
        usable = free + torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(0.90 * usable / total)
    while True:
        # after an out-of-memory error, of an earlier start too, take the next smaller divisor
        while 0 < run.state.oom_micro_batch <= run.micro_batch:
            smaller = [n for n in range(1, run.micro_batch) if run.micro_batch % n == 0]
            if not smaller:
                sys.exit("out of memory with a single row: use a smaller model, or --offload=True")
            run.micro_batch = run.small_pass = smaller[-1]
            print(f"micro_batch={run.micro_batch}, since a larger one ran out of memory")
        seconds = try_passes(run, take_passes, rows)
        # all ranks take the size that fits on each; there is no progress to agree on yet
        _, oom, stop = parallel.agree(0.0, seconds is None, signals.stop)
        if stop:
            return seconds or (0.0, 0.0)
        if not oom:
            break
        run.state.oom_micro_batch = run.micro_batch
        torch.compiler.reset()  # drop the graphs of the larger size

    if run.settings["compile"] and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        names = ", ".join(name for name in os.environ if "TORCH" in name and "DISABLE" in name)
        print(f"WARNING: torch compiles nothing: unset {names or 'a switch'}, or --compile=False")
    on_one_gpu = run.device.type == "cuda" and parallel.WORLD_SIZE == 1
    # larger passes brought an H100 6 %: in a short budget a second compilation costs more
    pays_off = 50 * (run.clock.elapsed() - run.state.elapsed) < run.clock.left()
    if largest and on_one_gpu and (run.state.step or pays_off):
        # by the peak of the passes so far: twice the rows take at most twice of it
        most = 0.90 * usable // torch.cuda.max_memory_allocated() * run.small_pass
        while largest % (2 * run.micro_batch) == 0 and 2 * run.micro_batch <= most:
            run.micro_batch *= 2
        larger = run.micro_batch > run.small_pass and try_passes(run, take_passes, rows)
        if not larger:
            run.micro_batch = run.small_pass
        seconds = larger or seconds
        print(f"micro_batch={run.micro_batch}, for which the GPU has memory")
    if run.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.95 * usable / total)  # some more for later
    run.state.largest_pass = run.micro_batch
    return seconds
