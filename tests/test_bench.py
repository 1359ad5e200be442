import gc
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL_MODEL, script
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import new_run
from torch.multiprocessing.reductions import StorageWeakRef

import bench
from model import MaskedLM, ModelConfig, make_loss
from nanocram import machine
from nanocram.model_folder import to_folder_keys


@pytest.fixture
def small_bench(train, monkeypatch):
    """bench.py in front of the train module with the settings of a small run."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    for name, value in {
        "bench_steps": 4,
        "REFERENCE": "config/tiny.py",
        "ROUNDS": 2,
        "BERT": sizes,
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)  # seconds of work
    for name in ("batch_size", "batch_ramp", "max_steps", "data_dir"):  # bench sets them
        monkeypatch.setattr(train, name, getattr(train, name))
    return train


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.floats(0.5, 5),
    st.floats(0, 5),
    st.floats(0.01, 0.5),
)
def test_the_plan_is_what_a_clock_would_count(ramp, micro, update, hours):
    """Step after step on a simulated clock, each as long as the ramp says at its start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"micro_batch": 8, "seq_len": 100, "budget_hours": hours}.items():
            patch.setattr(bench.train, name, value)
        steps, tokens = bench.plan([8 * n for n in ramp], micro, update)
    elapsed = count = seen = 0
    while elapsed < 3600 * hours:
        n = ramp[int(elapsed / (3600 * hours) * len(ramp))]
        elapsed, count, seen = elapsed + n * micro + update, count + 1, seen + 8 * n * 100
    longest, shortest = (
        n * micro + update for n in (max(ramp), min(ramp))
    )  # one may reach into the next stretch
    assert abs(steps - count) <= len(ramp) * (1 + longest / shortest)
    assert abs(tokens - seen) <= len(ramp) * 2 * longest * 800 / micro


def test_bytes_kept_for_the_backward_pass_by_hand():
    """exp keeps its output, a product its input (and the weight, which is a parameter and does not count)."""
    model = torch.nn.Linear(10, 7, bias=False)
    x = torch.randn(6, 10)
    weights = dict(model.named_parameters())
    run = SimpleNamespace(
        weights=weights, loss=lambda x: model(x).exp().sum(), micro_batch_at=lambda row, n: (x,)
    )
    assert bench.kept_bytes(run, 4) == 4 * 10 * 4 + 4 * 7 * 4
    assert bench.kept_bytes(run, 6) == 6 * 10 * 4 + 6 * 7 * 4


def test_counting_bytes_frees_them_again():
    seen = []
    model = torch.nn.Linear(4, 4)

    def loss(x):
        y = model(
            x
        ).exp()  # exp keeps its own output: a hook that returned it as it is would make a cycle
        seen.append(StorageWeakRef(y.untyped_storage()))
        return y.sum()

    gc.disable()
    try:
        bench.kept_bytes(
            SimpleNamespace(weights={}, loss=loss, micro_batch_at=lambda *a: (torch.randn(3, 4),)),
            2,
        )
        assert seen[0].expired()
    finally:
        gc.enable()


def test_logits_of_other_positions_do_not_exist(train):
    """What a row keeps for the backward pass grows with the vocabulary by its predicted positions alone."""
    per_row = {}
    for size in (600, 1200):
        model = MaskedLM(ModelConfig(vocab_size=size, n_layer=1, n_head=2, n_embd=32, n_inner=48))
        loss = make_loss(model, torch.device("cpu"), torch.float32)
        batch = torch.zeros(8, 128, dtype=torch.long), torch.ones(8, 20, dtype=torch.long)
        weights = dict(model.named_parameters())
        run = SimpleNamespace(
            weights=weights, loss=loss, micro_batch_at=lambda *a, batch=batch: (*batch, batch[1])
        )
        per_row[size] = (bench.kept_bytes(run, 8) - bench.kept_bytes(run, 4)) / 4
    assert per_row[1200] - per_row[600] == 20 * 600 * 4


def test_accumulation_takes_no_memory(train):
    """Between micro-batches there is one gradient a parameter, and it stays where it is."""
    run = new_run(train)
    places = set()
    for row in range(0, 32, 8):
        run.loss(*run.micro_batch_at(row, 20)).backward()
        places.add(tuple(p.grad.data_ptr() for p in run.model.parameters()))
    assert len(places) == 1


