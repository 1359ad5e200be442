"""Pre-train a masked language model from scratch inside a wall-clock budget.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or for longer
    torchrun --nproc_per_node=8 train.py --micro_batch=128    # a day on eight GPUs

data_dir comes from prepare.py. The clock starts just before compiling: compiling, evaluating and
saving count, preparing the data does not. out_dir gets log.csv, run.json, loss.png, ckpt.pt and
a model folder, all kept current; transformers loads it if the architecture is a ModernBERT.

From top to bottom: settings, schedules, state and clock, masks, optimisers, train_step(), loop(),
main(), and what a reader of the step may leave out. "The paper" is Cramming, arXiv 2212.14034.
"""

import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from nanocram.configurator import check_assigned, configure, require

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
batch_size = 4096               # rows per optimiser step, once the ramp is over: 0.5M tokens
batch_start = 1024              # rows per optimiser step at the start
batch_ramp = 0.6                # share of the run over which they grow (paper 4.3); 0 = no ramp
# the objective
mask_rate = 0.30                # share of a row's tokens to predict; from 30 % at the start ...
mask_rate_end = 0.15            # ... to 15 % at the end (arXiv 2305.15096: +0.5 of GLUE)
mask_token_share = 1.0          # share of those that become [MASK]; BERT's recipe has 0.8 ...
random_token_share = 0.0        # ... and 0.1 that become a random token; the rest stays
# the optimiser: why these values, and what lost, is told in results/README.md
optimizer = "muon"              # muon (on the blocks' matrices, AdamW on the rest) | adamw | adam
muon_lr = 0.01                  # peak learning rate of Muon; 0.02 lost more the wider the model
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
n_narrow = 0                    # last layers at predicted tokens alone; the last one always is
n_head = 12
n_embd = 768
n_inner = 1536                  # width inside the MLP, behind the gate
activation = "geglu"            # geglu | relu2 | gelu: ACTIVATIONS in model.py
position_embedding = "rope"     # rope | sinusoidal (paper) | sinusoidal_fixed (its scale) | learned
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
compile = True                  # torch.compile; where it fails, a run of an hour or more ends
offload = False                 # keep weights, gradients and optimiser state in host memory
# the record
evals = 20                      # evaluations, evenly spread from the start on, and one at the end
eval_rows = 4096                # held-out rows in each
log_every = 10                  # optimiser steps per row of log.csv
checkpoint_minutes = 10.0       # between checkpoints; 0 = around step 1 and at the end alone
wandb_project = ""              # log to this project of wandb.ai too (pip install wandb)
samples = (                     # sentences to fill in, a | between two; '' = none
    "the capital of france is [MASK].|she opened the [MASK] and read the letter."
    "|water [MASK] at 100 degrees."
)
# fmt: on

if __name__ == "__main__" and os.environ.get("RANK", "0") != "0":
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of torchrun's processes one speaks for all
SETTINGS = configure(globals())  # {name: default}; before the heavy imports: --help is quick

import numpy as np
import torch

from model import MaskedLM, ModelConfig, make_loss
from nanocram import checkpoint, fit, machine, model_folder, parallel, record, safety
from nanocram.data import (
    IGNORE,
    Rows,
    held_out,
    is_packed,
    load_meta,
    record_numbers,
    spare_padding,
)
from nanocram.muon import Muon
from nanocram.offload import Streamed, plan_memory
from nanocram.tokenizer import MASK, Tokenizer

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
    if schedule == "cosine":
        return min(rise, 0.5 + 0.5 * math.cos(math.pi * done))
    sys.exit(f"schedule={schedule} is unknown: see lr_scale() in train.py")


def batch_rows(progress):
    """Rows per optimiser step: the paper's ramp, but not below batch_start.

    Always a multiple of the setting micro_batch. The size in use, state.micro_batch, may be smaller
    but divides it: the ramp is the same whatever fitted in memory."""
    if progress >= batch_ramp:
        return batch_size
    micro_batches = int(batch_size * progress / (batch_ramp * micro_batch)) + 1
    return min(batch_size, max(batch_start, micro_batch * micro_batches))


def mask_count(progress):
    """Tokens to predict in each row."""
    rate = mask_rate + (mask_rate_end - mask_rate) * progress
    return max(1, round(seq_len * rate))


