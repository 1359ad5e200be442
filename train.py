"""Pre-train a masked language model from scratch inside a wall-clock budget.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or for longer
    torchrun --nproc_per_node=8 train.py --micro_batch=128    # a day on eight GPUs

prepare.py writes data_dir. This script keeps out_dir current: log.csv, run.json, loss.png, ckpt.pt
and a model folder, which transformers loads if the architecture is a ModernBERT. "The paper" is
Cramming, arXiv 2212.14034.
"""

import gc
import math
import os
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from nanocram.settings import configure

# fmt: off
# the run
data_dir = "data/fineweb"       # what prepare.py wrote
out_dir = "out/fineweb"         # where everything goes; an earlier run in it is moved aside
init = "scratch"                # scratch | resume: go on from out_dir/ckpt.pt
seed = 0                        # of the weights, the masks and the dropout
budget_hours = 24.0             # wall-clock hours, from compiling to the last save
max_steps = 0                   # stop after so many steps, without a clock; 0 = use the budget
# the batch
micro_batch = 256               # rows per forward pass; halved at the start if memory runs out
batch_size = 4096               # rows per optimiser step, once the ramp is over: 0.5M tokens
batch_ramp = 0.6                # share of the run in which they grow from 0 to it (paper 4.3) ...
batch_start = 1024              # ... but never below this
# the objective
mask_rate = 0.30                # share of a row's tokens to predict, at the start ...
mask_rate_end = 0.15            # ... and at the end (arXiv 2305.15096: +0.5 of GLUE)
mask_token_share = 1.0          # share of those that become [MASK] (BERT: 0.8)
random_token_share = 0.0        # share that become a random token (BERT: 0.1); the rest stays
# the optimiser: results/README.md tells why these values, and what lost
optimizer = "muon"              # muon (on the blocks' matrices, AdamW on the rest) | adamw | adam
muon_lr = 0.01                  # peak learning rate of Muon; wide models lose with 0.02
muon_weight_decay = 0.05        # decoupled, of Muon's matrices
lr = 0.004                      # peak learning rate of AdamW, Adam; without Muon take 0.001
weight_decay = 0.0              # of AdamW (decoupled) and Adam (coupled); the paper has 0.01
beta1 = 0.9                     # of AdamW and Adam
beta2 = 0.95                    # of AdamW and Adam; the paper has 0.98
adam_eps = 1e-10                # of AdamW and Adam; the paper has 1e-12
grad_clip = 1.0                 # largest norm of the whole gradient; 0 = no clipping
schedule = "trapezoid"          # trapezoid | triangle (the paper's) | cosine | linear | constant
warmup = 0.01                   # first share of the run, in which the rate rises (not triangle)
cooldown = 0.65                 # last share of the run, in which the rate falls to 0 (trapezoid)
# the model: the paper's size; model_folder.py writes it as a ModernBERT
vocab_size = 32768              # that of the data
seq_len = 128                   # that of the data: tokens in a row
max_seq_len = 512               # longest row the model takes in fine-tuning and use
n_layer = 16
n_narrow = 0                    # 2 or more: the last layers see predicted tokens only (NarrowBERT)
n_head = 12
n_embd = 768
n_inner = 1536                  # width inside the MLP, after the gate
activation = "geglu"            # geglu | relu2 | gelu: ACTIVATIONS in model.py
position_embedding = "rope"     # rope | sinusoidal (paper) | sinusoidal_fixed | learned
post_norm = False               # norms after the residual sums, as in the original BERT
embedding_norm = True           # a norm right after the embeddings
first_attn_norm = False         # a norm before the first attention too
final_norm = True               # a norm after the last block
head_transform = False          # dense-GELU-norm before the decoder, as BERT and ModernBERT
linear_bias = False             # biases in attention, MLP and the head's dense layer
norm_bias = False               # biases in the norms and in the head's dense layer
decoder_bias = True             # a bias for each entry of the vocabulary
token_types = 0                 # entries of a token-type table; BERT has 2
norm_eps = 1e-5
dropout = 0.0                   # one epoch or a few: nothing to regularise (paper 4.3)
zero_init = True                # the blocks' output matrices start at zero
# the machine
device = "auto"                 # auto | cuda | mps | cpu
dtype = "auto"                  # auto | bfloat16 | float16 | float32: of matrix products
compile = True                  # use torch.compile
offload = False                 # keep weights, gradients and optimiser state in host memory
# what is logged and saved
evals = 20                      # evaluations, evenly spread over the run, and one at the end
eval_rows = 4096                # held-out rows in each
log_every = 10                  # optimiser steps per row of log.csv
checkpoint_minutes = 10.0       # between checkpoints; 0 = only around step 1 and at the end
wandb_project = ""              # log to this project of wandb.ai too (pip install wandb)
samples = (                     # sentences to fill in, a | between two; '' = none
    "the capital of france is [MASK].|she opened the [MASK] and read the letter."
    "|water [MASK] at 100 degrees."
)
# fmt: on

