"""Pre-train a masked language model from scratch inside a wall-clock budget.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or for longer
    torchrun --nproc_per_node=8 train.py --budget_hours=24    # on eight GPUs: more in the same time

data_dir comes from prepare.py. The clock starts just before compiling: compiling, evaluating and
saving count, preparing the data does not. out_dir gets log.csv, run.json, loss.png, ckpt.pt and
a model folder, all kept current; transformers loads it if the architecture is a ModernBERT.

One step, in main(): progress -> learning rate, rows, masks -> accumulate() -> update().
"The paper" is Cramming, arXiv 2212.14034.
"""

import gc
import importlib
import math
import os
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from nanocram.configurator import configure, require, settings

# fmt: off
# the run
data_dir = "data/fineweb"       # what prepare.py wrote
out_dir = "out/fineweb"         # where everything goes; a run that is there is moved aside
init = "scratch"                # scratch | resume: go on from out_dir/ckpt.pt
seed = 0                        # of the weights, the masks and the dropout
budget_hours = 24.0             # wall-clock hours for the whole run
max_steps = 0                   # stop after so many steps, without a clock; 0 = use the budget
# the batch
micro_batch = 256               # rows per forward pass; halved by itself where memory runs out
batch_size = 4096               # rows per optimiser step from batch_ramp on: 0.5M tokens
batch_start = 1024              # least rows per optimiser step
batch_ramp = 0.6                # share of the run in which rows grow (paper 4.3); 0 = at once all
# the objective
mask_rate = 0.30                # share of a row's tokens to predict; from 30 % at the start ...
mask_rate_end = 0.15            # ... to 15 % at the end: +0.5 of GLUE there (arXiv 2305.15096)
mask_token_share = 1.0          # share of those that become [MASK]; BERT's recipe has 0.8 ...
random_token_share = 0.0        # ... and 0.1 that become a random token; the rest stays
# the optimiser: why these values, and what lost, is told in results/README.md
optimizer = "muon"              # muon (on the blocks' matrices, AdamW on the rest) | adamw | adam
muon_lr = 0.02                  # peak learning rate of Muon; public speed runs have 0.02 to 0.035
muon_weight_decay = 0.05        # decoupled, of Muon's matrices
lr = 0.004                      # peak learning rate of AdamW, Adam; without Muon take 0.001
weight_decay = 0.0              # of AdamW (decoupled) and Adam (coupled); the paper has 0.01
beta1 = 0.9                     # of AdamW and Adam
beta2 = 0.95                    # of AdamW and Adam; the paper has 0.98
adam_eps = 1e-10                # of AdamW and Adam; the paper has 1e-12
grad_clip = 1.0                 # largest norm of the gradient, all together; 0 = no clipping
schedule = "trapezoid"          # trapezoid | triangle (the paper's) | cosine | linear | constant
warmup = 0.01                   # first share of the run, in which the rate rises (not triangle)
cooldown = 0.65                 # last share of the run, in which the rate falls to 0 (trapezoid)
# the model: the paper's size, natively a ModernBERT (see model.py)
vocab_size = 32768              # that of the data
seq_len = 128                   # that of the data: tokens in a row
max_seq_len = 512               # longest row the model takes later on
n_layer = 16
n_narrow = 0                    # last layers that compute predicted tokens alone; 0 acts as 1
n_head = 12
n_embd = 768
n_inner = 1536                  # width inside the MLP, behind the gate
activation = "geglu"            # geglu | relu2 | gelu
position = "rope"               # rope | sinusoidal (paper) | sinusoidal_fixed (its scale) | learned
post_norm = False               # norms behind the residual sums, as in the original BERT
embedding_norm = True           # a norm right after the embeddings
first_attn_norm = False         # a norm before the first attention too, beside the embeddings' norm
final_norm = True               # a norm after the last block
head_transform = False          # dense-GELU-norm before the decoder, as BERT and ModernBERT
linear_bias = False             # biases in attention, MLP and head (there also by norm_bias)
norm_bias = False               # biases in the norms
decoder_bias = True             # a bias for each entry of the vocabulary
token_types = 0                 # entries of a token-type table; BERT has 2
norm_eps = 1e-5
dropout = 0.0                   # one epoch or a few: nothing to regularise (paper 4.3)
zero_init = True                # the blocks' output matrices start at zero, as in speed runs
# the machine
device = "auto"                 # auto | cuda | mps | cpu
dtype = "auto"                  # auto | bfloat16 | float16 | float32: of matrix products
compile = True                  # torch.compile; off where it cannot
offload = False                 # keep weights, gradients and optimiser state in host memory
# the record
evals = 20                      # evaluations, evenly spread from the start on, and one at the end
eval_rows = 4096                # held-out rows in each
log_every = 10                  # optimiser steps per row of log.csv
checkpoint_minutes = 10.0       # between checkpoints; 0 = at the beginning and the end only
wandb_project = ""              # log to this project of wandb.ai too (pip install wandb)
samples = (                     # sentences to fill in, a | between two; '' = none
    "the capital of france is [MASK].|she opened the [MASK] and read the letter."
    "|water [MASK] at 100 degrees."
)
# fmt: on

if __name__ == "__main__":  # before the heavy imports: --help and a typo are answered at once
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes the first speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    configure(globals())

import numpy as np
import torch
from tqdm import tqdm

