"""Fine-tuning against a plain loop around transformers, and the script as a user runs it."""

import contextlib
import dataclasses
import io
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, last_line, model_config
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import finetune_glue as ft
import train
from model import Classifier, MaskedLM
from nanocram import configurator, glue
from nanocram.data import Ragged, batches_by_length
from nanocram.model_folder import load, save
from nanocram.tokenizer import truncated

SIZES = {
    "vocab_size": 600,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_inner": 48,
    "max_seq_len": 128,
}
slow = pytest.mark.slow
QUICK = {"seeds": 2, "epochs": 2, "glue_batch": 8, "dtype": "float32", "device": "cpu"}


def model_folder(folder, data_dir, **switches):
    torch.manual_seed(0)
    save(MaskedLM(model_config(**(SIZES | {"zero_init": False} | switches))), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data_dir / name, folder / name)
    return folder


@pytest.fixture
def model(tmp_path, data_dir):
    return model_folder(tmp_path / "model", data_dir)


def quick(glue_files):
    """The script's settings for a test: seconds become milliseconds."""
    return QUICK | {"glue_dir": str(glue_files[0])}


@pytest.fixture
def settings(monkeypatch, glue_files):
    """The quick settings are the script's; others with settings.setattr(ft, name, value)."""
    for name, value in quick(glue_files).items():
        assert hasattr(ft, name)
        monkeypatch.setattr(ft, name, value)
    return monkeypatch


def run(model, glue_files, tasks="cola,stsb", **flags):
    """main() with these settings: exit status and what it prints, as of a process."""
    wanted = quick(glue_files) | {"model": model, "tasks": tasks} | flags
    printed = io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name, value in wanted.items():
            patch.setattr(ft, name, type(getattr(ft, name))(value))
        try:
            ft.main()
        except SystemExit as e:
            status = 1
            print(e.code)
    return types.SimpleNamespace(returncode=status, stdout=printed.getvalue())


def results(model):
    """[the runs of one candidate, ...] in the order in which they came in."""
    return list(glue.runs_by_name(glue.read_runs(model)).values())


def scores(model):
    """{(task, seed): scores} of the candidate that came first."""
    first, *_ = results(model)
    return {(run["task"], run["seed"]): run["scores"] for run in first}


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=2), st.integers(16, 64))
def test_truncation_keeps_what_fits(lengths, limit):
    kept = truncated(lengths, limit)
    assert sum(kept) == min(sum(lengths), limit)
    assert all(0 < k <= n for k, n in zip(kept, lengths, strict=True))


