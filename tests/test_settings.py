import importlib
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, last_line, script

from nanocram.settings import configure

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
SCRIPTS = "prepare", "train", "finetune_glue"


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def other(tmp_path):
    """A second script beside the example; they share all settings but parts and count."""
    (tmp_path / "prepare.py").write_text(OTHER)
    return imported(tmp_path / "prepare.py")


@pytest.fixture
def example(tmp_path, other):
    """The globals() of a script."""
    (tmp_path / "train.py").write_text(EXAMPLE)
    return vars(imported(tmp_path / "train.py"))


def values(namespace):
    return {name: namespace[name] for name in DEFAULTS}


def write(folder, text, name="recipe.py"):
    """A recipe's path."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def refused(namespace, *argv, also=None):
    """What configure() says of argv, in one line; nothing is set."""
    before = values(namespace)
    with pytest.raises(SystemExit) as end:
        configure(namespace, list(argv), also)
    assert "\n" not in str(end.value)
    assert values(namespace) == before
    return str(end.value)


def test_flags_set_the_globals_and_changes_are_printed(example, capsys):
    assert example["SETTINGS"] == DEFAULTS
    assert configure(example, ["--count=7", "--rate=2", "--name=a=b", "--flag=False"]) == DEFAULTS
    assert values(example) == {"count": 7, "rate": 2.0, "name": "a=b", "flag": False}
    assert type(example["rate"]) is float
    assert "count = 7  (default 3)" in capsys.readouterr().out


def test_recipes_are_python_and_later_arguments_win(example, tmp_path):
    """A recipe finds what was set before it; names with _ in front and modules are its own."""
    first = write(tmp_path, "import math\n_n = 2\ncount = 5 * _n\nrate = 1\n")
    second = write(tmp_path, "count = 0.5 * count\nname = name + 'y'\n", "second.py")
    configure(example, [first, "--name=z", second, "--flag=False"])
    assert values(example) == {"count": 5, "rate": 1.0, "name": "zy", "flag": False}
    assert type(example["count"]) is int and type(example["rate"]) is float
    assert "_n" not in example


def test_a_recipe_may_set_what_another_script_has(example, tmp_path):
    """Its values can be used; a name that no script has is refused."""
    configure(example, [write(tmp_path, "parts = 2 * parts\ncount = parts\n")])
    assert example["count"] == 4 and "parts" not in example
    assert "did you mean parts?" in refused(example, write(tmp_path, "partz = 2\n"))


def test_the_settings_of_another_script(example, other):
    """bench.py takes those of train.py too; a setting that both have is the script's own."""
    configure(example, ["--parts=5", "--rate=1"], other)
    assert (example["rate"], other.rate, other.parts) == (1.0, 0.25, 5)
    assert "did you mean parts?" in refused(example, "--part=5", also=other)
    assert "no setting parts" in refused(example, "--parts=5")


@pytest.mark.parametrize("slip", ["count=1.5", "count=two", "flag=1", "rate=None", "rate=[1]"])
def test_a_wrong_type_is_one_line(example, tmp_path, slip):
    """In a recipe too: whoever writes rate = None would train with the default otherwise."""
    name = slip.partition("=")[0]
    assert f"{name}=" in refused(example, f"--{slip}")
    recipe = write(tmp_path, slip.replace("two", "'two'"))
    assert "recipe.py" in refused(example, recipe)


def test_slips_are_one_line(example, tmp_path):
    assert "did you mean count?" in refused(example, "--cuont=1")
    assert "--name=value" in refused(example, "--count")
    for argument in ("nowhere.py", "count=4"):
        assert f"no recipe {argument}" in refused(example, argument)
    for text, why in (
        ("count = (\n", "SyntaxError"),
        ("coutn = 1\n", "did you mean count?"),
        ("count = 2 * cuont\n", "'cuont' is not defined"),
        ("rate = 1 / 0\n", "ZeroDivisionError"),
    ):
        said = refused(example, write(tmp_path, text))
        assert "recipe.py" in said and why in said
    done = script("train.py", "--n_laye=3")
    assert done.returncode == 1 and "did you mean n_layer?" in last_line(done)


