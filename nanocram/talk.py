"""What a run tells while it trains: all that the terminal shows, and a line of log.csv at times."""

import json
import sys
import time
from pathlib import Path

from nanocram import runlog
from nanocram.data import fill_masks
from nanocram.facts import measure_facts, note_changes, read_facts, write_card
from nanocram.model_folder import not_native
from nanocram.safety import Bar, extra, first_line, move_aside, say, set_aside, write_text
from nanocram.tokenizer import copy_tokenizer

ENGLISH = "once upon a [MASK] there was a king.|he opened the [MASK] and went out."


def begin_log(run):
    """Make the folder of a train.Run ready, say what the run is, and return its Log."""
    settings, step, is_resumed = run.settings, run.state.step, run.saved_step >= 0
    folder = Path(settings["out_dir"])
    before = read_facts(folder) if is_resumed else {}
    if is_resumed and not before and (folder / "run.json").exists():
        set_aside(folder / "run.json", "is damaged")
    found = ("finished_at_step", "frequency_loss", "rows_per_pass")  # as far as they stand there
    facts = {name: before.get(name) for name in found} | measure_facts(run)
    note_changes(facts, before)
    log = Log(run, folder, facts)
    if settings["wandb_project"]:  # before anything is written, for it may fail
        log.wandb = log_in_to_wandb(settings, folder.name, before.get("wandb_id"))
        facts["wandb_id"] = log.wandb.id
    if is_resumed:
        print(f"resumed at step {step:,}, after {run.state.elapsed / 60:.1f} minutes")
        # forget the lines after the checkpoint
        log.lines = [line for line in runlog.read_log(folder, True) if line["step"] <= step]
    else:
        move_aside(folder.resolve())
    log.write_facts()  # first, for by run.json a later command knows a run
    copy_tokenizer(settings["data_dir"], folder, run.model.config.max_seq_len)
    log.write()
    millions, mflops = facts["parameters"] / 1e6, run.flops_per_token / 1e6
    speed = f"multiplies matrices of {run.amp_dtype} at {log.matmul_flops / 1e12:,.4g} TFLOP/s"
    say(f"{millions:.1f}M parameters, {mflops:.0f} MFLOP a token; {facts['device']} {speed}")
    if why := not_native(run.model.config):
        say(f"with {why} this is no ModernBERT: transformers needs trust_remote_code=True")
    return log


def log_in_to_wandb(settings, name, known_id):
    """The run of wandb.ai that gets the lines: that of known_id, if there is one."""
    goal = {"project": settings["wandb_project"], "name": name, "id": known_id}
    try:
        import wandb

        return wandb.init(**goal, resume="allow", config=settings)
    except Exception as e:  # no package, no key, no network: each raises something else
        sys.exit(f"{first_line(e)}: type wandb login, WANDB_MODE=offline, or pip install wandb")


def warn_of_stall(kind, seconds, usual):
    """Warn where a "step", "eval" or "save" took far longer than the usual seconds, if known."""
    if usual and seconds > 10 + 10 * usual:
        say(f"WARNING: a {kind} took {seconds:,.0f} s: --init=resume with a larger budget helps")


