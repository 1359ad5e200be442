import functools
import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_MODEL, model_config, put, saved_for_backward, script
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import bench
import train
from model import Block, MaskedLM, ModelConfig, make_loss
from nanocram import machine
from nanocram.configurator import configure
from nanocram.model_folder import to_folder_keys

CPU = torch.device("cpu")
CANDIDATES = [
    "nanocram, a ModernBERT",
    "transformers ModernBERT, dense head",
    "transformers ModernBERT, sparse head",
    "transformers BERT",
]


@pytest.fixture
def small(train, monkeypatch):
    """The train module with the settings of a small run, behind a small bench.py."""
    put(monkeypatch, bench, bench_steps=4, ROUNDS=2)
    put(monkeypatch, train, batch_ramp=0.6)  # bench.step_of() changes it
    return train


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.floats(0.5, 5),
    st.floats(0, 5),
    st.floats(0.01, 0.5),
)
def test_the_budget_holds_what_a_clock_would_count(ramp, micro, update, hours):
    """Step after step on a simulated clock, each as long as the ramp says at its start."""
    with pytest.MonkeyPatch.context() as patch:
        put(patch, bench.train, seq_len=100, budget_hours=hours)
        steps, tokens = bench.steps_in_budget([8 * n for n in ramp], 8, micro, update)
    elapsed = count = seen = 0
    while elapsed < 3600 * hours:
        n = ramp[int(elapsed / (3600 * hours) * len(ramp))]
        elapsed += n * micro + update
        count += 1
        seen += 8 * n * 100
    # One step may reach into the next stretch of the ramp.
    longest = max(ramp) * micro + update
    shortest = min(ramp) * micro + update
    assert abs(steps - count) <= len(ramp) * (1 + longest / shortest)
    assert abs(tokens - seen) <= len(ramp) * 2 * longest * 800 / micro


def bytes_of_a_row(vocab_size):
    """What a row with 20 predicted tokens keeps for the backward pass."""
    sizes = {"vocab_size": vocab_size, "n_layer": 1, "n_head": 2, "n_embd": 32, "n_inner": 48}
    model = MaskedLM(model_config(**sizes))
    loss_fn = make_loss(model, CPU, torch.float32)

    def kept(n_rows):
        ids = torch.zeros(n_rows, 128, dtype=torch.long)
        positions = torch.ones(n_rows, 20, dtype=torch.long)
        return saved_for_backward(lambda: loss_fn(ids, positions, positions), model.parameters())

    return (kept(8) - kept(4)) / 4


def test_logits_of_other_positions_do_not_exist():
    """What a row keeps grows with the vocabulary by its predicted positions alone."""
    assert bytes_of_a_row(1200) - bytes_of_a_row(600) == 20 * 600 * 4


def test_random_tokens_are_as_uneven_as_words(small):
    """Counts of tokens by rank beside 1 / (rank + 2.7), by a chi-square test; none is special."""
    torch.manual_seed(0)
    rows = bench.RandomRows("", 1, small.seq_len, small.vocab_size).read(0, 2000)
    assert rows.shape == (2000, small.seq_len) and rows.dtype == torch.int64
    n_special, n_tokens = 4, small.vocab_size - 4
    law = 1 / (np.arange(1, n_tokens + 1) + 2.7)
    seen = np.bincount(rows.flatten().numpy(), minlength=small.vocab_size)
    assert len(seen) == small.vocab_size and not seen[:n_special].any()
    seen = seen[n_special:]
    assert stats.chisquare(seen, seen.sum() * law / law.sum()).pvalue > 1e-3
    assert stats.chisquare(seen).pvalue < 1e-9  # an even draw would not pass for it


def test_the_first_measured_steps_are_discarded(small, monkeypatch, capsys):
    """Three slow ones, then steps of 2, 3, 4 and 5 s: the median of these, and MFU at it."""
    seconds = iter([1.0, 1.0, 1.0, 1.0, 90.0, 80.0, 70.0, 2.0, 3.0, 4.0, 5.0])  # after the warm-up

    def timed(dev, work, *args):
        return (next(seconds) if work is bench.step_of else 1.0), None

    monkeypatch.setattr(machine, "timed", timed)
    speeds = [16 * small.seq_len / s for s in (2.0, 3.0, 4.0, 5.0)]
    step_seconds, n_micro = bench.measure_speed(bench.new_run(), flops_per_token=1e7)
    assert (step_seconds, n_micro) == (3.5, 2) and not list(seconds)
    printed = capsys.readouterr().out
    assert number(r"tokens/s +([\d,]+)", printed) == pytest.approx(np.median(speeds), abs=0.5)
    mfu = np.median(speeds) * 1e7 / 1e12
    assert number(r"MFU +([\d.]+)%", printed) / 100 == pytest.approx(mfu, abs=1e-3)


