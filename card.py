"""The model card: README.md of a model folder, from what run.json, log.csv and glue.json say.

    python -c "import card; card.write('out/tiny')"

train.py writes it with every checkpoint and finetune_glue.py in the end; a card that was edited by hand is left alone.
"""

import contextlib
import json
from pathlib import Path

import glue
import record
from disk import write_beside

CARD = """---
{front}
license: other  # yours to choose
# language: en  # yours to say
tags: [masked-lm, cramming]
---

# {name}

A masked language model of {parameters:,} parameters, trained from scratch by nanocram in {hours:.2f} hours on one
machine, after [Cramming](https://arxiv.org/abs/2212.14034).

{use}

| | |
| --- | --- |
| text | `{source}`, {documents:,} documents, {normalisation} |
| seen in training | {tokens:,} tokens in rows of {seq_len}, {epochs:.2f} epochs, {steps:,} steps |
| held-out loss, step {at:,} | {loss_15:.3f} nats per token at 15 % masked, {loss_25:.3f} at 25 % |
| the same per character | {per_char:.3f} nats |
| arithmetic | {flops:.3g} floating-point operations, in {amp_dtype} |
| budget | {budget}; it took {hours:.2f} hours |
| machine | {device}, {processes} × {threads} threads, torch {torch} |
| begun or last resumed | {date}, commit {commit} |
| recipe | {recipe} |
{glue}
It knows what its text says, mistakes and prejudices included, and nothing else; it fills gaps and makes a start for
fine-tuning, and is no source of facts. All settings are in `run.json`, every logged step is in `log.csv`.
"""

NATIVE = """```python
from transformers import pipeline
print(pipeline("fill-mask", model="{folder}")("the capital of france is [MASK]."))
```"""
OURS = """It is no architecture of `transformers`: read it with `folder.load("{folder}")` of nanocram."""


def text(folder):
    """The card of a run's folder; raises OSError, ValueError or LookupError where something of it is not there."""
    folder = Path(folder)
    run, rows = json.loads((folder / "run.json").read_text()), record.read_log(folder)
    config, settings, corpus = json.loads((folder / "config.json").read_text()), run["settings"], run["corpus"]
    last, now = next(row for row in reversed(rows) if "val_loss_15" in row), rows[-1]
    recipe = ("n_layer", "n_head", "n_embd", "n_inner", "activation", "position", "optimizer", "schedule", "batch_size")
    systems = record.glue_systems(folder)
    table = ["", "## GLUE, dev sets", "", *glue.markdown(glue.summary(systems)[0]), ""] if systems else []
    native = config["model_type"] == "modernbert"
    front = ["library_name: transformers", "pipeline_tag: fill-mask"] if native else ["library_name: nanocram"]
    budget = f"{settings['max_steps']:,} steps" if settings["max_steps"] else f"{settings['budget_hours']:g} hours"
    return CARD.format(
        name=folder.resolve().name, use=(NATIVE if native else OURS).format(folder=folder.name),
        front="\n".join(front), parameters=run["parameters"], hours=now["elapsed_s"] / 3600, at=last["step"],
        source=corpus["source"], documents=corpus["kept"], normalisation=corpus["normalisation"],
        tokens=now["tokens"], seq_len=settings["seq_len"], steps=now["step"],
        epochs=now["tokens"] / settings["seq_len"] / corpus["rows"],
        loss_15=last["val_loss_15"], loss_25=last["val_loss_25"],
        per_char=last["val_nats_per_char"], flops=now["flops"], amp_dtype=run["amp_dtype"], device=run["device"],
        torch=run["torch"], commit=run["commit"], date=run.get("date", "unknown"), budget=budget,
        processes=run["processes"], threads=run["threads"], recipe=", ".join(f"{k}={settings[k]}" for k in recipe),
        glue="\n".join(table),
    )  # fmt: skip


def sealed(body):
    """A card with a last line by which it is known again, as long as nobody edits it."""
    return f"{body}\n<!-- nanocram {glue.fingerprint(body)}: once edited, this card is left alone -->\n"


def write(folder):
    """Write README.md into folder, unless one is there that was edited, or something of the run is missing."""
    path = Path(folder) / "README.md"
    with contextlib.suppress(Exception, SystemExit):  # a card, or a broken glue.json, is no reason to lose a run
        new, old = sealed(text(folder)), path.read_text(encoding="utf-8") if path.exists() else ""
        if not old or old == sealed(old[: old.rfind("\n<!-- nanocram ")]):
            write_beside(path, lambda temporary: temporary.write_text(new, encoding="utf-8"))
