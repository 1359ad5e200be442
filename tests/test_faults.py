"""What a day may bring: kills, full disks, suspended processes, files made to harm.

The long ones: python -m pytest -m slow -s tests/test_faults.py. It prints the counts of the table
in results/README.md.
"""

import collections
import copy
import csv
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
    model_config,
    new_log,
    new_run,
    put,
    script,
)
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from test_model import configs

import train as module
from model import MaskedLM
from nanocram import checkpoint, glue, record, safety
from nanocram import model_folder as folder_module
from nanocram.data import Rows, held_out, load_meta


def start(out, data_dir, preexec_fn=None, **changes):
    """train.py as a process of its own."""
    flags = SMALL_MODEL | {"data_dir": data_dir, "out_dir": out} | changes
    flags = [f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, preexec_fn=preexec_fn, **streams)


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
    flags = {"dropout": 0.1, "samples": "", "data_dir": data_dir}
    assert start(tmp_path / "undisturbed", max_steps=30, **flags).wait(100) == 0
    out = shutil.copytree(tmp_path / "undisturbed", tmp_path / "out")
    large = [p for p in out.iterdir() if p.suffix in (".pt", ".safetensors", ".png")]
    before = {path: path.read_bytes() for path in large}
    assert min(map(len, before.values())) > 20_000 > (out / "log.csv").stat().st_size
    flags |= {"init": "resume", "max_steps": 50}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    full = start(out, preexec_fn=limit, **flags)
    said, _ = full.communicate(timeout=100)
    assert full.returncode == 1 and "Traceback" not in said, said
    assert str(out) in next(line for line in said.splitlines() if line.startswith("WARNING"))
    assert before == {path: path.read_bytes() for path in large} and not list(out.glob("*.tmp"))
    again = start(out, **flags)
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
    count = load_meta(train.data_dir)["counts"]["val_rows"]
    val = Rows(Path(train.data_dir) / "val.bin", count, 128, 600)
    batches = held_out(val.read(0, count), 8)[15]
    for factor in (1.0, 1e6):
        run = new_run()
        loss = run.loss_fn
        for step in range(120):
            run.loss_fn = loss
            if step == 60:
                run.loss_fn = lambda *batch, loss=loss, factor=factor: loss(*batch) * factor
            module.train_step(run, step / 120)
            if step == 60:
                norm = run.state.last["grad_norm"]
        run.loss_fn = loss
        ends.append((module.mean_loss(run, batches), run.state.skipped, norm))
    (plain, _, norm), (spiked, skipped, large) = ends
    assert large > 1e5 * norm
    assert skipped == 0 and plain < 5.6
    assert spiked == pytest.approx(plain, abs=0.05)


def before_step(monkeypatch, number, do):
    """Call do(run) before the step of that number, in the loop of train.main()."""
    train_step = module.train_step

    def disturbed(run, progress):
        if run.state.step == number:
            do(run)
        train_step(run, progress)

    monkeypatch.setattr(module, "train_step", disturbed)


@pytest.mark.parametrize("vanish", [False, True])
def test_an_exit_in_mid_run_saves_what_was_learnt(train, monkeypatch, data_dir, tmp_path, vanish):
    """Rows that shrink or vanish: one line, a checkpoint of the last whole step, and a resume."""
    folder = shutil.copytree(data_dir, tmp_path / "data")
    put(monkeypatch, module, data_dir=str(folder), max_steps=30)

    def lose_rows(run):
        (folder / "train.bin").unlink()
        if not vanish:
            (folder / "train.bin").touch()
        run.rows.fetched = {}

    with monkeypatch.context() as patch:
        before_step(patch, 7, lose_rows)
        with pytest.raises(SystemExit, match="train") as e:
            module.main()
    assert "\n" not in str(e.value)
    assert whole(Path(train.out_dir))["step"] == 7
    put(monkeypatch, module, data_dir=str(data_dir), init="resume", max_steps=9, samples="")
    module.main()
    assert whole(Path(train.out_dir))["step"] == 9


