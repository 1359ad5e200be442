"""--pack=False: rows of whole records, which see no other."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from conftest import SMALL_DATA, model_config, new_run, put, script
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel import SETTINGS, assert_equal_runs, torchrun
from test_train import compile_and_fit

import train as module
from model import MaskedLM, make_loss
from nanocram.data import IGNORE, held_out, load_meta, record_numbers
from nanocram.model_folder import save
from nanocram.offload import Streamed
from nanocram.partial import Partial, pack_whole, padded
from nanocram.tokenizer import CLS, MASK, PAD, SEP, Tokenizer

CPU = torch.device("cpu")
# Lengths of records, their [SEP] included, which are to go into rows of 24.
LENGTHS = st.lists(st.integers(2, 23), min_size=1, max_size=60)


def records_of(rows):
    """The records of rows, [CLS] and [PAD] left out: [SEP] ends each."""
    found = []
    for row in np.array(rows).tolist():
        assert row[0] == CLS
        text = [token for token in row if token != PAD]
        assert row == text + [PAD] * (len(row) - len(text))
        for i, token in enumerate(text):
            assert (token == CLS) == (i == 0 or text[i - 1] == SEP)
            if token == CLS:
                found.append([])
            else:
                found[-1].append(token)
    assert all(record.count(SEP) == 1 and record[-1] == SEP for record in found)
    return found


def rows_with(lengths, T=24):
    """Rows (n, T) of records of these lengths, each of its own tokens."""
    records = [np.array([*range(4, 3 + n), SEP], np.uint16) for n in lengths]
    open_rows = []
    closed = pack_whole(records, T, open_rows)
    return torch.from_numpy(np.concatenate([closed, padded(open_rows, T)]).astype(np.int64))


@given(LENGTHS, st.integers(1, 5))
def test_every_record_is_whole_in_one_row_however_they_come(lengths, pieces):
    records = [np.array([*range(4, 3 + n), SEP], np.uint16) for n in lengths]
    rows, open_rows = [], []
    for i in range(pieces):
        rows += pack_whole(records[i::pieces], 24, open_rows).tolist()
    rows += padded(open_rows, 24).tolist()
    assert sorted(records_of(rows)) == sorted(record.tolist() for record in records)

    whole, begun = [], []
    in_order = [pack_whole(part, 24, begun) for part in (records[:7], records[7:])]
    at_once = pack_whole(records, 24, whole)
    assert np.concatenate(in_order).tolist() == at_once.tolist() and begun == whole


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 23), st.data())
def test_no_label_is_on_padding_or_a_beginning(lengths, n_positions, data):
    n_predict = data.draw(st.integers(1, n_positions))
    rows = rows_with(lengths)
    ids, positions, labels = module.draw_masks(rows, n_positions, n_predict, packed=False)
    hidden = [(ids, positions, labels, n_predict)]
    for rate, batches in held_out(rows, 3, packed=False).items():
        parts = [torch.cat(tensors)[: len(rows)] for tensors in zip(*batches, strict=True)]
        hidden.append((*parts[:3], round(rate * 24 / 100)))
        assert torch.equal(parts[3], record_numbers(rows))
    for ids, positions, labels, n in hidden:
        wanted = rows.clone()
        for b in range(len(rows)):
            places = positions[b, labels[b] != IGNORE]
            assert torch.equal(labels[b, labels[b] != IGNORE], rows[b, places])
            assert not {PAD, CLS} & set(rows[b, places].tolist())
            share = ((rows[b] != PAD) & (rows[b] != CLS)).sum().item() / 23
            assert abs(len(places.unique()) - n * share) <= 0.5 + 1e-4
            wanted[b, places] = MASK
        assert torch.equal(ids, wanted)


@pytest.mark.parametrize("n_narrow", [0, 2])
def test_logits_are_those_of_each_record_alone(tmp_path, n_narrow):
    """As transformers computes them of the exported folder, one record at a time."""
    sizes = {"vocab_size": 60, "n_layer": 3, "n_head": 2, "n_embd": 32, "n_inner": 48}
    model = MaskedLM(model_config(zero_init=False, n_narrow=n_narrow, **sizes)).eval()
    save(model, tmp_path)
    alone = model  # with two narrow layers it is no ModernBERT
    if not n_narrow:
        alone = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    rows = rows_with([5, 9, 2, 23, 7, 11, 3, 3, 3, 8])
    assert max(record_numbers(rows).flatten()) > 2 and (rows == PAD).any()
    positions = torch.arange(24).expand(len(rows), 24).flip(1)
    with torch.no_grad():
        at_places = model(rows, positions, records=record_numbers(rows)).flip(1)
        everywhere = model(rows, records=record_numbers(rows)) if not n_narrow else at_places
        for b, row in enumerate(rows):
            starts = (row == CLS).nonzero().flatten().tolist()
            for start in starts:
                end = start + row[start:].tolist().index(SEP) + 1
                logits = alone(row[None, start:end])
                wanted = logits if n_narrow else logits.logits
                for ours in (at_places, everywhere):
                    torch.testing.assert_close(ours[b, start:end], wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sums_stay", [True, False])
def test_offload_computes_the_same(sums_stay):
    sizes = {"vocab_size": 60, "n_layer": 4, "n_head": 2, "n_embd": 20, "n_inner": 27}
    plain = MaskedLM(model_config(zero_init=False, dropout=0.1, **sizes))
    streamed = copy.deepcopy(plain)
    offloaded = Streamed(streamed, CPU, torch.float32, sums_stay)
    rows = rows_with([5, 9, 2, 23, 7, 11, 3, 3, 3, 8])
    batch = *module.draw_masks(rows, 6, 6, packed=False), record_numbers(rows)
    for model in (plain, streamed):
        torch.manual_seed(0)
        make_loss(model, CPU, torch.float32)(*batch).backward()
    offloaded.collect()
    for ours, theirs in zip(streamed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.fixture(scope="module")
def lines(texts):
    """Lines of prose, most of them much shorter than a row of 128 tokens, a few longer."""
    words = " ".join(texts[:30]).split()
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(4, 40, 1500))
    found = [" ".join(part) for part in np.split(words, ends[ends < len(words)])]
    return [*found[:1000], " ".join(words[:400]), " ".join(words[400:900])]


@pytest.fixture(scope="module")
def record_dir(tmp_path_factory, lines):
    """A data set of those lines, and what prepare.py said."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    names = {"source": folder / "lines.txt", "data_dir": folder / "data"}
    done = script("prepare.py", **names, documents="lines", pack=False, **SMALL_DATA)
    assert done.returncode == 0, done.stdout
    (folder / "said").write_text(done.stdout)
    return folder / "data"


