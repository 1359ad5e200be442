import importlib
import io
import math
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, keep_settings

from nanocram import machine
from nanocram.settings import assign, configure, read_ranks

EXAMPLE = '''"""What it does."""
from nanocram.settings import configure

# fmt: off
count = 3      # an int
rate = 0.5     # a float
name = "x"     # a string
flag = True    # a bool
# fmt: on
LIMIT = 9
_hidden = 1
several = [1]
SETTINGS = configure(globals())
'''
OTHER = EXAMPLE.replace("count = 3", "parts = 2").replace("0.5", "0.25")
DEFAULTS = {"count": 3, "rate": 0.5, "name": "x", "flag": True}
HEAVY = {"datasets", "transformers", "matplotlib", "sklearn", "scipy", "tokenizers", "wandb"}


@pytest.fixture
def other(tmp_path):
    """A second script beside the example; they share all settings but parts and count."""
    return types.SimpleNamespace(**runpy.run_path(write(tmp_path, OTHER, "prepare.py")))


@pytest.fixture
def example(tmp_path, other):
    """The globals() of a script."""
    return runpy.run_path(write(tmp_path, EXAMPLE, "train.py"))


def values(namespace):
    return {name: namespace[name] for name in DEFAULTS}


def write(folder, text, name="recipe.py"):
    """The path of a recipe or a script."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def refused(namespace, *argv, also=None):
    """What configure() says of argv, in one line; nothing is set."""
    before = values(namespace)
    with pytest.raises(SystemExit, match=r"^.+$") as end:
        configure(namespace, list(argv), also)
    assert values(namespace) == before
    return str(end.value)


def test_flags_set_the_globals_and_changes_are_printed(example, capsys):
    assert example["SETTINGS"] == DEFAULTS
    assert configure(example, ["--count=7", "--rate=2", "--name=a=b", "--flag=False"]) == DEFAULTS
    assert values(example) == {"count": 7, "rate": 2.0, "name": "a=b", "flag": False}
    assert type(example["rate"]) is float
    assert "count = 7  (default 3)" in capsys.readouterr().out


def test_recipes_are_python_and_later_arguments_win(example, tmp_path):
    """A recipe may begin with others; names with _ in front and modules are its own."""
    first = write(tmp_path, "\ufeffimport math\n_n = 2\ncount = 10 * _n\nrate = 1\n")
    write(tmp_path, "include('below/other.py')\nname = name + 'y'\n", "beside.py")
    write(tmp_path, "count = 0.5 * count\n", "below/other.py")
    second = write(tmp_path, 2 * "include('beside.py')\n", "second.py")
    configure(example, [first, "--name=z", second, "--flag=False"])
    assert values(example) == {"count": 5, "rate": 1.0, "name": "zyy", "flag": False}
    assert type(example["count"]) is int and type(example["rate"]) is float
    assert "_n" not in example


def test_what_another_script_has(example, other, tmp_path):
    """A recipe may use it; bench.py takes train.py's flags. What both have is the script's own."""
    configure(example, [write(tmp_path, "parts = 2 * parts\ncount = parts\n")])
    assert example["count"] == 4 and "parts" not in example
    assert "did you mean parts?" in refused(example, write(tmp_path, "partz = 2\n"))
    configure(example, ["--parts=5", "--rate=1"], other)
    assert (example["rate"], other.rate, other.parts) == (1.0, 0.25, 5)
    assert "did you mean parts?" in refused(example, "--part=5", also=other)
    assert "no setting parts" in refused(example, "--parts=5")


def test_a_later_call_begins_with_the_defaults_and_what_was_assigned(example, other, capsys):
    """By hand, as in a notebook, where weights may have changed settings too."""
    configure(example, ["--count=7", "--rate=2"], other)
    other.parts = 9
    example["name"] = "by hand"
    capsys.readouterr()
    configure(example, ["--flag=False"], other)
    assert values(example) == DEFAULTS | {"name": "by hand", "flag": False} and other.parts == 9
    said = capsys.readouterr().out
    assert "name = 'by hand'" in said and "parts = 9" in said and "count" not in said
    assign(example, {"count": 9})
    configure(example, [])
    assert values(example) == DEFAULTS | {"name": "by hand"}


@pytest.mark.parametrize(
    "slip, why",
    [
        ("count = 1.5", "count=1.5"),
        ("rate = None", "rate=None"),  # else it would train with the default
        ("coutn = 1", "did you mean count?"),
        ("count = (", "SyntaxError"),
        ("count = 2 * cuont", "'cuont' is not defined"),
    ],
)
def test_a_slip_in_a_recipe_or_a_flag_is_one_line(example, tmp_path, slip, why):
    said = refused(example, write(tmp_path, slip))
    assert "recipe.py" in said and why in said
    assert slip.split()[0] in refused(example, "--" + slip.replace(" ", ""))


def test_ranks_without_torchrun(monkeypatch):
    """test_end_to_end.py has a RANK alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"^WORLD_SIZE is set, but RANK is .* unset WORLD_SIZE"):
        read_ranks.__wrapped__()