# 17 and 25 leave an even number for two texts. Versions of tokenizers differ in whose an odd token
# is: the first text's here and since 0.23.3, the second's in 0.23.2.
@pytest.mark.parametrize("limit", [17, 25, 128])
def test_inputs_are_those_of_transformers(model, settings, sentences, limit):
    settings.setattr(ft, "glue_seq_len", limit)
    others = [text * (1 + i % 3) for i, text in enumerate(reversed(sentences))]
    pairs = list(zip(sentences, others, strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for texts in ([(a,) for a in sentences], pairs):
        columns = map(list, zip(*texts, strict=True))
        wanted = tokenizer(*columns, truncation=True, max_length=limit, return_token_type_ids=True)
        found = list(ft.our_candidate(model, False).encode(texts))
        assert [ids.tolist() for ids, _ in found] == wanted["input_ids"]
        assert [first for _, first in found] == [t.count(0) for t in wanted["token_type_ids"]]
        assert max(len(ids) for ids, _ in found) <= limit


@hypothesis_settings(deadline=None)
@given(
    st.lists(st.integers(3, 128), min_size=1, max_size=300),
    st.sampled_from([1, 8, 16]),
    st.integers(0, 9),
)
def test_an_epoch_takes_every_row_once_in_batches_of_like_length(lengths, size, seed):
    length = np.array(lengths)
    epoch = batches_by_length(length, size, (seed, 0))
    rows = np.concatenate(epoch)
    assert len(set(rows.tolist())) == len(rows) == (len(length) // size * size or len(length))
    assert all(len(batch) == min(size, len(length)) for batch in epoch)
    again = batches_by_length(length, size, (seed, 0))
    assert all(np.array_equal(a, b) for a, b in zip(epoch, again, strict=True))
    pools = -(-len(epoch) // min(64, max(1, len(epoch) // 8)))
    # Sorted within each pool.
    assert sum(np.ptp(length[batch]) for batch in epoch) <= np.ptp(length) * pools


def test_epochs_differ_and_batches_come_in_random_order():
    length = np.arange(3, 131).repeat(10)
    first, second = (batches_by_length(length, 16, (0, epoch)) for epoch in range(2))
    assert not np.array_equal(np.sort(first[0]), np.sort(second[0]))
    widths = [length[batch].max() for batch in first]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.3
    distinct = np.arange(3, 643)  # the order of lengths alone must not decide who shares a batch
    first, second = (pairs_of(batches_by_length(distinct, 16, (0, epoch))) for epoch in range(2))
    assert len(first & second) < 0.5 * len(first)


def pairs_of(batches):
    """The pairs of rows that share a batch."""
    pairs = set()
    for batch in batches:
        pairs.update(itertools.combinations(sorted(batch.tolist()), 2))
    return pairs


def test_batches_are_padded_as_transformers_pads_them(model, settings, sentences):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = [(a, b) for a, b in zip(sentences, reversed(sentences), strict=True)]
    rows = list(ft.our_candidate(model, False).encode(texts))
    arrays = {
        "ids": np.concatenate([ids for ids, _ in rows]),
        "length": np.array([len(ids) for ids, _ in rows]),
        "first": np.array([first for _, first in rows]),
        "labels": np.arange(float(len(rows))),
    }
    data = Ragged(arrays, 0, True, torch.device("cpu"))
    for batch in batches_by_length(data.length, 16, (0, 0)):
        columns = [texts[i][0] for i in batch], [texts[i][1] for i in batch]
        wanted = tokenizer(
            *columns,
            padding=True,
            truncation=True,
            max_length=128,
            pad_to_multiple_of=8,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        (ids, mask, types), labels = data.batch(batch)
        assert torch.equal(labels, torch.from_numpy(batch).float())
        assert torch.equal(ids, wanted["input_ids"])
        assert torch.equal(types, wanted["token_type_ids"])
        mask = torch.ones_like(ids) if mask is None else mask
        assert torch.equal(mask.long(), wanted["attention_mask"])


def test_a_token_type_that_pre_training_never_met_stays_out(tmp_path, data_dir, glue_files):
    """Both sentences of a pair have the type that every row of pre-training has."""
    folder = model_folder(tmp_path / "bert", data_dir, token_types=2, position_embedding="learned")
    before = load(folder).model.embeddings.type_embeddings.weight
    done = run(folder, glue_files, tasks="mrpc", seeds=1, save_models=True)
    assert done.returncode == 0, done.stdout
    after = load(folder / "mrpc").model.embeddings.type_embeddings.weight
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_learning_rate_is_that_of_transformers(settings, kind, warmup):
    settings.setattr(ft, "glue_warmup", warmup)
    settings.setattr(ft, "glue_schedule", kind)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    schedule = transformers.get_scheduler(kind, optimizer, int(warmup * 57), 57)
    for step in range(57):
        assert ft.lr_scale(step, 57) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("task", "n_outputs", "pooling", "decay"), [("stsb", 1, "cls", 0.0), ("mnli", 3, "mean", 30.0)]
)
def test_training_equals_a_plain_loop_around_transformers(
    model, settings, tmp_path, task, n_outputs, pooling, decay
):
    """Same batches, weights and settings: the library's loop has the same outputs at the end."""
    settings.setattr(ft, "glue_dropout", 0.0)
    settings.setattr(ft, "glue_lr", 1e-3)
    settings.setattr(ft, "glue_pooling", pooling)
    settings.setattr(ft, "glue_weight_decay", decay)
    candidate = ft.our_candidate(model, False)
    data = Ragged(ft.tokenised(candidate, task, "train"), candidate.pad, False, torch.device("cpu"))
    torch.manual_seed(5)
    net = candidate.build(n_outputs)
    save(net, tmp_path, ("a", "b", "c") if n_outputs == 3 else ())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, classifier_dropout=0.0
    ).train()
    before = ft.predict(net, data, torch.float32)

    facts = ft.fine_tune(candidate, net, data, 3, torch.float32, lambda tokens: None)
    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, p in theirs.named_parameters():
        groups["norm" in name or "bias" in name]["params"].append(p)
    optimizer = torch.optim.AdamW(groups, 1e-3, (0.9, 0.98), 1e-6, weight_decay=decay)
    steps = [rows for epoch in range(2) for rows in batches_by_length(data.length, 8, (3, epoch))]
    schedule = transformers.get_cosine_schedule_with_warmup(
        optimizer, int(0.1 * len(steps)), len(steps)
    )
    losses = []
    for rows in steps:
        (ids, mask, _), labels = data.batch(rows)
        mask = torch.ones_like(ids) if mask is None else mask
        labels = labels[:, None] if n_outputs == 1 else labels
        loss = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = ft.predict(net, data, torch.float32)
    everything = Ragged(ft.tokenised(candidate, task, "train"), 0, False, torch.device("cpu"))
    ids, mask, _ = everything.batch(np.arange(len(data.length)))[0]
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=ids, attention_mask=mask).logits.numpy()
    assert np.abs(after - wanted).max() < 1e-3 < 1e-2 < np.abs(after - before).max()
    assert len(steps) == 10 and facts["rows_per_second"] > 0
    assert facts["train_loss"] == pytest.approx(np.mean(losses[5:]), rel=1e-3)


def test_one_label_among_thousands_makes_other_data(model, settings, tmp_path):
    """An array this long prints as its first and last labels alone."""
    (tmp_path / "SST-2").mkdir()
    settings.setattr(ft, "glue_dir", str(tmp_path))
    sources = set()
    for odd in (None, 1500):
        rows = [f"a sentence\t{int(i == odd)}" for i in range(3000)]
        (tmp_path / "SST-2/train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
        sources.add(str(ft.tokenised(ft.our_candidate(model, False), "sst2", "train")["source"]))
    assert len(sources) == 2


def test_fresh_weights_differ_by_seed_and_pre_training_is_loaded(model, settings):
    def weights(scratch, seed):
        torch.manual_seed(seed)
        net = ft.our_candidate(model, scratch).build(2)
        return net.model.layers[0].attn.Wq.weight, net.classifier.weight

    pretrained = load(model).model.layers[0].attn.Wq.weight
    for scratch in (False, True):
        (a, ca), (b, cb), (c, cc) = (weights(scratch, seed) for seed in (0, 0, 1))
        assert torch.equal(a, b) and torch.equal(ca, cb) and not torch.equal(ca, cc)
        assert torch.equal(a, pretrained) is not scratch and torch.equal(a, c) is not scratch


def test_dropout_is_on_in_training_alone(model, settings):
    net = ft.our_candidate(model, False).build(2)
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert {layer.attn.dropout for layer in net.model.layers} == {0.1}
    candidate = ft.our_candidate(model, False)
    data = Ragged(ft.tokenised(candidate, "rte", "dev"), 0, False, torch.device("cpu"))
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        outputs.append(ft.predict(net.train(), data, torch.float32))
    assert np.array_equal(*outputs)
    ft.fine_tune(candidate, net.eval(), data, 0, torch.float32, lambda tokens: None)
    assert net.training


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_progress_is_told_in_what_costs(model, settings, device):
    """Tokens on a CPU, up to the rest that an epoch drops; steps elsewhere, each one of them."""
    candidate = ft.our_candidate(model, False)
    settings.setattr(candidate, "batch", 6)
    arrays = {"rte": {"train": ft.tokenised(candidate, "rte", "train")}}
    data = Ragged(arrays["rte"]["train"], 0, False, torch.device("cpu"))
    todo = [("rte", 0), ("rte", 1)]
    bar = ft.progress_bar(arrays, todo, candidate.batch, torch.device(device))
    done = []
    for _, seed in todo:
        ft.fine_tune(candidate, candidate.build(2), data, seed, torch.float32, done.append)
    bar.close()
    if device == "cuda":
        # Two fine-tunings of two epochs of 40 rows in batches of 6.
        assert len(done) == bar.total == 2 * 2 * 6
    else:
        longest = sorted(data.length)[-4:]
        assert bar.total == 2 * 2 * data.length.sum()
        assert bar.total - 2 * 2 * sum(longest) <= sum(done) < bar.total


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir, glue_files):
    """A model folder after an undisturbed run of cola and stsb, two seeds, and what it printed."""
    folder = model_folder(tmp_path_factory.mktemp("finished") / "model", data_dir)
    done = run(folder, glue_files)
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_a_run_leaves_a_table_and_every_score(finished, glue_files):
    folder, printed = finished
    assert sorted(scores(folder)) == [("cola", 0), ("cola", 1), ("stsb", 0), ("stsb", 1)]
    (runs,) = results(folder)
    assert runs[0]["settings"]["glue_lr"] == 4e-5
    assert runs[0]["settings"]["dtype"] == "torch.float32"
    assert runs[0]["torch"] == torch.__version__
    assert runs[0]["rows"] == {"train": 40, "dev": 12}
    page = (folder / "glue.md").read_text()
    for text in ("RoBERTa-base", "85.1", "(2 of 9)", "* CoLA: train: 40 of 8,551 rows"):
        assert text in printed and text.replace("* CoLA", "\\* CoLA") in page
    for key in ("matthews", "pearson"):
        values = [s[key] for (_, _), s in scores(folder).items() if key in s]
        assert f"{np.median(values):.1f}*" in page


def start(model, glue_files, **flags):
    """The script as a process of its own, once it has finished its first fine-tuning."""
    wanted = quick(glue_files) | {"model": model} | flags
    flags = [f"--{name}={value}" for name, value in wanted.items()]
    command = [sys.executable, str(ROOT / "finetune_glue.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not (model / "glue.jsonl").exists():
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=slow)])
def test_a_stopped_run_goes_on_where_it_stopped(finished, model, glue_files, how):
    process = start(model, glue_files, tasks="cola,stsb", seeds=20)
    process.send_signal(how)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == (1 if how == signal.SIGTERM else -how)
    assert "Traceback" not in printed
    before = scores(model)
    assert 1 <= len(before) < 40
    done_already = {job for job in before if job[1] < 2}
    done = run(model, glue_files)
    assert f"{len(done_already)} of 4 fine-tunings are in" in done.stdout
    assert {job: s for job, s in scores(model).items() if job[1] < 2} == scores(finished[0])


def test_what_is_finished_is_not_done_again(finished, tmp_path, glue_files):
    model = shutil.copytree(finished[0], tmp_path / "model")
    again = run(model, glue_files)
    assert again.returncode == 0 and "4 of 4 fine-tunings are in" in again.stdout
    assert "rows/s" not in again.stdout and scores(model) == scores(finished[0])
    other = run(model, glue_files, epochs=1, tasks="cola", seeds=1)
    assert other.returncode == 0 and "already" not in other.stdout
    assert len(results(model)) == 2 and scores(model) == scores(finished[0])
    assert ", epochs=1, " in other.stdout


def seeds_of_cola(model):
    """How many seeds the page of results has for CoLA."""
    page = (model / "glue.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| CoLA")]
    return int(line.split("|")[6])


