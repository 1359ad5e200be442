"""How fast training is here, how close that is to the machine's limit, and against what a user would pick instead.

    python bench.py                                                     # train.py's defaults
    python bench.py config/tiny.py --profile=True                       # with a trace, and the dearest operators
    python bench.py config/crammed.py --micro_batch=16 --compare=True   # beside transformers' models

Every setting of train.py is one here too. Where data_dir is not prepared, rows of random tokens do: they take as long.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from nanocram.configurator import assignments, configure, require, settings

compare = (
    False  # also measure transformers' ModernBERT of equal shape, BERT-base and config/crammed.py
)
profile = (
    False  # also print the operators that take most of the time, and write a trace of three steps
)
trace = "out/trace.json"  # for chrome://tracing or ui.perfetto.dev
bench_steps = 20  # optimiser steps to measure, after the warm-up

TRAIN = {}  # the settings of train.py
if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a typo are answered at once
    TRAIN = configure(globals(), also="train.py")

import numpy as np
import torch

import train
from model import MaskedLM, ModelConfig, make_loss
from nanocram import machine, safety
from nanocram import offload as offload_host
from nanocram.data import IGNORE, load_meta
from nanocram.model_folder import folder_config

REFERENCE = "config/crammed.py"  # which of our own recipes is in every comparison
BERT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # what is not as in BERT-base: no dropout
ROUNDS = 5  # of a comparison: the systems take turns, so that what else the machine does hits all of them


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
        tokens = np.random.default_rng(0).integers(
            4, train.vocab_size, (4096, train.seq_len), dtype=np.uint16
        )
        tokens.tofile(Path(folder) / "train.bin")
        train.data_dir, meta = folder, {"counts": {"rows": len(tokens)}}
    return train.Run(config, meta, *machine.pick(train.device, train.dtype))


def step(run, n_micro=1):
    """A step amid the schedule: where the learning rate is 0, weights may stay 0 too, and zeros multiply fast."""
    train.batch_size, train.batch_ramp = n_micro * train.micro_batch, 0.0
    run.train_step(0.5)


def kept_bytes(run, rows):
    """Bytes that the forward pass of so many rows keeps for the backward pass."""
    batch = [x[:rows].clone() for x in run.micro_batch_at(0, train.mask_count(0))]
    return machine.kept_bytes(lambda: run.loss(*batch), run.weights.values())


def state_bytes(run):
    """Bytes a parameter takes: its weight, its gradient, and what the optimiser remembers of it."""
    parameters = run.weights.values()
    states = (t for o in run.optimizers for state in o.state.values() for t in state.values())
    remembered = sum(t.nbytes for t in states if torch.is_tensor(t))
    return (2 * sum(p.nbytes for p in parameters) + remembered) / sum(p.numel() for p in parameters)


def speed(run):
    """Print the time of the first step, tokens/s and MFU; (seconds of a step, its micro-batches)."""
    dev, most, compiling = run.device, train.batch_size // train.micro_batch, 0.0
    if train.compile and not train.offload:
        compiling, _ = machine.timed(dev, run.compile, run.micro_batch_at(0, train.mask_count(0)))
    first, *some = (machine.timed(dev, step, run)[0] for _ in range(4))
    print(f"first step   {compiling + first:.1f} s, {compiling:.1f} s of it compilation")
    n_micro = max(1, min(most, int(2 / min(some))))  # steps of about 2 s, or less
    peak = machine.matmul_rate(dev, run.amp_dtype)
    with machine.power_meter(dev) as watts:
        times = [machine.timed(dev, step, run, n_micro)[0] for _ in range(bench_steps)]
    peak = max(peak, machine.matmul_rate(dev, run.amp_dtype))
    speeds = [train.batch_size * train.seq_len / t for t in times]
    rate = statistics.median(speeds) * run.flops_per_token
    print(
        f"tokens/s     {spread(speeds)}: median and middle 80 % of {bench_steps} steps of {train.batch_size} rows"
    )
    print(
        f"MFU          {rate / peak:.1%} of the {peak / 1e12:.3g} TFLOP/s of a large matrix product, measured here"
    )
    if sheet := machine.datasheet_rate(machine.describe(dev)["device"]) * (
        run.amp_dtype != torch.float32
    ):
        print(f"             {rate / sheet:.1%} of the datasheet's {sheet / 1e12:.0f} TFLOP/s")
    if watts and (power := statistics.mean(watts)):
        print(
            f"power        {power:.0f} W: {power * train.budget_hours / 1e3:.2f} kWh in {train.budget_hours:g} hours"
        )
    return statistics.median(times), n_micro


def parts(run):
    """Print where the time goes, with the device waited for after each part; the seconds of an update."""
    dev, micro, n_mask = run.device, train.micro_batch, train.mask_count(0.5)
    seconds = {"data": [], "forward": [], "backward": [], "update": []}
    for i in range(1, bench_steps + 1):
        t, batch = machine.timed(dev, run.micro_batch_at, run.state["row"] + i * micro, n_mask)
        seconds["data"].append(t)
        t, loss = machine.timed(dev, run.loss, *batch)
        seconds["forward"].append(t)
        seconds["backward"].append(machine.timed(dev, (loss / (micro * n_mask)).backward)[0])
        seconds["update"].append(machine.timed(dev, run.update, 0.5, loss.detach())[0])
    words = ", ".join(
        f"{part} {spread([1e3 * t for t in ts], '.3g')}" for part, ts in seconds.items()
    )
    print(f"time in ms   {words}; the update once a step, the others every {micro} rows")
    return statistics.median(seconds["update"])


def memory(run, kept):
    """Print bytes a parameter and a row, kept from before compiling; on a GPU also what fits on which card."""
    dev, micro, state = run.device, train.micro_batch, state_bytes(run)
    print(
        f"memory       {state:.1f} bytes a parameter; {kept / 1e6:.2f} MB a row kept for the backward pass, before "
        f"compiling; peak {machine.peak_bytes(dev) / 1e9:.2f} GB"
    )
    if dev.type != "cuda":
        return
    for _ in range(2):  # the second micro-batch of a step: gradients are there by then
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.loss(*run.micro_batch_at(0, train.mask_count(0))).backward()
    per_row = (
        torch.cuda.max_memory_allocated() - before
    ) / micro  # weights in bf16, part of it, do not grow with rows
    run.drop_gradients()
    rest = 0 if train.offload else state * sum(w.numel() for w in run.weights.values())
    fits = {gb: int((0.9e9 * gb - rest) / per_row) for gb in (8, 12, 16, 24, 32, 48, 80, 141)}
    largest = ", ".join(f"{gb} GB {2 ** (n.bit_length() - 1)}" for gb, n in fits.items() if n > 0)
    print(
        f"             {per_row / 1e6:.2f} MB a row at the peak of a micro-batch; micro_batch on a card of {largest}"
    )


def plan(ramp, micro_seconds, update_seconds):
    """(steps, tokens) that the budget holds; ramp: rows of a step at evenly spread moments of the run."""
    share = train.budget_hours * 3600 / len(ramp)
    steps = [share / (rows / train.micro_batch * micro_seconds + update_seconds) for rows in ramp]
    return sum(steps), sum(n * rows * train.seq_len for n, rows in zip(steps, ramp, strict=True))


def dearest(run):
    """Print the ten operators that three steps spend most of their time in, and write the trace."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step(run)
    profiler.export_chrome_trace(trace)
    events, own = profiler.key_averages(), "self_cpu_time_total"  # in microseconds
    if (
        run.device.type == "cuda"
    ):  # the kernels; the operators that started them carry the same time once more
        own = "self_device_time_total"
        events = [
            e
            for e in events
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
        ]
    total = sum(getattr(e, own) for e in events)
    for e in sorted(events, key=lambda e: -getattr(e, own))[:10]:
        ms = getattr(e, own) / 3e3
        print(
            f"{ms * 3e3 / total:6.1%} {ms:10.2f} ms and {e.count / 3:6.0f} calls a step  {e.key:.70}"
        )
    print(f"the trace is in {trace}")


