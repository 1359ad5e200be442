"""Pre-train a masked language model from scratch inside a wall-clock budget.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or for longer
    python train.py --init=out/day --data_dir=data/mine       # go on from a model, with other text
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
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean

from nanocram.settings import configure, read_ranks

# fmt: off
# the run
data_dir = "data/fineweb"       # what prepare.py wrote
out_dir = "out/fineweb"         # where everything goes; an earlier run in it is moved aside
# scratch | resume: from out_dir/ckpt.pt | auto: resume if it exists | a model folder: its weights
init = "scratch"
seed = 0                        # of the weights, the masks and the dropout
budget_hours = 24.0             # wall-clock hours, from compiling to the last save
max_steps = 0                   # stop after so many steps, without a clock; 0 = use the budget
# the batch
micro_batch = 256               # rows per forward pass; out of memory: the next smaller divisor
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
log_every = 10                  # optimiser steps per line of log.csv
checkpoint_minutes = 10.0       # between checkpoints; 0 = only around step 1 and at the end
wandb_project = ""              # log to this project of wandb.ai too (pip install wandb)
# sentences to fill in, a | between two; '' = none; auto = English ones, if normalisation is ascii
samples = "auto"
# fmt: on

if __name__ == "__main__" and read_ranks()[0]:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of torchrun's processes only one prints
SETTINGS = configure(globals())  # {name: default}; before the slow imports, so that --help is quick

import numpy as np
import torch

from model import MaskedLM, ModelConfig, check_mixing, make_loss
from nanocram import checkpoint, machine, model_folder, parallel, runlog, safety
from nanocram.data import IGNORE, Rows, held_out, load_meta
from nanocram.muon import Muon
from nanocram.offload import Streamed
from nanocram.tokenizer import CLS, MASK, Tokenizer

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
    # of the setting, not of run.micro_batch: a smaller card takes the same rows in each step
    micro_batches = int(batch_size * progress / (batch_ramp * micro_batch)) + 1
    return min(batch_size, max(batch_start, micro_batch * micro_batches))


def row_shape(progress):
    """(tokens, predicted tokens) of a row in a pass. Each row of the data is cut into rows of so
    many tokens, which must divide seq_len. Each shape is compiled, so masking falls in 4 stages."""
    stage = min(3, int(4 * progress))
    rate = mask_rate + (mask_rate_end - mask_rate) * stage / 3
    return seq_len, max(1, round(seq_len * rate))


def row_shapes():
    """All values of row_shape() in a run, the largest first."""
    return sorted({row_shape(i / 1000) for i in range(1001)}, reverse=True)


# -----------------------------------------------------------------------------
# State and clock


@dataclass(slots=True)  # so that a name that is no field, and would be lost, is an error
class State:
    """Where the loop is. A checkpoint has this, the weights, the optimisers and the loss scale."""

    step: int = 0  # optimiser steps done, skipped ones included
    row: int = 0  # where the next step starts to read; it counts on through all epochs
    skipped: int = 0  # steps whose loss or gradient was not finite
    consecutive_skips: int = 0  # those since the last step that was taken
    evals_done: int = -1  # number of the last evaluation; 0 is the one before the first step
    logged: int = -1  # step of the last line in log.csv
    sums: dict = field(default_factory=dict)  # {name: (steps, sum over them)} since that line
    elapsed: float = 0.0  # seconds of the budget that were used up at the save
    recent: dict = field(default_factory=dict)  # {"step", "eval", "save": seconds of the last 3}
    setup_seconds: float = 0.0  # compiling, and finding micro_batch; over all resumes
    oom_micro_batch: int = 0  # the smallest micro_batch that did not fit in memory
    last: dict = field(default_factory=dict)  # {name: number} of the last step alone
    tensors: dict = field(default_factory=dict)  # a fork's own, such as a mean of the weights
    longest_row: int = 0  # tokens of the longest rows in a step so far
    began_from: dict = field(default_factory=dict)  # {"model": a folder, **its trained_on}


def now():
    """Seconds by a clock that goes on while the machine sleeps, where the system has one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Clock:
    """The budget: how much of it is used up, and how far the run is.

    Compiling, training, evaluating and saving count, and so does a machine's sleep; reading the
    data and building the model do not. A resumed run goes on from the seconds in its checkpoint:
    the time between the two runs does not count, nor does what a crash has lost."""

    def __init__(self, state):
        self.state = state
        self.begun = now() - state.elapsed

    def elapsed(self):
        """Seconds of the budget that are used up."""
        return now() - self.begun

    @contextmanager
    def timed(self, kind):
        """Around a "step", an "eval" or a "save": its seconds are a forecast for the next one."""
        start = now()
        yield
        seconds, usual = now() - start, self.forecast(kind)
        if usual and seconds > 10 + 10 * usual and not max_steps:
            said = f"a {kind} took {seconds:,.0f} s of the budget"
            runlog.say(f"WARNING: {said}; --init=resume with a larger budget makes up for it")
        self.state.recent[kind] = [*self.state.recent.get(kind, [])[-2:], seconds]

    def forecast(self, kind):
        """Seconds of the next one: the least of the last three, since a stall is no forecast."""
        return min(self.state.recent.get(kind, [0.0]))

    def reserve(self):
        """Seconds to keep for the end: an evaluation, a save, the step that may be under way."""
        return 1.2 * (self.forecast("eval") + self.forecast("save")) + self.forecast("step")

    def has_room_for(self, kind):
        """Whether the next "eval" or "save" ends before the reserve."""
        end = self.elapsed() + self.forecast(kind) + self.reserve()
        return bool(max_steps) or end < budget_hours * 3600

    def progress(self):
        """Share of the run that is over, in [0, 1]: steps / max_steps, or (elapsed - setup) /
        (budget - setup - reserve). Setup, mostly compiling, uses budget but is no progress. It
        falls when a run is resumed with a larger budget, and a little when the reserve shrinks."""
        if max_steps:
            return min(1.0, self.state.step / max_steps)
        setup = self.state.setup_seconds
        time_to_train = budget_hours * 3600 - self.reserve() - setup
        return min(1.0, (self.elapsed() - setup) / max(1e-9, time_to_train))