def test_any_terminal_will_do(monkeypatch):
    """Closed, a notebook's, and one without Unicode."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--source=nothing.txt", "--data_dir=本"])
    for stream in (None, io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii")):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit, match=r"no file matches 'nothing\.txt'"):
            runpy.run_path(str(ROOT / "prepare.py"), run_name="__main__")
        assert sys.stdout and sys.stderr  # libraries write there, too


def test_the_model_loads_nothing_of_ours_and_pre_training_nothing_heavy():
    """That no file imports a script, ruff.toml says."""
    code = "import sys, model; print(*sys.modules); import train; print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    of_model, of_train = (set(line.split()) for line in printed.splitlines())
    assert "nanocram" not in of_model
    assert "nanocram.data" in of_train and not of_train & {"nanocram.glue", *HEAVY}


@pytest.mark.parametrize("name", ["prepare", "train", "finetune_glue"])
def test_help_shows_the_defaults_before_torch_is_imported(name):
    """Read as Python, it prints the settings. -OO drops a script's docstring, -P its folder."""
    flags = ["-P", "-OO"] if name == "prepare" else ["-P"]
    command = [sys.executable, *flags, "-X", "importtime", f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    module = importlib.import_module(name)
    doc = "" if "-OO" in flags else module.__doc__.strip()
    assert done.stdout.startswith(doc), done.stdout
    shown = {}
    exec(done.stdout.removeprefix(doc), {}, shown)
    assert shown == module.SETTINGS
    head = f"{sys.executable} {name}.py --help | head -n 1"
    piped = subprocess.run(head, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert not piped.stderr and piped.stdout.strip()


@pytest.mark.parametrize(
    ("quotas", "user", "wanted"),
    [
        ({"cpu.max": "250000 100000"}, {}, ("3000", "2")),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, {}, ("3000", "1")),
        ({"cpu.max": "max 100000"}, {"OMP_WAIT_POLICY": "active"}, (None, None)),
        ({"cpu.max": "250000 100000"}, {"OMP_NUM_THREADS": "5"}, ("3000", "5")),
    ],
)
def test_threads_are_as_many_as_a_containers_cores(monkeypatch, quotas, user, wanted):
    """They sleep soon; what a user has set stands."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", user)
        patch.setattr(os, "sched_getaffinity", lambda process: range(8))
        patch.setattr(Path, "read_text", lambda path: quotas.get(path.name, "max"))
        runpy.run_path(str(ROOT / "nanocram/__init__.py"))
    assert (user.get("GOMP_SPINCOUNT"), user.get("OMP_NUM_THREADS")) == wanted


@pytest.mark.parametrize("recipe", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.stem)
def test_our_recipes_work_for_every_script(recipe, monkeypatch):
    """They name its settings, of their kinds, and train.py can build their model."""
    train = importlib.import_module("train")
    monkeypatch.setattr(machine, "free_host_bytes", lambda: math.inf)  # offload.py takes 44 GB ...
    monkeypatch.setattr(train.edits, "check_streaming", lambda *what: None)  # ... and seconds
    for module in map(importlib.import_module, ("prepare", "train", "finetune_glue")):
        keep_settings(monkeypatch, module)
        configure(vars(module), [str(recipe)])
    train.check_settings(torch.device("cpu"))
