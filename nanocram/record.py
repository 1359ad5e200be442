"""What a run leaves behind: run.json, log.csv, loss.png and a model card, README.md.

    python -c "from nanocram import record; print(record.read_log('out/tiny')[-1])"
    python -c "from nanocram import record; record.plot('out/tiny')"     # draw loss.png anew

Everything but the rows of log.csv is written beside its goal and renamed.
"""

import contextlib
import csv
import gc
import itertools
import json
import os
import sys
from pathlib import Path

from nanocram.safety import write_beside, write_text

COLUMNS = (
    "elapsed_s step tokens flops loss val_loss_15 val_loss_25 val_nats_per_char "
    "lr batch_size mask_rate grad_norm skipped muon_lr"
).split()
WHOLE = ("step", "tokens", "batch_size", "skipped")  # columns of whole numbers
NEEDED = {"elapsed_s", "step", "tokens"}  # columns without which a row says nothing


def read_facts(folder):
    """The dict of a folder's run.json; {} where there is none."""
    path = Path(folder) / "run.json"
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as e:
        sys.exit(f"{path} is broken ({e!r:.80}): mend it or move it away")


def new_folder(folder):
    """Make a folder for a new run; an earlier run in it is moved aside, anything else refused."""
    folder = Path(folder)
    if (folder / "run.json").exists():
        if not folder.name:
            sys.exit(f"{folder.absolute()} holds a run and you are in it: choose another --out_dir")
        aside = (folder.with_name(f"{folder.name}.{n}") for n in itertools.count(1))
        free = next(path for path in aside if not path.exists())
        folder.rename(free)
        print(f"{folder} held a run: moved it to {free} (--init=resume would have continued it)")
    # A kill in the first moment of a run leaves run.json.tmp.
    foreign = {path.name for path in folder.glob("*")} - {"run.json.tmp"}
    if foreign or folder.is_file():
        sys.exit(f"{folder} exists and holds no run of train.py: choose another --out_dir")
    folder.mkdir(parents=True, exist_ok=True)


