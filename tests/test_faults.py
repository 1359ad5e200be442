"""What a day may bring: kills, full disks, suspended processes, files made to harm.

The long ones: python -m pytest -m slow -s tests/test_faults.py. It prints the counts of the table
in results/README.md.
"""

import csv
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SMALL_DATA,
    SMALL_MODEL,
    last_line,
    new_run,
    put,
    script,
    train_step,
)
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from test_model import configs

import train as module
from model import MaskedLM
from nanocram import checkpoint, glue, record, safety
from nanocram import model_folder as folder_module
from nanocram.data import Rows, load_meta


def start(out, data_dir, **changes):
    flags = [
        f"--{k}={v}"
        for k, v in (SMALL_MODEL | {"data_dir": data_dir, "out_dir": out} | changes).items()
    ]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path, process):
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def whole(out):
    """Checkpoint and model folder can be read."""
    state = torch.load(out / "ckpt.pt", weights_only=True)["state"]
    folder_module.load(out)
    return state


def assert_same_run(out, other):
    """The same rows in log.csv, each once, and the same weights to the bit."""
    rows, others = ([row | {"elapsed_s": 0} for row in record.read_log(o)] for o in (out, other))
    assert rows == others
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    a, b = (load_file(o / "model.safetensors") for o in (out, other))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [30])
def test_kill_9_at_any_moment(tmp_path, data_dir, kills):
    """A run that is killed again and again ends as if it had not been."""
    settings = {"max_steps": 400, "dropout": 0.1, "checkpoint_minutes": 1e-9, "evals": 40}
    undisturbed = start(
        tmp_path / "undisturbed", data_dir, **(settings | {"checkpoint_minutes": 0.0})
    )
    assert undisturbed.wait(300) == 0, undisturbed.communicate()[0]
    out, rng, done, writing, lost = tmp_path / "out", random.Random(0), 0, 0, 0
    while done < kills:
        resumable = (out / "ckpt.pt").exists()
        process = start(out, data_dir, init="resume" if resumable else "scratch", **settings)
        before, log = (out / "log.csv").stat().st_size if resumable else 0, out / "log.csv"
        if done % 3 == 0:  # from the start of its life, imports and all
            time.sleep(rng.uniform(0, 5))
        else:
            while process.poll() is None and (log.stat().st_size if log.exists() else 0) <= before:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.9))  # while it trains, evaluates or saves
            while done % 3 == 2 and process.poll() is None and not any(out.glob("*.tmp")):
                pass  # while a file is being written
        if process.poll() is not None:
            break
        process.kill()
        lost += "are lost" in process.communicate()[0]
        done += 1
        writing += any(out.glob("*.tmp"))
        if (out / "ckpt.pt").exists():
            whole(out)
    assert done == kills and writing > 0
    process = start(out, data_dir, init="resume", **(settings | {"checkpoint_minutes": 0.0}))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and not list(out.glob("*.tmp")), said
    assert_same_run(out, tmp_path / "undisturbed")
    print(
        f"\n{kills} kills, {writing} of them while a file was being written: same log, same weights"
    )


def test_a_full_disk(tmp_path, data_dir):
    """Files may not grow beyond 20 kB: what was there stands, each failure is one line, and the run
    can go on later."""
    resource = pytest.importorskip("resource", reason="there is none on Windows")
    settings = {"dropout": 0.1, "samples": ""}
    assert start(tmp_path / "undisturbed", data_dir, max_steps=30, **settings).wait(100) == 0
    out = shutil.copytree(tmp_path / "undisturbed", tmp_path / "out")
    before = {
        p.name: p.read_bytes() for p in out.iterdir() if p.suffix in (".pt", ".safetensors", ".png")
    }
    assert (
        min(map(len, before.values()))
        > 20_000
        > max(p.stat().st_size for p in out.iterdir() if p.suffix == ".csv")
    )
    flags = (
        SMALL_MODEL
        | settings
        | {"data_dir": data_dir, "out_dir": out, "init": "resume", "max_steps": 50}
    )
    command = [sys.executable, str(ROOT / "train.py"), *(f"--{k}={v}" for k, v in flags.items())]
    full = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert (
        "WARNING: cannot save all to" in full.stdout and "the rest stands as it was" in full.stdout
    )
    assert before == {
        p.name: p.read_bytes() for p in out.iterdir() if p.name in before
    } and not list(out.glob("*.tmp"))
    again = start(out, data_dir, max_steps=50, init="resume", **settings)
    assert again.wait(100) == 0
    assert whole(out)["step"] == 50


