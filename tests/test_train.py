import functools
import json
import math
import shutil
import subprocess
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PLOT, ROOT, SMALL_MODEL, model_config, new_log, new_run, put
from hypothesis import given
from hypothesis import strategies as st

import train as module
from model import MaskedLM
from nanocram import checkpoint, fit, machine, record, safety

PROGRESS = st.floats(0, 1)


@pytest.fixture
def setting(monkeypatch):
    """Set globals of train.py."""
    return functools.partial(put, monkeypatch, module)


def test_trapezoid(setting):
    setting(schedule="trapezoid", warmup=0.01, cooldown=0.65)
    assert [module.lr_scale(p) for p in (0, 0.005, 0.01, 0.2, 0.35, 1)] == pytest.approx(
        [0, 0.5, 1, 1, 1, 0]
    )
    assert module.lr_scale(1) == 0
    assert module.lr_scale(0.675) == pytest.approx(0.5)
    setting(warmup=0.0, cooldown=0.0)
    assert module.lr_scale(0) == module.lr_scale(1) == 1


def test_constant(setting):
    setting(schedule="constant", warmup=0.1)
    assert [module.lr_scale(p) for p in (0, 0.05, 0.1, 0.5, 1)] == [0, 0.5, 1, 1, 1]


def test_a_run_that_learns_nothing_is_warned_of(setting):
    """At the evaluation of an eighth of a budget of an hour or more, once, and no other."""
    setting(evals=20, budget_hours=24.0, max_steps=0)
    assert [n for n in range(21) if module.is_hopeless(n, n - 1, 6.1)] == [3]
    assert module.is_hopeless(5, 1, 6.1)  # those between were left out for want of time
    assert not module.is_hopeless(3, 2, 5.9)
    setting(budget_hours=0.05)
    assert not module.is_hopeless(3, 2, 6.1)
    setting(budget_hours=24.0, max_steps=500)
    assert not module.is_hopeless(3, 2, 6.1)
    setting(max_steps=0, evals=0)
    assert not module.is_hopeless(0, -1, 10.4)
    setting(evals=8)
    assert [n for n in range(9) if module.is_hopeless(n, n - 1, 6.1)] == [1]


def test_a_loss_that_rises_is_told_once(setting):
    """A hundred steps in a row a nat above the best, in a run of an hour or more."""

    def told(losses):
        lines = []
        state = module.State()
        for loss in losses:
            state.last = {"loss": loss}
            module.warn_of_a_rise(state, types.SimpleNamespace(say=lines.append))
        return len(lines) > 0, sum("--init=resume" in line for line in lines)

    setting(budget_hours=24.0, max_steps=0)
    assert told([5.0] + [6.5] * 250) == (True, 1)
    assert told([5.0] + [6.5] * 99) == (False, 0)
    assert told([5.0] + [6.5] * 60 + [5.9] + [6.5] * 60) == (False, 0)
    assert told([5.0, math.nan] + [5.9] * 250) == (False, 0)
    setting(max_steps=500)
    assert told([5.0] + [6.5] * 250) == (False, 0)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_cosine_and_linear(setting, schedule):
    setting(schedule=schedule, warmup=0.1)
    assert module.lr_scale(0.05) == pytest.approx(0.5)
    assert module.lr_scale(0.1) == 1 and module.lr_scale(1) == 0
    assert module.lr_scale(0.55) == pytest.approx(0.5)
    quarter = {"linear": 0.75, "cosine": 0.5 + 0.5 * math.cos(math.pi / 4)}[schedule]
    assert module.lr_scale(0.1 + 0.9 / 4) == pytest.approx(quarter)
    setting(warmup=0.0)
    assert module.lr_scale(0) == 1


@given(
    PROGRESS,
    PROGRESS,
    st.sampled_from(["trapezoid", "triangle", "cosine", "linear"]),
    st.sampled_from([0, 0.01]),
)
def test_rates_stay_in_range_and_fall_at_the_end(a, b, schedule, warmup):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "schedule", schedule)
        patch.setattr(module, "warmup", warmup)
        assert 0 <= module.lr_scale(a) <= 1 and module.lr_scale(1.0) == 0
        low, high = sorted((0.76 + 0.24 * a, 0.76 + 0.24 * b))
        assert module.lr_scale(low) >= module.lr_scale(high)


@given(PROGRESS, st.sampled_from([64, 96, 128, 512]))
def test_the_papers_batch_ramp(t, mbs):
    with pytest.MonkeyPatch.context() as patch:
        ramp = {
            "micro_batch": mbs,
            "batch_size": 8192 // mbs * mbs,
            "batch_start": mbs,
            "batch_ramp": 0.6,
        }
        for name, value in ramp.items():
            patch.setattr(module, name, value)
        full = module.batch_size
        assert (
            module.batch_rows(t) == min(mbs * (math.floor(full * t / (0.60 * mbs)) + 1), full)
            or t >= 0.6
        )
        assert (
            module.batch_rows(0) == mbs and module.batch_rows(0.6) == module.batch_rows(1) == full
        )