from model import MaskedLM, ModelConfig, make_loss
from nanocram import checkpoint, machine, model_folder, parallel, record, safety
from nanocram.data import IGNORE, Rows, draw_masks, fill_masks, held_out, load_meta
from nanocram.muon import Muon
from nanocram.offload import Streamed, memory_plan
from nanocram.tokenizer import Tokenizer

OUT_OF_MEMORY = "out of memory"
MAX_SKIPPED = 50  # unusable steps in a row end a run; float16 needs some to find its loss scale
RETRY_SECONDS = 60  # after a save that failed

# Everything that changes over the run is a function of progress in [0, 1].


def lr_scale(progress):
    """Learning rates as a share of their peaks; 0 at the end, unless constant or cooldown is 0."""
    if schedule == "triangle":  # the paper's: 0.25 at the start, 1 at 3/4, 0 at the end
        return min(0.25 + progress, 4 - 4 * progress)
    rise = progress / warmup if progress < warmup else 1.0
    if schedule == "constant":
        return rise
    if schedule == "trapezoid":
        fall = (1 - progress) / cooldown if cooldown else 1.0
        return max(0.0, min(rise, fall))
    done = max(0.0, (progress - warmup) / (1 - warmup))  # from 0, at the end of the warm-up, to 1
    if schedule == "linear":
        return min(rise, 1 - done)
    return min(rise, 0.5 + 0.5 * math.cos(math.pi * done))


def batch_rows(progress):
    """Rows per optimiser step, whole micro-batches: the paper's ramp, but not below batch_start."""
    if progress >= batch_ramp:
        return batch_size
    micro_batches = int(batch_size * progress / (batch_ramp * micro_batch)) + 1
    return min(batch_size, max(batch_start, micro_batch * micro_batches))


def mask_count(progress):
    """Tokens to predict in each row."""
    rate = mask_rate + (mask_rate_end - mask_rate) * progress
    return max(1, round(seq_len * rate))


def padded_mask_counts():
    """The mask counts that steps are padded to, ascending: three shapes to compile, not twenty.

    There is only one where the masking rate is fixed."""
    counts = [mask_count(i / 1000) for i in range(1001)]
    least, most = min(counts), max(counts)
    thirds = [least + math.ceil((most - least) * i / 3) for i in (1, 2, 3)]
    return sorted(set(thirds))


@dataclass
class State:
    """Where the loop is: exactly what a checkpoint keeps of it, beside the clock's seconds."""

    step: int = 0  # optimiser steps done, skipped ones included
    row: int = 0  # where the next step starts to read; it counts on through all epochs
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_row: int = 0  # those since the last usable one
    evals_done: int = -1  # number of the last evaluation; 0 is before the first step
    logged: int = -1  # step of the last row in log.csv
    loss_sum: float = 0.0  # of the usable steps since that row ...
    loss_count: int = 0  # ... and how many there were
    step_seconds: float = 0.0  # what the last step took
    eval_seconds: float = 0.0  # what the last evaluation took
    save_seconds: float = 0.0  # what the last save took
    start_seconds: float = 0.0  # what compile_and_fit() took, summed over all resumes
    asked_micro_batch: int = 0  # the setting as it was typed, and ...
    micro_batch: int = 0  # ... what it was halved to until a step fitted in memory
    last: dict = field(default_factory=dict)  # columns of log.csv, of the last step

    @property
    def applied_steps(self):
        return self.step - self.skipped


class Clock:
    """The budget: what is used up, what has to be kept for the end, and how far the run is.

    It starts before the compilation; compiling, training, evaluating and saving count. A resumed
    run goes on from the seconds in its checkpoint: what lies between costs nothing."""

    def __init__(self, state, budget_seconds, max_steps):
        self.state = state
        self.budget_seconds = budget_seconds
        self.max_steps = max_steps
        self.earlier = 0.0  # seconds used before the resume, as the checkpoint says
        # Seconds of this process, for the report at its end.
        self.spent = {"training": 0.0, "starting": 0.0, "evaluating": 0.0, "saving": 0.0}
        self.start()  # and again before it compiles

    def start(self):
        self.started = time.monotonic()

    def elapsed(self):
        """Seconds of the budget that are used up."""
        return self.earlier + time.monotonic() - self.started

    def reserve(self):
        """Seconds to keep for the end: an evaluation, a save, a step that a GPU may still be at."""
        state = self.state
        return 1.2 * (state.eval_seconds + state.save_seconds) + state.step_seconds

    def left(self):
        """Seconds until the reserve begins; infinite where steps are counted."""
        if self.max_steps:
            return math.inf
        return self.budget_seconds - self.reserve() - self.elapsed()

    def progress(self):
        """Share of the run that is over, in [0, 1]: of max_steps, or of the time to train in.

        Compiling takes of the budget, but the schedule begins after it. Progress can fall: a little
        where a reserve turns out smaller than the one before, and by a resume with more budget."""
        if self.max_steps:
            return min(1.0, self.state.step / self.max_steps)
        starting = self.state.start_seconds
        whole = self.budget_seconds - self.reserve() - starting
        return min(1.0, (self.elapsed() - starting) / max(1e-9, whole))