# -----------------------------------------------------------------------------
# The objective


def draw_masks(run, rows, n_predict):
    """(ids (B, T), positions (B, K), labels (B, K)) of rows (B, T), with K = n_predict.

    Of a row's K positions mask_token_share become [MASK], the next random_token_share a random
    token, the rest stays. [CLS], at position 0, is never chosen. run is for a rule of yours: for
    whole words, run.begins_word[rows] (B, T) is True where a word begins."""
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


def masked_batch(run, first_row, shape):
    """The micro-batch from first_row on, in rows of a row_shape(), masked. Masks and dropout depend
    on seed, first_row, micro_batch and shape alone: a checkpoint needs no random state."""
    n_tokens, n_predict = shape
    batch_seed = np.random.SeedSequence((seed, first_row)).generate_state(1)[0]
    torch.manual_seed(int(batch_seed))
    rows = run.rows.fetch(first_row, run.micro_batch).view(-1, n_tokens)
    rows[:, 0] = CLS  # a row of the data begins with it; those that are cut out of one may not
    return draw_masks(run, rows, n_predict)


# -----------------------------------------------------------------------------
# The run, and one step of it


def build_optimizers(model, amp_dtype):
    """[AdamW or Adam, and perhaps one for the blocks' matrices]. A group's "peak_lr" is its peak
    learning rate; its "column" in log.csv has the largest rate of the groups that share it."""
    blocks = model.model.layers.modules()
    matrices = [module.weight for module in blocks if isinstance(module, torch.nn.Linear)]
    if optimizer == "muon":
        others = [Muon(matrices, muon_lr, muon_weight_decay, dtype=amp_dtype)]
    elif optimizer in ("adamw", "adam"):
        others = []
    else:
        sys.exit(f"optimizer={optimizer} is unknown: see build_optimizers() in train.py")
    if offload and others:
        sys.exit("offload needs AdamW for all weights: type --optimizer=adamw --lr=0.001")

    # AdamW or Adam takes what no other one does; norms and biases have no weight decay
    taken = {p for o in others for group in o.param_groups for p in group["params"]}
    decayed, exempt = [], []
    for name, p in model.named_parameters():
        if p not in taken:
            (exempt if "norm" in name or "bias" in name else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt}]
    adam = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
    fused = model.decoder.weight.device.type in ("cuda", "cpu")
    how = {"lr": lr, "betas": (beta1, beta2), "eps": adam_eps, "weight_decay": 0.0, "fused": fused}
    optimizers = [adam(groups, **how), *others]
    for o in optimizers:
        for group in o.param_groups:
            group["peak_lr"] = group["lr"]  # checkpoint.load() keeps that of this command
            group.setdefault("column", f"{type(o).__name__.lower()}_lr" if o in others else "lr")
    return optimizers