@given(PROGRESS, PROGRESS)
def test_ramp_never_shrinks_and_masking_never_grows(a, b):
    a, b = sorted((a, b))
    assert module.batch_start <= module.batch_rows(a) <= module.batch_rows(b) <= module.batch_size
    assert module.batch_rows(a) % module.micro_batch == 0
    assert module.mask_count(a) >= module.mask_count(b)
    assert (module.mask_count(0), module.mask_count(1)) == (38, 19)


@given(st.floats(0.01, 0.9), st.floats(0.01, 0.9), PROGRESS)
def test_positions_hold_the_masks_in_three_sizes_at_most(rate, rate_end, progress):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mask_rate", rate)
        patch.setattr(module, "mask_rate_end", rate_end)
        sizes = module.padded_counts()
        assert 1 <= len(sizes) <= 3
        n_predict = module.mask_count(progress)
        padded = min(size for size in sizes if size >= n_predict)
        spread = abs(module.mask_count(0) - module.mask_count(1))
        assert padded <= n_predict + math.ceil(spread / 3)
        counts = {module.mask_count(i / 200) for i in range(201)}
        assert {min(size for size in sizes if size >= count) for count in counts} == set(sizes)


def test_a_masking_rate_may_rise_and_fall(train, setting, monkeypatch):
    """README invites to edit mask_count: its extremes need not be at the ends of the run."""
    monkeypatch.setattr(module, "mask_count", lambda p: 4 + round(12 * math.sin(math.pi * p)))
    assert module.padded_counts() == [8, 12, 16]
    run = new_run()
    for progress, n_positions in ((0, 8), (0.1, 8), (0.2, 12), (0.5, 16), (0.9, 8), (1, 8)):
        n_predict = module.mask_count(progress)
        _, positions, labels = module.batch_at(run, 0, n_predict)
        assert positions.shape[1] == n_positions
        assert ((labels >= 0).sum(dim=1) == n_predict).all()
    _, positions, labels = module.batch_at(run, 0, 17)  # a peak that no moment looked at has shown
    assert positions.shape[1] == 17 and (labels >= 0).all()


def test_fewer_positions_are_the_same_masks_and_the_same_loss(train, setting):
    setting(zero_init=False, mask_rate=0.3, mask_rate_end=0.15, random_token_share=0.0)
    run = new_run()
    n_predict = module.mask_count(1)
    ids, positions, labels = module.batch_at(run, 0, n_predict)
    assert positions.shape[1] == module.padded_counts()[0] < module.padded_counts()[-1]
    torch.manual_seed(int(np.random.SeedSequence((module.seed, 0)).generate_state(1)[0]))
    rows = run.rows.read(0, module.micro_batch)
    with_room_for_all = module.draw_masks(rows, run.padded_counts[-1], n_predict)
    assert torch.equal(ids, with_room_for_all[0])
    # The mean of the plain model's loss at the masks, which are where ids and rows differ.
    masked = ids != rows
    logits = run.model(ids)
    expected = torch.nn.functional.cross_entropy(logits[masked], rows[masked], reduction="sum")
    assert masked.sum() == n_predict * len(rows)
    assert torch.allclose(run.loss_fn(ids, positions, labels), expected, rtol=1e-5)


def test_no_ramp_needs_no_batch_start(setting):
    setting(batch_ramp=0.0, micro_batch=96, batch_size=96)
    assert module.batch_start % 96 and module.batch_rows(0) == 96
    module.check_settings()


def small():
    sizes = {"vocab_size": 90, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_inner": 24}
    return MaskedLM(model_config(**sizes, norm_bias=True, head_transform=True))


def test_muon_without_a_matrix_is_refused(setting):
    """Where a fork renames its blocks AdamW would take all, at a rate that is not its own."""
    setting(optimizer="muon")
    with pytest.raises(SystemExit, match="Muon finds no matrix"):
        module.build_optimizers({"model.blocks.0.weight": torch.nn.Parameter(torch.zeros(2, 2))})


def test_muon_gets_the_blocks_matrices_and_nothing_else_decays_but_tables(setting):
    setting(optimizer="muon", weight_decay=0.1, muon_weight_decay=0.2)
    model = small()
    adam, muon = module.build_optimizers(dict(model.named_parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    assert matrices == {
        f"model.layers.{i}.{m}.weight"
        for i in (0, 1)
        for m in ("attn.Wq", "attn.Wk", "attn.Wv", "attn.Wo", "mlp.Wi", "mlp.Wo")
    }
    decay = {names[id(p)]: g["weight_decay"] for g in adam.param_groups for p in g["params"]}
    assert set(decay) | matrices == set(names.values()) and not set(decay) & matrices
    assert {k for k, w in decay.items() if w} == {
        "model.embeddings.tok_embeddings.weight",
        "head.dense.weight",
    }


def test_muon_leaves_gains_of_two_dimensions_alone(setting):
    """Of a fork: a norm for each head; and it may give its tables another optimiser."""
    setting(optimizer="muon", weight_decay=0.1)
    names = "model.layers.0.attn.Wq.weight", "model.layers.0.attn.q_norm.weight"
    matrix, gain = (torch.nn.Parameter(torch.ones(2, 2)) for _ in names)
    adam, muon = module.build_optimizers(dict(zip(names, (matrix, gain), strict=True)))
    assert muon.param_groups[0]["params"] == [matrix]
    assert [g["weight_decay"] for g in adam.param_groups if g["params"]] == [0.0]
    gain.grad = torch.ones(2, 2)
    adam.step()
    assert (gain < 1).all()


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)]
)
def test_adam_and_adamw_hold_everything(setting, name, kind):
    setting(optimizer=name, weight_decay=0.1)
    model = small()
    (only,) = module.build_optimizers(dict(model.named_parameters()))
    assert type(only) is kind
    assert {id(p) for g in only.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters()
    }


