"""Pre-train a masked language model from scratch inside a wall-clock budget.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or for longer
    python train.py --init=out/day --data_dir=data/mine       # go on from a model, with other text
    torchrun --nproc_per_node=8 train.py --micro_batch=128    # a day on eight GPUs

This script keeps out_dir current: log.csv, run.json, loss.png, ckpt.pt and a model folder, which
transformers loads, after an edit of model.py too. "The paper" is Cramming, arXiv 2212.14034.
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from nanocram.settings import adopt, check, configure, typed

# fmt: off
# the run
data_dir = "data/fineweb"       # what prepare.py wrote
out_dir = "out/fineweb"         # where everything goes; an earlier run in it is moved aside
# scratch | resume: from out_dir/ckpt.pt | auto: resume if it exists | a model folder: its weights
init = "scratch"
seed = 0                        # of the weights, the masks, the dropout and where rows begin
budget_hours = 24.0             # wall-clock hours, from compiling to the last save
max_steps = 0                   # stop after so many steps, without a clock; 0 = use the budget
max_epochs = 0.0                # passes over the rows at most, without a clock; 0 = no limit
# the batch
micro_batch = 0                 # rows per forward pass; 0 = 32, or what a GPU holds up to 1024
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
# the model: the paper's size, and a ModernBERT, whose folder needs no code of ours
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
frequency_bias = True           # the decoder's biases begin as the tokens' log frequencies
neighbour_heads = True          # with rope, heads begin by attending to the token before or behind
token_values = False            # attention values also see the embeddings: config/sooner.py
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
snapshots = ""                  # keep a copy of the model after so many million words: "1,2.5"
wandb_project = ""              # log to this project of wandb.ai too (pip install wandb)
# sentences to fill in, a | between two; '' = none; auto = English ones, if normalisation is ascii
samples = "auto"
# fmt: on

SETTINGS = configure(globals())  # {name: default}; before the slow imports, so that --help is quick

import numpy as np
import torch

from model import ACTIVATIONS, FOR_TRAINING, MaskedLM, ModelConfig, make_loss
from nanocram import checkpoint, edits, facts, fit, machine, model_folder, parallel, safety, talk
from nanocram.data import Rows, estimate_loss, evaluate, held_out, load_meta, log_frequencies
from nanocram.muon import Muon
from nanocram.offload import Streamed, check_offload
from nanocram.tokenizer import CLS, MASK, Tokenizer, copy_tokenizer

UNIT = 256  # a micro_batch of 0: steps have a multiple of so many rows, whatever fits in a pass
MAX_SKIPPED = 50  # skipped steps in a row that end a run; float16 needs some to find its loss scale
signals = safety.Signals()

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
    """Rows per step, a multiple of micro_batch or UNIT, and at least batch_start (paper 4.3)."""
    if progress >= batch_ramp:
        return batch_size
    # the setting, not run.micro_batch, so that any card takes the same rows in each step
    unit = micro_batch or UNIT
    units = int(batch_size * progress / (batch_ramp * unit)) + 1
    return min(batch_size, max(batch_start, units * unit))


def row_shape(progress):
    """(tokens, predicted tokens) of a row in a pass. Each row of the data is cut into rows of so
    many tokens, which must divide seq_len. Each shape is compiled, so masking falls in 4 stages."""
    stage = min(3, int(4 * progress))
    rate = mask_rate + (mask_rate_end - mask_rate) * stage / 3
    return seq_len, max(1, round(seq_len * rate))


# -----------------------------------------------------------------------------
# State and clock


@dataclass(slots=True)  # so that a name that is no field, and would be lost, is an error
class State:
    """Where the loop is: what a checkpoint has beside weights, optimisers and loss scale."""

    step: int = 0  # optimiser steps done, skipped ones included
    rows_seen: int = 0  # where the next step starts to read; it counts on through all epochs
    skipped: int = 0  # steps whose loss or gradient was not finite
    consecutive_skips: int = 0  # those since the last step that was taken
    evals_done: int = -1  # number of the last evaluation; 0 is the one before the first step
    elapsed: float = 0.0  # seconds of the budget that were used up at the save
    setup_seconds: float = 0.0  # of them: compiling, and finding micro_batch; over all resumes
    recent: dict = field(default_factory=dict)  # {"step", "eval", "save": seconds of the last 3}
    oom_micro_batch: int = 0  # the smallest micro_batch that did not fit in memory
    largest_pass: int = 1024  # most rows in a pass; a resume keeps what was taken, for its masks
    last: dict = field(default_factory=dict)  # {name: number} of the last step alone
    sums: dict = field(default_factory=dict)  # {name: (steps, sum)} since the last line of log.csv
    longest_row: int = 0  # tokens of the longest rows in a step so far
    finished_at: int = 0  # step at which a budget was over, and its end evaluated and saved
    tensors: dict = field(default_factory=dict)  # yours, such as a mean of the weights
    began_from: dict = field(default_factory=dict)  # {"model": a folder, **its trained_on}


class Clock:
    """The budget: compiling, training, evaluating, saving and a machine's sleep use it up; reading
    data and building the model do not. A resumed run goes on from the seconds in its checkpoint."""

    def __init__(self, state, n_rows):
        self.state, self.n_rows = state, n_rows
        self.begun = None

    def start(self):
        """From now on the seconds count."""
        self.begun = machine.now() - self.state.elapsed

    def elapsed(self):
        """Seconds of the budget that are used up."""
        return self.state.elapsed if self.begun is None else machine.now() - self.begun

    @contextmanager
    def timed(self, kind):
        """Around a "step", an "eval" or a "save": its seconds are a forecast for the next one."""
        start = machine.now()
        yield
        seconds = machine.now() - start
        talk.warn_of_stall(kind, seconds, self.is_timed() and self.forecast(kind))
        self.state.recent[kind] = [*self.state.recent.get(kind, [])[-2:], seconds]

    def forecast(self, kind):
        """Seconds of the next one: the least of the last three, since a stall is no forecast."""
        return min(self.state.recent.get(kind, [0.0]))

    def left(self):
        """Seconds left to train: without the last evaluation and save, and a step under way."""
        end = 1.2 * (self.forecast("eval") + self.forecast("save")) + self.forecast("step")
        return budget_hours * 3600 - end - self.elapsed()

    def has_room_for(self, kind):
        """Whether the next "eval" or "save" would be over in time."""
        return not self.is_timed() or self.forecast(kind) < self.left()

    def is_timed(self):
        """Whether time ends the run, and not a number of steps or passes."""
        return not (max_steps or max_epochs)

    def progress(self):
        """Share of the run that is over, in [0, 1]: of max_steps, of the rows of max_epochs, or of
        the time to train, setting up left out. Resumes and forecasts may lower it."""
        most_rows = max_epochs * self.n_rows or math.inf
        by_rows = self.state.rows_seen / most_rows
        if self.state.rows_seen + batch_rows(by_rows) > most_rows:  # another step is too many
            by_rows = 1.0
        if not self.is_timed():
            return min(1.0, max(by_rows, self.state.step / (max_steps or math.inf)))
        trained = self.elapsed() - self.state.setup_seconds
        return min(1.0, trained / max(1e-9, trained + self.left()))


# -----------------------------------------------------------------------------
# The objective


def draw_masks(run, rows, n_predict):
    """(ids (B, T), positions (B, K), labels (B, K)) of rows (B, T), with K = n_predict.

    Of a row's K positions mask_token_share become [MASK], the next random_token_share a random
    token, the rest stays. [CLS], at position 0, is never chosen. run is for a rule of yours: for
    whole words, run.begins_word[rows] (B, T) is True where a word begins."""
    B, T = rows.shape
    # the K largest of T - 1 random numbers: K places without replacement
    scores = torch.rand(B, T - 1, device=rows.device)
    order = torch.rand(B, n_predict, device=rows.device).argsort(1)  # whatever the scores are
    positions = 1 + scores.topk(n_predict).indices.gather(1, order)
    labels = rows.gather(1, positions)
    n_mask = round(n_predict * mask_token_share)
    n_random = min(n_predict - n_mask, round(n_predict * random_token_share))
    replaced = labels.clone()
    replaced[:, :n_mask] = MASK
    if n_random:
        some = slice(n_mask, n_mask + n_random)
        replaced[:, some] = torch.randint_like(labels, vocab_size)[:, some]
    return rows.scatter(1, positions, replaced), positions, labels


def masked_batch(run, first_row, n_rows, shape):
    """n_rows from first_row on, in rows of a row_shape(), masked. Masks and dropout depend on seed
    and these arguments alone: a checkpoint needs no random state."""
    n_tokens, n_predict = shape
    batch_seed = np.random.SeedSequence((seed, first_row)).generate_state(1)[0]
    torch.manual_seed(int(batch_seed))
    rows = run.rows.fetch(first_row, n_rows).view(-1, n_tokens)
    rows[:, 0] = CLS  # a row of the data begins with it; those that are cut out of one may not
    return draw_masks(run, rows, n_predict)


# -----------------------------------------------------------------------------
# The optimisers, and one step


def build_optimizers(model, amp_dtype):
    """[AdamW or Adam, and perhaps one for the blocks' matrices]. A group's "peak_lr" is its peak
    learning rate; its "column" in log.csv has the largest rate of the groups that share it."""
    linear = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    matrices = list(dict.fromkeys(module.weight for module in linear))  # each once, if shared
    if optimizer == "muon":
        others = [Muon(matrices, muon_lr, muon_weight_decay, dtype=amp_dtype)]
    elif optimizer in ("adamw", "adam"):
        others = []
    else:
        sys.exit(f"optimizer={optimizer} is unknown: see build_optimizers() in train.py")

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
            group["peak_lr"] = group["lr"]  # a resume takes this command's: do not change it
            group.setdefault("column", f"{type(o).__name__.lower()}_lr" if o in others else "lr")
    return optimizers


def train_step(run, progress):
    """One optimiser step. If the loss or the gradient is not finite, no weight changes."""
    state, n_rows = run.state, batch_rows(progress)
    n_tokens, n_predict = shape = row_shape(progress)

    # set the learning rates
    rates = {}  # {column of log.csv: learning rate}
    for o in run.optimizers:
        for group in o.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale(progress)
            rates[group["column"]] = max(group["lr"], rates.get(group["column"], 0.0))

    # forward and backward, each rank on its share of the micro-batches; gradients add up in .grad
    means = {name: torch.zeros_like(x) for name, x in run.loss_like.get(shape, {}).items()}
    n = run.micro_batch if n_rows % run.micro_batch == 0 else run.small_pass  # rows in each
    n_rows = n * max(1, math.ceil(n_rows / n))  # a batch of yours may have any number of rows
    first_rows = range(state.rows_seen, state.rows_seen + n_rows, n)
    for first_row in first_rows[parallel.RANK :: parallel.WORLD_SIZE]:
        ids, positions, labels = masked_batch(run, first_row, n, shape)
        losses = run.loss_fn(ids, positions, labels)  # {"loss": mean over the labels, ...}
        # the mean over the step, since all its micro-batches have as many labels
        run.scaler.scale(losses["loss"] / len(first_rows)).backward()
        for name, value in losses.items():
            means[name] = means.get(name, 0.0) + value.detach().float() / len(first_rows)

    # wait for the gradients that offload sends to the host; sum gradients and means over the ranks
    if offload:
        run.streamed.wait()
    weights = [p for p in run.model.parameters() if p.requires_grad]
    parallel.sum_over_ranks(means, weights)
    torch.manual_seed(seed + state.step)  # from here on each rank does the same, chance included

    # clip the gradient; the norm of each row first: faster on a CPU, and more exact
    for o in run.optimizers:
        run.scaler.unscale_(o)
    norms = [torch.linalg.vector_norm(weight.grad, dim=-1) for weight in weights]
    norm = torch.nn.utils.get_total_norm(norms)
    measured = {name: mean.squeeze() for name, mean in means.items() if mean.numel() == 1}
    measured |= {"grad_norm": norm}  # 0-d tensors: add yours, and log.csv has them
    torch.nn.utils.clip_grads_with_norm_(weights, grad_clip or math.inf, norm)

    # the one wait for the device in a step, but for offload's above
    values = torch.stack([value.to(norm.device) for value in measured.values()]).tolist()
    measured = dict(zip(measured, values, strict=True))

    # update the weights
    if math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"]):
        for o in run.optimizers:
            o.step()  # not scaler.step(), which would wait for the device once more
        # a number that the update yields, or what is kept in State, belongs here
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
    state.rows_seen += n_rows
    state.longest_row = max(state.longest_row, n_tokens)
    state.last = measured | rates | {"batch_size": n_rows, "mask_rate": n_predict / n_tokens}


# -----------------------------------------------------------------------------
# The loop


@signals  # the first Ctrl-C sets signals.stop, a second one ends the process
@machine.training_kernels()
def main():
    # settings, machine and data, before anything but the lock is written
    parallel.join(device)
    master_process = parallel.RANK == 0
    _lock = safety.lock(out_dir) if master_process else None  # one writer a folder, to the end
    dev, amp_dtype = machine.pick(device, dtype)
    ckpt_path = Path(out_dir) / "ckpt.pt"
    start = find_start(ckpt_path)  # None: fresh weights; ckpt_path; or a model folder
    check_settings(dev, begun=start == ckpt_path)
    rows, held_out_rows, meta, tokenizer = load_data(dev)

    # a fresh run, and what it starts from
    run = Run(rows, meta, tokenizer, dev, amp_dtype)
    state, clock = run.state, run.clock
    if start == ckpt_path:
        checkpoint.load(run, start)
    elif start:
        state.began_from = {"model": init, **model_folder.load_into(run.model, start)}
    exit_if_done(run, clock.progress())
    log = talk.begin_log(run) if master_process else None

    # the budget begins now, the schedules begin after compiling
    clock.start()
    held_out_sets = set_up(run, held_out_rows)
    if master_process:
        log.write_facts(rows_per_pass=run.micro_batch, frequency_loss=run.frequency_loss)

    while True:
        # where the run is, by rank 0's clock; a signal to any rank stops them all
        progress, stop = parallel.agree(clock.progress(), signals.stop)
        is_over = progress >= 1
        exit_if_done(run, progress)  # in the first turn: setting up took what was left

        # rank 0 evaluates, logs and saves; the others wait for it in the next step's all_reduce
        if master_process:
            losses = {}
            eval_number = int(progress * max(1, evals))
            is_due = eval_number > state.evals_done and clock.has_room_for("eval")
            if is_over or (is_due and not stop):
                state.evals_done = eval_number
                with clock.timed("eval"), eval_weights(run):
                    losses = evaluate(run, held_out_sets)
                    if not is_over:  # log.report() says it then
                        log.say_evaluation(losses, eval_number)
            if losses or (state.step % log_every == 0 and not stop):
                log.add_line(losses)
            if is_over or stop or should_save(run):
                if is_over:
                    state.finished_at = state.step
                with clock.timed("save"):
                    is_saved = save(run, log)

        if is_over or stop:
            break

        rows_before = state.rows_seen
        with clock.timed("step"), fit.compile_errors():
            train_step(run, progress)
        if master_process:
            log.after_step(clock.progress())
            save_snapshots(run, log.folder, rows_before)
        if state.consecutive_skips >= MAX_SKIPPED:
            which = f"{MAX_SKIPPED} steps, up to step {state.step}"
            sys.exit(f"no finite gradient in {which}: lower the learning rate and --init=resume")

    # say what has been learnt; a run that was stopped has no losses
    if master_process:
        with eval_weights(run):
            log.report(losses, is_saved)
        if not is_saved:
            sys.exit(1)
    parallel.leave()


# -----------------------------------------------------------------------------
# Starting, compiling, evaluating, saving, checking: skip these at a first reading.


class Run:
    """A fresh model and all that trains it. main(), bench.py and the tests make one."""

    def __init__(self, rows, meta, tokenizer, dev, amp_dtype):
        self.settings = {name: globals()[name] for name in SETTINGS}
        self.rows, self.meta, self.tokenizer = rows, meta, tokenizer
        self.device, self.amp_dtype = dev, amp_dtype
        # rows in a pass, and where these do not divide a step; more are no faster on a CPU
        self.micro_batch = self.small_pass = micro_batch or (UNIT if dev.type == "cuda" else 32)
        self.state = State()
        self.clock = Clock(self.state, len(rows))
        self.saved_step = -1  # state.step at the last save
        self.saved_at = machine.now()
        self.loss_like = {}  # {row_shape(): what loss_fn returns}, for ranks without a micro-batch
        begins_word = tokenizer.begins_word() if tokenizer else [True] * vocab_size  # bench.py
        self.begins_word = torch.tensor(begins_word, device=dev)

        # init the model, the same on every rank
        torch.manual_seed(seed)
        if offload:  # it stays in host memory, and its blocks stream through the device
            self.streamed = Streamed(model_config(), dev, compile)
            self.model, computes = self.streamed.model, self.streamed.twin
        else:
            self.model = computes = MaskedLM(model_config()).to(dev)
        # a tenth fewer bytes to move, no difference in three pairs of runs (results/race_day.csv)
        if dev.type == "cuda" and amp_dtype == torch.bfloat16:
            self.model.model.residual_dtype = torch.bfloat16
        self.log_frequencies = log_frequencies(rows, vocab_size)
        if frequency_bias and decoder_bias:  # a checkpoint or model folder has its own
            self.model.decoder.bias.data.copy_(self.log_frequencies)
        self.made = set(computes.parameters())  # by MaskedLM.__init__(): the loss reads no others
        shapes = [row_shape(i / 100) for i in range(100)]
        self.flops_per_token = np.mean([self.model.flops_per_token(*shape) for shape in shapes])
        self.loss_fn = make_loss(self.model, dev, amp_dtype)
        self.optimizers = build_optimizers(self.model, amp_dtype)

        # in float16 the loss is scaled, so that small gradients survive
        where = self.model.decoder.weight.device
        self.scaler = torch.amp.GradScaler(where.type, enabled=amp_dtype == torch.float16)
        # it makes its scale at the first call, and a rank may have no micro-batch at first
        self.scaler.scale(torch.zeros((), device=where))

        # compile the model, at the first pass of each shape; Streamed compiles its blocks itself
        fit.prepare_compiler(len(row_shapes()))
        if compile and not offload:
            self.loss_fn = torch.compile(self.loss_fn, dynamic=False)


def model_config():
    """The ModelConfig of the settings; exits if no such model can be built."""
    names = [f.name for f in fields(ModelConfig) if f.name in globals()]
    try:
        return ModelConfig(**{name: globals()[name] for name in names})
    except ValueError as e:
        sys.exit(str(e))


def row_shapes():
    """All values of row_shape() in a run, the largest first."""
    return sorted({row_shape(i / 1000) for i in range(1001)}, reverse=True)


def take_all_passes(run, held_out_rows):
    """A pass of each shape that the run will have, which compiles it; no weight changes, and the
    caller drops the gradients. Returns the seconds of a pass of training and of evaluation."""

    def forward_backward(shape):
        losses = run.loss_fn(*masked_batch(run, run.state.rows_seen, run.micro_batch, shape))
        edits.check_loss(run, losses["loss"])
        losses["loss"].backward()
        run.loss_like[shape] = {name: x.detach().float() for name, x in losses.items()}

    # the largest shape twice more at the end, now that the gradients are in memory
    shapes = row_shapes()
    seconds = [machine.timed(run.device, forward_backward, s)[0] for s in shapes + 2 * shapes[:1]]
    # all batches of evaluations have one shape
    batch = held_out(held_out_rows[: run.small_pass], run.small_pass)["val_loss_15"]
    evaluations = [machine.timed(run.device, estimate_loss, run, batch)[0] for _ in range(3)]
    return min(seconds[-2:]), min(evaluations)  # one may have been held up


def set_up(run, held_out_rows):
    """Compile all passes, find the micro_batch that fits; return the sets of held_out()."""
    state, clock = run.state, run.clock
    # what is typed is obeyed; a size that divides no full step would be compiled for nothing
    largest = 0 if micro_batch or offload else math.gcd(state.largest_pass, batch_rows(1.0))
    seconds = fit.find_micro_batch(run, take_all_passes, held_out_rows, largest, signals)
    sets = held_out(held_out_rows, run.small_pass)
    run.frequency_loss = -run.log_frequencies[held_out_rows[:, 1:]].mean().item()
    state.setup_seconds += clock.elapsed() - state.elapsed  # since this process's clock began
    # forecasts, until a step and an evaluation are measured
    passes = batch_rows(clock.progress()) / run.micro_batch / parallel.WORLD_SIZE
    state.recent["step"] = [seconds[0] * passes]
    state.recent["eval"] = [seconds[1] * sum(map(len, sets.values()))]
    # a resume with a larger budget lowers progress: its later evaluations happen a second time
    state.evals_done = min(state.evals_done, int(clock.progress() * max(1, evals)))
    return sets


@contextmanager
def eval_weights(run):
    """Within it run.model has the weights to evaluate and export, before the first step too."""
    try:
        yield  # copy others in before this line ...
    finally:
        pass  # ... and the training weights back in here


def exit_if_done(run, progress):
    """Exit if the budget is over, and its end was saved already, or no step was taken."""
    state = run.state
    if progress < 1 or state.step != state.finished_at:
        return
    needed = [Path(out_dir, x) for x in ("config.json", "model.safetensors", "tokenizer.json")]
    if state.step and not (facts.read_facts(out_dir) and all(map(Path.exists, needed))):
        state.finished_at = 0  # the end once more makes what is missing or damaged
        return
    limit = "max_epochs" if max_epochs else "budget_hours"
    limit = "max_steps" if state.step >= max_steps > 0 else limit
    said = f"the budget ends at step {state.step:,}: to go on, type a larger --{limit}"
    if init == "auto" and state.step:  # which is no error
        is_by_this_code = facts.read_facts(out_dir).get("code", "").startswith(machine.code_hash())
        print(said if is_by_this_code else f"{said}; it was trained by other code")
        sys.exit()
    sys.exit(said if parallel.RANK == 0 else 1)


def save_model(run, folder):
    """Write a model folder; its config.json says what the weights have read."""
    with eval_weights(run):
        model_folder.save(run.model, folder, trained_on=facts.trained_on(run))


def should_save(run):
    """Whether to save now: around step 1, then every checkpoint_minutes; not behind a skip."""
    state, minutes = run.state, (machine.now() - run.saved_at) / 60
    n_updates = state.step - state.skipped
    is_due = n_updates <= 1 or 0 < checkpoint_minutes <= minutes
    # the first save may have been a stall: take a second one in any case
    has_room = len(state.recent.get("save", [])) == 1 or run.clock.has_room_for("save")
    return is_due and state.step > run.saved_step and not state.consecutive_skips and has_room


def save(run, log):
    """Write ckpt.pt, the model folder, loss.png and the card; return whether all was written. What
    cannot be written stays as it was, and a warning says why."""
    run.saved_at = machine.now()
    log_is_written = log.write()  # before the checkpoint: a resume drops later lines
    # skipped steps may mean broken weights; a few are routine where float16 looks for its scale
    if run.state.consecutive_skips > (3 if run.scaler.is_enabled() else 0):
        safety.say("WARNING: nothing is saved after skipped steps: type --init=resume")
        return False
    try:
        if bad := [name for name, p in run.model.named_parameters() if not p.isfinite().all()]:
            raise ValueError(f"{bad[0]} has a value that is not finite")
        run.state.elapsed = run.clock.elapsed() + run.clock.forecast("save")  # of this one
        save_model(run, log.folder)
        log.write_plot_and_card()
        log.write_facts(finished_at_step=run.state.finished_at or None)
        # the checkpoint last: if a kill comes before it, a resume makes the end once more
        checkpoint.save(run, log.folder / "ckpt.pt", optimizer_name=optimizer)
    except (OSError, RuntimeError, ValueError) as e:
        safety.say(f"WARNING: cannot save to {log.folder}: {safety.first_line(e)}")
        return False
    run.saved_step = run.state.step
    return log_is_written


def save_snapshots(run, folder, rows_before):
    """Keep a copy in folder/chck_NM if the last step reached N million words."""
    per_row = run.meta["counts"]["words"] / len(run.rows) / 1e6
    for n in map(float, filter(None, snapshots.split(","))):
        if rows_before * per_row < n <= run.state.rows_seen * per_row:
            copy = folder / f"chck_{n:g}M"
            with safety.extra(f"copy of the model in {copy}"):
                save_model(run, copy)
                copy_tokenizer(folder, copy, max_seq_len)
                safety.say(f"step {run.state.step:,}: {copy}")


def load_data(dev):
    """(Rows to train on, held-out rows (N, T), meta.json, Tokenizer) of data_dir."""
    folder = Path(data_dir)
    meta = load_meta(folder, vocab_size=vocab_size, seq_len=seq_len)
    is_ordered = meta["settings"]["order"] == "curriculum"
    rows = Rows(folder / "train.bin", seq_len, dev, 0 if is_ordered else seed, vocab_size)
    val_rows = Rows(folder / "val.bin", seq_len)
    held_out_rows = val_rows.read(0, min(eval_rows, len(val_rows)))
    return rows, held_out_rows, meta, Tokenizer(folder / "tokenizer.json")


def find_start(ckpt_path):
    """ckpt_path if init resumes it, a model folder, or None; takes the architecture from there."""
    words = ("scratch", "resume", "auto")
    begun = facts.read_facts(out_dir).get("settings", {}).get("init", "scratch")
    if init in ("resume", "auto") and begun not in words and not ckpt_path.exists():
        sys.exit(f"{out_dir} has no checkpoint yet: type --init={begun} again")
    _, any_rank_has_one = parallel.agree(0.0, ckpt_path.exists())
    if init == "resume" or (init == "auto" and any_rank_has_one):
        take_architecture(checkpoint.read_config(ckpt_path, Path(data_dir)), ckpt_path)
        return ckpt_path
    if init in words:
        return None
    if Path(init).resolve().is_relative_to(Path(out_dir).resolve()):  # which is moved aside
        sys.exit(f"init={init} is in out_dir: choose another --out_dir, or --init=resume")
    take_architecture(model_folder.config_for_rows(init, data_dir), init)
    return Path(init)


def take_architecture(config, path):
    """Take the settings that the weights fix from config, of the model at path."""
    config = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING} | config
    if config["position_embedding"] != "learned":  # no table of weights ends there
        is_typed = "max_seq_len" in typed
        config["max_seq_len"] = max_seq_len if is_typed else max(config["max_seq_len"], seq_len)
    bound = SETTINGS.keys() - FOR_TRAINING
    adopt(globals(), {k: v for k, v in config.items() if k in bound}, path)


def check_settings(dev, begun=False):
    """Exit with one line if the settings cannot work. begun: the run is resumed."""
    allowed = {
        "eval_rows log_every n_layer n_head n_embd n_inner": (1, math.inf),
        "micro_batch batch_start budget_hours max_steps max_epochs evals": (0, math.inf),
        "checkpoint_minutes": (0, math.inf),
        "token_types": (0, 9),
        "lr muon_lr weight_decay muon_weight_decay adam_eps norm_eps grad_clip": (0, math.inf),
        "seed": (0, 2**62),
        "warmup beta1 beta2 dropout": (0, 0.99999),
        "batch_ramp cooldown mask_token_share": (0, 1),
        "random_token_share": (0, round(1 - globals().get("mask_token_share", 0), 9)),
        "mask_rate mask_rate_end": (0.001, 0.9),
        "vocab_size": (260, 65536),
        "seq_len": (8, max_seq_len),
        "activation": ACTIVATIONS,
    }
    check(globals(), allowed)
    lr_scale(0.0)  # exits if the schedule is unknown
    if not (budget_hours or max_steps or max_epochs):
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    for n, k in row_shapes():  # yours too
        if not (type(n) is type(k) is int and 0 < k < n and seq_len % n == 0):
            sys.exit(f"row_shape() is {n}, {k}: return a divisor of {seq_len}, and a smaller int")
    unit = micro_batch or UNIT
    for n in {batch_rows(i / 1000) for i in range(1001)}:  # a ramp of yours too
        if n < unit or n % unit:
            wanted = f"batch_size and batch_start that are multiples of {unit}, or --micro_batch=N"
            sys.exit(f"batch_rows() returns {n}: type {wanted}")
    if samples not in ("", "auto") and any(s.count("[MASK]") != 1 for s in samples.split("|")):
        sys.exit("samples: each sentence needs one [MASK]; a | stands between two sentences")
    if not all(n.strip().replace(".", "", 1).isdecimal() for n in snapshots.split(",") if n):
        sys.exit(f"snapshots={snapshots}: type millions of words, such as --snapshots=1,2.5")
    config = model_config()
    edits.check_mixing(config, seq_len, begun)
    if offload:
        check_offload(dev, config, build_optimizers)
        edits.check_streaming(config, seq_len, dev, begun)


if __name__ == "__main__":
    go_on = "the same command with --init=resume goes on from the last checkpoint, if there is one"
    safety.run(main, out_dir, go_on, "type --init=resume and a smaller --micro_batch")
    # a stopped run ends a shell's loop, too; torchrun would begin it anew
    if signals.stop and not torch.distributed.is_torchelastic_launched():
        sys.exit(130)
