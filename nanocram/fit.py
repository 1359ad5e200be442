"""Find the micro_batch that fits in memory, and say in one line why torch cannot compile."""

import contextlib
import gc
import sys

import torch

from nanocram import parallel, safety


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


def later_memory(run):
    """Tensors as large as what later steps take: optimisers' states, the sum over the ranks, and
    5 % of a GPU."""
    copies = (parallel.WORLD_SIZE > 1) + (0 if run.state.step else 2)  # a resume has the states
    tensors = [torch.empty_like(p) for p in run.model.parameters() for _ in range(copies)]
    if run.device.type == "cuda":
        total = torch.cuda.get_device_properties(run.device).total_memory
        tensors.append(torch.empty(total // 20, dtype=torch.uint8, device=run.device))
    return tensors


def find_micro_batch(run, take_passes, signals):
    """Make a train.Run's micro_batch smaller until take_passes(), which changes no weight, fits in
    memory on every rank; return the seconds that it returns. Exits if a single row is too much."""
    seconds = 0.0, 0.0  # where a signal comes first
    while True:
        # after an out-of-memory error, of an earlier start too, take the next smaller divisor
        while 0 < run.state.oom_micro_batch <= run.micro_batch:
            smaller = [n for n in range(1, run.micro_batch) if run.micro_batch % n == 0]
            if not smaller:
                sys.exit("out of memory with a single row: use a smaller model, or --offload=True")
            run.micro_batch = smaller[-1]
            print(f"micro_batch={run.micro_batch}, since a larger one ran out of memory")
        oom = False
        held = None
        try:
            held = later_memory(run)
            with compile_errors():
                seconds = take_passes()
        except Exception as e:
            oom = safety.is_oom(e)
            if not oom:
                raise
        for name, p in run.model.named_parameters():
            if not oom and p.requires_grad and p.grad is None:
                print(f"WARNING: nothing reads {name}, so it is not trained")
        # free the memory; inside of `except` the traceback would keep it
        del held
        run.model.zero_grad()
        run.rows.fetched.clear()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        # all ranks take the size that fits on each; there is no progress to agree on yet
        _, oom, stop = parallel.agree(0.0, oom, signals.stop)
        if stop or not oom:
            return seconds
        run.state.oom_micro_batch = run.micro_batch
        torch.compiler.reset()  # drop the graphs of the larger size
