import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL_MODEL, script
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import new_run

import bench
import machine
from model import MaskedLM, ModelConfig, to_folder_keys


@pytest.fixture
def small_bench(train, monkeypatch):
    """bench.py in front of the train module with the settings of a small run."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    for name, value in {"bench_steps": 4, "REFERENCE": "config/tiny.py", "ROUNDS": 2, "BERT": sizes}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: 1e12)  # seconds of work
    for name in ("batch_size", "batch_ramp", "max_steps", "data_dir"):  # bench sets them
        monkeypatch.setattr(train, name, getattr(train, name))
    return train


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.floats(0.5, 5), st.floats(0, 5), st.floats(0.01, 0.5))
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
    longest, shortest = (n * micro + update for n in (max(ramp), min(ramp)))  # one may reach into the next stretch
    assert abs(steps - count) <= len(ramp) * (1 + longest / shortest)
    assert abs(tokens - seen) <= len(ramp) * 2 * longest * 800 / micro


def test_bytes_kept_for_the_backward_pass_by_hand():
    """exp keeps its output, a product its input (and the weight, which is a parameter and does not count)."""
    model = torch.nn.Linear(10, 7, bias=False)
    x = torch.randn(6, 10)
    run = SimpleNamespace(model=model, loss=lambda x: model(x).exp().sum(), micro_batch_at=lambda row, n: (x.clone(),))
    assert bench.kept_bytes(run, 4) == 6 * 10 * 4 + 4 * 7 * 4  # a slice keeps all of x
    assert bench.kept_bytes(run, 6) == 6 * 10 * 4 + 6 * 7 * 4


def test_logits_of_other_positions_and_copies_of_gradients_do_not_exist(train):
    """What a row keeps grows with the vocabulary by its predicted positions alone, and nothing grows with the steps."""
    per_row = {}
    for size in (600, 1200):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "vocab_size", size)
            torch.manual_seed(0)
            model = MaskedLM(ModelConfig(vocab_size=size, n_layer=1, n_head=2, n_embd=32, n_inner=48))
            loss = train.make_loss(model, torch.device("cpu"), torch.float32)
            batch = torch.zeros(8, 128, dtype=torch.long), torch.ones(8, 20, dtype=torch.long)
            run = SimpleNamespace(model=model, loss=loss, micro_batch_at=lambda *a, batch=batch: (*batch, batch[1]))
            per_row[size] = (bench.kept_bytes(run, 8) - bench.kept_bytes(run, 4)) / 4
    assert per_row[1200] - per_row[600] == 20 * 600 * 4


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
    assert [ours.name, *(s.name for s in theirs)] == ["nanocram, the same", "transformers ModernBERT, dense head",
                                                      "transformers ModernBERT, sparse head"]  # fmt: skip
    torch.nn.init.normal_(ours.model.model.layers[-1].mlp.Wo.weight)  # zero until here
    for side in theirs:
        missing = side.model.load_state_dict(to_folder_keys(ours.model.state_dict(), ours.model.config), strict=False)
        assert missing.missing_keys == ["decoder.weight"] and not missing.unexpected_keys
        assert side.loss(*batch).item() == pytest.approx(ours.loss(*batch).item(), rel=1e-5)


def test_the_whole_report(small_bench, monkeypatch, capsys, tmp_path):
    for name, value in {"compare": True, "profile": True, "trace": str(tmp_path / "a" / "trace.json")}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(small_bench, "budget_hours", 1.0)
    bench.main()
    printed = capsys.readouterr().out
    for words in ("machine      cpu", "first step", "tokens/s", "MFU", "time in ms   data", "bytes a parameter",
                  "1 hours", "epochs", "calls a step"):  # fmt: skip
        assert words in printed, words
    table = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in table[2:]] == ["nanocram, the same", "transformers ModernBERT, dense head",
        "transformers ModernBERT, sparse head", "transformers BERT-base", "nanocram config/tiny.py"]  # fmt: skip
    base = float(table[2][3].split()[0].replace(",", ""))
    for row in table[2:]:
        assert float(row[4]) == pytest.approx(base / float(row[3].split()[0].replace(",", "")), rel=0.01)
    assert json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]


def test_without_transformers_its_rows_are_left_out(small_bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    names = [side.name for side in bench.systems(torch.device("cpu"), torch.float32)]
    assert names == ["nanocram, the same", "nanocram config/tiny.py"]
    assert "transformers is not installed: its rows are left out" in capsys.readouterr().out


def test_as_a_command_without_data(tmp_path):
    """Recipes, flags of train.py and its own all reach it; nothing is left in the folder it runs in."""
    flags = SMALL_MODEL | {"data_dir": "nowhere", "bench_steps": 3, "batch_size": 1024, "dtype": "auto"}
    done = script("bench.py", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stdout
    assert "nowhere is not prepared: rows of random tokens" in done.stdout and "epochs" not in done.stdout
    sizes = {k: SMALL_MODEL[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")}
    assert f"{sum(p.numel() for p in MaskedLM(ModelConfig(**sizes)).parameters()):,} parameters" in done.stdout
    assert not list(tmp_path.iterdir())
    done = script("bench.py", cwd=tmp_path, n_layers=3)
    assert done.returncode == 1 and done.stdout.strip() == "command line: bench.py has no setting n_layers; " \
        "did you mean n_layer?"  # fmt: skip


def test_no_power_meter_without_a_card():
    with machine.power_meter(torch.device("cpu")) as watts:
        pass
    assert watts == [] and machine.datasheet_rate(torch.device("cpu")) == 0
    assert machine.peak_bytes(torch.device("cpu")) > 50e6
