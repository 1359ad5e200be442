"""The house of the project: what lies where, who imports whom, how long it is."""

import ast

from conftest import ROOT

SCRIPTS = ("bench", "finetune_glue", "prepare", "race", "train")
# The arrows inside nanocram/, and to model.py.
PARTS = {
    "checkpoint": {"model_folder", "safety"},
    "configurator": set(),
    "data": {"tokenizer"},
    "glue": {"safety"},
    "machine": set(),
    "model_folder": {"model", "safety"},
    "muon": set(),
    "offload": {"model"},
    "parallel": {"safety"},
    "record": {"safety"},
    "safety": set(),
    "sources": {"safety"},
    "tokenizer": set(),
}


def imports(path, top_level=False):
    """Names of the modules that a file imports; `from nanocram import x` is x."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body if top_level else ast.walk(tree):
        is_from = isinstance(node, ast.ImportFrom)
        if is_from and node.module != "nanocram":
            found.add(node.module)
        elif is_from or isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("nanocram.") for name in found}


def path_of(name):
    return ROOT / "nanocram" / f"{name}.py" if name in PARTS else ROOT / f"{name}.py"


def loaded(name, top_level=True):
    """All that importing a module of ours imports at once, ours and others'."""
    found, todo = set(), [name]
    while todo:
        for other in imports(path_of(todo.pop()), top_level) - found:
            found.add(other)
            if other in (*PARTS, *SCRIPTS, "model"):
                todo.append(other)
    return found


def test_at_the_top_level_stands_what_a_user_types():
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted([*SCRIPTS, "model"])
    assert sorted(p.stem for p in (ROOT / "nanocram").glob("*.py")) == sorted(PARTS)


def test_imports_follow_the_arrows():
    ours = {*PARTS, *SCRIPTS, "model"}
    for name, allowed in PARTS.items():
        assert imports(path_of(name)) & ours <= allowed, name
    assert not imports(ROOT / "model.py") & ours
    for name in SCRIPTS:
        others = imports(path_of(name)) & {*SCRIPTS}
        assert others == ({"train"} if name in ("bench", "race") else set()), name


def test_pre_training_loads_neither_glue_nor_what_is_heavy():
    assert "glue" not in loaded("train", top_level=False)
    heavy = ("datasets", "transformers", "matplotlib", "sklearn", "scipy", "tokenizers", "wandb")
    assert not {name.split(".")[0] for name in loaded("train")} & {*heavy}


def test_it_can_be_read_in_an_evening():
    """At most 5,100 lines that are not blank, none of them over 100 columns."""
    files = [path_of(name) for name in (*PARTS, *SCRIPTS, "model")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 5100
    for path in (*ROOT.glob("config/*.py"), *ROOT.glob("tests/*.py")):
        lines += path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 100
