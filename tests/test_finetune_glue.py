"""Fine-tuning against a plain loop around transformers, and the script as a user runs it."""

import io
import json
import re
import shutil
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from conftest import begin, error, put, script, wait_for, write_model
from hub import serve
from tqdm import tqdm

import finetune_glue as ft
from nanocram import glue
from nanocram.data import Ragged, batches_by_length
from nanocram.model_folder import load, modernbert_config, to_folder_keys

QUICK = {"seeds": 2, "epochs": 2, "glue_batch": 8, "dtype": "float32", "device": "cpu"}
CPU = torch.device("cpu")
BAR = tqdm(disable=True)


@pytest.fixture
def model(tmp_path, data_dir):
    return write_model(tmp_path / "model", data_dir)


@pytest.fixture(autouse=True)
def settings(monkeypatch, glue_files):
    """The quick settings are the script's; others with put(settings, ft, name=value)."""
    put(monkeypatch, ft, **QUICK, glue_dir=str(glue_files[0]))
    return monkeypatch


def run(model, tasks="cola,stsb", **flags):
    """main() with these settings; what it prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        put(patch, ft, model=str(model), tasks=tasks, **flags)
        ft.main()
    return printed.getvalue()


def scores(model):
    return {(r["task"], r["seed"]): r["scores"] for r in glue.read_runs(model).values()}


# 17 leaves an even number for two texts. Versions of tokenizers differ in whose an odd token
# is: the first text's here and since 0.23.3, the second's in 0.23.2.
def test_inputs_are_those_of_transformers(model, settings, sentences):
    put(settings, ft, glue_seq_len=17)
    others = [text[: 10 + 40 * (i % 3)] for i, text in enumerate(reversed(sentences))]
    pairs = [*zip(sentences, others, strict=True), *zip(others, sentences, strict=True)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for texts in ([(a,) for a in sentences], pairs):
        columns = map(list, zip(*texts, strict=True))
        wanted = tokenizer(*columns, truncation=True, max_length=17, return_token_type_ids=True)
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
def test_training_is_transformers(model, data_dir, settings, task, n_outputs, pooling, decay, kind):
    """Same batches, weights and settings: the library's loop has the same outputs at the end."""
    write_model(model, data_dir, neighbour_heads=False)  # else theirs trains more biases
    put(settings, ft, glue_dropout=0.0, glue_lr=1e-3, glue_pooling=pooling)
    put(settings, ft, glue_weight_decay=decay, glue_schedule=kind)
    candidate = ft.Ours(model, False)
    texts, labels = glue.read(task, "train", ft.glue_dir)
    data = Ragged(list(candidate.encode(texts)), labels, candidate.pad, False, CPU)
    net = candidate.build(n_outputs).double()
    facts = {"classifier_pooling": pooling, "classifier_dropout": 0.0, "num_labels": n_outputs}
    sizes = replace(candidate.pretrained.config, head_transform=True)
    config = transformers.ModernBertConfig.from_dict(modernbert_config(sizes) | facts)
    theirs = transformers.ModernBertForSequenceClassification(config).double().train()
    theirs.load_state_dict(to_folder_keys(net.state_dict(), sizes))
    before = torch.from_numpy(ft.predict(net, data, torch.float32))
    train_loss = ft.fine_tune(candidate, net, data, 3, torch.float32, BAR)
    assert net.training  # or nothing would be dropped

    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, p in theirs.named_parameters():
        groups["norm" in name or "bias" in name]["params"].append(p)
    optimizer = torch.optim.AdamW(groups, 1e-3, (0.9, 0.98), 1e-6, weight_decay=decay)
    steps = [rows for epoch in range(2) for rows in batches_by_length(data.length, 8, (3, epoch))]
    schedule = transformers.get_scheduler(kind, optimizer, int(0.1 * len(steps)), len(steps))
    labels = torch.from_numpy(labels[:, None] if n_outputs == 1 else labels)
    losses = []
    for rows in steps:
        loss = theirs(**data.batch(rows)[0], labels=labels[rows]).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = torch.from_numpy(ft.predict(net, data, torch.float32))
    wanted = theirs.eval()(**data.batch(np.arange(40))[0]).logits
    assert error(after - before, wanted - before) < 1e-5  # float32 holds the losses
    assert len(steps) == 10 and train_loss == pytest.approx(np.mean(losses[5:]), rel=1e-3)


