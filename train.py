"""Pre-train a masked language model from scratch inside a wall-clock budget; data_dir comes from prepare.py.

    python train.py --budget_hours=24                         # the whole job on one GPU
    python train.py config/tiny.py                            # three minutes on a CPU
    python train.py --budget_hours=24 --init=resume           # go on after a crash, or with a larger budget
    torchrun --nproc_per_node=8 train.py --budget_hours=24    # the same run on eight GPUs, further

The clock starts just before the first step. Compiling, evaluating and saving count; preparing the data does not.
out_dir gets log.csv, run.json, loss.png, ckpt.pt and a model folder that loads in transformers, all kept current.
"""

import math
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

from nanocram.configurator import configure, require, settings

# the run
data_dir = "data/fineweb_edu"  # what prepare.py wrote
out_dir = "out/fineweb_edu"  # where everything goes; a run that is there already is moved aside, not overwritten
init = "scratch"  # scratch | resume: go on from out_dir/ckpt.pt
seed = 0  # of the weights, the masks and the dropout
budget_hours = 24.0  # wall-clock hours for the whole run
max_steps = 0  # stop after this many optimiser steps, whatever the clock says; 0 = by the clock
# the batch
micro_batch = 256  # rows per forward pass; lower it if memory runs out, the batch stays the same
batch_size = (
    4096  # rows per optimiser step, from batch_ramp on: half a million tokens, as in nanochat
)
batch_start = 1024  # rows per optimiser step at the start
batch_ramp = 0.6  # share of the run over which the batch grows (paper 4.3); 0 = batch_size at once
# the objective
mask_rate = 0.30  # share of a row's tokens to predict at the start (arXiv 2305.15096: from 30 % ...
mask_rate_end = 0.15  # ... to 15 % at the end is worth half a point of GLUE over any fixed rate)
mask_token_share = 1.0  # share of those that become [MASK]; BERT's recipe is 0.8 ...
random_token_share = (
    0.0  # ... and 0.1 for this: the share that becomes a random token; the rest stays
)
# the optimiser: why these values, and what lost, is told under The race in the README
optimizer = "muon"  # muon: Muon (muon.py) on the blocks' matrices, AdamW on the rest | adamw | adam
muon_lr = (
    0.02  # peak learning rate of Muon, in its own scale ("original"); speed runs: 0.02 to 0.035
)
muon_weight_decay = 0.05  # decoupled, of Muon's matrices
lr = 0.004  # peak learning rate of AdamW and Adam, a guess beside Muon; AdamW alone: 0.001 (paper)
weight_decay = (
    0.0  # of AdamW (decoupled) and Adam (coupled), norms and biases exempt; the paper has 0.01
)
beta1 = 0.9  # of AdamW and Adam
beta2 = 0.95  # of AdamW and Adam; the paper has 0.98
adam_eps = 1e-10  # of AdamW and Adam; the paper has 1e-12
grad_clip = 1.0  # largest global norm of the gradient; 0 = no clipping
schedule = "trapezoid"  # trapezoid | triangle (the paper's) | cosine | linear
warmup = 0.01  # share of the run in which the learning rate rises (trapezoid, cosine, linear)
cooldown = 0.65  # share of the run at its end in which it falls to 0 (trapezoid), as in nanochat
# the model: the paper's size, natively a ModernBERT (see model.py)
vocab_size = 32768  # that of the data
seq_len = 128  # that of the data: tokens in a row
max_seq_len = (
    512  # longest row the model takes later on; the size of the table for learned positions
)
n_layer = 16
n_narrow = 0  # of them, how many at the end compute predicted tokens only (NarrowBERT)
n_head = 12
n_embd = 768
n_inner = 1536  # width inside the MLP, behind the gate
activation = "geglu"  # geglu | relu2 | gelu
position = "rope"  # rope | sinusoidal (the paper's, one learnt scale) | learned
post_norm = False  # norms behind the residual sums, as in the original BERT, rather than before
embedding_norm = True  # a norm right after the embeddings
first_attn_norm = (
    False  # a norm before the first attention too; the embedding norm stands in for it
)
final_norm = True  # a norm after the last block
head_transform = True  # dense-GELU-norm before the decoder; the paper leaves it out
linear_bias = False  # biases in attention, MLP and head
norm_bias = False  # biases in the norms
decoder_bias = True  # a bias for each entry of the vocabulary
token_types = 0  # entries of a token-type table; BERT has 2
norm_eps = 1e-5
dropout = 0.0  # one epoch or a few: nothing to regularise (paper 4.3)
zero_init = True  # the blocks' output matrices start at zero, as in speed runs; a tie on a CPU
# the machine
device = "auto"  # auto | cuda | mps | cpu
dtype = "auto"  # auto | bfloat16 | float16 | float32: of the matrix products; weights stay float32
compile = True  # torch.compile; off where it cannot, and with offload
offload = False  # keep weights, gradients and optimiser state in host memory (host.py)
# the record
evals = 20  # evaluations over the run, evenly spread, besides the last
eval_rows = 4096  # held-out rows in each
log_every = 10  # optimiser steps per row of log.csv
checkpoint_minutes = 10.0  # between checkpoints
wandb_project = ""  # log to this project of wandb.ai too (pip install wandb); '' = nowhere
samples = "the capital of france is [MASK].|she opened the [MASK] and read the letter.|water [MASK] at 100 degrees."