def test_seeds_are_shared_out(finished, model, glue_files):
    """Processes with seeds of their own fill one table; scores are those of one with all seeds."""
    for first, count in ((1, 2), (0, 1)):
        done = run(model, glue_files, tasks="cola", first_seed=first, seeds=count)
        assert done.returncode == 0 and "already" not in done.stdout
    assert "; seeds: 3 " in done.stdout
    (runs,) = results(model)
    assert sorted(found["seed"] for found in runs) == [0, 1, 2]
    one = scores(finished[0])
    assert all(scores(model)["cola", seed] == one["cola", seed] for seed in range(2))
    again = run(model, glue_files, tasks="cola", seeds=4)
    assert "3 of 4 fine-tunings are in" in again.stdout
    assert "by code" not in again.stdout
    store = model / "glue.jsonl"
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    lines[-1]["code"] = "0123456789abcdef"
    store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    later = run(model, glue_files, tasks="cola", first_seed=2, seeds=2)
    assert "2 of 2 fine-tunings are in" in later.stdout
    assert "by code 0123456789abcdef, today's is" in later.stdout


@pytest.mark.slow
def test_the_loop_of_the_help_text_leaves_the_whole_table(model, glue_files):
    """Five processes at once; whichever ends last has seen all seeds."""
    loop = re.search(r"for s in .*?; wait", ft.__doc__, re.DOTALL)[0]
    flags = {name: value for name, value in quick(glue_files).items() if name != "seeds"}
    flags |= {"model": model, "tasks": "cola,stsb"}
    ours = " ".join(f"--{name}={value}" for name, value in flags.items())
    script = f"{sys.executable} {ROOT}/finetune_glue.py"
    loop = loop.replace("python finetune_glue.py --model=out/fineweb", f"{script} {ours}")
    done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert sorted(scores(model)) == [(t, s) for t in ("cola", "stsb") for s in range(5)]
    assert (model / "glue.md").read_text().count("; seeds: 5 ") == 1