@pytest.mark.parametrize("offload", [False, True])
def test_memory_that_runs_out_in_mid_run(train, monkeypatch, capsys, offload):
    """In the second micro-batch of a step: that is saved which was before it, and the end is that
    of steps whose micro-batches were halved by hand. A resume keeps the smaller ones."""
    changes = {"max_steps": 9, "batch_ramp": 0.0, "dropout": 0.1, "samples": ""}
    put(monkeypatch, module, **changes, optimizer="adamw", offload=offload)
    reference = new_run()
    for step in range(9):
        reference.state.micro_batch = 8 if step < 5 else 2
        module.train_step(reference, step / 9)

    def fill(run):
        good, calls = run.eager_loss_fn, []

        def limited(ids, *others):
            calls.append(len(ids))
            if len(calls) > 1 and len(ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return good(ids, *others)

        run.loss_fn = run.eager_loss_fn = limited

    saved = []
    set_up = module.set_up

    def look(*args):
        if Path(train.out_dir, "ckpt.pt").exists():
            saved.append(whole(Path(train.out_dir)))
        set_up(*args)

    monkeypatch.setattr(module, "set_up", look)
    before_step(monkeypatch, 5, fill)
    module.main()
    said = capsys.readouterr().out
    assert "out of memory in step 6: saving, then going on with micro_batch=4\n" in said
    assert "out of memory with micro_batch=4: going on with 2\n" in said
    assert "9 steps, 0 of them skipped" in said
    assert [(state["step"], state["micro_batch"]) for state in saved] == [(5, 4)]
    weights = load_file(Path(train.out_dir) / "model.safetensors")
    folder_module.save(reference.model, Path(train.out_dir) / "reference")
    others = load_file(Path(train.out_dir) / "reference/model.safetensors")
    assert all(torch.equal(weights[name], others[name]) for name in others)
    put(monkeypatch, module, init="resume", max_steps=10)
    module.main()
    assert "micro_batch=2, since 8 did not fit" in capsys.readouterr().out


def test_a_bug_in_the_last_evaluation_loses_nothing(train, monkeypatch):
    """A fork's own, say: it keeps its traceback, and what was learnt is saved."""
    put(monkeypatch, module, max_steps=9, samples="", evals=0)

    def fail(*args):
        raise KeyError("a column of mine")

    before_step(monkeypatch, 8, lambda run: monkeypatch.setattr(module, "mean_loss", fail))
    with pytest.raises(KeyError):
        module.main()
    assert whole(Path(train.out_dir))["step"] == 9


@pytest.mark.parametrize("where", ["an evaluation", "the last evaluation", "the optimiser's step"])
def test_memory_that_runs_out_elsewhere(train, monkeypatch, where):
    """The run ends. It is saved as it was before, unless weights may be half changed."""
    put(monkeypatch, module, max_steps=9, samples="", evals=3)

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fill(run):
        if "evaluation" in where:
            monkeypatch.setattr(module, "mean_loss", fail)
        else:
            run.optimizers[-1].step = fail

    before_step(monkeypatch, 8 if where == "the last evaluation" else 5, fill)
    with pytest.raises(SystemExit, match="out of memory: type") as end:
        module.main()
    saved_at = {"an evaluation": 6, "the last evaluation": 9, "the optimiser's step": 1}
    assert whole(Path(train.out_dir))["step"] == saved_at[where]
    # An update takes as much whatever the rows.
    assert ("--micro_batch=" in str(end.value)) == ("evaluation" in where)


# A GPU that has fallen off the bus: from step 5 on every call is an error, of a save's copies too.
GONE = """
import torch
import train
from nanocram import machine, safety

machine.matmul_rate = lambda *where: 1e12
train_step = train.train_step


def gone(*args):
    raise RuntimeError("CUDA error: unspecified launch failure\\nCUDA kernel errors might be …")


def disturbed(run, progress):
    if run.state.step == 5:
        run.loss_fn = torch.save = torch.cuda.empty_cache = gone
    train_step(run, progress)


train.train_step = disturbed
vars(train).update(SETTINGS)
safety.run(train.main, "out", "--init=resume goes on")
"""


@pytest.mark.parametrize(
    ("said", "is_gone"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: the launch timed out and was terminated", True),
        ("CUDA driver error: unspecified launch failure", True),
        ("CUDA driver error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: no CUDA-capable device is detected", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("Triton Error [CUDA]: unspecified launch failure", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_which_errors_are_a_gpus_that_is_gone(said, is_gone):
    """In the words of CUDA's runtime and driver, as torch 2.13 and Triton hand them on."""
    assert safety.is_device_gone(RuntimeError(said)) == is_gone


def test_a_gpu_that_falls_off_the_bus(data_dir, tmp_path):
    """One line, and what was saved before stands: the run goes on as if nothing had been."""
    settings = {"max_steps": 8, "checkpoint_minutes": 1e-9, "data_dir": str(data_dir)}
    out = tmp_path / "out"
    code = GONE.replace("SETTINGS", repr(SMALL_MODEL | settings | {"out_dir": str(out)}))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "the GPU has failed (CUDA error: unspecified launch failure)" in said
    assert said.endswith("--init=resume goes on") and "Traceback" not in done.stderr
    assert whole(out)["step"] == 5
    for folder, init in ((out, "resume"), (tmp_path / "undisturbed", "scratch")):
        process = start(folder, init=init, **settings)
        assert process.wait(100) == 0, process.communicate()[0]
    assert_same_run(out, tmp_path / "undisturbed")


# Saved at every step and ended by too many; saved at both ends alone, and ended by max_steps.
@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, 200), (0.0, 8)])
def test_unusable_steps_replace_no_checkpoint(train, monkeypatch, minutes, steps):
    """The run ends with a status of 1, what was saved before stands, and it resumes."""
    put(monkeypatch, module, max_steps=steps, samples="", checkpoint_minutes=minutes)

    def poison(run):
        good = run.loss_fn
        run.loss_fn = lambda *batch: good(*batch) * float("nan")

    with monkeypatch.context() as patch:
        before_step(patch, 5, poison)
        with pytest.raises(SystemExit) as e:
            module.main()
    assert e.value.code and "\n" not in str(e.value)
    out = Path(train.out_dir)
    assert whole(out)["step"] == (5 if minutes else 1)
    rows = record.read_log(out)
    assert rows[-1]["step"] == (54 if steps == 200 else 8) and rows[-1]["skipped"] > 0
    put(monkeypatch, module, init="resume", max_steps=8)
    module.main()
    state = whole(out)
    assert state["step"] == 8 and state["skipped"] == 0


def test_weights_that_are_not_finite_replace_no_checkpoint(train, capsys):
    run = new_run()
    log = new_log(run)
    assert module.save(run, log)
    before = (log.folder / "ckpt.pt").read_bytes()
    run.model.decoder.bias.data[3] = float("nan")
    assert not module.save(run, log)
    assert "decoder.bias" in capsys.readouterr().out
    assert (log.folder / "ckpt.pt").read_bytes() == before


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
with safety.Signals():
    print("ready", flush=True)
    time.sleep(600)
"""


def waiter(*wrapper):
    """A process that says a line on stderr at each signal that it heeds."""
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
        assert process.stderr.readline()
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
        assert process.poll() is None
    finally:
        process.kill()


def test_signals_belong_to_the_run_alone():
    """Afterwards they are what they were, as a notebook needs it; a thread cannot have them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with safety.Signals() as signals:
        assert signal.getsignal(signal.SIGINT) == signals.handle
    assert [signal.getsignal(number) for number in numbers] == before
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lambda: safety.Signals().__enter__().stop).result()
    assert [signal.getsignal(number) for number in numbers] == before


MAIN = "from nanocram import safety\ndef main():"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("raise KeyboardInterrupt", "type it again"),
        ("import os, time; os.kill(os.getpid(), 15); time.sleep(9)", "type it again"),
        ("open('nowhere')", "nowhere: No such file or directory; type it again"),
        ("raise OSError('odd')", "here: odd; type it again"),
        ("import nowhere.at_all", "pip install nowhere"),
        ("raise RuntimeError('you tried to allocate memory')", "a smaller model"),
        ("raise RuntimeError('CUDA out of memory. Tried to')", "a smaller model"),
        ("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED')", "a smaller model"),
        ("raise MemoryError", "a smaller model"),
        ("raise RuntimeError('CUDA error: unknown error\\nmore')", "dmesg; type it again"),
    ],
)
def test_scripts_end_with_one_line(what, line):
    code = f"{MAIN}\n    {what}\nsafety.run(main, 'here', 'type it again')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.strip()
    assert said.endswith(line) and "\n" not in said