@pytest.mark.parametrize("rate_end", [0.3, 0.15])
def test_accumulation_gives_the_gradient_of_one_big_batch(train, setting, monkeypatch, rate_end):
    """Gradients of a step of 8 micro-batches against one plain loss over all their rows."""
    # With zero_init half of the gradients would be zero on both sides.
    setting(zero_init=False, batch_size=64, batch_start=64, mask_rate_end=rate_end)
    run = new_run()
    n = module.mask_count(0.5)
    parts = [module.batch_at(run, row, n) for row in range(0, 64, 8)]
    ids, positions, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    logits = run.model(ids)[torch.arange(64)[:, None], positions]
    keep = labels != -100
    assert keep.sum() == 64 * n
    torch.nn.functional.cross_entropy(logits[keep], labels[keep]).backward()
    expected = {k: p.grad.clone() for k, p in run.model.named_parameters()}
    run.model.zero_grad()
    seen = {}

    def clip(parameters, limit, norm):
        seen.update({k: p.grad.clone() for k, p in run.model.named_parameters()})

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", clip)
    module.train_step(run, 0.5)
    for name, gradient in expected.items():
        assert torch.allclose(seen[name], gradient, atol=1e-6), name


SYNCHRONISE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_synchronisation_a_step(train, setting, monkeypatch, amp_dtype):
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


def test_micro_batches_are_a_function_of_seed_and_row(train, setting):
    run = new_run()
    a = module.batch_at(run, 16, 5)
    torch.rand(3)
    module.batch_at(run, 0, 5)
    b = module.batch_at(run, 16, 5)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    setting(seed=1)
    assert not torch.equal(a[1], module.batch_at(run, 16, 5)[1])


def times(loss_fn, factor):
    return lambda *batch: loss_fn(*batch) * factor


def test_unusable_steps_are_skipped_and_counted(train):
    run = new_run()
    module.train_step(run, 0.5)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    good = run.loss_fn
    run.loss_fn = times(good, float("nan"))
    for _ in range(3):
        module.train_step(run, 0.5)
    assert run.state.skipped == run.state.consecutive_skips == 3
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    run.loss_fn = good
    module.train_step(run, 0.5)
    assert run.state.consecutive_skips == 0 and run.state.skipped == 3
    assert any(not torch.equal(v, before[k]) for k, v in run.model.state_dict().items())


def test_nothing_is_saved_while_steps_are_skipped(train, setting):
    """What makes gradients unusable may be the weights: the checkpoint before them stands."""
    setting(max_steps=9)
    run = new_run()
    log = new_log(run)
    module.train_step(run, 0.5)
    assert module.save_is_due(run) and module.save(run, log)
    kept = (log.folder / "ckpt.pt").read_bytes()
    good = run.loss_fn
    module.train_step(run, 0.5)
    run.loss_fn = times(good, float("nan"))
    module.train_step(run, 0.5)
    run.next_save = 0.0
    assert not module.save_is_due(run) and not module.save(run, log)
    assert (log.folder / "ckpt.pt").read_bytes() == kept
    run.loss_fn = good
    module.train_step(run, 0.5)
    assert module.save_is_due(run) and module.save(run, log)


def test_float16_scaler_skips_overflow_and_recovers(train):
    run = new_run(torch.float16)
    assert run.scaler.is_enabled()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for _ in range(60):
        module.train_step(run, 0.5)
        if not run.state.consecutive_skips:
            break
    assert run.state.skipped > 0 and run.state.consecutive_skips == 0
    assert run.scaler.get_scale() < 2.0**40


def stop_clock(monkeypatch, run, now):
    monkeypatch.setattr(run.clock, "elapsed", lambda: now)


def test_the_reserve_is_kept_for_the_last_evaluation_and_save(train, setting, monkeypatch):
    setting(budget_hours=100 / 3600)
    run = new_run()
    state, clock = run.state, run.clock
    stop_clock(monkeypatch, run, 44.0)
    assert clock.progress() == pytest.approx(0.44)
    state.eval_seconds, state.save_seconds = 8.0, 2.0
    assert clock.progress() == pytest.approx(44 / 88)
    state.setup_seconds = 28.0  # of the budget, but the schedule begins after it
    assert clock.progress() == pytest.approx(16 / 60)
    stop_clock(monkeypatch, run, 88.1)
    assert clock.progress() == 1
    state.step, state.evals_done, state.logged = 5, 0, 5
    for run.saved_steps in (-1, 4):  # not yet saved by this process, and due again
        stop_clock(monkeypatch, run, 87.0)  # 1 s is left
        assert not module.evaluation_is_due(run, 17) and not module.save_is_due(run)
        stop_clock(monkeypatch, run, 85.0)  # 3 s: too little for an evaluation, enough for a save
        assert not module.evaluation_is_due(run, 17) and module.save_is_due(run)
    stop_clock(monkeypatch, run, 79.0)
    assert module.evaluation_is_due(run, 17)


