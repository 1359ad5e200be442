"""What a run says and leaves behind: run.json, log.csv, loss.png and a model card, README.md.

    python -c "from nanocram import record; print(record.read_log('out/tiny')[-1])"
    python -c "from nanocram import record; record.plot('out/tiny')"     # draw loss.png anew

Everything but the rows of log.csv is written beside its goal and renamed.
"""

import contextlib
import csv
import gc
import io
import itertools
import json
import math
import re
import sys
from pathlib import Path

from tqdm import tqdm

from nanocram import machine, pairs, parallel
from nanocram.data import fill_masks
from nanocram.model_folder import not_native
from nanocram.safety import append_text, first_line, write_beside, write_text

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


def copy_tokenizer(data_dir, folder, longest):
    """Write a data folder's tokenizer into a run's, with the length that its model takes.

    Without that, transformers cuts nothing, and runs on beyond the positions that were trained."""
    write_text(folder / "tokenizer.json", (data_dir / "tokenizer.json").read_text("utf-8"))
    config = json.loads((data_dir / "tokenizer_config.json").read_text("utf-8"))
    config["model_max_length"] = longest
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2))


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


def as_lines(rows, with_header):
    """Dicts as lines of a log.csv, their keys by COLUMNS; what is not there stays empty."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore")
    if with_header:
        writer.writeheader()
    for row in rows:
        writer.writerow({name: as_cell(value) for name, value in row.items()})
    return lines.getvalue()


def as_cell(value):
    """A value as log.csv has it: True is 1, a float has 6 digits, a word no comma or quote."""
    if hasattr(value, "item") and math.prod(value.shape) == 1:  # torch's and NumPy's
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | None):
        return value
    return f"{value:.6g}" if isinstance(value, float) else re.sub(r'[",\s]+', " ", str(value))


def append_row(folder, row):
    """Append one row to log.csv, or raise OSError and leave it as it was."""
    path = Path(folder) / "log.csv"
    is_new = not path.exists() or path.stat().st_size == 0
    append_text(path, as_lines([row], with_header=is_new))


def read_lines(folder):
    """[(row, cells)] of log.csv: {column: number}, and {column: text}; broken lines left out."""
    path = Path(folder) / "log.csv"
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    found = []
    for cells in csv.DictReader(lines, quoting=csv.QUOTE_NONE):
        if None in cells:  # more of them than columns: two lines in one
            continue
        row = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError, TypeError):  # empty, cut short, or a fork's word
                row[name] = int(cell) if name in WHOLE else float(cell)
        if NEEDED.issubset(row):
            found.append((row, cells))
    return found


def read_log(folder):
    """The rows of log.csv, [{column: number}], empty fields left out, broken lines too."""
    return [row for row, _ in read_lines(folder)]


def drop_rows_after(folder, step):
    """Remove what log.csv says of the steps after `step`: a resumed run does them again."""
    rows = [cells for row, cells in read_lines(folder) if row["step"] <= step]
    text = as_lines(rows, with_header=True)
    write_beside(Path(folder) / "log.csv", lambda path: path.write_bytes(text.encode()))


def start_wandb(project, name, settings, run_id):
    """A run of wandb.ai; exits with one line where nobody is logged in, or the network is away.

    run_id: of the run to go on with, None for a new one."""
    import wandb

    options = {"id": run_id, "resume": "allow"}
    try:
        return wandb.init(project=project, name=name, config=settings, **options)
    except Exception as e:  # whatever it raises
        sys.exit(f"wandb: {first_line(e)}: try wandb login, or leave --wandb_project out")


class Log:
    """What a train.Run tells while it trains: log.csv, run.json, the bar, lines on the terminal.

    matmul_rate: FLOP/s of a large product on all devices, the yardstick of MFU. Ranks other than
    the first are silent: for them every method does nothing."""

    def __init__(self, run, folder, tokenizer, matmul_rate, is_silent=False, code=""):
        self.run = run
        self.folder = Path(folder)
        self.tokenizer = tokenizer
        self.matmul_rate = matmul_rate
        self.is_silent = is_silent
        self.size = sum(weight.numel() for weight in run.model.parameters())
        # Where masks fall evenly, each of the counts holds for a third of a run.
        mean_positions = sum(run.padded_counts) / len(run.padded_counts)
        self.flops_per_token = run.model.flops_per_token(run.rows.seq_len, mean_positions)
        self.first_row = run.state.row  # when this process began to train
        self.code = code  # machine.code_hash() of the script
        self.unwritten = []  # rows that log.csv could not take so far
        self.has_foretold = False
        self.wandb = None
        self.wandb_id = None
        self.bar = None  # from the first step on

    def say(self, line):
        """Print a line, above the bar where there is one."""
        if not self.is_silent:
            tqdm.write(line)

    def close_bar(self):
        if self.bar:
            self.bar.close()
            self.bar = None

    def begin(self, is_resumed, settings, data_dir, wandb_project):
        """Make the folder ready; say what this run is, and what of it may surprise."""
        if self.is_silent:
            return
        run = self.run
        if is_resumed:
            self.wandb_id = read_facts(self.folder).get("wandb_id")
        if wandb_project:  # before anything is moved
            name = self.folder.name
            self.wandb = start_wandb(wandb_project, name, settings, self.wandb_id)
            self.wandb_id = self.wandb.id
        if is_resumed:
            resume(self.folder, settings, run.state.step, run.state.elapsed)
        else:
            new_folder(self.folder)
        self.write_facts(settings)
        copy_tokenizer(Path(data_dir), self.folder, run.model.config.max_seq_len)
        rate = self.matmul_rate / parallel.WORLD
        work = (
            f"{self.size / 1e6:.1f}M parameters, {self.flops_per_token / 1e6:.0f} MFLOP per token"
        )
        speed = f"multiplies matrices of {run.amp_dtype} at {rate / 1e12:.2f} TFLOP/s"
        self.say(f"{work}; {run.device.type} {speed}")
        if not run.meta.get("complete", True):
            why = "errors in its meta.json say why"
            self.say(f"WARNING: {data_dir} holds a part of its text: {why}")
        why = not_native(run.model.config)
        if why:
            self.say(
                f"with {why} this is no ModernBERT: model_folder.load() reads it, not transformers"
            )

    def draw(self):
        """Write loss.png and the card; where a fork's columns do not fit them, say so."""
        try:
            plot(self.folder)
            write_card(self.folder)
        except OSError:
            raise
        except (Exception, SystemExit) as e:  # read_facts() exits
            why = f"{type(e).__name__}: {first_line(e)}"
            self.say(f"WARNING: loss.png and README.md are not of today ({why})")

    def update_facts(self, settings):
        """write_facts(); a disk that is full does not end the run."""
        try:
            self.write_facts(settings)
        except OSError as e:
            self.say(f"WARNING: cannot write run.json, it stands as it was: {e}")

    def write_facts(self, settings):
        """Write run.json: the settings, what they make, the text, the machine."""
        if self.is_silent:
            return
        run = self.run
        facts = {"settings": settings, "parameters": self.size}
        facts |= {"flops_per_token": self.flops_per_token}
        facts |= {"matmul_flops": self.matmul_rate / parallel.WORLD}
        facts |= {"amp_dtype": str(run.amp_dtype), "processes": parallel.WORLD}
        # As they were typed; the settings have what came of them.
        facts |= {"asked_micro_batch": run.state.asked_micro_batch}
        facts |= {"asked_compile": run.asked_compile}
        text = run.meta["settings"]
        corpus = {"source": text["source"], "normalisation": text["normalisation"]}
        facts |= {"data": run.meta["sha256"]["train.bin"], "corpus": corpus | run.meta["counts"]}
        facts |= machine.describe(run.device) | {"code": self.code}
        if self.wandb_id:
            facts["wandb_id"] = self.wandb_id  # a resume goes on with it
        write_text(self.folder / "run.json", json.dumps(facts, indent=2))

    def add_row(self, losses=None):
        """Add state.last and perhaps losses to log.csv; a failure is said, no more."""
        if self.is_silent:
            return
        state = self.run.state
        tokens = state.row * self.run.rows.seq_len
        row = {"elapsed_s": self.run.clock.elapsed(), "step": state.step, "tokens": tokens}
        row |= {"flops": float(tokens * self.flops_per_token)} | state.last
        row["skipped"] = state.skipped
        row |= losses or {}
        # The row of the final evaluation replaces one that the same step has already.
        self.unwritten = [other for other in self.unwritten if other["step"] < state.step] + [row]
        self.flush()
        if self.wandb:
            try:
                self.wandb.log(row, step=state.step)
            except Exception as e:  # a service that is down, or whatever it raises
                self.say(f"WARNING: wandb is left out from now on: {first_line(e)}")
                self.wandb = None

    def flush(self):
        """Add to log.csv the rows that it lacks; those it cannot take wait for the next call."""
        state = self.run.state
        try:
            while self.unwritten:
                row = self.unwritten[0]
                if state.logged == row["step"]:  # the earlier row of the same step
                    drop_rows_after(self.folder, row["step"] - 1)
                append_row(self.folder, row)
                state.logged = row["step"]
                del self.unwritten[0]
        except (OSError, ValueError) as e:
            self.say(f"WARNING: cannot write to {self.folder}/log.csv: {first_line(e)}")

    def throughput(self):
        """(tokens per second, MFU), of all ranks, while this process trained."""
        tokens = (self.run.state.row - self.first_row) * self.run.rows.seq_len
        speed = tokens / max(1e-9, self.run.clock.spent["training"])
        return speed, speed * self.flops_per_token / self.matmul_rate

    def after_step(self, progress, rows_at):
        """Move the bar; after ten seconds of training say once what the rest of the run holds.

        rows_at(progress): the rows of a step at another moment."""
        if self.is_silent:
            return
        if self.bar is None:
            form = "{percentage:3.0f}%|{bar}|{postfix}"
            self.bar = tqdm(total=1.0, disable=None, bar_format=form)  # None: not without terminal
        last, clock = self.run.state.last, self.run.clock
        speed, mfu = self.throughput()
        self.bar.n = clock.progress()
        minutes = (clock.elapsed() - self.run.state.setup_seconds) / 60
        left = minutes / max(self.bar.n, 1e-9) - minutes
        losses = f"loss {last['loss']:.3f}  lr {last['lr']:.1e}"
        self.bar.set_postfix_str(
            f"{losses}  {speed:,.0f} tokens/s  MFU {mfu:.0%}  {left:.0f} min left"
        )
        if not self.has_foretold and clock.spent["training"] > 10:
            self.say(self.forecast(progress, rows_at))
            self.has_foretold = True

    def forecast(self, progress, rows_at):
        """What the rest of the run holds at the speed so far, and a warning if need be."""
        run = self.run
        speed, _ = self.throughput()
        moments = [progress + (1 - progress) * i / 100 for i in range(100)]
        batches = [rows_at(moment) for moment in moments]
        seconds = run.clock.seconds_to_go()
        if math.isinf(seconds):
            steps = run.clock.steps_to_go()
            rows = steps * sum(batches) / 100
        else:
            # Each hundredth of the time has as many rows, in steps as large as the ramp has them.
            rows = speed * seconds / run.rows.seq_len
            steps = sum(rows / 100 / batch for batch in batches)
        tokens = rows * run.rows.seq_len / 1e6
        rest = f"{steps:,.0f} steps, {tokens:,.1f}M tokens, {rows / run.rows.count:.2f} epochs"
        said = f"{speed:,.0f} tokens/s: the rest holds {rest}"
        # A curriculum is one pass through sorted rows (paper 4.4): its first part is another set.
        will_read = int(run.state.row + rows)
        share = will_read / run.rows.count
        if run.meta["settings"]["order"] == "curriculum" and share < 0.95:
            said += f"\nWARNING: of the sorted rows only the first {share:.0%} will be read: "
            said += f"type prepare.py ... --max_rows={will_read}"
        return said

    def guess(self, sentence):
        """Say a sentence and the three likeliest words for its [MASK]."""
        top = fill_masks(self.run.model, self.tokenizer, sentence, self.run.device)
        self.say(f"  {sentence}  " + ", ".join(f"{word} {p:.0%}" for word, p in top))

    def report(self, sentences):
        """Say where the time of a run that is over went, and what the model has learnt."""
        state, clock = self.run.state, self.run.clock
        speed, mfu = self.throughput()
        epochs = state.row / self.run.rows.count
        steps = f"{state.step:,} steps, {state.skipped} of them skipped"
        tokens = f"{state.row * self.run.rows.seq_len:,} tokens, {epochs:.2f} epochs"
        self.say(f"{steps}; {tokens}; {speed:,.0f} tokens/s, MFU {mfu:.0%}")
        seconds = clock.spent | {"before the resume": clock.earlier}
        seconds["other"] = clock.elapsed() - sum(seconds.values())
        parts = ", ".join(f"{name} {s:.0f}" for name, s in seconds.items() if s)
        self.say(f"{clock.elapsed():.0f} s: {parts}")
        for sentence in sentences:
            self.guess(sentence)
        shares = {}
        if sentences and self.tokenizer.mode == "ascii":  # of other normalisations are other texts
            shares = pairs.score(self.run.model, self.tokenizer, self.run.device)
        if shares:
            mean = f"{sum(shares.values()) / len(shares):.0%}"
            weakest = sorted(shares, key=shares.get)[:3]
            least = ", ".join(f"{name} {shares[name]:.0%}" for name in weakest)
            said = f"English grammar: {mean} of pairs right, where guessing has 50 %"
            self.say(f"{said}; least {least}")
        drawn = (self.folder / "loss.png").exists()
        picture = "loss.png" if drawn else "no loss.png (pip install matplotlib draws one)"
        files = "model.safetensors and config.json (the model), log.csv, run.json, ckpt.pt"
        self.say(f"{self.folder}: {files}, {picture}")
        if state.row == self.first_row:
            more = "type a larger --budget_hours (or --max_steps)"
            self.say(f"nothing was left to train: {more}")


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
    dots = {"marker": "o", "ms": 3}
    line(top, rows, unit, "loss", color="0.75", lw=1, label="training, at the run's masking rate")
    for rate, color in ((25, "tab:orange"), (15, "tab:blue")):
        words = f"held out, {rate} % masked"
        line(top, rows, unit, f"val_loss_{rate}", color=color, label=words, **dots)
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
# to share it: hf upload YOU/{name} FOLDER --exclude "ckpt*" --exclude "*/*"
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
```

It needs transformers 4.48 or later. The pipeline's `targets` are entries of the vocabulary, where
`Ġ` is the space before a word: `["Ġparis", "Ġrome"]`."""
NO_HEAD = """

The hidden states of `AutoModel` are without the final norm's weights: those are in `head.norm`."""
ASCII = """

The tokenizer lower-cases, takes accents off and drops all else outside ASCII: a text of emoji alone
has no token."""
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
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "modernbert":
        use, front = NATIVE, "library_name: transformers\npipeline_tag: fill-mask"
        use += "" if config["nanocram"]["head_transform"] else NO_HEAD
    use += ASCII if run["corpus"].get("normalisation") == "ascii" else ""
    name = folder.resolve().name
    glue = "\n".join(["", "## GLUE, dev sets", "", *glue_table, ""]) if glue_table else ""
    words = {"begin": CARD_BEGIN, "front": front, "name": name, "use": use.format(name=name)}
    unread = run["corpus"].get("unread_files", 0)
    words["part"] = (
        f" (but {unread} files of it that could not be read to their end)" if unread else ""
    )
    words |= {"run": run, "row": row, "hours": row["elapsed_s"] / 3600, "glue": glue}
    return CARD.format(**words)
