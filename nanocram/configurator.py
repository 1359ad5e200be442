"""A script's lower-case globals are its settings; recipe files and flags set them, in order.

    python train.py config/tiny.py --budget_hours=0.1 --seed 2
    python train.py --help

A recipe is a file of `name = expression` lines: numbers, strings, arithmetic, names of settings. It
is evaluated by the few rules below and never run.
"""

import ast
import contextlib
import ctypes
import difflib
import math
import operator
import os
import sys
from pathlib import Path


def let_segments_grow():
    """Set PYTORCH_ALLOC_CONF against fragmentation: pieces too small for a batch of another shape.

    torch reads it when it is imported, and every script imports this file before. A user's own
    setting stands, by its name of today, which torch heeds from 2.11 on, or the older one. Nothing
    is set without NVML of driver 550 or later: torch 2.13 would crash at its first allocation."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if any(name in os.environ for name in names):
        return
    with contextlib.suppress(OSError, AttributeError):
        # It raises where NVML or the function is missing.
        ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetGpuFabricInfoV  # noqa: B018
        os.environ[names[0]] = "expandable_segments:True"


let_segments_grow()

COMMAND_LINE = "command line"
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LARGEST = 2**63  # of whole numbers
UNUSABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, MemoryError, RecursionError)


def configure(namespace, argv=None, also=None):
    """Set the settings in a script's globals() by recipes and flags.

    Returns {name: value} as the file itself has them. A script takes its command line; one that is
    imported stays as it is. also: another script, a module with SETTINGS that argv may set too."""
    own = settings(namespace)
    if argv is None:
        argv = sys.argv[1:] if namespace["__name__"] == "__main__" else []
    if "--help" in argv or "-h" in argv:
        print_help(namespace["__doc__"], [namespace, vars(also)] if also else [namespace])

    # A setting that both scripts have is the script's own.
    spaces = dict.fromkeys(also.SETTINGS, vars(also)) if also else {}
    spaces |= dict.fromkeys(own, namespace)
    defaults = {name: space[name] for name, space in spaces.items()}
    values = dict(defaults)
    derived = derived_settings(spaces, defaults) if argv else {}
    for arg in joined(argv):
        if arg.startswith("--"):
            name, _, text = arg[2:].partition("=")
            if name not in values:
                refuse(COMMAND_LINE, name, defaults, namespace["__file__"])
            value = parse(text, values, defaults[name])
            values[name] = convert(COMMAND_LINE, name, value, defaults)
            given = {name}
        else:
            given = read_recipe(arg, values, defaults, Path(namespace["__file__"]))
        # n_inner = 2 * n_embd in a script follows n_embd, unless it is given itself.
        derived = {name: node for name, node in derived.items() if name not in given}
        for name, node in derived.items():
            try:
                value = evaluate(node, values)
            except UNUSABLE as e:
                sys.exit(f"{name} cannot be computed: {e}")
            values[name] = convert(ast.unparse(node), name, value, defaults)

    for name, default in defaults.items():
        if isinstance(default, str):
            values[name] = os.path.expanduser(values[name])  # a shell leaves --model=~/x alone
        if values[name] != default:
            print(f"{name} = {values[name]!r}  (default {default!r})")
        spaces[name][name] = values[name]
    return own


def derived_settings(spaces, defaults):
    """{name: expression} of the settings that scripts compute from others, in their order.

    spaces: {setting: globals of its script}; defaults: {setting: value}. Left out are expressions
    that a recipe may not hold, and those that do not give the setting's value."""
    found = {}
    for file in dict.fromkeys(space["__file__"] for space in spaces.values()):
        for name, node in assignments(file):
            if name in spaces and spaces[name]["__file__"] == file and not is_literal(node.value):
                with contextlib.suppress(NameError, *UNUSABLE):
                    if evaluate(node.value, defaults) == defaults[name]:
                        found[name] = node.value
    return found


def check_assigned(namespace, defaults):
    """Exit at what a notebook has misspelt or given another type: train.nlayer = 2.

    defaults: {name: value} of the script's settings."""
    for name in settings(namespace).keys() - defaults.keys():
        if difflib.get_close_matches(name, defaults, 1, cutoff=0.85):
            refuse("assigned", name, defaults, namespace["__file__"])
    for name in defaults:
        namespace[name] = convert("assigned", name, namespace[name], defaults)


def settings(namespace):
    """{name: value} of the lower-case globals that are numbers, strings or True and False."""
    found = {}
    for name, value in namespace.items():
        if name.islower() and name[0] != "_" and isinstance(value, int | float | str):
            found[name] = value
    return found


def joined(argv):
    """argv with each `--name value` as `--name=value`."""
    rest = iter(argv)
    for arg in rest:
        if arg.startswith("--") and "=" not in arg:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                sys.exit(f"{arg} has no value: write {arg}=VALUE")
            arg = f"{arg}={value}"
        yield arg