@pytest.mark.parametrize("what", ["a defect", "CUDA error: an illegal memory access was met"])
def test_other_errors_keep_their_trace(what):
    code = f"{MAIN}\n    raise RuntimeError({what!r})\nsafety.run(main, '', 'type it again')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert done.stderr.endswith(f"RuntimeError: {what}\ntype it again\n")


def test_a_kill_while_the_first_files_were_written_is_in_nobodys_way(tmp_path, data_dir, corpus):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json.tmp").write_text("{")
    record.new_folder(tmp_path / "out")
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "meta.json.tmp").write_text("{")
    done = script("prepare.py", source=corpus, data_dir=tmp_path / "data", **SMALL_DATA)
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "data.partial").exists()


def test_a_lost_run_json_is_no_reason_not_to_go_on(train, data_dir):
    log = new_log(new_run())
    log.begin(True, {"seed": 1}, data_dir, wandb_project="")
    assert record.read_facts(log.folder)["settings"] == {"seed": 1}
    words = "tokenizer.json"
    assert (log.folder / words).read_bytes() == (data_dir / words).read_bytes()
    of_data, of_run = (
        json.loads((folder / "tokenizer_config.json").read_text())
        for folder in (data_dir, log.folder)
    )
    assert of_run == of_data | {"model_max_length": train.max_seq_len}


