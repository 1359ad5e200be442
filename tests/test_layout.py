"""What the model and pre-training load. That no file imports a script, ruff.toml says."""

import subprocess
import sys

from conftest import ROOT

HEAVY = {"datasets", "transformers", "matplotlib", "sklearn", "scipy", "tokenizers", "wandb"}


def test_the_model_loads_nothing_of_ours_and_pre_training_nothing_heavy():
    code = "import sys, model; print(*sys.modules); import train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    of_model, of_train = (set(line.split()) for line in done.stdout.splitlines())
    assert "nanocram" not in of_model
    assert "nanocram.data" in of_train and not of_train & {"nanocram.glue", *HEAVY}