def test_prepare_keeps_each_line_whole_and_counts_what_it_cuts(record_dir, lines):
    tokenizer = Tokenizer(record_dir / "tokenizer.json")
    rows = [np.fromfile(record_dir / name, np.uint16) for name in ("train.bin", "val.bin")]
    rows = np.concatenate([part.reshape(-1, 128) for part in rows])
    wanted = [tokenizer.encode(line).tolist() for line in lines]
    long = [ids for ids in wanted if len(ids) > 126]
    assert sorted(records_of(rows)) == sorted([*ids[:126], SEP] for ids in wanted)

    counts = load_meta(record_dir)["counts"]
    n_text = ((rows != PAD) & (rows != CLS))[: counts["rows"]].sum()
    assert counts["filled"] == pytest.approx(n_text / (127 * counts["rows"]))
    assert counts["cut"] == len(long) >= 2
    said = (record_dir.parent / "said").read_text()
    assert f"WARNING: {len(long)} records were longer than a row" in said
    assert f"{1 - counts['filled']:.1%} of them is padding" in said


def test_prepare_goes_on_to_the_same_bytes(tmp_path):
    """A Partial that is made anew from its journal, rows open and closed, as after a kill."""
    rng = np.random.default_rng(0)
    records = [
        np.array([*rng.integers(4, 99, n), SEP], np.uint16) for n in rng.integers(1, 14, 900)
    ]
    contents = []
    for stops in ([], [100, 350, 351, 800]):
        folder = tmp_path / f"{len(stops)}"
        folder.mkdir()
        counts = {"sources": {}}
        journal = {"counts": counts, "rest": [], "sizes": {}}
        journal["rng"] = np.random.default_rng(0).bit_generator.state
        part = Partial(folder, journal, 16, packed=False)
        for i, ids in enumerate(records):
            if i in stops:
                part.save()
                part.keep(ids)  # is lost
                part.flush()
                journal = json.loads((folder / "journal.json").read_text())
                part = Partial(folder, journal, 16, packed=False)
            if i % 10:
                part.keep(ids)
            else:
                part.hold_out(ids, i)
        part.finish()
        contents.append([(folder / name).read_bytes() for name in ("train.bin", "val.bin")])
    assert contents[0] == contents[1]
    found = [np.frombuffer(content, np.uint16).reshape(-1, 16) for content in contents[0]]
    assert sorted(records_of(np.concatenate(found))) == sorted(ids.tolist() for ids in records)