def test_the_first_saves_know_what_the_last_one_will_write(train, setting, monkeypatch):
    """One before the first step, one after it, when the optimisers have states, and the last."""
    setting(max_steps=4, checkpoint_minutes=0.0)
    save, saves = module.save, []

    def noted(run, log):
        saves.append((run.state.step, all(len(o.state) for o in run.optimizers)))
        return save(run, log)

    monkeypatch.setattr(module, "save", noted)
    module.main()
    assert saves == [(0, False), (1, True), (4, True)]
    setting(init="resume", max_steps=6)
    module.main()
    assert saves[3:] == [(4, True), (6, True)]


def test_a_skipped_step_leaves_the_optimisers_without_a_state(train, setting):
    """So the save that knows what the last one will write waits for a step that is applied."""
    setting(max_steps=9)
    run, saves = new_run(), []
    log = new_log(run)
    for step, skipped in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 2)):
        run.state.step, run.state.skipped = step, skipped
        if module.save_is_due(run):
            saves.append(step)
            assert module.save(run, log)
    assert saves == [0, 3]


def test_a_failed_save_is_tried_again_after_a_minute(train, setting, monkeypatch):
    """It does not count as one: neither for the time of the next nor for the reserve."""
    setting(max_steps=9, checkpoint_minutes=5.0)
    run, now = new_run(), [1000.0]
    log = new_log(run)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert module.save(run, log) and run.state.save_seconds == 0
    run.state.step = 1
    assert module.save(run, log) and not module.save_is_due(run)
    now[0] += 301
    assert not module.save_is_due(run)  # there is nothing new
    run.state.step = 2
    assert module.save_is_due(run)

    def full(*args, **options):
        now[0] += 20
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        assert not module.save(run, log)
    assert run.saved_steps == 1 and run.state.save_seconds == 0
    now[0] += module.RETRY_SECONDS - 1
    assert not module.save_is_due(run)
    now[0] += 1
    assert module.save_is_due(run) and module.save(run, log) and not module.save_is_due(run)


def test_the_last_save_is_tried_once(train, setting, monkeypatch):
    setting(max_steps=2)
    save, saves = module.save, []

    def failing_at_the_end(run, log):
        saves.append(run.state.step)
        return save(run, log) if run.state.step < 2 else False

    monkeypatch.setattr(module, "save", failing_at_the_end)
    with pytest.raises(SystemExit) as e:
        module.main()
    assert e.value.code == 1 and saves == [0, 1, 2]


@pytest.mark.parametrize(
    ("spent", "reached"),
    [
        # a reserve of 37.2 s: what was over stays over where saving is slow
        ({"eval_seconds": 1.0, "save_seconds": 30.0, "elapsed": 65.0}, 1),
        # compiling is no part of the schedule after a resume either
        ({"setup_seconds": 20.0, "elapsed": 60.0}, 40 / 80),
    ],
)
def test_a_resumed_clock(train, setting, spent, reached):
    setting(budget_hours=100 / 3600)
    run, other = new_run(), new_run()
    for name, seconds in spent.items():
        setattr(run.state, name, seconds)
    checkpoint.write(run, new_log(run).folder, "muon")
    checkpoint.restore(other, module.out_dir, "muon")
    assert module.Clock(other.state).progress() == pytest.approx(reached, abs=0.02)


def compile_and_fit(run, must_compile=False):
    fit.compile_and_fit(
        run, lambda: module.rehearse(run, held_out_rows(run)), must_compile, safety.Signals()
    )


def held_out_rows(run):
    return run.rows.read(0, 9)


def test_compiled_equals_eager(train, setting):
    """Loss and every gradient of a compiled micro-batch against eager ones."""
    setting(n_layer=1, compile=True, mask_rate_end=0.3)  # one shape to compile, not three
    run = new_run()
    batch, eager = module.batch_at(run, 0, 20), run.loss_fn
    compile_and_fit(run)
    assert run.loss_fn is not eager and run.compiled
    gradients = []
    for loss_fn in (run.loss_fn, eager):
        run.model.zero_grad()
        value = loss_fn(*batch)
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in run.model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def broken_compiler(f, **options):
    def call(*args):
        raise RuntimeError("no compiler\nlong trace")

    return call


def broken_in_evaluation(f, **options):
    def call(*args):
        return f(*args) if torch.is_grad_enabled() else broken_compiler(f)()

    return call