def test_other_data_are_not_what_was_done(finished, glue_files, tmp_path):
    """Same names, same numbers of rows: medians never mix."""
    model = shutil.copytree(finished[0], tmp_path / "model")
    folder = shutil.copytree(glue_files[0], tmp_path / "glue")
    lines = (folder / "CoLA/train.tsv").read_text().splitlines()
    (folder / "CoLA/train.tsv").write_text("\n".join(reversed(lines)))
    done = run(model, glue_files, glue_dir=folder, tasks="cola", seeds=1)
    assert "already" not in done.stdout and len(results(model)[0]) == 5
    assert seeds_of_cola(model) == 1  # those of the last data alone
    # The first data again: done, and what the table is about.
    done = run(model, glue_files, tasks="cola", seeds=2)
    assert "2 of 2 fine-tunings" in done.stdout and seeds_of_cola(model) == 2


def test_other_weights_are_not_what_was_done(finished, glue_files, tmp_path):
    model = shutil.copytree(finished[0], tmp_path / "model")
    torch.manual_seed(1)
    save(MaskedLM(model_config(**SIZES)), model)
    done = run(model, glue_files, tasks="cola", seeds=1)
    assert "already" not in done.stdout and len(results(model)) == 2
    name = results(model)[0][0]["system"]
    assert name.startswith("model, epochs=2, glue_batch=8")
    assert f"| {name}; seeds: 2" in done.stdout
    assert f"| {name} (other weights or precision); seeds: 1" in done.stdout


