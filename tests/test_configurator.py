import ast
import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, last_line, script
from hypothesis import given
from hypothesis import strategies as st

import finetune_glue
import prepare
import train
from nanocram.configurator import configure, evaluate, require, settings

CONFIGURE = """from nanocram.configurator import configure
SETTINGS = configure(globals())
"""
EXAMPLE = f'''"""What it does."""
count = 3          # an int
rate = 0.5         # a float
name = "x"         # a string
flag = True        # a bool
width = 2 * count  # an int, too
typed: int = 4
for looped in (1, 2):
    pass
LIMIT = 9
_hidden = 1
several = [1]
{CONFIGURE}'''
OTHER = f'''"""Other."""
source = "a"  # where from
rate = 0.25
parts = 2
{CONFIGURE}'''
DEFAULTS = {"count": 3, "rate": 0.5, "name": "x", "flag": True, "width": 6, "typed": 4, "looped": 2}


def imported(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def other(tmp_path):
    """A second script beside the example; one of its settings has a name that both know."""
    (tmp_path / "prepare.py").write_text(OTHER)
    return imported(tmp_path / "prepare.py")


@pytest.fixture
def example(tmp_path, other):
    """The globals() of a script."""
    (tmp_path / "train.py").write_text(EXAMPLE)
    return vars(imported(tmp_path / "train.py"))


def refused(namespace, *argv, also=None):
    """What configure() says of argv, in one line; nothing is set."""
    before = settings(namespace)
    with pytest.raises(SystemExit) as end:
        configure(namespace, list(argv), also)
    text = str(end.value)
    assert "\n" not in text
    assert settings(namespace) == before
    return text


def write(folder, text, name="recipe.py"):
    """A recipe's path."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_settings_are_the_live_globals(example):
    """Whatever made them: a literal, an expression, an annotated line, a loop, another file."""
    assert settings(example) == DEFAULTS and example["SETTINGS"] == DEFAULTS
    example["later"] = 7
    assert configure(example, ["--later=8"]) == DEFAULTS | {"later": 7}
    assert example["later"] == 8


def test_an_imported_script_takes_nothing_from_the_command_line(example, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebook", "--count=7"])
    configure(example)
    assert example["count"] == 3
    script = example | {"__name__": "__main__"}
    configure(script)
    assert script["count"] == 7


def test_flags_in_both_forms_and_what_was_changed_is_printed(example, capsys):
    configure(example, ["--count=7", "--rate", "2", "--name=a=b", "--flag=False", "--typed=4"])
    assert [example[k] for k in DEFAULTS] == [7, 2.0, "a=b", False, 14, 4, 2]
    assert type(example["rate"]) is float
    printed = capsys.readouterr().out
    assert "count = 7  (default 3)" in printed and "typed" not in printed


def test_flags_know_arithmetic_too(example):
    configure(example, ["--count=2*4", "--width=3 * count", "--looped=0.5*count", "--name=1+1"])
    assert [example[k] for k in ("count", "width", "looped", "name")] == [8, 24, 4, "1+1"]
    assert type(example["looped"]) is int


def test_recipes_and_flags_in_their_order(example, tmp_path):
    """An expression has its own file's earlier lines, and what was set before it."""
    first = write(tmp_path, '"""Doc."""\ncount = 5  # why\nrate = 1\nwidth = 3 * count\n')
    second = write(tmp_path, "width = width // 2 + typed\ncount = count ** 2 - 1\n", "second.py")
    configure(example, [first, "--typed=100", second, "--looped=count"])
    wanted = {"count": 24, "rate": 1.0, "width": 107, "typed": 100, "looped": 24}
    assert settings(example) == DEFAULTS | wanted


def test_the_settings_of_another_script(example, other, capsys):
    """A setting that both have is the script's own; alone, the other's are unknown."""
    assert configure(example, ["--source=b", "--count=parts", "--rate=1"], other) == DEFAULTS
    assert (example["count"], example["rate"], other.rate, other.source) == (2, 1.0, 0.25, "b")
    assert "source = 'b'  (default 'a')" in capsys.readouterr().out
    assert "did you mean source?" in refused(example, "--sourc=c", also=other)
    assert "has no setting source" in refused(example, "--source=b")


def test_what_a_recipe_says_for_another_script_passes(example, tmp_path):
    """So does a value that only that script knows; one of ours cannot be made of it."""
    recipe = write(tmp_path, 'source = "b"\nparts = parts * 3\ncount = 9\n')
    configure(example, [recipe])
    assert settings(example) == DEFAULTS | {"count": 9, "width": 18} and "source" not in example
    configure(example, [write(tmp_path, "parts = 2\ncount = 2 * parts\n")])
    assert example["count"] == 4
    assert "line 2" in refused(example, write(tmp_path, "\ncount = 2 * parts\n"))


def test_a_setting_that_follows_from_another(example, tmp_path, other):
    """width = 2 * count, unless it is given itself, before or behind; so in a recipe."""
    recipe = write(tmp_path, "count = 5\n")
    for argv, width in (
        (["--count=4"], 8),
        (["--count=4", "--width=7"], 7),
        (["--width=7", "--count=4"], 7),
        ([recipe], 10),
        ([recipe, "--count=6"], 12),
        (["--rate=2"], 6),
    ):
        space = dict(example)
        configure(space, argv)
        assert space["width"] == width
    space = dict(example)
    space["width"] = 8  # of a notebook, or of lines that are no plain assignment
    configure(space, ["--count=4"])
    assert space["width"] == 8


NUMBERS = st.integers(-99, 99) | st.floats(-99, 99) | st.booleans()
LEAVES = NUMBERS.map(repr) | st.sampled_from(["count", "rate", "width", "flag"])


def compound(inner):
    operators = st.sampled_from(["+", "-", "*", "/", "//", "%"])
    bare = st.tuples(inner, operators, inner).map(" ".join)
    power = st.tuples(inner.map("({})".format), st.integers(-3, 3).map("** {}".format)).map(
        " ".join
    )
    return (
        bare | bare.map("({})".format) | power | inner.map("-{}".format) | inner.map("+{}".format)
    )


def has_large_part(text):
    """Whether a part of an expression is a whole number beyond 2**63, which a recipe refuses."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.expr):
            value = eval(ast.unparse(node), None, dict(DEFAULTS))
            if isinstance(value, int) and abs(value) > 2**63:
                return True
    return False


@given(st.recursive(LEAVES, compound, max_leaves=8))
def test_arithmetic_is_pythons_own(text):
    node = ast.parse(text, mode="eval").body
    try:
        wanted = eval(text, None, dict(DEFAULTS))
    except (ArithmeticError, TypeError) as error:  # TypeError: of a complex number
        with pytest.raises((type(error), ValueError)):
            evaluate(node, DEFAULTS)
        return
    try:
        found = evaluate(node, DEFAULTS)
    except ValueError:
        assert has_large_part(text)
    else:
        assert (type(found), repr(found)) == (type(wanted), repr(wanted))


def test_strings_are_added(example, tmp_path):
    configure(example, [write(tmp_path, 'name = "a" "b" + name + (\n    "c"\n)\n')])
    assert example["name"] == "abxc"


# What may stand in the place of a number; {} is a call that would leave a file behind.
HOSTILE = """{}   -{}   1 + {}   2 @ {}   {}.real   {}[0]   [{}]   ({},)   {1: {}}   "a" * {}
"%s" % {}   lambda: {}   not {}   ~{}   1 < {}   1 == {}   1 and {}   {} if {} else 1   print(*{})
(x := {})   [x for x in {}]   f"{{}}\""""
STATEMENTS = """count = {}   name = {}   flag = {}   source = {}   count: int = {}   count += {}
{}   import os; {}   from os import *; {}   for count in {}: pass   if {}: pass   assert {}
def f(x={}): pass   count = rate = {}   count, rate = {}   train.count = {}   del count; {}
with {} as count: pass   globals()["count"] = {}"""


def parts(text):
    return st.sampled_from(text.replace("\n", "   ").split("   "))


def inside(pair):
    outer, inner = pair
    return outer.replace("{}", f"({inner})")


KINDS = parts(HOSTILE)
NESTED = st.recursive(KINDS, lambda inner: st.tuples(KINDS, inner).map(inside), max_leaves=3)


@given(NESTED, parts(STATEMENTS))
def test_a_recipe_is_never_run(tmp_path_factory, expression, statement):
    """Whatever is no arithmetic is refused by its line, and nothing of it happens."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "train.py").write_text(EXAMPLE)
    (folder / "prepare.py").write_text(OTHER)
    call = f"open('{folder}/touched', 'w')"
    text = statement.replace("{}", expression).replace("{}", call)
    said = refused(vars(imported(folder / "train.py")), write(folder, f"typed = 5\n{text}\n"))
    assert "recipe.py" in said and "line 2" in said
    assert not (folder / "touched").exists()


UNCOMPUTABLE = (
    "9**9**9  2**65  2**64-1  1/0  'a'*3  'a'-'b'  1j  None  b''  f'a'  (-8)**0.5".split()
)
UNCOMPUTABLE += ["0x" + "f" * 9000, "-" * 9999 + "1", "1" + "+1" * 99999]


@pytest.mark.parametrize("expression", UNCOMPUTABLE, ids=lambda text: text[:9])
def test_what_cannot_be_computed_is_refused(example, tmp_path, expression):
    assert "recipe.py" in refused(example, write(tmp_path, f"count = {expression}\n"))
    assert "count" in refused(example, f"--count={expression}")


@pytest.mark.parametrize("flag", ["count=1.5", "flag=1", "flag=yes", "rate=True", "rate=1e999"])
def test_a_wrong_type_is_one_line(example, tmp_path, flag):
    assert flag.partition("=")[0] in refused(example, f"--{flag}")
    assert "line 1" in refused(example, write(tmp_path, flag))


def test_slips_are_one_line(example, tmp_path):
    assert "did you mean count?" in refused(example, "--cuont=1")
    assert "--count=" in refused(example, "--count")
    assert "--name=" in refused(example, "--name", "--rate=1")
    for argument in ("nowhere.py", "config/tiny", "rate=0.1"):
        said = refused(example, argument)
        assert f"no recipe {argument}: a setting is --name=value" in said
    assert "recipe.py" in refused(example, write(tmp_path, "count = (\n"))
    said = refused(example, write(tmp_path, "\ncoutn = 1\n"))
    assert "line 2" in said and "did you mean count?" in said
    assert "cuont" in refused(example, write(tmp_path, "count = 2 * cuont\n"))
    done = script("train.py", "--n_laye=3")
    assert done.returncode == 1 and "did you mean n_layer?" in last_line(done)


@given(st.sampled_from([*DEFAULTS, "other"]), st.text(), st.sampled_from(["joined", "two", "file"]))
def test_any_text_gives_the_right_type_or_one_line(tmp_path_factory, key, text, how):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "train.py").write_text(EXAMPLE)
    namespace = vars(imported(folder / "train.py"))
    argv = [f"--{key}={text}"] if how == "joined" else [f"--{key}", text]
    if how == "file":
        (folder / "recipe.py").write_bytes(f"{key} = {text}\n".encode(errors="replace"))
        argv = [str(folder / "recipe.py")]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        configure(namespace, argv)
    types = {name: type(value) for name, value in DEFAULTS.items()}
    assert {name: type(namespace[name]) for name in DEFAULTS} == types


def test_a_leading_tilde_is_the_home_folder(example, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    configure(example, ["--name=~/x"])
    assert example["name"] == "/home/me/x"
    example["name"] = "~/edited"
    configure(example, [])
    assert example["name"] == "/home/me/edited"
    configure(example, ["--name=a ~ b"])
    assert example["name"] == "a ~ b"


def printed_help(capsys, *args):
    with pytest.raises(SystemExit) as end:
        configure(*args)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_settings_with_their_values(example, other, capsys):
    """As the source has them; an expression, and what has no line of its own, with its value."""
    example["width"] = 8  # the file was edited in a notebook, say
    shown = printed_help(capsys, example, ["--help"], other)
    assert printed_help(capsys, example, ["-h"], other) == shown
    for comment in ("What it does.", "# an int\n", "# where from"):
        assert comment in shown
    assert "width = 2 * count  # an int, too  # = 8\n" in shown and "looped = 2\n" in shown
    assert "LIMIT" not in shown


def test_help_of_settings_that_have_no_line(tmp_path, capsys):
    (tmp_path / "script.py").write_text('"""Doc."""\ncount, rate = 3, 0.5\n')
    namespace = vars(imported(tmp_path / "script.py"))
    assert printed_help(capsys, namespace, ["--help"]) == "Doc.\n\ncount = 3\nrate = 0.5\n"


def test_help_shows_the_whole_of_a_value_on_several_lines(tmp_path, capsys):
    text = 'count = 3\nname = (\n    "a"\n    "b"\n)\n'
    (tmp_path / "script.py").write_text(f'"""Doc."""\n{text}X = 1\n')
    namespace = vars(imported(tmp_path / "script.py"))
    assert printed_help(capsys, namespace, ["--help"]).endswith(text)


PROBE = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("module", [prepare, train, finetune_glue])
def test_help_of_our_scripts(module):
    """Read as Python it is their defaults; no heavy import comes first."""
    command = [sys.executable, "-c", PROBE, module.__file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *lines, has_torch = done.stdout.splitlines()
    assert has_torch == "False", done.stderr
    begin = next(
        i for i, line in enumerate(lines) if line.startswith(f"{next(iter(module.SETTINGS))} =")
    )
    shown = {}
    exec("\n".join(lines[begin:]), {}, shown)
    assert shown == {name: getattr(module, name) for name in module.SETTINGS}


def test_help_into_a_pipe_that_nobody_reads():
    """As `python train.py --help | head -1` has it, only sooner."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("recipe", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.stem)
def test_our_recipes_set_what_the_scripts_have(recipe):
    """To what Python itself makes of them."""
    modules = prepare, train, finetune_glue
    for module in modules:
        space = dict(vars(module))
        configure(space, [str(recipe)])
        wanted = {}
        for each in (*modules, module):
            wanted |= {name: getattr(each, name) for name in each.SETTINGS}
        names = set(wanted)
        exec(recipe.read_text(encoding="utf-8"), {}, wanted)
        assert wanted.keys() - names <= {"__doc__"}
        for name in module.SETTINGS:
            assert (space[name], type(space[name])) == (wanted[name], type(getattr(module, name)))


@pytest.mark.parametrize(("name", "value"), [("count", 9), ("count", 0), ("name", "z")])
def test_values_that_cannot_work(name, value):
    limits = {"count": (1, 8), "name": ("x", "y")}
    require(DEFAULTS, limits)
    with pytest.raises(SystemExit, match=f"{name}={value}"):
        require(DEFAULTS | {name: value}, limits)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def nvml(tmp_path):
    """make(code): the environment of a machine whose libnvidia-ml.so.1 is that, or without one."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")

    def make(code):
        library = tmp_path / "libnvidia-ml.so.1"
        library.unlink(missing_ok=True)
        if code:
            (tmp_path / "nvml.c").write_text(code)
            command = [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"]
            subprocess.run(command, check=True)
        own = {k: v for k, v in os.environ.items() if k not in ALLOCATOR}
        return own | {"LD_LIBRARY_PATH": str(tmp_path)}

    return make


@pytest.mark.skipif(sys.platform != "linux", reason="torch has it on Linux alone")
@pytest.mark.parametrize("name", ["train", "bench", "race", "finetune_glue"])
def test_what_torch_reads_is_set_before_it_is_imported(name, nvml, tmp_path):
    """A torch that only says what it finds; a user's own value stays, under both names."""
    found = f"import os; raise SystemExit([os.environ.get(name) for name in {ALLOCATOR}])"
    (tmp_path / "torch.py").write_text(found)
    today = "int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }"
    expandable = {ALLOCATOR[0]: "expandable_segments:True"}
    first, second = ({key: "mine"} for key in ALLOCATOR)
    cases = [(today, {}, expandable)]
    if name == "train":
        cases += [
            (today, first, first),
            (today, second, second),
            ("int older;", {}, {}),
            ("", {}, {}),
        ]
    for code, own, wanted in cases:
        environment = nvml(code) | own | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(ROOT / f"{name}.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stderr.strip() == str([wanted.get(key) for key in ALLOCATOR])


def test_torch_knows_these_words(nvml):
    """Its configuration is there on a CPU too; a word that torch does not know is an error."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell")
    code = "import train, torch; print(torch._C._accelerator_getAllocatorSettings())"
    environment = nvml("int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "expandable_segments:True", done.stderr
