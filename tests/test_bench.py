import gc
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import SMALL_MODEL, saved_for_backward, script
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.multiprocessing.reductions import StorageWeakRef

import bench
from model import MaskedLM, ModelConfig, make_loss
from nanocram import machine
from nanocram.model_folder import to_folder_keys

CPU = torch.device("cpu")
SMALL_BERT = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
CANDIDATES = [
    "nanocram, a ModernBERT",
    "transformers ModernBERT, dense head",
    "transformers ModernBERT, sparse head",
    "transformers BERT-base",
]


@pytest.fixture
def small(train, monkeypatch):
    """The train module with the settings of a small run, behind a small bench.py."""
    monkeypatch.setattr(bench, "bench_steps", 4)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "BERT", SMALL_BERT)
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)  # seconds of work
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
        for name, value in {"micro_batch": 8, "seq_len": 100, "budget_hours": hours}.items():
            patch.setattr(bench.train, name, value)
        steps, tokens = bench.steps_in_budget([8 * n for n in ramp], micro, update)
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


@pytest.mark.parametrize("rows", [4, 6])
def test_bytes_kept_for_the_backward_pass_by_hand(rows):
    """exp keeps its output, a product its input (and the weight, which does not count)."""
    model = torch.nn.Linear(10, 7, bias=False)
    x = torch.randn(rows, 10)
    kept = saved_for_backward(lambda: model(x).exp().sum(), model.parameters())
    assert kept == rows * 10 * 4 + rows * 7 * 4


def test_counting_bytes_frees_them_again():
    """exp keeps its own output: a hook that returned it as it is would make a cycle."""
    model = torch.nn.Linear(4, 4)
    seen = []

    def forward():
        y = model(torch.randn(3, 4)).exp()
        seen.append(StorageWeakRef(y.untyped_storage()))
        return y.sum()

    gc.disable()
    try:
        saved_for_backward(forward, ())
        assert seen[0].expired()
    finally:
        gc.enable()


def bytes_of_a_row(vocab_size):
    """What a row with 20 predicted tokens keeps for the backward pass."""
    config = ModelConfig(vocab_size=vocab_size, n_layer=1, n_head=2, n_embd=32, n_inner=48)
    model = MaskedLM(config)
    loss_fn = make_loss(model, CPU, torch.float32)

    def kept(n_rows):
        ids = torch.zeros(n_rows, 128, dtype=torch.long)
        positions = torch.ones(n_rows, 20, dtype=torch.long)
        return saved_for_backward(lambda: loss_fn(ids, positions, positions), model.parameters())

    return (kept(8) - kept(4)) / 4


def test_logits_of_other_positions_do_not_exist():
    """What a row keeps grows with the vocabulary by its predicted positions alone."""
    assert bytes_of_a_row(1200) - bytes_of_a_row(600) == 20 * 600 * 4


def test_a_row_keeps_at_least_the_input_of_each_block(small):
    run = bench.new_run()

    def kept(n_rows):
        batch = [x[:n_rows].clone() for x in small.batch_at(run, 0, small.mask_count(0))]
        return saved_for_backward(lambda: run.loss_fn(*batch), run.weights.values())

    assert (kept(8) - kept(4)) / 4 > 4 * small.n_layer * small.seq_len * small.n_embd


def test_accumulation_takes_no_memory(small):
    """Between micro-batches there is one gradient a parameter, and it stays where it is."""
    run = bench.new_run()
    places = set()
    for row in range(0, 32, 8):
        run.loss_fn(*small.batch_at(run, row, 20)).backward()
        places.add(tuple(p.grad.data_ptr() for p in run.model.parameters()))
    assert len(places) == 1


def test_random_tokens_are_as_uneven_as_words(small):
    """Counts of tokens by rank beside 1 / (rank + 2.7), by a chi-square test; none is special."""
    torch.manual_seed(0)
    rows = bench.RandomRows().read(0, 2000)
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
        return (next(seconds) if work is bench.train_step else 1.0), None

    monkeypatch.setattr(machine, "timed", timed)
    run = bench.new_run()
    speeds = [16 * small.seq_len / s for s in (2.0, 3.0, 4.0, 5.0)]
    step_seconds, n_micro = bench.measure_speed(run)
    assert (step_seconds, n_micro) == (3.5, 2) and not list(seconds)
    median, mfu = np.median(speeds), np.median(speeds) * run.flops_per_token / 1e12
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith(f"tokens/s     {median:,.0f} (")
    assert printed[-1].startswith(f"MFU          {mfu:.1%} of 1 TFLOP/s")
    assert printed[-1].endswith("at 16 rows a step (batch_size=16)")


def test_a_step_learns_and_moves_on_whatever_the_clock_says(small, monkeypatch):
    monkeypatch.setattr(small, "budget_hours", 1e-9)
    run = bench.new_run()
    before = [weight.detach().clone() for weight in run.weights.values()]
    bench.train_step(run, n_micro=2)
    assert (run.state.step, run.state.row) == (1, 2 * small.micro_batch)
    after = run.weights.values()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=30))
def test_spread_is_numpys(values):
    low, mid, high = np.percentile(values, [10, 50, 90])
    words = bench.median_and_range(values, ".6e").replace("(", "").replace(")", "").split()
    assert [float(words[i]) for i in (0, 1, 3)] == pytest.approx([mid, low, high], rel=1e-5)


