"""How fast training is here, how close that is to the machine's limit, and beside whose models.

    python bench.py                                                    # train.py's defaults
    python bench.py config/tiny.py --profile=True                      # the dearest operators too
    python bench.py config/crammed.py --micro_batch=16 --compare=True  # beside transformers' models
    python bench.py config/offload.py --n_layer=8                      # streamed from host memory

Every setting of train.py is one here too. Where data_dir is not prepared, random tokens do.
A figure is a median, with the range of the middle 80 % behind it.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from nanocram.configurator import configure, require

# fmt: off
compare = False            # also measure the models of transformers, at the same sizes
profile = False            # also print the dearest operators, and write a trace of three steps
trace = "out/trace.json"   # for chrome://tracing or ui.perfetto.dev
bench_steps = 20           # optimiser steps to measure, after the warm-up
# fmt: on

import torch

import train
from model import MaskedLM, make_loss, mixed_precision

SETTINGS = configure(globals(), also=train)

from nanocram import fit, machine, safety
from nanocram.data import IGNORE, Rows, load_meta
from nanocram.model_folder import NATIVE, modernbert_shape
from nanocram.tokenizer import SPECIAL

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISCARDED = 3  # of the measured steps, the first: clocks and caches have yet to find their level
ROUNDS = 5  # of a comparison: rivals take turns, so that other work on the machine hits all
# The progress to measure at. At 0 the learning rate is 0: what zero_init made 0 would stay 0, and
# products of zeros are fast.
MIDDLE = 0.5


class RandomRows(Rows):
    """Rows of random tokens.

    By Zipf's law with Mandelbrot's offset. Sums into few rows of the embeddings' gradient wait for
    each other on a GPU; tokens drawn evenly would hide that. Of 190 MB of text in 4,096 entries the
    ten commonest are 20.4 %, by this law 19.8 %."""

    def read(self, start, n):
        ranks = 1 + torch.arange(self.vocab_size - len(SPECIAL))
        frequencies = 1 / (ranks + 2.7)
        drawn = torch.multinomial(frequencies, n * self.seq_len, replacement=True)
        return len(SPECIAL) + drawn.view(n, self.seq_len)


def new_run():
    """A train.Run on rows of data_dir, or random ones."""
    config = train.check_settings()
    dev, amp_dtype = machine.pick(train.device, train.dtype)
    train.check_device(dev)
    folder = Path(train.data_dir)
    shape = train.seq_len, train.vocab_size, dev
    if (folder / "meta.json").exists():
        meta = load_meta(folder, vocab_size=train.vocab_size, seq_len=train.seq_len)
        rows = Rows(folder / "train.bin", meta["counts"]["rows"], *shape)
    else:
        print(f"data         {folder} is not prepared: rows of random tokens")
        meta = {}
        rows = RandomRows("", 1, *shape)
    return train.build(config, meta, rows, dev, amp_dtype)


def median_and_range(values, form=",.0f"):
    """Median and the range of the middle 80 %, in words."""
    low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def step_of(run, micro_batches):
    """One optimiser step of so many micro-batches, at a moment when all rates are above 0."""
    vars(train).update(batch_ramp=0.0, batch_size=micro_batches * run.state.micro_batch)
    train.train_step(run, MIDDLE)


def measure_speed(run, flops_per_token):
    """Print the first step, tokens/s and MFU; returns (seconds of a step, its micro-batches)."""
    dev = run.device
    full_batch = train.batch_size
    held_out_rows = run.rows.read(0, train.micro_batch)

    def rehearse():
        train.rehearse(run, held_out_rows)

    signals = safety.Signals()  # nobody asks it
    setup_seconds, _ = machine.timed(dev, fit.compile_and_fit, run, rehearse, False, signals)
    first, *others = [machine.timed(dev, step_of, run, 1)[0] for _ in range(4)]
    first += setup_seconds
    print(f"first step   {first:.1f} s, {setup_seconds:.1f} s of it to compile and fit in memory")

    # Steps of about 2 s, or less, between two measurements of the yardstick.
    n_micro = max(1, min(full_batch // run.state.micro_batch, int(2 / min(others))))
    n_rows = n_micro * run.state.micro_batch
    limit = machine.matmul_rate(dev, run.amp_dtype)
    n_steps = DISCARDED + bench_steps
    seconds = [machine.timed(dev, step_of, run, n_micro)[0] for _ in range(n_steps)]
    seconds = seconds[DISCARDED:]
    limit = max(limit, machine.matmul_rate(dev, run.amp_dtype))

    speeds = [n_rows * train.seq_len / s for s in seconds]
    flops = statistics.median(speeds) * flops_per_token
    print(f"tokens/s     {median_and_range(speeds)}: {bench_steps} steps of {n_rows} rows")
    # The fewer rows a step has, the larger is the update's share, which counts as no FLOPs.
    batch = f"at {n_rows} rows a step (a full batch has {full_batch})"
    yardstick = f"{limit / 1e12:.3g} TFLOP/s, a large product's here"
    print(f"MFU          {flops / limit:.1%} of {yardstick}, {batch}")
    promised = machine.datasheet_rate(machine.describe(dev)["device"])
    if promised and run.amp_dtype != torch.float32:
        print(
            f"             {flops / promised:.1%} of the datasheet's {promised / 1e12:.0f} TFLOP/s"
        )
    return statistics.median(seconds), n_micro


def measure_parts(run):
    """Print where the time of a step of one micro-batch goes, each part waited for.

    Returns the seconds of an update: what a whole step takes beyond the other parts."""
    ms = {"data": [], "forward": [], "backward": [], "update": []}

    def timed(part, work, *args):
        seconds, result = machine.timed(run.device, work, *args)
        ms[part].append(1e3 * seconds)
        return result

    n_predict = train.mask_count(MIDDLE)
    for i in range(1, bench_steps + 1):
        row = run.state.row + (i + 1) * run.state.micro_batch
        batch = timed("data", train.batch_at, run, row, n_predict)
        loss = timed("forward", run.loss_fn, *batch)
        timed("backward", run.scaler.scale(loss).backward)
        run.model.zero_grad()
        timed("update", step_of, run, 1)
        others = sum(ms[part][-1] for part in ("data", "forward", "backward"))
        ms["update"][-1] = max(0.0, ms["update"][-1] - others)
    parts = ", ".join(f"{part} {median_and_range(values, '.3g')}" for part, values in ms.items())
    print(f"time in ms   {parts}; all but the update every {run.state.micro_batch} rows")
    return statistics.median(ms["update"]) / 1e3


def measure_memory(run):
    """Print the peak of memory; on a GPU also what a row takes and which micro_batch fits."""
    print(f"memory       {machine.peak_bytes(run.device) / 1e9:.2f} GB at the peak")
    if run.device.type != "cuda":
        return
    # The second micro-batch of a step counts: gradients are there by then. The weights in low
    # precision are in its peak though they do not grow with the rows, so that more may fit.
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.loss_fn(*train.batch_at(run, 0, train.mask_count(0))).backward()
    per_row = (torch.cuda.max_memory_allocated() - before) / run.state.micro_batch
    run.model.zero_grad()
    card = torch.cuda.get_device_properties(run.device).total_memory
    fits = max(1, int((0.9 * card - before) / per_row))
    room = f"micro_batch={2 ** (fits.bit_length() - 1)} fits in {card / 1e9:.0f} GB"
    print(f"             {per_row / 1e6:.2f} MB a row at the peak of a micro-batch: {room}")


def steps_in_budget(ramp, micro_batch, micro_seconds, update_seconds):
    """(steps, tokens) that the budget holds; ramp: rows of a step at evenly spread moments."""
    share = train.budget_hours * 3600 / len(ramp)
    row_seconds = micro_seconds / micro_batch
    steps = [share / (n_rows * row_seconds + update_seconds) for n_rows in ramp]
    rows = sum(count * n_rows for count, n_rows in zip(steps, ramp, strict=True))
    return sum(steps), rows * train.seq_len


def print_dearest(run):
    """Print the ten operators that three steps spend most of their time in; write the trace."""
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step_of(run, 1)
    profiler.export_chrome_trace(trace)
    events = profiler.key_averages()
    order = "self_cpu_time_total"
    if run.device.type == "cuda":
        # The kernels: the operators that started them carry the same time once more.
        on_gpu = torch.autograd.DeviceType.CUDA
        kernels = [e for e in events if e.device_type == on_gpu and not e.is_user_annotation]
        if kernels:
            events = type(events)(kernels)
            order = "self_device_time_total"
        else:  # containers and shared machines often deny CUPTI, which counts them
            print("no kernel was seen, profiling may be denied here: the host's times follow")
    print(events.table(sort_by=order, row_limit=10, max_name_column_width=50))
    print(f"the trace is in {trace}")


class Rival:
    """A model of a comparison; loss_fn takes ids, positions, their labels, labels of all tokens."""

    def __init__(self, name, model, loss_fn):
        self.name = name
        self.loss_fn = loss_fn
        self.mode = "eager"
        self.model = model.train()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.speeds = []  # tokens/s

    def step(self, batch):
        self.loss_fn(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rivals(dev, amp_dtype):
    """The models of a comparison: a ModernBERT of ours with the sizes that are set, first."""
    import transformers as hf

    # Theirs always compute a head.
    native = replace(train.model_config(), **NATIVE, head_transform=True, n_narrow=0)
    model = MaskedLM(native).to(dev)
    yield Rival("nanocram, a ModernBERT", model, make_mean_loss(model, dev, amp_dtype))

    def theirs(name, model):
        def loss_fn(ids, positions, labels, all_labels):
            with mixed_precision(dev, amp_dtype):
                return model(input_ids=ids, labels=all_labels).loss

        return Rival(f"transformers {name}", model.to(dev), loss_fn)

    for head in ("dense", "sparse"):
        shape = modernbert_shape(native) | {"sparse_prediction": head == "sparse"}
        model = hf.ModernBertForMaskedLM(hf.ModernBertConfig.from_dict(shape))
        yield theirs(f"ModernBERT, {head} head", model)
    # BERT's MLP has two matrices where GeGLU has three: half as wide again, it is as large.
    shape = {"hidden_size": native.n_embd, "intermediate_size": 3 * native.n_inner // 2}
    shape |= {"num_hidden_layers": native.n_layer, "num_attention_heads": native.n_head}
    bert = hf.BertConfig(vocab_size=native.vocab_size, **shape, **NO_DROPOUT)
    yield theirs("BERT", hf.BertForMaskedLM(bert))


def make_mean_loss(model, dev, amp_dtype):
    """The loss of a Rival from a MaskedLM, or what wraps it."""
    summed = make_loss(model, dev, amp_dtype)
    return lambda ids, positions, labels, *_: summed(ids, positions, labels) / labels.numel()


def warm_up(rival, batch, dev):
    """Take its first steps, eager and compiled, and keep the faster; whether it runs at all."""
    loss_fns = {"eager": rival.loss_fn}
    if train.compile:
        loss_fns["compiled"] = torch.compile(rival.loss_fn)
    seconds = {}
    for mode, loss_fn in loss_fns.items():
        rival.loss_fn = loss_fn
        print(f"first steps  {rival.name}, {mode}", flush=True)  # compiling takes minutes
        try:
            times = [machine.timed(dev, rival.step, batch)[0] for _ in range(4)]
            seconds[mode] = statistics.median(times[1:])  # not the first: it compiles
        except Exception as error:  # out of memory, or whatever inductor raises
            print(f"             does not run: {safety.first_line(error, 100)}")
    if seconds:
        rival.mode = min(seconds, key=seconds.get)
        rival.loss_fn = loss_fns[rival.mode]
    return bool(seconds)


def compare_models(batch, dev, amp_dtype):
    """Print a table of tokens/s: steps of one micro-batch, the same rows and masks for all."""
    ids, positions, labels = batch[:3]  # (B, T), (B, K), (B, K)
    all_labels = torch.full_like(ids, IGNORE).scatter(1, positions, labels)  # (B, T)
    batch = (ids, positions, labels, all_labels)
    running = [c for c in rivals(dev, amp_dtype) if warm_up(c, batch, dev)]
    if not running:
        sys.exit("no model runs: type a smaller --micro_batch")
    for _ in range(ROUNDS):
        for rival in running:
            end = time.perf_counter() + 2.0  # s: one may be many times larger than the others
            for _ in range(max(1, bench_steps // ROUNDS)):
                if time.perf_counter() < end:
                    seconds, _ = machine.timed(dev, rival.step, batch)
                    rival.speeds.append(ids.numel() / seconds)

    work = f"forward, backward and fused AdamW, {len(ids)} rows"
    print(f"\n| {work} | parameters | | tokens/s | first is faster by |")
    print("| --- | ---: | --- | ---: | ---: |")
    first = running[0]
    for c in running:
        faster = statistics.median(first.speeds) / statistics.median(c.speeds)
        size = f"{c.parameters / 1e6:.1f}M"
        print(f"| {c.name} | {size} | {c.mode} | {median_and_range(c.speeds)} | {faster:.2f} |")


def main():
    require(globals(), {"bench_steps": (2, 10**6)})
    if profile:
        Path(trace).absolute().parent.mkdir(parents=True, exist_ok=True)
    run = new_run()
    facts = machine.describe(run.device)
    versions = f"{facts['threads']} threads, torch {facts['torch']}, {run.amp_dtype}"
    print(f"machine      {facts['device']}, {versions}")
    n_parameters = sum(weight.numel() for weight in run.model.parameters())
    mean_positions = statistics.mean(run.padded_counts)
    flops_per_token = run.model.flops_per_token(train.seq_len, mean_positions)
    mflop = flops_per_token / 1e6
    print(f"model        {n_parameters:,} parameters, {mflop:,.2f} MFLOP a token")

    ramp = [train.batch_rows(i / 1000) for i in range(1000)]
    step_seconds, n_micro = measure_speed(run, flops_per_token)
    update_seconds = measure_parts(run)
    measure_memory(run)
    micro_seconds = (step_seconds - update_seconds) / n_micro
    steps, tokens = steps_in_budget(ramp, run.state.micro_batch, micro_seconds, update_seconds)
    holds = f"{train.budget_hours:g} hours: {steps:,.0f} steps, {tokens / 1e6:,.1f}M tokens"
    if run.meta:
        holds += f", {tokens / train.seq_len / run.rows.count:.2f} epochs"
    print(f"the budget   {holds}, if nothing were compiled, evaluated or saved")
    if run.state.skipped:
        print(f"WARNING: {run.state.skipped} steps had no finite gradient: lower the learning rate")
    if profile:
        print_dearest(run)
    if compare:
        batch = train.batch_at(run, 0, run.padded_counts[-1])
        dev, amp_dtype = run.device, run.amp_dtype
        del run  # and its memory
        compare_models(batch, dev, amp_dtype)


if __name__ == "__main__":
    safety.run(main, "bench.py", "nothing was kept", lambda: "a smaller --micro_batch")
