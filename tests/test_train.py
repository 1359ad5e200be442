import errno
import functools
import json
import math
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, model_config, new_log, new_run, put

import model as model_module
import train as module
from model import MaskedLM
from nanocram import machine, runlog
from nanocram.tokenizer import CLS


@pytest.fixture
def setting(monkeypatch):
    """Set globals of train.py."""
    return functools.partial(put, monkeypatch, module)


# Schedules

LR_SCALES = {
    "trapezoid": lambda p: np.interp(p, [0, 0.1, 0.35, 1], [0, 1, 1, 0]),
    "triangle": lambda p: np.interp(p, [0, 0.75, 1], [0.25, 1, 0]),  # the paper's
    "linear": lambda p: np.interp(p, [0, 0.1, 1], [0, 1, 0]),
    "constant": lambda p: np.interp(p, [0, 0.1, 1], [0, 1, 1]),
    "cosine": lambda p: p / 0.1 if p < 0.1 else math.cos((p - 0.1) / 0.9 * math.pi / 2) ** 2,
}


@pytest.mark.parametrize("schedule", LR_SCALES)
def test_learning_rates_follow_their_formula(setting, schedule):
    setting(schedule=schedule, warmup=0.1, cooldown=0.65)
    for p in np.linspace(0, 1, 41):
        assert module.lr_scale(p) == pytest.approx(LR_SCALES[schedule](p), abs=1e-9)
    setting(warmup=0.0, cooldown=0.0)
    if schedule != "triangle":
        assert module.lr_scale(0) == 1


def test_masking_falls_in_four_stages(setting):
    """Evenly from 30 to 15 % of 128 tokens; a constant rate is one stage."""
    stages = [module.row_shape(p) for p in (0, 0.249, 0.25, 0.499, 0.5, 0.749, 0.75, 1)]
    assert stages == [(128, count) for count in (38, 38, 32, 32, 26, 26, 19, 19)]
    assert module.row_shapes() == [(128, count) for count in (38, 32, 26, 19)]
    setting(mask_rate_end=0.3)
    assert module.row_shapes() == [(128, 38)]


def test_rows_are_cut_into_shorter_ones(train, setting):
    """Each begins with [CLS]; the rows that are kept for the next pass are as they were."""
    shapes = {True: (32, 5), False: (128, 20)}
    setting(row_shape=lambda progress: shapes[progress < 0.5], max_steps=4, log_every=1)
    run = new_run()
    data = run.rows.read(8, 8)
    for shape in shapes.values():
        ids, positions, labels = module.masked_batch(run, 8, shape)
        wanted = data.view(-1, shape[0]).clone()
        wanted[:, 0] = CLS
        assert labels.shape == (len(wanted), shape[1])
        assert torch.equal(ids.scatter(1, positions, labels), wanted)
    assert torch.equal(run.rows.fetch(8, 8), data)
    flops = [run.model.flops_per_token(*shape) for shape in shapes.values()]
    assert run.flops_per_token == pytest.approx(sum(flops) / 2)
    train.main()
    lines = [line for line in runlog.read_log(train.out_dir) if "mask_rate" in line]
    rates = [line["mask_rate"] for line in lines]
    assert rates == pytest.approx([5 / 32] * 2 + [20 / 128] * 2, rel=1e-5)
    rows = np.cumsum([line["batch_size"] for line in lines])
    assert [line["tokens"] for line in lines] == (128 * rows).tolist()


# A step