def test_all_candidates_compute_the_same_loss(small):
    """With our weights, transformers' dense and sparse heads end at our loss."""
    run = bench.new_run()
    ids, positions, labels = small.batch_at(run, 0, small.padded_mask_counts()[-1])
    batch = (ids, positions, labels, torch.full_like(ids, -100).scatter(1, positions, labels))
    ours, *theirs = list(bench.rivals(CPU, torch.float32))[:3]
    assert [c.name for c in (ours, *theirs)] == CANDIDATES[:3]
    torch.nn.init.normal_(ours.model.model.layers[-1].mlp.Wo.weight)  # zero until here
    weights = to_folder_keys(ours.model.state_dict(), ours.model.config)
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
        monkeypatch.setattr(small, "budget_hours", 1.0)
        monkeypatch.setattr(small, "max_steps", 3)  # fewer than it takes
        monkeypatch.setattr(bench, "trace", str(tmp_path / "a" / "trace.json"))
        for name, value in own.items():
            monkeypatch.setattr(bench, name, value)
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
    for row, speed in zip(rows[:3], speeds, strict=False):
        assert float(row[4]) == pytest.approx(speeds[0] / speed, rel=0.01, abs=0.006)
    assert rows[-1][4] == "of another size"
    assert all(row[2] in ("eager", "compiled") for row in rows)


def test_the_whole_report(report, tmp_path):
    text = report(compare=True, profile=True)
    labels = ("machine      cpu: ", "first step   ", "time in ms   data", "memory       ")
    for words in (*labels, "GB at the peak", "epochs", "# of Calls"):
        assert words in text
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


def test_the_table_of_host_offload(report, small, monkeypatch):
    monkeypatch.setattr(small, "offload", True)
    monkeypatch.setattr(small, "optimizer", "adamw")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    text = report(compare=True)
    assert "deepspeed is not installed: its row is left out" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["nanocram, streamed", "torch, fully_shard"]
    assert rows[0][1] == rows[1][1] and float(rows[1][4]) > 0


def test_rivals_in_host_memory_learn_the_same(small, monkeypatch):
    """Two steps of ours and of fully_shard, from the same weights, end at the same loss."""
    monkeypatch.setattr(small, "offload", True)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    losses, rivals = [], bench.rivals(CPU, torch.float32)
    batch = (torch.arange(128)[None], torch.arange(1, 21)[None], torch.arange(20)[None])
    for _ in range(2):
        torch.manual_seed(0)
        rival = next(rivals)
        for _ in range(2):
            rival.step(batch)
        losses.append(rival.loss_fn(*batch).item())
    bench.parallel.leave()
    assert losses[0] == losses[1]


@pytest.fixture
def quick_compile(monkeypatch, small):
    """torch.compile without inductor."""
    compile_ = torch.compile

    def quick(f, **options):
        return compile_(f, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", quick)
    monkeypatch.setattr(small, "compile", True)


def test_the_report_of_a_compiled_model(report, quick_compile):
    assert number(r"first step .* s, ([\d.]+) s of it", report()) > 0


@pytest.mark.slow
def test_the_comparison_of_compiled_models(report, quick_compile):
    lines = [line for line in report(compare=True).splitlines() if line.startswith("| ")]
    check_table(lines[2:])


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
    assert capsys.readouterr().out == "\nmine, compiled, does not run: no compiler\n"


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
    assert capsys.readouterr().out == "\nmine, eager, does not run: out of memory\n"


def test_as_a_command_without_data(tmp_path):
    """Flags of train.py and its own all reach it; it leaves nothing in the folder it runs in."""
    flags = SMALL_MODEL | {"data_dir": "nowhere", "bench_steps": 3}
    done = script("bench.py", cwd=tmp_path, **(flags | {"dtype": "auto"}))
    assert done.returncode == 0, done.stdout
    assert "nowhere is not prepared: rows of random tokens" in done.stdout
    assert "epochs" not in done.stdout
    sizes = {k: SMALL_MODEL[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")}
    parameters = sum(p.numel() for p in MaskedLM(ModelConfig(**sizes)).parameters())
    assert f"{parameters:,} parameters" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_said_first(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(bench, "profile", True)
    monkeypatch.setattr(bench, "trace", str(tmp_path / "file" / "trace.json"))
    monkeypatch.setattr(small, "Run", None)
    with pytest.raises(FileExistsError):  # safety.run() makes one line of it
        bench.main()


def test_a_typo_is_one_line(tmp_path):
    done = script("bench.py", cwd=tmp_path, n_layers=3)
    assert done.returncode == 1
    words = "command line: bench.py has no setting n_layers; did you mean n_layer?"
    assert done.stdout.strip() == words


def test_an_offloaded_model_with_muon_is_refused(small, monkeypatch):
    monkeypatch.setattr(small, "offload", True)
    with pytest.raises(SystemExit, match="optimizer=adamw"):
        bench.new_run()


def test_this_process_has_used_memory():
    assert machine.peak_bytes(CPU) > 50e6


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 0),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("Tesla V100-PCIE-16GB", 0),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 0),
        ("NVIDIA RTX A1000", 0),
        ("NVIDIA L40", 0),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA GeForce RTX 3090 Ti", 0),
        ("NVIDIA GeForce RTX 2080 Ti", 54),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA RTX A6000", 155),
        ("Tesla T4", 65),
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