class Run:
    """A model in training: what the functions below share. Its fresh weights follow from `seed`.

    meta: meta.json of the data; rows: its train.bin, a data.Rows."""

    def __init__(self, config, meta, rows, dev, amp_dtype):
        if dev.type == "mps" and (offload or parallel.WORLD > 1):
            sys.exit("offload and several processes work on cuda and cpu: type --device=cpu")
        torch.manual_seed(seed)
        self.meta = meta
        self.rows = rows
        self.device = dev
        self.amp_dtype = amp_dtype  # of the matrix products; weights are float32
        self.folder = Path(out_dir)
        self.mask_counts = padded_mask_counts()
        if offload:
            plan, sums_stay = memory_plan(
                config,
                amp_dtype,
                micro_batch=micro_batch,
                seq_len=seq_len,
                n_predicted=self.mask_counts[-1],
                pinned=dev.type == "cuda",
                free_host=machine.free_bytes(torch.device("cpu")),
                free_device=machine.free_bytes(dev),
            )
            print(plan, flush=True)
        self.model = MaskedLM(config)
        self.loss_fn = make_loss(self.model, dev, amp_dtype)  # nats, summed over a micro-batch
        counts = self.mask_counts  # where masks fall evenly, each holds for a third of a run
        mean_positions = sum(counts) / len(counts)
        self.flops_per_token = self.model.flops_per_token(seq_len, mean_positions)
        self.matmul_rate = math.inf  # FLOP/s of a large product on all devices: MFU's yardstick
        if offload:  # the model stays on the host, and what it computes goes to the device
            self.streamed = Streamed(self.model, dev, amp_dtype, sums_stay)
        else:
            self.model.to(dev)
        self.weights = dict(self.model.named_parameters())
        self.optimizers = build_optimizers(self.weights)
        # In float16 the loss is scaled, so that small gradients survive. GradScaler makes its scale
        # at its first use: here, for a rank whose first step may have no micro-batch.
        where = next(iter(self.weights.values())).device
        self.scaler = torch.amp.GradScaler(where.type, enabled=amp_dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=where))
        self.state = State()
        self.clock = Clock(self.state, budget_hours * 3600, max_steps)
        # Of this process alone.
        self.fetched = {}  # {where it begins: the micro-batch on the device}, perhaps ahead of time
        self.first_row = 0  # state.row when this process began to train
        self.saved_steps = -1  # how many steps had been applied when it saved last ...
        self.next_save = 0.0  # ... and when it may save again, by time.monotonic()
        self.unlogged = []  # rows that log.csv could not take so far
        self.stop = False  # a signal has asked for the end
        self.wandb = None  # a run of wandb.ai


def build_optimizers(named):
    """[AdamW or Adam, and perhaps Muon] of {name: parameter}.

    Muon takes the blocks' matrices; of the rest all decays but norms and biases.
    Each group keeps its peak learning rate as "peak_lr"."""
    matrices, decayed, exempt = [], [], []
    for name, p in named.items():
        if optimizer == "muon" and ".layers." in name and p.ndim == 2:
            matrices.append(p)
        elif "norm" in name or "bias" in name:
            exempt.append(p)
        else:
            decayed.append(p)
    where = decayed[0].device.type
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    if exempt:
        groups.append({"params": exempt, "weight_decay": 0.0})
    fused = where in ("cuda", "cpu")
    options = {"lr": lr, "betas": (beta1, beta2), "eps": adam_eps, "fused": fused}
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
    optimizers = [kind(groups, **options)]
    if matrices:
        # bfloat16 suffices; where it is not native, float32 is many times faster.
        in_bf16 = dtype in ("auto", "bfloat16") and machine.native_bf16(where)
        products = torch.bfloat16 if in_bf16 else torch.float32
        optimizers.append(Muon(matrices, muon_lr, muon_weight_decay, dtype=products))
    for o in optimizers:
        for group in o.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def fetch(run, row):
    """The micro_batch rows from `row` on, on the device; called ahead of time it queues them."""
    if row not in run.fetched:
        rows = run.rows.read(row, micro_batch)
        on_gpu = run.device.type == "cuda"
        if on_gpu:
            rows = rows.pin_memory()
        run.fetched = {row: rows.to(run.device, non_blocking=on_gpu)}
    return run.fetched[row]


def batch_at(run, row, n_predict):
    """(ids, positions, labels) of the micro-batch at row, with n_predict labels in each row.

    Masks and dropout are drawn from (seed, row) alone: any rank, before or after any resume, gets
    the same batch for the same n_predict and micro_batch."""
    drawn_from = np.random.SeedSequence((seed, row)).generate_state(1)[0]
    torch.manual_seed(int(drawn_from))  # a CPU heeds 32 bits of a seed
    shares = mask_token_share, random_token_share
    n_positions = min((n for n in run.mask_counts if n >= n_predict), default=n_predict)
    return draw_masks(fetch(run, row), n_positions, n_predict, vocab_size, *shares)


