"""README.md, results/README.md, docs/: commands run, links lead somewhere, files exist."""

import contextlib
import gzip
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_DATA, SMALL_MODEL, model_config

import race
import train
from model import MaskedLM
from nanocram import model_folder
from nanocram.configurator import configure

SCRIPTS = ("prepare.py", "train.py", "finetune_glue.py", "bench.py", "race.py")

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "results").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
README = TEXTS[ROOT / "README.md"]


def without_code(text):
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# The commands


def commands_of(block):
    """The single commands of a bash block; lines are joined, variables and loops taken apart."""
    found = []
    values = {}
    for line in block.replace("\\\n", " ").splitlines():
        line = line.split("  #")[0].strip()
        assigned = re.fullmatch(r'(?:export )?([A-Z_]+)="?(.*?)"?', line)
        loop = re.match(r"for (\w+) in ([\w-]+)", line)
        if assigned or loop:
            name, value = (assigned or loop).groups()
            values[name] = value
        elif line not in ("", "done"):
            for name, value in values.items():
                line = line.replace(f"${name}", value)
            found += [part.strip() for part in line.split("&&")]
    return found


def all_commands():
    """Every command of every document, each once."""
    found = []
    for text in TEXTS.values():
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found += commands_of(block)
    return list(dict.fromkeys(found))


COMMANDS = all_commands()


def script_of(command):
    """(script, its arguments) of a command, or ("", []) where it is none of our scripts."""
    program, *args = shlex.split(command)
    if program == "torchrun":
        assert re.fullmatch(r"--nproc_per_node=\d+", args.pop(0))
    elif program != "python":
        return "", []
    return (args[0], args[1:]) if args[0] in SCRIPTS else ("", [])


OURS = [command for command in COMMANDS if script_of(command)[0]]


@pytest.fixture
def settings_put_back(monkeypatch):
    """The settings of all scripts are afterwards what they were."""
    for name in SCRIPTS:
        module = importlib.import_module(name.removesuffix(".py"))
        for setting in module.SETTINGS:
            monkeypatch.setattr(module, setting, getattr(module, setting))


@pytest.mark.parametrize("command", OURS)
def test_flags_recipes_and_values_are_those_of_the_scripts(command, monkeypatch, settings_put_back):
    monkeypatch.chdir(ROOT)
    name, args = script_of(command)
    script = vars(importlib.import_module(name.removesuffix(".py")))
    also = train if name in ("bench.py", "race.py") else None
    flags = [arg for arg in args if arg.startswith("--")]
    contenders = [arg for arg in args if not arg.startswith("--")]
    with contextlib.redirect_stdout(io.StringIO()):
        configure(script, flags if name == "race.py" else args, also=also)
        if name == "race.py":
            for contender in race.parse_contenders(contenders).values():
                race.set_train(contender)
                train.check_settings(torch.device("cpu"))
        if name == "train.py":
            train.check_settings(torch.device("cpu"))


def test_the_other_commands_name_files_that_exist():
    for command in COMMANDS:
        if command.startswith("pip install"):
            for path in re.findall(r"\S+\.txt", command):
                assert (ROOT / path).exists(), command


# What can run here runs


SMALL_RUN = SMALL_MODEL | {"data_dir": "data/ready", "n_narrow": 0, "evals": 1, "eval_rows": 8}
SHORT = {  # appended to every command, so that it takes a second or two
    "prepare.py": SMALL_DATA,
    "train.py": SMALL_RUN | {"max_steps": 2},
    "bench.py": SMALL_RUN | {"bench_steps": 2, "batch_size": 8},
    "race.py": SMALL_RUN | {"max_steps": 2, "seeds": 1},
    "finetune_glue.py": {"seeds": 1, "epochs": 1, "dtype": "float32", "glue_dir": "GLUE"},
}
NOT_HERE = {  # which of several settings a script of SHORT does not take
    "train.py": ("samples",),
    "bench.py": ("samples", "evals", "eval_rows"),
    "race.py": ("samples", "vocab_size"),
}
HUB = r"python prepare.py (config/crammed.py$|.*--source='?(allenai|Hugging|wikimedia|OSCAR))"
ELSEWHERE = {  # why a command is not run by test_what_can_run_here_runs
    r"pip |hf upload|python -m pytest": "no script of ours",
    r"python -c": "test_one_liners",
    rf"python prepare.py$|{HUB}": "needs a network",
    r".*--baseline=hf:bert-base-uncased": "needs a network",
    r"python bench.py .*--compare=True": "test_bench.py has it, with a smaller BERT",
    r"torchrun": "test_parallel.py starts it, with fewer ranks",
}
# Importing torch takes seconds, so one process imports it and forks a child for each command.
ONE_BY_ONE = """
import json, os, runpy, sys
import datasets, matplotlib.figure, torch
for line in json.load(sys.stdin):
    print("+", *line, flush=True)
    child = os.fork()
    if child == 0:
        sys.argv = line
        runpy.run_path(line[0], run_name="__main__")
        sys.exit()
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"ended with {status}")
"""


def is_elsewhere(command):
    return any(re.match(pattern, command) for pattern in ELSEWHERE)