@pytest.mark.slow
def test_a_suspended_run_goes_on_and_keeps_its_budget(tmp_path, data_dir):
    """SIGSTOP for a third of the budget: the time counts, the learning rate still ends at 0,
    nothing breaks."""
    seconds = 24
    process = start(tmp_path / "out", data_dir, budget_hours=seconds / 3600, evals=4)
    wait_for(tmp_path / "out" / "ckpt.pt", process)
    time.sleep(3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds / 3)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, said
    rows = record.read_log(tmp_path / "out")
    gap = max(b["elapsed_s"] - a["elapsed_s"] for a, b in itertools.pairwise(rows))
    assert (
        gap > seconds / 3 - 1
        and rows[-1]["elapsed_s"] <= seconds
        and rows[-1]["lr"] < 0.1 * module.lr
    )


def test_a_spike_does_not_ruin_a_run(train, monkeypatch):
    """One batch whose loss counts a million times as much: with clipping the end is that of an
    undisturbed run."""
    ends = []
    monkeypatch.setattr(train, "max_steps", 120)
    val = Rows(
        Path(train.data_dir) / "val.bin", load_meta(train.data_dir)["counts"]["val_rows"], 128, 600
    )
    sets = module.held_out(val.read(0, val.count), 8)
    for factor in (1.0, 1e6):
        run = new_run()
        loss = run.loss_fn
        for step in range(120):
            run.loss_fn = loss
            if step == 60:
                run.loss_fn = lambda *batch, loss=loss, factor=factor: loss(*batch) * factor
            done = train_step(run, step / 120)
            if step == 60:
                norm = done[1]
        run.loss_fn = loss
        ends.append((module.held_out_loss(run, sets[15]), run.state.skipped, norm))
    (plain, _, norm), (spiked, skipped, large) = ends
    assert large > 1e5 * norm
    assert skipped == 0 and plain < 5.6
    assert spiked == pytest.approx(plain, abs=0.05)


@pytest.mark.parametrize("vanish", [False, True])
def test_an_exit_in_mid_run_saves_what_was_learnt(train, monkeypatch, data_dir, tmp_path, vanish):
    """Rows that shrink or vanish: one line, a checkpoint of the last whole step, and a resume."""
    copy = shutil.copytree(data_dir, tmp_path / "data")
    put(monkeypatch, module, data_dir=str(copy), max_steps=30)
    accumulate = module.accumulate

    def lose_rows(run, n_rows, n_predict):
        if run.state.step == 7:
            (copy / "train.bin").unlink()
            if not vanish:
                (copy / "train.bin").touch()
            run.fetched = {}
        return accumulate(run, n_rows, n_predict)

    with monkeypatch.context() as patch:
        patch.setattr(module, "accumulate", lose_rows)
        said = "is missing" if vanish else "is shorter than meta.json says"
        with pytest.raises(SystemExit, match=f"train.bin {said}: delete its folder"):
            module.main()
    assert whole(Path(train.out_dir))["step"] == 7
    put(monkeypatch, module, data_dir=str(data_dir), init="resume", max_steps=9, samples="")
    module.main()
    assert whole(Path(train.out_dir))["step"] == 9


def test_fifty_unusable_steps_leave_the_checkpoint_of_before(train, monkeypatch):
    """The run ends with one line, what was saved before stands, and it resumes."""
    put(monkeypatch, module, max_steps=200, samples="")
    accumulate = module.accumulate

    def poison(run, n_rows, n_predict):
        if run.state.step == 5:
            module.save(run)
            good = run.loss_fn
            run.loss_fn = lambda *batch: good(*batch) * float("nan")
        return accumulate(run, n_rows, n_predict)

    with monkeypatch.context() as patch:
        patch.setattr(module, "accumulate", poison)
        with pytest.raises(SystemExit, match="no finite gradient in 50 steps, up to step 55, row"):
            module.main()
    assert whole(Path(train.out_dir))["step"] == 5
    put(monkeypatch, module, init="resume", max_steps=8)
    module.main()
    assert whole(Path(train.out_dir))["step"] == 8