if __name__ == "__main__" and os.environ.get("RANK", "0") != "0":
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of torchrun's processes only one prints
SETTINGS = configure(globals())  # {name: default}; before the slow imports, so that --help is quick

import numpy as np
import torch

from model import MaskedLM, ModelConfig, make_loss
from nanocram import checkpoint, machine, model_folder, parallel, runlog, safety
from nanocram.data import IGNORE, Rows, held_out, load_meta
from nanocram.muon import Muon
from nanocram.offload import Streamed
from nanocram.tokenizer import MASK, Tokenizer

GO_ON = "the same command with --init=resume goes on from the last checkpoint, if there is one"
MAX_SKIPPED = 50  # skipped steps in a row that end a run; float16 needs some to find its loss scale

# -----------------------------------------------------------------------------
# Schedules: everything that changes over the run is a function of progress in [0, 1].


def lr_scale(progress):
    """Learning rates as a share of their peaks."""
    if schedule == "triangle":  # the paper's: 0.25 at the start, 1 at 3/4, 0 at the end
        return min(0.25 + progress, 4 - 4 * progress)
    rise = progress / warmup if progress < warmup else 1.0
    after_warmup = max(0.0, (progress - warmup) / (1 - warmup))
    if schedule == "constant":
        return rise
    if schedule == "trapezoid":
        return min(rise, (1 - progress) / cooldown if cooldown else 1.0)
    if schedule == "linear":
        return min(rise, 1 - after_warmup)
    if schedule == "cosine":
        return min(rise, 0.5 + 0.5 * math.cos(math.pi * after_warmup))
    sys.exit(f"schedule={schedule} is unknown: see lr_scale() in train.py")


def batch_rows(progress):
    """Rows per optimiser step, a multiple of micro_batch: a line from 0 to batch_size, but never
    below batch_start (paper 4.3)."""
    if progress >= batch_ramp:
        return batch_size
    micro_batches = int(batch_size * progress / (batch_ramp * micro_batch)) + 1
    return min(batch_size, max(batch_start, micro_batch * micro_batches))


def mask_count(progress):
    """Tokens to predict in each row. It falls in four stages, since each is a shape to compile."""
    stage = min(3, int(4 * progress))
    rate = mask_rate + (mask_rate_end - mask_rate) * stage / 3
    return max(1, round(seq_len * rate))


def mask_counts():
    """All values of mask_count() in a run, the largest first."""
    return sorted({mask_count(i / 1000) for i in range(1001)}, reverse=True)


# -----------------------------------------------------------------------------
# State and clock


@dataclass
class State:
    """Where the loop is. A checkpoint has this, the weights, the optimisers and the loss scale."""

    step: int = 0  # optimiser steps done, skipped ones included
    row: int = 0  # where the next step starts to read; it counts on through all epochs
    skipped: int = 0  # steps whose loss or gradient was not finite
    consecutive_skips: int = 0  # those since the last step that was taken
    evals_done: int = -1  # number of the last evaluation; 0 is the one before the first step
    logged: int = -1  # step of the last row in log.csv
    loss_sum: float = 0.0  # over the steps since that row; the next row has their mean
    loss_count: int = 0
    elapsed: float = 0.0  # seconds of the budget that were used up at the save
    step_seconds: float = 0.0  # what the last step took; before the first one, an estimate
    eval_seconds: float = 0.0  # what the last evaluation took
    save_seconds: float = 0.0  # what the last save took
    setup_seconds: float = 0.0  # what compiling took, over all resumes
    oom_micro_batch: int = 0  # the smallest micro_batch that did not fit in memory
    last: dict = field(default_factory=dict)  # what the last step has for log.csv