def accumulate(run, n_rows, n_predict):
    """Add up the gradients of this rank's micro-batches, of a step of n_rows rows in all.

    Returns its part of the step's loss, a tensor on the device; None if the clock or a signal cut
    the step short on any rank: then nothing of it is kept."""
    n_labels = n_rows * n_predict  # each loss is divided by what the whole step predicts
    total_loss = torch.zeros((), device=run.device)
    starts = range(run.state.row, run.state.row + n_rows, micro_batch)
    cut = False
    for row in starts[parallel.RANK :: parallel.WORLD]:
        out_of_time = parallel.RANK == 0 and run.clock.progress() >= 1
        if run.stop or out_of_time:
            cut = True
            break
        ids, positions, labels = batch_at(run, row, n_predict)
        if offload:  # gradients go to the host with the last one
            run.streamed.is_last = row == starts[-1]
        loss = run.loss_fn(ids, positions, labels) / n_labels
        run.scaler.scale(loss).backward()
        total_loss += loss.detach()
        # A GPU is still busy with this micro-batch while the next is read and queued.
        fetch(run, row + parallel.WORLD * micro_batch)
    if parallel.any_rank(cut):
        run.model.zero_grad()
        return None
    return total_loss


def update(run, total_loss, lr_share):
    """Step the optimisers with the summed gradients; skip the step if these or the loss overflow.

    Returns (loss in nats per predicted token, norm of the gradient before clipping), floats."""
    if offload:
        run.streamed.collect()
    for weight in run.weights.values():
        if weight.grad is None:  # on a rank that had no micro-batch
            weight.grad = torch.zeros_like(weight)
    parallel.all_reduce([total_loss, *(weight.grad for weight in run.weights.values())])
    for o in run.optimizers:
        run.scaler.unscale_(o)
        for group in o.param_groups:
            group["lr"] = group["peak_lr"] * lr_share
    # A CPU takes the norm of a large tensor on one core, and less exactly: so first each row's.
    row_norms = [torch.linalg.vector_norm(w.grad, dim=-1) for w in run.weights.values()]
    norm = torch.nn.utils.get_total_norm(row_norms)
    torch.nn.utils.clip_grads_with_norm_(run.weights.values(), grad_clip or math.inf, norm)

    # The one time in a step that the CPU waits for its device: all before it was only queued (but
    # for collect() above, and for other ranks).
    loss, grad_norm = torch.stack((total_loss, norm.to(total_loss.device))).tolist()
    if math.isfinite(loss) and math.isfinite(grad_norm):
        for o in run.optimizers:
            o.step()  # not scaler.step(): it asks the device for what is known by now
        run.state.loss_sum += loss
        run.state.loss_count += 1
        run.state.skipped_in_row = 0
    else:
        run.state.skipped += 1
        run.state.skipped_in_row += 1
    run.scaler.update()  # halves the loss scale after an overflow
    run.model.zero_grad()
    return loss, grad_norm


def compile_and_fit(run, held_out_rows):
    """Compile run.loss_fn if asked, and halve micro_batch until a step fits in memory.

    Returns data.held_out() of the rows, in batches of that size. A signal ends it early."""
    global micro_batch
    eager = run.loss_fn
    compiled = compile
    parallel.any_rank(False)  # a rank that has ended is noticed here; NCCL would wait for it
    parallel.all_reduce([torch.zeros((), device=run.device)])  # from now on NCCL has its memory too
    while True:
        held_out_sets = held_out(held_out_rows, micro_batch)
        run.loss_fn = eager
        if compiled and offload:
            run.loss_fn = run.streamed.compiled(eager)
        elif compiled:
            run.loss_fn = torch.compile(eager, dynamic=False)
        trouble = try_a_step(run, compiled, held_out_sets[15][0])
        if parallel.any_rank(trouble not in ("", OUT_OF_MEMORY)):
            why = trouble or "so another rank says"
            print(f"torch.compile does not work here, going on without it: {why}")
            compiled = False
        elif parallel.any_rank(trouble == OUT_OF_MEMORY):
            if micro_batch == 1:
                raise MemoryError
            smaller = smaller_micro_batch()
            failed = f"{OUT_OF_MEMORY} with micro_batch={micro_batch}"
            print(f"{failed}: going on with {smaller}", flush=True)
            micro_batch = smaller
            # Nothing of the larger size stays, neither its rows nor what was compiled for it.
            run.fetched = {}
            torch.compiler.reset()
        else:
            return held_out_sets
        if parallel.any_rank(run.stop):
            return held_out_sets


def smaller_micro_batch():
    """The largest size below micro_batch that divides it, and with it the batch."""
    return max(n for n in range(1, micro_batch) if micro_batch % n == 0)


def try_a_step(run, compiled, held_out_batch):
    """Rehearse a step, and leave nothing of it in memory.

    Returns "", OUT_OF_MEMORY, or why it does not compile."""
    trouble = ""
    try:
        rehearse(run, held_out_batch)
    except Exception as e:
        if safety.is_out_of_memory(e):
            trouble = OUT_OF_MEMORY
        elif compiled:  # whatever inductor raises: no compiler, no Triton, a card too old
            trouble = safety.first_line(e)
        else:
            raise
    # Not in the handler: as long as there is an exception, so is all that its frames hold.
    run.model.zero_grad()
    run.model.train()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return trouble


