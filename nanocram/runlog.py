"""What a run says and leaves behind: log.csv, run.json, loss.png and the model card, README.md.

python -c "from nanocram import runlog; runlog.plot('out/tiny')"     # draw loss.png anew
"""

import contextlib
import csv
import gc
import io
import itertools
import json
import sys
import time
from pathlib import Path

from nanocram import machine, parallel
from nanocram.data import fill_masks
from nanocram.model_folder import not_native
from nanocram.safety import Bar, first_line, names_in, say, say_once, write_beside, write_text

COLUMNS = (
    "elapsed_s step tokens flops loss val_loss_15 val_loss_25 val_nats_per_char "
    "lr batch_size mask_rate grad_norm skipped muon_lr"
).split()  # the first ones of log.csv; whatever else is measured follows
ENGLISH = "once upon a [MASK] there was a king.|he opened the [MASK] and went out."


def read_facts(folder):
    """The dict of a folder's run.json; {} if there is none."""
    path = Path(folder) / "run.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def new_folder(folder):
    """Make a folder for a new run. An earlier one is moved aside, if it ever saved anything."""
    begun = {"run.json", "tokenizer.json", "tokenizer_config.json", "log.csv"}
    names = names_in(folder)
    if names and "run.json" not in names:
        sys.exit(f"{folder} exists and holds no run of train.py: choose another --out_dir")
    if names - begun or any(line["step"] for line in read_log(folder)):
        places = (folder.with_name(f"{folder.name}.{n}") for n in itertools.count(1))
        aside = next(path for path in places if not path.exists())
        try:
            folder.rename(aside)
        except OSError as e:  # a disk is mounted there
            what_helps = f"type --init=auto to continue it, or --out_dir={folder}/2"
            sys.exit(f"{folder} holds a run that cannot be moved ({e.strerror}): {what_helps}")
        print(f"{folder} held a run: moved it to {aside} (--init=auto would have continued it)")
        folder.mkdir()


def warn_of_stall(kind, seconds, usual):
    """Warn where a "step", "eval" or "save" took far longer than the usual seconds, if known."""
    if usual and seconds > 10 + 10 * usual:
        advice = "--init=resume with a larger budget makes up for it"
        say(f"WARNING: a {kind} took {seconds:,.0f} s of the budget; {advice}")


def read_log(folder):
    """The lines of log.csv as [{column: number}], without empty fields and broken lines."""
    path = Path(folder) / "log.csv"
    text = path.read_text("utf-8") if path.exists() else ""
    lines = []
    for cells in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        line = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError, TypeError):
                line[name] = int(cell) if str(cell).isdecimal() else float(cell)
        if "step" in line and "elapsed_s" in line:
            lines.append(line)
    return lines


@contextlib.contextmanager
def extra(what):
    """Around what a run can do without: an error, of whatever kind, is a warning."""
    try:
        yield
    except Exception as e:
        say_once(f"WARNING: no {what}: {first_line(e)}")