class Clock:
    """The budget: how much of it is used up, and how far the run is.

    Compiling, training, evaluating and saving count; reading the data and building the model do
    not. A resumed run goes on from the seconds in its checkpoint: the time between the two runs
    does not count, nor does what a crash has lost."""

    def __init__(self, state):
        self.state = state
        self.begun = time.monotonic() - state.elapsed

    def elapsed(self):
        """Seconds of the budget that are used up."""
        return time.monotonic() - self.begun

    def reserve(self):
        """Seconds to keep for the end: an evaluation, a save, the step that may be under way."""
        state = self.state
        return 1.2 * (state.eval_seconds + state.save_seconds) + state.step_seconds

    def has_room_for(self, seconds):
        """Whether so many seconds are left before the reserve."""
        return bool(max_steps) or self.elapsed() + seconds + self.reserve() < budget_hours * 3600

    def progress(self):
        """Share of the run that is over, in [0, 1]: steps / max_steps, or seconds of training /
        (budget - compiling - reserve).

        It rises or falls a little when the reserve changes. It falls when a run is resumed with a
        larger budget."""
        if max_steps:
            return min(1.0, self.state.step / max_steps)
        setup = self.state.setup_seconds
        time_to_train = budget_hours * 3600 - self.reserve() - setup
        return min(1.0, (self.elapsed() - setup) / max(1e-9, time_to_train))


# -----------------------------------------------------------------------------
# The objective


def draw_masks(rows, n_predict):
    """(ids (B, T), positions (B, K), labels (B, K)) of rows (B, T), with K = n_predict.

    Of a row's K positions mask_token_share become [MASK], the next random_token_share a random
    token, the rest stays. [CLS], at position 0, is never chosen."""
    B, T = rows.shape
    # the K largest of T - 1 random numbers: K places without replacement, in random order
    scores = torch.rand(B, T - 1, device=rows.device)
    positions = scores.topk(n_predict).indices + 1
    labels = rows.gather(1, positions)
    n_mask = round(n_predict * mask_token_share)
    n_random = min(n_predict - n_mask, round(n_predict * random_token_share))
    replaced = labels.clone()
    replaced[:, :n_mask] = MASK
    if n_random:
        random_tokens = torch.randint_like(labels, vocab_size)
        chosen = slice(n_mask, n_mask + n_random)
        replaced[:, chosen] = random_tokens[:, chosen]
    return rows.scatter(1, positions, replaced), positions, labels


def masked_batch(run, first_row, n_predict):
    """The micro-batch from first_row on, masked.

    Masks and dropout are drawn from (seed, first_row), so a checkpoint needs no random state. The
    same rows, micro_batch and n_predict get the same masks on any rank and after any resume."""
    batch_seed = np.random.SeedSequence((seed, first_row)).generate_state(1)[0]
    torch.manual_seed(int(batch_seed))
    return draw_masks(run.rows.fetch(first_row, run.micro_batch), n_predict)


# -----------------------------------------------------------------------------
# The run, and one step of it


def build_optimizers(model, amp_dtype):
    """[AdamW or Adam, and perhaps Muon]; each group keeps its peak learning rate as "peak_lr"."""
    # the blocks' matrices go to Muon; norms and biases have no weight decay
    matrices, decayed, exempt = [], [], []
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:
            exempt.append(p)
        elif optimizer == "muon" and ".layers." in name and p.ndim == 2:
            matrices.append(p)
        else:
            decayed.append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    adam = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
    fused = decayed[0].device.type != "mps"
    optimizers = [adam(groups, lr=lr, betas=(beta1, beta2), eps=adam_eps, fused=fused)]
    if matrices:
        optimizers.append(Muon(matrices, muon_lr, muon_weight_decay, dtype=amp_dtype))
    for o in optimizers:
        for group in o.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def model_config():
    """The ModelConfig of the settings; exits if no such model can be built."""
    names = [f.name for f in fields(ModelConfig) if f.name in globals()]
    try:
        return ModelConfig(**{name: globals()[name] for name in names})
    except ValueError as e:
        sys.exit(str(e))


