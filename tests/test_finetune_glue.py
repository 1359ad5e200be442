"""Fine-tuning against a plain loop around transformers, and the script as a user runs it."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from conftest import ROOT, last_line, model_config
from hub import StandIn

import finetune_glue as ft
from model import MaskedLM
from nanocram import glue
from nanocram.data import Ragged, batches_by_length
from nanocram.model_folder import load, modernbert_config, save, to_folder_keys

SIZES = dict(vocab_size=600, n_layer=2, n_head=2, n_embd=32, n_inner=48, max_seq_len=128)
QUICK = {"seeds": 2, "epochs": 2, "glue_batch": 8, "dtype": "float32", "device": "cpu"}
CPU = torch.device("cpu")


def model_folder(folder, data_dir, **switches):
    torch.manual_seed(0)
    save(MaskedLM(model_config(**(SIZES | {"zero_init": False} | switches))), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data_dir / name, folder / name)
    return folder


@pytest.fixture
def model(tmp_path, data_dir):
    return model_folder(tmp_path / "model", data_dir)


@pytest.fixture
def settings(monkeypatch, glue_files):
    """The quick settings are the script's; others with settings.setattr(ft, name, value)."""
    for name, value in (QUICK | {"glue_dir": str(glue_files[0])}).items():
        monkeypatch.setattr(ft, name, value)
    return monkeypatch


def run(model, glue_files, tasks="cola,stsb", **flags):
    """main() with these settings: exit status and what it prints, as of a process."""
    wanted = QUICK | {"glue_dir": str(glue_files[0]), "model": model, "tasks": tasks} | flags
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


def scores(model):
    """{(task, seed): scores} of the candidate that came first."""
    runs = [*glue.read_runs(model).values()]
    first = [run for run in runs if run["name"] == runs[0]["name"]]
    return {(run["task"], run["seed"]): run["scores"] for run in first}