def test_what_is_built_has_the_pre_training_and_dropout(model):
    for scratch in (False, True):
        net, pretrained = ft.Ours(model, scratch).build(2), load(model)
        weights = (m.model.layers[0].attn.Wq.weight for m in (net, pretrained))
        assert torch.equal(*weights) is not scratch
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert {layer.attn.dropout for layer in net.model.layers} == {0.1}


def test_a_run_leaves_a_table_and_goes_on_where_it_stopped(model, data_dir, glue_files, settings):
    put(settings, glue, write_card=Mock())
    printed = run(model)
    assert glue.write_card.call_args.args[0] == model
    finished = scores(model)
    assert sorted(finished) == [("cola", 0), ("cola", 1), ("stsb", 0), ("stsb", 1)]
    first = next(iter(glue.read_runs(model).values()))
    assert first["settings"]["glue_lr"] == 4e-5 and first["settings"]["dtype"] == "float32"
    assert first["rows"] == {"train": 40, "dev": 12} and first["train_loss"] > 0
    page = (model / "glue.md").read_text()
    for text in ("RoBERTa-base", "85.1", "(2 of 9)", "CoLA: 40 train rows; the official"):
        assert text in printed and text in page and text in str(glue.write_card.call_args)
    for key in ("matthews", "pearson"):
        values = [found[key] for found in finished.values() if key in found]
        assert f"{np.median(values):.1f}*" in page

    # killed in one of many fine-tunings
    (model / "glue.jsonl").unlink()
    many = QUICK | {"seeds": 20, "tasks": "cola,stsb", "glue_dir": ft.glue_dir}
    process = begin("finetune_glue.py", model=model, **many)
    wait_for(lambda: glue.read_runs(model), process)
    process.kill()
    process.end(-signal.SIGKILL)
    n_done = len([seed for _, seed in scores(model) if seed < 2])
    assert f"{n_done} of 4 fine-tunings are in" in run(model)
    assert {job: found for job, found in scores(model).items() if job[1] < 2} == finished
    again = run(model)
    assert "4 of 4 fine-tunings are in" in again and "training loss" not in again
    # other settings, seeds, weights and candidates are other runs
    other = run(model, epochs=1, tasks="cola", seeds=1)
    assert ", epochs=1, " in other and "already" not in other
    more = run(model, tasks="cola", first_seed=1, seeds=2)
    assert "1 of 2 fine-tunings are in" in more and "; seeds: 2 to 3" in more
    write_model(model, data_dir, norm_eps=1e-4, linear_bias=True)
    assert "already" not in run(model, tasks="cola")
    edited = shutil.copytree(glue_files[0] / "CoLA", model / "edited/CoLA") / "dev.tsv"
    edited.write_text(edited.read_text("utf-8").replace("a", "b"), "utf-8")  # with as many rows
    assert "already" not in run(model, tasks="cola", glue_dir=str(model / "edited"))
    assert "already" not in run(model, baseline="scratch", tasks="cola")
    other = write_model(model.parent / "other", data_dir, token_values=True)
    how = {"baseline": f"hf:{other}", "tasks": "stsb", "hf_batch": 8}
    with pytest.raises(SystemExit, match="type --trust_remote_code=True"):
        run(model, **how)
    theirs = run(model, **how, trust_remote_code=True)
    assert "batch 8, AdamW 2e-05" in theirs and "already" not in theirs
    page = (model / "glue.md").read_text()
    assert re.search(r"(?s)\| model without pre-training.*, float32, epochs=2.*hf_batch=8", page)
    assert len({run["name"] for run in glue.read_runs(model).values()}) == 5


