import errno
import functools
import math
import os
import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import PLOT, ROOT, error, new_run, put

import train as module
from nanocram import facts, machine, runlog, safety
from nanocram.tokenizer import CLS, MASK

STALLS = [("step", 0), ("step", 3), ("eval", 1), ("save", 0), ("save", 1)]


@pytest.fixture
def setting(monkeypatch):
    """Set globals of train.py."""
    return functools.partial(put, monkeypatch, module)


def saved_state(train):
    """The State in the checkpoint of a run."""
    return torch.load(Path(train.out_dir) / "ckpt.pt", weights_only=True)["state"]


def test_the_rate_rises_stays_and_falls(setting):
    """test_parity.py has the paper's schedules."""
    points = np.linspace(0, 1, 41)
    setting(warmup=0.1, cooldown=0.65)
    for schedule, end in (("trapezoid", 0), ("constant", 1)):
        setting(schedule=schedule)
        wanted = np.interp(points, [0, 0.1, 0.35, 1], [0, 1, 1, end])
        assert [module.lr_scale(p) for p in points] == pytest.approx(wanted, abs=1e-9)
    setting(schedule="trapezoid", warmup=0.0, cooldown=0.0)
    assert module.lr_scale(0) == 1


def test_masking_falls_in_four_stages(setting):
    """Evenly from 30 to 15 % of 128 tokens; a constant rate is one stage."""
    stages = [module.row_shape(p) for p in (0, 0.249, 0.25, 0.499, 0.5, 0.749, 0.75, 1)]
    assert stages == [(128, count) for count in (38, 38, 32, 32, 26, 26, 19, 19)]
    assert module.row_shapes() == [(128, count) for count in (38, 32, 26, 19)]
    setting(mask_rate_end=0.3)
    assert module.row_shapes() == [(128, 38)]


def test_rows_are_cut_into_shorter_ones(train, setting):
    """Each begins with [CLS]. The rows that are kept for the next pass are as they were."""
    shapes = {True: (32, 5), False: (128, 20)}
    setting(row_shape=lambda progress: shapes[progress < 0.5])
    run = new_run()
    data = run.rows.read(8, 8)
    for shape in shapes.values():
        ids, positions, labels = module.masked_batch(run, 8, 8, shape)
        wanted = data.view(-1, shape[0]).clone()
        wanted[:, 0] = CLS
        assert labels.shape == (len(wanted), shape[1])
        assert torch.equal((ids == MASK).sum(1), torch.full((len(wanted),), shape[1]))
        assert torch.equal(ids.scatter(1, positions, labels), wanted)
    assert torch.equal(run.rows.fetch(8, 8), data)
    flops = [run.model.flops_per_token(*shape) for shape in shapes.values()]
    assert run.flops_per_token == pytest.approx(sum(flops) / 2)
    setting(seed=1)  # other masks
    assert not torch.equal(positions, module.masked_batch(run, 8, 8, shape)[1])


def test_muon_has_the_blocks_matrices_and_adamw_the_rest(train, setting):
    """test_edit.py has that each is in one, test_parity.py which of them decay."""
    setting(optimizer="muon", norm_bias=True, head_transform=True)
    run = new_run()
    (group,) = run.optimizers[1].param_groups
    matrices = [p for p in run.model.model.layers.parameters() if p.ndim == 2]
    assert set(group["params"]) == set(matrices) and len(matrices) == 2 * 7