def test_weights_that_are_not_finite_replace_no_checkpoint(train, capsys):
    run = new_run()
    record.new_folder(run.folder)
    assert module.save(run)
    before = (run.folder / "ckpt.pt").read_bytes()
    run.model.decoder.bias.data[3] = float("nan")
    module.save(run)
    assert "decoder.bias is not finite everywhere" in capsys.readouterr().out
    assert (run.folder / "ckpt.pt").read_bytes() == before


def test_a_closed_pipe_ends_no_run(tmp_path, data_dir):
    """Whoever read the output is gone: the run goes on, and SIGINT still saves."""
    process = start(tmp_path / "out", data_dir, max_steps=100000)
    try:
        wait_for(tmp_path / "out" / "ckpt.pt", process)
        process.stdout.close()
        end = time.monotonic() + 60
        while record.read_log(tmp_path / "out")[-1]["step"] < 40 and time.monotonic() < end:
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    assert whole(tmp_path / "out")["step"] >= 40


WAITER = """
import time
from nanocram import safety
safety.stop_at_signals(lambda: print("saving", flush=True))
print("ready", flush=True)
time.sleep(600)
"""


def waiter(*wrapper):
    """A process that says "saving" at each signal that it heeds."""
    command = [*wrapper, sys.executable, "-c", WAITER]
    options = {"cwd": ROOT, "text": True, "stdin": subprocess.DEVNULL}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Not what pytest may have from a nohup of its own.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, **options)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_a_run_but_not_at_once(number):
    """A batch system and torchrun may both send one; a user who is out of patience comes later."""
    process = waiter()
    try:
        process.send_signal(number)
        assert process.stdout.readline() == "saving\n"
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None
        end = time.monotonic() + 60  # it takes two seconds to heed another one
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(number)
            time.sleep(0.2)
        assert process.returncode == -number
    finally:
        process.kill()


def test_nohup_keeps_a_closed_terminal_from_ending_a_run():
    process = waiter("nohup")
    try:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        process.kill()
        assert process.stdout.read() == ""
    finally:
        process.kill()


MAIN = "from nanocram import safety\ndef main():"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("raise KeyboardInterrupt", "stopped: type it again"),
        (
            "import os; os.kill(os.getpid(), 15); import time; time.sleep(9)",
            "stopped: type it again",
        ),
        ("open('nowhere')", "nowhere: No such file or directory; type it again"),
        ("raise OSError('odd')", "here: odd; type it again"),
        ("import nowhere.at_all", "nowhere is missing: pip install nowhere"),
        (
            "raise RuntimeError('DefaultCPUAllocator: you tried to allocate memory')",
            "out of memory: type a smaller model",
        ),
        (
            "raise RuntimeError('CUDA out of memory. Tried to')",
            "out of memory: type a smaller model",
        ),
        (
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED')",
            "out of memory: type a smaller model",
        ),
        ("raise MemoryError", "out of memory: type a smaller model"),
    ],
)
def test_scripts_end_with_one_line(what, line):
    code = f"{MAIN}\n    {what}\nsafety.run(main, 'here', 'type it again')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", line)


def test_other_errors_keep_their_trace():
    code = f"{MAIN}\n    raise RuntimeError('a defect')\nsafety.run(main, '', 'type it again')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert done.stderr.endswith("RuntimeError: a defect\ntype it again\n")


def test_a_kill_while_the_first_files_were_written_is_in_nobodys_way(tmp_path, data_dir, corpus):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json.tmp").write_text("{")
    record.new_folder(tmp_path / "out")
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "meta.json.tmp").write_text("{")
    done = script("prepare.py", source=corpus, data_dir=tmp_path / "data", **SMALL_DATA)
    assert done.returncode == 0 and "leftover of a run that did not finish" in done.stdout


def test_a_lost_run_json_is_no_reason_not_to_go_on(tmp_path, data_dir):
    record.resume(tmp_path, {"seed": 1}, step=0, elapsed=0.0)
    record.write_facts(tmp_path, data_dir, {"seed": 1}, {})
    assert record.read_facts(tmp_path) == {"settings": {"seed": 1}}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (data_dir / name).read_bytes()