def rehearse(run, held_out_batch):
    """Run the passes of a step's micro-batches and of an evaluation: this compiles all graphs.

    The second micro-batch, as large as the first, finds its gradients in memory, beside room for
    the optimisers' states. No weight changes."""
    room = []
    for o in run.optimizers:
        moments = 1 if isinstance(o, Muon) else 2
        params = [p for group in o.param_groups for p in group["params"]]
        if not o.state:  # a resumed one has them already
            room += [torch.empty_like(p) for p in params for _ in range(moments)]
    if run.device.type == "cuda":  # kernels take memory that no tensor shows, other processes too
        spare = torch.cuda.get_device_properties(run.device).total_memory // 20
        room.append(torch.empty(spare, dtype=torch.uint8, device=run.device))
    counts = run.mask_counts
    for n_predict in (counts[-1], *reversed(counts)):  # the largest twice
        run.loss_fn(*batch_at(run, run.state.row, n_predict)).backward()
    if parallel.RANK == 0:
        held_out_loss(run, [held_out_batch])


@torch.no_grad()
def held_out_loss(run, batches):
    """Nats per predicted token over batches of data.held_out()."""
    total, count = 0.0, 0
    run.model.eval()
    for batch in batches:
        total += run.loss_fn(*(tensor.to(run.device) for tensor in batch))
        count += (batch[2] != IGNORE).sum().item()
    run.model.train()
    return total.item() / count


def evaluate(run, held_out_sets):
    """{column of log.csv: held-out loss}, logged; the time it took becomes part of the reserve."""
    started = time.monotonic()
    losses = {f"val_loss_{rate}": held_out_loss(run, held_out_sets[rate]) for rate in (15, 25)}
    # Nats per character of the text: losses of different vocabularies compare by it.
    tokens_per_char = run.meta["counts"]["val_tokens"] / run.meta["counts"]["val_characters"]
    losses["val_nats_per_char"] = losses["val_loss_15"] * tokens_per_char
    run.state.eval_seconds = time.monotonic() - started
    run.clock.spent["evaluating"] += run.state.eval_seconds
    log_step(run, losses)
    return losses


def log_step(run, losses=None):
    """Add a row to log.csv, with the mean loss since the last one; a failure is said, no more."""
    state = run.state
    if state.loss_count:
        state.last["loss"] = state.loss_sum / state.loss_count
    tokens = state.row * seq_len
    flops = float(tokens * run.flops_per_token)
    row = {"elapsed_s": run.clock.elapsed(), "step": state.step, "tokens": tokens, "flops": flops}
    row |= state.last
    row["skipped"] = state.skipped
    row |= losses or {}
    # The row of the final evaluation replaces one that the same step has already.
    run.unlogged = [other for other in run.unlogged if other["step"] < state.step] + [row]
    write_rows(run)
    if run.wandb:
        try:
            run.wandb.log(row, step=state.step)
        except Exception as e:  # a service that is down, or whatever it raises
            print(f"WARNING: wandb is left out from now on: {safety.first_line(e)}")
            run.wandb = None
    state.loss_sum, state.loss_count = 0.0, 0


def write_rows(run):
    """Add to log.csv the rows that it lacks; those that it cannot take wait for the next call."""
    try:
        while run.unlogged:
            row = run.unlogged[0]
            if run.state.logged == row["step"]:  # the earlier row of the same step
                record.drop_rows_after(run.folder, row["step"] - 1)
            record.append_row(run.folder, row)
            run.state.logged = row["step"]
            del run.unlogged[0]
    except (OSError, ValueError) as e:
        print(f"WARNING: cannot write to {run.folder}/log.csv: {safety.first_line(e)}")


def save(run):
    """Write ckpt.pt, the model folder, loss.png and the card, each beside its goal and renamed.

    Returns whether that worked. What is not written stands as it was, and the run goes on."""
    started = time.monotonic()
    write_rows(run)
    try:
        checkpoint.write(run, optimizer)
        model_folder.save(run.model, run.folder)
        record.plot(run.folder)
        record.write_card(run.folder)
    except (OSError, RuntimeError, ValueError) as e:  # torch may raise a plain RuntimeError
        why = safety.first_line(e)
        print(f"WARNING: cannot save all to {run.folder}, the rest stands as it was: {why}")
        run.clock.spent["saving"] += time.monotonic() - started
        run.next_save = time.monotonic() + RETRY_SECONDS
        return False
    run.saved_steps = run.state.applied_steps
    if run.saved_steps > 0:  # else the next is after the first step that is applied
        run.next_save = time.monotonic() + 60 * (checkpoint_minutes or math.inf)
    run.state.save_seconds = time.monotonic() - started
    run.clock.spent["saving"] += run.state.save_seconds
    return True


def evaluation_is_due(run, number):
    """Whether evaluation `number` is still to do, and fits in before the reserve begins."""
    return number > run.state.evals_done and run.state.eval_seconds < run.clock.left()


def is_hopeless(number, number_before, held_out_loss):
    """Whether evaluation `number` is the first after an eighth of the run, with a loss above 6.

    After 3 of 24 hours the paper's code can end such a run. Good runs of minutes are above it for a
    larger share of their time, so nothing is said of them."""
    is_long = budget_hours >= 1 and not max_steps
    is_first = number > 0 and number_before < evals / 8 <= number
    return is_long and is_first and held_out_loss > 6


def save_is_due(run):
    """Whether there is something new to save, it is time, and it fits in before the reserve begins.

    The first is at once: a folder that cannot be written shows now. The second is after the first
    step that was applied: the optimisers have their states then, which may double a save."""
    is_new = run.saved_steps != run.state.applied_steps
    is_time = time.monotonic() >= run.next_save
    return is_new and is_time and run.state.save_seconds < run.clock.left()


