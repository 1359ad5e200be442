"""Scripts as a user runs them: the files they leave, a clock that holds, a resume like no stop."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
import yaml
from conftest import PLOT, ROOT, SMALL_MODEL, put, script
from safetensors.torch import load_file

from nanocram import runlog
from nanocram.data import fill_masks, held_out
from nanocram.model_folder import load
from nanocram.runlog import COLUMNS, read_log
from nanocram.tokenizer import Tokenizer


def run_train(out, data, **settings):
    return script("train.py", **(SMALL_MODEL | {"data_dir": data, "out_dir": out} | settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    """The folder and output of an undisturbed run of 60 steps, dropout and Muon and all; in the
    shell of a batch system that left its RANK."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        done = run_train(out, data_dir, max_steps=60, dropout=0.1)
    assert done.returncode == 0, done.stdout
    return out, done.stdout


def test_a_run_leaves_what_it_promises(finished, data_dir):
    out, printed = finished
    names = "README.md ckpt.pt config.json log.csv loss.png model.safetensors run.json "
    names += "tokenizer.json tokenizer_config.json"
    assert {p.name for p in out.iterdir()} == {*names.split()}
    assert len({p.stat().st_mode for p in out.iterdir()}) == 1  # whoever may read one, may all
    run = json.loads((out / "run.json").read_text())
    assert run["settings"]["max_steps"] == 60 and run["settings"]["dropout"] == 0.1
    assert run["torch"] == torch.__version__
    assert run["parameters"] == sum(p.numel() for p in load(out).parameters())
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "once upon a [MASK]." in printed and "WARNING: RANK=1 is ignored" in printed

    rows = read_log(out)
    assert (out / "log.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 60
    assert set(range(0, 61, 2)) <= set(steps)
    assert [row["step"] for row in rows if "val_loss_25" in row] == [0, 30, 60]
    assert rows[0]["val_loss_15"] == pytest.approx(np.log(600), rel=0.05)
    assert rows[-1]["val_loss_15"] < rows[0]["val_loss_15"]
    counts = json.loads((data_dir / "meta.json").read_text())["counts"]
    per_character = rows[-1]["val_loss_15"] * counts["val_tokens"] / counts["val_characters"]
    assert rows[-1]["val_nats_per_char"] == pytest.approx(per_character, rel=1e-4)
    assert rows[-1]["tokens"] * run["flops_per_token"] == pytest.approx(rows[-1]["flops"], rel=1e-4)


def test_the_model_card(finished, tmp_path):
    """Front matter that the Hub reads, the figures of the log, the lines of a GLUE table."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    path, last = out / "README.md", read_log(out)[-1]
    text = path.read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "fill-mask"
    assert "license" in front and "GLUE" not in text
    assert 'pipeline("fill-mask", model="out")' in text
    losses = f"{last['val_loss_15']:.3f} nats per token with 15 % masked"
    for wanted in (losses, f"{last['tokens']:,} tokens", "60 steps", "corpus.txt"):
        assert wanted in text
    runlog.write_card(out, ["| GLUE | RTE |", "| --- | ---: |", "| x | 51.2 |"])
    assert "| x | 51.2 |" in path.read_text()
    # Whoever takes our line out of the front matter keeps their edits; others are written anew.
    edited = text.replace("license: other", "license: mit")
    path.write_text(edited)
    runlog.write_card(out)
    assert "license: mit" not in path.read_text()
    edited = "".join(line for line in edited.splitlines(True) if "written anew" not in line)
    path.write_text(edited)
    runlog.write_card(out)
    assert path.read_text() == edited


def test_the_model_folder_loads_in_transformers(finished):
    out, _ = finished
    model = transformers.AutoModelForMaskedLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = ["once upon a [MASK].", "the [MASK] of the house was open, and nobody came."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ours = load(out)
    with torch.no_grad():
        logits = ours(batch["input_ids"], attention_mask=batch["attention_mask"])
        difference = logits - model(**batch).logits
    assert difference[batch["attention_mask"].bool()].abs().max() < 1e-5 * logits.abs().max()
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    for sentence in ("once upon a [MASK].", "[MASK] was very tired", 'she said [MASK], and "no".'):
        words = fill_masks(ours, Tokenizer(out / "tokenizer.json"), sentence)
        assert [w for w, _ in words] == [answer["token_str"].strip() for answer in pipe(sentence)]
        assert [p for _, p in words] == pytest.approx(
            [answer["score"] for answer in pipe(sentence)], rel=1e-4
        )


def weights(out):
    return load_file(out / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_log(rows, others):
    """Whether rows of log.csv are equal but for the time."""
    return [{**row, "elapsed_s": 0} for row in rows] == [{**row, "elapsed_s": 0} for row in others]


def run_until(out, data_dir, signal_number, min_step, **settings):
    """Start a run, send it a signal once log.csv has reached min_step; (exit status, output)."""
    settings = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out} | settings
    command = [sys.executable, str(ROOT / "train.py"), *(f"--{k}={v}" for k, v in settings.items())]
    (out.parent / "matplotlib.py").write_text("raise ImportError")  # pictures take most of a save
    env = os.environ | {"PYTHONPATH": str(out.parent)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not any(row["step"] >= min_step for row in read_log(out)):
        time.sleep(0.02)
    process.send_signal(signal_number)
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def test_a_stopped_and_a_killed_run_resume_bit_for_bit(
    finished, tmp_path, data_dir, train, monkeypatch
):
    """SIGTERM at a random moment, kill -9 at another, then to the end: as if nothing had been. The
    command is the same each time."""
    out, settings = tmp_path / "out", {"max_steps": 60, "dropout": 0.1, "init": "auto"}
    often = settings | {"checkpoint_minutes": 1e-9}  # log.csv is written with each save
    status, printed = run_until(out, data_dir, signal.SIGTERM, 8, **often)
    assert status == 0 and "--init=resume" in printed and read_log(out)[-1]["step"] < 30
    status, printed = run_until(out, data_dir, signal.SIGKILL, 30, **often)
    assert status == -signal.SIGKILL and "resumed at step" in printed
    put(monkeypatch, train, **settings)
    train.main()
    assert same(weights(out), weights(finished[0]))
    rows, reference = read_log(out), read_log(finished[0])
    assert same_log(rows, reference)


@pytest.fixture(scope="module")
def longer(finished, corpus, tmp_path_factory):
    """Rows of 256 tokens by the vocabulary of finished, and what prepare.py printed."""
    folder = tmp_path_factory.mktemp("data") / "longer"
    flags = {"tokenizer": finished[0], "seq_len": 256, "filter_ratio": 0.0, "val_share": 0.2}
    done = script("prepare.py", source=corpus, data_dir=folder, **flags)
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_a_model_goes_on_with_longer_rows(
    finished, longer, corpus, tmp_path, train, monkeypatch, capsys
):
    """Killed and resumed it ends as if nothing had been. Its sizes are the model's, not n_layer=1,
    which nobody typed; the first held-out loss is the model's, by transformers; the card adds the
    tokens."""
    base, (data, printed) = finished[0], longer
    assert f"--init={base}" in printed.splitlines()[-1]
    there = {name: getattr(train, name) for name in train.SETTINGS}
    stage = {"seq_len": 256, "max_steps": 12, "dropout": 0.2}
    begin = stage | {"init": str(base)}
    folders = {"data_dir": str(data), "out_dir": str(tmp_path / "whole")}
    put(monkeypatch, train, **(there | begin | folders | {"n_layer": 1, "max_seq_len": 300}))
    train.main()
    assert "n_layer = 2, as" in capsys.readouterr().out
    out, begin = tmp_path / "out", begin | {"checkpoint_minutes": 1e-9}
    assert run_until(out, data, signal.SIGKILL, 4, **begin)[0] == -signal.SIGKILL
    put(monkeypatch, train, **stage, n_layer=1, init="resume", out_dir=str(out))
    train.main()
    assert "resumed at step" in capsys.readouterr().out
    assert same(weights(out), weights(tmp_path / "whole"))
    rows = read_log(out)
    assert same_log(rows, read_log(tmp_path / "whole"))

    model = transformers.AutoModelForMaskedLM.from_pretrained(base)
    val = np.fromfile(data / "val.bin", np.uint16).reshape(-1, 256)[:24].astype(int)
    total = count = 0
    for ids, positions, labels in held_out(torch.from_numpy(val), 8)["val_loss_15"]:
        with torch.no_grad():
            logits = model(input_ids=ids).logits.gather(1, positions[..., None].expand(-1, -1, 600))
        total += torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum").item()
        count += (labels >= 0).sum().item()
    assert rows[0]["val_loss_15"] == pytest.approx(total / count, rel=1e-4)

    tokens = [read_log(folder)[-1]["tokens"] for folder in (base, out)]
    card, first_card = ((folder / "README.md").read_text() for folder in (out, base))
    assert f"{sum(tokens):,} tokens of `{corpus}`" in " ".join(card.split())
    assert f"{tokens[0]:,} tokens of `{corpus}`" in " ".join(first_card.split())
    assert "rows of 256" in card and "rows of 128" in first_card
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.trained_on["seq_len"] == 256 and config.max_position_embeddings == 512
    facts = json.loads((out / "run.json").read_text())
    assert facts["began_from"]["model"] == str(base) and facts["settings"]["dropout"] == 0.2
    assert config.nanocram["dropout"] == 0.2 and facts["settings"]["n_layer"] == 2


def test_what_an_init_cannot_begin_from_is_one_line(finished, longer, tmp_path, train, monkeypatch):
    """Another vocabulary; its own folder; other sizes than the weights', if they were typed."""
    base = shutil.copytree(finished[0], tmp_path / "base")
    text = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(text.replace(" ", "  ", 1))
    slips = [
        ({"init": str(base), "data_dir": str(longer[0])}, "give prepare.py --tokenizer="),
        ({"init": str(base), "out_dir": str(base)}, "choose another --out_dir"),
        ({"init": "resume", "out_dir": str(base), "n_layer": 1}, "type --n_layer=2"),
        ({"init": str(finished[0]), "n_embd": 64}, "type --n_embd=32"),
        ({"init": "resume", "out_dir": str(base), "optimizer": "adamw"}, "type --optimizer=muon"),
    ]
    for settings, message in slips:
        with monkeypatch.context() as patch:
            put(patch, train, **settings, typed=set(settings))
            with pytest.raises(SystemExit, match=message):
                train.main()


def test_a_run_that_is_over_is_completed(finished, tmp_path, train, monkeypatch, capsys):
    """What was lost after the last checkpoint is made from it."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    rows = read_log(out)
    for name in ("model.safetensors", "config.json", "loss.png", "README.md"):
        (out / name).unlink()
    put(monkeypatch, train, init="resume", max_steps=60, dropout=0.1)
    put(monkeypatch, runlog, plot=PLOT)
    train.main()
    assert "once upon a" in capsys.readouterr().out
    assert same(weights(out), weights(finished[0])) and load(out)
    assert same_log(read_log(out), rows)
    assert (out / "loss.png").exists() and (out / "README.md").exists()


def test_a_larger_budget_continues_a_finished_run(finished, tmp_path, train, monkeypatch):
    out = shutil.copytree(finished[0], tmp_path / "out")
    put(monkeypatch, train, init="resume", max_steps=120, dropout=0.1, evals=4)
    train.main()
    rows = read_log(out)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert [row["step"] for row in rows if "val_loss_15" in row] == [0, 30, 60, 90, 120]


def test_the_budget_holds_and_an_earlier_run_is_moved_aside(finished, tmp_path, data_dir):
    """The folder is a link, to a larger disk say, and the machine sleeps for a while."""
    there = shutil.copytree(finished[0], tmp_path / "disk/out")
    out = tmp_path / "out"
    out.symlink_to(there)
    seconds = 9
    settings = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out, "dtype": "auto"}
    settings |= {"budget_hours": seconds / 3600, "log_every": 1}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags])
    while run.poll() is None and not (tmp_path / "disk/out.1").exists():
        time.sleep(0.02)
    time.sleep(3)
    run.send_signal(signal.SIGSTOP)
    time.sleep(3)
    run.send_signal(signal.SIGCONT)
    assert run.wait(60) == 0
    assert out.readlink() == there
    assert same(weights(tmp_path / "disk/out.1"), weights(finished[0]))
    assert not same(weights(out), weights(finished[0]))
    *_, last = rows = read_log(out)
    # Other tests may hold up the last save, but nothing before it.
    assert 0.8 * seconds < last["elapsed_s"] <= seconds
    state = torch.load(out / "ckpt.pt", weights_only=True)["state"]
    assert 0.8 * seconds < state["elapsed"] < 1.5 * seconds
    assert last["lr"] < 0.1 * max(row.get("lr", 0) for row in rows)
