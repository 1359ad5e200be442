"""README.md, results/README.md, docs/: flags and files that they name exist, commands run."""

import functools
import gzip
import importlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_DATA, SMALL_MODEL, flags, keep_settings, write_model
from forked import SCRIPT, Forked

import train
from nanocram.settings import configure

SCRIPTS = ("prepare.py", "train.py", "finetune_glue.py", "bench.py")
DOCUMENTS = sorted(path for at in (".", "results", "docs") for path in ROOT.glob(f"{at}/*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
CODE = "".join(p.read_text("utf-8") for p in [*ROOT.glob("*.py"), *ROOT.glob("nanocram/*.py")])
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SMALL_RUN = SMALL_MODEL | {"data_dir": "data/ready", "seq_len": 128, "n_narrow": 0}
SMALL_RUN |= {"evals": 1, "eval_rows": 8}
SHORT = {  # appended to every command, so that it takes a second or two
    "prepare.py": SMALL_DATA | {"source": "texts/*.txt.gz", "data_dir": "data/new"},
    "train.py": SMALL_RUN | {"max_steps": 2, "out_dir": "out/new"},
    "bench.py": SMALL_RUN | {"bench_steps": 2, "batch_size": 8},
    "finetune_glue.py": {"seeds": 1, "epochs": 1, "dtype": "float32", "glue_dir": "GLUE"},
}
# In the place of a program: it only notes how it was called, in a file of its own.
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$CALLS.$$"
"""


@functools.cache
def commands():
    """[(program, its arguments)] of all documents, by bash, where no other program exists."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python", "pip", "torchrun"):
            path = Path(folder) / name
            path.write_text(STUB)
            path.chmod(0o755)
        for name in ("seq", "xargs"):
            (Path(folder) / name).symlink_to(shutil.which(name))
        environment = {"PATH": folder, "CALLS": f"{folder}/calls"}
        for text in TEXTS.values():
            for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
                shell = ["/bin/bash", "-c", block + "\nwait"]
                subprocess.run(shell, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        calls = [path.read_text().split("\0")[:-1] for path in Path(folder).glob("calls.*")]
    return sorted({(program, tuple(args)) for program, *args in calls})


def calls_of_scripts():
    """[(script, its arguments)] of those of ours, except for what torchrun starts."""
    calls = [args for program, args in commands() if program == "python"]
    calls = [[arg.removeprefix("../nanocram/") for arg in args] for args in calls]
    return [(args[0], args[1:]) for args in calls if args[0] in SCRIPTS]


def test_files_flags_recipes_and_values_of_commands_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    modules = {name: importlib.import_module(name.removesuffix(".py")) for name in SCRIPTS}
    calls = calls_of_scripts()
    calls += [(args[1], args[2:]) for program, args in commands() if program == "torchrun"]
    assert {name for name, _ in calls} == set(SCRIPTS)
    for program, args in commands():
        for arg in args[:1] if program == "python" else args:
            is_ours = re.search(r"^(?!\.\./).*\.(py|txt)$", arg)  # not of another clone
            assert not is_ours or (ROOT / arg).exists(), (program, args)
    for name, args in calls:
        with monkeypatch.context() as patch:
            keep_settings(patch, *modules.values())
            configure(vars(modules[name]), list(args), train if name == "bench.py" else None)
            if name == "train.py":
                train.check_settings(torch.device("cpu"))


@pytest.mark.slow
def test_commands_run(tmp_path, data_dir, corpus, glue_files):
    for name in ("config", "nanocram", "model.py", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(data_dir, tmp_path / "data/ready")
    shutil.copytree(data_dir, tmp_path / "data/tiny")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    (tmp_path / "GLUE").symlink_to(glue_files[0])
    typed = " ".join(arg for _, args in calls_of_scripts() for arg in args)
    for folder in {"out/tiny", *re.findall(r"--(?:model|init|tokenizer)=(out/\S+)", typed)}:
        write_model(tmp_path / folder, data_dir, n_inner=SMALL_MODEL["n_inner"])
        (tmp_path / folder / "log.csv").write_text("elapsed_s,step,tokens\n1,2,3\n")

    for name, args in calls_of_scripts():
        if not re.search("--init=resume|--baseline=hf:", " ".join(args)):  # other tests have these
            shutil.rmtree(tmp_path / "data/new", ignore_errors=True)
            Forked(tmp_path, SCRIPT, tmp_path / name, *args, *flags(**SHORT[name])).end()
    for program, args in commands():
        if program == "python" and args[0] == "-c":
            for name in args[2:]:
                (tmp_path / name).write_text("two\n\nparagraphs\n")
            assert Forked(tmp_path, args[1], "-c", *args[2:]).end().strip(), args[1]


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_files_and_functions_exist(document):
    text = FENCED.sub("", TEXTS[document])
    goals = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for goal in goals:
        if not goal.startswith("https://"):
            path, _, anchor = goal.partition("#")
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), goal
            assert not anchor or anchor in anchors(target), goal
    for name in re.findall(r"`((?:results|config|nanocram|docs|tests)/[\w./]*\w\.\w+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(?:\w+\.)*(\w+)\(\)`", text):
        assert re.search(rf"^ *def {name}\b", CODE, re.MULTILINE), name