@dataclass
class System:
    """One side of a comparison; loss takes ids, positions, their labels, and the labels of all tokens."""

    name: str
    model: torch.nn.Module
    loss: Callable
    mode: str = "eager"

    def __post_init__(self):
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, batch):
        self.loss(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def systems(dev, amp_dtype):
    """The sides of a comparison, ours first."""

    def ours(name, config):
        model = MaskedLM(config).to(dev)
        loss = make_loss(model, dev, amp_dtype)
        return System(
            name,
            model,
            lambda ids, positions, labels, every: loss(ids, positions, labels) / labels.numel(),
        )

    def theirs(name, model):
        def loss(ids, positions, labels, every):
            with torch.autocast(dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
                return model(input_ids=ids, labels=every).loss

        return System(name, model.to(dev).train(), loss)

    sizes = ("vocab_size", "max_seq_len", "n_layer", "n_head", "n_embd", "n_inner")
    native = ModelConfig(**{name: getattr(train, name) for name in sizes})
    yield ours("nanocram, a ModernBERT", native)
    try:
        from transformers import (
            BertConfig,
            BertForMaskedLM,
            ModernBertConfig,
            ModernBertForMaskedLM,
        )
    except ImportError:
        print("\ntransformers is not installed: its rows are left out")
    else:
        shape = {
            k: v
            for k, v in folder_config(native).items()
            if k not in ("nanocram", "architectures", "model_type")
        }
        for head, sparse in (("dense", False), ("sparse", True)):
            config = ModernBertConfig(**shape, sparse_prediction=sparse)
            yield theirs(f"transformers ModernBERT, {head} head", ModernBertForMaskedLM(config))
        yield theirs(
            "transformers BERT-base",
            BertForMaskedLM(BertConfig(vocab_size=train.vocab_size, **BERT)),
        )
    recipe = settings(train.__file__) | assignments(Path(__file__).parent / REFERENCE)
    values = {name: value for name, (value, _) in recipe.items()}
    values |= {
        "vocab_size": train.vocab_size,
        "max_seq_len": train.max_seq_len,
    }  # the rows are the same for all
    yield ours(
        f"nanocram {REFERENCE}",
        ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig)}),
    )