def evaluate_log_save(run, held_out_sets, tokenizer, write):
    """Evaluate or log, then save, whatever is due before the next step.

    write(line) prints beside the progress bar."""
    state = run.state
    number = int(run.clock.progress() * evals)
    if evaluation_is_due(run, number):
        number_before = state.evals_done
        state.evals_done = number
        losses = evaluate(run, held_out_sets)
        when = f"{run.clock.elapsed() / 60:7.1f} min  step {state.step:6,}"
        both = f"{losses['val_loss_15']:.3f} (15 %) {losses['val_loss_25']:.3f} (25 %)"
        write(f"{when}  held-out loss {both}")
        if is_hopeless(number, number_before, losses["val_loss_15"]):
            write("WARNING: that is still above 6: few such runs come to anything")
        if samples:
            sentence = sentences()[number % len(sentences())]
            write(guesses(run, tokenizer, sentence))
    elif state.step % log_every == 0 and state.step > state.logged:
        log_step(run)
    if save_is_due(run):
        save(run)


def throughput(run):
    """(tokens per second, MFU), of all ranks, while this process trained."""
    tokens = (run.state.row - run.first_row) * seq_len
    speed = tokens / max(1e-9, run.clock.spent["training"])
    return speed, speed * run.flops_per_token / run.matmul_rate


def forecast(run, progress):
    """What the rest of the run holds at the speed so far, in a line, and a warning if need be."""
    speed, _ = throughput(run)
    moments = [progress + (1 - progress) * i / 100 for i in range(100)]
    batches = [batch_rows(moment) for moment in moments]
    if max_steps:
        steps = max_steps - run.state.step
        rows = steps * sum(batches) / 100
    else:
        # Each hundredth of the time has as many rows, in steps as large as the ramp has them.
        rows = speed * (run.clock.budget_seconds - run.clock.elapsed()) / seq_len
        steps = sum(rows / 100 / batch for batch in batches)
    tokens = rows * seq_len
    rest = f"{steps:,.0f} steps, {tokens / 1e6:,.1f}M tokens, {rows / run.rows.count:.2f} epochs"
    said = f"{speed:,.0f} tokens/s: the rest holds {rest}"
    # A curriculum is one pass through sorted rows (paper 4.4): its first part is another data set.
    will_read = int(run.state.row + rows)
    share = will_read / run.rows.count
    if run.meta["settings"]["order"] == "curriculum" and share < 0.95:
        said += f"\nWARNING: of the sorted rows only the first {share:.0%} will be read: "
        said += f"type prepare.py ... --max_rows={will_read}"
    return said


def status(run, progress):
    """What the progress bar says."""
    last = run.state.last
    speed, mfu = throughput(run)
    minutes = (run.clock.elapsed() - run.state.start_seconds) / 60
    left = minutes / max(progress, 1e-9) - minutes
    losses = f"loss {last['loss']:.3f}  lr {last['lr']:.1e}"
    return f"{losses}  {speed:,.0f} tokens/s  MFU {mfu:.0%}  {left:.0f} min left"


def guesses(run, tokenizer, sentence):
    """A sentence and the three likeliest words for its [MASK], as a line."""
    top = fill_masks(run.model, tokenizer, sentence, run.device)
    return f"  {sentence}  " + ", ".join(f"{word} {p:.0%}" for word, p in top)


def report(run, tokenizer):
    """Say where the time went and what the model has learnt."""
    state, clock = run.state, run.clock
    speed, mfu = throughput(run)
    tokens = state.row * seq_len
    epochs = state.row / run.rows.count
    print(f"{state.step:,} steps, {state.skipped} of them skipped; {tokens:,} tokens, ", end="")
    print(f"{epochs:.2f} epochs; {speed:,.0f} tokens/s, MFU {mfu:.0%}")
    seconds = clock.spent | {"before the resume": clock.earlier}
    seconds["other"] = clock.elapsed() - sum(seconds.values())
    parts = ", ".join(f"{name} {s:.0f}" for name, s in seconds.items() if s)
    print(f"{clock.elapsed():.0f} s: {parts}")
    for sentence in sentences():
        print(guesses(run, tokenizer, sentence))
    drawn = (run.folder / "loss.png").exists()
    picture = "loss.png" if drawn else "no loss.png (pip install matplotlib draws one)"
    files = "model.safetensors and config.json (the model), log.csv, run.json, ckpt.pt"
    print(f"{run.folder}: {files}, {picture}")


def sentences():
    return samples.split("|") if samples else []