def test_a_run_that_logged_nothing_yet_resumes_again(tmp_path):
    """Stopped while it compiled, resumed, and stopped again: log.csv has its header alone."""
    for _ in range(2):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)
        record.drop_rows_after(tmp_path, 0)
    assert (tmp_path / "log.csv").read_text().startswith("elapsed_s,step")
    (tmp_path / "log.csv").write_text("1.0,2,3\n4.0,5,6\n")
    with pytest.raises(SystemExit, match="log"):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SystemExit, match="run"):
        record.resume(tmp_path, {}, step=0, elapsed=0.0)


def test_a_run_that_one_stands_in_is_left_there(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--out_dir"):
        record.new_folder(".")
    assert (tmp_path / "run.json").exists()


def test_what_is_lost_is_said(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"settings": {"init": "scratch", "seed": 1}}')
    for step in (5, 10, 15, 20):
        row = {"elapsed_s": 10.0 * step, "step": step, "tokens": 1, "skipped": 0}
        record.append_row(tmp_path, row)
    record.resume(tmp_path, {"init": "resume", "seed": 2}, step=10, elapsed=100.0)
    changed, lost = capsys.readouterr().out.splitlines()
    assert "seed" in changed and "1" in changed and "2" in changed
    assert "step 10" in lost and "100 s" in lost
    assert [row["step"] for row in record.read_log(tmp_path)] == [5, 10]


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
            assert second.returncode == 1 and ".out.lock" in said.splitlines()[-1]
    finally:
        first.kill()
    first.wait()
    third = start(tmp_path / "out", data_dir, max_steps=3)
    assert third.wait(100) == 0 and (tmp_path / "out.1" / "ckpt.pt").exists()

    with safety.lock(safety.lock_file(tmp_path / "data")):
        second = script("prepare.py", source=corpus, data_dir=tmp_path / "data", **SMALL_DATA)
        assert second.returncode == 1 and ".data.lock" in last_line(second)


def test_two_writers_of_one_store_lose_nothing(tmp_path):
    """Four processes, each adding its runs one by one."""
    code = """
import sys
from nanocram import glue
facts = {"system": "x", "weights": "w", "settings": {}, "date": "", "device": ""}
for i in range(12):
    run = {"task": "cola", "seed": 12 * int(sys.argv[2]) + i, "data": "d",
           "rows": {"train": 8551, "dev": 1043}, "scores": {"matthews": 1.0}}
    glue.add_runs(sys.argv[1], [facts | run])
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    streams = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, f"{i}"], **streams) for i in range(4)]
    for writer in writers:
        assert writer.wait(100) == 0, writer.stderr.read()
    assert sorted(run["seed"] for run in glue.read_runs(tmp_path)) == [*range(48)]
    assert "; seeds: 48 " in (tmp_path / "glue.md").read_text()


# Files made to harm, or of another time


def parts_of(run):
    """A copy of all that a checkpoint restores."""
    optimizers = [o.state_dict() for o in run.optimizers]
    return copy.deepcopy([run.model.state_dict(), optimizers, run.scaler.state_dict(), run.state])


def same(a, b):
    """Whether nested lists and dicts are equal, their tensors to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture
def saved(train, monkeypatch):
    """(a Run after three steps, its checkpoint as a dict, a function that writes such a dict,
    restores it and returns the line of a refusal, which changes nothing; '' where there is none).

    The scaler is in use."""
    put(monkeypatch, train, max_steps=40)
    run = new_run()
    folder = new_log(run).folder
    for step in range(3):
        train.train_step(run, step / 40)
    run.scaler = torch.amp.GradScaler("cpu")
    checkpoint.write(run, folder, "muon")
    good = torch.load(folder / "ckpt.pt", weights_only=True)
    run.state.elapsed = 1.0

    def restore(changed):
        torch.save(changed, folder / "ckpt.pt")
        before = parts_of(run)
        try:
            checkpoint.restore(run, folder, "muon")
        except SystemExit as e:
            assert same(parts_of(run), before)
            assert "ckpt.pt" in str(e) and "\n" not in str(e)
            return str(e)
        return ""

    return run, good, restore


NAME = "model.layers.1.attn.Wq.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["model"].update(extra=torch.ones(2)), "extra"),
        (lambda c: c["model"].pop(NAME), NAME),
        (lambda c: c["model"].update({NAME: torch.ones(3, 4)}), NAME),
        (lambda c: c["model"][NAME].fill_(float("nan")), NAME),
        (lambda c: c["optimizers"].pop(), "optimisers, 1, build_optimizers() makes 2"),
        (lambda c: c["optimizers"][1][NAME].update(momentum_buffer=torch.ones(2, 2)), NAME),
        (lambda c: c["optimizers"][1].update(extra={}), "extra"),
        (lambda c: c["optimizers"][0]["decoder.bias"]["exp_avg"].fill_(math.inf), "exp_avg"),
        (lambda c: c["state"].update(step="3"), "step="),
        (lambda c: c["state"].update(row=-5), "row="),
        (lambda c: c["state"].update(elapsed=math.nan), "elapsed="),
        (lambda c: c["state"].pop("elapsed"), "elapsed"),
        (lambda c: c["scaler"].update(scale=math.nan), "scale="),
        (lambda c: c.update(data="0"), "--data_dir"),
        (lambda c: c["config"].update(n_layer=3), "--n_layer=3"),
        (lambda c: c.update(optimizer="adamw"), "--optimizer=adamw"),
        (lambda c: c.update(optimizer="adamw", optimizers=[{0: {}}]), "--optimizer=adamw"),
        (lambda c: c.clear(), "damaged"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(saved, change, named):
    _, good, restore = saved
    change(good)
    assert named in restore(good)


def places(value, path=()):
    """The paths of all that is in nested dicts and lists; two tensors, or states, of a kind do."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if path[:1] in (("model",), ("optimizers",)):
        keys = keys[:2]
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*path, key))


@pytest.mark.slow
def test_whatever_is_odd_in_a_checkpoint_is_refused_or_does_no_harm(saved):
    """Each part is gone, or something else: it is refused by a line, or a step can follow."""
    run, good, restore = saved
    ends = {True: 0, False: 0}
    for path in places(good):
        oddities = ["odd", None, -7, math.nan, [], {}, torch.ones(3)]
        if not (path[0] == "optimizers" and len(path) == 4):  # what belongs there torch knows
            oddities.append("gone")
        for odd in oddities:
            changed = copy.deepcopy(good)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = odd
            if isinstance(odd, str) and odd == "gone":
                del parent[path[-1]]
            is_refused = restore(changed) != ""
            ends[is_refused] += 1
            if not is_refused:
                module.train_step(run, 0.5)
                assert run.state.skipped == 0, (path, odd)
    assert ends[True] > 3 * ends[False], ends


def test_a_checkpoint_of_another_time_goes_on(saved, capsys):
    """Fields that are new keep their default, those that are gone are named, numbered states are
    given their names; what is there is taken."""
    run, good, restore = saved
    assert restore(good) == ""
    whole = parts_of(run)
    old = copy.deepcopy(good)
    for name in ("eval_seconds", "skipped"):
        del old["state"][name]
    old["config"]["position"] = old["config"].pop("position_embedding")
    old["state"]["lookahead"] = 3
    old["config"]["n_experts"] = 8
    for o, states in zip(run.optimizers, old["optimizers"], strict=True):
        for i, name in enumerate(checkpoint.names_of(o, run.model)):
            states[i] = states.pop(name)
    run.state = module.State(row=5, eval_seconds=4.5)
    capsys.readouterr()
    assert restore(old) == ""
    said = capsys.readouterr().out
    assert "lookahead" in said and "n_experts" in said
    assert same(parts_of(run)[:3], whole[:3])
    assert asdict(run.state) == asdict(whole[3]) | {"eval_seconds": 4.5}
    assert restore({**good, "state": good["state"] | {"micro_batch": 4}}) == ""
    assert run.state.micro_batch == 4


@dataclass
class Forked(module.State):
    average: dict = field(default_factory=dict)


def test_what_a_fork_keeps_in_state_comes_back(saved, capsys):
    """NumPy's numbers, averages of weights; what could not be read again is named and left out."""
    run, _, _ = saved
    folder = Path(module.out_dir)
    run.state.last = {"rate": np.float64(0.5), "mean": np.mean([1, 2])}
    run.state.best_loss = math.inf
    average = {"w": torch.ones(2, 2)}
    run.state = Forked(**asdict(run.state), average=average)
    checkpoint.write(run, folder, "muon")
    run.state.average = {}
    checkpoint.restore(run, folder, "muon")
    assert run.state.last == {"rate": 0.5, "mean": 1.5} and run.state.best_loss == math.inf
    assert torch.equal(run.state.average["w"], average["w"])
    run.state.step_seconds = math.nan
    for wrong, kind in ((collections.deque([1.0]), "deque"), ({"a": [np.zeros(2)]}, "ndarray")):
        run.state.average = wrong
        capsys.readouterr()
        checkpoint.write(run, folder, "muon")
        said = capsys.readouterr().out
        assert f"State.average, a {kind}: keep" in said
        assert "State.step_seconds=nan" in said
        checkpoint.restore(run, folder, "muon")


def test_an_optimiser_may_count_its_steps_in_python(saved):
    run, good, restore = saved
    for state in good["optimizers"][0].values():
        state["step"] = 3
    assert restore(good) == ""
    module.train_step(run, 0.5)
    assert run.state.skipped == 0


def test_nothing_in_a_checkpoint_is_executed(saved, tmp_path):
    run, good, restore = saved

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    assert restore(good | {"state": Bomb()})
    folder = Path(module.out_dir)
    (folder / "ckpt.pt").write_bytes(pickle.dumps(Bomb(), 2))
    with pytest.raises(SystemExit, match="ckpt"):
        checkpoint.restore(run, folder, "muon")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb(), 2))
    assert (tmp_path / "exploded").exists()  # it would have