@pytest.mark.parametrize("broken", [broken_compiler, broken_in_evaluation])
def test_a_short_run_goes_on_without_a_compiler(train, setting, monkeypatch, capsys, broken):
    """Its record says so; the model trains on, with dropout, where an evaluation failed."""
    setting(compile=True, max_steps=2)
    monkeypatch.setattr(torch, "compile", broken)
    run = new_run()
    eager = run.loss_fn
    compile_and_fit(run)
    assert run.loss_fn is eager and run.model.training
    first, said = capsys.readouterr().out.splitlines()
    assert "compiling" in first and "no compiler" in said
    train.main()
    assert run_json(train)["settings"]["compile"] is False


def test_a_ramp_of_a_fork_whose_steps_are_no_whole_micro_batches(train, monkeypatch):
    monkeypatch.setattr(module, "batch_rows", lambda progress: 8 if progress < 0.5 else 12)
    with pytest.raises(SystemExit, match=r"batch_rows\(\) gives 12, no multiple of micro_batch=8"):
        train.main()


def test_a_long_run_without_a_compiler_ends_at_once(train, setting, monkeypatch):
    """Eager costs a third of a day: the user is to decide."""
    setting(compile=True, budget_hours=1.0)
    monkeypatch.setattr(torch, "compile", broken_compiler)
    with pytest.raises(SystemExit, match=r"no compiler.*--compile=False") as e:
        train.main()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget_hours": 0.0}, "a budget of 0 trains nothing"),
        (
            {"batch_size": 20},
            "batch_size=20 is no multiple of micro_batch=8: type for example --batch_size=16",
        ),
        ({"batch_start": 12}, "batch_start=12 is no multiple"),
        ({"optimizer": "sgd"}, "optimizer=sgd"),
        ({"beta2": 1.0}, "beta"),
        ({"lr": -1.0}, "rate"),
        ({"muon_lr": -1.0}, "Muon's rate"),
        (
            {"mask_token_share": 0.8, "random_token_share": 0.3},
            "random_token_share=0.3 cannot work",
        ),
        ({"mask_rate": 1.5}, "mask_rate=1.5 cannot work: it must be between"),
        ({"seq_len": 64}, "type --seq_len=128"),
        ({"vocab_size": 32768}, "type --vocab_size=600"),
        ({"n_head": 3}, "n_embd=32 must be an even multiple of n_head=3"),
        ({"data_dir": "nowhere"}, "run python prepare.py"),
        ({"init": "resume"}, "ckpt.pt not found"),
        ({"samples": "no mask here"}, "each sentence needs one"),
        (
            {"samples": "very " * 600 + "long [MASK]."},
            "samples: a sentence has more than 512 tokens",
        ),
        ({"offload": True}, "type --optimizer=adamw"),
        ({"device": "cuda"}, "device=cuda, but this build of torch sees no such device"),
        ({"device": "mps"}, "device=mps, but this build of torch sees no such device"),
    ],
)
def test_slips_are_one_line(train, setting, tmp_path, settings, message):
    setting(**settings)
    with pytest.raises(SystemExit) as e:
        train.main()
    assert message in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out_dir", ["mine", "hidden", "mine/thesis.tex"])
def test_what_anybody_else_wrote_is_left_alone(train, setting, tmp_path, out_dir):
    """Files in the folder, a hidden one, a file of its name."""
    files = [tmp_path / "mine" / "thesis.tex", tmp_path / "hidden" / ".notes"]
    for file in files:
        file.parent.mkdir()
        file.write_text("precious")
    setting(out_dir=str(tmp_path / out_dir))
    with pytest.raises(SystemExit, match=r"holds no run of train\.py: choose another --out_dir"):
        train.main()
    assert all(file.read_text() == "precious" for file in files)


def test_a_gpu_that_torch_cannot_use(train, monkeypatch, tmp_path, capsys):
    """A day on the CPU would be a surprise, unless the user hides the GPU or asks for the CPU."""

    def old_driver():
        system = "The NVIDIA driver on your system is too old (found version 11040)"
        raise RuntimeError(f"{system}. Please update your GPU driver by downloading")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        machine.pick("auto", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.pick("cpu", "auto")[0].type == "cpu"
    with pytest.raises(SystemExit, match=r"GPU: The NVIDIA .* 11040\); update its driver for"):
        train.main()
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(machine, "ON_WINDOWS", True)
    monkeypatch.setattr(machine.shutil, "which", lambda tool: tool == "nvidia-smi")
    with pytest.raises(SystemExit, match=r"for CUDA 13\.0, or install"):
        machine.pick("auto", "auto")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert machine.pick("auto", "auto")[0].type == "cpu"
    assert "is for CPUs and leaves the GPU unused" in capsys.readouterr().out


def test_a_card_without_kernels_is_one_line(train, monkeypatch):
    """is_available() is true for it; the first kernel fails, as torch says it in many lines."""

    def no_kernel(*size, **where):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_…")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch, "ones", no_kernel)
    with pytest.raises(SystemExit) as e:
        train.main()
    said = str(e.value)
    assert "cannot use this Tesla V100-SXM2-16GB: CUDA error: no kernel image is available" in said
    assert "an older CUDA" in said and "type --device=cpu" in said and "\n" not in said
    assert not Path(train.out_dir).exists()


def test_a_card_that_another_process_fills_is_out_of_memory(train, monkeypatch):
    def full(*size, **where):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(SystemExit, match=r"other processes fill this GPU .* CUDA_VISIBLE_DEVICES"):
        machine.pick("cuda", "float32")


def test_cards_with_and_without_bfloat16_do_not_train_together(train, monkeypatch):
    asked = []

    def any_rank(flag):  # another rank is the other way round
        asked.append(flag)
        return True

    monkeypatch.setattr(module.parallel, "any_rank", any_rank)
    with pytest.raises(SystemExit, match="not all ranks have bfloat16"):
        train.main()
    assert asked == [machine.native_bf16("cpu"), not machine.native_bf16("cpu")]


def test_on_windows_only_the_memory_of_the_card_counts(monkeypatch):
    """There a full card goes on with the host's memory, so that micro_batch would never halve."""
    shares = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5e9, 8e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch, "ones", lambda *size, **where: None)
    monkeypatch.setattr(machine, "ON_WINDOWS", False)
    machine.pick("cuda", "float32")
    assert not shares
    monkeypatch.setattr(machine, "ON_WINDOWS", True)
    machine.pick("cuda", "float32")
    assert shares == [pytest.approx(0.95 * 0.75)]