def test_a_seed_that_diverges_does_not_end_the_rest(model):
    printed = run(model, tasks="stsb", glue_lr=1e30)
    assert "stsb, seed 1: diverged" in printed and "STS-B: 2 of 2 seeds diverged" in printed
    assert scores(model) == {("stsb", 0): {}, ("stsb", 1): {}}
    for line in (model / "glue.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN, which is no JSON


def encoder(kind, folder, data_dir):
    """A small random model of transformers, with our tokenizer; returned too."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "vocab_size": 600, "pad_token_id": 0, "num_labels": 3}
    sizes["initializer_range"] = 0.2  # so large that a wrong token type is seen
    model_class = getattr(transformers, kind)
    net = model_class(model_class.config_class(**sizes))
    net.save_pretrained(folder)
    roles = json.loads((data_dir / "tokenizer_config.json").read_text())
    if kind.startswith("Bert"):
        roles["model_input_names"].append("token_type_ids")
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    shutil.copyfile(data_dir / "tokenizer.json", folder / "tokenizer.json")
    return net


@pytest.mark.parametrize("kind", ["BertModel", "RobertaModel", "BertForSequenceClassification"])
def test_encoders_of_transformers_learn(kind, tmp_path, data_dir):
    """Token types only where the model has them. A head that was trained elsewhere is dropped."""
    saved = encoder(kind, tmp_path, data_dir)
    candidate = ft.HuggingFace(str(tmp_path))
    assert candidate.two_types == kind.startswith("Bert")
    candidate.batch = 8
    texts, labels = glue.read("mnli", "train", ft.glue_dir)
    data = Ragged([*candidate.encode(texts)], labels, candidate.pad, candidate.two_types, CPU)
    net = candidate.build(3)
    built = net.base_model.state_dict()
    for name, p in saved.base_model.state_dict().items():
        assert "pooler" in name or torch.equal(built[name], p), name
    if "For" in kind:
        assert not torch.equal(net.classifier.weight, saved.classifier.weight)
        assert 0.05 < net.classifier.weight.std() < 0.8  # 0.2, but for 96 numbers' chance
    before = ft.predict(net, data, torch.float32)
    columns = zip(*texts, strict=True)
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    wanted = net(**candidate.tokenizer(*map(list, columns), **options)).logits.detach()
    assert before.shape == (40, 3) and np.allclose(before, wanted, atol=1e-5)
    ft.fine_tune(candidate, net, data, 0, torch.float32, BAR)
    assert not np.allclose(before, ft.predict(net, data, torch.float32), atol=1e-4)


def test_a_folder_that_cannot_be_written_is_one_line(model, settings):
    (model / "glue.jsonl.tmp").mkdir()
    put(settings, ft, fine_tune=pytest.fail)
    with pytest.raises(SystemExit, match="make a copy, type --model=COPY"):
        run(model)


def test_all_tasks_at_once(model):
    printed = run(model, tasks=",".join(glue.TASKS), epochs=1, seeds=1)
    assert [*scores(model)] == [(name, 0) for name in glue.TASKS]
    assert [*scores(model)["mnli", 0]] == ["accuracy", "accuracy_mm"]
    assert " of 9)" not in printed


@pytest.mark.slow
def test_glue_and_a_model_of_the_hub(tmp_path, data_dir, model, monkeypatch):
    """nyu-mll/glue has parquet files, and a page that names them."""
    folder, theirs = tmp_path / "hub/datasets/nyu-mll/glue", tmp_path / "hub/models/some/encoder"
    folder.mkdir(parents=True)
    files = []
    for split in glue.TASKS["mnli"].rows:
        texts, labels = glue.read("mnli", split, ft.glue_dir)
        premise, hypothesis = zip(*texts, strict=True)
        columns = {"premise": premise, "hypothesis": hypothesis, "label": labels}
        table = pyarrow.table(columns | {"idx": range(len(labels))})
        split = split.replace("dev", "validation")
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
        files.append({"split": split, "path": f"{split}.parquet"})
    configs = json.dumps([{"config_name": "mnli", "data_files": files}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    encoder("BertModel", theirs, data_dir)
    requests = serve(tmp_path / "hub", monkeypatch)
    settings = {"tasks": "mnli", "seeds": 1, "hf_batch": 8}
    script("finetune_glue.py", model=model, baseline="hf:some/encoder", **QUICK | settings)
    asked = " ".join(requests)
    assert re.search("some/encoder.*model.safetensors", asked) and "nyu-mll/glue" in asked
    run(model, **settings, baseline=f"hf:{theirs}")
    by_name, of_folder = glue.read_runs(model).values()
    assert all(by_name[key] == of_folder[key] for key in ("rows", "weights", "scores"))
