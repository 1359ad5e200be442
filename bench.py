"""How fast training is here, how close that is to the machine's limit, and against what a user would pick instead.

    python bench.py                                                     # train.py's defaults
    python bench.py config/tiny.py --profile=True                       # with a trace, and the dearest operators
    python bench.py config/crammed.py --micro_batch=16 --compare=True   # beside transformers' models

Every setting of train.py is one here too. Where data_dir is not prepared, rows of random tokens do: they take as long.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from configurator import assignments, configure, settings

compare = False            # also measure transformers' ModernBERT of equal shape, BERT-base and config/crammed.py
profile = False            # also print the operators that take most of the time, and write a trace of three steps
trace = "out/trace.json"   # for chrome://tracing or ui.perfetto.dev
bench_steps = 20           # optimiser steps to measure, after the warm-up

if __name__ == "__main__":  # before the heavy imports, so that --help and a typo are answered at once
    configure(globals(), also="train.py")

import numpy as np
import torch

import machine
import train
from data import IGNORE, load_meta
from model import MaskedLM, ModelConfig, folder_config

CARDS = (8, 12, 16, 24, 32, 48, 80, 141)  # memory of a card in GB
REFERENCE = "config/crammed.py"  # which of our own recipes is in every comparison
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # what is not as in BERT-base: no dropout
ROUNDS = 5  # of a comparison: the systems take turns, so that what else the machine does hits all of them


def timed(dev, work, *args):
    """(seconds until the device had done work(*args), what that returned)."""
    wait = (lambda: None) if dev.type == "cpu" else getattr(torch, dev.type).synchronize
    wait()
    start = time.perf_counter()
    result = work(*args)
    wait()
    return time.perf_counter() - start, result


def spread(values, form=",.0f"):
    """Median and the range of the middle 80 %, in words."""
    low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def new_run(config, folder):
    """A Run of train.py as it is set; folder takes rows of random tokens where no data is prepared."""
    if (Path(train.data_dir) / "meta.json").exists():
        meta = load_meta(train.data_dir, vocab_size=train.vocab_size, seq_len=train.seq_len)
    else:
        print(f"data         {train.data_dir} is not prepared: rows of random tokens")
        tokens = np.random.default_rng(0).integers(4, train.vocab_size, (4096, train.seq_len), dtype=np.uint16)
        tokens.tofile(Path(folder) / "train.bin")
        train.data_dir, meta = folder, {"counts": {"rows": len(tokens)}}
    return train.Run(config, meta, *machine.pick(train.device, train.dtype))


def steps_of(rows):
    """From here on a step takes so many rows."""
    train.batch_size, train.batch_ramp = rows, 0.0


def kept_bytes(run, rows):
    """Bytes that the forward pass of so many rows keeps for the backward pass; each storage once, no parameters."""
    own, kept = {p.untyped_storage().data_ptr() for p in run.model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.loss(*(x[:rows] for x in run.micro_batch_at(0, train.mask_count(0))))
    del loss  # not before: until here no storage can have been freed, and its address used again
    return sum(kept.values())


def state_bytes(run):
    """Bytes a parameter takes: its weight, its gradient, and what the optimiser remembers of it."""
    parameters = list(run.model.parameters())
    states = (state for o in run.optimizers for state in o.state.values())
    remembered = sum(t.nbytes for state in states for t in state.values() if torch.is_tensor(t))
    return (2 * sum(p.nbytes for p in parameters) + remembered) / sum(p.numel() for p in parameters)


def measure(run):
    """Print how fast a run is, where its time goes and what memory it takes; seconds of a micro-batch, of an update."""
    dev, micro, n_mask = run.device, train.micro_batch, train.mask_count(0)
    rows, whole = (max(1, micro // 2), micro), train.batch_size
    kept = [kept_bytes(run, n) for n in rows]
    compiling, _ = timed(dev, run.compile, run.micro_batch_at(0, n_mask)) if train.compile else (0.0, None)
    steps_of(micro)
    first, *some = (timed(dev, run.train_step, 0.0)[0] for _ in range(3))
    print(f"first step   {compiling + first:.1f} s, {compiling:.1f} s of it compilation")

    steps_of(micro * max(1, min(whole // micro, int(2 / min(some)))))  # of about 2 s, or less
    peak = machine.matmul_rate(dev, run.amp_dtype)
    with machine.power_meter(dev) as watts:
        times = [timed(dev, run.train_step, 0.0)[0] for _ in range(bench_steps)]
    peak = max(peak, machine.matmul_rate(dev, run.amp_dtype))
    speeds = [train.batch_size * train.seq_len / t for t in times]
    rate = statistics.median(speeds) * run.flops_per_token
    print(f"tokens/s     {spread(speeds)}: median and middle 80 % of {bench_steps} steps of {train.batch_size} rows")
    print(f"MFU          {rate / peak:.1%} of the {peak / 1e12:.3g} TFLOP/s of a large matrix product, measured here")
    if sheet := machine.datasheet_rate(dev):
        print(f"             {rate / sheet:.1%} of the datasheet's {sheet / 1e12:.0f} TFLOP/s")

    parts, before = {"data": [], "forward": [], "backward": [], "update": []}, 0
    for i in range(1, bench_steps + 1):
        seconds, batch = timed(dev, run.micro_batch_at, run.state["row"] + i * micro, n_mask)
        parts["data"].append(seconds)
        if dev.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds, loss = timed(dev, run.loss, *batch)
        parts["forward"].append(seconds)
        parts["backward"].append(timed(dev, (loss / (micro * n_mask)).backward)[0])
        most = machine.peak_bytes(dev)
        parts["update"].append(timed(dev, run.update, 0.0, loss.detach())[0])
    words = ", ".join(f"{part} {spread([1e3 * s for s in ss], '.3g')}" for part, ss in parts.items())
    print(f"time in ms   {words}; the update once a step, the others every {micro} rows")

    count, state = sum(p.numel() for p in run.model.parameters()), state_bytes(run)
    per_row = (kept[1] - kept[0]) / max(1, rows[1] - rows[0])
    print(f"memory       {state:.1f} bytes a parameter; {per_row / 1e6:.2f} MB a row kept for backward, before "
          f"compiling; peak {most / 1e9:.2f} GB")  # fmt: skip
    if dev.type == "cuda":
        per_row = (most - before - 4 * count) / micro  # the gradients are part of that peak
        fits = {gb: int((0.9e9 * gb - state * count) / per_row) for gb in CARDS}
        largest = ", ".join(f"{gb} GB {2 ** (n.bit_length() - 1)}" for gb, n in fits.items() if n > 0)
        print(f"             {per_row / 1e6:.2f} MB a row at the peak; largest micro_batch on a card of {largest}")
    if watts:
        watts = statistics.mean(watts)
        print(f"power        {watts:.0f} W: {watts * train.budget_hours / 1e3:.2f} kWh in {train.budget_hours:g} hours")
    update = statistics.median(parts["update"])
    return (statistics.median(times) - update) / (train.batch_size // micro), update


def plan(ramp, micro_seconds, update_seconds):
    """(steps, tokens) that budget_hours hold; ramp: rows of a step at evenly spread moments of the run."""
    share = train.budget_hours * 3600 / len(ramp)
    steps = [share / (rows / train.micro_batch * micro_seconds + update_seconds) for rows in ramp]
    return sum(steps), sum(n * rows * train.seq_len for n, rows in zip(steps, ramp, strict=True))


def dearest(run):
    """Print the ten operators that three steps spend most of their time in, and write the trace."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            run.train_step(0.0)
    Path(trace).parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(trace)
    own = "self_cpu_time_total" if run.device.type == "cpu" else "self_device_time_total"  # in microseconds
    events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, own))
    total = sum(getattr(e, own) for e in events)
    for e in events[:10]:
        ms = getattr(e, own) / 3e3
        print(f"{ms * 3e3 / total:6.1%} {ms:10.2f} ms and {e.count / 3:6.0f} calls a step  {e.key:.70}")
    print(f"the trace is in {trace}")