# 17 leaves an even number for two texts. Versions of tokenizers differ in whose an odd token
# is: the first text's here and since 0.23.3, the second's in 0.23.2.
@pytest.mark.parametrize("limit", [17, 128])
def test_inputs_are_those_of_transformers(model, settings, sentences, limit):
    settings.setattr(ft, "glue_seq_len", limit)
    others = [text * (1 + i % 3) for i, text in enumerate(reversed(sentences))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for texts in ([(a,) for a in sentences], list(zip(sentences, others, strict=True))):
        columns = map(list, zip(*texts, strict=True))
        wanted = tokenizer(*columns, truncation=True, max_length=limit, return_token_type_ids=True)
        found = list(ft.Ours(model, False).encode(texts))
        assert [ids.tolist() for ids, _ in found] == wanted["input_ids"]
        assert [first for _, first in found] == [t.count(0) for t in wanted["token_type_ids"]]


def test_an_epoch_takes_every_row_once_in_batches_of_like_length():
    length = np.random.default_rng(0).integers(3, 128, 803)
    epoch = batches_by_length(length, 16, (0, 0))
    rows = np.concatenate(epoch)
    assert len(set(rows.tolist())) == len(rows) == 800
    assert {len(batch) for batch in epoch} == {16}
    assert np.mean([np.ptp(length[batch]) for batch in epoch]) < 30


@pytest.mark.parametrize(
    ("task", "n_outputs", "pooling", "decay", "kind"),
    [("stsb", 1, "cls", 0.0, "cosine"), ("mnli", 3, "mean", 30.0, "linear")],
)
def test_training_equals_a_plain_loop_around_transformers(
    model, settings, task, n_outputs, pooling, decay, kind
):
    """Same batches, weights and settings: the library's loop has the same outputs at the end."""
    settings.setattr(ft, "glue_dropout", 0.0)
    settings.setattr(ft, "glue_lr", 1e-3)
    settings.setattr(ft, "glue_pooling", pooling)
    settings.setattr(ft, "glue_weight_decay", decay)
    settings.setattr(ft, "glue_schedule", kind)
    candidate = ft.Ours(model, False)
    data = Ragged(ft.tokenised(candidate, task, "train"), False, CPU)
    torch.manual_seed(5)
    net = candidate.build(n_outputs)
    facts = {"classifier_pooling": pooling, "classifier_dropout": 0.0, "num_labels": n_outputs}
    config = transformers.ModernBertConfig.from_dict(modernbert_config(net.config) | facts)
    theirs = transformers.ModernBertForSequenceClassification(config).train()
    theirs.load_state_dict(to_folder_keys(net.state_dict(), net.config, True))
    before = ft.predict(net, data, torch.float32)
    train_loss = ft.fine_tune(candidate, net, data, 3, torch.float32)

    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, p in theirs.named_parameters():
        groups["norm" in name or "bias" in name]["params"].append(p)
    optimizer = torch.optim.AdamW(groups, 1e-3, (0.9, 0.98), 1e-6, weight_decay=decay)
    steps = [rows for epoch in range(2) for rows in batches_by_length(data.length, 8, (3, epoch))]
    schedule = transformers.get_scheduler(kind, optimizer, int(0.1 * len(steps)), len(steps))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    texts, numbers = glue.read(task, "train", ft.glue_dir)
    losses = []
    for rows in steps:
        columns = zip(*(texts[i] for i in rows), strict=True)
        inputs = tokenizer(*map(list, columns), **options)
        labels = torch.from_numpy(numbers[rows])
        labels = labels.float()[:, None] if n_outputs == 1 else labels
        loss = theirs(**inputs, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = ft.predict(net, data, torch.float32)
    with torch.no_grad():
        inputs = tokenizer(*map(list, zip(*texts, strict=True)), **options)
        wanted = theirs.eval()(**inputs).logits.numpy()
    assert np.abs(after - wanted).max() < 1e-3 < 1e-2 < np.abs(after - before).max()
    assert len(steps) == 10
    assert train_loss == pytest.approx(np.mean(losses[5:]), rel=1e-3)


def test_pre_training_is_loaded_unless_from_scratch(model, settings):
    pretrained = load(model).model.layers[0].attn.Wq.weight
    for scratch in (False, True):
        weight = ft.Ours(model, scratch).build(2).model.layers[0].attn.Wq.weight
        assert torch.equal(weight, pretrained) is not scratch


def test_dropout_is_on_in_training_alone(model, settings):
    candidate = ft.Ours(model, False)
    net = candidate.build(2)
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert {layer.attn.dropout for layer in net.model.layers} == {0.1}
    data = Ragged(ft.tokenised(candidate, "rte", "dev"), False, CPU)
    ft.fine_tune(candidate, net.eval(), data, 0, torch.float32)
    assert net.training


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir, glue_files):
    """A model folder after an undisturbed run of cola and stsb, two seeds, and what it printed."""
    folder = model_folder(tmp_path_factory.mktemp("finished") / "model", data_dir)
    done = run(folder, glue_files)
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_a_run_leaves_a_table_and_every_score(finished):
    folder, printed = finished
    assert sorted(scores(folder)) == [("cola", 0), ("cola", 1), ("stsb", 0), ("stsb", 1)]
    first = next(iter(glue.read_runs(folder).values()))
    assert first["settings"]["glue_lr"] == 4e-5 and first["settings"]["dtype"] == "float32"
    assert first["rows"] == {"train": 40, "dev": 12} and first["train_loss"] > 0
    assert first["torch"] == torch.__version__
    page = (folder / "glue.md").read_text()
    for text in ("RoBERTa-base", "85.1", "(2 of 9)", "CoLA: 40 of 8,551 train rows"):
        assert text in printed and text in page
    for key in ("matthews", "pearson"):
        values = [found[key] for found in scores(folder).values() if key in found]
        assert f"{np.median(values):.1f}*" in page


def test_a_killed_run_goes_on_where_it_stopped(finished, model, glue_files):
    wanted = QUICK | {"glue_dir": glue_files[0], "model": model, "tasks": "cola,stsb", "seeds": 20}
    flags = [f"--{name}={value}" for name, value in wanted.items()]
    command = [sys.executable, str(ROOT / "finetune_glue.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not glue.read_runs(model):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    before = scores(model)
    assert 1 <= len(before) < 40
    n_done = len([job for job in before if job[1] < 2])
    done = run(model, glue_files)
    assert f"{n_done} of 4 fine-tunings are in" in done.stdout
    assert {job: s for job, s in scores(model).items() if job[1] < 2} == scores(finished[0])


def test_what_is_finished_is_not_done_again(finished, tmp_path, data_dir, glue_files):
    model = shutil.copytree(finished[0], tmp_path / "model")
    again = run(model, glue_files)
    assert again.returncode == 0 and "4 of 4 fine-tunings are in" in again.stdout
    assert "training loss" not in again.stdout and scores(model) == scores(finished[0])
    # other settings, other seeds and other weights are other runs
    other = run(model, glue_files, epochs=1, tasks="cola", seeds=1)
    assert ", epochs=1, " in other.stdout and "already" not in other.stdout
    more = run(model, glue_files, tasks="cola", first_seed=1, seeds=2)
    assert "1 of 2 fine-tunings are in" in more.stdout and "; seeds: 2 to 3" in more.stdout
    model_folder(model, data_dir, norm_eps=1e-4, linear_bias=True)
    other = run(model, glue_files, tasks="cola")
    assert "already" not in other.stdout
    assert len({run["name"] for run in glue.read_runs(model).values()}) == 3


def test_a_seed_that_diverges_does_not_end_the_rest(model, settings, monkeypatch, glue_files):
    """The first fine-tuning has a learning rate that no network survives, the second a sane one."""
    rates = iter((1e30, 1e-3))
    fine_tune = ft.fine_tune

    def fine_tune_at(candidate, *rest):
        candidate.lr = next(rates)
        return fine_tune(candidate, *rest)

    monkeypatch.setattr(ft, "fine_tune", fine_tune_at)
    done = run(model, glue_files, tasks="stsb")
    assert done.returncode == 0 and "stsb, seed 0: diverged" in done.stdout
    assert "STS-B: 1 of 2 seeds diverged" in done.stdout
    assert scores(model)["stsb", 0] == {} and scores(model)["stsb", 1]
    for line in (model / "glue.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN, which is no JSON


def test_both_baselines_land_in_the_same_table(finished, tmp_path, glue_files):
    folder = shutil.copytree(finished[0], tmp_path / "model")
    scratch = run(folder, glue_files, baseline="scratch", tasks="cola")
    assert scratch.returncode == 0, scratch.stdout
    name = f"hf:{finished[0]}"
    theirs = run(folder, glue_files, baseline=name, tasks="stsb", hf_batch=8)
    assert theirs.returncode == 0 and "batch 8, AdamW 2e-05" in theirs.stdout, theirs.stdout
    page = (folder / "glue.md").read_text()
    assert "| model without pre-training, float32, epochs=2" in page and "hf_batch=8" in page
    assert len({run["name"] for run in glue.read_runs(folder).values()}) == 3


def encoder(kind, folder, data_dir):
    """A small random encoder of transformers, with our tokenizer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["intermediate_size"] = 48
    config = getattr(transformers, f"{kind}Config")(vocab_size=600, pad_token_id=0, **sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    roles = json.loads((data_dir / "tokenizer_config.json").read_text())
    types_ = ["token_type_ids"] if kind == "Bert" else []
    roles["model_input_names"] = ["input_ids", "attention_mask", *types_]
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    shutil.copyfile(data_dir / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_encoders_of_transformers_learn(kind, settings, tmp_path, data_dir, sentences):
    """Token types only where the model has them."""
    folder = encoder(kind, tmp_path, data_dir)
    candidate = ft.HuggingFace(str(folder))
    assert candidate.two_types == (kind == "Bert") and (candidate.batch, candidate.lr) == (32, 2e-5)
    pairs = [(a, b) for a, b in zip(sentences, reversed(sentences), strict=True)]
    for ids, first in candidate.encode(pairs):
        up_to_sep = ids.tolist().index(2) + 1
        assert first == (up_to_sep if kind == "Bert" else len(ids))
    candidate.batch = 8
    arrays = ft.tokenised(candidate, "mnli", "train")
    data = Ragged(arrays, candidate.two_types, CPU)
    net = candidate.build(3)
    before = ft.predict(net, data, torch.float32)
    ft.fine_tune(candidate, net, data, 0, torch.float32)
    after = ft.predict(net, data, torch.float32)
    assert before.shape == (40, 3) and not np.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_head_that_was_trained_elsewhere_is_not_kept(tmp_path, data_dir, kind):
    """With as many labels, which may be in another order; the encoder under it is."""
    folder = encoder("Bert", tmp_path, data_dir)
    kind_of_model = getattr(transformers, f"BertFor{kind}")
    trained = kind_of_model.from_pretrained(folder, num_labels=3)
    trained.save_pretrained(folder)
    torch.manual_seed(1)
    net = ft.HuggingFace(str(folder)).build(3).model
    assert not torch.equal(net.classifier.weight, trained.classifier.weight)
    assert net.classifier.weight.std().item() == pytest.approx(0.02, rel=0.3)
    ours = net.bert.state_dict()
    assert all(torch.equal(ours[name], p) for name, p in trained.bert.state_dict().items())


def test_a_folder_that_cannot_be_written_is_one_line(model, glue_files):
    """Before the first fine-tuning, whose result would be lost."""
    (model / ".glue.lock").mkdir()
    done = run(model, glue_files)
    assert done.returncode == 1 and "seed 0" not in done.stdout
    assert last_line(done).endswith("make a copy, type --model=COPY")


def test_all_tasks_at_once(model, glue_files):
    done = run(model, glue_files, tasks=",".join(glue.TASKS), epochs=1, seeds=1)
    assert done.returncode == 0, done.stdout
    assert [*scores(model)] == [(name, 0) for name in glue.TASKS]
    assert [*scores(model)["mnli", 0]] == ["accuracy", "accuracy_mm"]
    assert " of 9)" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tasks": "cola,sts-b"}, "sts-b"),
        ({"glue_dir": "nowhere"}, "nowhere/CoLA/train.tsv"),
        ({"baseline": "hf:nowhere"}, "nowhere"),
        ({"glue_seq_len": 136}, "--glue_seq_len=128"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(model, glue_files, flags, named):
    before = sorted(model.iterdir())
    done = run(model, glue_files, **flags)
    assert done.returncode == 1 and named in last_line(done), done.stdout
    assert sorted(model.iterdir()) == before


# GLUE and a model of others from a stand-in of the Hub

HUB_TASKS = ("rte", "mnli", "stsb")


def put_glue(folder, glue_dir):
    """The rows of official files as nyu-mll/glue has them: parquet, a config for each task."""
    page = ["---", "configs:"]
    for name in HUB_TASKS:
        task = glue.TASKS[name]
        page += [f"- config_name: {name}", "  data_files:"]
        (folder / name).mkdir(parents=True)
        for split in task.rows:
            texts, labels = glue.read(name, split, glue_dir)
            columns = list(zip(*texts, strict=True))
            names = ("premise", "hypothesis") if name == "mnli" else ("sentence1", "sentence2")
            table = dict(zip(names, columns, strict=True))
            table = pyarrow.table(table | {"label": labels, "idx": range(len(labels))})
            there = split.replace("dev", "validation")
            pyarrow.parquet.write_table(table, folder / name / f"{there}-00000-of-00001.parquet")
            page += [f"  - split: {there}", f"    path: {name}/{there}-*"]
    (folder / "README.md").write_text("\n".join([*page, "---", ""]))


@pytest.mark.slow
def test_glue_and_a_model_from_the_hub_are_those_of_folders(tmp_path, data_dir, glue_files):
    """Equal weights and equal scores."""
    put_glue(tmp_path / "hub/datasets/nyu-mll/glue", glue_files[0])
    theirs = tmp_path / "hub/models/some/encoder"
    theirs.mkdir(parents=True)
    encoder("Bert", theirs, data_dir)
    stand_in = StandIn(tmp_path / "hub")
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": stand_in.address}

    def scores_of(folder, baseline, glue_dir):
        model_folder(folder, data_dir)
        values = QUICK | {"model": folder, "baseline": baseline, "glue_dir": glue_dir}
        values |= {"tasks": ",".join(HUB_TASKS), "seeds": 1, "hf_batch": 8}
        flags = [f"--{name}={value}" for name, value in values.items()]
        command = [sys.executable, ROOT / "finetune_glue.py", *flags]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment, timeout=300, **pipe)
        assert done.returncode == 0, done.stdout
        runs = glue.read_runs(folder).values()
        return [(run["task"], run["weights"], run["scores"]) for run in runs]

    try:
        streamed = scores_of(tmp_path / "model", "hf:some/encoder", "")
        asked = " ".join(stand_in.requests)
    finally:
        stand_in.stop()
    assert re.search("some/encoder.*model.safetensors", asked) and "nyu-mll/glue" in asked
    local = scores_of(tmp_path / "other", f"hf:{theirs}", glue_files[0])
    assert len(streamed) == len(HUB_TASKS) and streamed == local