def write_facts(folder, data_dir, settings, facts):
    """Write run.json, and beside it the tokenizer of the data."""
    write_text(folder / "run.json", json.dumps({"settings": settings, **facts}, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_text(folder / name, (Path(data_dir) / name).read_text("utf-8"))


def resume(folder, settings, step, elapsed):
    """Take a run's record back to its checkpoint, and say what is lost and which settings moved.

    Exits with one line if log.csv is there and cannot be read: it would be emptied."""
    before = read_facts(folder).get("settings", {})
    for name, value in settings.items():
        was = before.get(name, value)
        if name != "init" and was != value:
            print(f"{name} was {was!r} until now, and is {value!r} from now on")
    rows = read_log(folder)
    log = Path(folder) / "log.csv"
    n_lines = len(log.read_text("utf-8-sig").splitlines()) if log.exists() else 0
    if n_lines > 1 and not rows:
        sys.exit(f"{log} has no row under the names of its columns: mend it or move it away")
    logged = max([row["elapsed_s"] for row in rows], default=0.0)
    drop_rows_after(folder, step)
    seconds = logged - elapsed
    lost = ""
    if seconds >= 1:
        lost = f"; {seconds:.0f} s that were logged after its checkpoint are lost"
    print(f"resumed at step {step:,}, {elapsed / 3600:.2f} hours into the run{lost}")


def write_log(path, rows, mode):
    """Write dicts as lines of a log.csv, their keys by COLUMNS; what is not there stays empty."""
    with open(path, mode, newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, extrasaction="ignore")
        if f.tell() == 0:
            writer.writeheader()
        for row in rows:
            short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(short)


def append_row(folder, row):
    """Append one row to log.csv, or raise OSError and leave it as it was."""
    path = Path(folder) / "log.csv"
    size = path.stat().st_size if path.exists() else 0
    try:
        write_log(path, [row], "a")
    except OSError:
        with contextlib.suppress(OSError):  # it may not be there
            os.truncate(path, size)
        raise


def read_log(folder):
    """The rows of log.csv, [{column: number}], empty fields left out, broken lines too."""
    path = Path(folder) / "log.csv"
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = []
    for cells in csv.DictReader(lines, quoting=csv.QUOTE_NONE):
        with contextlib.suppress(ValueError, TypeError):
            row = {k: int(v) if k in WHOLE else float(v) for k, v in cells.items() if v}
            if NEEDED.issubset(row):
                rows.append(row)
    return rows


def drop_rows_after(folder, step):
    """Remove what log.csv says of the steps after `step`: a resumed run does them again."""
    rows = [row for row in read_log(folder) if row["step"] <= step]
    write_beside(Path(folder) / "log.csv", lambda path: write_log(path, rows, "w"))


def line(axes, rows, x, y, **style):
    """Draw the column y of rows against the column x, in the rows that have both."""
    there = [row for row in rows if y in row]
    if there:
        axes.plot([row[x] for row in there], [row[y] for row in there], **style)


def plot(folder):
    """Draw loss.png from log.csv: losses above, learning rate and batch below, by the clock."""
    rows = read_log(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return  # train.py says so, once
    if not rows:
        return
    unit, seconds = ("hours", 3600) if rows[-1]["elapsed_s"] > 7200 else ("minutes", 60)
    for row in rows:
        row[unit] = row["elapsed_s"] / seconds
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    held_out = {"marker": "o", "ms": 3}
    line(top, rows, unit, "loss", color="0.75", lw=1, label="training, at the run's masking rate")
    for rate, color in ((25, "tab:orange"), (15, "tab:blue")):
        words = f"held out, {rate} % masked"
        line(top, rows, unit, f"val_loss_{rate}", color=color, label=words, **held_out)
    top.set(ylabel="loss (nats per predicted token)", xlim=(0, max(1e-6, rows[-1][unit])))
    if top.lines:
        top.legend(frameon=False)
    top.grid(alpha=0.25)
    line(bottom, rows, unit, "lr", color="tab:green")  # Muon's is a constant times it
    bottom.set_xlabel(f"wall clock ({unit}); {rows[-1]['tokens'] / 1e6:,.1f}M tokens")
    bottom.set_ylabel("learning rate", color="tab:green")
    right = bottom.twinx()
    line(right, rows, unit, "batch_size", color="tab:purple")
    right.set_ylabel("rows per step", color="tab:purple")
    bottom.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    write_beside(Path(folder) / "loss.png", lambda path: figure.savefig(path, format="png"))
    gc.collect()  # a figure is one large cycle: those of a long run made a process 50 MB larger


def overlay(runs, key, path):
    """Draw the column key of {name: [rows of a log.csv, …]} by time, tokens and FLOPs."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    except ImportError:
        print(f"no {path.name}: pip install matplotlib draws one")
        return
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained", facecolor="white")
    measures = {"elapsed_s": "seconds", "tokens": "tokens", "flops": "floating-point operations"}
    for axes, measure in zip(figure.subplots(1, 3, sharey=True), measures, strict=True):
        for i, (name, logs) in enumerate(runs.items()):
            for rows in logs:
                begun = [row for row in rows if row["tokens"]]  # a logarithmic axis has no 0
                label = name if rows is logs[0] else None
                line(axes, begun, measure, key, color=f"C{i}", lw=1.2, alpha=0.85, label=label)
        axes.set(xscale="log", xlabel=measures[measure])
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))  # the labels of more would overlap
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("held-out loss at 15 % masked (nats)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_beside(path, lambda path: figure.savefig(path, format="png"))


# A card of ours begins so; one that begins otherwise is somebody's own.
CARD_BEGIN = """---
# written anew with every save: take this line out, and your edits stay
"""
CARD = """{begin}{front}
license: other  # yours to choose
tags: [masked-lm, cramming]
---

# {name}

A masked language model of {run[parameters]:,} parameters, trained from scratch by nanocram after
[Cramming](https://arxiv.org/abs/2212.14034), on {run[processes]} × {run[device]} and the text of
`{run[corpus][source]}`{part}.
After {hours:.2f} hours, {row[step]:,} steps and {row[tokens]:,} tokens its loss on held-out text
was {row[val_loss_15]:.3f} nats per token with 15 % masked, {row[val_loss_25]:.3f} with 25 %.

{use}
{glue}
All settings are in `run.json`, every logged step is in `log.csv`.
"""
NATIVE = """```python
from transformers import pipeline
print(pipeline("fill-mask", model="{name}")("the capital of france is [MASK]."))
```"""
OURS = """It is none of transformers' architectures: `model_folder.load("{name}")` reads it."""


def write_card(folder, glue_table=()):
    """Write README.md into a run's folder, unless one is there that does not begin as ours.

    glue_table: lines of markdown. Before the first evaluation nothing is written."""
    folder = Path(folder)
    path = folder / "README.md"
    run = read_facts(folder)
    evaluations = [row for row in read_log(folder) if "val_loss_15" in row]
    is_ours = not path.exists() or path.read_bytes().startswith(CARD_BEGIN.encode())
    if "corpus" in run and evaluations and is_ours:
        write_text(path, card(folder, run, evaluations[-1], glue_table))


def card(folder, run, row, glue_table):
    """The text of a run's card: its run.json, the row of its log with the last evaluation."""
    use, front = OURS, "library_name: nanocram"
    if json.loads((folder / "config.json").read_text())["model_type"] == "modernbert":
        use, front = NATIVE, "library_name: transformers\npipeline_tag: fill-mask"
    name = folder.resolve().name
    glue = "\n".join(["", "## GLUE, dev sets", "", *glue_table, ""]) if glue_table else ""
    words = {"begin": CARD_BEGIN, "front": front, "name": name, "use": use.format(name=name)}
    unread = run["corpus"].get("unread_files", 0)
    words["part"] = (
        f" (but {unread} files of it that could not be read to their end)" if unread else ""
    )
    words |= {"run": run, "row": row, "hours": row["elapsed_s"] / 3600, "glue": glue}
    return CARD.format(**words)