def test_advice_where_memory_runs_out(setting):
    assert "--micro_batch=24 " in module.less_memory(48) and "--offload" in module.less_memory(48)
    assert "--micro_batch=5 " in module.less_memory(25)  # 12 would divide no batch that 25 divides
    setting(offload=True)
    assert "--" not in module.less_memory(1)


def test_the_commit_is_a_hash_whatever_tags_there_are_and_says_what_is_changed(
    tmp_path, monkeypatch
):
    def git(*args):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", *who, *args], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init")
    (tmp_path / "machine.py").write_text("# ours")
    git("add", ".")
    git("commit", "-m", "one")
    git("tag", "-a", "v1", "-m", "one")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    commit = git("rev-parse", "HEAD")
    assert machine.describe(torch.device("cpu"))["commit"] == commit
    (tmp_path / "machine.py").write_text("# changed")
    assert machine.describe(torch.device("cpu"))["commit"] == commit + "-dirty"


def test_git_that_hangs_does_not_hang_a_run(monkeypatch):
    def hangs(command, **how):
        if command[0] == "git":
            raise subprocess.TimeoutExpired(command, how["timeout"])
        return run(command, **how)

    run = subprocess.run

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.describe(torch.device("cpu"))["commit"] == "unknown"


def test_a_curriculum_that_will_not_be_read_once(train, setting):
    """Sorted rows are warned of where the run's rows, by its steps or its speed, are fewer."""
    setting(max_steps=10, batch_ramp=0.0, batch_size=16)
    run = new_run()
    log = new_log(run)

    def foretold(order, count):
        run.meta["settings"]["order"] = order
        run.rows.count = count
        return log.forecast(0.0, module.batch_rows)

    assert "WARNING" not in foretold("shuffle", 320)
    assert "first 50% " in foretold("curriculum", 320)
    assert "--max_rows=160" in foretold("curriculum", 320)
    assert "WARNING" not in foretold("curriculum", 160)

    # By the clock: 80 rows a second for 10 s more.
    setting(max_steps=0, budget_hours=10 / 3600)
    run.clock = module.Clock(run.state)
    run.clock.spent["training"] = 1.0
    run.state.row = 80
    assert "first 50% " in foretold("curriculum", 1760)
    assert "WARNING" not in foretold("curriculum", 880)


def test_offload_and_mps(train, setting, monkeypatch):
    monkeypatch.setattr(machine, "pick", lambda *settings: (torch.device("mps"), torch.float32))
    setting(offload=True, optimizer="adamw")
    with pytest.raises(SystemExit, match="type --device=cpu"):
        train.main()


def test_a_damaged_train_bin_is_one_line(train, setting, data_dir, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    setting(data_dir=str(folder))
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-256])
    with pytest.raises(SystemExit, match=r"train.bin is shorter than meta.json says"):
        train.main()
    (folder / "train.bin").unlink()
    with pytest.raises(SystemExit, match=r"train.bin is missing"):
        train.main()


def test_berts_shares_add_up(train, setting):
    setting(mask_token_share=0.8, random_token_share=0.2)
    module.check_settings()