def write_model(folder, data_dir):
    """A small model folder, as train.py leaves one."""
    sizes = {key: SMALL_MODEL[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    model_folder.save(MaskedLM(model_config(**sizes, n_inner=48)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data_dir / name, folder / name)


@pytest.fixture
def workplace(tmp_path, data_dir, corpus, glue_files, monkeypatch):
    """A folder that looks like the repository to its commands, with small data and small models."""
    for name in ("config", "nanocram", "model.py", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(data_dir, tmp_path / "data/ready")
    text = gzip.compress(corpus.read_bytes())
    (tmp_path / "texts").mkdir()
    for path in ("texts/a.txt.gz", "data/sample.txt.gz", "small.txt.gz", "large.txt.gz"):
        (tmp_path / path).write_bytes(text)
    (tmp_path / "GLUE").symlink_to(glue_files[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortened(command):
    """A script and its arguments with SHORT behind them; of a race, its first contender."""
    name, args = script_of(command)
    settings = {k: v for k, v in SHORT[name].items() if k not in NOT_HERE.get(name, ())}
    if name == "race.py":
        flags = [arg for arg in args if arg.startswith("--")]
        contenders = [arg for arg in args if not arg.startswith("--")]
        # what is set for all contenders is no change of one
        own = rf"\+({'|'.join(settings)})=[^+]*"
        args = [re.sub(own, "", contender) for contender in contenders[:1]] + flags
    return [name, *args, *(f"--{key}={value}" for key, value in settings.items())]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_can_run_here_runs(workplace, data_dir, name):
    """All commands of a script, one after the other."""
    if name == "finetune_glue.py":
        for model in "NAME", "small", "evening", "small54", "fineweb", "mini/mini-0", "day2k/day-0":
            write_model(workplace / "out" / model, data_dir)
    lines = []
    for command in OURS:
        if script_of(command)[0] == name and not is_elsewhere(command):
            lines.append(shortened(command))
    assert len(lines) > 1
    # The threads of OpenMP do not survive a fork.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input=json.dumps(lines),
        text=True,
        timeout=580,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(re.findall(r"^\+ ", done.stdout, re.MULTILINE)) == len(lines)


@pytest.mark.slow
def test_one_liners(tmp_path, data_dir, monkeypatch, capsys):
    """The commands of the form python -c "…", on a small data set and a small model."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tiny").symlink_to(data_dir)
    write_model(tmp_path / "out/tiny", data_dir)
    (tmp_path / "out/tiny/log.csv").write_text("elapsed_s,step,tokens\n1,2,3\n")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(c)[2] for c in COMMANDS if c.startswith("python -c")]
    assert len(lines) > 3
    for line in lines:
        exec(line, {})
        assert capsys.readouterr().out.strip()


# Links, files and names


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), re.M):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.replace(" ", "-"))
    return found


def links(text):
    """The goals of a document's links and pictures that are not addresses of the web."""
    text = without_code(text)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    return [goal for goal in found if not goal.startswith("https://")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for goal in links(TEXTS[document]):
        path, _, anchor = goal.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), goal
        if anchor:
            assert anchor in anchors(target), goal
        if target.suffix == ".png":
            assert target.stat().st_size > 5000


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_in_backticks_exist(document):
    text = without_code(TEXTS[document])
    folders = r"results|config|nanocram|docs|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./]*\w\.\w+)`", text):
        assert (ROOT / name).exists(), name


def test_every_csv_is_named_in_the_notebook_and_is_there():
    notebook = "".join(text for path, text in TEXTS.items() if path.parent.name == "results")
    named = set(re.findall(r"`(\w+\.csv)`", without_code(notebook))) - {"log.csv"}
    assert named == {path.name for path in (ROOT / "results").glob("*.csv")}


def rows_of(table):
    """{first cell: the others} of a table's lines."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: cells for name, *cells in rows if name not in ("card", "---")}


def test_the_table_of_cards_is_what_its_script_says():
    """Figures of each card; every card of the script is there."""
    table = re.search(r"^\| card \| sustains.*\n.*\n((?:\|.*\n)+)", README, re.MULTILINE)[1]
    printed = {}
    for flags in (["--cards=2", "--link_gb_per_s=5"], []):
        command = [sys.executable, str(ROOT / "results/cards.py"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        printed |= rows_of(line for line in done.stdout.splitlines() if line.startswith("|"))
    found = rows_of(table.splitlines())
    for name, cells in found.items():
        rates, _, of_datasheet, tokens, each, fits, _, glue, _ = printed[name]
        share = of_datasheet.replace("%", " %")
        assert cells[:6] == [rates, share, tokens, each, fits.split(",")[0], glue], name
    assert found.keys() >= {name for name in printed if "×" not in name}


def test_what_to_edit_is_where_the_readme_says():
    table = re.search(r"\| to change \| edit \|\n.*\n((?:\|.*\n)+)", README)[1]
    for row in table.splitlines():
        words = re.findall(r"`([^`]+)`", row)
        code = "".join((ROOT / word).read_text() for word in words if word.endswith(".py"))
        for word in words:
            if not word.endswith(".py"):
                assert re.search(rf"^(def |class ){word}\b|^{word} = ", code, re.M), word


def test_every_fault_of_the_table_has_its_test():
    text = TEXTS[ROOT / "results/README.md"]
    table = re.search(r"^\| fault .*\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    rows = table.splitlines()
    assert len(rows) >= 16
    for row in rows:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name
