import ast
import contextlib
import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT, last_line, script
from hypothesis import given
from hypothesis import strategies as st

from nanocram.configurator import SCRIPTS, assignments, configure, require, settings

EXAMPLE = '''"""What it does.

    python train.py
"""
count = 3        # an int
rate = 0.5       # a float
name = "x"       # a string
flag = True      # a bool
LIMIT = 9
derived = count * 2
'''


@pytest.fixture
def example(tmp_path):
    """A namespace like the globals() of a script, and its folder, with another script beside it."""
    (tmp_path / "train.py").write_text(EXAMPLE)
    (tmp_path / "prepare.py").write_text('"""Other."""\nsource = "a"\n')
    return {"__file__": str(tmp_path / "train.py"), "__doc__": "What it does.", **DEFAULTS}


DEFAULTS = {"count": 3, "rate": 0.5, "name": "x", "flag": True}


def message(namespace, *argv):
    with pytest.raises(SystemExit) as end:
        configure(namespace, list(argv))
    text = str(end.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_settings_are_the_lower_case_literals(example):
    assert {k: v for k, (v, _) in settings(example["__file__"]).items()} == DEFAULTS


def test_flags_in_both_forms_and_what_was_changed_is_printed(example, capsys):
    configure(example, ["--count=7", "--rate", "2", "--name=a=b", "--flag=False"])
    assert [example[k] for k in DEFAULTS] == [7, 2.0, "a=b", False]
    assert type(example["rate"]) is float
    assert "count = 7  (default 3)" in capsys.readouterr().out


@pytest.fixture
def beside(example, tmp_path):
    """The same, with settings in the other script; one of them has a name that both know."""
    text = '"""Other."""\nsource = "a"  # where from\nrate = 0.25\nparts = 2\n'
    (tmp_path / "prepare.py").write_text(text)
    return example


def test_the_settings_of_another_script_are_returned(beside, capsys):
    """Defaults as well; a setting that both have is the script's own."""
    others = configure(beside, ["--source=b", "--count=4"], also="prepare.py")
    assert others == {"source": "b", "parts": 2}
    assert "source" not in beside
    assert (beside["count"], beside["rate"]) == (4, 0.5)
    assert configure(beside, []) == {}
    printed = capsys.readouterr().out
    assert "source = 'b'  (default 'a')" in printed
    assert "count = 4" in printed
    assert "parts" not in printed


def test_a_typo_in_a_setting_of_another_script(beside):
    with pytest.raises(SystemExit, match=r"train.py has no setting sourc; did you mean source\?"):
        configure(beside, ["--sourc=c"], also="prepare.py")


def test_help_shows_the_settings_of_both_scripts(beside, capsys):
    with pytest.raises(SystemExit) as end:
        configure(beside, ["--help"], also="prepare.py")
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert "# an int" in printed and "# where from" in printed
    assert "LIMIT" not in printed


def test_help_shows_the_whole_of_a_value_on_several_lines(example, tmp_path, capsys):
    (tmp_path / "train.py").write_text(
        '"""Doc."""\ncount = 3\nname = (\n    "a"\n    "b"\n)\nX = 1\n'
    )
    with pytest.raises(SystemExit):
        configure(example, ["--help"])
    assert capsys.readouterr().out.endswith('name = (\n    "a"\n    "b"\n)\n')


def test_recipe_then_flag_last_wins_and_keys_of_another_script_pass(example, tmp_path):
    recipe = tmp_path / "r.py"
    recipe.write_text('"""Doc."""\ncount = 5  # why\nrate = 1\nsource = "b"\n')
    configure(example, [str(recipe), "--count=6"])
    assert example["count"] == 6 and example["rate"] == 1.0 and "source" not in example


@pytest.mark.parametrize(
    "flag",
    [
        "--count=1.5",
        "--count=x",
        "--flag=1",
        "--rate=True",
        "--rate=1e999",
        "--rate=[1]",
        "--count=__import__('os')",
        "--flag=yes",
    ],
)
def test_wrong_type_is_one_line(example, flag):
    assert "should be of type" in message(example, flag)


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text('data_dir = "data"\nsamples = ""\n')
    monkeypatch.setenv("HOME", "/home/me")
    space = {
        "__file__": str(tmp_path / "script.py"),
        "__doc__": "Doc.",
        "data_dir": "data",
        "samples": "",
    }
    configure(space, ["--data_dir=~/x", "--samples=a ~ b"])
    assert (space["data_dir"], space["samples"]) == ("/home/me/x", "a ~ b")
    configure(space | {"data_dir": "~/edited"}, [])
    assert space["data_dir"] == "/home/me/x"


def test_typo_names_the_nearest(example):
    assert "did you mean count?" in message(example, "--cuont=1")
    assert "has no setting source" in message(example, "--source=b")
    assert "no value" in message(example, "--count")


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "count = 1 + 1",
        "count: int = 3",
        "x, y = 1, 2",
        "print(1)",
        "if 1: pass",
        "f'{print(1)}'",
        "count = rate = 1",
        "a.b = 1",
        "count += 1",
    ],
)
def test_recipes_are_never_run(example, tmp_path, line):
    recipe = tmp_path / "r.py"
    recipe.write_text(f"{line}\n")
    assert "only `name = literal` lines" in message(example, str(recipe))


