"""Scripts as a user runs them: the files they leave, a clock that holds, a resume like no stop."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
import torch
import transformers
import yaml
from conftest import PLOT, SMALL_MODEL, begin, prepare, put, result, typed, wait_for, wait_for_step
from safetensors.torch import load_file
from torch.testing import assert_close

from nanocram import facts, machine, runlog
from nanocram.data import fill_masks, held_out
from nanocram.model_folder import load
from nanocram.runlog import read_log
from nanocram.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def finished(shared, data_dir):
    """The folder of a run of 60 steps in the shell of a batch system that left its RANK."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "1")
            folders = {"data_dir": data_dir, "out_dir": folder / "out"}
            printed = typed("train.py", **SMALL_MODEL, **folders, max_steps=60, dropout=0.1)
        (folder / "printed.txt").write_text(printed)

    return shared("finished", make) / "out"


def test_a_run_leaves_what_it_promises(finished, data_dir, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    printed = (finished.parent / "printed.txt").read_text()
    names = "README.md ckpt.pt config.json log.csv loss.png model.safetensors run.json "
    names += "tokenizer.json tokenizer_config.json"
    assert {p.name for p in out.iterdir()} - {"model.py", "hf_model.py"} == {*names.split()}
    assert len({p.stat().st_mode for p in out.iterdir()}) == 1  # whoever may read one, may all
    run = json.loads((out / "run.json").read_text())
    assert run["settings"]["max_steps"] == 60 and run["settings"]["dropout"] == 0.1
    assert run["torch"] == torch.__version__
    assert run["parameters"] == sum(p.numel() for p in load(out).parameters())
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "once upon a [MASK]." in printed and "WARNING: RANK=1 is ignored" in printed

    rows = read_log(out)
    columns = "elapsed_s step tokens flops loss val_loss_15 val_loss_25 val_nats_per_char "
    columns += "lr batch_size mask_rate grad_norm skipped muon_lr"
    assert (out / "log.csv").read_text().splitlines()[0].split(",") == columns.split()
    steps = [row["step"] for row in rows]
    assert steps == sorted({*steps, *range(0, 61, 2)})
    assert [row["step"] for row in rows if "val_loss_25" in row] == [0, 30, 60]
    first, last = rows[0], rows[-1]
    # fresh weights know how frequent tokens are, and no more; evenly they would cost ln 600
    assert first["val_loss_15"] == pytest.approx(run["frequency_loss"], rel=0.05)
    assert run["frequency_loss"] < 0.9 * np.log(600)
    assert last["val_loss_15"] < run["frequency_loss"]
    counts = json.loads((data_dir / "meta.json").read_text())["counts"]
    per_character = last["val_loss_15"] * counts["val_tokens"] / counts["val_characters"]
    assert last["val_nats_per_char"] == pytest.approx(per_character, rel=1e-4)
    assert last["tokens"] * run["flops_per_token"] == pytest.approx(last["flops"], rel=1e-4)

    # the model card: front matter that the Hub reads, the figures of the log, a GLUE table
    path = out / "README.md"
    text = path.read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "fill-mask"
    assert "license" in front and "GLUE" not in text
    losses = f"{last['val_loss_15']:.3f} nats per token with 15 % masked"
    for wanted in (losses, f"{last['tokens']:,} tokens", "60 steps", "corpus.txt"):
        assert wanted in text
    # whoever takes our line out of the front matter keeps their edits; others are written anew
    path.write_text(text.replace("license: other", "license: mit"))
    facts.write_card(out, "| GLUE | RTE |\n| --- | ---: |\n| x | 51.2 |")
    assert "| x | 51.2 |" in path.read_text() and "license: mit" not in path.read_text()
    edited = "".join(line for line in text.splitlines(True) if "written anew" not in line)
    path.write_text(edited)
    facts.write_card(out)
    assert path.read_text() == edited


def test_the_model_folder_fills_masks_in_transformers(finished):
    """With its tokenizer, and as train.py does."""
    ours, tokenizer = load(finished), Tokenizer(finished / "tokenizer.json")
    pipe = transformers.pipeline("fill-mask", str(finished), top_k=3, trust_remote_code=True)
    for sentence in ("once upon a [MASK].", "[MASK] was very tired", 'she said [MASK], and "no".'):
        answers = pipe(sentence)
        words, shares = zip(*fill_masks(ours, tokenizer, sentence), strict=True)
        assert list(words) == [answer["token_str"].strip() for answer in answers]
        assert shares == pytest.approx([answer["score"] for answer in answers], rel=1e-4)


def test_stopped_and_killed_it_ends_the_same(finished, tmp_path, data_dir, train, monkeypatch):
    """SIGTERM at a random moment, kill -9 at another: the same command ends as if neither was."""
    out, settings = tmp_path / "out", SMALL_MODEL | {"max_steps": 60, "dropout": 0.1}
    settings |= {"init": "auto", "checkpoint_minutes": 1e-9}  # each save writes log.csv
    stops = ((signal.SIGTERM, 8, 130, "--init=resume"), (signal.SIGKILL, 30, -9, "resumed at step"))
    for number, step, status, said in stops:
        process = begin("train.py", **settings, data_dir=data_dir, out_dir=out)
        wait_for_step(out, step, process)
        process.send_signal(number)
        assert said in process.end(status)
        assert read_log(out)[-1]["step"] < step + 22
    put(monkeypatch, train, **settings)
    train.main()
    assert result(out) == result(finished)


def test_a_model_goes_on_with_longer_rows(finished, corpus, tmp_path, train, monkeypatch, capsys):
    """With its vocabulary and its sizes, not n_layer=1, which nobody typed; resumed, too."""
    base, data, out = finished, tmp_path / "longer", tmp_path / "out"
    prepare(data, corpus, tokenizer=str(base), seq_len=256)
    assert f"--init={base}" in capsys.readouterr().out
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(base)  # in other bytes
    put(monkeypatch, train, **{name: getattr(train, name) for name in train.SETTINGS})
    put(monkeypatch, train, data_dir=str(data), seq_len=256, max_seq_len=300, dropout=0.2)
    for init, said in ((str(base), "n_layer = 2, as"), ("resume", "resumed at step 6")):
        put(monkeypatch, train, init=init, n_layer=1, max_steps=train.max_steps + 6)
        train.main()
        assert said in capsys.readouterr().out

    val = np.fromfile(data / "val.bin", np.uint16).reshape(-1, 256)[:24].astype(int)
    ((ids, positions, labels),) = held_out(torch.from_numpy(val), 24)["val_loss_15"]
    loss = torch.nn.functional.cross_entropy(load(base)(ids, positions).mT, labels)
    assert loss.item() == pytest.approx(read_log(out)[0]["val_loss_15"], rel=1e-4)

    tokens = sum(read_log(folder)[-1]["tokens"] for folder in (base, out))
    card = (out / "README.md").read_text()
    assert f"{tokens:,} tokens of `{corpus}`" in " ".join(card.split()) and "rows of 256" in card
    config = transformers.AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert config.trained_on["seq_len"] == 256 and config.max_position_embeddings == 512
    facts = json.loads((out / "run.json").read_text())
    assert facts["began_from"]["model"] == str(base) and facts["settings"]["dropout"] == 0.2
    assert config.nanocram["dropout"] == 0.2 and facts["settings"]["n_layer"] == 2


def test_passes_end_a_run_and_words_name_its_snapshots(train, data_dir, tmp_path, monkeypatch):
    """A snapshot is what a run leaves that ends there. A resume counts the passes that it found."""
    counts = json.loads((data_dir / "meta.json").read_text())["counts"]
    n_rows = train.batch_size
    steps = int(1.5 * counts["rows"] / n_rows)  # one more would read more than a pass and a half
    words_in_step = n_rows * counts["words"] / counts["rows"] / 1e6
    early, late = (f"{words_in_step * step:.9f}" for step in (2.5, steps - 0.5))
    put(monkeypatch, train, schedule="constant", warmup=0, batch_ramp=0, mask_rate_end=0.3)
    put(monkeypatch, train, max_steps=0, max_epochs=1.5, snapshots=f"{early},{late},1000")
    train.main()
    out = tmp_path / "out"
    assert read_log(out)[-1]["step"] == steps
    names = [f"chck_{float(words):g}M" for words in (early, late)]
    assert sorted(path.name for path in out.glob("chck_*")) == sorted(names)
    weights = [load_file(out / name / "model.safetensors") for name in names]
    assert_close(weights[1], load_file(out / "model.safetensors"), rtol=0, atol=0)
    pipe = transformers.pipeline("fill-mask", str(out / names[0]), trust_remote_code=True)
    assert pipe("it was a [MASK]")

    with pytest.raises(SystemExit, match="to go on, type a larger --max_epochs"):
        put(monkeypatch, train, init="resume")
        train.main()
    put(monkeypatch, train, batch_size=16, max_epochs=2.0)
    train.main()
    n_rows_left = 2 * counts["rows"] - steps * n_rows
    assert read_log(out)[-1]["step"] == steps + n_rows_left // 16

    short = tmp_path / "short"
    put(monkeypatch, train, init="scratch", batch_size=n_rows, max_steps=3, out_dir=str(short))
    train.main()
    assert_close(weights[0], load_file(short / "model.safetensors"), rtol=0, atol=0)


def test_a_run_that_is_over_is_continued(finished, tmp_path, train, monkeypatch, capsys):
    """A model folder that was deleted is made again."""
    out = shutil.copytree(finished, tmp_path / "out")
    facts = json.loads((out / "run.json").read_text())
    assert facts.pop("finished_at_step") == 60
    (out / "run.json").write_text(json.dumps(facts | {"code": "another"}))
    put(monkeypatch, train, init="resume", dropout=0.1)
    for most in (30, 60):
        put(monkeypatch, train, max_steps=most)
        with pytest.raises(SystemExit, match="at step 60: to go on, type a larger --max_steps"):
            train.main()
    lost = ("tokenizer.json", "config.json", "loss.png", "README.md")
    for name in lost:
        (out / name).unlink()
    put(monkeypatch, runlog, plot=PLOT)
    train.main()
    said = capsys.readouterr().out
    assert "once upon a" in said and "the code was edited" in said
    assert result(out) == result(finished)
    assert all((out / name).exists() for name in lost)
    # a larger budget continues it
    put(monkeypatch, train, max_steps=240)
    train.main()
    assert "the code was edited" not in capsys.readouterr().out
    rows = read_log(out)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert [row["step"] for row in rows if "val_loss_15" in row] == [0, 30, 60, 120, 240]
    # the same command once more has nothing to do; it says who trained the model
    monkeypatch.setattr(machine, "code_hash", lambda: "edited since")
    put(monkeypatch, train, init="auto")
    with pytest.raises(SystemExit, match=r"^$"):
        train.main()
    assert capsys.readouterr().out.endswith("it was trained by other code\n")


def test_the_budget_holds_and_an_earlier_run_is_moved_aside(finished, tmp_path, data_dir):
    """The folder is a link, to a larger disk say, and the machine sleeps for a while."""
    there = shutil.copytree(finished, tmp_path / "disk/out")
    out = tmp_path / "out"
    out.symlink_to(there)
    settings = SMALL_MODEL | {"data_dir": data_dir, "log_every": 1}
    start = time.monotonic()
    begin("train.py", **settings, out_dir=tmp_path / "short", max_steps=2).end()
    seconds = max(12, 6 * (time.monotonic() - start))  # on a busy machine more
    run = begin("train.py", **settings, out_dir=out, budget_hours=seconds / 3600)
    wait_for((tmp_path / "disk/out.1").exists, run)
    time.sleep(seconds / 4)
    run.send_signal(signal.SIGSTOP)
    time.sleep(seconds / 4)
    run.send_signal(signal.SIGCONT)
    run.end()
    assert out.readlink() == there
    assert result(tmp_path / "disk/out.1") == result(finished) != result(out)
    *_, last = rows = read_log(out)
    # other tests may hold up evaluations and saves
    assert 0.5 * seconds < last["elapsed_s"] < 1.5 * seconds
    state = torch.load(out / "ckpt.pt", weights_only=True)["state"]
    assert last["elapsed_s"] < state["elapsed"] < 2 * seconds
    assert last["lr"] < 0.3 * max(row.get("lr", 0) for row in rows)