@dataclass
class State:
    """Where the loop is. This, the weights, the optimisers and the loss scale are a checkpoint."""

    step: int = 0  # optimiser steps done, skipped ones included
    row: int = 0  # where the next step starts to read; it counts on through all epochs
    skipped: int = 0  # steps whose loss or gradient was not finite
    consecutive_skips: int = 0  # those since the last usable one
    best_loss: float = 1e9  # the lowest training loss of a step ...
    steps_above: int = 0  # ... and the steps in a row that were a nat above it
    evals_done: int = -1  # number of the last evaluation; 0 is the one before the first step
    logged: int = -1  # step of the last row in log.csv
    loss_sum: float = 0.0  # of the usable steps since that row, whose mean the next row has ...
    loss_count: int = 0  # ... and how many there were
    elapsed: float = 0.0  # seconds of the budget that were used up when this was saved
    step_seconds: float = 0.0  # what the last step took
    eval_seconds: float = 0.0  # what the last evaluation took
    save_seconds: float = 0.0  # what the last save took
    setup_seconds: float = 0.0  # what compiling and fitting took, summed over all resumes
    asked_micro_batch: int = 0  # the setting micro_batch as it was typed, and ...
    micro_batch: int = 0  # ... the one in use: halved until a step fitted in memory
    last: dict = field(default_factory=dict)  # columns of log.csv, of the last step

    @property
    def applied_steps(self):
        return self.step - self.skipped


class Clock:
    """The budget: what is used up, what has to be kept for the end, and how far the run is.

    It runs from its creation in main(): compiling, training, evaluating and saving count; reading
    the data and building the model do not. A resumed run goes on from the seconds in its
    checkpoint: neither the time between nor what a crash has lost counts."""

    def __init__(self, state):
        self.state = state
        self.earlier = state.elapsed  # seconds used before the resume
        self.begun = time.monotonic()
        # Seconds of this process, for the report at its end.
        self.spent = {"training": 0.0, "setting up": 0.0, "evaluating": 0.0, "saving": 0.0}

    def elapsed(self):
        """Seconds of the budget that are used up."""
        return self.earlier + time.monotonic() - self.begun

    def reserve(self):
        """Seconds to keep for the end: an evaluation, a save, the step that may be under way."""
        state = self.state
        return 1.2 * (state.eval_seconds + state.save_seconds) + state.step_seconds

    def left_before_reserve(self):
        """Seconds until the reserve begins; infinite where steps are counted."""
        return self.seconds_to_go() - self.reserve()

    def seconds_to_go(self):
        """Seconds of the budget that are left; infinite where steps are counted."""
        return math.inf if max_steps else budget_hours * 3600 - self.elapsed()

    def steps_to_go(self):
        """Steps that are left; infinite where seconds are counted."""
        return max_steps - self.state.step if max_steps else math.inf

    def progress(self):
        """Share of the run that is over, in [0, 1]: of max_steps, or of the time to train in.

        Compiling uses up budget, but the schedule begins after it. Progress can fall: a little when
        reserve() shrinks after a faster step, evaluation or save, and more on a resume from an
        older checkpoint or with a larger budget."""
        if max_steps:
            return min(1.0, self.state.step / max_steps)
        setup = self.state.setup_seconds
        time_to_train = budget_hours * 3600 - self.reserve() - setup
        return min(1.0, (self.elapsed() - setup) / max(1e-9, time_to_train))


@dataclass
class Run:
    """What main() has built, for the functions below."""

    model: MaskedLM
    loss_fn: Callable  # of what batch_at() returns -> nats, summed over the labels ...
    eager_loss_fn: Callable  # ... and what it was before it was compiled
    optimizers: list
    scaler: torch.amp.GradScaler
    rows: Rows  # the training data, as it comes to the device
    meta: dict  # meta.json of the data
    packed: bool  # whether its rows are one stream without padding, or whole records
    state: State
    clock: Clock
    padded_counts: list  # the shapes of masks to compile, as padded_counts() has them
    device: torch.device
    amp_dtype: torch.dtype  # of the matrix products; weights are float32
    streamed: Streamed | None  # with offload: what moves the model through the device
    compiled: bool  # whether loss_fn is, or is to be ...
    asked_compile: bool  # ... and the setting, as it was typed
    held_out_sets: dict | None = None  # {15: batches, 25: batches}
    saved_steps: int = -1  # how many steps had been applied when this process saved last ...
    next_save: float = 0.0  # ... and when it may save again, by time.monotonic()
    is_updating: bool = False  # whether the optimisers are changing weights

    @property
    def is_set_up(self):
        """Whether training may begin, or has: held_out_sets are the last that it needs."""
        return self.held_out_sets is not None


def draw_masks(rows, n_positions, n_predict, packed=True):
    """(ids, positions, labels) of rows (B, T): n_predict of each row's tokens are to be predicted.

    Positions (B, K = n_positions) are uniform without replacement from 1 to T − 1: [CLS], at 0, is
    never chosen, [SEP] may be. They fill K slots of a row. The first n_predict slots have labels:
    of these mask_token_share become [MASK], the next random_token_share a random token, the rest
    stays. Slots behind them are spare and have no label. Rows of whole records, not packed, have
    fewer labels, by the share of the row that is neither [PAD] nor a [CLS]."""
    B, T = rows.shape
    scores = torch.rand(B, T - 1, device=rows.device)
    slot = torch.arange(n_positions, device=rows.device)
    if not packed:
        scores, slot = spare_padding(rows, scores, slot)
    # The K largest of T − 1 random numbers: K places without replacement, in random order.
    positions = scores.topk(n_positions).indices + 1  # (B, K)
    tokens = rows.gather(1, positions)
    n_mask = round(n_predict * mask_token_share)
    replaced = torch.where(slot < n_mask, MASK, tokens)
    if random_token_share:
        random_end = min(n_predict, n_mask + round(n_predict * random_token_share))
        is_random = (slot >= n_mask) & (slot < random_end)
        replaced = torch.where(is_random, torch.randint_like(tokens, vocab_size), replaced)
    ids = rows.scatter(1, positions, replaced)
    labels = tokens.masked_fill(slot >= n_predict, IGNORE)
    return ids, positions, labels