@contextmanager
def shown(run):
    """Inside `with shown(run)`, run.model holds the weights to evaluate and export. As it stands
    these are the training weights, which the checkpoint has in any case."""
    try:
        yield  # copy others in before this line ...
    finally:
        pass  # ... and the training weights back in here


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
        self.micro_batch = micro_batch  # compile_and_fit() may take a smaller one
        self.state = State()
        self.clock = Clock(self.state)  # main() starts another one when the budget begins
        self.saved_step = -1  # state.step at the last save of this process
        self.saved_at = now()
        self.world_size = parallel.WORLD_SIZE
        self.loss_names = []  # what loss_fn returns: a rank may have no micro-batch in a step
        begins_word = tokenizer.begins_word() if tokenizer else [True] * vocab_size  # bench.py
        self.begins_word = torch.tensor(begins_word, device=dev)

        # init the model, the same on every rank
        torch.manual_seed(seed)
        config = model_config()
        if offload:  # it stays in host memory, and its blocks stream through the device
            self.streamed = Streamed(config, dev, amp_dtype, compile)
            self.model = self.streamed.model
        else:
            self.model = MaskedLM(config).to(dev)
        flops = {shape: self.model.flops_per_token(*shape) for shape in row_shapes()}
        self.flops_per_token = fmean(flops[row_shape(i / 1000)] for i in range(1000))
        self.loss_fn = make_loss(self.model, dev, amp_dtype)
        self.optimizers = build_optimizers(self.model, amp_dtype)

        # in float16 the loss is scaled, so that small gradients survive
        weights_device = self.model.decoder.weight.device
        self.scaler = torch.amp.GradScaler(weights_device.type, enabled=amp_dtype == torch.float16)
        # it makes its scale at the first call, and a rank may have no micro-batch at first
        self.scaler.scale(torch.zeros((), device=weights_device))

        # compile the model, at the first pass of each shape; Streamed compiles its blocks itself
        if compile and not offload:
            torch.compiler.reset()  # the graphs of an earlier run here count against torch's limit
            torch._dynamo.config.fail_on_recompile_limit_hit = True  # or all goes on uncompiled
            self.loss_fn = torch.compile(self.loss_fn, dynamic=False)


