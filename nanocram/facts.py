"""The facts of a run, which run.json keeps: settings, sizes, data, machine, code."""

import json
from pathlib import Path

from nanocram import machine, parallel


def read_facts(folder):
    """The dict of a folder's run.json; {} if there is none."""
    path = Path(folder) / "run.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def is_by_other_code(folder):
    """Whether a folder's run was trained by other code than this."""
    return not read_facts(folder).get("code", "").startswith(machine.code_hash())


def trained_on(run):
    """What the weights of a train.Run have read, before it began too: a dict for config.json."""
    before = run.state.began_from
    return {
        "sources": [*before.get("sources", []), run.meta["settings"]["source"]],
        "tokens": before.get("tokens", 0) + run.state.rows_seen * run.rows.seq_len,
        "seq_len": max(before.get("seq_len", 0), run.state.longest_row),
    }


def measure_facts(run):
    """The facts of a train.Run that begins; matrices are multiplied for them."""
    corpus = {name: run.meta["settings"][name] for name in ("source", "normalisation")}
    return {
        "settings": run.settings,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "flops_per_token": run.flops_per_token,
        "matmul_flops": machine.matmul_rate(run.device, run.amp_dtype),
        "amp_dtype": str(run.amp_dtype),
        "processes": parallel.WORLD_SIZE,
        "data": run.meta["sha256"]["train.bin"],
        "held_out": run.meta["sha256"]["val.bin"],
        "began_from": run.state.began_from,
        "corpus": corpus | run.meta["counts"],
        **machine.describe(run.device),
    }


def note_changes(facts, before):
    """Print what a resume changes, and add to its facts the code that the run had before."""
    for name, was in before.get("settings", {}).items():
        now = facts["settings"].get(name)
        if name != "init" and now != was:
            print(f"{name} was {was!r} before the resume, and is {now!r} now")
    code = before.get("code", facts["code"])
    if not code.startswith(facts["code"]):
        print("the code was edited before the resume: see python -m pytest tests/test_edit.py")
        code = f"{facts['code']} after {code}"
    facts["code"] = code
