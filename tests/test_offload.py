"""A model in host memory beside the plain one, and the memory it may take."""

import functools
import re
from unittest.mock import Mock

import pytest
import torch
from conftest import new_run, put, random_model
from test_model import architectures
from torch.testing import assert_close

import train as module
from nanocram import runlog
from nanocram.edits import check_streaming
from nanocram.offload import padded

DEEP = [{"n_layer": 4, "n_narrow": n} for n in (0, 3)]


@pytest.fixture
def setting(train, monkeypatch):
    """Set globals of train.py, whose model has gradients that are nowhere zero."""
    change = functools.partial(put, monkeypatch, module)
    change(zero_init=False, dropout=0.1, evals=2, optimizer="adamw")
    return change


def test_offload_is_the_plain_run_bit_for_bit(setting, tmp_path, monkeypatch, capsys):
    """Before a resume, or after it; at sizes to pad. A loss scale is too large at first."""
    too_large = functools.partial(torch.amp.GradScaler, init_scale=2.0**21)
    monkeypatch.setattr(torch.amp, "GradScaler", too_large)
    setting(dtype="float16", head_transform=True, n_layer=3, n_embd=18, n_head=3, n_inner=27)
    setting(batch_size=24, eval_rows=8)
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        out = tmp_path / f"{first}{second}"
        setting(offload=first, out_dir=str(out), init="scratch", max_steps=3)
        module.main()
        setting(offload=second, init="resume", max_steps=5)
        module.main()
        rows = [row | {"elapsed_s": 0} for row in runlog.read_log(out)]
        guesses = re.findall(r"^ *once upon a \[MASK\]\..*", capsys.readouterr().out, re.M)
        ckpt = torch.load(out / "ckpt.pt", weights_only=True)
        moments = [o["state"] for o in ckpt["optimizers"]]
        ends.append((rows, guesses, [ckpt["model"], moments, ckpt["scaler"]]))
    (rows, guesses, plain), *others = ends
    assert rows[-1]["step"] == 5 and len(guesses) > 2
    assert rows[-1]["skipped"] > 0
    for other_rows, other_guesses, other in others:
        assert (other_rows, other_guesses) == (rows, guesses)
        assert_close(other, plain, rtol=0, atol=0)


@pytest.mark.parametrize("switches", architectures(*DEEP), ids=str)
def test_gradients_are_the_plain_models(switches):
    """Of two micro-batches: what train.py asks when it starts, of any architecture."""
    check_streaming(random_model(**switches).config, 64, torch.device("cpu"))


def test_device_memory_holds_two_blocks(setting, monkeypatch):
    """Of weights and gradients, beside what is outside of them; aligned. A step waits once."""
    setting(offload=True, n_layer=5, n_embd=18, n_head=3, n_inner=27)
    run = new_run()
    twins = list(run.made)
    assert all(p.data_ptr() % 16 == 0 for p in twins)
    storages = {t.untyped_storage() for p in twins for t in (p, p.grad)}
    sizes = {storage.data_ptr(): storage.nbytes() // 4 for storage in storages}
    block = sum(map(padded, run.model.model.layers[1].parameters()))
    assert len(sizes) == 6 and sorted(sizes.values())[:4] == [block] * 4
    monkeypatch.setattr(torch.cpu, "synchronize", waits := Mock())
    module.train_step(run, 1.0)
    assert waits.call_count == 1 and run.state.rows_seen == 2 * run.micro_batch


def test_compiled_blocks_compute_the_same(setting, monkeypatch):
    """To the bit. The first, the middle ones and the last have a graph each; an evaluation none."""
    setting(offload=True, n_layer=4)
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_)
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        setting(compile=compiled)
        run = new_run()
        module.train_step(run, 0.9)
        ends.append((run.state.last, run.model.state_dict()))
        batch = module.masked_batch(run, 0, run.micro_batch, (128, 20))
        module.estimate_loss(run, [[x[:3] for x in batch]])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3 * compiled
    assert_close(*ends, rtol=0, atol=0)