def test_another_precision_is_named(model, glue_files):
    own = "float32" if ft.machine.native_bf16("cpu") else "bfloat16"
    done = run(model, glue_files, tasks="cola", seeds=1, epochs=1, dtype=own)
    assert done.returncode == 0 and f", dtype={own}; seeds: 1" in done.stdout


def test_a_seed_that_diverges_does_not_end_the_rest(model, settings):
    """The first fine-tuning has a learning rate that no network survives, the second a sane one."""
    rates = iter((1e30, 1e-3))
    fine_tune = ft.fine_tune

    def fine_tune_at(candidate, *rest):
        return fine_tune(dataclasses.replace(candidate, lr=next(rates)), *rest)

    settings.setattr(ft, "fine_tune", fine_tune_at)
    settings.setattr(ft, "model", str(model))
    settings.setattr(ft, "tasks", "stsb")
    with pytest.raises(SystemExit, match="stsb, seed 0: "):
        ft.main()
    assert [*scores(model)] == [("stsb", 1)]


def test_both_baselines_land_in_the_same_table(finished, tmp_path, glue_files):
    folder = shutil.copytree(finished[0], tmp_path / "model")
    scratch = run(folder, glue_files, baseline="scratch", tasks="cola")
    assert scratch.returncode == 0, scratch.stdout
    name = f"hf:{finished[0]}"
    theirs = run(folder, glue_files, baseline=name, tasks="stsb", hf_batch=8)
    assert theirs.returncode == 0 and "batch 8, AdamW 2e-05" in theirs.stdout, theirs.stdout
    # Of its weights nothing is read.
    bare = shutil.copytree(finished[0], tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    flags = {"tasks": "stsb", "hf_batch": 8, "seeds": 1, "epochs": 1}
    fresh = run(folder, glue_files, baseline=f"hf:{bare}-untrained", **flags)
    assert f"| {bare} without pre-training, epochs=1" in fresh.stdout, fresh.stdout
    ours, other, third, _ = results(folder)
    assert ours == results(finished[0])[0]
    assert other[0]["system"].startswith("model without pre-training, ") and len(other) == 2
    assert third[0]["system"].startswith(f"{finished[0]}, ") and len(third) == 2
    page = (folder / "glue.md").read_text()
    assert "| model without pre-training, epochs=2" in page and "hf_batch=8" in page
    assert page.count("## ") == 4


def encoder(kind, folder, data_dir):
    """A small random encoder of transformers, with our tokenizer."""
    sizes = dict.fromkeys(("hidden_size", "dim"), 32)
    sizes |= dict.fromkeys(("num_hidden_layers", "n_layers"), 1)
    sizes |= dict.fromkeys(("num_attention_heads", "n_heads"), 2)
    sizes |= dict.fromkeys(("intermediate_size", "hidden_dim"), 48)
    if kind == "DistilBert":
        names = ("dim", "n_layers", "n_heads", "hidden_dim")
    else:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = {name: sizes[name] for name in names}
    config = getattr(transformers, f"{kind}Config")(vocab_size=600, pad_token_id=0, **sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    inputs = ["input_ids", "attention_mask"]
    if kind == "Bert":
        inputs.append("token_type_ids")
    roles = json.loads((data_dir / "tokenizer_config.json").read_text())
    roles["model_input_names"] = inputs
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    shutil.copyfile(data_dir / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_encoders_of_transformers_learn(kind, settings, tmp_path, data_dir, sentences):
    """Token types only where the model has them."""
    candidate = ft.hugging_face_candidate(str(encoder(kind, tmp_path, data_dir)))
    assert candidate.two_types == (kind == "Bert") and (candidate.batch, candidate.lr) == (32, 2e-5)
    pairs = [(a, b) for a, b in zip(sentences, reversed(sentences), strict=True)]
    for ids, first in candidate.encode(pairs):
        up_to_sep = ids.tolist().index(2) + 1
        assert first == (up_to_sep if kind == "Bert" else len(ids))
    settings.setattr(candidate, "batch", 8)
    arrays = ft.tokenised(candidate, "mnli", "train")
    data = Ragged(arrays, candidate.pad, candidate.two_types, torch.device("cpu"))
    net = candidate.build(3)
    before = ft.predict(net, data, torch.float32)
    ft.fine_tune(candidate, net, data, 0, torch.float32, lambda tokens: None)
    after = ft.predict(net, data, torch.float32)
    assert before.shape == (40, 3) and not np.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_an_untrained_encoder_has_the_architecture_and_fresh_weights(kind, tmp_path, data_dir):
    """Drawn by the seed, N(0, initializer_range) as the library draws them; none are loaded."""
    folder = encoder(kind, tmp_path, data_dir)
    trained = ft.hugging_face_candidate(str(folder))
    with torch.no_grad():
        wanted = trained.build(3).model.state_dict()
    (folder / "model.safetensors").unlink()
    torch.manual_seed(7)
    candidates = [ft.hugging_face_candidate(f"{folder}-untrained") for _ in range(2)]
    assert candidates[0].name == f"{folder} without pre-training"
    assert candidates[0].weights == candidates[1].weights != trained.weights
    pairs = [("the first sentence", "the second")] * 2
    for (ids, first), (others, second) in zip(
        trained.encode(pairs), candidates[0].encode(pairs), strict=True
    ):
        assert np.array_equal(ids, others) and first == second
    states = []
    for candidate, seed in zip([*candidates, candidates[0]], (0, 0, 1), strict=True):
        torch.manual_seed(seed)
        states.append(candidate.build(3).model.state_dict())
    a, b, c = states
    shapes = [{key: t.shape for key, t in state.items()} for state in (wanted, a)]
    assert shapes[0] == shapes[1]
    (table,) = [key for key in a if key.endswith("word_embeddings.weight")]
    assert torch.equal(a[table], b[table]) and a[table].dtype == torch.float32
    for other in (c[table], wanted[table]):
        assert not torch.allclose(a[table], other, atol=1e-3)
    assert a[table].std().item() == pytest.approx(0.02, rel=0.02)


def test_a_folder_may_be_called_untrained(tmp_path, data_dir):
    """Its own weights are read, and -untrained behind its name leaves them out."""
    folder = encoder("Bert", tmp_path / "bert-untrained", data_dir)
    own = ft.hugging_face_candidate(str(folder))
    assert own.name == str(folder)
    theirs = transformers.AutoModel.from_pretrained(folder).state_dict()
    key = "embeddings.word_embeddings.weight"
    assert torch.equal(own.build(2).model.base_model.state_dict()[key], theirs[key])
    fresh = ft.hugging_face_candidate(f"{folder}-untrained")
    assert fresh.name == f"{folder} without pre-training" and fresh.weights != own.weights


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_encoders_of_transformers_that_do_not_fit(kind, settings, tmp_path, data_dir):
    """Another configuration is another start; what is incomplete or too short is refused."""
    name = str(encoder(kind, tmp_path, data_dir))
    weights = ft.hugging_face_candidate(name).weights
    config = tmp_path / "config.json"
    spec = json.loads(config.read_text())
    config.write_text(json.dumps(spec | {"attention_dropout": 0.3, "hidden_dropout_prob": 0.3}))
    assert ft.hugging_face_candidate(name).weights != weights
    wide = "dim" if kind == "DistilBert" else "hidden_size"
    config.write_text(json.dumps(spec | {wide: 64}))
    with pytest.raises(SystemExit, match="is incomplete"):
        ft.hugging_face_candidate(name)
    config.write_text(json.dumps(spec))
    settings.setattr(ft, "glue_seq_len", 1024)
    with pytest.raises(SystemExit, match="--glue_seq_len=512"):
        ft.hugging_face_candidate(name)


def test_all_tasks_at_once(model, glue_files):
    done = run(model, glue_files, tasks=",".join(glue.TASKS), epochs=1, seeds=1)
    assert done.returncode == 0, done.stdout
    assert [*scores(model)] == [(name, 0) for name in glue.TASKS]
    assert [*scores(model)["mnli", 0]] == ["accuracy", "accuracy_mm"]
    for text in (" of 9)", " of 8)"):
        assert text not in done.stdout


@pytest.mark.parametrize(
    ("file", "content"),
    [("train", None), ("dev", "index\tsentence1\tsentence2\tlabel\n"), ("train", "a\tb\n0\t1\n")],
)
def test_a_missing_or_broken_file_is_one_line_before_any_fine_tuning(
    model, glue_files, tmp_path, file, content
):
    folder = shutil.copytree(glue_files[0], tmp_path / "glue")
    path = folder / f"RTE/{file}.tsv"
    path.unlink()
    if content:
        path.write_text(content)
    done = run(model, glue_files, glue_dir=folder, tasks="cola,rte", seeds=1, epochs=1)
    assert done.returncode == 1 and "RTE" in last_line(done) and file in last_line(done)
    assert not (model / "glue.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tasks": "cola,sts-b"}, "sts-b"),
        ({"tasks": ""}, "''"),
        ({"glue_dir": "nowhere"}, "nowhere/CoLA/train.tsv"),
        ({"baseline": "random"}, "--baseline"),
        ({"baseline": "hf:"}, "--baseline"),
        ({"baseline": "scratch", "save_models": True}, "--baseline"),
        ({"baseline": "hf:nowhere"}, "nowhere"),
        ({"baseline": "hf:nowhere-untrained"}, "nowhere"),
        ({"model": Path("nowhere")}, "nowhere"),
        ({"seeds": 0}, "seeds"),
        ({"first_seed": -1}, "first_seed"),
        ({"first_seed": 1, "save_models": True}, "--first_seed"),
        ({"glue_schedule": "step"}, "glue_schedule"),
        ({"glue_pooling": "max"}, "glue_pooling"),
        ({"glue_dropout": 1.5}, "glue_dropout"),
        ({"glue_beta2": 1.0}, "glue_beta2"),
        ({"dtype": "int8"}, "dtype"),
        ({"glue_seq_len": 136}, "--glue_seq_len=128"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(model, glue_files, flags, named):
    before = sorted(model.iterdir())
    done = run(**{"model": model, "glue_files": glue_files} | flags)
    assert done.returncode == 1 and named in last_line(done), done.stdout
    assert "Traceback" not in done.stdout
    assert [path for path in sorted(model.iterdir()) if path.name != ".glue.lock"] == before


def test_a_missing_package_is_no_model_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="transformers"):  # safety.run() says it
        ft.hugging_face_candidate("nowhere")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("glue.md", "my notes"),
        ("cola", "my notes"),
        ("cola/notes.txt", "my notes"),
        ("cola/config.json", "{}"),
        ("cola/config.json", "precious"),
        ("cola/config.json", '{"model_type": "bert"}'),
        ("cola/config.json", '{"nanocram": {}}'),
    ],
)
def test_what_is_not_ours_in_a_folder_is_one_line_and_stays(
    tmp_path, data_dir, glue_files, file, content
):
    folder = model_folder(tmp_path / "other", data_dir)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)
    done = run(folder, glue_files, save_models=True)
    assert done.returncode == 1 and last_line(done).startswith(str(folder)), done.stdout
    assert (folder / file).read_text() == content and not (folder / "glue.jsonl").exists()