@dataclass
class System:
    """One side of a comparison. loss takes ids, positions, their labels, and the labels of all tokens."""

    name: str
    model: torch.nn.Module
    loss: Callable
    mode: str = "eager"

    def __post_init__(self):  # the same for all: the optimiser is not what is compared
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, batch):
        self.loss(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def systems(dev, amp_dtype):
    """The sides of a comparison, ours first."""

    def ours(name, config):
        model = MaskedLM(config).to(dev)
        loss = train.make_loss(model, dev, amp_dtype)
        return System(name, model, lambda ids, positions, labels, every: loss(ids, positions, labels) / labels.numel())

    def theirs(name, model):
        def loss(ids, positions, labels, every):
            with torch.autocast(dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
                return model(input_ids=ids, labels=every).loss

        return System(name, model.to(dev).train(), loss)

    sizes = ("vocab_size", "max_seq_len", "n_layer", "n_head", "n_embd", "n_inner")
    native = ModelConfig(**{name: getattr(train, name) for name in sizes})
    yield ours("nanocram, the same", native)
    try:
        from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM
    except ImportError:
        print("\ntransformers is not installed: its rows are left out")
    else:
        shape = {k: v for k, v in folder_config(native).items() if k not in ("nanocram", "architectures", "model_type")}
        for head, sparse in (("dense", False), ("sparse", True)):
            config = ModernBertConfig(**shape, sparse_prediction=sparse)
            yield theirs(f"transformers ModernBERT, {head} head", ModernBertForMaskedLM(config))
        yield theirs("transformers BERT-base", BertForMaskedLM(BertConfig(vocab_size=train.vocab_size, **BERT)))
    recipe = settings(train.__file__) | assignments(Path(__file__).parent / REFERENCE)
    values = {name: value for name, (value, _) in recipe.items()}
    values |= {"vocab_size": train.vocab_size, "max_seq_len": train.max_seq_len}  # the rows are the same for all
    yield ours(f"nanocram {REFERENCE}", ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig)}))