def test_a_run_that_logged_nothing_yet_resumes_again(tmp_path):
    """Stopped while it compiled, resumed, and stopped again: log.csv has its header alone."""
    for _ in range(2):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)
        record.drop_rows_after(tmp_path, 0)
    assert (tmp_path / "log.csv").read_text().startswith("elapsed_s,step")
    (tmp_path / "log.csv").write_text("1.0,2,3\n4.0,5,6\n")
    with pytest.raises(SystemExit, match="no row under the names of its columns"):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SystemExit, match=r"run.json is broken .*: mend it or move it away"):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)


def test_a_run_that_one_stands_in_is_left_there(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="holds a run and you are in it: choose another"):
        record.new_folder(".")
    assert (tmp_path / "run.json").exists()


def test_what_is_lost_is_said(tmp_path, data_dir, capsys):
    out = tmp_path / "out"
    record.new_folder(out)
    record.write_facts(out, data_dir, {"init": "scratch", "seed": 1}, {})
    for step in (5, 10, 15, 20):
        row = {"elapsed_s": 10.0 * step, "step": step, "tokens": 1, "skipped": 0}
        record.append_row(out, row)
    record.resume(out, {"init": "resume", "seed": 2}, step=10, elapsed=100.0)
    assert capsys.readouterr().out == (
        "seed was 1 until now, and is 2 from now on\n"
        "resumed at step 10, 0.03 hours into the run; "
        "100 s that were logged after its checkpoint are lost\n"
    )
    assert [row["step"] for row in record.read_log(out)] == [5, 10]


@pytest.mark.slow
def test_two_processes_never_write_one_folder(tmp_path, data_dir, corpus):
    """The second train.py and the second prepare.py are refused; a finished or killed one is in
    nobody's way."""
    first = start(tmp_path / "out", data_dir, max_steps=100000)
    try:
        wait_for(tmp_path / "out" / "ckpt.pt", first)
        for init in ("scratch", "resume"):
            second = start(tmp_path / "out", data_dir, max_steps=3, init=init)
            said, _ = second.communicate(timeout=100)
            assert (
                second.returncode == 1
                and ".out.lock is held by another process" in said.splitlines()[-1]
            )
    finally:
        first.kill()
    first.wait()
    third = start(tmp_path / "out", data_dir, max_steps=3)
    assert third.wait(100) == 0 and (tmp_path / "out.1" / "ckpt.pt").exists()

    with safety.lock(safety.lock_file(tmp_path / "data")):
        second = script("prepare.py", source=corpus, data_dir=tmp_path / "data", **SMALL_DATA)
        assert second.returncode == 1 and ".data.lock is held by another process" in last_line(
            second
        )


