"""finetune_glue.py as a process: GLUE and a model of others from a stand-in of the Hub."""

import os
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from hub import StandIn
from test_finetune_glue import QUICK, encoder, model_folder

from nanocram import glue

TASKS = ("rte", "mnli", "stsb")


def put_glue(folder, glue_dir):
    """The rows of official files as nyu-mll/glue has them: parquet, a config for each task."""
    page = ["---", "configs:"]
    for name in TASKS:
        task = glue.TASKS[name]
        page += [f"- config_name: {name}", "  data_files:"]
        (folder / name).mkdir(parents=True)
        for split in task.rows:
            texts, labels = glue.read(name, split, glue_dir)
            columns = list(zip(*texts, strict=True))
            table = dict(zip(task.hub_texts or task.texts, columns, strict=True))
            table = pyarrow.table(table | {"label": labels, "idx": range(len(labels))})
            there = split.replace("dev", "validation")
            pyarrow.parquet.write_table(table, folder / name / f"{there}-00000-of-00001.parquet")
            page += [f"  - split: {there}", f"    path: {name}/{there}-*"]
    (folder / "README.md").write_text("\n".join([*page, "---", ""]))


@pytest.mark.slow
def test_glue_and_a_model_from_the_hub_are_those_of_folders(tmp_path, data_dir, glue_files):
    """Equal weights and equal scores."""
    put_glue(tmp_path / "hub/datasets/nyu-mll/glue", glue_files[0])
    theirs = tmp_path / "hub/models/some/encoder"
    theirs.mkdir(parents=True)
    encoder("Bert", theirs, data_dir)
    stand_in = StandIn(tmp_path / "hub")
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": stand_in.address}

    def scores(folder, baseline, glue_dir):
        model_folder(folder, data_dir)
        values = QUICK | {"model": folder, "baseline": baseline, "glue_dir": glue_dir}
        values |= {"tasks": ",".join(TASKS), "seeds": 1, "hf_batch": 8}
        flags = [f"--{name}={value}" for name, value in values.items()]
        command = [sys.executable, ROOT / "finetune_glue.py", *flags]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment, timeout=300, **pipe)
        assert done.returncode == 0, done.stdout
        runs = glue.read_runs(folder).values()
        return [(run["task"], run["weights"], run["scores"]) for run in runs]

    try:
        streamed = scores(tmp_path / "model", "hf:some/encoder", "")
        asked = " ".join(stand_in.requests)
    finally:
        stand_in.stop()
    assert re.search("some/encoder.*model.safetensors", asked) and "nyu-mll/glue" in asked
    local = scores(tmp_path / "other", f"hf:{theirs}", glue_files[0])
    assert len(streamed) == len(TASKS) and streamed == local