class Run:
    """A fresh model and all that trains it. main(), bench.py and the tests make one."""

    def __init__(self, rows, meta, tokenizer, dev, amp_dtype):
        self.rows, self.meta, self.tokenizer = rows, meta, tokenizer
        self.device, self.amp_dtype = dev, amp_dtype
        self.micro_batch = micro_batch  # find_micro_batch() may halve it
        self.state = State()
        self.clock = Clock(self.state)  # main() starts another one when the budget begins
        self.saved_step = -1  # state.step at the last save of this process
        self.saved_at = time.monotonic()

        # init the model, the same on every rank
        torch.manual_seed(seed)
        config = model_config()
        if offload:  # it stays in host memory, and its blocks stream through the device
            batch_shape = micro_batch, seq_len, mask_counts()[0]
            self.streamed = Streamed(config, dev, amp_dtype, batch_shape, compile)
            self.model = self.streamed.model
        else:
            self.model = MaskedLM(config).to(dev)
        mean_masked = sum(mask_count(i / 1000) for i in range(1000)) / 1000
        self.flops_per_token = self.model.flops_per_token(seq_len, mean_masked)
        self.loss_fn = make_loss(self.model, dev, amp_dtype)
        self.optimizers = build_optimizers(self.model, amp_dtype)

        # in float16 the loss is scaled, so that small gradients survive
        weights_device = self.model.decoder.weight.device
        self.scaler = torch.amp.GradScaler(weights_device.type, enabled=amp_dtype == torch.float16)
        # it makes its scale at the first call, and a rank may have no micro-batch at first
        self.scaler.scale(torch.zeros((), device=weights_device))

        # compile the model, at the first pass of each shape; Streamed compiles its blocks itself
        if compile and not offload:
            self.loss_fn = torch.compile(self.loss_fn, dynamic=False)


def train_step(run, progress):
    """One optimiser step. If the loss or the gradient is not finite, no weight changes."""
    state = run.state
    n_rows = batch_rows(progress)
    n_predict = mask_count(progress)
    lr_share = lr_scale(progress)

    # forward and backward, each rank on its share of the micro-batches; gradients add up in .grad
    total_loss = torch.zeros((), device=run.device)
    first_rows = range(state.row, state.row + n_rows, run.micro_batch)
    for first_row in first_rows[parallel.RANK :: parallel.WORLD_SIZE]:
        batch = masked_batch(run, first_row, n_predict)
        # the mean over the step: change the divisor if a row may have other than n_predict labels
        loss = run.loss_fn(*batch) / (n_rows * n_predict)
        run.scaler.scale(loss).backward()
        total_loss += loss.detach()
        # prefetch: run.rows keeps the next rows, read while a GPU is busy with these
        run.rows.fetch(first_row + parallel.WORLD_SIZE * run.micro_batch, run.micro_batch)

    # sum loss and gradients over the ranks
    if offload:
        run.streamed.collect()  # first the gradients come back to the host
    weights = list(run.model.parameters())
    for weight in weights:
        if weight.grad is None:  # on a rank without a micro-batch
            weight.grad = torch.zeros_like(weight)
    parallel.all_reduce([total_loss, *(weight.grad for weight in weights)])

    # clip the gradient by its norm, taken from the norms of rows: faster on a CPU, and more exact
    for o in run.optimizers:
        run.scaler.unscale_(o)
    row_norms = [torch.linalg.vector_norm(weight.grad, dim=-1) for weight in weights]
    norm = torch.nn.utils.get_total_norm(row_norms)
    torch.nn.utils.clip_grads_with_norm_(weights, grad_clip or math.inf, norm)

    # the one wait for the device in a step
    loss, grad_norm = torch.stack((total_loss.to(norm.device), norm)).tolist()
    if math.isfinite(loss) and math.isfinite(grad_norm):
        for o in run.optimizers:
            for group in o.param_groups:
                group["lr"] = group["peak_lr"] * lr_share
            o.step()  # not scaler.step(), which would wait for the device once more
        state.loss_sum += loss
        state.loss_count += 1
        state.consecutive_skips = 0
    else:
        state.skipped += 1
        state.consecutive_skips += 1
    run.scaler.update()  # float16: halves the loss scale after an overflow, raises it in time
    run.model.zero_grad()

    # what log.csv will say; a new column needs its name in runlog.COLUMNS too
    state.step += 1
    state.row += n_rows
    state.last = {
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr * lr_share,
        "batch_size": n_rows,
        "mask_rate": n_predict / seq_len,
    }
    if optimizer == "muon":
        state.last["muon_lr"] = muon_lr * lr_share


