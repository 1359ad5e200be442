"""Fine-tuning against a plain loop around transformers' own classifier, and the script as a user runs it."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, check_submission, last_line, script
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import finetune_glue as ft
from model import Classifier, MaskedLM, ModelConfig
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
QUICK = {"seeds": 2, "epochs": 2, "glue_batch": 8, "dtype": "float32", "device": "cpu"}


def model_folder(folder, data_dir, **switches):
    torch.manual_seed(0)
    save(MaskedLM(ModelConfig(**(SIZES | {"zero_init": False} | switches))), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data_dir / name, folder / name)
    return folder


@pytest.fixture
def model(tmp_path, data_dir):
    return model_folder(tmp_path / "model", data_dir)


@pytest.fixture
def settings(monkeypatch, tmp_path, glue_files):
    """The script's settings for calls from a test."""
    for name, value in (
        QUICK | {"glue_dir": str(glue_files[0]), "glue_cache": str(tmp_path / "cache")}
    ).items():
        assert hasattr(ft, name)
        monkeypatch.setattr(ft, name, value)
    return monkeypatch


def settings_of(model, glue_files, **flags):
    return (
        QUICK
        | {"glue_cache": model.parent / "cache", "glue_dir": glue_files[0], "model": model}
        | flags
    )


def run(model, glue_files, tasks="cola,stsb", **flags):
    """The script's main() with these settings: exit status and what it prints, as of a process, without its start."""
    printed, status = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name, value in settings_of(model, glue_files, tasks=tasks, **flags).items():
            patch.setattr(ft, name, type(getattr(ft, name))(value))
        try:
            ft.main()
        except SystemExit as e:
            status = 1
            print(e.code)
    return types.SimpleNamespace(returncode=status, stdout=printed.getvalue())


def start(model, glue_files, **flags):
    """The script as a process of its own, once it has finished its first fine-tuning."""
    command = [
        f"--{name}={value}" for name, value in settings_of(model, glue_files, **flags).items()
    ]
    command = [sys.executable, str(ROOT / "finetune_glue.py"), *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not (model / "glue.json").exists():
        time.sleep(0.001)
    return process


def results(model):
    return json.loads((model / "glue.json").read_text())["systems"]


def scores(model, system=0):
    return {(r["task"], r["seed"]): r["scores"] for r in results(model)[system]["runs"]}


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=2), st.integers(16, 64))
def test_truncation_keeps_what_fits(lengths, limit):
    kept = truncated(lengths, limit)
    assert sum(kept) == min(sum(lengths), limit) and all(
        0 < k <= n for k, n in zip(kept, lengths, strict=True)
    )


@pytest.mark.parametrize("limit", [16, 24, 128])
def test_inputs_are_those_of_transformers(model, settings, sentences, limit):
    settings.setattr(ft, "glue_seq_len", limit)
    pairs = [
        (a, b * (1 + i % 3))
        for i, (a, b) in enumerate(zip(sentences, reversed(sentences), strict=True))
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for texts in ([(a,) for a in sentences], pairs):
        columns = map(list, zip(*texts, strict=True))
        wanted = tokenizer(*columns, truncation=True, max_length=limit, return_token_type_ids=True)
        found = list(ft.ours(model, False).encode(texts))
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
    assert (
        sum(np.ptp(length[batch]) for batch in epoch) <= np.ptp(length) * pools
    )  # sorted within each


def test_epochs_differ_and_batches_come_in_random_order():
    length = np.arange(3, 131).repeat(10)
    first, second = (batches_by_length(length, 16, (0, epoch)) for epoch in range(2))
    assert not np.array_equal(np.sort(first[0]), np.sort(second[0]))
    widths = [length[batch].max() for batch in first]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.3
    distinct = np.arange(3, 643)  # the order of lengths alone must not decide who shares a batch
    pairs = [
        {
            frozenset((a, b))
            for batch in batches_by_length(distinct, 16, (0, epoch))
            for a in batch
            for b in batch
        }
        for epoch in range(2)
    ]
    assert len(pairs[0] & pairs[1]) < 0.5 * len(pairs[0])


def test_batches_are_padded_as_transformers_pads_them(model, settings, sentences):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = [(a, b) for a, b in zip(sentences, reversed(sentences), strict=True)]
    rows = list(ft.ours(model, False).encode(texts))
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
        assert torch.equal(ids, wanted["input_ids"]) and torch.equal(
            types, wanted["token_type_ids"]
        )
        mask = torch.ones_like(ids) if mask is None else mask
        assert torch.equal(mask.long(), wanted["attention_mask"])


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
def test_the_learning_rate_is_transformers_cosine(settings, warmup):
    settings.setattr(ft, "glue_warmup", warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, int(warmup * 57), 57)
    for step in range(57):
        assert ft.lr_share(step, 57) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("task", "n_outputs"), [("stsb", 1), ("mnli", 3)])