@pytest.mark.parametrize("grad_clip, micro_batch, rows", [(0.0, 8, 8), (0.1, 32, 32), (0.1, 24, 8)])
def test_accumulation_is_one_big_batch(train, setting, grad_clip, micro_batch, rows):
    """A step of 64 rows in passes of so many against transformers' loss, a mean over all labels."""
    # With zero_init half of the gradients would be zero on both sides.
    setting(zero_init=False, batch_size=64, batch_start=64, grad_clip=grad_clip)
    run = new_run()
    run.micro_batch = micro_batch  # what does not divide a step is taken in units, of 8
    shape = _, n_predict = module.row_shape(0.5)
    parts = [module.masked_batch(run, row, rows, shape) for row in range(0, 64, rows)]
    ids, positions, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    assert labels.numel() == 64 * n_predict
    logits = run.model(ids)[torch.arange(64)[:, None], positions]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    expected = [p.grad.clone() for p in run.model.parameters()]
    run.model.zero_grad()
    seen = []
    run.optimizers[0].step = lambda: seen.extend(p.grad.clone() for p in run.model.parameters())
    module.train_step(run, 0.5)
    for gradient, wanted in zip(seen, expected, strict=True):
        assert torch.allclose(gradient, wanted, atol=1e-6)
    assert run.state.last["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run.state.last["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_step_asks_the_device_for_no_number_more(train, monkeypatch):
    """Than loss and norm, by one tolist(): a GPU would wait for each."""
    run = new_run()
    module.train_step(run, 1.0)  # the optimisers make their states
    for name in ("item", "__bool__", "__float__", "__int__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, None)
    module.train_step(run, 1.0)


@pytest.mark.parametrize(
    ("dtype", "bad", "steps", "saved"),
    [
        ("float32", range(3, 6), 9, 9),
        ("float32", range(5, 200), 200, 5),
        ("float32", range(5, 6), 6, 5),
        ("float16", range(3, 6), 6, 6),
        ("float16", range(2, 6), 6, 2),
    ],
)
def test_steps_without_a_finite_gradient(train, setting, monkeypatch, dtype, bad, steps, saved):
    """They change nothing, and are not saved, but in float16. Too many end the run."""
    setting(max_steps=steps, samples="", dtype=dtype, checkpoint_minutes=1e-9)
    train_step = module.train_step

    def sometimes_bad(run, progress):
        loss_fn = run.loss_fn
        if run.state.step in bad:
            run.loss_fn = lambda *batch: {k: x * math.nan for k, x in loss_fn(*batch).items()}
        train_step(run, progress)
        run.loss_fn = loss_fn

    in_one_line = pytest.raises(SystemExit, match=r"^[^\n]+$")
    with monkeypatch.context() as patch, nullcontext() if saved == steps else in_one_line:
        patch.setattr(module, "train_step", sometimes_bad)
        module.main()
    assert min(len(bad), 40) <= runlog.read_log(train.out_dir)[-1]["skipped"] <= 50
    assert saved_state(train)["step"] == saved
    if saved < steps:
        setting(init="resume", max_steps=saved + 2)
        module.main()
        assert saved_state(train)["step"] == saved + 2 and saved_state(train)["skipped"] == 0


def test_compiled_equals_eager(train, setting):
    """Loss and every gradient of a micro-batch."""
    setting(n_layer=1, zero_init=False)
    gradients = []
    for compiled in (True, False):
        setting(compile=compiled)
        run = new_run()
        batch = module.masked_batch(run, 0, run.micro_batch, (128, 20))
        value = run.loss_fn(*batch)["loss"]
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in run.model.parameters())])
    assert error(*gradients) < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "adamw with offload", "muon"])
def test_frozen_weights_stay(train, setting, optimizer):
    """Weight decay included; the others learn as they should."""
    setting(optimizer=optimizer.split()[0], offload="offload" in optimizer)
    setting(weight_decay=0.1, zero_init=False)
    run = new_run()
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    for part in (run.model.model.embeddings, run.model.model.layers[0]):
        part.requires_grad_(False)
    for _ in range(2):
        module.train_step(run, 0.5)
    for name, p in run.model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


@pytest.mark.parametrize(("kind", "number"), STALLS)
def test_a_stall_costs_its_own_seconds_alone(train, setting, monkeypatch, capsys, kind, number):
    """The budget is used to its end, by a made-up clock: one of them takes 200 s more."""
    usual, clock, count = {"step": 1.0, "eval": 6.0, "save": 2.0}, [0.0], Counter()
    setting(budget_hours=600 / 3600, evals=8, checkpoint_minutes=1e-9, samples="")
    monkeypatch.setattr(machine, "now", lambda: clock[0])

    def set_up(run, rows):
        clock[0] += 60.0
        return 1.0, 1.0

    def spend(kind_of_work):
        is_stalled = (kind_of_work, count[kind_of_work]) == (kind, number)
        clock[0] += usual[kind_of_work] + 200.0 * is_stalled
        count[kind_of_work] += 1

    def step(run, progress):
        spend("step")
        run.state.step += 1
        run.state.last = {"loss": 1.0, "lr": module.lr_scale(progress)}

    def save(run, log):
        spend("save")
        run.saved_step = run.state.step
        return True

    def evaluate(run, sets):
        assert count["eval"] or run.clock.progress() == 0
        spend("eval")
        return dict.fromkeys(("val_loss_15", "val_loss_25", "val_nats_per_char"), 1.0)

    setting(take_all_passes=set_up, train_step=step, save=save, evaluate=evaluate)
    module.main()
    last = runlog.read_log(train.out_dir)[-1]
    assert 585 < last["elapsed_s"] <= 600 and last["lr"] < 0.05
    said = capsys.readouterr().out
    assert said.count("few tokens per parameter: train longer") == 1
    said = re.findall(r"WARNING: a (\w+) took (\d+) s", said)
    # how long the first save takes nobody knows before
    assert said == [(kind, f"{usual[kind] + 200:.0f}")] * (kind != "save" or number > 0)


def test_a_budget_that_setting_up_uses_trains_nothing(train, setting):
    setting(budget_hours=1e-6)
    with pytest.raises(SystemExit, match="at step 0: to go on, type a larger"):
        module.main()
    assert not (Path(train.out_dir) / "README.md").exists()