@pytest.mark.parametrize(("name", "expected"), [("adamw", 16), ("muon", 12)])
def test_bytes_a_parameter(train, monkeypatch, name, expected):
    """Weight, gradient and two moments of four bytes each; Muon's matrices have but one."""
    monkeypatch.setattr(train, "optimizer", name)
    run = new_run(train)
    run.train_step(0.5)
    matrices = sum(p.numel() for p in run.model.model.layers.parameters() if p.ndim == 2)
    share = matrices / sum(p.numel() for p in run.model.parameters())
    wanted = 16 if name == "adamw" else expected * share + 16 * (1 - share)
    assert bench.state_bytes(run) == pytest.approx(wanted, rel=0.01)  # AdamW also counts its steps


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=30))
def test_spread_is_numpys(values):
    low, mid, high = np.percentile(values, [10, 50, 90])
    words = bench.spread(values, ".6e").replace("(", "").replace(")", "").split()
    assert [float(words[i]) for i in (0, 1, 3)] == pytest.approx([mid, low, high], rel=1e-5)


def test_all_sides_compute_the_same_loss(small_bench):
    """With our weights, transformers' dense and sparse heads end at our loss: same rows, same masks, same mean."""
    run = new_run(small_bench)
    ids, positions, labels = run.micro_batch_at(0, run.k_max)
    batch = (ids, positions, labels, torch.full_like(ids, -100).scatter(1, positions, labels))
    ours, *theirs = list(bench.systems(torch.device("cpu"), torch.float32))[:3]
    assert [ours.name, *(s.name for s in theirs)] == [
        "nanocram, a ModernBERT",
        "transformers ModernBERT, dense head",
        "transformers ModernBERT, sparse head",
    ]
    torch.nn.init.normal_(ours.model.model.layers[-1].mlp.Wo.weight)  # zero until here
    for side in theirs:
        missing = side.model.load_state_dict(
            to_folder_keys(ours.model.state_dict(), ours.model.config), strict=False
        )
        assert missing.missing_keys == ["decoder.weight"] and not missing.unexpected_keys
        assert side.loss(*batch).item() == pytest.approx(ours.loss(*batch).item(), rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_whole_report(small_bench, monkeypatch, capsys, tmp_path, compiled):
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **options)
    )
    for name, value in {
        "compare": True,
        "profile": True,
        "trace": str(tmp_path / "a" / "trace.json"),
    }.items():
        monkeypatch.setattr(bench, name, value)
    for name, value in {
        "budget_hours": 1.0,
        "compile": compiled,
        "max_steps": 3,
    }.items():  # more steps than that
        monkeypatch.setattr(small_bench, name, value)
    bench.main()
    printed = capsys.readouterr().out
    assert "does not" not in printed and "WARNING" not in printed
    for words in (
        "machine      cpu",
        "first step",
        "time in ms   data",
        "bytes a parameter",
        "epochs",
        "calls a step",
    ):
        assert words in printed, words
    speed, flops, mfu = (
        float(re.search(pattern, printed)[1].replace(",", ""))
        for pattern in (r"tokens/s +([\d,]+)", r"([\d.,]+) MFLOP a token", r"MFU +([\d.]+)%")
    )
    assert mfu / 100 == pytest.approx(
        speed * flops * 1e6 / 1e12, rel=0.2, abs=1e-3
    )  # flops is printed as 0.2
    parts = dict(re.findall(r"(data|forward|backward|update) ([\d.]+)", printed))
    forward, backward, update = (
        float(parts[name]) for name in ("forward", "backward", "update")
    )  # ms
    steps = float(re.search(r"1 hours: ([\d,]+) steps", printed)[1].replace(",", ""))
    assert (
        0.3 < steps * (1.5 * (forward + backward) + update) / 3600e3 < 3
    )  # the ramp goes from 1 to 2 micro-batches
    table = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in table[2:]] == [
        "nanocram, a ModernBERT",
        "transformers ModernBERT, dense head",
        "transformers ModernBERT, sparse head",
        "transformers BERT-base",
        "nanocram config/tiny.py",
    ]
    base = float(table[2][3].split()[0].replace(",", ""))
    for row in table[2:5]:
        assert float(row[4]) == pytest.approx(
            base / float(row[3].split()[0].replace(",", "")), rel=0.01
        )
    assert table[-1][4].strip() == "of another size"
    assert json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]