def test_training_equals_a_plain_loop_around_transformers(model, settings, task, n_outputs):
    """The same batches, weights and settings, the library's model, optimiser and loss: the same outputs at the end."""
    settings.setattr(ft, "glue_dropout", 0.0)
    settings.setattr(ft, "glue_lr", 1e-3)
    system = ft.ours(model, False)
    data = Ragged(ft.tokenised(system, task, "train"), system.pad, False, torch.device("cpu"))
    torch.manual_seed(5)
    net = system.build(n_outputs)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=n_outputs, problem_type="regression" if n_outputs == 1 else None
    ).train()
    theirs.classifier.load_state_dict(net.classifier.state_dict())
    before = ft.predict(net, data, torch.float32)

    facts = ft.train(system, net, data, 3, torch.float32, lambda tokens: None)
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, (0.9, 0.98), 1e-6, weight_decay=0.0)
    steps = [rows for epoch in range(2) for rows in batches_by_length(data.length, 8, (3, epoch))]
    schedule = transformers.get_cosine_schedule_with_warmup(
        optimizer, int(0.1 * len(steps)), len(steps)
    )
    for rows in steps:
        (ids, mask, _), labels = data.batch(rows)
        mask = torch.ones_like(ids) if mask is None else mask
        theirs(
            input_ids=ids, attention_mask=mask, labels=labels[:, None] if n_outputs == 1 else labels
        ).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = ft.predict(net, data, torch.float32)
    everything = Ragged(ft.tokenised(system, task, "train"), 0, False, torch.device("cpu"))
    ids, mask, _ = everything.batch(np.arange(len(data.length)))[0]
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=ids, attention_mask=mask).logits.numpy()
    assert np.abs(after - wanted).max() < 1e-3 < 1e-2 < np.abs(after - before).max()
    assert len(steps) == 10 and facts["rows_per_second"] > 0 and 0 < facts["padded"] < 0.5