def test_unreadable_recipes(example, tmp_path):
    (tmp_path / "bad.py").write_text("count = (\n")
    assert "cannot read the recipe" in message(example, str(tmp_path / "bad.py"))
    assert "cannot read the recipe" in message(example, "nowhere.py")
    (tmp_path / "key.py").write_text("coutn = 1\n")
    assert "did you mean count?" in message(example, str(tmp_path / "key.py"))


@given(st.sampled_from(["count", "rate", "name", "flag", "other"]), st.text(), st.booleans())
def test_any_text_gives_the_right_type_or_one_line(tmp_path_factory, key, text, joined):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "train.py").write_text(EXAMPLE)
    namespace = {"__file__": str(folder / "train.py"), "__doc__": "", **DEFAULTS}
    argv = [f"--{key}={text}"] if joined else [f"--{key}", text]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        configure(namespace, argv)
    assert {k: type(namespace[k]) for k in DEFAULTS} == {k: type(v) for k, v in DEFAULTS.items()}


PROBE = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_config_block_and_needs_no_torch(name):
    command = [sys.executable, "-c", PROBE, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *lines, has_torch = done.stdout.splitlines()
    assert has_torch == "False", done.stderr
    assert max(map(len, lines)) <= 100
    defaults = {name: default for name, (default, _) in settings(ROOT / name).items()}
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{next(iter(defaults))} ="))
    shown = {}
    for node in ast.parse("\n".join(lines[first:])).body:
        shown.setdefault(node.targets[0].id, ast.literal_eval(node.value))
    assert shown | defaults == shown


@pytest.mark.parametrize("name", ["train.py", "race.py"])
def test_help_into_a_pipe_that_nobody_reads(name):
    """As `python train.py --help | head -1` has it, only sooner."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, name, "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "config").glob("*.py")))
def test_our_recipes_set_what_the_scripts_have(recipe, capsys):
    names = assignments(ROOT / "config" / recipe, strict=True)
    scripts = ("prepare.py", "train.py", "finetune_glue.py")
    assert not set(names) - {key for script_name in scripts for key in settings(ROOT / script_name)}
    for script_name in scripts:
        defaults = {k: v for k, (v, _) in settings(ROOT / script_name).items()}
        namespace = {"__file__": str(ROOT / script_name), "__doc__": "", **defaults}
        configure(namespace, [str(ROOT / "config" / recipe)])
        assert all(namespace[k] == v for k, (v, _) in names.items() if k in defaults)


def test_only_what_differs_in_the_end_is_printed(example, tmp_path, capsys):
    recipe = tmp_path / "r.py"
    recipe.write_text("count = 5\n")
    configure(example, [str(recipe), "--count=3", "--rate=0.25"])
    assert capsys.readouterr().out == "rate = 0.25  (default 0.5)\n"
    assert "no value" in message(example, "--name", "--rate=1")


def test_a_typo_on_a_real_script():
    done = script("train.py", "--n_laye=3")
    assert done.returncode == 1 and "did you mean n_layer?" in last_line(done)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 9}, "count=9 cannot work: it must be between 1 and 8"),
        ({"count": 0}, "count=0 cannot work"),
        ({"name": "z"}, "name=z cannot work: it must be x or y"),
    ],
)
def test_values_that_cannot_work(values, words):
    limits = {"count": (1, 8), "name": ("x", "y")}
    require(DEFAULTS, limits)
    with pytest.raises(SystemExit, match=words):
        require(DEFAULTS | values, limits)