def read_recipe(path, values, defaults, script):
    """Take a recipe's lines into values, {name: value} of the settings as they are so far.

    Returns the names that it sets. One recipe serves all scripts: settings of another script in the
    folder are skipped."""
    try:
        nodes = parse_file(path)
    except FileNotFoundError:
        words = "a setting is --name=value, a recipe a file; --help lists the settings"
        sys.exit(f"there is no recipe {path}: {words}")
    except (OSError, *UNUSABLE) as e:
        sys.exit(f"cannot read the recipe {path}: {e}")
    known = dict(values)  # what an expression may name: also what passes here
    given = set()
    elsewhere = None
    for node in nodes:
        where = f"{path}, line {node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        targets = node.targets if isinstance(node, ast.Assign) else []
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            sys.exit(f"{where}: a recipe holds only `name = expression` lines")
        name = targets[0].id
        is_ours = name in defaults
        if not is_ours and elsewhere is None:
            elsewhere = names_of_others(script)
        if not is_ours and name not in elsewhere:
            refuse(where, name, defaults, script)
        try:
            value = evaluate(node.value, known)
        except NameError as e:
            if not is_ours and e.name in elsewhere:
                continue  # a value that only the other script knows
            sys.exit(f"{where}: {e}")
        except UNUSABLE as e:
            sys.exit(f"{where}: {name} cannot be computed: {e}")
        known[name] = value
        if is_ours:
            values[name] = known[name] = convert(where, name, value, defaults)
            given.add(name)
    return given


def parse_file(path):
    """The statements of a Python file, as nodes of its syntax tree; raises OSError or UNUSABLE."""
    return ast.parse(Path(path).read_text(encoding="utf-8")).body


def names_of_others(script):
    """The lower-case names that the scripts in a script's folder assign to, by their sources."""
    found = set()
    for path in script.parent.glob("*.py"):
        with contextlib.suppress(OSError, *UNUSABLE):  # somebody's unfinished file
            if "configure(" in path.read_text(encoding="utf-8"):  # a recipe may lie there too
                found |= {name for name, _ in assignments(path)}
    return found


def assignments(path):
    """[(name, node)] of a file's own `name = …` and `name: type = …` lines, lower-case ones."""
    found = []
    for node in parse_file(path):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        found += [(t.id, node) for t in targets if isinstance(t, ast.Name) and t.id.islower()]
    return found


def evaluate(node, known):
    """The value of an expression's syntax tree; known: {name: value}.

    Raises NameError for another name, ValueError for what is no number, string or arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        result = node.value
    elif isinstance(node, ast.Name):
        if node.id not in known:
            raise NameError(f"there is no setting {node.id}", name=node.id)
        result = known[node.id]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in ARITHMETIC:
        result = ARITHMETIC[type(node.op)](evaluate(node.operand, known))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = evaluate(node.left, known), evaluate(node.right, known)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("an exponent above 64")  # 9**9**9 would compute for hours
        is_text = isinstance(left, str) or isinstance(right, str)
        if is_text and not isinstance(node.op, ast.Add):
            raise ValueError("strings can only be added")
        result = ARITHMETIC[type(node.op)](left, right)
    else:
        raise ValueError(f"`{ast.unparse(node):.40}` is no number, string, arithmetic or setting")
    if isinstance(result, int) and abs(result) > LARGEST:
        raise ValueError("it is too large")
    return result


def parse(text, values, default):
    """What was typed for a setting: strings as they are, all else as a recipe would have it."""
    if isinstance(default, str):
        return text
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body, values)
    except (NameError, *UNUSABLE):
        return text  # convert() says of which type it should be


def convert(where, name, value, defaults):
    """A value as the type of its default; exits where it is of another one, or not finite."""
    default = defaults[name]
    wanted = next(kind for kind in (bool, int, float, str) if isinstance(default, kind))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) < LARGEST:
        if wanted is float:
            value = float(value)
        elif wanted is int and value == int(value):
            value = int(value)  # batch_size = 0.5 * 4096
    if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
        must = f"should be of type {wanted.__name__}, like {default!r}"
        if wanted is int and type(value) is float:
            must += f" (write {default}.0 in the script, and fractions are taken)"
        sys.exit(f"{where}: {name}={value!r:.60} {must}")
    return value


def refuse(where, name, defaults, script):
    """Exit with the line that a name which is no setting gets."""
    script = Path(script).name
    near = difflib.get_close_matches(name, defaults, 1)
    guess = near[0] if near else f"one of those that python {script} --help lists"
    sys.exit(f"{where}: {script} has no setting {name}; did you mean {guess}?")


def print_help(doc, namespaces):
    """Print a docstring and the settings of scripts as their sources have them, then exit.

    The value of a setting is added where it is computed, or has no line of its own."""
    lines = [doc.strip()]
    for namespace in namespaces:
        path = Path(namespace["__file__"])
        names = namespace.get("SETTINGS", settings(namespace))
        source = path.read_text(encoding="utf-8").splitlines()
        found = {name: node for name, node in assignments(path) if name in names}
        for name, node in found.items():
            if not is_literal(node.value):
                source[node.end_lineno - 1] += f"  # = {namespace[name]!r}"
        begin = min((node.lineno for node in found.values()), default=1)
        end = max((node.end_lineno for node in found.values()), default=0)
        lines += ["", *source[begin - 1 : end]]
        lines += [f"{name} = {namespace[name]!r}" for name in names if name not in found]
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # `| head` has read enough; Python flushes once more at its end, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def is_literal(node):
    """Whether an expression says its value itself."""
    try:
        ast.literal_eval(node)
    except UNUSABLE:
        return False
    return True


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