def test_the_tokenised_data_are_cached_and_a_damaged_cache_is_none(model, settings, tmp_path):
    system = ft.ours(model, False)
    fresh = ft.tokenised(system, "rte", "dev")
    (path,) = (tmp_path / "cache").glob("rte-dev-*.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ft.glue, "read", None)  # not needed any more
        cached = ft.tokenised(system, "rte", "dev")
    path.write_bytes(path.read_bytes()[:100])
    again = ft.tokenised(system, "rte", "dev")
    for other in (cached, again):
        assert (
            all(np.array_equal(fresh[k], other[k]) for k in fresh) and fresh.keys() == other.keys()
        )
    settings.setattr(ft, "glue_seq_len", 16)
    assert ft.tokenised(system, "rte", "dev")["length"].max() == 16 < fresh["length"].max()


def test_one_label_among_thousands_makes_other_data(model, settings, tmp_path):
    """An array this long prints as its first and last labels alone."""
    (tmp_path / "SST-2").mkdir()
    settings.setattr(ft, "glue_dir", str(tmp_path))
    sources = set()
    for odd in (None, 1500):
        rows = [f"a sentence\t{int(i == odd)}" for i in range(3000)]
        (tmp_path / "SST-2/train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
        sources.add(str(ft.tokenised(ft.ours(model, False), "sst2", "train")["source"]))
    assert len(sources) == 2


def test_fresh_weights_differ_by_seed_and_pre_training_is_loaded(model, settings):
    def weights(scratch, seed):
        torch.manual_seed(seed)
        net = ft.ours(model, scratch).build(2)
        return net.model.layers[0].attn.Wq.weight, net.classifier.weight

    pretrained = ft.load(model).model.layers[0].attn.Wq.weight
    for scratch in (False, True):
        (a, ca), (b, cb), (c, cc) = (weights(scratch, seed) for seed in (0, 0, 1))
        assert torch.equal(a, b) and torch.equal(ca, cb) and not torch.equal(ca, cc)
        assert torch.equal(a, pretrained) != scratch and torch.equal(a, c) != scratch


def test_dropout_is_on_in_training_alone(model, settings):
    net = ft.ours(model, False).build(2)
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert {layer.attn.dropout for layer in net.model.layers} == {0.1}
    system = ft.ours(model, False)
    data = Ragged(ft.tokenised(system, "rte", "dev"), 0, False, torch.device("cpu"))
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        outputs.append(ft.predict(net.train(), data, torch.float32))
    assert np.array_equal(*outputs)
    ft.train(system, net.eval(), data, 0, torch.float32, lambda tokens: None)
    assert net.training


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir, glue_files):
    """A model folder after an undisturbed run of cola and stsb, two seeds, and what it printed."""
    folder = model_folder(tmp_path_factory.mktemp("finished") / "model", data_dir)
    done = script("finetune_glue.py", **settings_of(folder, glue_files, tasks="cola,stsb"))
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_a_run_leaves_a_table_and_every_score(finished, glue_files):
    folder, printed = finished
    assert sorted(scores(folder)) == [("cola", 0), ("cola", 1), ("stsb", 0), ("stsb", 1)]
    (entry,) = results(folder)
    assert entry["protocol"]["glue_lr"] == 4e-5 and entry["protocol"]["dtype"] == "torch.float32"
    assert entry["machine"]["torch"] == torch.__version__
    assert entry["runs"][0]["rows"] == {"train": 40, "dev": 12}
    page = (folder / "glue.md").read_text()
    for text in ("RoBERTa-base", "85.1", "(2 of 9)", "* CoLA: train: 40 of 8,551 rows"):
        assert text in printed and text.replace("*", "\\*") in page
    for key in ("matthews", "pearson"):
        values = [s[key] for (_, _), s in scores(folder).items() if key in s]
        assert f"{np.median(values):.1f}*" in page
    assert "seed 0: matthews" in printed and "rows/s" in printed and "padding" in printed


def test_a_killed_run_goes_on_where_it_stopped(finished, model, glue_files):
    process = start(model, glue_files, tasks="cola,stsb", seeds=8)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    before = scores(model)
    assert 1 <= len(before) < 16
    wanted = {job for job in before if job[1] < 2}
    done = run(model, glue_files)
    assert f"{len(wanted)} of 4 fine-tunings are in" in done.stdout
    assert {job: s for job, s in scores(model).items() if job[1] < 2} == scores(finished[0])
    count = len(scores(model))
    again = run(model, glue_files)
    assert (
        again.returncode == 0
        and "4 of 4 fine-tunings are in" in again.stdout
        and "rows/s" not in again.stdout
    )
    other = run(model, glue_files, epochs=1, tasks="cola", seeds=1)
    assert other.returncode == 0 and len(results(model)) == 2 and len(scores(model)) == count
    assert ", epochs=1, " in other.stdout


def test_other_data_other_weights_or_another_protocol_are_not_what_was_done(
    finished, glue_files, tmp_path, data_dir
):
    """Same names, same numbers of rows: only what is the same is taken as done, and medians never mix."""
    model = shutil.copytree(finished[0], tmp_path / "model")
    folder = shutil.copytree(glue_files[0], tmp_path / "glue")
    lines = (folder / "CoLA/train.tsv").read_text().splitlines()
    (folder / "CoLA/train.tsv").write_text("\n".join(reversed(lines)))
    done = run(model, glue_files, glue_dir=folder, tasks="cola", seeds=1)
    assert "already" not in done.stdout and len(results(model)[0]["runs"]) == 5
    page = (model / "glue.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| CoLA")]
    assert [cell.strip() for cell in line.split("|")][6] == "1"  # seeds of the last data alone
    done = run(
        model, glue_files, tasks="cola", seeds=2
    )  # the first data again: done, and what the table is about
    (line,) = [
        line for line in (model / "glue.md").read_text().splitlines() if line.startswith("| CoLA")
    ]
    assert (
        "2 of 2 fine-tunings" in done.stdout
        and [cell.strip() for cell in line.split("|")][6] == "2"
    )
    torch.manual_seed(1)
    save(MaskedLM(ModelConfig(**SIZES)), model)
    done = run(model, glue_files, tasks="cola", seeds=1)
    assert "already" not in done.stdout and len(results(model)) == 2
    assert "model, epochs=2, glue_batch=8, dtype=float32 (2)" in done.stdout


