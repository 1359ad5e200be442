"""A script's lower-case globals are its settings. Recipes and flags change them, in order.

A recipe is a Python file that is run with the settings as its names, as in nanoGPT. One recipe
serves all scripts: each takes the settings it has. A name with _ in front is the recipe's own.
"""

import ast
import contextlib
import difflib
import functools
import os
import signal
import sys
from pathlib import Path

typed = set()  # the settings that the last command line named, recipes apart
recipes = []  # the recipes that the last command line named


@functools.cache
def read_ranks():
    """(rank, rank on this machine, number of ranks), from the variables that torchrun sets."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if size in ("", "1"):
        if rank not in ("", "0"):  # left over from a batch system
            print(f"WARNING: RANK={rank} is ignored: there are no other ranks")
        return 0, 0, 1
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            sys.exit(f"WORLD_SIZE is set, but {name} is not: unset WORLD_SIZE, or use torchrun")
    return int(rank), int(os.environ.get("LOCAL_RANK") or 0), int(size)


def configure(namespace, argv=None, also=None):
    """Set the settings in a script's globals(); one that is imported keeps its defaults. Returns
    {name: default}. also: another script, whose settings can be set too. A later call, in a
    notebook, begins from the defaults and from what was assigned by hand."""
    # let stdout and stderr, be they closed or a notebook's, take any character, line by line
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        with contextlib.suppress(AttributeError):
            getattr(sys, name).reconfigure(line_buffering=True, errors="replace")
    if namespace["__name__"] == "__main__" and read_ranks()[0]:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  of torchrun's processes only one prints
    own = find_settings(namespace)
    if argv is None and namespace["__name__"] != "__main__":
        return own
    argv = sys.argv[1:] if argv is None else argv
    script = Path(namespace["__file__"])
    if "--help" in argv or "-h" in argv:
        blocks = [config_block(path) for path in ([script, also.__file__] if also else [script])]
        if hasattr(signal, "SIGPIPE"):  # --help | head
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print((namespace["__doc__"] or "").strip(), *blocks, sep="\n\n")  # python -OO drops the doc
        sys.exit()
    places = dict.fromkeys(find_settings(vars(also)), vars(also)) if also else {}
    places |= dict.fromkeys(own, namespace)  # {setting: the globals that have it}
    values = {name: own_value(place, name) for name, place in places.items()}
    defaults = {k: place.get("SETTINGS", values).get(k, values[k]) for k, place in places.items()}
    typed.clear()
    recipes.clear()
    for arg in argv:
        if arg.startswith("-"):
            name, equals, text = arg.lstrip("-").partition("=")
            if not equals:
                sys.exit(f"{arg}: write a setting as --name=value")
            typed.add(name)
            where, elsewhere = "command line", {}
            given = {name: text}
        else:
            recipes.append(arg)
            where, elsewhere = arg, settings_of_all_scripts(script.parent)
            after = run_recipe(arg, elsewhere | values, script.parent)
            given = find_settings(after) | {name: after[name] for name in values}  # of any type
        for name, value in given.items():
            if name in values:
                if value is not values[name]:  # a recipe leaves most as they are
                    values[name] = convert(where, name, value, defaults[name])
            elif name not in elsewhere:
                near = difflib.get_close_matches(name, elsewhere | values, 1)
                guess = f"did you mean {near[0]}?" if near else "--help lists them"
                sys.exit(f"{where}: there is no setting {name}; {guess}")

    for name, place in places.items():
        if values[name] != defaults[name]:
            print(f"{name} = {values[name]!r}  (default {defaults[name]!r})")
        assign(place, {name: values[name]})
    return {name: defaults[name] for name in own}


def assign(namespace, values):
    """Set settings in a script's globals(), until a later configure() takes them back."""
    for name, value in values.items():
        namespace.setdefault("_given", {})[name] = own_value(namespace, name), value
        namespace[name] = value


def adopt(namespace, values, path):
    """Set settings as what is at path has them; exits if a flag says otherwise."""
    other = {name: value for name, value in values.items() if value != namespace[name]}
    if flags := [f"--{name}={value}" for name, value in other.items() if name in typed]:
        sys.exit(f"{path} has other values: type {' '.join(flags)}, or leave these out")
    for name, value in other.items():
        print(f"{name} = {value!r}, as {path} has it")
    assign(namespace, other)


def own_value(namespace, name):
    """A setting as the script or its user's hand has it, whatever assign() has given it since."""
    value = namespace[name]
    before, given = namespace.get("_given", {}).get(name, (value, value))
    return before if value == given else value


def check(namespace, allowed):
    """Exit at the first setting that is not allowed. allowed: {names: (least, most) or choices}."""
    for names, values in allowed.items():
        for name in filter(namespace.__contains__, names.split()):  # a fork may have dropped one
            value = namespace[name]
            if isinstance(value, str):
                holds, wanted = value in values, " or ".join(values)
            else:
                least, most = values
                holds = least <= value <= most
                wanted = f"{least} or more" if most == float("inf") else f"{least} to {most}"
            if not holds:
                sys.exit(f"{name}={value} cannot work: type {wanted}")


def find_settings(namespace):
    """{name: value} of the lower-case globals that are numbers, strings or True and False."""
    names = [name for name in namespace if name.islower() and name[0] != "_"]
    return {k: namespace[k] for k in names if isinstance(namespace[k], int | float | str)}


def run_recipe(path, names, folder):
    """Run a recipe of here or of folder on names, and return them; it may include() another one."""
    place = Path(path) if Path(path).exists() else folder / path
    if not place.exists() or place.suffix != ".py":
        sys.exit(f"there is no recipe {path}: a setting is --name=value; --help lists them")
    outer = names.get("include")
    names["include"] = lambda other: run_recipe(place.parent / other, names, folder)
    try:
        exec(compile(place.read_bytes(), place, "exec"), names)  # Python knows its encoding
    except Exception as e:  # it is the user's Python: a typo, a missing name
        sys.exit(f"{place}: {type(e).__name__}: {e}")
    names["include"] = outer
    return names


def settings_of_all_scripts(folder):
    """{name: default} of the settings of the scripts in a folder, by their blocks of settings."""
    found = {}
    for path in folder.glob("*.py"):
        if "configure(globals()" in path.read_text("utf-8", "replace"):
            with contextlib.suppress(Exception):  # an edit that needs what is imported above
                exec(config_block(path), found)
    return find_settings(found)


def convert(where, name, value, default):
    """The value, of a flag its text, as the type of its default; exits if it is of another one."""
    wanted = type(default)
    if wanted is not str and isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError):  # the last check says what is wanted
            value = ast.literal_eval(value)
    if {wanted, type(value)} == {int, float} and value % 1 == 0:
        value = wanted(value)  # lr = 1, batch_size = 0.5 * 4096
    if type(value) is not wanted:
        sys.exit(f"{where}: {name}={value!r} should be of type {wanted.__name__}, like {default!r}")
    return os.path.expanduser(value) if wanted is str else value  # a shell leaves --model=~/x


def config_block(path):
    """The lines of a script's source that set its settings, with their comments."""
    source = Path(path).read_text("utf-8-sig")
    return source.partition("# fmt: off\n")[2].partition("# fmt: on")[0].rstrip()