class Log:
    """What main() tells of a train.Run; rank 0 has one."""

    def __init__(self, run, folder, facts):
        self.run, self.folder = run, folder
        self.facts, self.lines = facts, []  # of run.json and of log.csv
        self.wandb = self.bar = None  # there is a bar from the first step on
        self.matmul_flops = facts["matmul_flops"] * facts["processes"]
        self.first_row = run.state.rows_seen  # where this process began to train
        self.train_seconds = 0.0  # of this process
        samples = facts["settings"]["samples"]
        if samples == "auto":
            samples = ENGLISH if run.tokenizer.mode == "ascii" else ""
        self.samples = list(filter(None, samples.split("|")))

    def write_facts(self, **found):
        """Write run.json; found: what the run has found out."""
        self.facts |= found
        write_text(self.folder / "run.json", json.dumps(self.facts, indent=2))

    def write_plot_and_card(self):
        runlog.plot(self.folder)
        write_card(self.folder)

    def write(self):
        """Write log.csv; return whether that worked."""
        # rewriting takes longer as the log grows: wait for 1 s per 200 lines
        self.next_write = time.monotonic() + max(2, len(self.lines) / 200)
        return runlog.write_log(self.folder, self.lines)

    def add_line(self, losses):
        """Add a line to log.csv: means of what was measured since the last one, what else the last
        step had, and perhaps held-out losses. None where a resume finds it there."""
        run, state, last = self.run, self.run.state, self.lines[-1] if self.lines else {}
        if last.get("step") == state.step and (not losses or "val_loss_15" in last):
            return
        tokens = state.rows_seen * run.rows.seq_len
        line = {"elapsed_s": run.clock.elapsed(), "step": state.step, "tokens": tokens}
        line |= {"flops": float(tokens * run.flops_per_token), "skipped": state.skipped}
        line |= state.last | losses
        line |= {name: total / steps for name, (steps, total) in state.sums.items()}
        state.sums = {}
        self.lines.append(line)
        if self.wandb:
            wandb, self.wandb = self.wandb, None  # which stays so if this fails
            with extra("more of this run at wandb"):
                wandb.log(line, step=state.step)
                self.wandb = wandb
        if losses or state.consecutive_skips or time.monotonic() > self.next_write:
            self.write()

    def say_evaluation(self, losses, number):
        """Print held-out losses, and a sentence with the words that the model fills in."""
        where = f"{self.run.clock.elapsed() / 60:7.1f} min  step {self.run.state.step:6,}"
        at_15, at_25 = losses["val_loss_15"], losses["val_loss_25"]
        say(f"{where}  held-out loss {at_15:.3f} (15 %) {at_25:.3f} (25 %)")
        if number == max(1, self.run.settings["evals"] // 10):
            self.warn_if_none_learnt(losses)
        if self.samples:
            self.say_guesses([self.samples[number % len(self.samples)]])

    def say_guesses(self, sentences):
        """Print sentences, and the three likeliest words for the [MASK] of each."""
        for sentence in sentences:
            top = fill_masks(self.run.model, self.run.tokenizer, sentence, self.run.device)
            say(f"  {sentence}  " + ", ".join(f"{word} {p:.0%}" for word, p in top))

    def warn_if_none_learnt(self, losses):
        if not losses["val_loss_15"] < self.facts["frequency_loss"]:
            usual = f"guessing by token frequency ({self.facts['frequency_loss']:.3f})"
            say(f"WARNING: no better than {usual}: train longer, or lower the learning rates")

    def after_step(self, progress):
        """Move the bar; after ten seconds of training, say once what the run holds."""
        run, state, before = self.run, self.run.state, self.train_seconds
        self.train_seconds += state.recent["step"][-1]
        tokens = (state.rows_seen - self.first_row) * run.rows.seq_len
        speed = tokens / max(1e-9, self.train_seconds)  # of steps alone
        mfu = speed * run.flops_per_token / self.matmul_flops
        trained = run.clock.elapsed() - state.setup_seconds
        left = trained / max(progress, 1e-9) - trained
        self.bar = self.bar or Bar(total=1.0, bar_format="{percentage:3.0f}%|{bar}|{postfix}")
        said = f"step {state.step:,}  loss {state.last['loss']:.3f}  {speed:,.0f} tokens/s  "
        said += f"MFU {mfu:.0%}  {left / 60:.0f} min left"
        self.bar.set_postfix_str(said, refresh=False)
        self.bar.update(progress - self.bar.n)
        if before <= 10 < self.train_seconds:
            tokens = state.rows_seen * run.rows.seq_len + speed * left
            epochs = tokens / run.rows.seq_len / len(run.rows)
            share = (tokens + state.began_from.get("tokens", 0)) / self.facts["parameters"]
            held = f"{tokens / 1e6:,.1f}M tokens, {epochs:.2f} epochs, {share:.1f} per parameter"
            say(f"{speed:,.0f} tokens/s in steps: the run holds {held}")
            if share < 1:
                say("WARNING: few tokens per parameter: train longer, or take a smaller model")

    def report(self, losses, is_saved):
        """Say what the run was and what the model has learnt; without losses, how to go on."""
        run, state = self.run, self.run.state
        if self.bar:
            self.bar.close()
        if not losses:
            if is_saved:
                say(f"stopped at step {state.step:,}: --init=resume goes on")
            return
        epochs, tokens = state.rows_seen / len(run.rows), state.rows_seen * run.rows.seq_len
        words = epochs * run.meta["counts"]["words"] / 1e6
        steps = f"{state.step:,} steps, {state.skipped} of them skipped"
        read = f"{tokens:,} tokens, {words:.2f}M words, {epochs:.2f} epochs"
        seconds = run.clock.elapsed()
        speed = tokens / seconds  # all in, after a resume too
        mfu = speed * run.flops_per_token / self.matmul_flops
        took = f"{seconds:.0f} s, {state.setup_seconds:.0f} of them to set up"
        say(f"{steps}; {read}; {took}: {speed:,.0f} tokens/s all in, MFU {mfu:.0%}")
        at_15, at_25 = losses["val_loss_15"], losses["val_loss_25"]
        per_char = f"{losses['val_nats_per_char']:.4f} nats per character"
        say(f"held-out loss {at_15:.4f} at 15 % masked, {at_25:.4f} at 25 %; {per_char}")
        self.warn_if_none_learnt(losses)
        self.say_guesses(self.samples)
        if is_saved:
            say(f"{self.folder}: the model, log.csv, run.json, loss.png, ckpt.pt")