def small():
    sizes = {"vocab_size": 90, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_inner": 24}
    return MaskedLM(model_config(**sizes, norm_bias=True, head_transform=True))


def test_muon_has_the_blocks_matrices_and_only_tables_and_head_decay(setting):
    setting(optimizer="muon", weight_decay=0.1, muon_weight_decay=0.2)
    model = small()
    adam, muon = module.build_optimizers(model, torch.float32)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    inside = ("attn.Wq", "attn.Wk", "attn.Wv", "attn.Wo", "mlp.Wi", "mlp.Wo")
    assert matrices == {f"model.layers.{i}.{m}.weight" for i in (0, 1) for m in inside}
    decay = {names[id(p)]: g["weight_decay"] for g in adam.param_groups for p in g["params"]}
    assert set(decay) | matrices == set(names.values()) and not set(decay) & matrices
    decayed = {name for name, share in decay.items() if share}
    assert decayed == {"model.embeddings.tok_embeddings.weight", "head.dense.weight"}


@pytest.mark.parametrize("grad_clip", [0.0, 0.1])
def test_accumulation_gives_the_clipped_gradient_of_one_big_batch(train, setting, grad_clip):
    """A step of 8 micro-batches against transformers' loss, a mean over all their labels."""
    # With zero_init half of the gradients would be zero on both sides.
    setting(zero_init=False, batch_size=64, batch_start=64, grad_clip=grad_clip)
    run = new_run()
    shape = _, n_predict = module.row_shape(0.5)
    parts = [module.masked_batch(run, row, shape) for row in range(0, 64, 8)]
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


SYNCHRONISE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.float16])
def test_one_wait_a_step(train, setting, monkeypatch, amp_dtype):
    """Whatever the number of micro-batches, the device is asked once a step: for loss and norm."""
    asked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.overloadpacket.__name__ in SYNCHRONISE:
                asked.append(op)
            return op(*args, **(kwargs or {}))

    def tolist(tensor, original=torch.Tensor.tolist):
        asked.append("tolist")
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    setting(batch_size=32)  # Muon on matrices, AdamW on the rest
    run = new_run(amp_dtype)
    is_half = amp_dtype == torch.float16
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=is_half)
    for _ in range(2):
        asked.clear()
        with Watch():
            module.train_step(run, 1.0)  # four micro-batches
        assert run.state.skipped == 0
        # GradScaler.update() of a CPU asks too; on a GPU that is one kernel.
        scale = [op for op in asked if op != "tolist"]
        assert len(asked) == 1 + len(scale) and len(scale) <= is_half
    with Watch():
        run.model.decoder.bias[0].item()  # this would have been seen
    assert len(asked) == 2 + len(scale)


def test_masks_are_a_function_of_seed_and_row(train, setting):
    run = new_run()
    a = module.masked_batch(run, 16, (128, 5))
    torch.rand(3)
    module.masked_batch(run, 0, (128, 5))
    b = module.masked_batch(run, 16, (128, 5))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    setting(seed=1)
    assert not torch.equal(a[1], module.masked_batch(run, 16, (128, 5))[1])


def poisoned(loss_fn):
    return lambda *batch: {name: x * math.nan for name, x in loss_fn(*batch).items()}


