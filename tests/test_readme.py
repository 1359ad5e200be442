"""Every command of the README: its flags and recipes are those of the scripts; what can run here runs, made small."""

import contextlib
import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_DATA, SMALL_MODEL
from test_finetune_glue import model_folder

import train
from nanocram.configurator import SCRIPTS, configure, settings

README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = {k: v for k, v in SMALL_MODEL.items() if k not in ("samples", "evals", "eval_rows")}


def commands():
    """The single commands of all bash blocks, loops and variables taken apart."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        values = {}
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("  #")[0].strip()
            assigned = re.fullmatch(r'(?:export )?([A-Z_]+)="?(.*?)"?', line) or re.match(
                r"for (\w+) in (\w+)", line
            )
            if assigned:
                values[assigned[1]] = assigned[2]
            elif line not in ("", "done"):
                for name, value in values.items():
                    line = line.replace(f"${name}", value)
                found += [part.strip() for part in line.split("&&")]
    return found


def test_every_command_has_flags_and_recipes_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    scripts = 0
    for command in commands():
        program, *args = shlex.split(command)
        if program == "pip":
            assert args[0] == "install" and all(
                (ROOT / a).exists() for a in args if a.endswith(".txt")
            )
            continue
        if program == "hf":
            continue
        if program == "torchrun":
            assert args.pop(0).startswith("--nproc_per_node=")
        if args[:2] == ["-m", "pytest"]:
            continue
        name, *args = args
        assert name in SCRIPTS, command
        args = [
            re.sub(r"\+\S+", "", a) if name == "race.py" else a for a in args
        ]  # changes of a contender
        flags = [a for a in args if a.startswith("--")] if name == "race.py" else args
        assert all((ROOT / a).is_file() for a in args if not a.startswith("--")), command
        also = "train.py" if name in ("bench.py", "race.py") else ""
        with contextlib.redirect_stdout(io.StringIO()):
            block = {k: v for k, (v, _) in settings(ROOT / name).items()}
            block["__file__"] = str(ROOT / name)
            configure(block, flags, also=also)  # exits where one is unknown or of a wrong type
        if name == "train.py":  # as it stands there, not shortened
            for key in settings(ROOT / name):
                monkeypatch.setattr(train, key, block[key])
            train.check_settings()
        scripts += 1
    assert scripts > 25


@pytest.fixture
def workplace(tmp_path, data_dir, corpus, glue_files, monkeypatch):
    """A folder that looks like the repository to its commands, with small data and a small model."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    for name in SCRIPTS:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(data_dir, tmp_path / "data" / "ready")
    text = gzip.compress(corpus.read_bytes())
    (tmp_path / "texts").mkdir()
    for path in ("texts/a.txt.gz", "data/sample.txt.gz", "small.txt.gz", "large.txt.gz"):
        (tmp_path / path).write_bytes(text)
    (tmp_path / "GLUE").symlink_to(glue_files[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = {  # appended to every command, so that it takes a second or two
    "prepare.py": SMALL_DATA,
    "train.py": TINY
    | {"data_dir": "data/ready", "max_steps": 2, "eval_rows": 8, "evals": 1, "n_narrow": 0},
    "bench.py": TINY | {"data_dir": "data/ready", "bench_steps": 2, "batch_size": 8},
    "race.py": {k: v for k, v in TINY.items() if k not in ("vocab_size", "samples")}
    | {
        "n_narrow": 0,
        "data_dir": "data/ready",
        "max_steps": 2,
        "seeds": 1,
        "evals": 1,
        "eval_rows": 8,
    },
    "finetune_glue.py": {"seeds": 1, "epochs": 1, "dtype": "float32", "glue_dir": "GLUE"},
}
ELSEWHERE = {  # why a command is not run here
    r"pip |hf upload|python -m pytest": "no script of ours",
    r"python prepare.py$|python prepare.py .*--source=(allenai|monology|wikimedia|'OSCAR)": "needs a network",
    r".*--baseline=hf:bert-base-uncased": "needs a network",
    r"python bench.py .*--compare=True": "tests/test_bench.py has it, with a smaller BERT",
    r"torchrun": "tests/test_parallel.py starts it, with fewer ranks",
}
ONE_BY_ONE = """
import json, os, runpy, sys
import datasets, matplotlib.figure, torch  # once, for all that are forked from here
for line in json.load(sys.stdin):
    print("+", *line, flush=True)
    if not (child := os.fork()):
        sys.argv = line
        runpy.run_path(line[0], run_name="__main__")
        sys.exit()
    if status := os.waitpid(child, 0)[1]:
        sys.exit(f"ended with {status}")
"""


def runnable(script):
    found = [c for c in commands() if not any(re.match(pattern, c) for pattern in ELSEWHERE)]
    return [c for c in found if c.startswith(f"python {script}")]


def test_nothing_is_left_out_without_a_reason():
    assert sum(map(len, map(runnable, SCRIPTS))) + sum(
        any(re.match(pattern, c) for pattern in ELSEWHERE) for c in commands()
    ) == len(commands())
    assert all(any(re.match(pattern, c) for c in commands()) for pattern in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_can_run_here_runs(workplace, data_dir, name):
    """All commands of a script one after the other, each with SHORT behind what stands there."""
    for model in (
        ("NAME", "small54", "fineweb_edu", "mini/mini-0") if name == "finetune_glue.py" else ()
    ):
        model_folder(workplace / "out" / model, data_dir)
    lines = []
    for command in runnable(name):
        _, *args = shlex.split(command)
        if name == "race.py":  # two of its contenders
            args = [*args[:3], *(a for a in args[3:] if a.startswith("--"))]
        lines.append([*args, *(f"--{k}={v}" for k, v in SHORT[name].items())])
    assert len(lines) > 1
    ours = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }  # threads do not survive a fork
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input=json.dumps(lines),
        text=True,
        timeout=280,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ours,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("\n+ ") + done.stdout.startswith("+ ") == len(lines)


def test_the_pictures_and_files_that_it_names_are_there():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).stat().st_size > 5000, path
    files = re.findall(r"^\| `([\w/]+\.py)` \|", README, re.MULTILINE)
    assert {f for f in files if "/" not in f} == {p.name for p in ROOT.glob("*.py")}
    for name in re.findall(r"`(results/[\w.]+)`", README):
        assert (ROOT / name).exists(), name
    recipes = set(re.findall(r"`(config/\w+\.py)`", README))
    assert recipes >= {f"config/{p.name}" for p in (ROOT / "config").glob("*.py")}


def test_help_reads_well_at_100_columns():
    for name in SCRIPTS:
        shown = subprocess.run(
            [sys.executable, str(ROOT / name), "--help"], capture_output=True, text=True
        ).stdout
        assert len(shown) > 1000 and all(len(line) <= 100 for line in shown.splitlines()), name