def test_a_result_that_is_none_is_called_so(train, setting, monkeypatch, capsys):
    """It learns not even how frequent tokens are. A log gets lines of progress."""
    put(monkeypatch, safety, LINE_SECONDS=-1)
    setting(max_steps=12, lr=30.0, muon_lr=30.0, batch_ramp=0.0, evals=4, samples="")
    module.main()
    said = capsys.readouterr().out
    assert said.count("WARNING: no better than guessing") == 2
    assert re.search(r"^ 58%  step 7  loss .* tokens/s .* min left$", said, re.MULTILINE)


def test_the_log(train, setting, tmp_path, monkeypatch, capsys):
    """Means since its last line. A resume, be it a GPU's, cuts off what its checkpoint has not."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    setting(max_steps=6, log_every=1, evals=1, samples="", out_dir=str(tmp_path / "each"))
    train.main()
    each = runlog.read_log(train.out_dir)
    setting(log_every=3, out_dir=str(tmp_path / "third"))
    train.main()
    thirds = runlog.read_log(train.out_dir)
    assert [line["step"] for line in thirds] == [0, 3, 6]
    for name in ("loss", "grad_norm"):
        wanted = [fmean(line[name] for line in each[i : i + 3]) for i in (1, 4)]
        assert [line[name] for line in thirds[1:]] == pytest.approx(wanted, rel=1e-5), name
    # a column that this code does not measure
    path = Path(train.out_dir) / "log.csv"
    header, first, second, third = path.read_text().splitlines()
    lines = [header + ",mine", first + ",", second + ",1.5", third + ",2.5"]
    path.write_text("\n".join([*lines, "9,8,7", ""]))
    before = runlog.read_log(train.out_dir)
    assert before[1]["mine"] == 1.5
    setting(init="resume", max_steps=8, lr=0.001, muon_lr=0.02)
    train.main()
    after = runlog.read_log(train.out_dir)
    assert after[:3] == before[:3] and [line["step"] for line in after] == [0, 3, 6, 8]
    for line, steps, lr, muon_lr in ((after[2], 6, 0.004, 0.01), (after[3], 8, 0.001, 0.02)):
        share = module.lr_scale((steps - 1) / steps)
        wanted = lr * share, muon_lr * share
        assert (line["lr"], line["muon_lr"]) == pytest.approx(wanted, rel=1e-5)
    # the speed is that of the whole run, of what came before the resume too
    said = re.findall(
        r"(\d+) s, \d+ of them to set up: ([\d,]+) tokens/s all in", capsys.readouterr().out
    )
    seconds, speed = (int(number.replace(",", "")) for number in said[-1])
    assert after[-1]["elapsed_s"] <= after[-1]["tokens"] / speed < seconds + 0.6


def test_a_log_that_cannot_be_written_stops_no_checkpoint(train, setting, monkeypatch, capsys):
    """A spreadsheet has it open, say. Its lines wait for the next time."""
    out, replace = Path(train.out_dir), os.replace

    def locked_at_first(temporary, path):
        if path.name == "log.csv" and path.exists() and not (out / "ckpt.pt").exists():
            raise PermissionError(errno.EACCES, "in use")
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", locked_at_first)
    setting(max_steps=4, samples="")
    module.main()
    assert "WARNING: no new log.csv" in capsys.readouterr().out
    assert [line["step"] for line in runlog.read_log(out)] == [0, 2, 4]


def test_wandb_gets_every_row(train, setting, monkeypatch, capsys):
    """A resume has the same run of theirs. Training outlives its process, and matplotlib."""
    seen = []
    logger = SimpleNamespace(log=lambda row, step: seen.append((step, dict(row))), id="abc")
    fake = SimpleNamespace(init=lambda **facts: seen.append(facts) or logger)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    setting(max_steps=4, wandb_project="mine")
    train.main()
    assert seen[0]["project"] == "mine" and seen[0]["config"]["max_steps"] == 4
    rows = runlog.read_log(train.out_dir)
    assert [step for step, _ in seen[1:]] == [row["step"] for row in rows] == [0, 2, 4]
    assert seen[-1][1]["val_loss_15"] == pytest.approx(rows[-1]["val_loss_15"], rel=1e-5)

    def dead(row, step):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    logger.log = dead
    monkeypatch.setattr("matplotlib.figure.Figure", None)
    setting(max_steps=10, init="resume")
    put(monkeypatch, runlog, plot=PLOT)
    train.main()
    said = capsys.readouterr().out
    assert seen[-1]["id"] == "abc" and saved_state(train)["step"] == 10
    assert said.count("Broken pipe") == said.count("no loss.png") == 1


def test_what_is_in_a_folder_is_never_lost(train, setting, tmp_path, monkeypatch):
    """Neither somebody else's files nor a run, where a disk is mounted and cannot be renamed."""
    setting(max_steps=1, samples="")
    out = Path(train.out_dir)
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    (out / "run.json").write_text("{}")

    def busy(path, goal):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        with pytest.raises(SystemExit, match=r"busy\): type --init=auto to continue it, or"):
            train.main()
    assert (out / "thesis.tex").read_text() == "precious"
    setting(init="auto")
    train.main()  # without a checkpoint there is nothing to go on from
    assert (tmp_path / "out.1/thesis.tex").read_text() == "precious"
    # a run that was killed before its first save begins anew in its place
    setting(out_dir=str(tmp_path / "killed"))
    (tmp_path / "killed").mkdir()
    for name, text in {"run.json": "{}", "ckpt.pt.tmp": "half"}.items():
        (tmp_path / "killed" / name).write_text(text)
    train.main()
    assert saved_state(train)["step"] == 1 and not (tmp_path / "killed.1").exists()
    assert not (tmp_path / "killed/ckpt.pt.tmp").exists()


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"])
def test_a_gpu_that_torch_cannot_use_is_one_line(monkeypatch, driver, capsys):
    """Unless the user hides it, or asks for the CPU. An emulated dtype would be a surprise, too."""
    monkeypatch.setattr(machine, "Path", lambda name: ROOT / ("" if name == driver else "none"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.pick("auto", "float32")[0].type == "cpu"  # the tests hide it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.pick("cpu", "float32")[0].type == "cpu"
    with pytest.raises(SystemExit, match="--device=cpu"):
        machine.pick("auto", "float32")
    for is_native in (True, False):
        monkeypatch.setattr(machine, "native_bf16", lambda device, so=is_native: so)
        machine.pick("cpu", "bfloat16")
        assert ("WARNING: bfloat16" in capsys.readouterr().out) != is_native


def test_a_compiler_that_fails_is_one_line(train, setting, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    setting(compile=True, max_steps=2)
    with pytest.raises(SystemExit, match=r"^torch\.compile fails here .*--compile=False$"):
        train.main()


def test_a_compiler_that_the_environment_forbids_is_named(train, setting, monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"stats": {"unique_graphs": 0}})
    setting(compile=True, max_steps=1)
    train.main()
    assert "WARNING: torch compiles nothing: unset TORCHDYNAMO_DISABLE" in capsys.readouterr().out


def test_micro_batch_halves_until_it_fits(train, setting, capsys):
    """A resume, which has more room, keeps what fitted: another size draws other masks."""
    masked_batch, room = module.masked_batch, SimpleNamespace(rows=5)

    def limited(run, first_row, n_rows, shape):
        torch.empty((n_rows > room.rows) << 60, dtype=torch.uint8)
        return masked_batch(run, first_row, n_rows, shape)

    setting(masked_batch=limited, micro_batch=24, batch_size=24, batch_start=24, max_steps=1)
    module.main()
    said = capsys.readouterr().out
    tried = re.findall(r"micro_batch=(\d+), since a larger one ran out of memory\n", said)
    assert tried == ["12", "6", "3"]
    assert "1 steps, 0 of them skipped; 3,072 tokens" in said
    room.rows = 24
    setting(init="resume", max_steps=2)
    module.main()
    assert facts.read_facts(train.out_dir)["rows_per_pass"] == 3
    room.rows = 0
    setting(init="scratch")
    with pytest.raises(SystemExit, match="with a single row: use a smaller model"):
        module.main()


def test_a_gpu_with_room_takes_more_rows(train, setting, monkeypatch):
    """By the peak of 256 rows, on a stubbed card. A resume, which has more room, takes no more."""
    setting(micro_batch=0, batch_size=1024, batch_start=256)
    stubs = {"memory_reserved": 0, "max_memory_allocated": 100}
    others = "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction"
    for name in (*stubs, *others):
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=stubs.get(name)))
    run = new_run()
    run.device = SimpleNamespace(type="cuda")

    def taken(room, largest):
        def take_all_passes(run, rows):
            if run.micro_batch > largest:
                raise MemoryError
            return 1.0, 1.0

        setting(take_all_passes=take_all_passes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * room, 1000))
        run.micro_batch = run.small_pass = 256
        module.set_up(run, run.rows.read(0, 8))
        return run.micro_batch

    for room, largest, rows in ((5, 1024, 1024), (3, 1024, 512), (1, 1024, 256), (5, 256, 256)):
        run.state = run.clock.state = module.State()
        assert taken(room, largest) == rows
        assert taken(1000, 1024) == rows
    limits = torch.cuda.set_per_process_memory_fraction.call_args_list  # WSL's driver has none
    assert [call.args[0] for call in limits[:2]] == [0.45, 0.475]