class Log:
    """What a train.Run tells while it trains; rank 0 has one."""

    def __init__(self, run, folder, data_dir, settings):
        self.run = run
        self.folder = Path(folder)
        self.lines = []  # of log.csv
        self.first_row = run.state.rows_seen  # where this process began to train
        self.train_seconds = 0.0  # of this process
        self.bar = None  # from the first step on
        self.is_tenth_over = False  # of the run
        self.matmul_rate = machine.matmul_rate(run.device, run.amp_dtype) * parallel.WORLD_SIZE
        samples = settings["samples"]
        if samples == "auto":
            samples = ENGLISH if run.tokenizer.mode == "ascii" else ""
        longest = run.model.config.max_seq_len - 2  # [CLS] and [SEP]
        encode = run.tokenizer.encode
        self.sentences = [s for s in samples.split("|") if s and len(encode(s)) <= longest]

        is_resumed = run.saved_step >= 0
        before = read_facts(self.folder) if is_resumed else {}
        for name, was in before.get("settings", {}).items():
            if name != "init" and settings.get(name) != was:
                print(f"{name} was {was!r} before the resume, and is {settings.get(name)!r} now")
        self.facts = {
            "settings": settings,
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "flops_per_token": run.flops_per_token,
            "matmul_flops": self.matmul_rate / parallel.WORLD_SIZE,
            "amp_dtype": str(run.amp_dtype),
            "processes": parallel.WORLD_SIZE,
            "data": run.meta["sha256"]["train.bin"],
            "held_out": run.meta["sha256"]["val.bin"],
            "began_from": run.state.began_from,
            "corpus": {k: run.meta["settings"][k] for k in ("source", "normalisation")}
            | run.meta["counts"],
            **machine.describe(run.device),
        }
        code = self.facts["code"]
        self.facts["code"] = before.get("code", code)  # which may be several
        if not self.facts["code"].startswith(code):
            print("the code was edited before the resume")
            self.facts["code"] = f"{code} after {before['code']}"
        # before anything is written: the package may be missing, or its site away
        self.wandb = None
        if settings["wandb_project"]:
            goal = {"project": settings["wandb_project"], "name": self.folder.name}
            goal |= {"id": before.get("wandb_id"), "resume": "allow"}
            try:
                import wandb

                self.wandb = wandb.init(**goal, config=settings)
            except Exception as e:  # no package, no key, no network: each raises something else
                advice = "wandb login, WANDB_MODE=offline, or pip install wandb"
                sys.exit(f"wandb: {first_line(e)}: type {advice}")
            self.facts["wandb_id"] = self.wandb.id
        self.begin_folder(Path(data_dir), is_resumed)

        # say what this run is, and what of it may surprise
        millions, mflops = self.facts["parameters"] / 1e6, run.flops_per_token / 1e6
        speed = f"matrices of {run.amp_dtype} at {self.matmul_rate / 1e12:.2f} TFLOP/s"
        who = f"{self.facts['device']} multiplies {speed}"
        say(f"{millions:.1f}M parameters, {mflops:.0f} MFLOP a token; {who}")
        if run.clock.is_timed():
            most = settings["budget_hours"] * 3600 * self.matmul_rate / run.flops_per_token
            self.warn_if_few("the budget holds at most", most)
        if why := not_native(run.model):
            say(f"with {why} this is no ModernBERT: only model_folder.load() reads it")

    def begin_folder(self, data_dir, is_resumed):
        """Make the folder ready. run.json comes first, for by it a later command knows a run."""
        state = self.run.state
        if is_resumed:
            print(f"resumed at step {state.step:,}, after {state.elapsed / 60:.1f} minutes")
            # a resumed run forgets the lines after its checkpoint
            self.lines = [line for line in read_log(self.folder) if line["step"] <= state.step]
        else:
            new_folder(self.folder.resolve())
        self.write_facts()
        # the tokenizer's files, with the length at which transformers has to cut
        config = json.loads((data_dir / "tokenizer_config.json").read_text("utf-8"))
        config["model_max_length"] = self.run.model.config.max_seq_len
        write_text(self.folder / "tokenizer_config.json", json.dumps(config, indent=2))
        write_text(self.folder / "tokenizer.json", (data_dir / "tokenizer.json").read_text("utf-8"))
        self.write()

    def write_facts(self, **found):
        """Write run.json; found: what setting up has found out."""
        self.facts |= found
        write_text(self.folder / "run.json", json.dumps(self.facts, indent=2))

    def warn_if_few(self, said, tokens):
        """Warn where the model has fewer tokens than parameters to learn from."""
        tokens += self.run.state.began_from.get("tokens", 0)
        share = tokens / self.facts["parameters"]
        if share < 1:
            advice = "a smaller model learns more, see config/small.py"
            say(f"WARNING: {said} {share:.2g} tokens per parameter: {advice}")

    def warn_if_none_learnt(self, losses):
        """Warn where held-out losses are no better than without a model."""
        if not losses["val_loss_15"] < self.facts["frequency_loss"]:
            usual = f"guessing by token frequency ({self.facts['frequency_loss']:.3f})"
            say(f"WARNING: no better than {usual}: train longer, or lower the learning rates")

    def say_evaluation(self, losses, number):
        """Print held-out losses, and a sentence with the words that the model fills in."""
        where = f"{self.run.clock.elapsed() / 60:7.1f} min  step {self.run.state.step:6,}"
        at_15, at_25 = losses["val_loss_15"], losses["val_loss_25"]
        say(f"{where}  held-out loss {at_15:.3f} (15 %) {at_25:.3f} (25 %)")
        if not self.is_tenth_over and self.run.clock.progress() >= 0.1:
            self.is_tenth_over = True
            self.warn_if_none_learnt(losses)
        if self.sentences:
            self.say_guesses([self.sentences[number % len(self.sentences)]])

    def say_guesses(self, sentences):
        """Print sentences, and the three likeliest words for the [MASK] of each."""
        for sentence in sentences:
            top = fill_masks(self.run.model, self.run.tokenizer, sentence, self.run.device)
            say(f"  {sentence}  " + ", ".join(f"{word} {p:.0%}" for word, p in top))

    def add_line(self, losses):
        """Add a line to log.csv: means of what was measured since the last one, what else the last
        step had, and perhaps held-out losses. None where a resume finds it there."""
        state, last = self.run.state, self.lines[-1] if self.lines else {}
        if last.get("step") == state.step and (not losses or "val_loss_15" in last):
            return
        tokens = state.rows_seen * self.run.rows.seq_len
        line = {
            "elapsed_s": self.run.clock.elapsed(),
            "step": state.step,
            "tokens": tokens,
            "flops": float(tokens * self.run.flops_per_token),
            **state.last,
            "skipped": state.skipped,
            **losses,
        }
        line |= {name: total / steps for name, (steps, total) in state.sums.items()}
        state.sums = {}
        self.lines.append(line)
        if self.wandb:
            wandb, self.wandb = self.wandb, None  # which stays so if this fails
            with extra("more of this run at wandb"):
                wandb.log(line, step=state.step)
                self.wandb = wandb
        # rewriting takes longer as the log grows: wait for 1 s per 200 lines
        waited = time.monotonic() - self.written_at
        if losses or state.consecutive_skips or waited > max(2, len(self.lines) / 200):
            self.write()

    def write(self):
        """Write log.csv, numbers with 6 digits; return whether that worked, or else say why."""
        self.written_at = time.monotonic()
        columns = list(dict.fromkeys(itertools.chain(COLUMNS, *self.lines)))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for line in self.lines:
            cells = {k: f"{v:d}" if isinstance(v, int) else f"{v:.6g}" for k, v in line.items()}
            writer.writerow(cells)
        try:
            write_text(self.folder / "log.csv", text.getvalue())
        except OSError as e:
            say(f"WARNING: cannot write log.csv, its lines are kept: {e}")
            return False
        return True

    def throughput(self):
        """(tokens per second, MFU) of all ranks, while this process trained."""
        tokens = (self.run.state.rows_seen - self.first_row) * self.run.rows.seq_len
        speed = tokens / max(1e-9, self.train_seconds)
        return speed, speed * self.run.flops_per_token / self.matmul_rate

    def after_step(self, progress):
        """Move the bar; after ten seconds of training, say once what the budget holds."""
        state = self.run.state
        before = self.train_seconds
        self.train_seconds += state.recent["step"][-1]
        if self.bar is None:
            self.bar = Bar(total=1.0, bar_format="{percentage:3.0f}%|{bar}|{postfix}")
        speed, mfu = self.throughput()
        trained = self.run.clock.elapsed() - state.setup_seconds
        left = trained / max(progress, 1e-9) - trained
        said = f"step {state.step:,}  loss {state.last['loss']:.3f}  {speed:,.0f} tokens/s  "
        self.bar.set_postfix_str(f"{said}MFU {mfu:.0%}  {left / 60:.0f} min left", refresh=False)
        self.bar.update(progress - self.bar.n)
        if before <= 10 < self.train_seconds and self.run.clock.is_timed():
            tokens = state.rows_seen * self.run.rows.seq_len + speed * left
            epochs = tokens / self.run.rows.seq_len / len(self.run.rows)
            share = f"{tokens / self.facts['parameters']:.1f} tokens per parameter"
            held = f"{tokens / 1e6:,.1f}M tokens, {epochs:.2f} epochs, {share}"
            say(f"{speed:,.0f} tokens/s: the budget holds {held}")
            self.warn_if_few("the budget holds", tokens)

    def report(self, losses, is_saved):
        """Say what the run was and what the model has learnt; without losses, how to go on."""
        state, rows = self.run.state, self.run.rows
        if self.bar:
            self.bar.close()
        if not losses:
            if is_saved:
                say(f"stopped at step {state.step:,}: --init=resume goes on")
            return
        with contextlib.suppress(RuntimeError):  # a GPU may be full
            rate = machine.matmul_rate(self.run.device, self.run.amp_dtype)
            self.matmul_rate = max(self.matmul_rate, rate * parallel.WORLD_SIZE)
        speed, mfu = self.throughput()
        tokens, epochs = state.rows_seen * rows.seq_len, state.rows_seen / len(rows)
        words = self.run.meta["counts"].get("words", 0)  # none in older data
        words = f"{epochs * words / 1e6:.2f}M words, " if words else ""
        steps = f"{state.step:,} steps, {state.skipped} of them skipped"
        took = f"{self.run.clock.elapsed():.0f} s, {state.setup_seconds:.0f} of them to set up"
        read = f"{tokens:,} tokens, {words}{epochs:.2f} epochs"
        say(f"{steps}; {read}; {speed:,.0f} tokens/s, MFU {mfu:.0%}; {took}")
        self.warn_if_few("the model has read", tokens)
        at_15, at_25 = losses["val_loss_15"], losses["val_loss_25"]
        per_char = f"{losses['val_nats_per_char']:.4f} nats per character"
        say(f"held-out loss {at_15:.4f} at 15 % masked, {at_25:.4f} at 25 %; {per_char}")
        self.warn_if_none_learnt(losses)
        self.say_guesses(self.sentences)
        if is_saved:
            say(f"{self.folder}: the model, log.csv, run.json, loss.png, ckpt.pt")


