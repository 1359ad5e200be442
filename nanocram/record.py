"""What runs leave behind: a folder with run.json, log.csv and loss.png, and from fine-tuning glue.json and glue.md.

python -c "from nanocram import record; print(record.read_log('out/tiny')[-1])"       # the last logged step
python -c "from nanocram import record; record.plot('out/tiny')"                      # draw out/tiny/loss.png anew
"""

import contextlib
import csv
import gc
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from nanocram.safety import write_beside

COLUMNS = (
    "elapsed_s",
    "step",
    "tokens",
    "flops",
    "loss",
    "val_loss_15",
    "val_loss_25",
    "val_nats_per_char",
    "lr",
    "batch_size",
    "mask_rate",
    "grad_norm",
    "skipped",
)


def begin(run, data_dir, settings, facts, resumed):
    """Make the folder of a train.Run ready: run.json, the tokenizer, and log.csv up to where it is resumed."""
    wandb = find_wandb() if settings.get("wandb_project") else None
    if resumed:
        before = read_settings(run.folder)
        for key, value in settings.items():
            if key != "init" and before.get(key, value) != value:
                print(f"{key} was {before[key]!r} until now, and is {value!r} from now on")
        try:
            seconds = (
                max([row["elapsed_s"] for row in read_log(run.folder)], default=0.0) - run.before
            )
        except ValueError as e:
            sys.exit(f"{e}: mend it or move it away, then resume")
        lost = (
            f"; {seconds:.0f} s that were logged after its checkpoint are lost"
            if seconds >= 1
            else ""
        )
        print(
            f"resumed at step {run.state['step']:,}, {run.before / 3600:.2f} hours into the run{lost}"
        )
        drop_rows_after(run.folder, run.state["step"])
    else:
        open_out(run.folder)
    text = json.dumps({"settings": settings, **facts}, indent=2)
    write_beside(run.folder / "run.json", lambda path: path.write_text(text))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_beside(
            run.folder / name, lambda path, name=name: shutil.copyfile(Path(data_dir) / name, path)
        )
    if wandb:
        run.wandb = wandb.init(
            project=settings["wandb_project"], name=run.folder.name, config=settings
        )


def find_wandb():
    try:
        import wandb
    except ImportError:
        sys.exit(
            "wandb_project is set, but wandb is not there: pip install wandb, or type --wandb_project="
        )
    return wandb


