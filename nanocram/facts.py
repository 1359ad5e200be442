"""run.json, the facts of a run, and README.md, its model card, whose front matter the Hub reads."""

import json
from contextlib import suppress
from pathlib import Path

from nanocram import machine, parallel
from nanocram.runlog import read_log
from nanocram.safety import extra, write_text

BEGIN = "---\n# written anew with every save: take this line out, and your edits stay\n"


def read_facts(folder):
    """The dict of a folder's run.json; {} if there is none, or none of train.py."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError, LookupError):
        facts = json.loads(Path(folder, "run.json").read_bytes())
        return facts | {"settings": {**facts["settings"]}}
    return {}


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
    """Print, and note in facts, the settings that a resume changes and the code before it."""
    changed = facts["changed_at_resume"] = before.get("changed_at_resume", [])
    for name, was in before.get("settings", {}).items():
        now = facts["settings"].get(name)
        if name != "init" and now != was:
            print(f"{name} was {was!r} before the resume, and is {now!r} now")
            changed.append(name)
    code = before.get("code", facts["code"])
    if not code.startswith(facts["code"]):
        print("the code was edited before the resume: see python -m pytest tests/test_edit.py")
        code = f"{facts['code']} after {code}"
    facts["code"] = code


@extra("README.md")
def write_card(folder, glue_table=""):
    """Write README.md into a run's folder, unless it has one that somebody wrote."""
    folder = Path(folder).resolve()
    path, name = folder / "README.md", folder.name
    evaluations = [line for line in read_log(folder) if "val_loss_15" in line and line["step"]]
    is_ours = not path.exists() or path.read_text("utf-8").startswith(BEGIN)
    if not (evaluations and is_ours and (facts := read_facts(folder))):
        return
    last = evaluations[-1]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    trained = config["trained_on"]
    sources = " and ".join(f"`{source}`" for source in dict.fromkeys(trained["sources"]))
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    text = f"""{BEGIN}library_name: transformers
pipeline_tag: fill-mask
license: other  # yours to choose
tags: [masked-lm, cramming]
---

# {name}

A masked language model of {facts["parameters"]:,} parameters, pre-trained by nanocram: it has read
{trained["tokens"]:,} tokens of {sources} in rows of {trained["seq_len"]}.
Its last run had {last["step"]:,} steps on {facts["processes"]} × {facts["device"]}. Held-out loss:
{last["val_loss_15"]:.3f} nats per token with 15 % masked, {last["val_loss_25"]:.3f} with 25 %.

```python
from transformers import pipeline
fill = pipeline("fill-mask", model="{name}"{trust})  # the path of this folder, or YOU/NAME
```

{glue_table}
"""
    write_text(path, text.rstrip() + "\n")
