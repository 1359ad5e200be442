import math
import signal
import warnings

import pytest
import torch
from test_train import new_run

import train as module
from model import MaskedLM
from nanocram import checkpoint, machine, record
from nanocram import offload as offload_host
from nanocram.model_folder import load


@pytest.fixture
def offloaded(train, monkeypatch):
    """The train module with a model whose gradients are nowhere zero; a process group that offload made is ended."""
    for name, value in {
        "zero_init": False,
        "dropout": 0.1,
        "samples": "",
        "max_steps": 5,
        "evals": 2,
    }.items():
        monkeypatch.setattr(train, name, value)
    yield train
    module.parallel.leave()


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "dtype": "bfloat16"},
        {"optimizer": "adamw", "n_narrow": 2, "n_layer": 3},
        pytest.param(
            {"optimizer": "adamw", "position": "learned", "post_norm": True}, marks=pytest.mark.slow
        ),
        {"optimizer": "adam", "position": "sinusoidal", "head_transform": False, "n_layer": 3},
    ],
)
def test_offload_is_the_plain_run_bit_for_bit(offloaded, monkeypatch, tmp_path, settings):
    """Weights after a run with a batch ramp, dropout and clipping, its losses, and the state of its optimisers."""
    for name, value in settings.items():
        monkeypatch.setattr(offloaded, name, value)
    ends, rows = [], []
    monkeypatch.setattr(signal, "signal", lambda *handler: None)  # pytest keeps its own
    for offload in (False, True):
        monkeypatch.setattr(offloaded, "offload", offload)
        monkeypatch.setattr(offloaded, "out_dir", str(tmp_path / f"{offload}"))
        module.main()
        ends.append(torch.load(tmp_path / f"{offload}" / "ckpt.pt", weights_only=True))
        log = record.read_log(tmp_path / f"{offload}")
        rows.append([{k: v for k, v in row.items() if k != "elapsed_s"} for row in log])
    assert rows[0] == rows[1] and rows[0][-1]["step"] == 5
    plain, other = ends
    assert plain["model"].keys() == other["model"].keys()
    assert all(torch.equal(plain["model"][k], other["model"][k]) for k in plain["model"])
    for ours, theirs in zip(plain["optimizers"], other["optimizers"], strict=True):
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[i][k], theirs[i][k]) for i in ours for k in ours[i])
    a, b = (load(tmp_path / name).state_dict() for name in ("False", "True"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_goes_on_with_and_without_offload(offloaded, monkeypatch, tmp_path):
    """Three steps offloaded and two plain are five plain ones, and the other way round."""
    monkeypatch.setattr(offloaded, "optimizer", "adamw")
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(offloaded, "out_dir", str(tmp_path / f"{first}{second}"))
        monkeypatch.setattr(offloaded, "offload", first)
        run = new_run(offloaded)
        record.open_out(run.folder)
        for step in range(3):
            run.train_step(step / 5)
        run.save(required=True)
        module.parallel.leave()
        monkeypatch.setattr(offloaded, "offload", second)
        run = new_run(offloaded)
        checkpoint.restore(run, "adamw")
        for step in range(3, 5):
            run.train_step(step / 5)
        ends.append({k: w.detach().clone() for k, w in run.weights.items()})
        module.parallel.leave()
    assert all(torch.equal(ends[0][k], end[k]) for end in ends[1:] for k in ends[0])


def test_blocks_are_on_the_device_one_at_a_time_and_nothing_of_them_is_kept(offloaded, monkeypatch):
    """In the forward and the backward pass, in bfloat16; for the backward pass a block keeps its input alone."""
    monkeypatch.setattr(offloaded, "offload", True)
    monkeypatch.setattr(offloaded, "n_layer", 4)
    run = new_run(offloaded, torch.bfloat16)
    blocks, there, seen = run.model.model.layers, {}, []

    def look(i):
        there[i] = blocks[
            i
        ].mlp.Wi.weight  # not the shard in host memory, but what was brought for this
        assert not hasattr(there[i], "to_local") and not torch.is_autocast_cache_enabled()
        seen.append((i, sorted(j for j, w in there.items() if w.untyped_storage().nbytes())))

    for i, block in enumerate(blocks):
        block.attn.register_forward_hook(lambda *_, i=i: look(i))
    run.train_step(0.0)
    assert seen == [(i, [i]) for i in (0, 1, 2, 3, 3, 2, 1, 0)]
    assert not any(w.untyped_storage().nbytes() for w in there.values())
    there.clear()

    def kept(n_layer):
        monkeypatch.setattr(offloaded, "n_layer", n_layer)
        run = new_run(offloaded)
        batch = run.micro_batch_at(0, 20)
        return machine.kept_bytes(lambda: run.loss(*batch), run.weights.values())

    assert (
        kept(5) - kept(4) == 8 * 128 * 32 * 4
    )  # rows, tokens, width, bytes: the fifth block's input, no more


def test_offload_with_a_loss_scale(offloaded, monkeypatch):
    """float16: steps that overflow are skipped, the scale falls, and the weights stay those of the plain run."""
    monkeypatch.setattr(offloaded, "max_steps", 100)
    ends = []
    for offload in (False, True):
        monkeypatch.setattr(offloaded, "offload", offload)
        run = new_run(offloaded, torch.float16)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        while run.state["step"] - run.state["skipped"] < 2:
            assert run.train_step(0.5)
        run.state["step_seconds"] = 0.0
        ends.append(
            (run.state, run.scaler.get_scale(), [w.detach().clone() for w in run.weights.values()])
        )
    (state, scale, weights), (other_state, other_scale, other_weights) = ends
    assert state == other_state and state["skipped"] > 0 and scale == other_scale < 2.0**24
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
def test_the_plan(offloaded, monkeypatch, amp_dtype):
    """Bytes against counts by hand, and activations against what a plain model with one whole block keeps."""
    for name, value in {"offload": True, "optimizer": "adamw", "n_layer": 6}.items():
        monkeypatch.setattr(offloaded, name, value)
    config = module.check_settings()
    plain = MaskedLM(config)
    every = sum(p.numel() for p in plain.parameters())
    blocks = sum(p.numel() for p in plain.model.layers.parameters())
    saving = 4 * 6 * 3 * 32 * 32
    sizes = (amp_dtype, 2, 8, 128, 38)
    on_host, on_device, out, back = offload_host.step_bytes(plain, *sizes, pinned=False)
    assert (on_host, out, back) == (16 * every + saving, 2 * 4 * (blocks + every), 2 * 4 * every)
    pinned = sum(2 ** math.ceil(math.log2(4 * p.numel())) for p in plain.parameters())
    assert offload_host.step_bytes(plain, *sizes, pinned=True)[0] == 2 * pinned + 8 * every + saving

    more = offload_host.step_bytes(plain, amp_dtype, 2, 16, 128, 38, pinned=False)[1] - on_device
    monkeypatch.setattr(offloaded, "offload", False)
    monkeypatch.setattr(offloaded, "n_layer", 2)  # of which the last computes predicted rows alone
    run = new_run(offloaded, amp_dtype)
    batch = run.micro_batch_at(0, 38)
    few, many = ([x.repeat(n, 1) for x in batch] for n in (1, 2))
    rows = [
        machine.kept_bytes(lambda batch=batch: run.loss(*batch), run.weights.values())
        for batch in (few, many)
    ]
    assert more == pytest.approx(rows[1] - rows[0] + 8 * 4 * 128 * 32 * 4, rel=0.35)

    text = offload_host.plan(config, torch.device("cpu"), amp_dtype, 16, 8, 128, 38)
    assert (
        f"offload: {on_host / 1e9:.3g} GB in host memory, about {on_device / 1e9:.3g} GB on the device"
        in text
    )
    assert (
        f"a step of 2 x 8 rows: {(out + back) / 1e9:.3g} GB over the bus" in text
        and len(text.splitlines()) == 2
    )
    assert min(*offload_host.bus_rates(torch.device("cpu")), offload_host.adamw_rate()) > 1e7


def test_the_plan_comes_before_anything_is_made(offloaded, monkeypatch, capsys):
    for name, value in {"offload": True, "optimizer": "adamw"}.items():
        monkeypatch.setattr(offloaded, name, value)

    def too_large(*args):
        raise MemoryError

    monkeypatch.setattr(module, "Run", too_large)
    with pytest.raises(MemoryError):
        module.main()
    assert "GB in host memory" in capsys.readouterr().out


def test_muon_is_refused_with_one_line(offloaded, monkeypatch):
    monkeypatch.setattr(offloaded, "offload", True)
    monkeypatch.setattr(offloaded, "optimizer", "muon")
    with pytest.raises(SystemExit, match="type --optimizer=adamw"):
        module.check_settings()


def test_offload_says_nothing_of_torchs_inside(offloaded, monkeypatch):
    monkeypatch.setattr(offloaded, "offload", True)
    run = new_run(offloaded)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", append=True)
        run.train_step(0.0)
    assert not said