def check_settings():
    """The ModelConfig of the settings; exits with one line if they cannot work."""
    other_share = round(1 - mask_token_share, 9)  # 1 - 0.9 is 0.09999999999999998
    # fmt: off
    require(globals(), {
        "init": ("scratch", "resume"), "optimizer": ("muon", "adamw", "adam"),
        "schedule": ("trapezoid", "triangle", "cosine", "linear", "constant"),
        "device": ("auto", "cuda", "mps", "cpu"),
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "seed": (0, 2**62), "max_steps": (0, 2**62), "budget_hours": (0, 1e6),
        "micro_batch": (1, 2**20), "batch_size": (1, 2**30), "batch_start": (1, 2**30),
        "batch_ramp": (0, 1), "seq_len": (8, max_seq_len), "grad_clip": (0, 1e9),
        "mask_rate": (0.01, 0.9), "mask_rate_end": (0.01, 0.9), "mask_token_share": (0, 1),
        "random_token_share": (0, other_share), "lr": (0, 1e3),
        "muon_lr": (0, 1e3), "weight_decay": (0, 1e3), "muon_weight_decay": (0, 1e3),
        "beta1": (0, 0.99999), "beta2": (0, 0.99999), "adam_eps": (0, 1), "warmup": (0, 0.99),
        "cooldown": (0, 1), "evals": (0, 10**6), "eval_rows": (1, 10**8), "log_every": (1, 10**9),
        "checkpoint_minutes": (0, 1e6),
    })
    # fmt: on
    if not budget_hours and not max_steps:
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    sizes = {"batch_size": batch_size, "batch_start": batch_start if batch_ramp else batch_size}
    for name, rows in sizes.items():
        if rows % micro_batch:
            fits = f"type for example --{name}={max(1, rows // micro_batch) * micro_batch}"
            sys.exit(f"{name}={rows} is no multiple of micro_batch={micro_batch}: {fits}")
    if any(sentence.count("[MASK]") != 1 for sentence in sentences()):
        sys.exit("samples: each sentence needs one [MASK], and a | stands between two sentences")
    if offload and parallel.WORLD > 1:
        sys.exit("offload is for one process: type --offload=False, or leave torchrun out")
    if offload and optimizer == "muon":
        sys.exit(
            "offload steps on the host, too slow for Muon there: type --optimizer=adamw --lr=0.001"
        )
    try:
        return ModelConfig(**{f.name: globals()[f.name] for f in fields(ModelConfig)})
    except ValueError as e:
        sys.exit(e)


def write_facts(run):
    """Write run.json: the settings, what they make, the text, the machine."""
    size = sum(weight.numel() for weight in run.weights.values())
    rate = run.matmul_rate / parallel.WORLD
    facts = {"parameters": size, "flops_per_token": run.flops_per_token, "matmul_flops": rate}
    facts |= {"amp_dtype": str(run.amp_dtype), "processes": parallel.WORLD}
    facts |= {"asked_micro_batch": run.state.asked_micro_batch}  # the settings have what fitted
    text = run.meta["settings"]
    corpus = {"source": text["source"], "normalisation": text["normalisation"]}
    facts |= {"data": run.meta["sha256"]["train.bin"], "corpus": corpus | run.meta["counts"]}
    facts |= machine.describe(run.device)
    record.write_facts(run.folder, data_dir, all_settings(), facts)


def all_settings():
    """{name: value} of the settings as they are now."""
    return {name: globals()[name] for name in settings(__file__)}


def begin_record(run, wandb):
    """Make out_dir ready; say what this run is, and what of it may surprise."""
    if init == "resume":
        record.resume(run.folder, all_settings(), run.state.step, run.clock.earlier)
    else:
        record.new_folder(run.folder)
    write_facts(run)
    if wandb:
        name = run.folder.name
        run.wandb = wandb.init(project=wandb_project, name=name, config=all_settings())
    size = sum(weight.numel() for weight in run.weights.values())
    rate = run.matmul_rate / parallel.WORLD
    work = f"{size / 1e6:.1f}M parameters, {run.flops_per_token / 1e6:.0f} MFLOP per token"
    speed = f"multiplies matrices of {run.amp_dtype} at {rate / 1e12:.2f} TFLOP/s"
    print(f"{work}; {run.device.type} {speed}", flush=True)
    n_micro = batch_rows(0) // micro_batch
    if n_micro % parallel.WORLD:
        print(f"{parallel.WORLD} ranks, {n_micro} micro-batches: some idle, lower --micro_batch")
    why = model_folder.not_native(run.model.config)
    if why:
        print(f"with {why} this is no ModernBERT: model_folder.load() reads it, not transformers")