def test_what_does_not_run_is_left_out_and_what_does_not_compile_runs_eager(
    small_bench, monkeypatch, capsys
):
    monkeypatch.setattr(small_bench, "compile", True)

    def broken(f, **options):
        raise RuntimeError("no compiler\nlong trace")

    def full(*batch):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", broken)
    model = torch.nn.Linear(3, 1)
    good = bench.System("good", model, lambda x: model(x).sum())
    assert (
        bench.warmed_up(good, [torch.ones(2, 3)], torch.device("cpu")) is good
        and good.mode == "eager"
    )
    assert (
        bench.warmed_up(bench.System("large", model, full), [torch.ones(2, 3)], torch.device("cpu"))
        is None
    )
    lines = capsys.readouterr().out.split("\n")
    assert lines[1] == "good, compiled, does not run: no compiler"
    assert lines[3] == "large, eager, does not run: out of memory"


def test_without_transformers_its_rows_are_left_out(small_bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    names = [side.name for side in bench.systems(torch.device("cpu"), torch.float32)]
    assert names == ["nanocram, a ModernBERT", "nanocram config/tiny.py"]
    assert "transformers is not installed: its rows are left out" in capsys.readouterr().out


def test_as_a_command_without_data(tmp_path):
    """Recipes, flags of train.py and its own all reach it; nothing is left in the folder it runs in."""
    flags = SMALL_MODEL | {
        "data_dir": "nowhere",
        "bench_steps": 3,
        "batch_size": 1024,
        "dtype": "auto",
    }
    done = script("bench.py", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stdout
    assert (
        "nowhere is not prepared: rows of random tokens" in done.stdout
        and "epochs" not in done.stdout
    )
    sizes = {k: SMALL_MODEL[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")}
    assert (
        f"{sum(p.numel() for p in MaskedLM(ModelConfig(**sizes)).parameters()):,} parameters"
        in done.stdout
    )
    assert not list(tmp_path.iterdir())
    done = script("bench.py", cwd=tmp_path, profile=True, trace="..", **flags)
    assert (
        done.returncode == 1
        and done.stdout.strip().splitlines()[-1] == "..: Is a directory; nothing was kept"
    )
    done = script("bench.py", cwd=tmp_path, n_layers=3)
    assert (
        done.returncode == 1
        and done.stdout.strip()
        == "command line: bench.py has no setting n_layers; did you mean n_layer?"
    )


def test_no_power_meter_without_a_card():
    with machine.power_meter(torch.device("cpu")) as watts:
        pass
    assert watts == [] and machine.peak_bytes(torch.device("cpu")) > 50e6


@pytest.mark.parametrize(
    ("answer", "expected"), [("312.40\n", 312.4), ("[N/A]\n", None), (OSError(), None)]
)
def test_the_power_meter_reads_the_driver(monkeypatch, answer, expected):
    """nvidia-smi is played here; that it ends with the block even if that fails is real."""

    def play(command, **options):
        assert command[:2] == ["nvidia-smi", "--id=GPU-abc"]
        if isinstance(answer, OSError):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(subprocess, "run", play)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="abc"))
    with (
        pytest.raises(ZeroDivisionError),
        machine.power_meter(SimpleNamespace(type="cuda")) as watts,
    ):
        time.sleep(1.2)
        raise ZeroDivisionError
    count = len(watts)
    time.sleep(0.6)
    assert len(watts) == count and set(watts) == ({expected} if expected else set())


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 0),
        ("NVIDIA A100-SXM4-40GB", 312),
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
    """Names as torch.cuda.get_device_name() gives them; a variant that we do not know is no card that we know."""
    assert machine.datasheet_rate(name) == tera * 1e12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.slow
def test_freed_memory_is_used_again():
    """In a process of its own: 20 tensors of 64 MB, one after the other, after 20 for the heap to find its shape."""
    program = """
import resource, sys, torch
from nanocram import machine
if sys.argv[1] == "keep": machine.keep_freed_memory()
for _ in range(20): torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): torch.ones(2**24)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**26)
"""
    faults = {}
    for how in ("keep", "plain"):
        command = [sys.executable, "-c", program, how]
        faults[how] = float(
            subprocess.run(
                command, cwd=bench.Path(bench.__file__).parent, capture_output=True
            ).stdout
        )
    assert faults["keep"] < 2 and faults["plain"] > 15