def batch_at(run, first_row, n_predict):
    """(ids, positions, labels) of the micro-batch from first_row on, n_predict labels in each row.

    Of rows of whole records it is (ids, positions, labels, records): attention stays inside each.
    torch's generator, which masks and dropout are drawn from, is seeded anew by (seed, first_row).
    So no random state is in a checkpoint: a micro-batch of the same first row, size and n_predict
    is masked alike on any rank and after any resume."""
    batch_seed = np.random.SeedSequence((seed, first_row)).generate_state(1)[0]
    torch.manual_seed(int(batch_seed))  # a CPU heeds 32 bits of a seed
    rows = run.rows.fetch(first_row, run.state.micro_batch)
    # One of three widths, 26, 32 and 38 where masks fall from 30 to 15 % of 128: torch compiles
    # these and not twenty. A mask_count() of yours may peak between the points that
    # padded_counts() samples, and then has its own.
    wide_enough = [n for n in run.padded_counts if n >= n_predict]
    n_positions = wide_enough[0] if wide_enough else n_predict
    batch = draw_masks(rows, n_positions, n_predict, run.packed)
    return batch if run.packed else (*batch, record_numbers(rows))


def build_optimizers(named):
    """[AdamW or Adam, and perhaps Muon] of {name: parameter}.

    Muon takes the blocks' matrices. AdamW or Adam takes the rest, with weight decay on all but
    norms and biases. Each group keeps its peak learning rate as "peak_lr"."""
    kinds = {"muon": torch.optim.AdamW, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if optimizer not in kinds:
        raise ValueError(f"optimizer={optimizer} is unknown: choose one of {', '.join(kinds)}")
    matrices, decayed, exempt = [], [], []
    for name, p in named.items():
        if "norm" in name or "bias" in name:
            exempt.append(p)
        elif optimizer == "muon" and ".layers." in name and p.ndim == 2:
            matrices.append(p)
        else:
            decayed.append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    groups.append({"params": exempt, "weight_decay": 0.0})
    where = next(iter(named.values())).device.type
    fused = where in ("cuda", "cpu")
    options = {"lr": lr, "betas": (beta1, beta2), "eps": adam_eps, "fused": fused}
    optimizers = [kinds[optimizer](groups, **options)]
    if optimizer == "muon":
        if not matrices:
            why = "build_optimizers() looks for .layers. in their names"
            sys.exit(f"Muon finds no matrix among the parameters: {why}")
        # bfloat16 suffices, and on GPUs without it float16; on CPUs without it, float32 is fastest.
        products = torch.float32
        if dtype in ("auto", "bfloat16") and machine.native_bf16(where):
            products = torch.bfloat16
        elif dtype != "float32" and where == "cuda":
            products = torch.float16
        optimizers.append(Muon(matrices, muon_lr, muon_weight_decay, dtype=products))
    for o in optimizers:
        for group in o.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def train_step(run, progress):
    """One optimiser step; what it was goes into run.state.

    Where the loss or a gradient is not finite, weights and optimisers stay as they are."""
    state = run.state
    # Rows, tokens to predict in each, and learning rate follow from progress.
    n_rows = batch_rows(progress)
    n_predict = mask_count(progress)
    lr_share = lr_scale(progress)
    n_labels = n_rows * n_predict
    if not run.packed:  # on average: padding has none
        n_labels *= run.meta["counts"]["filled"]

    # Forward and backward: every rank takes its share of the step's micro-batches. Gradients add up
    # in .grad, so each loss is divided by what the whole step predicts: masks of yours that make
    # another number of labels want another n_labels.
    total_loss = torch.zeros((), device=run.device)
    starts = range(state.row, state.row + n_rows, state.micro_batch)
    with fit.together():  # where memory runs out, all ranks leave the step here
        for row in starts[parallel.RANK :: parallel.WORLD]:
            batch = batch_at(run, row, n_predict)
            loss = run.loss_fn(*batch) / n_labels
            run.scaler.scale(loss).backward()
            total_loss += loss.detach()
            # A GPU is still busy with this micro-batch while the next is read and queued.
            run.rows.prefetch(row + parallel.WORLD * state.micro_batch, state.micro_batch)

    # Loss and gradients are summed over ranks. Nothing else is: all began with equal weights, and
    # from equal gradients each makes the same step.
    if offload:
        run.streamed.collect()  # the gradients come home
    weights = list(run.model.parameters())
    for weight in weights:
        if weight.grad is None:  # on a rank that had no micro-batch
            weight.grad = torch.zeros_like(weight)
    parallel.all_reduce([total_loss, *(weight.grad for weight in weights)])

    # Undo the loss scale, and clip by the norm of the whole gradient. It is computed from the norms
    # of rows, since a CPU takes that of one large tensor on a single core, and less exactly.
    for o in run.optimizers:
        run.scaler.unscale_(o)
    row_norms = [torch.linalg.vector_norm(weight.grad, dim=-1) for weight in weights]
    norm = torch.nn.utils.get_total_norm(row_norms)
    torch.nn.utils.clip_grads_with_norm_(weights, grad_clip or math.inf, norm)

    # The one time in a step that the CPU waits for its device: all before was only queued.
    loss, grad_norm = torch.stack((total_loss.to(norm.device), norm)).tolist()
    if math.isfinite(loss) and math.isfinite(grad_norm):
        run.is_updating = True  # an error that comes now leaves the weights half changed
        for o in run.optimizers:
            for group in o.param_groups:
                group["lr"] = group["peak_lr"] * lr_share
            o.step()  # not scaler.step(): it waits for the device to learn what is known here
        run.is_updating = False
        state.loss_sum += loss
        state.loss_count += 1
        state.consecutive_skips = 0
    else:
        state.skipped += 1
        state.consecutive_skips += 1
    run.scaler.update()  # halves the loss scale after an overflow
    run.model.zero_grad()

    # What log.csv will say; a new column has its name in record.COLUMNS, too.
    state.step += 1
    state.row += n_rows
    state.last = {"loss": loss, "grad_norm": grad_norm, "lr": lr * lr_share}
    state.last |= {"batch_size": n_rows, "mask_rate": n_predict / seq_len}
    if optimizer == "muon":
        state.last["muon_lr"] = muon_lr * lr_share


def loop(run, log, held_out_rows, signals):
    """Step after step; returns whether the run is over, and not only stopped by a signal."""
    state, clock = run.state, run.clock
    while True:
        # What is due now: rank 0 evaluates and logs, the others wait for it below.
        saving = False
        if parallel.RANK == 0 and not signals.stop and clock.progress() < 1:
            evaluate_and_log(run, log)
            saving = save_is_due(run)

        # Where the run is, by rank 0's clock for all; a signal to any rank ends them all.
        progress, stop, saving = parallel.agree(clock.progress(), signals.stop, saving)
        is_over = progress >= 1
        if saving or stop or is_over:
            parallel.check_equal(dict(run.model.named_parameters()))
        if stop or is_over:
            return is_over
        if saving and parallel.RANK == 0:
            save(run, log)

        started = time.monotonic()
        if not fit.try_step(train_step, run, progress):
            shrink(run, log, held_out_rows, signals)
            continue
        state.step_seconds = time.monotonic() - started
        clock.spent["training"] += state.step_seconds
        log.after_step(progress, rows_at=batch_rows)
        warn_of_a_rise(state, log)
        if state.consecutive_skips >= MAX_SKIPPED:
            said = f"no finite gradient in {MAX_SKIPPED} steps, up to step {state.step}"
            sys.exit(f"{said}, row {state.row}: lower the learning rate and resume")


def main():
    # Whatever is wrong with settings, machine and data is said before anything is written.
    config = check_settings()
    parallel.join(device)
    dev, amp_dtype = machine.pick(device, dtype)
    check_device(dev)
    meta = load_meta(data_dir, vocab_size=vocab_size, seq_len=seq_len)
    train_rows, held_out_rows, tokenizer = open_data(meta, dev)

    # One process at a time may write to out_dir. The first signal asks the loop to end and save, a
    # second one ends the process.
    only_writer = safety.lock(safety.lock_file(out_dir)) if parallel.RANK == 0 else nullcontext()
    with only_writer, safety.Signals() as signals:
        # The run: fresh, or from its checkpoint.
        run = build(config, meta, train_rows, dev, amp_dtype)
        rate = machine.matmul_rate(dev, amp_dtype) * parallel.WORLD
        if init == "resume":
            # Weights, the optimisers' states, the loss scale, State with the seconds used so far.
            # Settings, learning rates among them, are those of this command: type them again.
            checkpoint.restore(run, out_dir, optimizer_name=optimizer)
        choose_micro_batch(run.state)
        code = machine.code_hash(__file__)  # now: it may be edited while the run goes on
        log = record.Log(run, out_dir, tokenizer, rate, is_silent=parallel.RANK > 0, code=code)
        log.begin(init == "resume", settings_in_use(run), data_dir, wandb_project)

        # The clock starts. Compiling and finding a micro-batch that fits count, though the schedule
        # begins after them.
        run.clock = Clock(run.state)
        try:
            set_up(run, log, held_out_rows, signals)
            is_over = loop(run, log, held_out_rows, signals)
            losses = last_evaluation(run, log) if is_over and parallel.RANK == 0 else None
        except (SystemExit, OSError, MemoryError, RuntimeError) as error:
            rescue(run, log, error)
            raise

        # The end: save what was learnt. Of a run that a signal has stopped nothing is measured.
        if parallel.RANK == 0:
            finish(run, log, losses)
        parallel.leave()


def open_data(meta, dev):
    """(training rows, a data.Rows; held-out rows, a tensor (N, T); the tokenizer) of data_dir."""
    data = Path(data_dir)
    counts = meta["counts"]
    train_rows = Rows(data / "train.bin", counts["rows"], seq_len, vocab_size, dev)
    val_rows = Rows(data / "val.bin", counts["val_rows"], seq_len, vocab_size)
    held_out_rows = val_rows.read(0, min(val_rows.count, eval_rows))
    tokenizer = Tokenizer(data / "tokenizer.json")
    if not is_packed(meta) and position_embedding != "rope":
        said = "absolute positions count from the start of a row, not of a record"
        print(f"WARNING: {said}: --position_embedding=rope has none")
    if any(len(tokenizer.encode(sentence)) + 2 > max_seq_len for sentence in sentences()):
        sys.exit(f"samples: a sentence has more than {max_seq_len} tokens: type shorter --samples")
    return train_rows, held_out_rows, tokenizer


def build(config, meta, rows, dev, amp_dtype):
    """A Run with fresh weights, which follow from `seed`, the same on every rank."""
    torch.manual_seed(seed)
    counts = padded_counts()
    streamed = None
    if offload:
        shapes = {"rows": micro_batch, "seq_len": seq_len, "n_predicted": counts[-1]}
        sums_stay = plan_memory(config, dev, amp_dtype, **shapes)
    model = MaskedLM(config)
    loss_fn = make_loss(model, dev, amp_dtype)
    if offload:  # the model stays on the host, and what it computes goes to the device
        streamed = Streamed(model, dev, amp_dtype, sums_stay)
    else:
        model.to(dev)
    optimizers = build_optimizers(dict(model.named_parameters()))
    # In float16 the loss is scaled, so that small gradients survive. GradScaler makes its scale at
    # its first use: here, for a rank whose first step may have no micro-batch.
    where = model.decoder.weight.device
    scaler = torch.amp.GradScaler(where.type, enabled=amp_dtype == torch.float16)
    scaler.scale(torch.zeros((), device=where))
    state = State(micro_batch=micro_batch, asked_micro_batch=micro_batch)
    return Run(
        model=model,
        loss_fn=loss_fn,
        eager_loss_fn=loss_fn,
        optimizers=optimizers,
        scaler=scaler,
        rows=rows,
        meta=meta,
        packed=is_packed(meta),
        state=state,
        clock=Clock(state),  # main() starts another one when the budget begins
        padded_counts=counts,
        device=dev,
        amp_dtype=amp_dtype,
        streamed=streamed,
        compiled=compile,
        asked_compile=compile,
    )


def padded_counts():
    """The mask counts that steps are padded to, ascending: three shapes to compile, not twenty.

    There is only one where the masking rate is fixed."""
    counts = [mask_count(i / 1000) for i in range(1001)]
    least, most = min(counts), max(counts)
    thirds = [least + math.ceil((most - least) * i / 3) for i in (1, 2, 3)]
    return sorted(set(thirds))


def choose_micro_batch(state):
    """After a resume: the size that fitted then, or --micro_batch where another one is typed."""
    is_divisor = state.micro_batch > 0 and micro_batch % state.micro_batch == 0
    if state.asked_micro_batch != micro_batch or not is_divisor:
        state.asked_micro_batch = state.micro_batch = micro_batch
    if state.micro_batch < micro_batch:
        known = f"since {micro_batch} did not fit in memory"
        print(f"micro_batch={state.micro_batch}, {known} (another --micro_batch is tried anew)")


def set_up(run, log, held_out_rows, signals):
    """Compile the step and find a micro-batch that fits in memory; make the held-out batches.

    A signal ends it early, and the loop before its next step."""
    state, clock = run.state, run.clock
    started = time.monotonic()
    asked = settings_in_use(run)
    rehearsal = partial(rehearse, run, held_out_rows)
    fit.compile_and_fit(run, rehearsal, must_compile=is_long(), signals=signals)
    if settings_in_use(run) != asked:
        log.update_facts(settings_in_use(run))
    run.held_out_sets = held_out(held_out_rows, state.micro_batch, run.packed)
    micro_batches = batch_rows(0) // state.micro_batch
    if micro_batches % parallel.WORLD:
        ranks = f"{parallel.WORLD} ranks, {micro_batches} micro-batches"
        log.say(f"{ranks}: some idle, lower --micro_batch")
    seconds = time.monotonic() - started
    clock.spent["setting up"] += seconds
    state.setup_seconds += seconds
    # Where a larger budget has taken progress back, evaluations become due again.
    state.evals_done = min(state.evals_done, int(clock.progress() * evals))


def shrink(run, log, held_out_rows, signals):
    """Where memory ran out in mid-run: save, and begin the step anew in smaller micro-batches.

    It has the same rows, but other masks: they are drawn for each micro-batch."""
    state = run.state
    can_halve = state.micro_batch > 1
    if can_halve:
        state.micro_batch = fit.next_smaller(state.micro_batch)
        smaller = f"going on with micro_batch={state.micro_batch}"
        log.say(f"out of memory in step {state.step + 1:,}: saving, then {smaller}")
    fit.clear(run)
    parallel.check_equal(dict(run.model.named_parameters()))
    if parallel.RANK == 0:
        save(run, log)
    if not can_halve:
        raise MemoryError
    log.update_facts(settings_in_use(run))
    set_up(run, log, held_out_rows, signals)


def rehearse(run, held_out_rows):
    """Take the passes of a step's micro-batches and of an evaluation: that compiles their graphs.

    No weight changes; compile_and_fit() clears the gradients."""

    def forward_and_backward(n_predict):
        run.loss_fn(*batch_at(run, run.state.row, n_predict)).backward()

    *fewer, most = run.padded_counts
    forward_and_backward(most)
    # A second pass finds gradients in memory, as those of a step do (fit.py has reserved room for
    # the optimisers' states). The seconds that it takes foretell those of the next step.
    seconds, _ = machine.timed(run.device, forward_and_backward, most)
    n_rows = batch_rows(run.clock.progress())
    run.state.step_seconds = seconds * n_rows / run.state.micro_batch / parallel.WORLD
    for n_predict in reversed(fewer):
        forward_and_backward(n_predict)
    if parallel.RANK == 0:
        rows = held_out_rows[: run.state.micro_batch]
        mean_loss(run, held_out(rows, run.state.micro_batch, run.packed)[15])


@torch.no_grad()
def mean_loss(run, batches):
    """Nats per predicted token over batches of data.held_out()."""
    total, count = 0.0, 0
    run.model.eval()
    for batch in batches:
        total += run.loss_fn(*(tensor.to(run.device) for tensor in batch))
        count += (batch[2] != IGNORE).sum().item()
    run.model.train()
    return total.item() / count


def evaluate(run, log):
    """{column of log.csv: held-out loss}, logged; the time it took becomes part of the reserve."""
    started = time.monotonic()
    losses = {f"val_loss_{rate}": mean_loss(run, run.held_out_sets[rate]) for rate in (15, 25)}
    # Nats per character of the text: losses of different vocabularies compare by it.
    tokens_per_char = run.meta["counts"]["val_tokens"] / run.meta["counts"]["val_characters"]
    losses["val_nats_per_char"] = losses["val_loss_15"] * tokens_per_char
    run.state.eval_seconds = time.monotonic() - started
    run.clock.spent["evaluating"] += run.state.eval_seconds
    log_row(run, log, losses)
    return losses


def log_row(run, log, losses=None):
    """A row of log.csv, with the mean loss of the usable steps since the last one."""
    state = run.state
    if state.loss_count:
        state.last["loss"] = state.loss_sum / state.loss_count
    state.loss_sum, state.loss_count = 0.0, 0
    log.add_row(losses)


def save(run, log):
    """Write ckpt.pt, the model folder, loss.png and the card, each beside its goal and renamed.

    Returns whether that was done: not where the disk fails or the weights may be ruined. What is
    not written stands as it was, and the run goes on."""
    started = time.monotonic()
    log.flush()  # the rows that log.csv could not take so far
    if not is_sound(run):
        steps = f"the last {run.state.consecutive_skips} steps had no finite gradient"
        log.say(f"WARNING: {steps}: nothing is saved, the checkpoint before stands")
        return False
    try:
        run.state.elapsed = run.clock.elapsed()
        checkpoint.write(run, log.folder, optimizer_name=optimizer)
        model_folder.save(run.model, log.folder)
        log.draw()
    except (OSError, RuntimeError, ValueError) as e:  # torch may raise a plain RuntimeError
        why = safety.first_line(e)
        log.say(f"WARNING: cannot save all to {log.folder}, the rest stands as it was: {why}")
        run.clock.spent["saving"] += time.monotonic() - started
        run.next_save = time.monotonic() + RETRY_SECONDS
        return False
    run.saved_steps = run.state.applied_steps
    if run.saved_steps > 0:  # else the next is after the first step that is applied
        run.next_save = time.monotonic() + 60 * (checkpoint_minutes or math.inf)
    run.state.save_seconds = time.monotonic() - started
    run.clock.spent["saving"] += run.state.save_seconds
    return True


def is_sound(run):
    """Whether the weights may replace a checkpoint: not while steps are being skipped.

    A skipped step changes nothing, but weights that an earlier one has ruined show themselves by
    skips alone. In float16 a few are routine: the loss scale grows until a step overflows."""
    routine = 3 if run.scaler.is_enabled() else 0
    return run.state.consecutive_skips <= routine


def save_is_due(run):
    """Whether there is something new and sound to save, it is time, and the budget has room for it.

    The first is at once: a folder that cannot be written is warned of now. The second is after the
    first step that was applied: the optimisers have their states then, which may double a save."""
    is_new = run.saved_steps != run.state.applied_steps
    is_time = time.monotonic() >= run.next_save
    has_room = run.state.save_seconds < run.clock.left_before_reserve()
    return is_new and is_sound(run) and is_time and has_room


def evaluation_is_due(run, number):
    """Whether evaluation `number` is still to do, and fits in before the reserve begins."""
    return (
        number > run.state.evals_done and run.state.eval_seconds < run.clock.left_before_reserve()
    )


def evaluate_and_log(run, log):
    """Evaluate or log, if that is due before the next step."""
    state = run.state
    number = int(run.clock.progress() * evals)
    if evaluation_is_due(run, number):
        number_before = state.evals_done
        state.evals_done = number
        losses = evaluate(run, log)
        both = f"{losses['val_loss_15']:.3f} (15 %) {losses['val_loss_25']:.3f} (25 %)"
        when = f"{run.clock.elapsed() / 60:7.1f} min  step {state.step:6,}"
        log.say(f"{when}  held-out loss {both}")
        if is_hopeless(number, number_before, losses["val_loss_15"]):
            log.say("WARNING: that is still above 6: few such runs come to anything")
        if samples:
            log.guess(sentences()[number % len(sentences())])
    elif state.step % log_every == 0 and state.step > state.logged:
        log_row(run, log)


def rescue(run, log, error):
    """Save where an error has left the weights sound; where memory ran out, say what to type.

    They are after a SystemExit (train.bin has changed, a rank is gone), an OSError (a disk fails to
    read) and a lack of memory, but in the optimisers' step. Where ranks differ, after fifty skipped
    steps, where save() refuses, and after any other error, probably a bug's, nothing is saved: the
    checkpoint before stands."""
    log.close_bar()
    is_full = safety.is_out_of_memory(error)
    keeps = isinstance(error, SystemExit | OSError) and not isinstance(error, parallel.Apart)
    if parallel.RANK == 0 and run.is_set_up and (keeps or is_full) and not run.is_updating:
        save(run, log)
    if is_full:
        # A smaller micro_batch makes no update smaller.
        rows = 1 if run.is_updating else run.state.micro_batch
        sys.exit(f"out of memory: type {less_memory(rows)}")


def last_evaluation(run, log):
    """evaluate(); whatever goes wrong in it, what was learnt is kept."""
    try:
        return evaluate(run, log)
    except Exception:
        save(run, log)
        raise


def finish(run, log, losses):
    """Save and report; exits with 1 where it could not be saved. losses: None of a stopped run."""
    log.close_bar()
    if losses:
        a, b = losses["val_loss_15"], losses["val_loss_25"]
        per_char = f"{losses['val_nats_per_char']:.4f} nats per character"
        log.say(f"held-out loss {a:.4f} at 15 % masked, {b:.4f} at 25 %; {per_char}")
    is_saved = save(run, log)
    if not is_sound(run):  # nothing is thrown away, and nothing good is overwritten
        with suppress(OSError, RuntimeError, ValueError):
            checkpoint.write(run, log.folder, optimizer_name=optimizer, file="ckpt.unsure.pt")
            log.say("they are in ckpt.unsure.pt: renamed to ckpt.pt, --init=resume goes on from it")
    if not is_saved or log.unwritten:
        sys.exit(1)
    if losses:
        log.report(sentences())
    else:
        where = f"step {run.state.step:,}, after {run.clock.elapsed() / 60:.1f} minutes"
        log.say(f"stopped at {where}: --init=resume goes on")


def is_long():
    """Whether the run has a budget of an hour or more: too much to lose in silence."""
    return budget_hours >= 1 and not max_steps


def warn_of_a_rise(state, log):
    """Say so, once, where the loss of a long run is a nat above its best for a hundred steps."""
    loss = state.last["loss"]
    if not is_long() or not math.isfinite(loss):
        return
    state.best_loss = min(state.best_loss, loss)
    is_above = loss > state.best_loss + 1
    state.steps_above = state.steps_above + 1 if is_above else 0
    if state.steps_above == 100:
        lower = f"--lr={lr / 2:g} --muon_lr={muon_lr / 2:g}"
        said = "WARNING: the loss has been a nat above its best for 100 steps"
        log.say(f"{said}: if it stays there, stop the run and type --init=resume {lower}")


def is_hopeless(number, number_before, loss):
    """Whether evaluation `number` is the first after an eighth of the run, with a loss above 6.

    After 3 of 24 hours the paper's code can end such a run. Good runs of minutes are above it for a
    larger share of their time, so nothing is said of them."""
    is_first = number > 0 and number_before < evals / 8 <= number
    return is_long() and is_first and loss > 6


def sentences():
    return samples.split("|") if samples else []


def settings_in_use(run):
    """{name: value} for run.json: micro_batch and compile are what they came to be."""
    found = {name: globals()[name] for name in SETTINGS}
    return found | {"micro_batch": run.state.micro_batch, "compile": run.compiled}


def model_config():
    """The ModelConfig of the settings; a field that is no setting has its default in model.py."""
    names = [f.name for f in fields(ModelConfig) if f.name in globals()]
    return ModelConfig(**{name: globals()[name] for name in names})


def check_device(dev):
    """Exit with one line where the device cannot do what the settings ask for."""
    if dev.type == "mps" and (offload or parallel.WORLD > 1):
        sys.exit("offload and several processes work on cuda and cpu: type --device=cpu")
    has_bf16 = machine.native_bf16(dev.type)
    if parallel.any_rank(has_bf16) and parallel.any_rank(not has_bf16):
        sys.exit("not all ranks have bfloat16: start torchrun on devices of one kind")


def check_settings():
    """model_config(); exits with one line if the settings cannot work."""
    check_assigned(globals(), SETTINGS)
    other_share = round(1 - mask_token_share, 9)  # 1 - 0.9 is 0.09999999999999998
    # fmt: off
    require(globals(), {
        "init": ("scratch", "resume"),
        "device": ("auto", "cuda", "mps", "cpu"),
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "seed": (0, 2**62), "max_steps": (0, 2**62), "budget_hours": (0, 1e6),
        "micro_batch": (1, 2**20), "batch_size": (1, 2**30), "batch_start": (1, 2**30),
        "batch_ramp": (0, 1), "seq_len": (8, max_seq_len), "grad_clip": (0, 1e9),
        "mask_rate": (0.01, 0.9), "mask_rate_end": (0.01, 0.9), "mask_token_share": (0, 1),
        "random_token_share": (0, other_share), "warmup": (0, 0.99), "cooldown": (0, 1),
        "evals": (0, 10**6), "eval_rows": (1, 10**8), "log_every": (1, 10**9),
        "checkpoint_minutes": (0, 1e6),
    })
    # fmt: on
    lr_scale(0)  # which knows the schedules
    if not budget_hours and not max_steps:
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    sizes = {"batch_size": batch_size, "batch_start": batch_start if batch_ramp else batch_size}
    for name, rows in sizes.items():
        if rows % micro_batch:
            fits = f"type for example --{name}={max(1, rows // micro_batch) * micro_batch}"
            sys.exit(f"{name}={rows} is no multiple of micro_batch={micro_batch}: {fits}")
    for rows in (batch_rows(i / 1000) for i in range(1001)):  # a ramp of yours may give others
        if rows % micro_batch:
            said = f"batch_rows() gives {rows}, no multiple of micro_batch={micro_batch}"
            sys.exit(f"{said}: round what it returns, in train.py")
    if any(sentence.count("[MASK]") != 1 for sentence in sentences()):
        sys.exit("samples: each sentence needs one [MASK], and a | stands between two sentences")
    if offload and parallel.WORLD > 1:
        sys.exit("offload is for one process: type --offload=False, or leave torchrun out")
    if offload and optimizer == "muon":
        sys.exit(
            "offload steps on the host, too slow for Muon there: type --optimizer=adamw --lr=0.001"
        )
    if wandb_project:
        importlib.import_module("wandb")  # a package that is missing is missed now
    try:
        matrix, table = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
        build_optimizers(
            {"model.layers.0.weight": matrix, "table": table}
        )  # torch checks the rates
        return model_config()
    except ValueError as e:
        sys.exit(e)


def less_memory(micro_batch):
    """What to type where memory does not suffice for so many rows."""
    advice = ["a smaller model"]
    if not offload:
        advice.insert(0, "--offload=True --optimizer=adamw --lr=0.001")
    if micro_batch > 1:
        resumed = "with --init=resume, if there is a checkpoint"
        advice.insert(0, f"--micro_batch={fit.next_smaller(micro_batch)} ({resumed})")
    return ", or ".join(advice)


if __name__ == "__main__":
    then = "--init=resume goes on from the last checkpoint, if there is one"
    safety.run(main, out_dir, then, lambda: less_memory(micro_batch))