@settings(max_examples=15, deadline=None)
@given(configs())
def test_a_checkpoint_of_any_architecture_comes_back(tmp_path_factory, config):
    def make(seed):
        torch.manual_seed(seed)
        model = MaskedLM(config)
        run = SimpleNamespace(
            model=model,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            meta={"sha256": {"train.bin": "abc"}},
            state=module.State(step=3, elapsed=4.5) if seed == 0 else module.State(),
            optimizers=module.build_optimizers(dict(model.named_parameters())),
        )
        ids = torch.randint(4, config.vocab_size, (2, 5))
        model(ids).square().sum().backward()
        for o in run.optimizers:
            o.step()
        return run

    path = tmp_path_factory.mktemp("any")
    a, b = make(0), make(1)
    assert not same(parts_of(a), parts_of(b))
    checkpoint.write(a, path, "muon")
    checkpoint.restore(b, path, "muon")
    assert same(parts_of(a), parts_of(b))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.update(extra=torch.ones(2)), "extra"),
        (lambda s: s.pop("head.dense.weight"), "head.dense.weight"),
        (lambda s: s.update({"head.dense.weight": torch.ones(3)}), "head.dense.weight"),
        (lambda s: s["head.dense.weight"].fill_(math.nan), "head.dense.weight"),
    ],
)
def test_a_model_folder_that_does_not_fit_is_refused_by_name(tmp_path, change, named):
    sizes = {"vocab_size": 40, "n_layer": 1, "n_head": 1, "n_embd": 8, "n_inner": 8}
    folder_module.save(MaskedLM(model_config(**sizes)), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        folder_module.load(tmp_path)


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
    folders = {"source": tmp_path / "in" / "*", "data_dir": tmp_path / "out"}
    done = script("prepare.py", accept_partial=True, **folders, **SMALL_DATA)
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    meta = load_meta(tmp_path / "out")
    assert {os.path.basename(path) for path in meta["errors"]} == bad
    assert all(name in done.stdout for name in bad)
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