@extra("loss.png")
def plot(folder):
    """Draw loss.png from log.csv: losses by the clock. Without matplotlib there is none."""
    from matplotlib.figure import Figure

    if not (lines := read_log(folder)):
        return
    unit, seconds = ("hours", 3600) if lines[-1]["elapsed_s"] > 7200 else ("minutes", 60)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()

    def draw(column, **style):
        there = [line for line in lines if column in line]
        minutes_or_hours = [line["elapsed_s"] / seconds for line in there]
        axes.plot(minutes_or_hours, [line[column] for line in there], **style)

    draw("loss", color="0.75", lw=1, label="training, at the run's masking rate")
    draw("val_loss_25", color="tab:orange", marker="o", ms=3, label="held out, 25 % masked")
    draw("val_loss_15", color="tab:blue", marker="o", ms=3, label="held out, 15 % masked")
    axes.set_xlabel(f"wall clock ({unit}); {lines[-1]['tokens'] / 1e6:,.1f}M tokens")
    axes.set_ylabel("loss (nats per predicted token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    write_beside(Path(folder) / "loss.png", lambda path: figure.savefig(path, format="png"))
    gc.collect()  # a figure is one large cycle; those of a long run made a process 50 MB larger


# A card that does not begin like this is somebody's own and stays.
CARD_BEGIN = """---
# written anew with every save: take this line out, and your edits stay
"""
NATIVE_USE = """```python
from transformers import pipeline
print(pipeline("fill-mask", model="{name}")("the capital of france is [MASK]."))
```

The pipeline's `targets` look like `["Ġparis", "Ġrome"]`. Hidden states of `AutoModel` come before
the final norm, whose weights are in `head.norm`."""


@extra("README.md")
def write_card(folder, glue_table=()):
    """Write README.md into a run's folder, unless it has somebody's own. glue_table: its lines."""
    folder = Path(folder).resolve()
    path, name, facts = folder / "README.md", folder.name, read_facts(folder)
    evaluations = [line for line in read_log(folder) if "val_loss_15" in line and line["step"]]
    is_ours = not path.exists() or path.read_text("utf-8").startswith(CARD_BEGIN)
    if not (evaluations and facts and is_ours):
        return
    config = json.loads((folder / "config.json").read_text("utf-8"))
    line = evaluations[-1]
    # an older folder does not say what it was trained on
    trained = {"sources": [facts["corpus"]["source"]], "seq_len": facts["settings"]["seq_len"]}
    trained |= {"tokens": line["tokens"]} | config.get("trained_on", {})
    front = "library_name: nanocram"
    use = f'It is none of transformers\' architectures: `model_folder.load("{name}")` reads it.'
    if config["model_type"] == "modernbert":
        front = "library_name: transformers\npipeline_tag: fill-mask"
        use = NATIVE_USE.format(name=name)
    if glue_table:
        use = "\n".join([use, "", "## GLUE, dev sets", "", *glue_table])
    sources = " and ".join(f"`{source}`" for source in dict.fromkeys(trained["sources"]))
    hours, longest = line["elapsed_s"] / 3600, config["nanocram"]["max_seq_len"]
    guessing = f"; guessing by token frequency costs {facts.get('frequency_loss', 0):.3f}"
    text = f"""{CARD_BEGIN}{front}
license: other  # yours to choose
tags: [masked-lm, cramming]
---

# {name}

A masked language model of {facts["parameters"]:,} parameters, pre-trained by nanocram after
[Cramming](https://arxiv.org/abs/2212.14034), on {facts["processes"]} × {facts["device"]} and
{trained["tokens"]:,} tokens of {sources}. After {hours:.2f} hours and {line["step"]:,} steps of its
last run its loss on held-out text was {line["val_loss_15"]:.3f} nats per token with 15 % masked,
and {line["val_loss_25"]:.3f} with 25 %{guessing * ("frequency_loss" in facts)}.
It takes up to {longest} tokens, and was trained on rows of {trained["seq_len"]}. `run.json` has all
settings, `log.csv` every logged step.

{use}
"""
    write_text(path, text)