def test_a_step_has_the_rows_that_are_asked_for_and_learns(small):
    run = bench.new_run()
    before = [weight.detach().clone() for weight in run.model.parameters()]
    bench.step_of(run, 2)
    bench.step_of(run, 3)
    assert (run.state.step, run.state.row) == (2, 5 * small.micro_batch)
    after = run.model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=30))
def test_spread_is_numpys(values):
    low, mid, high = np.percentile(values, [10, 50, 90])
    words = bench.median_and_range(values, ".6e").replace("(", "").replace(")", "").split()
    assert [float(words[i]) for i in (0, 1, 3)] == pytest.approx([mid, low, high], rel=1e-5)


def test_all_candidates_compute_the_same_loss(small):
    """With our weights, transformers' dense and sparse heads end at our loss."""
    run = bench.new_run()
    ids, positions, labels = small.batch_at(run, 0, small.padded_counts()[-1])
    batch = (ids, positions, labels, torch.full_like(ids, -100).scatter(1, positions, labels))
    ours, *theirs = list(bench.rivals(CPU, torch.float32))[:3]
    torch.nn.init.normal_(ours.model.model.layers[-1].mlp.Wo.weight)  # zero until here
    weights = to_folder_keys(ours.model.state_dict(), ours.model.config, True)
    for candidate in theirs:
        keys = candidate.model.load_state_dict(weights, strict=False)
        assert keys.missing_keys == ["decoder.weight"]
        assert not keys.unexpected_keys
        expected = ours.loss_fn(*batch).item()
        assert candidate.loss_fn(*batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def report(small, monkeypatch, capsys, tmp_path):
    """A function that runs all of bench.py with these settings of its own; what it printed."""

    def report(**own):
        put(monkeypatch, small, budget_hours=1.0, max_steps=3)  # fewer than it takes
        put(monkeypatch, bench, trace=str(tmp_path / "a" / "trace.json"), **own)
        bench.main()
        printed = capsys.readouterr().out
        assert "does not" not in printed and "WARNING" not in printed
        return printed

    return report


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


def check_table(lines):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == CANDIDATES
    speeds = [float(row[3].split()[0].replace(",", "")) for row in rows]
    for row, speed in zip(rows, speeds, strict=True):
        assert float(row[4]) == pytest.approx(speeds[0] / speed, rel=0.01, abs=0.006)
    assert all(row[2] in ("eager", "compiled") for row in rows)


def test_the_whole_report(report, tmp_path):
    text = report(compare=True, profile=True)
    assert "epochs" in text and "# of Calls" in text
    assert number(r"memory +([\d.]+) GB", text) > 0.05
    assert json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]

    # MFU follows from the speed.
    flops = number(r"tokens/s +([\d,]+)", text) * number(r"([\d.,]+) MFLOP a token", text) * 1e6
    mfu = number(r"MFU +([\d.]+)%", text) / 100
    assert mfu == pytest.approx(flops / 1e12, rel=0.05, abs=1e-3)

    # The budget holds what its parts say; the ramp goes from 1 to 2 micro-batches.
    ms = {part: number(rf"{part} ([\d.]+)", text) for part in ("forward", "backward", "update")}
    steps = number(r"1 hours: ([\d,]+) steps", text)
    step_ms = 1.5 * (ms["forward"] + ms["backward"]) + ms["update"]
    assert 0.3 < steps * step_ms / 3600e3 < 3
    check_table([line for line in text.splitlines() if line.startswith("| ")][2:])


def test_the_report_of_a_compiled_model(report, small, monkeypatch):
    """By torch.compile without inductor."""
    quick = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", quick)
    put(monkeypatch, small, compile=True)
    assert number(r"first step .* s, ([\d.]+) s of it", report()) > 0