def read_settings(folder):
    """The settings in run.json; {} where there is none, or none that can be read."""
    try:
        return dict(json.loads((Path(folder) / "run.json").read_text())["settings"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def log(run, row):
    """Add a row to log.csv, in place of one of the same step, and to wandb; what fails is said and changes nothing."""
    try:
        if run.state["logged"] == row["step"]:  # the clock ended the run right after a row
            drop_rows_after(run.folder, row["step"] - 1)
        append_row(run.folder, row)
    except (OSError, ValueError) as e:
        print(f"WARNING: cannot write to {run.folder}/log.csv, going on without: {e!r:.120}")
    if run.wandb:
        try:
            run.wandb.log(row, step=row["step"])
        except Exception as e:  # a service that is down, or whatever it raises
            print(f"WARNING: wandb is left out from now on: {e!r:.120}")
            run.wandb = None


def open_out(folder):
    """Make a folder for a new run: an earlier run in it is moved aside, and a folder of anything else refused."""
    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or any(p.name != "run.json.tmp" for p in folder.iterdir())
    ):
        if not (folder / "run.json").exists():
            sys.exit(f"{folder} exists and holds no run of train.py: choose another --out_dir")
        aside = next(
            p for n in range(1, 10**6) if not (p := folder.with_name(f"{folder.name}.{n}")).exists()
        )
        folder.rename(aside)
        print(
            f"{folder} held a run already: moved it to {aside} (--init=resume would have continued it)"
        )
    folder.mkdir(parents=True, exist_ok=True)


def write_rows(path, rows, mode):
    """Write dicts with keys of COLUMNS as lines of a log.csv; what a row has no value for stays empty."""
    with open(path, mode, newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS)
        if f.tell() == 0:
            writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def append_row(folder, row):
    """Append one row to log.csv, or raise OSError and leave it as it was."""
    path = Path(folder) / "log.csv"
    size = path.stat().st_size if path.exists() else 0
    try:
        write_rows(path, [row], "a")
    except OSError:
        os.truncate(path, size)
        raise


def read_log(folder):
    """The rows of log.csv, [{column: number}], empty fields left out; lines that are broken or cut off are ignored.

    Raises ValueError where there are no columns of ours."""
    path = Path(folder) / "log.csv"
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    whole, needed, rows = (
        ("step", "tokens", "batch_size", "skipped"),
        {"elapsed_s", "step", "tokens"},
        [],
    )
    if lines and not needed <= set(lines[0].split(",")):
        raise ValueError(f"{path} has lost its first line, the names of its columns")
    for row in csv.DictReader(lines, quoting=csv.QUOTE_NONE):
        with contextlib.suppress(ValueError, TypeError):
            row = {k: int(v) if k in whole else float(v) for k, v in row.items() if v}
            rows += [row] if needed <= row.keys() else []
    return rows


def drop_rows_after(folder, step):
    """Remove what log.csv says of the steps after `step`: a resumed run does them again."""
    rows = [row for row in read_log(folder) if row["step"] <= step]
    write_beside(Path(folder) / "log.csv", lambda path: write_rows(path, rows, "w"))


def plot(folder):
    """Draw loss.png from log.csv: losses above, learning rate and batch below, against wall clock and tokens."""
    rows = read_log(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rows = []  # train.py says so, once
    if not rows:
        return
    unit, per = ("hours", 3600) if rows[-1]["elapsed_s"] > 7200 else ("minutes", 60)
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    def line(axes, key, **style):
        points = [(row["elapsed_s"] / per, row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), **style)

    line(top, "loss", color="0.75", lw=1, label="training, at the run's masking rate")
    line(top, "val_loss_25", color="tab:orange", marker="o", ms=3, label="held out, 25 % masked")
    line(top, "val_loss_15", color="tab:blue", marker="o", ms=3, label="held out, 15 % masked")
    top.set_ylabel("loss (nats per predicted token)")
    if top.lines:
        top.legend(frameon=False)
    top.grid(alpha=0.25)
    times, tokens = [r["elapsed_s"] / per for r in rows], [r["tokens"] / 1e6 for r in rows]
    top.set_xlim(0, max(1e-6, times[-1]))
    if tokens[-1] > 0:
        times, tokens = (
            [*times, 2 * times[-1]],
            [*tokens, 2 * tokens[-1]],
        )  # or the last ticks would pile up at the end
        above = top.secondary_xaxis(
            "top",
            functions=(
                lambda x: np.interp(x, times, tokens),
                lambda x: np.interp(x, tokens, times),
            ),
        )
        above.set_xlabel("million tokens")
    line(bottom, "lr", color="tab:green")
    bottom.set_ylabel("learning rate", color="tab:green")
    bottom.set_xlabel(f"wall clock ({unit})")
    bottom.set_ylim(bottom=0)
    right = bottom.twinx()
    line(right, "batch_size", color="tab:purple")
    right.set_ylabel("rows per step", color="tab:purple")
    right.set_ylim(bottom=0)
    write_beside(Path(folder) / "loss.png", lambda path: figure.savefig(path, format="png"))
    gc.collect()  # a figure is one large cycle: those of a long run made a process 50 MB larger


def overlay(runs, key, path):
    """Draw the column key of {name: [rows of a log.csv, …]} by time, tokens and floating-point operations."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    except ImportError:
        print(f"no {path.name}: pip install matplotlib draws one")
        return
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained", facecolor="white")
    measures = {"elapsed_s": "seconds", "tokens": "tokens", "flops": "floating-point operations"}
    for axes, (x, label) in zip(figure.subplots(1, 3, sharey=True), measures.items(), strict=True):
        for i, (name, logs) in enumerate(runs.items()):
            for j, rows in enumerate(logs):
                points = [(row[x], row[key]) for row in rows if key in row and row["tokens"]]
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{i}",
                    lw=1.2,
                    alpha=0.85,
                    label=None if j else name,
                )
        axes.set(xscale="log", xlabel=label)
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1, 3))
        )  # 1, 3, 10, …: the labels of more would overlap
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("held-out loss at 15 % masked (nats)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_beside(path, lambda path: figure.savefig(path, format="png"))


# The first lines of a card of ours; one that begins otherwise is somebody's own.
CARD_BEGIN = """---
# written anew with every save: take this line out, and your edits stay
"""
CARD = (
    CARD_BEGIN
    + """{front}
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
)

NATIVE = """```python
from transformers import pipeline
print(pipeline("fill-mask", model="{folder}")("the capital of france is [MASK]."))
```"""
OURS = """It is no architecture of `transformers`: read it with `model_folder.load("{folder}")` of nanocram."""


def card(folder, glue_table=()):
    """The card of a run's folder; raises OSError, ValueError or LookupError where something of it is not there."""
    folder = Path(folder)
    run, rows = json.loads((folder / "run.json").read_text()), read_log(folder)
    config, settings, corpus = (
        json.loads((folder / "config.json").read_text()),
        run["settings"],
        run["corpus"],
    )
    last, now = next(row for row in reversed(rows) if "val_loss_15" in row), rows[-1]
    recipe = (
        "n_layer",
        "n_head",
        "n_embd",
        "n_inner",
        "activation",
        "position",
        "optimizer",
        "schedule",
        "batch_size",
    )
    table = ["", "## GLUE, dev sets", "", *glue_table, ""] if glue_table else []
    native = config["model_type"] == "modernbert"
    front = (
        ["library_name: transformers", "pipeline_tag: fill-mask"]
        if native
        else ["library_name: nanocram"]
    )
    budget = (
        f"{settings['max_steps']:,} steps"
        if settings["max_steps"]
        else f"{settings['budget_hours']:g} hours"
    )
    return CARD.format(
        name=folder.resolve().name,
        use=(NATIVE if native else OURS).format(folder=folder.name),
        front="\n".join(front),
        parameters=run["parameters"],
        hours=now["elapsed_s"] / 3600,
        at=last["step"],
        source=corpus["source"],
        documents=corpus["kept"],
        normalisation=corpus["normalisation"],
        tokens=now["tokens"],
        seq_len=settings["seq_len"],
        steps=now["step"],
        epochs=now["tokens"] / settings["seq_len"] / corpus["rows"],
        loss_15=last["val_loss_15"],
        loss_25=last["val_loss_25"],
        per_char=last["val_nats_per_char"],
        flops=now["flops"],
        amp_dtype=run["amp_dtype"],
        device=run["device"],
        torch=run["torch"],
        commit=run["commit"],
        date=run.get("date", "unknown"),
        budget=budget,
        processes=run["processes"],
        threads=run["threads"],
        recipe=", ".join(f"{k}={settings[k]}" for k in recipe),
        glue="\n".join(table),
    )


def write_card(folder, glue_table=()):
    """Write README.md into folder, unless one is there that does not begin as ours, or a part of the run is missing.

    glue_table: lines of markdown."""
    path = Path(folder) / "README.md"
    with contextlib.suppress(OSError, ValueError, LookupError):  # a card is no reason to lose a run
        text = card(folder, glue_table)
        if not path.exists() or path.read_text(encoding="utf-8").startswith(CARD_BEGIN):
            write_beside(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
