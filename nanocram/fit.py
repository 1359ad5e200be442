"""Before the first step: compile it, and halve the micro-batch until it fits in memory.

    python train.py config/tiny.py --compile=True

It happens once, in the budget, and again where memory runs out later on; a step of training needs
none of it.
"""

import contextlib
import gc
import sys

import torch

from nanocram import parallel, safety

TOO_LARGE = "out of memory"


class NoRoom(RuntimeError):
    """Memory ran out in the passes of a step, on this rank or another; no weight has changed."""


@contextlib.contextmanager
def together():
    """Where memory runs out inside, NoRoom is raised, on all ranks."""
    is_full = False
    try:
        yield
    except Exception as e:
        if not safety.is_out_of_memory(e):
            raise
        is_full = True
    if parallel.any_rank(is_full):
        raise NoRoom(TOO_LARGE)


def try_step(step, *args):
    """Take step(*args), and return whether there was memory for it.

    It returns before anything else is done: an exception keeps what its frames hold."""
    try:
        step(*args)
    except NoRoom:
        return False
    return True


def compile_and_fit(run, rehearse, must_compile, signals):
    """Compile run.loss_fn if run.compiled asks for it; halve run.state.micro_batch until it fits.

    rehearse() takes the passes of a step. Where they run but do not compile, run.compiled becomes
    False and the run goes on without; must_compile: it exits with one line. What does not run
    without compiling either is no compiler's fault, and raises. A signal ends this early."""
    state = run.state
    why = ""  # it does not compile
    torch.compiler.reset()  # an earlier run of this process counts against torch's limit of graphs
    parallel.any_rank(False)  # a rank that has ended is noticed here; NCCL would wait for it
    parallel.meet(run.device)
    while True:
        if run.compiled:  # nothing is to be seen until it is done
            print("compiling: it may take a few minutes", flush=True)
        run.loss_fn = run.eager_loss_fn
        if run.compiled and run.streamed:
            run.loss_fn = run.streamed.compile(run.eager_loss_fn)
        elif run.compiled:
            run.loss_fn = torch.compile(run.eager_loss_fn, dynamic=False)
        trouble = attempt(run, rehearse)
        if parallel.any_rank(trouble not in ("", TOO_LARGE)):
            why = f"torch.compile does not work here ({trouble or 'so another rank says'})"
            run.compiled = False
        elif parallel.any_rank(trouble == TOO_LARGE):
            if state.micro_batch == 1:
                raise MemoryError
            smaller = next_smaller(state.micro_batch)
            failed = f"{TOO_LARGE} with micro_batch={state.micro_batch}"
            print(f"{failed}: going on with {smaller}", flush=True)
            state.micro_batch = smaller
            torch.compiler.reset()  # nothing that was compiled for the larger size stays
        else:
            break
        if parallel.any_rank(signals.stop):
            break
    if why and must_compile:
        sys.exit(f"{why}: mend that, or type --compile=False, which is some third slower")
    if why:
        print(f"{why}: going on without it")


def next_smaller(micro_batch):
    """The largest size below micro_batch that divides it, and with it the batch."""
    return max(n for n in range(1, micro_batch) if micro_batch % n == 0)


def attempt(run, rehearse):
    """Call rehearse() and leave nothing of it in memory.

    Returns "", TOO_LARGE, or why it does not compile."""
    trouble = ""
    try:
        rehearse_beside_the_rest(run, rehearse)
    except Exception as e:
        if safety.is_out_of_memory(e):
            trouble = TOO_LARGE
        elif run.compiled:  # whatever inductor raises: no compiler, no Triton, a card too old
            trouble = safety.first_line(e)
        else:
            raise
    # Not in the handler: as long as there is an exception, so is all that its frames hold.
    clear(run)
    return trouble


def clear(run):
    """Leave nothing of earlier passes in memory: no gradients, no rows."""
    run.model.zero_grad()
    run.model.train()
    run.rows.fetched = {}
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rehearse_beside_the_rest(run, rehearse):
    """Call rehearse() beside tensors as large as all that comes later: the optimisers' states."""
    room = []
    for o in run.optimizers:
        moments = getattr(o, "MOMENTS", 2)  # of Adam and AdamW
        params = [p for group in o.param_groups for p in group["params"]]
        if not o.state:  # a resumed one has them already
            room += [torch.empty_like(p) for p in params for _ in range(moments)]
    # Kernels take memory too, and other processes; in mid-run they have theirs.
    if run.device.type == "cuda" and not run.is_set_up:
        spare = torch.cuda.get_device_properties(run.device).total_memory // 20
        room.append(torch.empty(spare, dtype=torch.uint8, device=run.device))
    rehearse()
