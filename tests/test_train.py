import functools
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, model_config, new_log, new_run, put

import train as module
from model import MaskedLM
from nanocram import machine, runlog


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
    stages = [module.mask_count(p) for p in (0, 0.249, 0.25, 0.499, 0.5, 0.749, 0.75, 1)]
    assert stages == [38, 38, 32, 32, 26, 26, 19, 19]
    assert module.mask_counts() == [38, 32, 26, 19]
    setting(mask_rate_end=0.3)
    assert module.mask_counts() == [38]


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
    n_predict = module.mask_count(0.5)
    parts = [module.masked_batch(run, row, n_predict) for row in range(0, 64, 8)]
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
    a = module.masked_batch(run, 16, 5)
    torch.rand(3)
    module.masked_batch(run, 0, 5)
    b = module.masked_batch(run, 16, 5)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    setting(seed=1)
    assert not torch.equal(a[1], module.masked_batch(run, 16, 5)[1])


def poisoned(loss_fn):
    return lambda *batch: loss_fn(*batch) * math.nan


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
    batch = module.masked_batch(run, 0, 20)
    gradients = []
    for loss_fn in (run.loss_fn, module.make_loss(run.model, run.device, run.amp_dtype)):
        run.model.zero_grad()
        value = loss_fn(*batch)
        value.backward()
        gradients.append([value.detach(), *(p.grad.clone() for p in run.model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


# The clock


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
    stop_clock(monkeypatch, run, 87.0)  # 1 s is left: too little for a save
    assert not module.should_save(run)
    stop_clock(monkeypatch, run, 85.0)  # 3 s: enough for a save, but for no evaluation
    assert module.should_save(run) and not clock.has_room_for(state.eval_seconds)
    stop_clock(monkeypatch, run, 79.0)
    assert clock.has_room_for(state.eval_seconds)


# Saving and the log


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
    ({"n_head": 3}, "n_embd=32 must be an even multiple of n_head=3"),
    ({"data_dir": "nowhere"}, "run python prepare.py"),
    ({"init": "resume"}, "ckpt.pt not found"),
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
    setting(compile=True)
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
find_micro_batch = train.find_micro_batch

def limited(*args):
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 200_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        return find_micro_batch(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

train.find_micro_batch = limited
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
