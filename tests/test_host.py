import dataclasses
import warnings

import pytest
import torch
from test_train import new_run

import host
import machine
import record
import train as module
from folder import load
from model import MaskedLM, ModelConfig


@pytest.fixture
def offloaded(train, monkeypatch):
    """The train module with a model whose gradients are nowhere zero; a process group that offload made is ended."""
    for name, value in {"zero_init": False, "dropout": 0.1, "samples": "", "max_steps": 5, "evals": 2}.items():
        monkeypatch.setattr(train, name, value)
    yield train
    module.parallel.leave()


@pytest.mark.parametrize("settings", [
    {"optimizer": "adamw", "dtype": "bfloat16"}, {"optimizer": "muon", "n_narrow": 2, "n_layer": 3},
    {"optimizer": "adamw", "position": "learned", "post_norm": True},
    {"optimizer": "adam", "position": "sinusoidal", "head_transform": False, "n_layer": 3}])  # fmt: skip
def test_offload_is_the_plain_run_bit_for_bit(offloaded, monkeypatch, tmp_path, settings):
    """Weights after a run with a batch ramp, dropout and clipping, its losses, and the state of its optimisers."""
    for name, value in settings.items():
        monkeypatch.setattr(offloaded, name, value)
    ends, rows = [], []
    monkeypatch.setattr(module.signal, "signal", lambda *handler: None)  # pytest keeps its own
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
        run.resume()
        for step in range(3, 5):
            run.train_step(step / 5)
        ends.append({k: w.detach().clone() for k, w in run.weights.items()})
        module.parallel.leave()
    assert all(torch.equal(ends[0][k], end[k]) for end in ends[1:] for k in ends[0])


def test_blocks_are_on_the_device_one_at_a_time_and_nothing_of_them_is_kept(offloaded, monkeypatch):
    """In the forward and the backward pass; for the backward pass a block keeps its input alone."""
    monkeypatch.setattr(offloaded, "offload", True)
    monkeypatch.setattr(offloaded, "n_layer", 4)
    run = new_run(offloaded)
    blocks, seen = run.model.model.layers, []

    def there(block):
        return not hasattr(block.mlp.Wi.weight, "to_local")  # else it is the shard in host memory

    for i, block in enumerate(blocks):
        block.attn.register_forward_hook(lambda *_, i=i: seen.append((i, [there(b) for b in blocks])))
    run.train_step(0.0)
    assert [i for i, _ in seen] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert all(among == [j == i for j in range(4)] for i, among in seen)
    assert not any(there(b) for b in blocks)

    def kept(n_layer):
        monkeypatch.setattr(offloaded, "n_layer", n_layer)
        run = new_run(offloaded)
        batch = run.micro_batch_at(0, 20)
        return machine.kept_bytes(lambda: run.loss(*batch), run.weights.values())

    assert kept(5) - kept(4) == 8 * 128 * 32 * 4  # rows, tokens, width, bytes: the fifth block's input, no more


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
        ends.append((run.state, run.scaler.get_scale(), [w.detach().clone() for w in run.weights.values()]))
    (state, scale, weights), (other_state, other_scale, other_weights) = ends
    assert state == other_state and state["skipped"] > 0 and scale == other_scale < 2.0**24
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_the_plan(offloaded, monkeypatch, capsys):
    """Bytes against a count by hand; the rates are measured, so they are only there and positive."""
    monkeypatch.setattr(offloaded, "offload", True)
    monkeypatch.setattr(offloaded, "optimizer", "adamw")
    run = new_run(offloaded)
    text = host.plan(run, 16, 8, 128, 1e12)
    plain = MaskedLM(ModelConfig(**dataclasses.asdict(run.model.config)))
    every = sum(p.numel() for p in plain.parameters())
    blocks = sum(p.numel() for p in plain.model.layers.parameters())
    assert f"{16 * every / 1e9:.3g} GB in host memory" in text
    assert f"a step of 2 x 8 rows: {2 * 4 * (2 * blocks + (every - blocks) + every) / 1e9:.3g} GB over the bus" in text
    assert len(text.splitlines()) == 2 and all(len(line) < 220 for line in text.splitlines())
    assert host.bus_rate(torch.device("cpu")) > 1e8 and host.adamw_rate() > 1e6


def test_offload_says_nothing_of_torchs_inside(offloaded, monkeypatch):
    monkeypatch.setattr(offloaded, "offload", True)
    run = new_run(offloaded)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", append=True)
        run.train_step(0.0)
    assert not said