def warmed_up(system, batch, dev):
    """The system after its first steps, compiled where that is faster; None if it does not run."""

    def typical():
        system.step(batch)
        return statistics.median(machine.timed(dev, system.step, batch)[0] for _ in range(3))

    plain = system.loss
    try:
        eager = typical()
        if train.compile:
            system.mode = "compiled"
            system.loss = torch.compile(plain)
            if typical() > eager:
                system.loss, system.mode = plain, "eager"
    except Exception as e:  # out of memory, or whatever inductor raises
        print(
            f"\n{system.name}, {system.mode}, does not run: {(str(e).strip() or repr(e)).splitlines()[0]:.100}"
        )
        if system.mode == "eager":
            return None
        system.loss, system.mode = plain, "eager"
    return system


def side_by_side(batch, dev, amp_dtype):
    """Print a table of tokens/s: steps of one micro-batch, the same rows and masks for all, in turns."""
    ids, positions, labels = batch
    batch = (ids, positions, labels, torch.full_like(ids, IGNORE).scatter(1, positions, labels))
    sides = [s for s in (warmed_up(s, batch, dev) for s in systems(dev, amp_dtype)) if s]
    speeds = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, values in zip(sides, speeds, strict=True):
            enough = (
                time.perf_counter() + 2.0
            )  # s: one of them may be many times larger than the others
            for _ in range(max(1, bench_steps // ROUNDS)):
                if time.perf_counter() < enough:
                    values.append(ids.numel() / machine.timed(dev, side.step, batch)[0])
    print(
        f"\n| forward, backward and fused AdamW, {len(ids)} rows | parameters | | tokens/s | first is faster by |"
    )
    print("| --- | ---: | --- | ---: | ---: |")
    first, size = statistics.median(speeds[0]), sides[0].parameters
    for side, values in zip(sides, speeds, strict=True):
        ratio = (
            f"{first / statistics.median(values):.2f}"
            if 0.8 < side.parameters / size < 1.25
            else "of another size"
        )
        print(
            f"| {side.name} | {side.parameters / 1e6:.1f}M | {side.mode} | {spread(values)} | {ratio} |"
        )


def main():
    vars(train).update(TRAIN)
    require(globals(), {"bench_steps": (2, 10**6)})
    if profile:
        if Path(trace).exists() and b'"traceEvents"' not in Path(trace).read_bytes():
            sys.exit(f"{trace} exists and is no trace: choose another --trace")
        Path(trace).absolute().parent.mkdir(parents=True, exist_ok=True)
    config, ramp = train.check_settings(), [train.batch_rows(i / 1000) for i in range(1000)]
    train.max_steps = 2**40  # a step is not cut short by the clock
    if train.offload:
        sizes = (
            train.batch_size,
            train.micro_batch,
            train.seq_len,
            max(train.mask_count(0), train.mask_count(1)),
        )
        print(offload_host.plan(config, *machine.pick(train.device, train.dtype), *sizes))
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(config, folder)
        dev, amp_dtype, facts = run.device, run.amp_dtype, machine.describe(run.device)
        count = sum(w.numel() for w in run.weights.values())
        print(
            f"machine      {facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {amp_dtype}"
        )
        print(f"model        {count:,} parameters, {run.flops_per_token / 1e6:,.1f} MFLOP a token")
        some = min(8, train.micro_batch // 2)
        kept = (
            (kept_bytes(run, 2 * some) - kept_bytes(run, some)) / some
            if some
            else kept_bytes(run, 1)
        )
        (seconds, n_micro), update = speed(run), parts(run)
        memory(run, kept)
        steps, tokens = plan(ramp, (seconds - update) / n_micro, update)
        epochs = (
            f", {tokens / train.seq_len / run.rows.count:.2f} epochs"
            if train.data_dir != folder
            else ""
        )
        print(
            f"the budget   {train.budget_hours:g} hours: {steps:,.0f} steps, {tokens / 1e6:,.1f}M tokens{epochs}, "
            "if nothing were compiled, evaluated or saved"
        )
        if run.state["skipped"]:
            print(
                f"WARNING: {run.state['skipped']} steps had no finite gradient: lower the learning rate"
            )
        if profile:
            dearest(run)
        batch = run.micro_batch_at(0, run.k_max)
        del run
        if compare:
            side_by_side(batch, dev, amp_dtype)


if __name__ == "__main__":
    safety.run(
        main,
        "bench.py",
        "nothing was kept",
        lambda: f"a smaller --micro_batch (now {train.micro_batch})",
    )