def test_two_writers_of_one_glue_json_lose_nothing(tmp_path):
    """Four processes, each adding its runs one by one."""
    code = """
import sys
from nanocram import glue
for i in range(12):
    run = {"task": "cola", "seed": 12 * int(sys.argv[2]) + i, "data": "d",
           "rows": {"train": 8551, "dev": 1043}, "scores": {"matthews": 1.0}, "predictions": {},
           "date": "", "device": "", "rows_per_second": 1.0}
    glue.add_runs(sys.argv[1], {"system": "x", "weights": "w", "protocol": {}}, [run])
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    streams = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, f"{i}"], **streams) for i in range(4)]
    for writer in writers:
        assert writer.wait(100) == 0, writer.stderr.read()
    assert len(glue.stored_runs(tmp_path, {"system": "x", "weights": "w", "protocol": {}})) == 48


# Files made to harm, or of another time


@pytest.fixture
def saved(train, monkeypatch):
    """(a Run, its checkpoint as a dict, a function that writes such a dict and restores it)."""
    monkeypatch.setattr(train, "max_steps", 40)
    run = new_run()
    record.new_folder(run.folder)
    for step in range(3):
        train_step(run, step / 40)
    assert module.save(run)
    good = torch.load(run.folder / "ckpt.pt", weights_only=True)

    def restore(ckpt):
        torch.save(ckpt, run.folder / "ckpt.pt")
        before = {k: v.clone() for k, v in run.model.state_dict().items()}
        try:
            checkpoint.restore(run, "muon")
        finally:
            assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())

    return run, good, restore


NAME = "model.layers.1.attn.Wq.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].update(extra=torch.ones(2)), "does not fit: extra is unknown"),
        (lambda c: c["model"].pop(NAME), f"does not fit: {NAME} is missing"),
        (
            lambda c: c["model"].update({NAME: torch.ones(3, 4)}),
            r"is of shape \(3, 4\), not \(32, 32\)",
        ),
        (
            lambda c: c["model"][NAME].fill_(float("nan")),
            f"does not fit: {NAME} is not finite everywhere",
        ),
        (lambda c: c["optimizers"].pop(), "is damaged or no checkpoint of train.py: ValueError"),
        (
            lambda c: c["optimizers"][1][0].update(momentum_buffer=torch.ones(2, 2)),
            "0 of Muon, momentum_buffer is",
        ),
        (
            lambda c: c["optimizers"][0][0]["exp_avg"].fill_(float("inf")),
            "of parameter 0 of AdamW, exp_avg is not finite",
        ),
        (lambda c: c["state"].update(step="3"), "is damaged or no checkpoint of train.py: TypeE"),
        (lambda c: c["state"].update(row=-5), "does not fit: row=-5"),
        (lambda c: c["state"].update(rows=3), "is of another version of train.py: use the commit"),
        (lambda c: c["state"].pop("elapsed"), "is of another version of train.py: use the commit"),
        (lambda c: c["state"].update(elapsed=float("nan")), "does not fit: elapsed=nan"),
        (lambda c: c.update(scaler={"scale": float("nan")}), "does not fit: scale=nan"),
        (lambda c: c.pop("scaler"), "is damaged or no checkpoint of train.py: KeyError"),
        (
            lambda c: c.update(version=1),
            "is of version 1, not 2: use the commit that run.json names",
        ),
        (
            lambda c: c["config"].update(n_experts=8),
            r"is of a model with other settings \(n_experts\): use the commit in run.json",
        ),
        (
            lambda c: c["config"].pop("zero_init"),
            r"is of a model with other settings \(zero_init\): use the commit in run.json",
        ),
        (lambda c: c["config"].update(n_layer=3), "type --n_layer=3"),
        (lambda c: c.clear(), "is damaged or no checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(saved, change, message):
    _, good, restore = saved
    change(good)
    with pytest.raises(SystemExit, match=message) as e:
        restore(good)
    assert "\n" not in str(e.value)


def test_nothing_in_a_checkpoint_is_executed(saved, tmp_path):
    run, good, restore = saved

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    with pytest.raises(
        SystemExit, match=r"is damaged or no checkpoint of train\.py: UnpicklingError"
    ):
        restore(good | {"state": Bomb()})
    (run.folder / "ckpt.pt").write_bytes(pickle.dumps(Bomb(), 2))
    with pytest.raises(SystemExit, match="is damaged or no checkpoint"):
        checkpoint.restore(run, "muon")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb(), 2))
    assert (tmp_path / "exploded").exists()  # it would have


@settings(max_examples=15, deadline=None)
@given(configs())
def test_a_checkpoint_of_any_architecture_comes_back(tmp_path_factory, config):
    def make(seed):
        torch.manual_seed(seed)
        model = MaskedLM(config)
        state = module.State(step=3)
        run = SimpleNamespace(
            model=model,
            folder=path,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            meta={"sha256": {"train.bin": "abc"}},
            state=state,
            clock=module.Clock(state, 60.0, 0),
            optimizers=module.build_optimizers(dict(model.named_parameters())),
        )
        run.clock.earlier = 4.5
        ids = torch.randint(4, config.vocab_size, (2, 5))
        model(ids).square().sum().backward()
        for o in run.optimizers:
            o.step()
        return run

    path = tmp_path_factory.mktemp("any")
    a, b = make(0), make(1)
    checkpoint.write(a, "muon")
    checkpoint.restore(b, "muon")
    assert all(torch.equal(v, b.model.state_dict()[k]) for k, v in a.model.state_dict().items())
    for x, y in zip(a.optimizers, b.optimizers, strict=True):
        x, y = x.state_dict()["state"], y.state_dict()["state"]
        assert all(torch.equal(x[i][k], y[i][k]) for i in x for k in x[i])
    assert b.state == a.state and b.clock.earlier == pytest.approx(4.5, abs=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(extra=torch.ones(2)), "extra is unknown"),
        (lambda s: s.pop("head.dense.weight"), "head.dense.weight is missing"),
        (lambda s: s.update({"head.dense.weight": torch.ones(3)}), "head.dense.weight is of shape"),
        (
            lambda s: s["head.dense.weight"].fill_(float("nan")),
            "head.dense.weight is not finite everywhere",
        ),
    ],
)
def test_a_model_folder_that_does_not_fit_is_refused_by_name(tmp_path, change, message):
    folder_module.save(
        MaskedLM(
            next(
                iter([module.ModelConfig(vocab_size=40, n_layer=1, n_head=1, n_embd=8, n_inner=8)])
            )
        ),
        tmp_path,
    )
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        folder_module.load(tmp_path)


def test_no_path_makes_a_script_overwrite_what_is_not_its_own(tmp_path, monkeypatch):
    """A page of GLUE, a classifier's folder: each refused where something else is there."""
    import finetune_glue

    (tmp_path / "glue.md").write_text("precious")
    with pytest.raises(SystemExit, match="it is not ours, move it away"):
        glue.add_runs(tmp_path, {"system": "x", "weights": "w", "protocol": {}}, [])
    for content in ("{}", '{"model_type": "bert"}', "precious"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(SystemExit, match="is no classifier of ours: move it away, or leave"):
            finetune_glue.refuse_other(tmp_path)
    finetune_glue.refuse_other(tmp_path / "nowhere")
    assert (tmp_path / "glue.md").read_text() == "precious"


# Text made to harm


def hostile(folder, text, line_mb):
    """Files that something is wrong with, beside a good one; the names of those that cannot be read
    to their end."""
    import gzip

    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    bytes_ = {
        "a_good.txt": text.encode(),
        "b_invalid_utf8.txt": text[:9000].encode() + b"\xff\xfe\x80 \xc3\x28 go on\n\n",
        "c_nul.txt": ("a\0b \0\0 " + text[:9000]).encode(),
        "e_empty.txt": b"",
        "f_blank.txt": b"\n\n  \n\t\n\n",
        "d_one_line.txt": (text.replace("\n", " ") * (line_mb * 10**6 // len(text) + 1))[
            : line_mb * 10**6
        ].encode(),
        "g_spaces.txt": b"before" + b" " * 10**6 + b"after\n\n" + b"x" * 10**6,
        "h_bom.txt": b"\xef\xbb\xbf" + text[:900].encode(),
        "i_crlf.txt": text[:9000].replace("\n", "\r\n").encode(),
        "j_null.jsonl": b'{"text": null}\n{"text": "fine"}\n',
        "p_cut.txt.gz": gzip.compress(text.encode())[:-3000],
        "q_no_gzip.txt.gz": b"plain text " * 9,
        "r_broken.jsonl": b'{"text": "fine"}\n{"text": oops}\n',
        "t_no_parquet.parquet": b"PAR1 not really",
    }
    for name, content in bytes_.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"title": ["x"]}), folder / "s_no_text.parquet")
    return {name for name in os.listdir(folder) if "p" <= name[0] <= "t"}