@pytest.fixture
def candidate():
    model = torch.nn.Linear(3, 1)
    return bench.Rival("mine", model, lambda x: model(x).sum())


BATCH = [torch.ones(2, 3)]


def test_what_does_not_compile_runs_eager(candidate, small, monkeypatch, capsys):
    def broken(*batch):  # torch compiles a function when it is first called
        raise RuntimeError("no compiler\nlong trace")

    monkeypatch.setattr(small, "compile", True)
    monkeypatch.setattr(torch, "compile", lambda f: broken)
    assert bench.warm_up(candidate, BATCH, CPU)
    assert candidate.mode == "eager"
    assert capsys.readouterr().out.count("no compiler") == 1


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_faster_mode_is_taken(candidate, small, monkeypatch, mode):
    fast = candidate.loss_fn

    def slow(x):
        bench.time.sleep(0.02)
        return fast(x)

    candidate.loss_fn, compiled = (fast, slow) if mode == "eager" else (slow, fast)
    monkeypatch.setattr(small, "compile", True)
    monkeypatch.setattr(torch, "compile", lambda f: compiled)
    assert bench.warm_up(candidate, BATCH, CPU)
    assert (candidate.mode, candidate.loss_fn) == (mode, fast)


def test_what_does_not_run_is_left_out(candidate, small, capsys):
    def full(*batch):
        raise torch.OutOfMemoryError("out of memory")

    candidate.loss_fn = full
    assert not bench.warm_up(candidate, BATCH, CPU)
    assert "out of memory" in capsys.readouterr().out


def test_as_a_command_without_data(tmp_path):
    """Flags of train.py and its own all reach it; it leaves nothing in the folder it runs in."""
    flags = SMALL_MODEL | {"data_dir": "nowhere", "bench_steps": 3, "dtype": "auto"}
    done = script("bench.py", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stdout
    assert "random tokens" in done.stdout and "epochs" not in done.stdout
    sizes = {k: SMALL_MODEL[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")}
    parameters = sum(p.numel() for p in MaskedLM(model_config(**sizes)).parameters())
    assert f"{parameters:,} parameters" in done.stdout
    assert not list(tmp_path.iterdir())


def test_slips_are_said_first(small, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="n_layers"):
        configure(vars(bench), ["--n_layers=3"], also=small)
    (tmp_path / "file").write_text("no folder")
    put(monkeypatch, bench, profile=True, trace=str(tmp_path / "file" / "trace.json"), new_run=None)
    with pytest.raises(FileExistsError):  # safety.run() makes one line of it
        bench.main()


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 0),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("Tesla V100-PCIE-16GB", 0),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA GeForce RTX 3090 Ti", 0),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA RTX A6000", 155),
        ("cpu: x86_64", 0),
    ],
)
def test_the_datasheets_card_is_that_very_card(name, tera):
    """Names as torch.cuda.get_device_name() gives them; an unknown variant is another card."""
    assert machine.datasheet_rate(name) == tera * 1e12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.slow
def test_freed_memory_is_used_again():
    """In a process of its own: 20 tensors of 64 MB, after 20 for the heap to find its shape."""
    program = """
import resource, sys, torch
from nanocram import machine
if sys.argv[1] == "keep": machine.keep_freed_memory()
for _ in range(20): torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): torch.ones(2**24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * resource.getpagesize() / 2**26)
"""
    folder = bench.Path(bench.__file__).parent
    faults = {}
    for how in ("keep", "plain"):
        command = [sys.executable, "-c", program, how]
        faults[how] = float(subprocess.run(command, cwd=folder, capture_output=True).stdout)
    assert faults["keep"] < 2 and faults["plain"] > 15


def test_rates_count_what_products_and_sums_do(monkeypatch):
    """Every measurement takes 0.3 s by this clock, so a rate is an amount over that."""
    rates = runpy.run_path(str(ROOT / "results/rates.py"))
    monkeypatch.setattr(machine, "timed", lambda device, work: (0.3, work()))
    settings = {field.name: train.SETTINGS[field.name] for field in fields(ModelConfig)}
    block = Block(ModelConfig(**settings), first=False)  # of train.py's default
    per_row = 2 * sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert rates["product_rate"](CPU, torch.float32, 8) == pytest.approx(8 * per_row / 0.3)
    assert rates["memory_rate"](CPU, 4096) == pytest.approx(3 * 4096 / 0.3)
