"""Three rules hold the structure; a new file needs no permission."""

import ast
import subprocess
import sys

from conftest import ROOT

HEAVY = {"datasets", "transformers", "matplotlib", "sklearn", "scipy", "tokenizers", "wandb"}
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}


def imports(path):
    """The packages that a file imports, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def test_the_model_imports_nothing_of_ours_and_no_part_a_script():
    assert not imports(ROOT / "model.py") & {*SCRIPTS, "nanocram"}
    for path in (ROOT / "nanocram").glob("*.py"):
        assert not imports(path) & (SCRIPTS - {"model"}), path


def test_pre_training_loads_neither_glue_nor_what_is_heavy():
    code = "import sys, train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "train" in loaded and "nanocram.glue" not in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