def main():
    # Whatever is wrong with settings, machine and data is said before anything is written.
    global micro_batch
    config = check_settings()
    wandb = importlib.import_module("wandb") if wandb_project else None
    parallel.join(device)
    dev, amp_dtype = machine.pick(device, dtype)
    has_bf16 = machine.native_bf16(dev.type)
    if parallel.any_rank(has_bf16) and parallel.any_rank(not has_bf16):
        sys.exit("not all ranks have bfloat16: start torchrun on devices of one kind")
    meta = load_meta(data_dir, vocab_size=vocab_size, seq_len=seq_len)
    data = Path(data_dir)
    tokenizer = Tokenizer(data / "tokenizer.json")
    if any(len(tokenizer.encode(sentence)) + 2 > max_seq_len for sentence in sentences()):
        sys.exit(f"samples: a sentence has more than {max_seq_len} tokens: type shorter --samples")
    counts = meta["counts"]
    train_rows = Rows(data / "train.bin", counts["rows"], seq_len, vocab_size)
    val_rows = Rows(data / "val.bin", counts["val_rows"], seq_len, vocab_size)
    held_out_rows = val_rows.read(0, min(val_rows.count, eval_rows))

    # The run: fresh, or from its checkpoint. One process at a time may write to out_dir.
    run = Run(config, meta, train_rows, dev, amp_dtype)
    state, clock = run.state, run.clock
    run.matmul_rate = machine.matmul_rate(dev, amp_dtype) * parallel.WORLD
    lock = safety.lock(safety.lock_file(out_dir)) if parallel.RANK == 0 else None
    if init == "resume":
        # Weights, the optimisers' states, the loss scale, State (in place), and the seconds used
        # until then.
        checkpoint.restore(run, optimizer)
    if state.asked_micro_batch == micro_batch:  # typed so before the resume: what fitted then, fits
        micro_batch = state.micro_batch
    else:
        state.asked_micro_batch = micro_batch
    if micro_batch < state.asked_micro_batch:
        known = f"since {state.asked_micro_batch} did not fit in memory"
        print(f"micro_batch={micro_batch}, {known} (another --micro_batch is tried anew)")
    if parallel.RANK == 0:
        begin_record(run, wandb)

    # The first signal asks the loop to end and save; a second one of its kind ends the process.
    def stop_run():
        run.stop = True

    safety.stop_at_signals(stop_run)

    # The clock starts. Compiling and finding a micro_batch that fits count, though the schedule
    # begins after them.
    clock.start()
    run.first_row = state.row
    held_out_sets = compile_and_fit(run, held_out_rows)
    state.micro_batch = micro_batch
    if parallel.RANK == 0 and micro_batch < state.asked_micro_batch:
        write_facts(run)
    clock.spent["starting"] = time.monotonic() - clock.started
    state.start_seconds += clock.spent["starting"]
    # Where a larger budget has taken progress back, evaluations become due again.
    state.evals_done = min(state.evals_done, int(clock.progress() * evals))
    form = "{percentage:3.0f}%|{bar}|{postfix}"
    hidden = True if parallel.RANK > 0 else None  # None: where there is no terminal
    bar = tqdm(total=1.0, disable=hidden, bar_format=form)
    foretold = False
    try:
        while True:
            # What is due now: rank 0 evaluates, logs and saves, the others wait for it below.
            if parallel.RANK == 0 and not run.stop and clock.progress() < 1:
                evaluate_log_save(run, held_out_sets, tokenizer, bar.write)

            # Where the run is, by rank 0's clock for all; a signal to any rank ends them all.
            progress, stop = parallel.agree(clock.progress(), run.stop)
            if stop or progress >= 1:
                break

            # One step: how large it is, how much it hides and how far it goes follow from progress.
            started = time.monotonic()
            n_rows = batch_rows(progress)
            n_predict = mask_count(progress)
            lr_share = lr_scale(progress)
            total_loss = accumulate(run, n_rows, n_predict)
            if total_loss is None:
                continue  # cut short by the clock or a signal: the next round ends the run
            loss, grad_norm = update(run, total_loss, lr_share)
            state.step += 1
            state.row += n_rows
            state.last = {"loss": loss, "grad_norm": grad_norm, "lr": lr * lr_share}
            state.last |= {"batch_size": n_rows, "mask_rate": n_predict / seq_len}
            if optimizer == "muon":
                state.last["muon_lr"] = muon_lr * lr_share
            state.step_seconds = time.monotonic() - started
            clock.spent["training"] += state.step_seconds
            if state.skipped_in_row >= MAX_SKIPPED:
                said = f"no finite gradient in {MAX_SKIPPED} steps, up to step {state.step}"
                sys.exit(f"{said}, row {state.row}: lower the learning rate and resume")

            bar.n = clock.progress()
            bar.set_postfix_str(status(run, bar.n))
            if not foretold and clock.spent["training"] > 10:
                bar.write(forecast(run, progress))
                foretold = True
    except (SystemExit, OSError):
        # train.bin has changed or a rank is gone (SystemExit), or a disk fails to read (OSError;
        # save() catches its own): what was learnt is kept. After 50 unusable steps it is not, for
        # the weights may be ruined: the checkpoint before stands.
        if parallel.RANK == 0 and state.skipped_in_row < MAX_SKIPPED:
            save(run)
        raise
    bar.close()

    # The end: a run that was stopped is kept for --init=resume, one that is over is measured.
    if parallel.RANK == 0:
        is_over = progress >= 1
        if is_over:
            losses = evaluate(run, held_out_sets)
            a, b = losses["val_loss_15"], losses["val_loss_25"]
            print(f"held-out loss {a:.4f} at 15 % masked, {b:.4f} at 25 %; ", end="")
            print(f"{losses['val_nats_per_char']:.4f} nats per character")
        if not save(run) or run.unlogged:
            sys.exit(1)
        if is_over:
            report(run, tokenizer)
            if state.row == run.first_row:
                print("nothing was left to train: type a larger --budget_hours (or --max_steps)")
        else:
            where = f"step {state.step:,}, after {clock.elapsed() / 60:.1f} minutes"
            print(f"stopped at {where}: --init=resume goes on")
        lock.close()
    parallel.leave()


def less_memory():
    """What to type where memory does not suffice."""
    advice = ["a smaller model"]
    if not offload:
        advice.insert(0, "--offload=True --optimizer=adamw --lr=0.001")
    if micro_batch > 1:
        resumed = "with --init=resume, if there is a checkpoint"
        advice.insert(0, f"--micro_batch={smaller_micro_batch()} ({resumed})")
    return ", or ".join(advice)


if __name__ == "__main__":
    then = "--init=resume goes on from the last checkpoint, if there is one"
    safety.run(main, out_dir, then, less_memory)