def test_recipes_for_train_leak_nothing():
    assert {*ft.SETTINGS} & {*train.SETTINGS} == {"device", "dtype"}


def test_izsak_is_fine_tuned_as_the_papers_authors_do():
    """Their GLUE.yaml, with which they score this recipe; all others have the protocol."""
    theirs = {"epochs": 10, "glue_batch": 32, "glue_lr": 2e-5, "glue_warmup": 0.06}
    theirs |= {"glue_schedule": "linear", "glue_weight_decay": 0.1}
    ours = {*ft.SETTINGS}
    for name in ("izsak", "bert", "bert_minimal_arch", "bert_minimal_train", "crammed"):
        recipe = configurator.assignments(ROOT / f"config/{name}.py")
        found = {key: configurator.evaluate(node.value, {}) for key, node in recipe if key in ours}
        assert found == (theirs if name == "izsak" else {})


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory, data_dir, glue_files):
    """A model folder with the classifiers of three tasks."""
    folder = model_folder(tmp_path_factory.mktemp("classifiers") / "model", data_dir)
    done = run(folder, glue_files, tasks="cola,mrpc,stsb", save_models=True)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("name", ["cola", "mrpc", "stsb"])
def test_kept_classifiers_predict_the_same_in_transformers(classifiers, glue_files, name):
    """Logits of padded batches, and the dev scores of that seed in glue.jsonl."""
    task = glue.TASKS[name]
    ours = load(classifiers / name)
    assert isinstance(ours, Classifier)
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        classifiers / name, output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[key]
    assert theirs.config.num_labels == (len(task.labels) or 1)
    assert [*theirs.config.id2label.values()] == [*(task.labels or ("LABEL_0",))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifiers / name)
    texts, labels = glue.read(name, "dev", glue_files[0])
    columns = map(list, zip(*texts, strict=True))
    batch = tokenizer(*columns, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**batch).logits
        found = ours(batch["input_ids"], batch["attention_mask"])
    assert torch.allclose(found, logits, atol=1e-5)
    wanted = scores(classifiers)[name, 0]
    found = glue.score(name, np.array(labels), logits.numpy())
    assert found == pytest.approx(wanted, abs=0.01)  # of 100


def test_classifiers_are_kept_once_and_made_anew_where_they_are_gone(
    classifiers, glue_files, tmp_path
):
    model = shutil.copytree(classifiers, tmp_path / "model")
    flags = {"tasks": "cola,mrpc,stsb", "save_models": True}
    again = run(model, glue_files, **flags)
    assert "6 of 6 fine-tunings are in" in again.stdout
    shutil.rmtree(model / "cola")
    again = run(model, glue_files, **flags)
    assert "5 of 6 fine-tunings are in" in again.stdout
    assert (model / "cola" / "model.safetensors").exists()
    # Another one in its place is not taken for it.
    shutil.copy(model / "cola" / "model.safetensors", model / "mrpc" / "model.safetensors")
    again = run(model, glue_files, **flags)
    assert "5 of 6 fine-tunings are in" in again.stdout
    assert "6 of 6 fine-tunings are in" in run(model, glue_files, **flags).stdout
    refused = run(model / "cola", glue_files)
    assert refused.returncode == 1 and "is fine-tuned already" in refused.stdout