def test_steps_without_a_finite_gradient_are_skipped_and_then_no_save_is_due(train, setting):
    """What makes gradients unusable may be the weights."""
    setting(max_steps=9)
    run = new_run()
    log = new_log(run)
    module.train_step(run, 0.5)
    assert module.should_save(run) and module.save(run, log)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    good = run.loss_fn
    run.loss_fn = poisoned(good)
    for _ in range(3):
        module.train_step(run, 0.5)
    assert run.state.skipped == run.state.consecutive_skips == 3
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    setting(checkpoint_minutes=1e-9)
    assert not module.should_save(run)
    run.loss_fn = good
    module.train_step(run, 0.5)
    assert run.state.consecutive_skips == 0 and run.state.skipped == 3
    assert any(not torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    assert module.should_save(run) and module.save(run, log)


def test_a_run_that_diverges_ends_and_goes_on_from_before(train, setting, monkeypatch):
    """Saved at every step, ended by too many skips."""
    setting(max_steps=200, samples="", checkpoint_minutes=1e-9)
    train_step = module.train_step

    def poisoned_from_5_on(run, progress):
        if run.state.step == 5:
            run.loss_fn = poisoned(run.loss_fn)
        train_step(run, progress)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train_step", poisoned_from_5_on)
        with pytest.raises(SystemExit) as end:
            module.main()
    assert end.value.code and "\n" not in str(end.value)
    path = Path(train.out_dir) / "ckpt.pt"
    assert torch.load(path, weights_only=True)["state"]["step"] == 5
    assert runlog.read_log(train.out_dir)[-1]["step"] > 50  # what happened stands there
    assert runlog.read_log(train.out_dir)[-1]["skipped"] > 0
    setting(init="resume", max_steps=12)
    module.main()
    state = torch.load(path, weights_only=True)["state"]
    assert state["step"] == 12 and state["skipped"] == 0


def test_float16_finds_its_loss_scale(train):
    run = new_run(torch.float16)
    assert run.scaler.is_enabled()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    module.train_step(run, 0.5)
    assert run.state.consecutive_skips == 1
    while run.state.consecutive_skips:
        module.train_step(run, 0.5)
        assert run.state.skipped < module.MAX_SKIPPED
    assert run.scaler.get_scale() < 2.0**40


def test_compiled_equals_eager(train, setting):
    """Loss and every gradient of a micro-batch."""
    setting(n_layer=1, zero_init=False, compile=True)
    run = new_run()
    batch = module.masked_batch(run, 0, (128, 20))
    gradients = []
    for loss_fn in (run.loss_fn, module.make_loss(run.model, run.device, run.amp_dtype)):
        run.model.zero_grad()
        value = loss_fn(*batch)["loss"]
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in run.model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize(("dtype", "skips"), [("float32", 1), ("float16", 3), ("float16", 4)])
def test_nothing_is_saved_after_last_steps_that_were_skipped(
    train, setting, monkeypatch, capsys, dtype, skips
):
    """But after three or fewer in float16, where they are routine."""
    setting(max_steps=6, samples="", dtype=dtype)
    train_step = module.train_step

    def poisoned_at_the_end(run, progress):
        if run.state.step == 6 - skips:
            run.loss_fn = poisoned(run.loss_fn)
        train_step(run, progress)

    monkeypatch.setattr(module, "train_step", poisoned_at_the_end)
    if skips == 3:
        module.main()
    else:
        with pytest.raises(SystemExit, match="1"):
            module.main()
        assert "nothing is saved after the skipped steps" in capsys.readouterr().out
    state = torch.load(Path(train.out_dir) / "ckpt.pt", weights_only=True)["state"]
    assert state["step"] == (6 if skips == 3 else 1)
    assert runlog.read_log(train.out_dir)[-1]["step"] == 6


def test_what_is_compiled_anew_in_each_step_ends_the_run(train, setting, monkeypatch):
    """A Python number that changes would: from the ninth value on nothing would be compiled."""
    make_loss, train_step = module.make_loss, module.train_step
    changing = SimpleNamespace(value=1.0)

    def scaled(*args):
        loss_fn = make_loss(*args)
        return lambda *batch: {name: x * changing.value for name, x in loss_fn(*batch).items()}

    def changed(run, progress):
        changing.value = 1.0 - progress / 2
        train_step(run, progress)

    monkeypatch.setattr(module, "make_loss", scaled)
    monkeypatch.setattr(module, "train_step", changed)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    setting(compile=True, max_steps=40, samples="", mask_rate_end=0.3)
    with pytest.raises(SystemExit, match="what changes in loss_fn must be a tensor"):
        module.main()


def test_what_nothing_reads_is_named(train, setting, monkeypatch, capsys):
    """Such a weight would be saved, and not have been trained."""
    make_head = model_module.make_head

    def with_more(config):
        head = make_head(config)
        head.dense.scale = torch.nn.Parameter(torch.ones(3))
        return head

    monkeypatch.setattr(model_module, "make_head", with_more)
    setting(head_transform=True, max_steps=1, samples="")
    module.main()
    assert "WARNING: nothing reads head.dense.scale, " in capsys.readouterr().out


# The clock


def test_a_resume_gets_back_no_second_of_a_save(train, setting, monkeypatch):
    run = new_run()
    log = new_log(run)
    run.clock = module.Clock(run.state)
    write = module.checkpoint.save
    monkeypatch.setattr(module.checkpoint, "save", lambda *what: time.sleep(0.4) or write(*what))
    for _ in range(2):  # the second one knows how long the first one took
        with run.clock.timed("save"):
            assert module.save(run, log)
        used = run.clock.elapsed()
    ckpt = torch.load(Path(train.out_dir) / "ckpt.pt", weights_only=True)
    assert ckpt["state"]["elapsed"] == pytest.approx(used, abs=0.2)


def test_the_first_step_is_taken_for_one_of_the_start(train, setting, monkeypatch):
    """However long compiling took: its seconds are no progress. Two passes were half of a batch."""
    setting(budget_hours=100 / 3600, batch_size=32, batch_start=8)
    monkeypatch.setattr(module.Clock, "elapsed", lambda clock: 50.0)
    estimates = []

    def compiled(run, held_out_rows):
        return 3.0, 0.0

    def stop(run, progress):
        estimates.append(run.clock.forecast("step"))
        module.signals.stop = True

    monkeypatch.setattr(module, "take_all_passes", compiled)
    monkeypatch.setattr(module, "train_step", stop)
    monkeypatch.setattr(runlog.Log, "after_step", lambda log, progress: None)
    module.main()
    assert estimates == [3.0]


def stop_clock(monkeypatch, run, now):
    monkeypatch.setattr(run.clock, "elapsed", lambda: now)


def test_the_reserve_is_kept_for_the_last_evaluation_and_save(train, setting, monkeypatch):
    setting(budget_hours=100 / 3600)
    run = new_run()
    state, clock = run.state, run.clock
    stop_clock(monkeypatch, run, 44.0)
    assert clock.progress() == pytest.approx(0.44)
    state.recent |= {"eval": [8.0], "save": [2.0, 2.0]}
    assert clock.progress() == pytest.approx(44 / 88)
    state.setup_seconds = 28.0  # of the budget, but the schedule begins after it
    assert clock.progress() == pytest.approx(16 / 60)
    stop_clock(monkeypatch, run, 88.1)
    assert clock.progress() == 1
    stop_clock(monkeypatch, run, 87.0)  # 1 s is left: too little for a save
    assert not module.should_save(run)
    stop_clock(monkeypatch, run, 85.0)  # 3 s: enough for a save, but for no evaluation
    assert module.should_save(run) and not clock.has_room_for("eval")
    stop_clock(monkeypatch, run, 79.0)
    assert clock.has_room_for("eval")


@pytest.mark.parametrize("kind", ["step", "eval", "save"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_stall_costs_its_own_seconds_alone(train, setting, monkeypatch, capsys, kind, number):
    """Whenever it comes: the budget is used, and the rate falls to 0 at its end. By a made-up clock
    on which a step takes 1 s, an evaluation 6 s, a save 2 s, and one of them 200 s more."""
    usual, clock = {"step": 1.0, "eval": 6.0, "save": 2.0}, [0.0]
    count = dict.fromkeys(usual, 0)
    setting(budget_hours=600 / 3600, evals=8, checkpoint_minutes=1e-9, samples="")
    monkeypatch.setattr(module, "now", lambda: clock[0])

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
        spend("eval")
        return dict.fromkeys(("val_loss_15", "val_loss_25", "val_nats_per_char"), 1.0)

    monkeypatch.setattr(module, "take_all_passes", lambda *what: (1.0, 1.0))
    put(monkeypatch, module, train_step=step, save=save, evaluate=evaluate)
    module.main()
    last = runlog.read_log(train.out_dir)[-1]
    assert 585 < last["elapsed_s"] <= 600 and last["lr"] < 0.05
    said = re.findall(r"WARNING: a (\w+) took (\d+) s", capsys.readouterr().out)
    # how long the first save takes nobody knows before
    assert said == [(kind, f"{usual[kind] + 200:.0f}")] * (kind != "save" or number > 0)


def test_a_hiccup_while_it_compiles_is_no_forecast(train, setting, monkeypatch):
    """Of whichever pass."""
    run, rows = new_run(), torch.randint(4, 600, (24, 128))
    timed = machine.timed
    n = len(module.row_shapes()) + 5  # passes, of which two and three are for the estimates
    for held_up in range(n):
        hiccups = iter([50 * (i == held_up) for i in range(n)])

        def with_hiccup(*what, hiccups=hiccups):
            seconds, result = timed(*what)
            return seconds + next(hiccups), result

        monkeypatch.setattr(machine, "timed", with_hiccup)
        assert max(module.take_all_passes(run, rows)) < 25
        assert next(hiccups, None) is None  # all passes were timed


def test_a_budget_that_setting_up_uses_trains_nothing(train, setting):
    setting(budget_hours=1e-6)
    with pytest.raises(SystemExit, match=r"no room for a step .* type a larger --budget_hours$"):
        module.main()
    assert not (Path(train.out_dir) / "README.md").exists()


def test_the_share_of_the_machines_speed_is_that_of_its_best_moment(train, setting, monkeypatch):
    """Other work may have held up the first measurement."""
    speeds = iter([1.0, 1e15])
    monkeypatch.setattr(machine, "matmul_rate", lambda *where: next(speeds))
    shares = []
    report = runlog.Log.report
    monkeypatch.setattr(runlog.Log, "report", lambda log, *x: report(log, *x) or shares.append(log))
    setting(max_steps=1, samples="")
    module.main()
    assert shares[0].throughput()[1] < 1


# Saving and the log


def test_whatever_is_measured_is_logged(train, setting, monkeypatch):
    """Means of the steps since the last line; behind the columns that every log has. A resume that
    measures less keeps what there was."""
    make_loss, train_step, steps = module.make_loss, module.train_step, []

    def with_more(*args):
        loss_fn = make_loss(*args)

        def more(ids, positions, labels):
            sums = loss_fn(ids, positions, labels)
            return sums | {"twice": 2 * sums["loss"].detach(), "token": labels.float().sum()}

        return more

    def noted(run, progress):
        train_step(run, progress)
        steps.append(run.state.last)

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_loss", with_more)
        patch.setattr(module, "train_step", noted)
        setting(max_steps=6, log_every=3, evals=1, samples="")
        module.main()
    lines = {line["step"]: line for line in runlog.read_log(train.out_dir)}
    header = (Path(train.out_dir) / "log.csv").read_text().splitlines()[0].split(",")
    assert header[: len(runlog.COLUMNS)] == runlog.COLUMNS and {"twice", "token"} <= {*header}
    assert "twice" not in lines[0]
    for step, line in list(lines.items())[1:]:
        for name in ("loss", "twice", "token", "grad_norm"):
            wanted = np.mean([last[name] for last in steps[step - 3 : step]])
            assert line[name] == pytest.approx(wanted, rel=1e-5), name
        assert line["twice"] == pytest.approx(2 * line["loss"], rel=1e-5)
        assert 0 < line["token"] < 600
    setting(init="resume", max_steps=9)
    module.main()
    after = runlog.read_log(train.out_dir)
    assert after[: len(lines)] == list(lines.values())
    assert after[-1]["step"] == 9 and "twice" not in after[-1]


def test_a_log_that_cannot_be_written_stops_no_checkpoint(train, setting, monkeypatch, capsys):
    """Its lines wait for the next time."""
    run = new_run()
    log = new_log(run)
    module.train_step(run, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(runlog, "write_text", lambda path, text: (path / "nowhere").read_text())
        log.add_line({"val_loss_15": 6.0, "val_loss_25": 6.1})
        assert not module.save(run, log)
    assert capsys.readouterr().out.count("WARNING: cannot write log.csv") == 2
    assert torch.load(log.folder / "ckpt.pt", weights_only=True)["state"]["step"] == 1
    assert module.save(run, log)
    assert [line["step"] for line in runlog.read_log(log.folder)] == [1]


def test_an_older_checkpoint_goes_on(train, setting):
    """It had the mean of the loss in two fields that are gone, and another name of rows_seen."""
    run = new_run()
    log = new_log(run)
    module.train_step(run, 0.5)
    assert module.save(run, log)
    path = log.folder / "ckpt.pt"
    ckpt = torch.load(path, weights_only=True)
    for name in ("sums", "tensors"):
        del ckpt["state"][name]
    old = {"loss_sum": 6.4, "loss_count": 1, "row": ckpt["state"].pop("rows_seen")}
    torch.save(ckpt | {"state": ckpt["state"] | old}, path)
    again = new_run()
    module.checkpoint.load(again, path)
    assert again.state.step == 1 and again.state.sums == {}
    assert again.state.rows_seen == run.state.rows_seen > 0
    module.train_step(again, 0.6)
    assert again.state.step == 2


def test_what_a_fork_keeps_is_read_again_or_refused(train, setting, capsys):
    run = new_run()
    log = new_log(run)
    with pytest.raises(AttributeError):
        run.state.means = {}  # no field: it would not come back
    run.state.last = {"count": np.float64(1.5)}
    assert not module.save(run, log)
    said = capsys.readouterr().out
    assert "WARNING: cannot save" in said and "cannot be read again: Unsupported global" in said
    assert not (log.folder / "ckpt.pt").exists()


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_weights_stay(train, setting, offload):
    """Weight decay included, with AdamW and with Muon; the others learn as they should."""
    for optimizer in ("adamw",) if offload else ("adamw", "muon"):
        setting(offload=offload, optimizer=optimizer, weight_decay=0.1, zero_init=False)
        run = new_run()
        embeddings, first, _ = run.model.model.embeddings, *run.model.model.layers
        before = {name: p.clone() for name, p in run.model.named_parameters()}
        for p in (*embeddings.parameters(), *first.parameters()):
            p.requires_grad_(False)
        for _ in range(2):
            module.train_step(run, 0.5)
        for name, p in run.model.named_parameters():
            assert torch.equal(p, before[name]) != p.requires_grad, name


def test_rates_that_share_a_column_show_the_largest(train):
    run = new_run()
    for group, peak in zip(run.optimizers[0].param_groups, (0.02, 0.01), strict=True):
        group["peak_lr"] = peak
    module.train_step(run, 0.2)
    assert run.state.last["lr"] == pytest.approx(0.02)


def test_a_forks_tensors_survive_a_resume(train, setting):
    run = new_run()
    run.state.tensors["mean"] = torch.randn(3, 2, requires_grad=True)
    assert module.save(run, new_log(run))
    again = new_run()
    module.checkpoint.load(again, Path(train.out_dir) / "ckpt.pt")
    assert torch.equal(again.state.tensors["mean"], run.state.tensors["mean"])


def test_the_log_has_the_rates_of_both_optimisers(train, setting):
    """A rate that is typed at a resume counts from there on."""
    setting(max_steps=4, log_every=1, samples="")
    module.main()
    setting(init="resume", max_steps=8, lr=0.001, muon_lr=0.02)
    module.main()
    rows = {row["step"]: row for row in runlog.read_log(train.out_dir) if "lr" in row}
    for step, steps, lr, muon_lr in ((3, 4, 0.004, 0.01), (7, 8, 0.001, 0.02)):
        share = module.lr_scale((step - 1) / steps)
        assert rows[step]["lr"] == pytest.approx(lr * share, rel=1e-5)
        assert rows[step]["muon_lr"] == pytest.approx(muon_lr * share, rel=1e-5)


def test_the_log_survives_a_cut_line_and_a_resume(train, setting):
    setting(max_steps=6, samples="")
    train.main()
    path = Path(train.out_dir) / "log.csv"
    rows = runlog.read_log(train.out_dir)
    with open(path, "a") as f:
        f.write("9,8,7\n\n15.0,3")  # after the checkpoint; then a kill in the middle of a line
    assert runlog.read_log(train.out_dir)[: len(rows)] == rows
    setting(init="resume", max_steps=8)
    train.main()
    after = runlog.read_log(train.out_dir)
    steps = [row["step"] for row in after]
    assert after[: len(rows)] == rows and steps == sorted(set(steps)) and steps[-1] == 8


def test_wandb_gets_every_row(train, setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    setting(max_steps=4, wandb_project="mine")
    with pytest.raises(SystemExit, match="pip install wandb"):
        train.main()
    assert not Path(train.out_dir).exists()
    refuses = types.SimpleNamespace(init=lambda **facts: (_ for _ in ()).throw(Exception("no key")))
    monkeypatch.setitem(sys.modules, "wandb", refuses)
    with pytest.raises(SystemExit, match=r"^wandb: no key: type wandb login"):
        train.main()
    seen = []
    logger = types.SimpleNamespace(log=lambda row, step: seen.append((step, dict(row))), id="abc")
    fake = types.SimpleNamespace(init=lambda **facts: seen.append(facts) or logger)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train.main()
    assert seen[0]["project"] == "mine" and seen[0]["config"]["max_steps"] == 4
    rows = runlog.read_log(train.out_dir)
    assert {step for step, _ in seen[1:]} == {row["step"] for row in rows} == {0, 2, 4}
    assert seen[-1][1]["val_loss_15"] == pytest.approx(rows[-1]["val_loss_15"], rel=1e-5)
    seen.clear()
    setting(max_steps=6, init="resume")
    train.main()  # goes on with the same run of theirs
    assert seen[0]["id"] == "abc" and {step for step, _ in seen[1:]} == {6}


# Setting up

SLIPS = [
    ({"budget_hours": 0.0}, "a budget of 0 trains nothing"),
    ({"batch_size": 20}, "must be multiples of micro_batch=8: 20 is none"),
    ({"schedule": "wave"}, "schedule=wave is unknown"),
    ({"seq_len": 64}, "type --seq_len=128"),
    ({"vocab_size": 32768}, "type --vocab_size=600"),
    ({"row_shape": lambda progress: (48, 9)}, "row_shape() returns 48, 9"),
    ({"row_shape": lambda progress: (128, 9 + int(9 * progress)), "compile": True}, "compiles 7"),
    ({"row_shape": lambda progress: (64, 0)}, "row_shape() returns 64, 0"),
    ({"row_shape": lambda progress: (64.0, 9)}, "row_shape() returns 64.0, 9"),
    ({"optimizer": "none"}, "optimizer=none is unknown"),
    ({"mask_rate": 0.0}, "mask_rate=0.0 cannot work: type 0.001 to 0.9"),
    ({"n_head": 3}, "n_embd=32 must be an even multiple of n_head=3"),
    ({"data_dir": "nowhere"}, "run python prepare.py"),
    ({"init": "resume"}, "ckpt.pt not found"),
    ({"init": "scrach"}, "init must be scratch, resume, auto or a model folder: scrach is no"),
    ({"samples": "no mask here"}, "each sentence needs one"),
    ({"offload": True}, "type --optimizer=adamw"),
    ({"device": "cuda"}, "device=cuda, but this build of torch sees no such device"),
]


@pytest.mark.parametrize(("settings", "message"), SLIPS)
def test_slips_are_one_line(train, setting, tmp_path, settings, message):
    """Before anything is written."""
    setting(**settings)
    with pytest.raises(SystemExit) as end:
        train.main()
    assert message in str(end.value) and "\n" not in str(end.value)
    assert not (tmp_path / "out").exists()


def test_what_anybody_else_wrote_is_left_alone(train, tmp_path):
    file = tmp_path / "out" / "thesis.tex"
    file.parent.mkdir()
    file.write_text("precious")
    with pytest.raises(SystemExit, match=r"holds no run of train\.py: choose another --out_dir"):
        train.main()
    assert file.read_text() == "precious"


def test_a_run_that_cannot_be_moved_aside_is_left_alone(train, setting, tmp_path, monkeypatch):
    """A disk is mounted there."""
    (tmp_path / "out").mkdir()
    for name in ("run.json", "precious"):
        (tmp_path / "out" / name).write_text("{}")

    def busy(path, goal):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        with pytest.raises(
            SystemExit, match=r"busy\): type --init=auto to continue it, or --out_d"
        ):
            train.main()
    setting(init="auto", max_steps=1, samples="")
    train.main()  # without a checkpoint there is nothing to go on from
    assert (tmp_path / "out.1" / "precious").exists()


def test_a_run_that_was_killed_before_its_first_save_begins_anew(train, setting, monkeypatch):
    """By the same command, where nothing can be moved aside either."""
    setting(init="auto", max_steps=1, samples="")
    with monkeypatch.context() as patch:
        patch.setattr(module, "set_up", lambda *what: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            module.main()
    (Path(train.out_dir) / "ckpt.pt.tmp").write_text("half")
    monkeypatch.setattr(Path, "rename", None)
    module.main()
    assert [line["step"] for line in runlog.read_log(train.out_dir)] == [0, 1]
    assert not (Path(train.out_dir) / "ckpt.pt.tmp").exists()


def test_a_gpu_that_torch_cannot_use_is_one_line(monkeypatch):
    """A day on the CPU would be a surprise, unless the user hides the GPU or asks for the CPU."""
    monkeypatch.setattr(machine, "Path", lambda name: ROOT)  # its driver is there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.pick("auto", "float32")[0].type == "cpu"  # the tests hide it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.pick("cpu", "float32")[0].type == "cpu"
    with pytest.raises(SystemExit, match="--device=cpu"):
        machine.pick("auto", "float32")


def test_a_run_needs_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    facts = machine.describe(torch.device("cpu"))
    assert facts["commit"] == "unknown" and facts["torch"] == torch.__version__


def test_a_compiler_that_fails_is_one_line(train, setting, monkeypatch):
    compile_ = torch.compile

    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, backend=broken, **how))
    setting(compile=True, max_steps=2)
    with pytest.raises(SystemExit, match=r"torch\.compile fails here .*--compile=False") as end:
        train.main()
    assert "\n" not in str(end.value)


# While micro_batch is sought, the process may take so many bytes more than it has.
LIMITED = """
import resource
import train
from nanocram import machine
machine.keep_freed_memory = lambda: None
machine.matmul_rate = lambda *where: 1e12
set_up = train.set_up

def limited(*args):
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 200_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        return set_up(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

train.set_up = limited
vars(train).update(SETTINGS)
train.main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by Linux's means")
def test_micro_batch_halves_until_it_fits_in_a_real_limit(train, setting):
    """A resume, which has no limit here, keeps what fitted: another size would draw other masks."""
    rows = {"micro_batch": 1024, "batch_size": 1024, "batch_start": 1024}
    setting(**rows, max_steps=1, samples="", mask_rate_end=module.mask_rate)
    settings = {name: getattr(module, name) for name in module.SETTINGS}
    command = [sys.executable, "-c", LIMITED.replace("SETTINGS", repr(settings))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "micro_batch=512, since a larger one ran out of memory\n" in done.stdout
    assert "1 steps, 0 of them skipped; 131,072 tokens" in done.stdout

    def used():
        return json.loads(Path(train.out_dir, "run.json").read_text())["settings"]["micro_batch"]

    fitted = used()
    assert fitted < 1024
    setting(init="resume", max_steps=2)
    train.main()
    assert used() == fitted


def test_a_single_row_that_does_not_fit_is_one_line(train, setting, monkeypatch):
    def full(*batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "make_loss", lambda *args: full)
    setting(micro_batch=3, batch_size=6, batch_start=3)
    with pytest.raises(SystemExit, match="with a single row: use a smaller model"):
        train.main()
