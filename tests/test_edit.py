"""Run this after an edit: python -m pytest tests/test_edit.py

What two short runs show of an edit of train.py or model.py that reads well and is wrong. No number
of upstream's is in here: whatever you train, these hold.
"""

import copy
from collections import Counter

import pytest
import torch
from conftest import QUICK, ROOT, SMALL_MODEL, error, flags, new_run, padded_batch, put, randomise
from forked import IN_TRANSFORMERS, Forked, two_ranks
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import train as module
from model import Classifier, MaskedLM
from nanocram import model_folder, runlog
from nanocram.data import IGNORE, held_out

SIZES = {"n_layer": 3, "zero_init": False, "micro_batch": 4, "batch_size": 16, "batch_start": 4}
# Each stage of masking and of the batch, and more passes than a window that begins late has.
SETTINGS = SMALL_MODEL | SIZES | {"max_steps": 6, "log_every": 1, "samples": ""}
OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")  # what a BatchNorm keeps
TRAIN = """
import sys, train
from nanocram import settings
*argv, last_step = sys.argv[1:]
train_step = train.train_step

def stepped(run, progress):
    train_step(run, progress)
    train.signals.stop = run.state.step == int(last_step)  # as by Ctrl-C

train.train_step = stepped
settings.configure(vars(train), argv)
train.main()
"""


def settings_of_yours(**values):
    """Those that train.py still has."""
    return {name: value for name, value in values.items() if name in module.SETTINGS}


def begin(out_dir, data_dir, first="", last_step=6, **other):
    """A run in a process of its own, which stops behind a step."""
    settings = settings_of_yours(**SETTINGS, **other, data_dir=data_dir, out_dir=out_dir)
    return Forked(ROOT, first + QUICK + TRAIN, "-", *flags(**settings), last_step)


def course(out_dir):
    """(weights and State.tensors of a run, its log but for columns of seconds, which end in _s)."""
    ckpt = torch.load(out_dir / "ckpt.pt", weights_only=True)
    lines = runlog.read_log(out_dir)
    lines = [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines]
    return ckpt["model"] | ckpt["state"]["tensors"], lines


@pytest.fixture(scope="module")
def whole(shared, data_dir):
    """The folder of a run of six steps."""
    return shared("whole", lambda folder: begin(folder / "out", data_dir).end()) / "out"


def test_six_steps_are_three_and_three_resumed(whole, data_dir, tmp_path):
    """And stopped once more, for what begins late. If not, the run keeps something where no
    checkpoint has it (keep it in State, tensors in state.tensors), or draws from another generator
    than torch's."""
    begin(tmp_path / "out", data_dir, last_step=3).end()
    begin(tmp_path / "out", data_dir, last_step=5, init="resume").end()
    begin(tmp_path / "out", data_dir, init="resume").end()
    (weights, lines), (wanted, wanted_lines) = course(tmp_path / "out"), course(whole)
    assert lines == wanted_lines
    assert_close(weights, wanted, rtol=0, atol=0)


def test_two_ranks_are_one(whole, data_dir, tmp_path):
    """If not, the ranks do not do the same behind the sum of gradients, or the loss is no mean over
    its micro-batch."""
    begin(tmp_path / "out", data_dir, first=two_ranks()).end()
    (weights, lines), (wanted, wanted_lines) = course(tmp_path / "out"), course(whole)
    for line in (*lines, *wanted_lines):
        # held-out losses may read a BatchNorm's means, which each rank has of its own rows
        for name in [name for name in line if name.startswith("val_")]:
            del line[name]
    assert lines == [pytest.approx(line, 1e-3) for line in wanted_lines]
    for name, tensor in wanted.items():
        assert name.endswith(OF_BATCHES) or error(weights[name], tensor) < 1e-3, name


@pytest.fixture
def run(train, monkeypatch):
    """A fresh train.Run, in this process."""
    put(monkeypatch, train, **settings_of_yours(**SETTINGS))
    return new_run()


def test_held_out_loss_is_the_mean_over_labels_in_nats(run):
    """And to evaluate changes neither weights nor the held-out rows. If not, put what is for
    training alone, in make_loss() or the model, behind `if model.training`."""
    module.train_step(run, 0.5)  # what is evaluated may differ from what is trained behind it
    sets = held_out(run.rows.read(0, 20), 8)  # the last batch has rows without labels
    copies, before = copy.deepcopy((sets, run.model.state_dict()))
    with module.eval_weights(run):
        losses = module.evaluate(run, sets)
        for rate, batches in copies.items():
            with torch.no_grad():
                logits = [run.model.eval()(ids, positions) for ids, positions, _ in batches]
            logits, labels = torch.cat(logits).mT.double(), torch.cat([x[2] for x in batches])
            wanted = cross_entropy(logits, labels, ignore_index=IGNORE)
            assert losses[rate] == pytest.approx(wanted.item(), rel=1e-4)
    assert_close(sets, copies, rtol=0, atol=0)
    assert_close(dict(run.model.state_dict()), dict(before), rtol=0, atol=0)


def test_each_parameter_has_one_optimiser_and_the_rate_that_is_logged(run):
    groups = [group for o in run.optimizers for group in o.param_groups]
    times = Counter(id(p) for group in groups for p in group["params"])
    for name, p in run.model.named_parameters():
        assert times.pop(id(p), 0) == 1, f"{name} is not in exactly one of run.optimizers"
    assert not times, "an optimiser has a tensor that is no parameter of the model"
    rates = {}

    def look():
        for group in groups:
            rates[group["column"]] = max(group["lr"], rates.get(group["column"], 0.0))

    for o in run.optimizers:
        o.step = look
    module.train_step(run, 0.5)
    assert {column: run.state.last[column] for column in rates} == rates


def test_fine_tuning_differs_from_evaluation_by_dropout_alone(run, monkeypatch):
    """If not, what pre-training alone should do, such as skipping tokens or layers, fine-tuning
    does too: switch it on in train.py, by an attribute of run.model, not by `self.training`."""
    put(monkeypatch, module, **settings_of_yours(dropout=0.0))
    model = randomise(MaskedLM(module.model_config()))
    ids, mask = padded_batch(64)
    for pooling in ("cls", "mean"):
        net = Classifier(model, 3, dropout=0.0, pooling=pooling).train()
        for part in net.modules():  # torch's own may take the mean of a batch
            part.train(part.training and not hasattr(part, "running_mean"))
        trained = [net(ids, mask) for _ in range(8)]
        difference = max(error(outputs, net.eval()(ids, mask)) for outputs in trained)
        assert difference < 1e-4


def test_the_saved_folder_gives_the_logits_of_the_run(run, tmp_path):
    """By load(), and by transformers. If not, model.py imports code of yours, which the folder has
    not, or computes what a MaskedLM of the same settings does not."""
    randomise(run.model)
    ids, mask = padded_batch(100)
    with module.eval_weights(run), torch.no_grad():
        module.save_model(run, tmp_path)
        wanted = run.model.eval()(ids, attention_mask=mask)[mask.bool()]
    found = model_folder.load(tmp_path)(ids, attention_mask=mask)[mask.bool()]
    assert error(found, wanted) < 1e-5
    pytest.importorskip("transformers", reason="it reads no folder here")
    torch.save((ids, mask), tmp_path / "inputs")
    Forked(tmp_path, IN_TRANSFORMERS).end()
    assert error(torch.load(tmp_path / "found")[mask.bool()], wanted) < 2e-3
