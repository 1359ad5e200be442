import shutil

import numpy as np
import pytest
import torch

from nanocram.data import IGNORE, Rows, held_out, load_meta, log_frequencies
from nanocram.tokenizer import MASK


@pytest.mark.parametrize("batch", [3, 64])
def test_held_out_masks_do_not_depend_on_the_batch(batch):
    """Nor on the random state, which they leave alone."""
    rows = torch.randint(4, 1000, (10, 128))
    reference, state = held_out(rows, 10), torch.get_rng_state()
    sets = held_out(rows, batch)
    assert torch.equal(state, torch.get_rng_state())
    for rate, n in (("val_loss_15", 19), ("val_loss_25", 32)):
        ids, positions, labels = (torch.cat(x) for x in zip(*sets[rate], strict=True))
        assert {len(x[0]) for x in sets[rate]} == {min(batch, 10)} and positions.shape[1] == 32
        assert ((labels != IGNORE).sum(1)[:10] == n).all() and (labels[10:] == IGNORE).all()
        for mine, theirs in zip((ids, positions, labels), reference[rate][0], strict=True):
            assert torch.equal(mine[:10], theirs)
        assert ((ids[:10] == MASK).sum(1) == n).all()


def test_rows_wrap_and_stay_in_order(tmp_path):
    array = np.arange(5 * 8, dtype=np.uint16).reshape(5, 8)
    array.tofile(tmp_path / "x.bin")
    rows = Rows(tmp_path / "x.bin", 8)
    wanted = torch.from_numpy(array[[3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]].astype(np.int64))
    assert len(rows) == 5 and torch.equal(rows.read(3, 12), wanted)
    assert torch.equal(rows.fetch(13, 12), wanted)  # in the third epoch
    # another seed begins elsewhere in the same circle
    begins = {Rows(tmp_path / "x.bin", 8, seed=seed).read(0, 1)[0, 0].item() for seed in range(99)}
    assert begins == {0, 8, 16, 24, 32}
    first = Rows(tmp_path / "x.bin", 8, seed=3).read(0, 6)
    assert torch.equal(first[:, 0], (first[0, 0] + 8 * torch.arange(6)) % 40)


def test_log_frequencies(tmp_path):
    array = np.random.default_rng(0).zipf(1.3, (50, 128)).clip(4, 99).astype(np.uint16)
    array.tofile(tmp_path / "x.bin")
    counts = np.array([(array[:, 1:] == i).sum() + 1 for i in range(120)])
    found = log_frequencies(Rows(tmp_path / "x.bin", 128), 120)
    assert found.numpy() == pytest.approx(np.log(counts / counts.sum()), rel=1e-5)


def test_data_that_is_not_what_it_was_is_one_line(data_dir, tmp_path):
    for name, end in (("val.bin", 256 * b"\1"), ("tokenizer.json", b"x"), ("train.bin", b"")):
        folder = shutil.copytree(data_dir, tmp_path / name)
        load_meta(folder)
        rows = Rows(folder / "train.bin", 128)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-256] + end)
        with pytest.raises(SystemExit, match=r"^.* is damaged, .*: delete it, then run python .*$"):
            load_meta(folder)
    with pytest.raises(SystemExit, match=r"^.*train\.bin cannot be read to its end.*$"):
        rows.read(len(rows) - 1, 1)  # it shrank in mid-run
