import shutil

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import put
from hypothesis import given, settings
from hypothesis import strategies as st

import train as module
from nanocram.data import IGNORE, Rows, held_out, load_meta
from nanocram.runlog import read_log
from nanocram.tokenizer import CLS, MASK


def some_rows(n, T, vocab=1000):
    rows = torch.randint(4, vocab, (n, T))
    rows[:, 0] = CLS
    return rows


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(8, 64), st.data())
def test_masks_are_what_they_claim(B, T, data):
    K = data.draw(st.integers(1, T - 1))
    rows = some_rows(B, T)
    ids, positions, labels = module.draw_masks(rows, K)
    assert positions.shape == labels.shape == (B, K)
    assert positions.min() >= 1 and positions.max() < T
    wanted = rows.clone()
    for b in range(B):
        assert len(positions[b].unique()) == K  # without replacement
        assert torch.equal(labels[b], rows[b, positions[b]])
        wanted[b, positions[b]] = MASK
    assert torch.equal(ids, wanted)


def test_masked_positions_are_uniform():
    torch.manual_seed(0)
    ids, _, _ = module.draw_masks(some_rows(20000, 32), 8)
    hits = (ids == MASK).sum(0)
    assert hits[0] == 0
    # drawn without replacement, the counts vary even less than chisquare() assumes
    assert scipy.stats.chisquare(hits[1:].numpy()).pvalue > 1e-3


def test_berts_80_10_10(monkeypatch):
    torch.manual_seed(0)
    vocab, K, n_rows = 1000, 32, 4000
    rows = some_rows(n_rows, 128)
    put(monkeypatch, module, vocab_size=vocab, mask_token_share=0.8, random_token_share=0.1)
    ids, positions, labels = module.draw_masks(rows, K)
    seen = ids.gather(1, positions)
    masked = (seen == MASK).sum(1).float()
    assert masked.min() == round(0.8 * K) and masked.mean() < 26.1  # a random token may be [MASK]
    kept = (seen == labels).sum(1).float()
    assert kept.min() >= 3 and abs(kept.mean() - (3 + 3 / vocab)) < 0.05
    random = seen[(seen != MASK) & (seen != labels)]
    assert len(random) == pytest.approx(3 * n_rows, rel=0.01)
    assert scipy.stats.kstest(random / vocab, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("batch", [3, 10, 64])
def test_held_out_masks_do_not_depend_on_the_batch(batch):
    """Nor on the random state, which they leave alone."""
    rows = some_rows(10, 128)
    reference, state = held_out(rows, 10), torch.get_rng_state()
    sets = held_out(rows, batch)
    assert torch.equal(state, torch.get_rng_state())
    for rate, n in ((15, 19), (25, 32)):
        ids, positions, labels = (torch.cat(x) for x in zip(*sets[rate], strict=True))
        assert {len(x[0]) for x in sets[rate]} == {min(batch, 10)} and positions.shape[1] == 32
        assert ((labels != IGNORE).sum(1)[:10] == n).all() and (labels[10:] == IGNORE).all()
        for mine, theirs in zip((ids, positions, labels), reference[rate][0], strict=True):
            assert torch.equal(mine[:10], theirs)
        assert ((ids[:10] == MASK).sum(1) == n).all()


def test_more_evaluation_rows_than_there_are_is_all_of_them(train, monkeypatch, data_dir, tmp_path):
    """None counts twice: the loss is that of all rows."""
    count = load_meta(data_dir)["counts"]["val_rows"]
    losses = []
    for n in (count, 3 * count + 1):
        put(monkeypatch, train, eval_rows=n, max_steps=1, samples="")
        put(monkeypatch, train, out_dir=str(tmp_path / str(n)))
        train.main()
        losses.append([row.get("val_loss_15") for row in read_log(train.out_dir)])
    assert losses[0] == losses[1] and losses[0][-1]


def test_rows_wrap_and_stay_in_order(tmp_path):
    array = np.arange(5 * 8, dtype=np.uint16).reshape(5, 8)
    array.tofile(tmp_path / "x.bin")
    rows = Rows(tmp_path / "x.bin", 8)
    wanted = torch.from_numpy(array[[3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]].astype(np.int64))
    assert len(rows) == 5
    assert torch.equal(rows.read(3, 12), wanted)
    assert torch.equal(rows.fetch(13, 12), wanted)  # in the third epoch


def test_rows_beyond_4_gb(tmp_path):
    """A sparse file with rows of known tokens on both sides of the edge of 32 bits."""
    T, at = 128, 2**32 // 256
    with open(tmp_path / "x.bin", "wb") as f:
        f.truncate((at + 4) * 2 * T)
        for i in range(-2, 3):
            f.seek((at + i) * 2 * T)
            f.write(np.full(T, 50 + i, dtype=np.uint16).tobytes())
    rows = Rows(tmp_path / "x.bin", T)
    assert rows.read(at - 2, 5)[:, 7].tolist() == [48, 49, 50, 51, 52]
    assert rows.read(at + 3, 2)[:, 0].tolist() == [0, 0]


def test_data_that_is_not_what_it_was_is_one_line(data_dir, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    train_bin, val_bin = (folder / name for name in ("train.bin", "val.bin"))

    def refused(named, **wanted):
        with pytest.raises(SystemExit, match=named) as end:
            load_meta(folder, **wanted)
        assert "\n" not in str(end.value)

    refused("type --vocab_size=600", vocab_size=32768)
    rows = Rows(train_bin, 128)
    whole = train_bin.read_bytes()
    train_bin.write_bytes(whole[:-256])
    refused(r"train\.bin")
    with pytest.raises(SystemExit, match=r"train\.bin cannot be read to its end"):
        rows.read(len(rows) - 1, 1)  # it shrank in mid-run
    train_bin.write_bytes(whole)
    load_meta(folder)
    val_bin.write_bytes(val_bin.read_bytes()[:-2] + b"\0\1")
    refused(r"val\.bin")
    (folder / "meta.json").unlink()
    refused(r"run python prepare\.py --data_dir=")
