"""Several recipes on the same data and the same clock: who reaches a loss first?

    python race.py config/small.py config/small.py+optimizer=adamw+lr=0.003 --data_dir=data/small
    python race.py config/crammed.py+config/shrunk.py config/bert.py+config/shrunk.py

A contender is a recipe and what follows a +: further recipes and changes, in their order. Settings
of train.py on the command line (--name=value) hold for all. The same command again runs only what
is not there already.
"""

import contextlib
import csv
import io
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nanocram.configurator import configure, require

# fmt: off
data_dir = "data/small"    # what prepare.py wrote; its vocabulary and row length are everybody's
out_dir = "out/race"       # one folder a run, named after recipe, changes and seed
budget_hours = 0.1         # wall-clock hours of each run
seeds = 2                  # runs of each contender
evals = 20                 # evaluations in each run, besides the last
eval_rows = 384            # held-out rows in each
# fmt: on

import train

FLAGS = [arg for arg in sys.argv[1:] if arg.startswith("-")]
SETTINGS = configure(globals(), FLAGS if __name__ == "__main__" else [], also=train)

from nanocram import machine, record, safety
from nanocram.data import load_meta

HELD_OUT = "val_loss_15"  # what a race is about
TABLE_HEAD = (
    "| recipe | parameters | MFLOP/token | tokens/s | steps | tokens "
    "| held-out loss at 15 % | at 25 % | sooner at a loss than the first by |"
)


def parse_contenders(texts):
    """{name: [recipe, --name=value, ...]} of ["RECIPE+name=value+...", ...]."""
    contenders = {}
    for text in texts:
        name, argv = [], []
        for number, part in enumerate(text.split("+")):
            is_recipe = part.endswith(".py") or number == 0
            if is_recipe and not Path(part).is_file():
                sys.exit(f"{part} not found: name a recipe, such as config/small.py")
            name.append(Path(part).stem if is_recipe else part)
            argv.append(part if is_recipe else f"--{part}")
        contenders["+".join(name)] = argv
    if not texts or len(contenders) < len(texts):
        sys.exit("name at least one recipe, each of them once, such as config/small.py")
    return contenders


def set_train(argv):
    """Set train's globals as train.py would with argv; returns all settings, {name: value}."""
    vars(train).update(train.SETTINGS)
    with contextlib.redirect_stdout(io.StringIO()):
        configure(vars(train), argv)
    return {name: getattr(train, name) for name in train.SETTINGS}


def common_settings(meta):
    """Settings that hold for all, {name: value}: the data's sizes, ours, train.py's as typed."""
    common = {"vocab_size": meta["vocab_size"], "seq_len": meta["seq_len"]}
    common |= {name: globals()[name] for name in ("data_dir", "budget_hours", "evals", "eval_rows")}
    for flag in FLAGS:
        name, _, value = flag.removeprefix("--").partition("=")
        if name in ("seed", "init"):
            sys.exit(f"{name} is for race.py to set: --seeds=3 runs seeds 0, 1 and 2")
        if name not in SETTINGS:
            common[name] = value
    return common


def check_run(name, contender, common):
    """(arguments of a run of train.py, all its settings); exits if train.py would not take them."""
    for change in contender:
        changed = change.removeprefix("--").partition("=")[0]
        if changed in common or changed == "init":
            sys.exit(f"{name}: {changed} is one for all contenders, set by race.py")
    try:
        argv = [*contender, *(f"--{key}={value}" for key, value in common.items())]
        values = set_train(argv)
        train.check_settings()
    except SystemExit as error:
        sys.exit(f"{name}: {error}")
    return argv, values


def run_train(argv, values, data):
    """Run train.py unless that was done with all settings `values` on rows of checksum `data`."""
    folder = Path(values["out_dir"])
    printed = folder.with_name(folder.name + ".txt")  # called .running.txt until the run is over
    facts = record.read_facts(folder)
    # micro_batch may have been halved until a step fitted, compile put off where nothing compiles.
    # A setting that is newer than the run had its default.
    asked = train.SETTINGS | facts.get("settings", {})
    asked |= {"micro_batch": facts.get("asked_micro_batch")}
    asked |= {"compile": facts.get("asked_compile")}
    if printed.exists() and facts.get("data") == data and asked == values:
        code, today = facts.get("code"), machine.code_hash(train.__file__)
        print(f"{folder} is there already")
        if code and code != today:
            print(f"it is by code {code}, today's is {today}: delete it to have it run anew")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    printed.unlink(missing_ok=True)
    running = folder.with_name(folder.name + ".running.txt")
    command = [sys.executable, train.__file__, *argv]
    # Inductor's cache is empty for each, or only the first run of a graph would pay for compiling.
    with (
        open(running, "w", encoding="utf-8") as output,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
    ):
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    last = running.read_text(encoding="utf-8").strip().rpartition("\n")[2]
    if ended.returncode or last.startswith("stopped at step"):
        sys.exit(f"{' '.join(command[1:])} did not come to its end: {last}")
    running.rename(printed)