if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a typo are answered at once
    if (
        os.environ.get("RANK", "0") != "0"
    ):  # of the processes that torchrun starts, the first speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    configure(globals())

import numpy as np
import torch

from model import MaskedLM, ModelConfig, make_loss
from nanocram import checkpoint, machine, parallel, record, safety
from nanocram import offload as offload_host
from nanocram.data import IGNORE, Rows, draw_masks, fill_masks, held_out, load_meta, load_tokenizer
from nanocram.model_folder import not_native, plain, save
from nanocram.muon import Muon
from nanocram.safety import Lock, beside

MAX_SKIPPED = (
    50  # unusable steps in a row that end the run; float16 needs some to find its loss scale
)

# Everything that changes over the run is a function of progress in [0, 1].


def lr_scale(progress):
    """Learning rate as a share of its peak; exactly 0 at the end, unless a trapezoid has no cooldown."""
    rise = progress / warmup if progress < warmup else 1.0
    if schedule == "triangle":  # the paper's: from a quarter up to the peak at 3/4, then down
        return min(0.25 + progress, 4 - 4 * progress)
    if schedule == "trapezoid":
        return max(0.0, min(rise, (1 - progress) / cooldown)) if cooldown else rise
    rest = max(0.0, (1 - progress) / (1 - warmup))  # from 1 at the end of the warm-up to 0
    return min(
        rise, rest if schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * min(1.0, rest))
    )


def batch_rows(progress):
    """Rows per optimiser step, a multiple of micro_batch: the paper's ramp, but not below batch_start."""
    if progress >= batch_ramp:
        return batch_size
    ramp = micro_batch * (int(batch_size * progress / (batch_ramp * micro_batch)) + 1)
    return min(batch_size, max(batch_start, ramp))


def mask_count(progress):
    """Tokens to predict in each row."""
    return max(1, round(seq_len * (mask_rate + (mask_rate_end - mask_rate) * progress)))