# -----------------------------------------------------------------------------
# Compiling, evaluating, saving: skip these at a first reading.


def take_all_passes(run, held_out_sets):
    """A pass of each shape that the run will have, which compiles it. No weight changes.

    All batches of evaluations have one shape. Returns the seconds that a step will take."""
    # leave room for the optimisers' states, the ranks' all_reduce, and 5 % of a GPU
    copies = (0 if run.state.step else 2) + (parallel.WORLD_SIZE > 1)
    reserved = [torch.empty_like(p) for p in run.model.parameters() for _ in range(copies)]
    if run.device.type == "cuda":
        total = torch.cuda.get_device_properties(run.device).total_memory
        reserved.append(torch.empty(total // 20, dtype=torch.uint8, device=run.device))

    def forward_backward(n_predict):
        run.loss_fn(*masked_batch(run, run.state.row, n_predict)).backward()

    for n_predict in mask_counts():
        forward_backward(n_predict)
    # again, timed, now that the gradients are in memory
    dt, _ = machine.timed(run.device, forward_backward, mask_counts()[0])
    estimate_loss(run, held_out_sets[15][:1])
    micro_batches = batch_rows(run.clock.progress()) / run.micro_batch
    return dt * micro_batches / parallel.WORLD_SIZE


def find_micro_batch(run, held_out_rows):
    """Compile, and make run.micro_batch smaller until every pass fits in memory.

    Returns the batches for evaluations, {15: [...], 25: [...]}."""
    state = run.state
    while True:
        # a resume remembers which size was too large
        while 0 < state.oom_micro_batch <= run.micro_batch:
            if run.micro_batch == 1:
                sys.exit(
                    "out of memory with a single row: use a smaller model, or --offload=True "
                    "--optimizer=adamw --lr=0.001"
                )
            divisors = [n for n in range(1, run.micro_batch) if run.micro_batch % n == 0]
            run.micro_batch = divisors[-1]
            print(
                f"micro_batch={run.micro_batch}, since a larger one ran out of memory", flush=True
            )
        held_out_sets = held_out(held_out_rows, run.micro_batch)
        oom = False
        try:
            state.step_seconds = take_all_passes(run, held_out_sets)
        except Exception as e:
            from torch._dynamo.exc import ShortenTraceback  # what a failed compile raises

            oom = safety.is_oom(e)
            if not oom and isinstance(e, ShortenTraceback):
                sys.exit(
                    f"torch.compile fails here ({safety.first_line(e)}): mend that, or type "
                    "--compile=False, which is some third slower"
                )
            if not oom:
                raise
        # free the memory; inside of `except` the traceback would keep it
        run.model.zero_grad()
        run.rows.fetched.clear()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        _, oom, stop = parallel.agree(0.0, oom, signals.stop)
        if stop or not oom:
            return held_out_sets
        state.oom_micro_batch = run.micro_batch
        torch.compiler.reset()  # drop the graphs of the larger size


@torch.no_grad()
def estimate_loss(run, batches):
    """Nats per predicted token over batches of held_out()."""
    run.model.eval()
    total = sum(run.loss_fn(*(t.to(run.device) for t in batch)) for batch in batches)
    count = sum((labels != IGNORE).sum() for _, _, labels in batches)
    run.model.train()
    return total.item() / count.item()


def evaluate(run, held_out_sets):
    """{column of log.csv: held-out loss}."""
    t0 = time.monotonic()
    loss_15, loss_25 = (estimate_loss(run, held_out_sets[rate]) for rate in (15, 25))
    # nats per character can be compared between vocabularies
    counts = run.meta["counts"]
    per_char = loss_15 * counts["val_tokens"] / counts["val_characters"]
    run.state.eval_seconds = time.monotonic() - t0
    return {"val_loss_15": loss_15, "val_loss_25": loss_25, "val_nats_per_char": per_char}


def should_save(run):
    """Whether to save now: at the start, which shows a folder that cannot be written; after the
    first step, when the optimisers have their states; then every checkpoint_minutes.

    Not after a skipped step: its gradient may be bad because the last update broke the weights."""
    state = run.state
    early = state.step - state.skipped <= 1
    minutes = (time.monotonic() - run.saved_at) / 60
    due = early or 0 < checkpoint_minutes <= minutes
    is_new = state.step > run.saved_step
    was_skipped = state.consecutive_skips > 0
    return due and is_new and not was_skipped and run.clock.has_room_for(state.save_seconds)


def save(run, log):
    """Write ckpt.pt, the model folder, loss.png and the card; return whether all was written.

    A file that cannot be written stays as it was, and a warning says why."""
    t0 = run.saved_at = time.monotonic()
    log.flush()
    try:
        run.state.elapsed = run.clock.elapsed()
        checkpoint.save(run, log.folder / "ckpt.pt", optimizer)
        model_folder.save(run.model, log.folder)
        runlog.plot(log.folder)
        runlog.write_card(log.folder)
    except (OSError, RuntimeError, ValueError) as e:
        reason = e
        while reason.__context__ and not isinstance(reason, OSError):
            reason = reason.__context__  # what torch and PIL raise may hide that a disk is full
        log.say(f"WARNING: cannot save to {log.folder}: {safety.first_line(reason)}")
        return False
    run.saved_step = run.state.step
    run.state.save_seconds = time.monotonic() - t0
    return True


def check_settings(dev):
    """Exit with one line if the settings cannot work."""
    model_config()
    choices = {"init": ("scratch", "resume"), "optimizer": ("muon", "adamw", "adam")}
    for name, allowed in choices.items():
        if globals()[name] not in allowed:
            sys.exit(f"{name}={globals()[name]} is unknown: choose one of {', '.join(allowed)}")
    for name in ("micro_batch", "eval_rows", "log_every"):
        if globals()[name] < 1:
            sys.exit(f"{name}={globals()[name]} must be at least 1")
    at_least_0 = "seed budget_hours max_steps evals checkpoint_minutes lr muon_lr grad_clip"
    for name in at_least_0.split():
        if globals()[name] < 0:
            sys.exit(f"{name}={globals()[name]} must not be negative")
    for name in ("warmup", "beta1", "beta2"):
        if not 0 <= globals()[name] < 1:
            sys.exit(f"{name}={globals()[name]} must be at least 0 and below 1")
    if not 0 <= cooldown <= 1:
        sys.exit(f"cooldown={cooldown} must be a share of the run, such as 0.65")
    lr_scale(0.0)  # exits if the schedule is unknown
    if not budget_hours and not max_steps:
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    if not 8 <= seq_len <= max_seq_len:
        sys.exit(f"seq_len={seq_len} must be between 8 and max_seq_len={max_seq_len}")
    if not (0 < mask_rate <= 0.9 and 0 < mask_rate_end <= 0.9):
        sys.exit("mask_rate and mask_rate_end must be above 0 and at most 0.9, such as 0.15")
    for n_rows in {batch_rows(i / 1000) for i in range(1001)}:  # a ramp of yours too
        if n_rows < micro_batch or n_rows % micro_batch:
            sys.exit(
                f"batch_size, batch_start and what batch_rows() returns must be multiples of "
                f"micro_batch={micro_batch}: {n_rows} is none"
            )
    if any(sentence.count("[MASK]") != 1 for sentence in runlog.sentences(samples)):
        sys.exit("samples: each sentence needs one [MASK]; a | stands between two sentences")
    if offload and (parallel.WORLD_SIZE > 1 or optimizer == "muon" or dev.type == "mps"):
        sys.exit(
            "offload needs one process, cuda or cpu, and AdamW: type --optimizer=adamw --lr=0.001"
        )


# -----------------------------------------------------------------------------

signals = safety.Signals()


@signals  # the first Ctrl-C sets signals.stop, a second one ends the process
def main():
    # settings, machine and data, before anything is written
    parallel.join(device)
    master_process = parallel.RANK == 0
    dev, amp_dtype = machine.pick(device, dtype)
    check_settings(dev)
    meta = load_meta(data_dir, vocab_size=vocab_size, seq_len=seq_len)
    train_rows = Rows(Path(data_dir) / "train.bin", seq_len, dev)
    val_rows = Rows(Path(data_dir) / "val.bin", seq_len)
    held_out_rows = val_rows.read(0, min(eval_rows, len(val_rows)))
    tokenizer = Tokenizer(Path(data_dir) / "tokenizer.json")

    # the run: from scratch, or from its checkpoint
    lock = safety.lock(out_dir) if master_process else None  # one writer a folder
    run = Run(train_rows, meta, tokenizer, dev, amp_dtype)
    if init == "resume":
        checkpoint.load(run, Path(out_dir) / "ckpt.pt", optimizer)
        run.saved_step = run.state.step
    state = run.state
    settings = {name: globals()[name] for name in SETTINGS}
    log = runlog.Log(run, out_dir, data_dir, settings)

    # the budget begins now, the schedules begin after compiling
    run.clock = clock = Clock(state)
    t0 = time.monotonic()
    held_out_sets = find_micro_batch(run, held_out_rows)
    state.setup_seconds += time.monotonic() - t0
    log.write_facts(micro_batch=run.micro_batch)
    # a resume with a larger budget lowers progress: its later evaluations happen a second time
    state.evals_done = min(state.evals_done, int(clock.progress() * evals))

    while True:
        # where the run is, by rank 0's clock; a signal to any rank stops them all
        progress, stop = parallel.agree(clock.progress(), signals.stop)
        done = stop or progress >= 1

        # evaluate, log and save; the other ranks wait in the next step's all_reduce
        if master_process and not done:
            losses = {}
            number = int(progress * evals)
            if number > state.evals_done and clock.has_room_for(state.eval_seconds):
                state.evals_done = number
                losses = evaluate(run, held_out_sets)
                log.say_evaluation(losses, number)
            if losses or (state.step % log_every == 0 and state.step > state.logged):
                log.add_row(losses)
            if should_save(run):
                save(run, log)

        if done:
            break

        t0 = time.monotonic()
        train_step(run, progress)
        state.step_seconds = time.monotonic() - t0
        log.after_step(progress)
        if state.consecutive_skips >= MAX_SKIPPED:
            sys.exit(
                f"no finite gradient in {MAX_SKIPPED} steps, up to step {state.step}: lower the "
                "learning rate and type --init=resume"
            )

    # the end: evaluate, save, report; if a signal stopped the run, only save
    log.close_bar()
    if master_process:
        losses = {} if stop else evaluate(run, held_out_sets)
        if losses and state.evals_done < max(1, evals):  # a resumed run that was over has its row
            state.evals_done = max(1, evals)
            log.add_row(losses)
        if state.consecutive_skips > 3:  # in float16 up to three are routine
            sys.exit(
                f"the last {state.consecutive_skips} steps were skipped, nothing is saved: {GO_ON}"
            )
        is_saved = save(run, log)
        if losses:
            log.report(losses)
        if not is_saved or log.unwritten:
            sys.exit(1)
        if stop:
            log.say(f"stopped at step {state.step:,}: --init=resume goes on")
    parallel.leave()
    del lock


if __name__ == "__main__":
    smaller = "type --init=resume and half the micro_batch of run.json"
    safety.run(main, out_dir, then=GO_ON, if_oom=smaller)