def load_run(folder):
    """(run.json, the rows of log.csv with a held-out loss) of a finished run."""
    rows = [row for row in record.read_log(folder) if HELD_OUT in row]
    if not rows:
        sys.exit(f"{folder} has lost its log.csv: delete the folder, and type the same again")
    print(f"{folder}: held-out loss {rows[-1][HELD_OUT]:.3f}", flush=True)
    return record.read_facts(folder), rows


def time_to(rows, loss):
    """Seconds when the held-out loss, straight between evaluations, first is so low; or None."""
    if rows[0][HELD_OUT] <= loss:
        return rows[0]["elapsed_s"]
    for before, row in itertools.pairwise(rows):
        if row[HELD_OUT] <= loss:
            share = (before[HELD_OUT] - loss) / (before[HELD_OUT] - row[HELD_OUT])
            return before["elapsed_s"] + share * (row["elapsed_s"] - before["elapsed_s"])
    return None


def times_faster(rows, other_rows):
    """How many times sooner than another a run is at the lowest loss that both reach."""
    lowest = min(row[HELD_OUT] for row in rows)
    other_lowest = min(row[HELD_OUT] for row in other_rows)
    loss = max(lowest, other_lowest)
    ours, theirs = time_to(rows, loss), time_to(other_rows, loss)
    return theirs / ours if ours else math.inf


def markdown_table(runs):
    """Lines of markdown: medians over seeds, the range of the losses, and how much sooner.

    runs: {contender: [(run.json, rows with a held-out loss), ...]}, one a seed."""
    lines = [TABLE_HEAD, "| --- |" + " ---: |" * 8]
    first = next(iter(runs.values()))
    for name, of_one in runs.items():
        facts, _ = of_one[0]
        ends = [rows[-1] for _, rows in of_one]
        losses = [row[HELD_OUT] for row in ends]
        columns = ("step", "tokens", HELD_OUT, "val_loss_25")
        median = {column: statistics.median(row[column] for row in ends) for column in columns}
        speed = statistics.median(row["tokens"] / row["elapsed_s"] for row in ends)
        pairs = zip(of_one, first, strict=True)
        sooner = statistics.median(times_faster(a, b) for (_, a), (_, b) in pairs)
        lines.append(
            f"| {name} | {facts['parameters'] / 1e6:.1f}M "
            f"| {facts['flops_per_token'] / 1e6:,.1f} | {speed:,.0f} "
            f"| {median['step']:,.0f} | {median['tokens'] / 1e6:.1f}M "
            f"| {median[HELD_OUT]:.3f} ({min(losses):.3f} to {max(losses):.3f}) "
            f"| {median['val_loss_25']:.3f} | {sooner:.2f} |"
        )
    return lines


def write_csv(runs, path):
    """One line a run, with what made it."""
    columns = "date device threads commit recipe seed budget_hours".split()
    columns += "val_loss_15 val_loss_25 step tokens elapsed_s".split()
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for name, of_one in runs.items():
            for facts, rows in of_one:
                commit, dash, dirty = facts["commit"].partition("-")
                row = facts["settings"] | facts | rows[-1]
                row |= {"recipe": name, "commit": commit[:7] + dash + dirty}
                writer.writerow(row)


def main():
    folder = Path(out_dir)
    require(globals(), {"seeds": (1, 1000)})
    contenders = parse_contenders([arg for arg in sys.argv[1:] if not arg.startswith("--")])
    meta = load_meta(data_dir)
    common = common_settings(meta)

    # All settings are checked before the first run begins: hours are at stake. Contenders take
    # turns, so that what else the machine does hits all.
    checked = []
    for seed in range(seeds):
        for name, contender in contenders.items():
            own = {"seed": seed, "out_dir": f"{out_dir}/{name}-{seed}"}
            checked.append((name, *check_run(name, contender, common | own)))
    runs = {name: [] for name in contenders}
    for name, argv, values in checked:
        run_train(argv, values, meta["sha256"]["train.bin"])
        runs[name].append(load_run(values["out_dir"]))

    table = "\n".join(markdown_table(runs)) + "\n"
    print(f"\n{table}")
    safety.write_beside(folder / "race.csv", lambda path: write_csv(runs, path))
    safety.write_text(folder / "race.md", table)
    logs = {name: [rows for _, rows in of_one] for name, of_one in runs.items()}
    record.overlay(logs, HELD_OUT, folder / "race.png")
    print(f"{folder}: race.md (this table), race.csv (every run), race.png")


if __name__ == "__main__":
    safety.run(main, out_dir, "the same command does the runs that are missing")