def build_optimizers(named):
    """[optimizer, …] of {name: parameter}; each of their groups remembers its peak learning rate as "peak_lr"."""
    matrices = {
        k for k, p in named.items() if optimizer == "muon" and ".layers." in k and p.ndim == 2
    }
    exempt = {k for k in named if "norm" in k or "bias" in k}
    groups = [
        {
            "params": [p for k, p in named.items() if k not in matrices and (k in exempt) == e],
            "weight_decay": w,
        }
        for e, w in ((False, weight_decay), (True, 0.0))
    ]
    adam = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
    fused = all(p.device.type in ("cuda", "cpu") for p in named.values())
    result = [
        adam(
            [g for g in groups if g["params"]],
            lr=lr,
            betas=(beta1, beta2),
            eps=adam_eps,
            fused=fused,
        )
    ]
    if matrices:
        result.append(Muon([named[k] for k in named if k in matrices], muon_lr, muon_weight_decay))
    for group in (g for o in result for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return result


class Run:
    """A model in training: what a checkpoint holds, and the clock."""

    def __init__(self, config, meta, dev, amp_dtype):
        torch.manual_seed(seed)
        self.meta, self.device, self.folder = meta, dev, Path(out_dir)
        self.amp_dtype, self.model = amp_dtype, MaskedLM(config)
        self.weights = (
            offload_host.offload(self.model, dev)
            if offload
            else dict(self.model.to(dev).named_parameters())
        )
        self.optimizers = build_optimizers(self.weights)
        where = next(iter(self.weights.values())).device
        self.scaler = torch.amp.GradScaler(where.type, enabled=amp_dtype == torch.float16)
        self.scaler.scale(
            torch.zeros((), device=where)
        )  # ready, even on a rank whose first step has no micro-batch
        self.loss = make_loss(self.model, dev, amp_dtype)
        self.rows = Rows(Path(data_dir) / "train.bin", meta["counts"]["rows"], seq_len, vocab_size)
        self.ahead = (-1, None)  # rows on their way to the device: (number of the first, tensor)
        self.k_max = max(mask_count(0), mask_count(1))
        self.flops_per_token = self.model.flops_per_token(seq_len, self.k_max)
        # step: optimiser steps done; row: where the next one starts reading; evals_done: evaluations of this progress
        self.state = {
            "step": 0,
            "row": 0,
            "skipped": 0,
            "skipped_in_row": 0,
            "evals_done": -1,
            "logged": -1,
            "loss_sum": 0.0,
            "loss_steps": 0,
            "last": {},
            "eval_seconds": 0.0,
            "save_seconds": 0.0,
            "step_seconds": 0.0,
            "compile_seconds": 0.0,
        }
        self.seconds = dict.fromkeys(("training", "compiling", "evaluating", "saving"), 0.0)
        self.before, self.saved_steps = (
            0.0,
            -1,
        )  # saved_steps: those applied when this process saved last
        self.start = self.saved_at = time.monotonic()
        self.stop, self.wandb = False, None

    def compile(self, batch):
        """Compile the loss for training and, on a held-out batch, for evaluation; say so where that does not work."""
        eager, self.loss = self.loss, torch.compile(self.loss, dynamic=False)
        try:
            self.loss(*self.micro_batch_at(self.state["row"], mask_count(0))).backward()
            if parallel.RANK == 0:
                self.held_out_loss([batch])
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # no compiler, no Triton, a card too old: whatever inductor raises
            reason = (str(e).strip() or repr(e)).splitlines()[0]
            print(f"torch.compile does not work here, going on without it: {reason:.150}")
            self.loss = eager
            self.model.train()  # where it was the evaluation
        self.drop_gradients()

    def drop_gradients(self):
        for p in (*self.model.parameters(), *self.weights.values()):
            p.grad = None

    def elapsed(self):
        return self.before + time.monotonic() - self.start

    def left(self):
        """Seconds until the last evaluation and save have to begin, with a reserve for them; inf without a clock."""
        reserve = (
            1.2 * (self.state["eval_seconds"] + self.state["save_seconds"])
            + self.state["step_seconds"]
        )
        return math.inf if max_steps else budget_hours * 3600 - reserve - self.elapsed()

    def progress(self):
        """Share of the run that is over, 0 to 1; compiling takes of the budget, not of the schedule."""
        if max_steps:
            return min(1.0, self.state["step"] / max_steps)
        now = self.elapsed() - self.state["compile_seconds"]
        return min(1.0, now / max(1e-9, now + self.left()))

    def fetch(self, row):
        """Rows row … row + micro_batch − 1 on the device; a GPU is still busy while the next are read and queued."""
        if self.ahead[0] != row:
            rows = self.rows.read(row, micro_batch)
            rows = rows.pin_memory() if self.device.type == "cuda" else rows
            self.ahead = (row, rows.to(self.device, non_blocking=self.device.type == "cuda"))
        return self.ahead[1]

    def micro_batch_at(self, row, n_mask):
        """(ids, positions, labels) of the micro-batch at row; its masks and dropout depend on seed and row alone."""
        torch.manual_seed(
            int(np.random.SeedSequence((seed, row)).generate_state(1)[0])
        )  # 32 bits are heeded on a CPU
        return draw_masks(
            self.fetch(row), self.k_max, n_mask, vocab_size, mask_token_share, random_token_share
        )

    def train_step(self, progress):
        """One optimiser step; False if the clock or a signal cut it short, which changes nothing."""
        start, state, cut = time.monotonic(), self.state, False
        rows, n_mask = batch_rows(progress), mask_count(progress)
        total = torch.zeros((), device=self.device)
        for row in range(state["row"], state["row"] + rows, micro_batch)[
            parallel.RANK :: parallel.WORLD
        ]:
            if cut := self.stop or (parallel.RANK == 0 and self.progress() >= 1):
                break
            loss = self.loss(*self.micro_batch_at(row, n_mask)) / (rows * n_mask)
            self.scaler.scale(loss).backward()
            total += loss.detach()
            self.fetch(row + parallel.WORLD * micro_batch)
        if parallel.agree(0.0, cut)[1]:
            self.drop_gradients()
            return False
        loss, norm = self.update(progress, total)
        state["row"] += rows
        state["last"] = {
            "lr": lr * lr_scale(progress),
            "loss": loss,
            "grad_norm": norm,
            "batch_size": rows,
            "mask_rate": n_mask / seq_len,
        }
        state["step_seconds"] = time.monotonic() - start
        self.seconds["training"] += state["step_seconds"]
        if state["skipped_in_row"] >= MAX_SKIPPED:
            where = f"up to step {state['step']}, row {state['row']}"
            sys.exit(
                f"no finite gradient in {MAX_SKIPPED} steps, {where}: lower the learning rate and resume"
            )
        return True

    def update(self, progress, total):
        """Sum gradients over the ranks, clip and apply them, or count them as skipped; (loss, their norm) as floats."""
        for weight, p in zip(self.weights.values(), self.model.parameters(), strict=True):
            if p.grad is None:  # on a rank that had no micro-batch
                p.grad = torch.zeros_like(p)
            weight.grad = plain(p.grad)  # the two are one, unless offloaded
        parallel.add_up([total, *(weight.grad for weight in self.weights.values())])
        for o in self.optimizers:
            self.scaler.unscale_(o)
            for group in o.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale(progress)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), grad_clip or math.inf)
        loss, norm = torch.stack(
            (total, norm.to(total.device))
        ).tolist()  # the one synchronisation of a step
        state, usable = self.state, math.isfinite(loss) and math.isfinite(norm)
        if usable:
            for o in self.optimizers:
                o.step()  # not scaler.step(): it asks the device for what is known by now
            state["loss_sum"] += loss
        self.scaler.update()
        self.drop_gradients()
        state["step"] += 1
        state["loss_steps"] += usable
        state["skipped"] += not usable
        state["skipped_in_row"] = 0 if usable else state["skipped_in_row"] + 1
        return loss, norm

    def log(self, **val):
        """Append a row to log.csv: the mean loss since the last one, and what the last step used."""
        state, tokens = self.state, self.state["row"] * seq_len
        if state["loss_steps"]:
            state["last"]["loss"] = state["loss_sum"] / state["loss_steps"]
        row = {
            "elapsed_s": self.elapsed(),
            "step": state["step"],
            "tokens": tokens,
            "skipped": state["skipped"],
            "flops": float(tokens * self.flops_per_token),
            **state["last"],
            **val,
        }
        record.log(self, row)
        state |= {"logged": state["step"], "loss_sum": 0.0, "loss_steps": 0}

    @torch.no_grad()
    def held_out_loss(self, batches):
        """Nats per predicted token over batches of data.held_out()."""
        self.model.eval()
        total = sum(self.loss(*(t.to(self.device) for t in batch)) for batch in batches).item()
        self.model.train()
        return total / sum((labels != IGNORE).sum().item() for _, _, labels in batches)

    def evaluate(self, sets):
        """Held-out losses, logged; how long they took becomes part of the reserve."""
        start, counts = time.monotonic(), self.meta["counts"]
        val = {f"val_loss_{rate}": self.held_out_loss(batches) for rate, batches in sets.items()}
        val["val_nats_per_char"] = (
            val["val_loss_15"] * counts["val_tokens"] / counts["val_characters"]
        )  # of the text
        self.state["eval_seconds"] = time.monotonic() - start
        self.seconds["evaluating"] += self.state["eval_seconds"]
        self.log(**val)
        return val

    def save(self, required=False):
        """Write ckpt.pt, the model folder and loss.png, each beside its goal and renamed; a full disk stops nothing."""
        start = time.monotonic()
        try:
            checkpoint.write(self, optimizer)
            save(self.model, self.folder)
            record.plot(self.folder)
            record.write_card(self.folder)
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as e:  # torch.save raises RuntimeError on a full disk
            print(
                f"WARNING: cannot save to {self.folder}, what was there before stands: {e!r:.150}"
            )
            if required:
                sys.exit(1)
        self.saved_at, self.saved_steps = (
            time.monotonic(),
            self.state["step"] - self.state["skipped"],
        )
        self.state["save_seconds"] = self.saved_at - start
        self.seconds["saving"] += self.state["save_seconds"]


