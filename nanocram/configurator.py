"""A script's module-level globals are its settings; recipe files and flags set them, in order.

    python train.py config/tiny.py --budget_hours=0.1 --seed 2
    python train.py --help

A recipe is a file of `name = literal` lines, which is read and never run.
"""

import ast
import contextlib
import difflib
import math
import os
import sys
from pathlib import Path

SCRIPTS = ("prepare.py", "train.py", "finetune_glue.py", "bench.py", "race.py")
NOT_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
COMMAND_LINE = "command line"


def assignments(path, strict=False):
    """{name: (value, syntax node)} of the `name = literal` lines of a file.

    strict: exits at a line of any other kind, but for a docstring."""
    try:
        nodes = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, *NOT_LITERAL) as error:
        sys.exit(f"cannot read the recipe {path}: {error}")
    found = {}
    for node in nodes:
        is_assignment = isinstance(node, ast.Assign) and len(node.targets) == 1
        if is_assignment and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(*NOT_LITERAL):
                found[node.targets[0].id] = (ast.literal_eval(node.value), node)
                continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if strict and not is_docstring:
            sys.exit(f"{path}, line {node.lineno}: a recipe holds only `name = literal` lines")
    return found


def settings(script):
    """The settings of a script, {name: (default, syntax node)}: its lower-case literal globals."""
    found = assignments(script).items()
    return {k: v for k, v in found if k.islower() and isinstance(v[0], int | float | str)}


def configure(namespace, argv=None, also=""):
    """Set the settings in a script's globals() from argv: recipe files, --name=value, --help.

    argv may also set those of `also`, a script in the same folder; returns these, {name: value}."""
    script = Path(namespace["__file__"])
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv:
        print_help(namespace["__doc__"], [script, script.with_name(also)] if also else [script])
    # A setting that both scripts have is the script's own.
    own = settings(script)
    others = settings(script.with_name(also)) if also else {}
    defaults = {name: default for name, (default, _) in (others | own).items()}

    # One recipe serves all scripts: what it sets for the others passes here.
    beside = [script.with_name(name) for name in SCRIPTS if script.with_name(name).exists()]
    elsewhere = {name for path in beside for name in settings(path)}
    values = dict(defaults)
    for where, name, value in parse_arguments(argv):
        if name in defaults:
            values[name] = convert(where, name, value, defaults[name])
        elif where == COMMAND_LINE or name not in elsewhere:
            near = difflib.get_close_matches(name, defaults, 1)
            guess = near[0] if near else f"one of those that python {script.name} --help lists"
            sys.exit(f"{where}: {script.name} has no setting {name}; did you mean {guess}?")

    for name, default in defaults.items():
        if isinstance(default, str):
            values[name] = os.path.expanduser(values[name])  # a shell leaves --model=~/x alone
        if values[name] != default:
            print(f"{name} = {values[name]!r}  (default {default!r})")
    namespace.update({name: values[name] for name in own})
    return {name: value for name, value in values.items() if name not in own}


def print_help(doc, scripts):
    """Print a docstring and the settings of scripts as their source has them, then exit."""
    lines = [doc.strip()]
    for path in scripts:
        nodes = [node for _, node in settings(path).values()]
        source = path.read_text(encoding="utf-8").splitlines()
        lines += ["", *source[nodes[0].lineno - 1 : nodes[-1].end_lineno]]
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # `| head` has read enough; Python flushes once more at its end, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def parse_arguments(argv):
    """Yield (where it stands, name, value) of recipe files, --name=value and --name value."""
    args = iter(argv)
    for arg in args:
        if not arg.startswith("--"):
            for name, (value, node) in assignments(arg, strict=True).items():
                yield f"{arg}, line {node.lineno}", name, value
            continue
        name, equals, text = arg[2:].partition("=")
        if not equals:
            text = next(args, "--")  # the end has no value either
            if text.startswith("--"):
                sys.exit(f"--{name} has no value: write --{name}=VALUE")
        yield COMMAND_LINE, name, text


def convert(where, name, value, default):
    """A value as the type of its default; exits where it is of another one, or not finite."""
    wanted = type(default)
    if where == COMMAND_LINE and wanted is not str:  # strings are taken as they were typed
        with contextlib.suppress(*NOT_LITERAL):
            value = ast.literal_eval(value.strip())
    if wanted is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
        must = f"should be of type {wanted.__name__}, like {default!r}"
        sys.exit(f"{where}: {name}={value!r:.60} {must}")
    return value


def require(namespace, limits):
    """Exit with one line unless each setting is one of its choices (strings) or within its limits.

    limits: {name: (choice, ...)} or {name: (lowest, highest)}."""
    for name, allowed in limits.items():
        value = namespace[name]
        if isinstance(allowed[0], str):
            fits = value in allowed
            must = " or ".join(allowed)
        else:
            low, high = allowed
            fits = low <= value <= high
            must = f"between {low} and {high}"
        if not fits:
            sys.exit(f"{name}={value} cannot work: it must be {must}")
