import math
import shutil

import numpy as np
import pytest
import torch
from conftest import put
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from nanocram.data import IGNORE, Rows, held_out, load_meta
from nanocram.tokenizer import CLS, MASK


def some_rows(n, T, vocab=1000):
    rows = torch.randint(4, vocab, (n, T))
    rows[:, 0] = CLS
    return rows


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(8, 64), st.data())
def test_masks_are_what_they_claim(B, T, data):
    k = data.draw(st.integers(1, T - 1))
    n = data.draw(st.integers(1, k))
    rows = some_rows(B, T)
    ids, positions, labels = train.draw_masks(rows, k, n)
    assert positions.shape == labels.shape == (B, k)
    assert positions.min() >= 1 and positions.max() < T
    wanted = rows.clone()
    for b in range(B):
        assert len(positions[b].unique()) == k  # without replacement
        masked = positions[b, labels[b] != IGNORE]
        assert len(masked) == n
        assert torch.equal(labels[b, labels[b] != IGNORE], rows[b, masked])
        wanted[b, masked] = MASK
    assert torch.equal(ids, wanted)


def test_masked_positions_are_uniform():
    torch.manual_seed(0)
    rows, T, k, n = some_rows(20000, 32), 32, 8, 5
    ids, _, _ = train.draw_masks(rows, k, n)
    hits = (ids == MASK).sum(0).double()
    expected = 20000 * n / (T - 1)
    assert hits[0] == 0
    chi2 = ((hits[1:] - expected) ** 2 / expected).sum().item()
    assert chi2 < 30 + 4 * math.sqrt(60)  # 30 degrees of freedom, four standard deviations


def test_berts_80_10_10_and_the_papers_counts(monkeypatch):
    torch.manual_seed(0)
    rows, vocab = some_rows(4000, 128), 1000
    put(monkeypatch, train, vocab_size=vocab, mask_token_share=0.8, random_token_share=0.1)
    ids, positions, labels = train.draw_masks(rows, 32, 32)
    seen = ids.gather(1, positions)
    masked = (seen == MASK).sum(1).float()
    assert masked.min() == 26 and masked.mean() < 26.1  # a random token may be [MASK]
    kept = (seen == labels).sum(1).float()
    assert kept.min() >= 3 and abs(kept.mean() - (3 + 3 / vocab)) < 0.05
    random = seen[(seen != MASK) & (seen != labels)]
    assert len(random) == pytest.approx(3 * 4000, rel=0.01)
    assert random.float().mean() == pytest.approx(vocab / 2, rel=0.03)


@pytest.mark.parametrize("batch", [3, 5, 10, 64])
def test_held_out_masks_do_not_depend_on_the_batch(batch):
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


def test_rows_wrap_and_stay_in_order(tmp_path):
    array = np.arange(5 * 8, dtype=np.uint16).reshape(5, 8)
    array.tofile(tmp_path / "x.bin")
    rows = Rows(tmp_path / "x.bin", 5, 8, 40)
    wanted = array[[3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]].astype(np.int64)
    assert torch.equal(rows.read(3, 12), torch.from_numpy(wanted))
    assert torch.equal(rows.read(13, 12), torch.from_numpy(wanted))  # in the third epoch


def test_ahead_of_time_the_same_rows_come(tmp_path):
    np.arange(5 * 8, dtype=np.uint16).tofile(tmp_path / "x.bin")
    rows = Rows(tmp_path / "x.bin", 5, 8, 40)
    rows.fetch(6, 3)
    (tmp_path / "x.bin").unlink()
    assert torch.equal(rows.fetch(6, 3)[:, 0], torch.tensor([8, 16, 24]))  # read by then


def ends_in_one_line(culprit, work, *args):
    with pytest.raises(SystemExit) as end:
        work(*args)
    assert culprit in str(end.value) and "\n" not in str(end.value)


@pytest.mark.parametrize("missing", [1, 2, 16, 80])
def test_a_file_that_shrinks_is_one_line(tmp_path, missing):
    """By a byte, a token, a row, all: where rows that are gone are read, or at the start."""
    path = tmp_path / "x.bin"
    np.arange(5 * 8, dtype=np.uint16).tofile(path)
    rows = Rows(path, 5, 8, 40)
    path.write_bytes(path.read_bytes()[:-missing])
    ends_in_one_line("x.bin is shorter", rows.read, 3, 3)
    ends_in_one_line("x.bin is shorter", Rows, path, 5, 8, 40)


def test_rows_that_vanish_or_change_are_one_line(tmp_path):
    path = tmp_path / "x.bin"
    np.arange(5 * 8, dtype=np.uint16).tofile(path)
    rows = Rows(path, 5, 8, 40)
    np.full(5 * 8, 40, dtype=np.uint16).tofile(path)
    ends_in_one_line("x.bin has tokens beyond", rows.read, 0, 1)
    path.unlink()
    ends_in_one_line("x.bin is missing", rows.read, 0, 1)


def test_other_data_slips_are_one_line(data_dir, tmp_path):
    ends_in_one_line("--data_dir=", load_meta, tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="type --vocab_size=600"):
        load_meta(data_dir, vocab_size=32768)
    folder = shutil.copytree(data_dir, tmp_path / "data")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("Prepend", "prepend"))
    ends_in_one_line("tokenizer.json", load_meta, folder)
    (folder / "val.bin").unlink()
    ends_in_one_line("val.bin", load_meta, folder)
    for content in ("{", "{}", "[]"):
        (folder / "meta.json").write_text(content)
        ends_in_one_line("meta.json", load_meta, folder)