def train_step(run, progress):
    """One optimiser step. If the loss or the gradient is not finite, no weight changes."""
    state = run.state
    n_rows = batch_rows(progress)
    n_tokens, n_predict = shape = row_shape(progress)

    # forward and backward, each rank on its share of the micro-batches; gradients add up in .grad
    means = {name: torch.zeros((), device=run.device) for name in run.loss_names}
    first_rows = range(state.row, state.row + n_rows, run.micro_batch)
    for first_row in first_rows[parallel.RANK :: parallel.WORLD_SIZE]:
        ids, positions, labels = masked_batch(run, first_row, shape)
        sums = run.loss_fn(ids, positions, labels)  # {"loss": sum over the labels, ...}
        # divide by the labels of the whole step: each micro-batch, on any rank, has as many
        labels_in_step = labels.numel() * len(first_rows)
        run.scaler.scale(sums["loss"] / labels_in_step).backward()
        for name, value in sums.items():
            means[name] = means.get(name, 0.0) + value.detach().float() / labels_in_step
        # read the next rows while a GPU is busy with these
        run.rows.prefetch(first_row + parallel.WORLD_SIZE * run.micro_batch, run.micro_batch)

    # sum the means and the gradients over the ranks
    if offload:
        run.streamed.collect()  # first the gradients come back to the host
    weights = [p for p in run.model.parameters() if p.requires_grad]
    for weight in weights:
        if weight.grad is None:  # on a rank without a micro-batch
            weight.grad = torch.zeros_like(weight)
    parallel.all_reduce([*means.values(), *(weight.grad for weight in weights)])
    torch.manual_seed(seed + state.step)  # from here on each rank does the same, chance included

    # the norm of the gradient, by way of the last dimension's: faster on a CPU, and more exact
    for o in run.optimizers:
        run.scaler.unscale_(o)
    norms = [torch.linalg.vector_norm(weight.grad, dim=-1) for weight in weights]
    norm = torch.nn.utils.get_total_norm(norms)
    measured = means | {"grad_norm": norm}  # 0-d tensors: add yours, and log.csv has them
    torch.nn.utils.clip_grads_with_norm_(weights, grad_clip or math.inf, norm)

    # the one wait for the device in a step
    values = torch.stack([value.to(norm.device) for value in measured.values()]).tolist()
    measured = dict(zip(measured, values, strict=True))

    # update the weights
    rates = {}  # {column of log.csv: learning rate}
    for o in run.optimizers:
        for group in o.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale(progress)
            rates[group["column"]] = max(group["lr"], rates.get(group["column"], 0.0))
    if math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"]):
        for o in run.optimizers:
            o.step()  # not scaler.step(), which would wait for the device once more
        for name, value in measured.items():
            steps, total = state.sums.get(name, (0, 0.0))
            state.sums[name] = steps + 1, total + value
        state.consecutive_skips = 0
    else:
        state.skipped += 1
        state.consecutive_skips += 1
    run.scaler.update()  # float16: halves the loss scale after an overflow, raises it in time
    run.model.zero_grad()

    state.step += 1
    state.row += n_rows
    state.longest_row = max(state.longest_row, n_tokens)
    state.last = measured | rates | {"batch_size": n_rows, "mask_rate": n_predict / n_tokens}


# -----------------------------------------------------------------------------
# Compiling, evaluating, saving: skip these at a first reading.