@pytest.fixture
def setting(train, monkeypatch, record_dir):
    put(monkeypatch, module, data_dir=str(record_dir), zero_init=False, samples="", evals=2)
    return lambda **values: put(monkeypatch, module, **values)


def test_a_step_is_the_mean_over_all_that_is_hidden(setting):
    """The loss of a step, beside one computed record by record."""
    setting(dropout=0.0, batch_size=64, batch_start=64, micro_batch=8)
    run = new_run()
    total, n_labels = 0.0, 0
    for first_row in range(0, 64, 8):
        ids, positions, labels, records = module.batch_at(run, first_row, 38)
        for b in range(8):
            for number in range(1, int(records[b].max()) + 1):
                inside = (records[b] == number).nonzero().flatten()
                here = torch.isin(positions[b], inside) & (labels[b] != IGNORE)
                if here.any():
                    part = ids[b, inside][None], positions[b, here][None] - inside[0]
                    total += run.loss_fn(*part, labels[b, here][None]).item()
                    n_labels += int(here.sum())
    module.train_step(run, 0.0)
    expected = 64 * 38 * run.meta["counts"]["filled"]  # on average over all steps
    assert n_labels == pytest.approx(expected, rel=0.1)
    assert run.state.last["loss"] == pytest.approx(total / expected, rel=1e-4)


def test_compiled_equals_eager(setting):
    setting(n_layer=2, compile=True, mask_rate_end=0.3)  # one shape to compile, not three
    run = new_run()
    batch, eager = module.batch_at(run, 0, 20), run.loss_fn
    compile_and_fit(run)
    assert run.loss_fn is not eager and run.compiled
    gradients = []
    for loss_fn in (run.loss_fn, eager):
        run.model.zero_grad()
        loss_fn(*batch).backward()
        gradients.append([p.grad.clone() for p in run.model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_two_ranks_and_a_resume_end_as_one_process_does(setting, record_dir, tmp_path):
    """What depends on progress is held fixed, so that a run of three steps begins one of six."""
    values = SETTINGS | {"dropout": 0.1, "optimizer": "adamw", "schedule": "constant"}
    values |= {"mask_rate_end": 0.3, "batch_ramp": 0.0, "data_dir": str(record_dir)}
    ranks = torchrun(2, **values, max_steps=6, out_dir=tmp_path / "two")
    said, _ = ranks.communicate(timeout=200)
    assert ranks.returncode == 0, said
    resumed = str(tmp_path / "resumed")
    for changes in ({"max_steps": 3}, {"max_steps": 6, "init": "resume"}):
        setting(**values | changes, out_dir=resumed)
        module.main()
    setting(init="scratch", out_dir=str(tmp_path / "one"))
    module.main()
    assert_equal_runs(tmp_path / "one", tmp_path / "two", 2e-5)
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "resumed")]
    assert ends[0] == ends[1]