def warmed_up(system, batch, dev):
    """The system after its first steps, compiled where that is faster."""
    plain = system.loss
    system.step(batch)
    eager, _ = timed(dev, system.step, batch)
    if train.compile:
        system.loss = torch.compile(plain)
        with contextlib.suppress(Exception):  # whatever inductor raises
            for _ in range(2):
                system.step(batch)
            if timed(dev, system.step, batch)[0] < eager:
                system.mode = "compiled"
    if system.mode == "eager":
        system.loss = plain
    return system


def side_by_side(run):
    """Print a table of tokens/s: steps of one micro-batch, the same rows and masks for all, in turns."""
    ids, positions, labels = run.micro_batch_at(0, run.k_max)
    batch = (ids, positions, labels, torch.full_like(ids, IGNORE).scatter(1, positions, labels))
    sides = [warmed_up(s, batch, run.device) for s in systems(run.device, run.amp_dtype)]
    speeds = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, values in zip(sides, speeds, strict=True):
            enough = time.perf_counter() + 2.0  # s: one of them may be many times larger than the others
            for _ in range(max(1, bench_steps // ROUNDS)):
                values.append(ids.numel() / timed(run.device, side.step, batch)[0])
                if time.perf_counter() > enough:
                    break
    medians = [statistics.median(values) for values in speeds]
    print(f"\n| forward, backward and fused AdamW, {len(ids)} rows | parameters | | tokens/s | nanocram is faster by |")
    print("| --- | ---: | --- | ---: | ---: |")
    for side, values, median in zip(sides, speeds, medians, strict=True):
        million = sum(p.numel() for p in side.model.parameters()) / 1e6
        print(f"| {side.name} | {million:.1f}M | {side.mode} | {spread(values)} | {medians[0] / median:.2f} |")


def main():
    vars(train).update({name: value for name, value in globals().items() if name in settings(train.__file__)})
    config = train.check_settings()
    train.max_steps = train.max_steps or 2**40  # the steps of a bench do not heed the clock
    ramp = [train.batch_rows(i / 1000) for i in range(1000)]
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(config, folder)
        facts, count = machine.describe(run.device), sum(p.numel() for p in run.model.parameters())
        print(f"machine      {facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {run.amp_dtype}")
        print(f"model        {count:,} parameters, {run.flops_per_token / 1e6:,.1f} MFLOP a token")
        steps, tokens = plan(ramp, *measure(run))
        epochs = f", {tokens / train.seq_len / run.rows.count:.2f} epochs" if train.data_dir != folder else ""
        print(f"{f'{train.budget_hours:g} hours':12} {steps:,.0f} steps, {tokens / 1e6:,.1f}M tokens{epochs}")
        if profile:
            dearest(run)
        if compare:
            side_by_side(run)


if __name__ == "__main__":
    main()