def take_all_passes(run, held_out_rows):
    """A pass of each shape that the run will have, which compiles it; no weight changes. Returns
    the seconds of a pass of training, and of one of evaluation."""
    # stand in for what comes later: optimisers' states, the sum over the ranks; and 5 % of a GPU
    copies = (parallel.WORLD_SIZE > 1) + (0 if run.state.step else 2)  # a resume has the states
    stand_ins = [torch.empty_like(p) for p in run.model.parameters() for _ in range(copies)]
    if run.device.type == "cuda":
        total = torch.cuda.get_device_properties(run.device).total_memory
        stand_ins.append(torch.empty(total // 20, dtype=torch.uint8, device=run.device))

    def forward_backward(shape):
        sums = run.loss_fn(*masked_batch(run, run.state.row, shape))
        sums["loss"].backward()
        run.loss_names = list(sums)

    # the largest shape twice more at the end, now that the gradients are in memory
    shapes = row_shapes()
    passes = [machine.timed(run.device, forward_backward, s)[0] for s in shapes + 2 * shapes[:1]]
    for name, p in run.model.named_parameters():
        if p.requires_grad and p.grad is None:
            print(f"WARNING: nothing reads {name}, so it is not trained")
    # all batches of evaluations have one shape
    batch = held_out(held_out_rows[: run.micro_batch], run.micro_batch)["val_loss_15"]
    evaluations = [machine.timed(run.device, estimate_loss, run, batch)[0] for _ in range(3)]
    return min(passes[-2:]), min(evaluations)  # one may have been held up


def compile_and_fit(run, held_out_rows):
    """Compile all passes, and make run.micro_batch smaller until each fits in memory.

    Returns the seconds of a pass of training and of one of evaluation."""
    state = run.state
    seconds = 0.0, 0.0
    while True:
        # after an out-of-memory error, of an earlier start too, take the next smaller divisor
        while 0 < state.oom_micro_batch <= run.micro_batch:
            if run.micro_batch == 1:
                sys.exit("out of memory with a single row: use a smaller model, or --offload=True")
            divisors = [n for n in range(1, run.micro_batch) if run.micro_batch % n == 0]
            run.micro_batch = divisors[-1]
            print(f"micro_batch={run.micro_batch}, since a larger one ran out of memory")
        oom = False
        try:
            seconds = take_all_passes(run, held_out_rows)
        except Exception as e:
            oom = safety.is_oom(e)
            if not oom and isinstance(e, torch._dynamo.exc.ShortenTraceback):
                why = safety.first_line(e)
                sys.exit(f"torch.compile fails here ({why}): mend that, or type --compile=False")
            if not oom:
                raise
        # free the memory; inside of `except` the traceback would keep it
        run.model.zero_grad()
        run.rows.fetched.clear()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        # all ranks take the size that fits on each; there is no progress to agree on yet
        _, oom, stop = parallel.agree(0.0, oom, signals.stop)
        if stop or not oom:
            return seconds
        state.oom_micro_batch = run.micro_batch
        torch.compiler.reset()  # drop the graphs of the larger size


@torch.no_grad()
def estimate_loss(run, batches):
    """Nats per predicted token over batches of held_out()."""
    run.model.eval()
    total = sum(run.loss_fn(*(t.to(run.device) for t in batch))["loss"] for batch in batches)
    count = sum((labels != IGNORE).sum() for _, _, labels in batches)
    run.model.train()
    return total.item() / count.item()


def evaluate(run, held_out_sets):
    """{column of log.csv: held-out loss}."""
    losses = {name: estimate_loss(run, batches) for name, batches in held_out_sets.items()}
    # nats per character can be compared between vocabularies
    tokens_per_char = run.meta["counts"]["val_tokens"] / run.meta["counts"]["val_characters"]
    losses["val_nats_per_char"] = losses["val_loss_15"] * tokens_per_char
    return losses


def trained_on(run):
    """What the weights have read, before the run too: an entry of config.json."""
    before, state = run.state.began_from, run.state
    return {
        "sources": [*before.get("sources", []), run.meta["settings"]["source"]],
        "tokens": before.get("tokens", 0) + state.row * seq_len,
        "seq_len": max(before.get("seq_len", 0), state.longest_row),
    }


def should_save(run):
    """Whether to save now: at the start, to warn early of a full disk; after the first step, with
    the optimisers' states; then every checkpoint_minutes. Not after a skipped step, for the last
    update may have broken the weights."""
    state = run.state
    updates = state.step - state.skipped
    minutes = (now() - run.saved_at) / 60
    due = updates <= 1 or 0 < checkpoint_minutes <= minutes
    is_new = state.step > run.saved_step
    # the first save may have been a stall: take a second one in any case
    has_room = len(state.recent.get("save", [])) == 1 or run.clock.has_room_for("save")
    return due and is_new and not state.consecutive_skips and has_room


def save(run, log):
    """Write ckpt.pt, the model folder, loss.png and the card; return whether all was written.

    A file that cannot be written stays as it was, and a warning says why."""
    run.saved_at = now()
    log_is_written = log.write()  # before the checkpoint: a resume drops later lines
    try:
        run.state.elapsed = run.clock.elapsed() + run.clock.forecast("save")  # of this one
        checkpoint.save(run, log.folder / "ckpt.pt", optimizer)
        with shown(run):
            model_folder.save(run.model, log.folder, trained_on=trained_on(run))
        runlog.plot(log.folder)
        runlog.write_card(log.folder)
    except (OSError, RuntimeError, ValueError) as e:
        reason = e  # what torch and PIL raise may hide that a disk is full
        while reason and not isinstance(reason, OSError):
            reason = reason.__context__
        runlog.say(f"WARNING: cannot save to {log.folder}: {safety.first_line(reason or e)}")
        return False
    run.saved_step = run.state.step
    return log_is_written


def find_start(path):
    """(whether the run resumes from path, the MaskedLM that it begins from or None), by init.

    Exits if it cannot. The settings of the architecture become those of either."""
    words = ("scratch", "resume", "auto")
    begun = runlog.read_facts(out_dir).get("settings", {}).get("init", "scratch")
    if init in ("resume", "auto") and begun not in words and not path.exists():
        sys.exit(f"{out_dir} has no checkpoint yet: type --init={begun} again")
    if init == "resume" or (init == "auto" and parallel.agree(0.0, path.exists())[1]):
        config, began_from = checkpoint.read_config(path)
        take_architecture(config, path, bool(began_from))
        return True, None
    if init in words:
        return False, None

    if Path(init).resolve() == Path(out_dir).resolve():
        sys.exit(f"init={init} is out_dir: choose another --out_dir, or --init=resume")
    try:
        base = model_folder.load(init)
        vocabulary = Path(init, "tokenizer.json").read_bytes()
    except (ValueError, OSError) as e:
        sys.exit(f"init must be {', '.join(words)} or a model folder: {e}")
    ours = Path(data_dir, "tokenizer.json")
    if not ours.exists() or ours.read_bytes() != vocabulary:
        sys.exit(f"{data_dir} has no rows of {init}'s tokens: give prepare.py --tokenizer={init}")
    if base.config.position_embedding != "learned":  # no table of weights ends there
        base.config.max_seq_len = max(base.config.max_seq_len, seq_len)
    take_architecture(asdict(base.config), init, True)
    return False, base


def take_architecture(config, path, is_bound):
    """Set the settings that weights are bound to as config, the model's at path, has them.

    A resume of a run from scratch, which is not bound, exits where they differ."""
    newer = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
    free = ("dropout", "zero_init")
    config = {k: v for k, v in (newer | config).items() if k in SETTINGS and k not in free}
    flags = [f"--{k}={v}" for k, v in config.items() if v != globals()[k]]
    if flags and not is_bound:
        sys.exit(f"{path} is of another model: to resume it, type {' '.join(flags)}")
    if flags:
        print(f"settings for going on from {path}: {' '.join(flags)}")
    globals().update(config)  # the one place that changes settings


def check_settings(dev):
    """Exit with one line if the settings cannot work."""
    ranges = [
        (1, math.inf, "micro_batch eval_rows log_every"),
        (0, math.inf, "seed budget_hours max_steps evals checkpoint_minutes lr muon_lr grad_clip"),
        (0, 0.99999, "warmup beta1 beta2"),
        (0, 1, "cooldown"),
        (0.001, 0.9, "mask_rate mask_rate_end"),
        (8, max_seq_len, "seq_len"),
    ]
    for least, most, names in ranges:
        for name in names.split():
            if not least <= globals()[name] <= most:
                wanted = f"at least {least}" if most == math.inf else f"from {least} to {most}"
                sys.exit(f"{name}={globals()[name]} must be {wanted}")
    lr_scale(0.0)  # exits if the schedule is unknown
    if not budget_hours and not max_steps:
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    if compile and len(row_shapes()) > 7:
        sys.exit(f"row_shape() has {len(row_shapes())} values, torch compiles 7: --compile=False")
    for n_tokens, n_predict in row_shapes():  # yours too
        is_whole = type(n_tokens) is type(n_predict) is int
        if not is_whole or not 0 < n_predict < n_tokens or seq_len % n_tokens:
            wanted = f"an int that divides seq_len={seq_len}, and a smaller one"
            sys.exit(f"row_shape() returns {n_tokens}, {n_predict}: it must return {wanted}")
    for n_rows in {batch_rows(i / 1000) for i in range(1001)}:  # a ramp of yours too
        if n_rows < micro_batch or n_rows % micro_batch:
            wanted = f"multiples of micro_batch={micro_batch}"
            sys.exit(f"batch_size, batch_start, batch_rows() must be {wanted}: {n_rows} is none")
    if samples not in ("", "auto") and any(s.count("[MASK]") != 1 for s in samples.split("|")):
        sys.exit("samples: each sentence needs one [MASK]; a | stands between two sentences")
    if offload and (parallel.WORLD_SIZE > 1 or dev.type == "mps"):
        sys.exit("offload needs one process, on cuda or cpu: drop torchrun or --device=mps")
    with torch.device("meta"):
        build_optimizers(MaskedLM(model_config()), torch.float32)  # exits if it cannot be
    check_mixing(model_config(), seq_len)


# -----------------------------------------------------------------------------

signals = safety.Signals()


@signals  # the first Ctrl-C sets signals.stop, a second one ends the process
def main():
    # settings, machine and data, before anything is written
    parallel.join(device)
    master_process = parallel.RANK == 0
    dev, amp_dtype = machine.pick(device, dtype)
    ckpt = Path(out_dir) / "ckpt.pt"
    resumes, base = find_start(ckpt)
    check_settings(dev)
    meta = load_meta(data_dir, vocab_size=vocab_size, seq_len=seq_len)
    train_rows = Rows(Path(data_dir) / "train.bin", seq_len, dev)
    val_rows = Rows(Path(data_dir) / "val.bin", seq_len)
    held_out_rows = val_rows.read(0, min(eval_rows, len(val_rows)))
    tokenizer = Tokenizer(Path(data_dir) / "tokenizer.json")

    # the run: from scratch, from its checkpoint, or from the weights of another one
    lock = safety.lock(out_dir) if master_process else None  # one writer a folder
    run = Run(train_rows, meta, tokenizer, dev, amp_dtype)
    if resumes:
        checkpoint.load(run, ckpt)
        run.saved_step = run.state.step
    if base:
        run.model.load_state_dict(base.state_dict())
        run.state.began_from = {"model": init, **base.trained_on}
        base = None  # free its memory
    state = run.state
    settings = {name: globals()[name] for name in SETTINGS}
    log = runlog.Log(run, out_dir, data_dir, settings) if master_process else None

    # the budget begins now, the schedules begin after compiling
    run.clock = clock = Clock(state)
    t0 = now()
    pass_seconds, eval_seconds = compile_and_fit(run, held_out_rows)
    held_out_sets = held_out(held_out_rows, run.micro_batch)
    state.setup_seconds += now() - t0
    # forecasts, until a step and an evaluation are measured
    passes = batch_rows(clock.progress()) / run.micro_batch / parallel.WORLD_SIZE
    state.recent["step"] = [pass_seconds * passes]
    state.recent["eval"] = [eval_seconds * sum(map(len, held_out_sets.values()))]
    if master_process:
        log.write_facts(micro_batch=run.micro_batch)
    # a resume with a larger budget lowers progress: its later evaluations happen a second time
    state.evals_done = min(state.evals_done, int(clock.progress() * max(1, evals)))

    while True:
        # where the run is, by rank 0's clock; a signal to any rank stops them all
        progress, stop = parallel.agree(clock.progress(), signals.stop)
        done = stop or progress >= 1

        # evaluate, log and save; the other ranks go on to the next step's all_reduce, and wait
        if master_process and not done:
            losses = {}
            eval_number = int(progress * evals)
            if eval_number > state.evals_done and clock.has_room_for("eval"):
                state.evals_done = eval_number
                with clock.timed("eval"), shown(run):
                    losses = evaluate(run, held_out_sets)
                    log.say_evaluation(losses, eval_number)
            if losses or (state.step % log_every == 0 and state.step > state.logged):
                log.add_line(losses)
            if should_save(run):
                with clock.timed("save"):
                    save(run, log)

        if done:
            break

        try:
            with clock.timed("step"):
                train_step(run, progress)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            sys.exit("torch compiles anew in each step: what changes in loss_fn must be a tensor")
        if master_process:
            log.after_step(clock.progress())
        if state.consecutive_skips >= MAX_SKIPPED:
            said = f"no finite gradient in {MAX_SKIPPED} steps, up to step {state.step}"
            sys.exit(f"{said}: lower the learning rate and type --init=resume")

    # the end: evaluate, save, report; if a signal stopped the run, only save
    if not state.step and not stop:
        said = f"the budget has no room for a step after {clock.elapsed():.0f} s of setting up"
        sys.exit(f"{said}: type a larger --budget_hours" if master_process else 1)
    if master_process:
        if log.bar:
            log.bar.close()
        losses = {}
        if not stop:
            with shown(run):
                losses = evaluate(run, held_out_sets)
            if state.evals_done < max(1, evals):  # a resumed run that was over has its line
                state.evals_done = max(1, evals)
                log.add_line(losses)
        # skipped steps may mean broken weights; a few are routine where float16 looks for its scale
        if state.consecutive_skips > (3 if run.scaler.is_enabled() else 0):
            sys.exit(f"nothing is saved after the skipped steps at the end: {GO_ON}")
        is_saved = save(run, log)
        if losses:
            with shown(run):
                log.report(losses)
        if not is_saved:
            sys.exit(1)
        if stop:
            runlog.say(f"stopped at step {state.step:,}: --init=resume goes on")
    parallel.leave()
    del lock


if __name__ == "__main__":
    safety.run(main, out_dir, GO_ON, "type --init=resume and half the micro_batch of run.json")