def started(*command, **environment):
    """What a command prints, and its exit status, with more in its environment."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({"RANK": "1"}, 0, "WARNING: RANK=1 is ignored"),  # left over from a batch system
        ({"RANK": ""}, 0, "The paper"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, 0, "WARNING: RANK=1 is ignored"),
        ({"WORLD_SIZE": "2"}, 1, "WORLD_SIZE is set, but RANK is not set: for one process"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"}, 1, "but LOCAL_RANK is x: for one"),
    ],
)
def test_ranks_without_torchrun(environment, status, said):
    rc, printed = started("train.py", "--help", **environment)
    assert rc == status and said in printed and "Traceback" not in printed
    assert (rc == 0) == ("budget_hours = 24.0" in printed)
    assert started("finetune_glue.py", "--help", **environment)[0] == 0  # it has no use for them


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_any_terminal_will_do(encoding, tmp_path):
    for name in SCRIPTS:
        assert started(f"{name}.py", "--help", PYTHONIOENCODING=encoding)[0] == 0
    slip = "prepare.py", f"--data_dir={tmp_path}/本", "--source=nothing.txt"
    rc, printed = started(*slip, PYTHONIOENCODING=encoding)
    assert rc == 1 and "data_dir = " in printed
    assert "no file matches 'nothing.txt'" in printed.splitlines()[-1]


NO_STREAM = """
import io, runpy, sys
sys.stdout, sys.stderr = {streams}
sys.argv = ["prepare.py", "--source=nothing.txt", "--data_dir=nowhere"]
try:
    runpy.run_path("prepare.py", run_name="__main__")
except SystemExit as end:
    sys.__stdout__.write(str(end))
"""


@pytest.mark.parametrize("streams", ["io.StringIO(), io.StringIO()", "None, None"])
def test_a_notebooks_and_a_closed_stdout_will_do(streams):
    rc, printed = started("-c", NO_STREAM.format(streams=streams))
    assert rc == 0 and printed.startswith("no file matches 'nothing.txt'"), printed


def test_a_recipe_is_found_beside_the_script_and_read_as_python_reads_it(example, tmp_path):
    done = script("prepare.py", "config/tiny.py", "--seq_len=1", cwd=tmp_path)
    assert done.returncode == 1 and "vocab_size = 4096" in done.stdout
    assert last_line(done).startswith("seq_len=1 cannot work")
    (tmp_path / "bom.py").write_text("count = 4\n", encoding="utf-8-sig")
    configure(example, [str(tmp_path / "bom.py")])
    assert example["count"] == 4


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_the_defaults_before_torch_is_imported(name, optimised):
    """Read as Python, what it prints are the settings. -OO drops what a script says first."""
    code = f"""
import runpy, sys
sys.argv = ["{name}.py", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    _, printed = started(*(["-OO"] if optimised else []), "-c", code)
    module = importlib.import_module(name)
    doc = "" if optimised else module.__doc__.strip()
    assert printed.startswith(doc), printed
    block, last = printed.removeprefix(doc).rstrip().rsplit("\n", 1)
    shown = {}
    exec(block, {}, shown)
    assert shown == module.SETTINGS
    assert last == "None False"


@pytest.mark.parametrize("recipe", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.stem)
def test_our_recipes_work_for_every_script(recipe, monkeypatch):
    """They set what Python makes of them, and train.py can build their model."""
    modules = [importlib.import_module(name) for name in SCRIPTS]
    for module in modules:
        wanted = {}
        for each in (*modules, module):
            wanted |= each.SETTINGS
        exec(recipe.read_text("utf-8"), wanted)
        space = dict(vars(module))
        configure(space, [str(recipe)])
        assert {n: space[n] for n in module.SETTINGS} == {n: wanted[n] for n in module.SETTINGS}
        for name in module.SETTINGS:
            monkeypatch.setattr(module, name, space[name])
    importlib.import_module("train").check_settings(torch.device("cpu"))
