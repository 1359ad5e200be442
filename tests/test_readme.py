"""Every command of the README: its flags and recipes are those of the scripts; what can run here runs, made small."""

import contextlib
import gzip
import io
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_DATA, SMALL_MODEL
from test_finetune_glue import model_folder

from configurator import SCRIPTS, configure, settings

README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = {k: v for k, v in SMALL_MODEL.items() if k not in ("samples", "evals", "eval_rows")}


def commands():
    """The single commands of all bash blocks, loops and variables taken apart."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        values = {}
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("  #")[0].strip()
            if match := re.fullmatch(r'([A-Z]+)="(.*)"', line) or re.match(r"for (\w+) in (\w+)", line):
                values[match[1]] = match[2]
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
            assert args[0] == "install" and all((ROOT / a).exists() for a in args if a.endswith(".txt"))
            continue
        if program == "hf":
            continue
        if program == "torchrun":
            assert args.pop(0).startswith("--nproc_per_node=")
        if args[:2] == ["-m", "pytest"]:
            continue
        name, *args = args
        assert name in SCRIPTS, command
        args = [re.sub(r"\+\S+", "", a) if name == "race.py" else a for a in args]  # changes of a contender
        flags = [a for a in args if a.startswith("--")] if name == "race.py" else args
        assert all((ROOT / a).is_file() for a in args if not a.startswith("--")), command
        also = "train.py" if name in ("bench.py", "race.py") else ""
        with contextlib.redirect_stdout(io.StringIO()):
            block = {k: v for k, (v, _) in settings(ROOT / name).items()}
            block["__file__"] = str(ROOT / name)
            configure(block, flags, also=also)  # exits where one is unknown or of a wrong type
        scripts += 1
    assert scripts > 25


@pytest.fixture
def workplace(tmp_path, data_dir, corpus, glue_files, monkeypatch):
    """A folder that looks like the repository to its commands, with small data and a small model."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    for name in SCRIPTS:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(data_dir, tmp_path / "data" / "small")
    (tmp_path / "data" / "fineweb_edu").symlink_to(tmp_path / "data" / "small")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    (tmp_path / "GLUE").symlink_to(glue_files[0])
    model_folder(tmp_path / "out" / "NAME", data_dir)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = {
    "prepare.py": SMALL_DATA,
    "train.py": TINY | {"data_dir": "data/small", "max_steps": 2, "eval_rows": 8, "evals": 1},
    "bench.py": TINY | {"data_dir": "data/small", "bench_steps": 2, "batch_size": 8},
    "race.py": TINY | {"data_dir": "data/small", "budget_hours": 0.0012, "seeds": 1, "evals": 1, "eval_rows": 8},
    "finetune_glue.py": {"glue_dir": "GLUE", "tasks": "rte", "seeds": 1, "epochs": 1, "dtype": "float32"},
}


SLOW = ("python train.py config/offload.py", "python race.py config/crammed.py",
        "python bench.py config/tiny.py --profile=True",
        "python finetune_glue.py --model=out/NAME --baseline=scratch")  # fmt: skip


@pytest.mark.parametrize("start", [
    "python prepare.py config/tiny.py --source=", "python train.py --budget_hours=24",
    *(pytest.param(start, marks=pytest.mark.slow) for start in SLOW)])  # fmt: skip
def test_what_can_run_here_runs(workplace, start):
    (command, *_) = [c for c in commands() if c.startswith(start)]
    name = next(s for s in SCRIPTS if s in command)
    flags = SHORT[name] | ({"n_narrow": 0, "vocab_size": 600} if name in ("train.py", "race.py") else {})
    if name == "race.py":
        flags = {k: v for k, v in flags.items() if k not in ("vocab_size", "out_dir")}
        command = " ".join(shlex.split(command)[:4])  # two of its recipes
    command += "".join(f" --{k}={v}" for k, v in flags.items())
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


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
        shown = subprocess.run([sys.executable, str(ROOT / name), "--help"], capture_output=True, text=True).stdout
        assert len(shown) > 1000 and all(len(line) <= 100 for line in shown.splitlines()), name