def test_a_seed_that_diverges_does_not_end_the_rest(model, settings):
    """The first fine-tuning has a learning rate that no network survives, the second a sane one."""
    rates, train = iter((1e30, 1e-3)), ft.train

    def train_at(system, *rest):
        return train(dataclasses.replace(system, lr=next(rates)), *rest)

    settings.setattr(ft, "train", train_at)
    settings.setattr(ft, "model", str(model))
    settings.setattr(ft, "tasks", "stsb")
    with pytest.raises(
        SystemExit, match=r"^stsb, seed 0: outputs that are not finite: try --dtype=float32"
    ):
        ft.main()
    assert [*scores(model)] == [("stsb", 1)]


def test_a_stopped_run_says_how_to_go_on(model, glue_files):
    process = start(model, glue_files, seeds=100)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 1
        and "the same command goes on" in printed
        and "Traceback" not in printed
    )


def test_both_baselines_land_in_the_same_table(finished, tmp_path, glue_files):
    folder = shutil.copytree(finished[0], tmp_path / "model")
    scratch = run(folder, glue_files, baseline="scratch", tasks="cola")
    assert scratch.returncode == 0, scratch.stdout
    name = f"hf:{finished[0]}"
    theirs = run(folder, glue_files, baseline=name, tasks="stsb", hf_batch=8)
    assert theirs.returncode == 0 and "batch 8, AdamW 2e-05" in theirs.stdout, theirs.stdout
    ours, other, third = results(folder)
    assert ours["runs"] == results(finished[0])[0]["runs"]
    assert other["system"].startswith("model without pre-training, ") and len(other["runs"]) == 2
    assert third["system"].startswith(f"{finished[0]}, ") and len(third["runs"]) == 2
    page = (folder / "glue.md").read_text()
    assert (
        "| model without pre-training, epochs=2" in page
        and "hf_batch=8" in page
        and page.count("## ") == 3
    )


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_encoders_of_transformers(kind, settings, tmp_path, data_dir, sentences):
    """Small random ones: token types only where the model has them, whatever is incomplete or too short refused."""
    names = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    if kind == "DistilBert":
        names = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}
    config = getattr(transformers, f"{kind}Config")(vocab_size=600, pad_token_id=0, **names)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    inputs = ["input_ids", *(["token_type_ids"] if kind == "Bert" else []), "attention_mask"]
    roles = json.loads((data_dir / "tokenizer_config.json").read_text()) | {
        "model_input_names": inputs
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    shutil.copyfile(data_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    system = ft.hugging_face(str(tmp_path))
    assert system.two_types == (kind == "Bert") and (system.batch, system.lr) == (32, 2e-5)
    settings.setattr(system, "batch", 8)
    data = Ragged(
        ft.tokenised(system, "mnli", "train"), system.pad, system.two_types, torch.device("cpu")
    )
    pairs = list(
        system.encode([(a, b) for a, b in zip(sentences, reversed(sentences), strict=True)])
    )
    for ids, first in pairs:
        assert first == (
            ids.tolist().index(2) + 1 if kind == "Bert" else len(ids)
        )  # up to the first [SEP]
    net = system.build(3)
    before = ft.predict(net, data, torch.float32)
    ft.train(system, net, data, 0, torch.float32, lambda tokens: None)
    assert before.shape == (40, 3) and not np.allclose(
        before, ft.predict(net, data, torch.float32), atol=1e-4
    )

    spec = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(spec | {"attention_dropout": 0.3, "hidden_dropout_prob": 0.3})
    )
    assert ft.hugging_face(str(tmp_path)).weights != system.weights
    wide = "dim" if kind == "DistilBert" else "hidden_size"
    (tmp_path / "config.json").write_text(json.dumps(spec | {wide: 64}))
    with pytest.raises(SystemExit, match="is incomplete"):
        ft.hugging_face(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(spec))
    settings.setattr(ft, "glue_seq_len", 1024)
    with pytest.raises(SystemExit, match=r"takes at most 51\d tokens: type --glue_seq_len=512"):
        ft.hugging_face(str(tmp_path))


def test_a_submission_of_all_tasks(model, glue_files):
    names = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte,wnli"
    done = run(model, glue_files, tasks=names, predict_test=True, epochs=1, seeds=3)
    assert done.returncode == 0, done.stdout
    files = (
        "CoLA",
        "SST-2",
        "MRPC",
        "STS-B",
        "QQP",
        "MNLI-m",
        "MNLI-mm",
        "QNLI",
        "RTE",
        "WNLI",
        "AX",
    )
    check_submission(model / "submission/submission.zip", {f"{f}.tsv": 7 for f in files})
    assert " of 9)" not in done.stdout and "also wants" not in done.stdout
    assert "RTE.tsv will have 7 rows, the leaderboard wants 3,000" in done.stdout
    shutil.rmtree(model / "submission/seed1")
    again = run(model, glue_files, tasks=names, predict_test=True, epochs=1, seeds=3)
    assert "18 of 27 fine-tunings" in again.stdout and (model / "submission/seed1/AX.tsv").exists()
    folder = shutil.copytree(glue_files[0], model.parent / "other")
    (folder / "RTE/test.tsv").write_text((folder / "RTE/test.tsv").read_text().replace("the", "a"))
    other = run(
        model, glue_files, glue_dir=folder, tasks=names, predict_test=True, epochs=1, seeds=1
    )
    assert "8 of 9 fine-tunings" in other.stdout  # another test set has to be answered anew


def test_missing_files_leave_out_their_task(model, glue_files, tmp_path):
    folder = shutil.copytree(glue_files[0], tmp_path / "glue")
    (folder / "RTE/train.tsv").unlink()
    (folder / "CoLA/test.tsv").unlink()
    done = run(
        model, glue_files, glue_dir=folder, tasks="rte,cola", predict_test=True, seeds=1, epochs=1
    )
    assert done.returncode == 0, done.stdout
    assert f"rte is left out: {folder}/RTE/train.tsv not found" in done.stdout
    assert (
        "CoLA.tsv is left out" in done.stdout
        and "the leaderboard also wants CoLA.tsv" in done.stdout
    )
    assert "(1 of 9)" in done.stdout
    none = run(model, glue_files, glue_dir=folder, tasks="rte")
    assert none.returncode == 1 and "no task is left" in last_line(none)


def test_a_users_slip_is_one_line(model, glue_files, tmp_path, data_dir):
    swapped = model_folder(tmp_path / "swapped", data_dir, vocab_size=601)
    short = model_folder(tmp_path / "short", data_dir, max_seq_len=64)
    empty = shutil.copytree(glue_files[0], tmp_path / "glue")
    (empty / "RTE/dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    (empty / "WNLI/train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t7\n")
    broken = model_folder(tmp_path / "broken", data_dir)
    (broken / "glue.json").write_text('{"systems": [{}]}')
    foreign = model_folder(tmp_path / "foreign", data_dir)
    (foreign / "glue.md").write_text("my own notes")
    cases = [
        ({"model": foreign}, "glue.md is there without a glue.json: it is not ours"),
        ({"model": swapped}, "the tokenizer has 600 entries, the model 601"),
        ({"model": short}, "takes at most 64 tokens: type --glue_seq_len=64"),
        ({"model": tmp_path / "nowhere"}, "not found: name the folder of a run"),
        ({"model": tmp_path}, "is no model folder of train.py"),
        ({"model": broken}, "is broken"),
        ({"tasks": "cola,sts-b"}, "there is no task 'sts-b': did you mean stsb?"),
        ({"tasks": "squad"}, "there is no task 'squad': did you mean one of cola sst2"),
        ({"tasks": ""}, "there is no task ''"),
        ({"glue_dir": tmp_path / "nowhere"}, "is no folder: --glue_dir"),
        ({"glue_dir": empty, "tasks": "rte"}, "RTE, dev: there is not one row in it"),
        ({"glue_dir": empty, "tasks": "wnli"}, "line 2: label '7' is not 0 or 1"),
        ({"glue_seq_len": 100}, "type --glue_seq_len=96"),
        ({"baseline": "random"}, "type --baseline=scratch"),
        ({"baseline": "hf:"}, "type --baseline=scratch"),
        ({"baseline": f"hf:{tmp_path}"}, f"transformers cannot load {tmp_path}"),
        ({"seeds": 0}, "seeds=0 cannot work"),
    ]
    for flags, message in cases:
        done = run(**{"model": model, "glue_files": glue_files} | flags)
        assert done.returncode == 1 and message in last_line(done), (flags, done.stdout)


def test_recipes_for_train_leak_nothing():
    ours, theirs = (
        {*configurator.settings(ROOT / name)} for name in ("finetune_glue.py", "train.py")
    )
    assert ours & theirs == {"device", "dtype"}


def test_kept_classifiers_predict_the_same_in_transformers(model, glue_files):
    """One sentence, pairs, a regression: logits of padded batches, and the dev scores of that seed in glue.json."""
    done = run(model, glue_files, tasks="cola,mrpc,stsb", save_models=True)
    assert done.returncode == 0, done.stdout
    (system,) = json.loads((model / "glue.json").read_text())["systems"]
    for name in ("cola", "mrpc", "stsb"):
        task = glue.TASKS[name]
        ours = load(model / name)
        assert isinstance(ours, Classifier)
        theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            model / name, output_loading_info=True
        )
        assert not any(
            report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert theirs.config.num_labels == task.n_outputs
        assert [*theirs.config.id2label.values()] == [*(task.labels or ("LABEL_0",))]
        tokenizer = transformers.AutoTokenizer.from_pretrained(model / name)
        texts, labels = glue.read(name, "dev", glue_files[0])
        columns = map(list, zip(*texts, strict=True))
        batch = tokenizer(
            *columns, padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        with torch.no_grad():
            logits = theirs(**batch).logits
            assert torch.allclose(
                ours(batch["input_ids"], batch["attention_mask"]), logits, atol=1e-5
            )
        wanted = next(r["scores"] for r in system["runs"] if r["task"] == name and r["seed"] == 0)
        assert glue.score(name, np.array(labels), logits.numpy()) == pytest.approx(
            wanted, abs=0.01
        )  # of 100
    again = run(model, glue_files, tasks="cola,mrpc,stsb", save_models=True)
    assert "6 of 6 fine-tunings are in" in again.stdout
    shutil.rmtree(model / "cola")
    again = run(model, glue_files, tasks="cola,mrpc,stsb", save_models=True)
    assert (
        "5 of 6 fine-tunings are in" in again.stdout
        and (model / "cola" / "model.safetensors").exists()
    )
    refused = run(model / "cola", glue_files)
    assert refused.returncode == 1 and "is fine-tuned already" in refused.stdout