@pytest.mark.parametrize("part", ["ckpt", "model"])
def test_a_failing_save_is_a_warning(train, monkeypatch, capsys, part):
    """What was there before stands: all of it where the checkpoint fails, which comes first."""
    run = new_run()
    log = new_log(run)
    log.add_row()
    assert module.save(run, log)
    before = {p.name: p.read_bytes() for p in log.folder.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    owner = torch if part == "ckpt" else module.model_folder
    monkeypatch.setattr(owner, "save", full)
    module.train_step(run, 0.5)
    assert not module.save(run, log)
    assert "WARNING: cannot save all to" in capsys.readouterr().out
    if part == "ckpt":
        assert before == {p.name: p.read_bytes() for p in log.folder.iterdir()}


def test_saving_before_the_first_row_of_the_log(train, monkeypatch):
    monkeypatch.setattr(record, "plot", PLOT)
    run = new_run()
    log = new_log(run)
    assert module.save(run, log)
    assert (log.folder / "ckpt.pt").exists() and not (log.folder / "loss.png").exists()


def test_a_run_needs_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    facts = machine.describe(torch.device("cpu"))
    assert facts["commit"] == "unknown" and facts["torch"] == torch.__version__
    assert facts["device"].removeprefix("cpu: ") and facts["date"].startswith("20")


def test_resume_in_another_precision(train):
    run = new_run()
    assert module.save(run, new_log(run))
    again = new_run(torch.float16)
    checkpoint.restore(again, train.out_dir, "muon")
    assert again.scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_log_has_the_rates_of_both_optimisers(train, setting, name):
    setting(optimizer=name, max_steps=4, log_every=1, samples="")
    module.main()
    rows = [row for row in record.read_log(train.out_dir) if "lr" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    shares = [module.lr_scale(step / 4) for step in range(4)]
    assert [row["lr"] for row in rows] == pytest.approx([module.lr * s for s in shares], rel=1e-5)
    if name == "muon":
        wanted = [module.muon_lr * share for share in shares]
        assert [row["muon_lr"] for row in rows] == pytest.approx(wanted, rel=1e-5)
    else:
        assert not any("muon_lr" in row for row in rows)


def test_the_log_survives_a_cut_line_and_a_resume(tmp_path):
    for step in (0, 10, 20):
        record.append_row(
            tmp_path, {"elapsed_s": step / 2, "step": step, "tokens": step * 100, "skipped": 0}
        )
    with open(tmp_path / "log.csv", "a") as f:
        f.write("15.0,3")
    assert [row["step"] for row in record.read_log(tmp_path)] == [0, 10, 20]
    record.drop_rows_after(tmp_path, 10)
    record.append_row(
        tmp_path, {"elapsed_s": 9.0, "step": 20, "tokens": 2000, "skipped": 1, "val_loss_15": 3.25}
    )
    rows = record.read_log(tmp_path)
    assert (
        [row["step"] for row in rows] == [0, 10, 20]
        and rows[-1]["val_loss_15"] == 3.25
        and "lr" not in rows[-1]
    )
    assert json.dumps(rows)
    with open(tmp_path / "log.csv", "a") as f:
        f.write(
            "x,1\n7\n8.0,21,x,y" + ",1" * 20 + '\n"x,1\n'
        )  # what an editor or a bad disk may leave
    record.append_row(tmp_path, {"elapsed_s": 10.0, "step": 30, "tokens": 3000, "skipped": 1})
    assert record.read_log(tmp_path)[:-1] == rows and record.read_log(tmp_path)[-1]["step"] == 30
    text = (tmp_path / "log.csv").read_text()
    merged = text.rstrip("\n") + text.splitlines()[-1] + "\n"  # two lines in one
    (tmp_path / "log.csv").write_text(merged)
    assert record.read_log(tmp_path) == rows
    (tmp_path / "log.csv").write_text(text, encoding="utf-8-sig")
    assert len(record.read_log(tmp_path)) == 4
    for spoilt in (text.partition("\n")[2], text.replace(",", ";")):  # as some tables are saved
        (tmp_path / "log.csv").write_text(spoilt)
        with pytest.raises(SystemExit, match="has no row under the names of its columns: mend it"):
            record.resume(tmp_path, {}, step=10, elapsed=5.0)
        assert (tmp_path / "log.csv").read_text() == spoilt


@pytest.fixture
def small_memory(train, monkeypatch):
    """small_memory(rows): from now on a forward pass of more rows finds no memory."""
    make_loss = module.make_loss
    tried = []

    def limit(most):
        def make_limited(*args):
            loss_fn = make_loss(*args)

            def limited(ids, positions, labels):
                tried.append(len(ids))
                if len(ids) > most:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return loss_fn(ids, positions, labels)

            return limited

        monkeypatch.setattr(module, "make_loss", make_limited)
        return tried

    return limit


def run_json(train):
    return json.loads((Path(train.out_dir) / "run.json").read_text())


def test_micro_batch_halves_until_it_fits(train, setting, small_memory, capsys):
    """The batch stays as it is; a resume keeps what fitted, if asked for the same."""
    tried = small_memory(3)
    setting(micro_batch=8, batch_size=16, batch_start=8, max_steps=4)
    train.main()
    said = capsys.readouterr().out
    assert "out of memory with micro_batch=8: going on with 4" in said
    assert "out of memory with micro_batch=4: going on with 2" in said
    assert max(tried[tried.index(2) :]) == 2  # evaluations too
    facts = run_json(train)
    assert (facts["settings"]["micro_batch"], facts["asked_micro_batch"]) == (2, 8)
    rows = record.read_log(train.out_dir)
    assert rows[-1]["step"] == 4 and {row["batch_size"] for row in rows[1:]} == {8, 16}

    # A resume with the same command goes on with 2 at once; another wish is tried anew.
    setting(init="resume", max_steps=6)
    tried.clear()
    train.main()
    assert set(tried) == {2}
    assert "micro_batch=2, since 8 did not fit in memory" in capsys.readouterr().out
    assert run_json(train)["settings"]["micro_batch"] == 2
    setting(micro_batch=4, max_steps=8)
    tried.clear()
    train.main()
    assert tried[0] == 4


def test_nothing_of_a_failed_try_is_held(train, setting):
    """What the frames of an exception hold would be missing where the next size is tried."""
    setting(compile=True)
    run = new_run()
    held = []

    def broken():
        room = torch.empty(1000)
        held.append(weakref.ref(room))
        run.model.eval()
        for weight in run.model.parameters():
            weight.grad = torch.zeros_like(weight)
        raise RuntimeError("no compiler")

    assert fit.attempt(run, broken) == "no compiler"
    assert held[0]() is None
    assert run.model.training and all(p.grad is None for p in run.model.parameters())


def test_a_micro_batch_of_one_row_that_does_not_fit(train, setting, small_memory):
    small_memory(0)
    setting(micro_batch=3, batch_size=6, batch_start=3, max_steps=4)
    with pytest.raises(SystemExit, match="a smaller model") as e:
        train.main()
    assert "micro_batch" not in str(e.value)


def test_nothing_compiled_for_a_larger_size_stays(train, setting, monkeypatch):
    """What torch keeps of the loss: a graph for each number of places and for evaluations.

    Not those of 8 rows as well, and no more in the whole run."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_(f, backend="eager", **kw))
    rehearse = module.rehearse

    def full_at_its_end(run, rows):
        rehearse(run, rows)
        if run.state.micro_batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "rehearse", full_at_its_end)
    setting(compile=True, n_layer=1, micro_batch=8)
    run = new_run()
    code = run.loss_fn.__code__
    compile_and_fit(run)
    assert run.state.micro_batch == 4
    for n_predict in range(module.mask_count(1), module.mask_count(0) + 1):
        run.loss_fn(*module.batch_at(run, 0, n_predict))
    kept = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    assert len(kept) == 3 + 1


# While compile_and_fit() runs, the process may take so many bytes more than it has.
LIMITED = """
import resource
import train
from nanocram import fit, machine, safety

machine.keep_freed_memory = lambda: None
machine.matmul_rate = lambda *where: 1e12
compile_and_fit = fit.compile_and_fit


def limited(*args, **options):
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 200_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        return compile_and_fit(*args, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


fit.compile_and_fit = limited
for name, value in SETTINGS.items():
    setattr(train, name, value)
safety.run(train.main, "out", "then")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by Linux's means")
def test_a_real_allocator_that_refuses(data_dir, tmp_path):
    """In a real process, whose address space has no room for 1,024 rows at a time."""
    settings = SMALL_MODEL | {"data_dir": str(data_dir), "out_dir": str(tmp_path / "out")}
    settings |= {"micro_batch": 1024, "batch_size": 1024, "batch_start": 1024, "max_steps": 1}
    code = LIMITED.replace("SETTINGS", repr(settings | {"samples": ""}))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "out of memory with micro_batch=1024: going on with 512\n" in done.stdout
    assert "1 steps, 0 of them skipped; 131,072 tokens" in done.stdout
    assert json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["micro_batch"] < 1024


def test_a_card_that_a_forks_columns_do_not_fit_ends_no_run(train, monkeypatch, capsys):
    monkeypatch.setattr(train, "max_steps", 2)
    monkeypatch.setattr(record, "CARD", record.CARD + "{row[val_loss_40]}")
    train.main()
    assert "README.md are not of today (KeyError: 'val_loss_40')" in capsys.readouterr().out
    assert Path(train.out_dir, "model.safetensors").exists()


def test_wandb_gets_every_row_and_is_imported_only_then(train, monkeypatch, tmp_path):
    for name, value in {"max_steps": 4, "wandb_project": "mine"}.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):  # safety.run() says it
        train.main()
    assert not Path(train.out_dir).exists()

    def refuse(**facts):
        raise ConnectionError("api.wandb.ai is away")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(SystemExit, match=r"wandb: .* is away: try wandb login"):
        train.main()
    assert not Path(train.out_dir, "run.json").exists()
    seen = []
    told = types.SimpleNamespace(log=lambda row, step: seen.append((step, dict(row))), id="abc")
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **facts: seen.append(facts) or told)
    )
    train.main()
    assert seen[0]["project"] == "mine" and seen[0]["config"]["max_steps"] == 4
    rows = record.read_log(train.out_dir)
    assert {step for step, _ in seen[1:]} == {row["step"] for row in rows} == {0, 2, 4}
    assert seen[-1][1]["val_loss_15"] == pytest.approx(rows[-1]["val_loss_15"], rel=1e-5)
    seen.clear()
    for name, value in {"max_steps": 6, "init": "resume"}.items():
        monkeypatch.setattr(train, name, value)
    train.main()  # goes on with the same run of theirs
    assert seen[0]["id"] == "abc" and {step for step, _ in seen[1:]} == {6}
    monkeypatch.setattr(train, "init", "scratch")
    monkeypatch.setattr(train, "wandb_project", "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(train, "out_dir", str(tmp_path / "other"))
    train.main()
