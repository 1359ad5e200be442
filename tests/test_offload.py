import functools
import math
import warnings

import pytest
import torch
from conftest import new_run, put, train_step

import train as module
from model import MaskedLM
from nanocram import checkpoint, offload, record
from nanocram.model_folder import load


@pytest.fixture
def setting(train, monkeypatch):
    """Set globals of train.py, whose model has gradients that are nowhere zero.

    A process group that an offloaded model has made is ended."""
    change = functools.partial(put, monkeypatch, module)
    change(zero_init=False, dropout=0.1, samples="", max_steps=5, evals=2, optimizer="adamw")
    yield change
    module.parallel.leave()


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"n_narrow": 2, "n_layer": 3},
        pytest.param({"position": "learned", "post_norm": True}, marks=pytest.mark.slow),
        {"optimizer": "adam", "position": "sinusoidal", "head_transform": False, "n_layer": 3},
    ],
)
def test_offload_is_the_plain_run_bit_for_bit(setting, tmp_path, settings):
    """Weights after a run with batch ramp, dropout and clipping, its losses, its optimisers."""
    setting(**settings)
    ends, rows = [], []
    for on_host in (False, True):
        out = tmp_path / f"{on_host}"
        setting(offload=on_host, out_dir=str(out))
        module.main()
        ends.append(torch.load(out / "ckpt.pt", weights_only=True))
        rows.append([row | {"elapsed_s": 0} for row in record.read_log(out)])
    assert rows[0] == rows[1] and rows[0][-1]["step"] == 5
    plain, other = ends
    assert plain["model"].keys() == other["model"].keys()
    assert all(torch.equal(plain["model"][k], other["model"][k]) for k in plain["model"])
    for ours, theirs in zip(plain["optimizers"], other["optimizers"], strict=True):
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[i][k], theirs[i][k]) for i in ours for k in ours[i])
    a, b = (load(tmp_path / name).state_dict() for name in ("False", "True"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_goes_on_with_and_without_offload(setting, tmp_path):
    """Three steps offloaded and two plain are five plain ones, and the other way round."""
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        setting(offload=first, out_dir=str(tmp_path / f"{first}{second}"))
        run = new_run()
        record.new_folder(run.folder)
        for step in range(3):
            train_step(run, step / 5)
        assert module.save(run)
        module.parallel.leave()
        setting(offload=second)
        run = new_run()
        checkpoint.restore(run, "adamw")
        for step in range(3, 5):
            train_step(run, step / 5)
        ends.append({k: w.detach().clone() for k, w in run.weights.items()})
        module.parallel.leave()
    assert all(torch.equal(ends[0][k], end[k]) for end in ends[1:] for k in ends[0])


def test_blocks_are_on_the_device_one_at_a_time_and_nothing_of_them_is_kept(setting):
    """In forward and backward pass; for the backward pass a block keeps its input alone."""
    setting(offload=True, n_layer=4)
    run = new_run(torch.bfloat16)
    blocks, there, seen = run.model.model.layers, {}, []

    def look(i):
        # Not the shard in host memory, but what was brought for this.
        there[i] = blocks[i].mlp.Wi.weight
        assert not hasattr(there[i], "to_local") and not torch.is_autocast_cache_enabled()
        held = [j for j, weight in there.items() if weight.untyped_storage().nbytes()]
        seen.append((i, sorted(held)))

    for i, block in enumerate(blocks):
        block.attn.register_forward_hook(lambda *_, i=i: look(i))
    train_step(run, 0.0)
    assert seen == [(i, [i]) for i in (0, 1, 2, 3, 3, 2, 1, 0)]
    assert not any(weight.untyped_storage().nbytes() for weight in there.values())
    there.clear()

    def kept(n_layer):
        setting(n_layer=n_layer)
        run = new_run()
        batch = module.batch_at(run, 0, 20)
        return offload.saved_for_backward(lambda: run.loss_fn(*batch), run.weights.values())

    # Rows, tokens, width, bytes: the fifth block's input, no more.
    assert kept(5) - kept(4) == 8 * 128 * 32 * 4


def test_offload_with_a_loss_scale(setting):
    """float16: steps that overflow are skipped, the scale falls, weights stay the plain run's."""
    setting(max_steps=100, optimizer="muon")
    ends = []
    for on_host in (False, True):
        setting(offload=on_host)
        run = new_run(torch.float16)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        while run.state.step - run.state.skipped < 2:
            assert train_step(run, 0.5)
        weights = [w.detach().clone() for w in run.weights.values()]
        ends.append((run.state, run.scaler.get_scale(), weights))
    (state, scale, weights), (other_state, other_scale, other_weights) = ends
    assert state == other_state and state.skipped > 0 and scale == other_scale < 2.0**24
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
def test_the_plan(setting, amp_dtype):
    """Bytes against counts by hand, activations against what a plain model of one block keeps."""
    setting(offload=True, n_layer=6)
    config = module.check_settings()
    plain = MaskedLM(config)
    every = sum(p.numel() for p in plain.parameters())
    saving = 4 * 6 * 3 * 32 * 32
    assert offload.host_bytes(plain, pinned=False) == 16 * every + saving
    pinned = sum(2 ** math.ceil(math.log2(4 * p.numel())) for p in plain.parameters())
    assert offload.host_bytes(plain, pinned=True) == 2 * pinned + 8 * every + saving

    few, many = (offload.device_bytes(plain, amp_dtype, rows, 128, 38) for rows in (8, 16))
    setting(offload=False, n_layer=2)  # of which the last computes predicted rows alone
    run = new_run(amp_dtype)
    batch = module.batch_at(run, 0, 38)
    kept = []
    for n in (1, 2):
        rows = [x.repeat(n, 1) for x in batch]
        forward = functools.partial(run.loss_fn, *rows)
        kept.append(offload.saved_for_backward(forward, run.weights.values()))
    inputs = 8 * 4 * 128 * 32 * 4
    assert many - few == pytest.approx(kept[1] - kept[0] + inputs, rel=0.35)

    text = offload.memory_plan(config, amp_dtype, 8, 128, 38, pinned=False)
    on_host, on_device = offload.host_bytes(plain, False), few
    there = f"about {on_device / 1e9:.3g} GB on the device"
    assert text == f"offload: {on_host / 1e9:.3g} GB in host memory, {there}"


def test_the_plan_comes_before_anything_is_made(setting, monkeypatch, capsys):
    setting(offload=True)

    def too_large(*args):
        raise MemoryError

    monkeypatch.setattr(module, "Run", too_large)
    with pytest.raises(MemoryError):
        module.main()
    assert "GB in host memory" in capsys.readouterr().out


def test_offload_says_nothing_of_torchs_inside(setting):
    setting(offload=True)
    run = new_run()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", append=True)
        train_step(run, 0.0)
    assert not said
