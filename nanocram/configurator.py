"""A script's module-level globals are its settings; recipe files and flags set them, with literals only, in order.

python train.py config/tiny.py --budget_hours=0.1 --seed 2      (python train.py --help shows all settings)
"""

import ast
import contextlib
import difflib
import math
import os
import sys
import textwrap
from pathlib import Path

SCRIPTS = ("prepare.py", "train.py", "finetune_glue.py", "bench.py", "race.py")
NOT_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


def assignments(path, strict=False):
    """{name: (value, line)} of the `name = literal` lines of a Python file, never run; strict allows no others."""
    try:
        nodes = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, *NOT_LITERAL) as e:
        sys.exit(f"cannot read the recipe {path}: {e}")
    found = {}
    for node in nodes:
        try:
            (target,) = node.targets
            found[target.id] = (ast.literal_eval(node.value), node.lineno)
        except (AttributeError, *NOT_LITERAL):
            if strict and not (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):  # a docstring
                sys.exit(f"{path}, line {node.lineno}: a recipe holds only `name = literal` lines")
    return found


def settings(script):
    """The settings of a script, {name: (default, line)}: its lower-case globals that are literals."""
    return {
        k: v
        for k, v in assignments(script).items()
        if k.islower() and isinstance(v[0], bool | int | float | str)
    }


def fold(line):
    """A line in at most 100 columns; what does not fit goes below where its comment, if it has one, begins."""
    at = line.find("  # ") + 2
    indent = " " * at + "# " if at > 1 else " " * (4 if " = " in line else 0)
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def configure(namespace, argv=None, also=""):
    """Set the settings in a script's globals() from argv: recipe files, --name=value, --name value, --help.

    Takes those of the script `also`, which lies beside it, as well; returns their values, {name: value}."""
    script, others = Path(namespace["__file__"]), {}
    blocks = {script: settings(script)} | (
        {script.with_name(also): settings(script.with_name(also))} if also else {}
    )
    block = {name: entry for part in reversed(blocks.values()) for name, entry in part.items()}
    known = {
        name
        for s in SCRIPTS
        if script.with_name(s).exists()
        for name in settings(script.with_name(s))
    } | {*block}
    args, asked = list(sys.argv[1:] if argv is None else argv), []  # asked: (where, name, value)
    if "--help" in args:
        for part in namespace["__doc__"].strip().split("\n\n"):
            lines = part.splitlines()
            print(
                *map(
                    fold,
                    lines if any(line.startswith(" ") for line in lines) else [" ".join(lines)],
                ),
                "",
                sep="\n",
            )
        for path, part in blocks.items():
            lines, at = (
                path.read_text(encoding="utf-8").splitlines(),
                [line for _, line in part.values()],
            )
            print(*map(fold, lines[min(at) - 1 : max(at)]), "", sep="\n")
        sys.exit(0)
    while args:
        name, equals, text = args.pop(0).partition("=")
        if not name.startswith("--"):
            asked += [
                (f"{name}, line {n}", k, v)
                for k, (v, n) in assignments(name + equals + text, True).items()
            ]
            continue
        if not equals and (not args or args[0].startswith("--")):
            sys.exit(f"{name} has no value: write {name}=VALUE")
        value = text if equals else args.pop(0)
        if not isinstance(
            block.get(name[2:], ("",))[0], str
        ):  # strings are taken as they were typed
            with contextlib.suppress(*NOT_LITERAL):
                value = ast.literal_eval(value.strip())
        asked.append(("command line", name[2:], value))
    for where, name, value in asked:
        if name in block:
            default = block[name][0]
            if type(default) is float and type(value) is int and abs(value) < 2**53:
                value = float(value)
            if type(value) is not type(default) or (
                type(value) is float and not math.isfinite(value)
            ):
                sys.exit(
                    f"{where}: {name}={value!r:.60} should be of type {type(default).__name__}, like {default!r}"
                )
            (namespace if name in blocks[script] else others)[name] = value
        elif name not in known or where == "command line":
            near = difflib.get_close_matches(name, block, 1) or [
                f"one of those that python {script.name} --help lists"
            ]
            sys.exit(f"{where}: {script.name} has no setting {name}; did you mean {near[0]}?")
    others = {
        name: others.get(name, default)
        for name, (default, _) in block.items()
        if name not in blocks[script]
    }
    for values in (namespace, others):  # a shell leaves --model=~/x alone
        values |= {
            k: os.path.expanduser(values[k]) for k in block if isinstance(values.get(k), str)
        }
    for name, (default, _) in block.items():
        if (value := others[name] if name in others else namespace[name]) != default:
            print(f"{name} = {value!r}  (default {default!r})")
    return others


def require(namespace, limits):
    """Exit with one line unless each setting is one of its choices (strings) or between its two limits (numbers)."""
    for name, allowed in limits.items():
        value, words = namespace[name], isinstance(allowed[0], str)
        if not (value in allowed if words else allowed[0] <= value <= allowed[1]):
            must = " or ".join(allowed) if words else f"between {allowed[0]} and {allowed[1]}"
            sys.exit(f"{name}={value} cannot work: it must be {must}")