@pytest.mark.parametrize("line_mb", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_hostile_text(tmp_path, texts, line_mb):
    bad = hostile(tmp_path / "in", "\n\n".join(text[:5000] for text in texts[:30]), line_mb)
    done = script(
        "prepare.py",
        source=tmp_path / "in" / "*",
        data_dir=tmp_path / "out",
        accept_partial=True,
        **SMALL_DATA,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    meta = load_meta(tmp_path / "out")
    assert {os.path.basename(path) for path in meta["errors"]} == bad
    assert all(done.stdout.count(f"{name} could not be read to its end: ") == 1 for name in bad)
    assert meta["counts"]["characters_read"] > line_mb * 10**6
    rows = np.fromfile(tmp_path / "out" / "train.bin", np.uint16)
    assert len(rows) == meta["counts"]["rows"] * 128 and rows.max() < 600
    print(f"\n{len(os.listdir(tmp_path / 'in'))} files, {len(bad)} of them refused by name")


@pytest.mark.slow
def test_line_ends_and_threads_change_nothing(tmp_path, corpus):
    text = corpus.read_bytes()
    (tmp_path / "unix.txt").write_bytes(text)
    (tmp_path / "windows.txt").write_bytes(text.replace(b"\n", b"\r\n"))
    for name, threads in (("unix", 1), ("windows", 3)):
        done = script(
            "prepare.py",
            source=tmp_path / f"{name}.txt",
            data_dir=tmp_path / name,
            threads=threads,
            **SMALL_DATA,
        )
        assert done.returncode == 0, done.stdout
    for file in ("tokenizer.json", "train.bin", "val.bin"):
        assert (tmp_path / "unix" / file).read_bytes() == (tmp_path / "windows" / file).read_bytes()


@pytest.mark.slow
def test_prepare_killed_at_any_moment(tmp_path, corpus, data_dir):
    """Nothing that looks finished is ever there before it is, and in the end all is as it should
    be."""
    folder, rng, kills = tmp_path / "data", random.Random(1), 0
    flags = [f"--{k}={v}" for k, v in SMALL_DATA.items()]
    command = [
        sys.executable,
        str(ROOT / "prepare.py"),
        f"--source={corpus}",
        f"--data_dir={folder}",
        *flags,
    ]
    begin, partial = time.monotonic(), folder.with_name("data.partial")

    def writes_rows():
        names = os.listdir(partial) if partial.exists() else []
        return any(name.startswith("bucket-") or name.endswith(".bin") for name in names)

    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    seconds, seen = time.monotonic() - begin, {"nothing": 0, "partial": 0, "rows": 0, "finished": 0}
    shutil.rmtree(folder)
    while kills < 25:
        if not kills % 3:
            shutil.rmtree(partial, ignore_errors=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kills % 3:
            time.sleep(rng.uniform(0.3, 1.02) * seconds)
        while not kills % 3 and process.poll() is None and not writes_rows():
            pass
        process.kill()
        process.wait()
        kills += 1
        rows = writes_rows()
        seen[
            "finished"
            if folder.exists()
            else "rows"
            if rows
            else "partial"
            if partial.exists()
            else "nothing"
        ] += 1
        if folder.exists():  # it was faster: whole, then
            load_meta(folder)
            for name in ("tokenizer.json", "train.bin", "val.bin"):
                assert (folder / name).read_bytes() == (data_dir / name).read_bytes()
            shutil.rmtree(folder)
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=True).returncode == 0
    for name in ("tokenizer.json", "train.bin", "val.bin"):
        assert (folder / name).read_bytes() == (data_dir / name).read_bytes()
    print(f"\n{kills} kills of prepare.py, at {seen}")
    assert seen["partial"] and seen["rows"]


# Long runs and large files


@pytest.mark.parametrize("edge", [2**31, 2**32])
def test_rows_across_the_edges_of_32_bits(tmp_path, edge):
    """A sparse file with rows of known tokens on both sides of the edge, read one by one and at
    once."""
    path, T = tmp_path / "train.bin", 128
    count, at = edge // (2 * T) + 4, edge // (2 * T)
    with open(path, "wb") as f:
        f.truncate(count * 2 * T)
        for i in range(-2, 3):
            f.seek((at + i) * 2 * T)
            f.write(np.full(T, 50 + i, dtype=np.uint16).tobytes())
    rows = Rows(path, count, T, 600)
    assert rows.read(at - 2, 5)[:, 7].tolist() == [48, 49, 50, 51, 52]
    assert [rows.read(at + i, 1)[0, 127].item() for i in (-1, 0, 1)] == [49, 50, 51]
    assert rows.read(count - 1, 2)[:, 0].tolist() == [0, 0]


@pytest.mark.slow
def test_a_long_run_grows_neither_in_memory_nor_in_files(tmp_path, data_dir):
    """20,000 steps; memory by a straight line through the second half, open files at its ends."""
    process = start(
        tmp_path / "out",
        data_dir,
        max_steps=20000,
        samples="",
        checkpoint_minutes=0.2,
        log_every=10,
        n_layer=1,
    )
    seen = []
    while process.poll() is None:
        try:
            kb = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            with open(tmp_path / "out" / "log.csv") as f:
                step = int(list(csv.reader(f))[-1][1])
            seen.append((step, kb, files))
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(1)
    assert process.returncode == 0, process.communicate()[0]
    first, half = ([s for s in seen if (s[0] > 10000) == late] for late in (False, True))
    slope = np.polyfit([s[0] / 1000 for s in half], [s[1] for s in half], 1)[0]
    early = seen[len(seen) // 4]
    print(
        f"\nRSS {early[1] / 1024:.0f} MB at step {early[0]:,}, "
        f"{half[-1][1] / 1024:.0f} MB at the end, "
        f"{slope:+.1f} kB per 1,000 steps; {half[0][2]} and {half[-1][2]} open files"
    )
    assert abs(slope) < 500 and max(s[2] for s in half) <= max(s[2] for s in first)