def check_settings():
    """The ModelConfig of the settings; exits with one line if they cannot work."""
    require(
        globals(),
        {
            "init": ("scratch", "resume"),
            "optimizer": ("muon", "adamw", "adam"),
            "device": ("auto", "cuda", "mps", "cpu"),
            "schedule": ("trapezoid", "triangle", "cosine", "linear"),
            "dtype": ("auto", "bfloat16", "float16", "float32"),
            "seed": (0, 2**20),
            "max_steps": (0, 2**40),
            "budget_hours": (0, 1e6),
            "micro_batch": (1, 2**20),
            "batch_size": (1, 2**30),
            "batch_start": (1, 2**30),
            "batch_ramp": (0, 1),
            "seq_len": (8, max_seq_len),
            "mask_rate": (0.01, 0.9),
            "mask_rate_end": (0.01, 0.9),
            "mask_token_share": (0, 1),
            "grad_clip": (0, 1e9),
            "random_token_share": (0, round(1 - mask_token_share, 9)),
            "warmup": (0, 0.99),
            "cooldown": (0, 1),
            "lr": (0, 1e3),
            "muon_lr": (0, 1e3),
            "weight_decay": (0, 1e3),
            "muon_weight_decay": (0, 1e3),
            "beta1": (0, 0.99999),
            "beta2": (0, 0.99999),
            "adam_eps": (0, 1),
            "evals": (0, 10**6),
            "eval_rows": (1, 10**8),
            "log_every": (1, 10**9),
            "checkpoint_minutes": (0, 1e6),
        },
    )
    if not budget_hours and not max_steps:
        sys.exit("a budget of 0 trains nothing: type --budget_hours=24, or --max_steps=1000")
    for name, rows in (
        ("batch_size", batch_size),
        ("batch_start", batch_start if batch_ramp else batch_size),
    ):
        if rows % micro_batch:
            near = max(1, rows // micro_batch) * micro_batch
            sys.exit(
                f"{name}={rows} is no multiple of micro_batch={micro_batch}: type for example --{name}={near}"
            )
    if samples and any(s.count("[MASK]") != 1 for s in samples.split("|")):
        sys.exit("samples: each sentence needs one [MASK], and a | stands between two sentences")
    if offload and parallel.WORLD > 1:
        sys.exit("offload is for one process: type --offload=False, or leave torchrun out")
    if offload and optimizer == "muon":
        sys.exit(
            "offload steps on the host, where Muon's matrix products would take long: type --optimizer=adamw"
        )
    try:
        return ModelConfig(**{f.name: globals()[f.name] for f in fields(ModelConfig)})
    except ValueError as e:
        sys.exit(e)


def main():
    config = check_settings()
    parallel.join(device)
    dev, amp_dtype = machine.pick(device, dtype)
    if dev.type == "mps" and (offload or parallel.WORLD > 1):
        sys.exit("offload and several processes work on cuda and cpu: type --device=cpu")
    meta = load_meta(data_dir, vocab_size=vocab_size, seq_len=seq_len)
    tokenizer = load_tokenizer(data_dir, meta)
    if any(len(tokenizer.encode(s)) + 2 > max_seq_len for s in samples.split("|")):
        sys.exit(
            f"samples: a sentence has more than {max_seq_len} tokens: type shorter ones with --samples"
        )
    val = Rows(Path(data_dir) / "val.bin", meta["counts"]["val_rows"], seq_len, vocab_size)
    if offload:
        k_max = max(mask_count(0), mask_count(1))
        print(
            offload_host.plan(config, dev, amp_dtype, batch_size, micro_batch, seq_len, k_max),
            flush=True,
        )
    run, peak = Run(config, meta, dev, amp_dtype), machine.matmul_rate(dev, amp_dtype)
    if parallel.RANK == 0:
        run.lock = Lock(beside(out_dir))  # until the process ends
    if init == "resume":
        checkpoint.restore(run, optimizer)
        if run.progress() >= 1:
            sys.exit(
                "this run has used up its budget: type a larger --budget_hours (or --max_steps) to go on"
            )
    if parallel.RANK == 0:
        parameters = sum(w.numel() for w in run.weights.values())
        facts = {
            "parameters": parameters,
            "flops_per_token": run.flops_per_token,
            "matmul_flops": peak,
            "amp_dtype": str(amp_dtype),
            "data": meta["sha256"]["train.bin"],
            "processes": parallel.WORLD,
            "corpus": {key: meta["settings"][key] for key in ("source", "normalisation")}
            | meta["counts"],
            **machine.describe(dev),
        }
        record.begin(
            run, data_dir, {k: globals()[k] for k in settings(__file__)}, facts, init == "resume"
        )
        print(
            f"{parameters / 1e6:.1f}M parameters, {run.flops_per_token / 1e6:.0f} MFLOP per token; {dev.type} "
            f"multiplies matrices of {amp_dtype} at {peak / 1e12:.2f} TFLOP/s",
            flush=True,
        )
        if (first := batch_rows(0) // micro_batch) % parallel.WORLD:
            print(f"{parallel.WORLD} ranks, {first} micro-batches: some idle, lower --micro_batch")
        if why := not_native(config):
            print(
                f"with {why} this is no ModernBERT: folder.load() reads the model folder, transformers does not"
            )

    safety.stop_at_signals(lambda: setattr(run, "stop", True))
    sets = held_out(val.read(0, min(val.count, eval_rows)), micro_batch)
    try:
        train(run, sets, tokenizer, peak * parallel.WORLD)
    except (
        SystemExit,
        OSError,
    ):  # rows that have changed, ranks that are gone, losses that stay infinite
        if parallel.RANK == 0 and not run.state["skipped_in_row"]:
            run.save()  # what was learnt until then; but a checkpoint of the time before the losses is the better one
        raise
    parallel.leave()


def train(run, sets, tokenizer, peak):
    """The loop, until the clock, the steps or a signal end it."""
    from tqdm import tqdm

    run.start = run.saved_at = time.monotonic()
    if compile and not offload:  # fully_shard's hooks would break the graph at every block
        run.compile(sets[15][0])
        run.seconds["compiling"] = time.monotonic() - run.start
        run.state["compile_seconds"] += run.seconds["compiling"]
    state, first_row, planned = run.state, run.state["row"], False
    state["evals_done"] = min(
        state["evals_done"], int(run.progress() * evals)
    )  # a larger budget takes progress back
    bar = tqdm(
        total=1.0,
        disable=parallel.RANK > 0 or None,
        bar_format="{percentage:3.0f}%|{bar}|{postfix}",
    )
    while True:
        if parallel.RANK == 0 and not run.stop and run.progress() < 1:
            keep_record(run, sets, tokenizer, bar)
        progress, stop = parallel.agree(run.progress(), run.stop)
        if stop or progress >= 1:
            run.stop = stop
            break
        if not run.train_step(progress):
            continue  # the clock or a signal came between
        speed = (state["row"] - first_row) * seq_len / run.seconds["training"]
        mfu, bar.n, done = (
            speed * run.flops_per_token / peak,
            progress,
            (run.elapsed() - state["compile_seconds"]) / 60,
        )
        bar.set_postfix_str(
            f"loss {state['last']['loss']:.3f}  {speed:,.0f} tokens/s  MFU {mfu:.0%}  lr "
            f"{state['last']['lr']:.1e}  {done / max(progress, 1e-9) - done:.0f} min left"
        )
        if not planned and not max_steps and run.seconds["training"] > 10:
            bar.write(plan(run, speed, progress))
            planned = True
    bar.close()
    if parallel.RANK > 0:
        return
    if run.stop and run.progress() < 1:
        run.save(required=True)
        print(
            f"stopped at step {state['step']:,}, after {run.elapsed() / 60:.1f} minutes: --init=resume goes on"
        )
    else:
        report(run, run.evaluate(sets), tokenizer, peak, first_row)


def keep_record(run, sets, tokenizer, bar):
    """Evaluate, log and save, each if it is due and leaves the reserve as it is."""
    state, progress = run.state, run.progress()
    if int(progress * evals) > state["evals_done"] and state["eval_seconds"] < run.left():
        state["evals_done"] = int(progress * evals)
        val = run.evaluate(sets)
        losses = f"{val['val_loss_15']:.3f} (15 %) {val['val_loss_25']:.3f} (25 %)"
        bar.write(f"{run.elapsed() / 60:7.1f} min  step {state['step']:6,}  held-out loss {losses}")
        sentences = samples.split("|") if samples else []
        for sentence in sentences[state["evals_done"] % max(1, len(sentences)) :][:1]:
            words = " | ".join(
                word for word, _ in fill_masks(run.model, tokenizer, sentence, run.device)
            )
            bar.write(f"{'':13}{sentence}  {words}")
    elif state["step"] % log_every == 0 and state["step"] > state["logged"]:
        run.log()
    due = checkpoint_minutes and time.monotonic() - run.saved_at > checkpoint_minutes * 60
    # at once: a folder that cannot be written shows now; then with the optimisers' states, which may double a save
    if (due or run.saved_steps < min(1, state["step"] - state["skipped"])) and state[
        "save_seconds"
    ] < run.left():
        run.save()


def plan(run, speed, progress):
    """What the rest of the budget holds at a speed in tokens/s, in one line."""
    tokens = speed * (budget_hours * 3600 - run.elapsed())
    per_row = [
        1 / batch_rows(progress + (1 - progress) * i / 100) for i in range(100)
    ]  # steps, along the batch ramp
    steps, epochs = tokens / seq_len * sum(per_row) / 100, tokens / seq_len / run.rows.count
    return f"{speed:,.0f} tokens/s: the rest holds {steps:,.0f} steps, {tokens / 1e6:,.1f}M tokens, {epochs:.2f} epochs"


def report(run, val, tokenizer, peak, first_row):
    """Say what came out, save everything, then say where the time went and what the model has learnt."""
    state, seconds = run.state, run.seconds
    print(
        f"held-out loss {val['val_loss_15']:.4f} at 15 % masked, {val['val_loss_25']:.4f} at 25 %; "
        f"{val['val_nats_per_char']:.4f} nats per character"
    )
    run.save(required=True)
    seconds["before the resume"] = run.before
    seconds["other"] = run.elapsed() - sum(seconds.values())
    speed = (state["row"] - first_row) * seq_len / max(1e-9, seconds["training"])
    print(
        f"{state['step']:,} steps, {state['skipped']} of them skipped; {state['row'] * seq_len:,} tokens, "
        f"{state['row'] / run.rows.count:.2f} epochs; {speed:,.0f} tokens/s, "
        f"MFU {speed * run.flops_per_token / peak:.0%}"
    )
    print(
        f"{run.elapsed():.0f} s: "
        + ", ".join(f"{name} {s:.0f}" for name, s in seconds.items() if s)
    )
    for sentence in samples.split("|") if samples else []:
        top = ", ".join(
            f"{word} {p:.0%}" for word, p in fill_masks(run.model, tokenizer, sentence, run.device)
        )
        print(f"  {sentence}  {top}")
    picture = (
        "loss.png"
        if (run.folder / "loss.png").exists()
        else "no loss.png (pip install matplotlib draws one)"
    )
    print(
        f"{run.folder}: model.safetensors and config.json (the model), log.csv, run.json, ckpt.pt, {picture}"
    )


def less_memory():
    """What to type where it does not suffice."""
    fits = next(
        (n for n in range(micro_batch // 2, 0, -1) if batch_size % n == batch_start % n == 0), 0
    )
    advice = (
        [f"--micro_batch={fits} (now {micro_batch}; the batch stays at {batch_size} rows)"]
        if fits
        else []
    )
    if not offload and parallel.WORLD == 1 and device != "mps":
        advice.append("--offload=True" + " --optimizer=adamw" * (optimizer == "muon"))
    return ", or ".join([*advice, "a smaller model"])


if __name__ == "__main__":
    safety.run(
        main,
        out_dir,
        "--init=resume goes on from the last checkpoint, if there is one",
        less_memory,
    )
