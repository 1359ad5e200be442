"""Several recipes on the same data and the same clock: who reaches a loss first?

    python race.py config/small.py config/small.py+optimizer=adamw+lr=0.003 --data_dir=data/small --budget_hours=0.1
    python race.py config/crammed.py config/bert.py config/narrow.py --shrink=4,3,64 --data_dir=data/small
    python race.py --plot=out/a-0,out/a-1,out/b             # runs that are there already, seeds of one name together

A contender is a recipe, shrunk if that is asked for, then changed by what follows a +. Each runs as train.py in a
process of its own, one after the other in turns, seed by seed; settings of train.py on the command line hold for all.
What is there already is not run again. out_dir gets the runs, race.md (the table), race.csv (every run) and race.png.
"""

import contextlib
import csv
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from nanocram.configurator import configure, require, settings

data_dir = "data/small"  # what prepare.py wrote; its vocabulary and row length are everybody's
out_dir = "out/race"  # one folder a run, named after recipe, changes and seed
budget_hours = 0.1  # wall-clock hours of each run
seeds = 2  # runs of each contender
evals = 20  # evaluations in each run, besides the last
eval_rows = 384  # held-out rows in each
shrink = (
    ""  # LAYERS,WIDTH,BATCH: divide all by these (4,3,64: 16 x 768 at 8,192 rows -> 4 x 256 at 128)
)
plot = ""  # folders of runs, with commas between: compare these and run nothing

FLAGS = [arg for arg in sys.argv[1:] if arg.startswith("--")]
if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a typo are answered at once
    configure(globals(), FLAGS, also="train.py")

import train
from nanocram import record, safety
from nanocram.safety import write_beside

TRAIN = Path(__file__).with_name("train.py")
HELD_OUT = "val_loss_15"  # what a race is about
MICRO_BATCH = 32  # rows, of a shrunken run


@dataclass
class Contender:
    """A recipe with changes; runs: [(run.json, rows of log.csv)], one a seed."""

    name: str
    recipe: str
    changes: list
    runs: list = field(default_factory=list)


def contender(text):
    """The Contender of "RECIPE+name=value+…"; its name is that without folder and suffix."""
    recipe, *changes = text.split("+")
    if not Path(recipe).is_file():
        sys.exit(f"{recipe} not found: name a recipe, such as config/small.py")
    return Contender("+".join([Path(recipe).stem, *changes]), recipe, changes)


def shrunken(values, layers, width, batch):
    """Settings that make a recipe small by one rule: depth, heads (of the same size), MLP and batch each divided.

    Adam's learning rate grows as the width falls (arXiv 2203.03466, table 3); beside Muon it stays, as Muon's own does,
    though the README finds that it should grow too."""

    def rows(name):
        return MICRO_BATCH * max(1, round(values[name] / batch / MICRO_BATCH))

    heads, n_layer = (
        max(1, round(values["n_head"] / width)),
        max(2, round(values["n_layer"] / layers)),
    )
    return {
        "n_layer": n_layer,
        "n_narrow": min(n_layer - 1, round(values["n_narrow"] / layers)),
        "n_head": heads,
        "n_embd": heads * values["n_embd"] // values["n_head"],
        "n_inner": 64 * max(1, round(values["n_inner"] / width / 64)),
        "micro_batch": MICRO_BATCH,
        "batch_size": rows("batch_size"),
        "batch_start": rows("batch_start"),
        "lr": values["lr"] * (1 if values["optimizer"] == "muon" else width),
    }


def resolved(recipe, flags, check):
    """{name: value} of all settings of train.py with a recipe and flags; exits, as it would, if they cannot work."""
    before = {name: getattr(train, name) for name in settings(TRAIN)}
    vars(train).update({name: default for name, (default, _) in settings(TRAIN).items()})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            configure(
                vars(train), [recipe, *(f"--{name}={value}" for name, value in flags.items())]
            )
        if check:
            train.check_settings()
        return {name: getattr(train, name) for name in before}
    finally:
        vars(train).update(before)


def wanted(contender, common, seed):
    """(the settings on the command line of a contender's run, {name: text}; the values of all its settings)."""
    changes = dict(change.partition("=")[::2] for change in contender.changes)
    everyones = common | {"seed": seed, "out_dir": f"{out_dir}/{contender.name}-{seed}"}
    if same := changes.keys() & {*everyones, "init"}:
        sys.exit(
            f"{contender.name}: {same.pop()} is one for all contenders, set by race.py or its command line"
        )
    try:
        if shrink:
            values = resolved(contender.recipe, changes, check=False)
            changes = shrunken(values, *(float(part) for part in shrink.split(","))) | changes
        return changes | everyones, resolved(contender.recipe, changes | everyones, check=True)
    except SystemExit as e:
        sys.exit(f"{contender.name}: {e}")


def is_done(folder, values, data):
    """Whether folder holds a run with these settings on this data that came to its end."""
    try:
        facts = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return False
    return (
        folder.with_name(folder.name + ".txt").exists()
        and facts.get("data") == data
        and facts["settings"] == values
    )


def run(contender, flags, values, data):
    """Run train.py, unless that was done. Exits with the last line of its output if it did not come to its end."""
    folder = Path(flags["out_dir"])
    if is_done(folder, values, data):
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    printed = folder.with_name(folder.name + ".txt")  # there, and so named, once the run is over
    printed.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(TRAIN),
        contender.recipe,
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    running = folder.with_name(folder.name + ".running.txt")
    # an empty cache each, or only the first run of a graph would pay for compiling it
    with (
        open(running, "w", encoding="utf-8") as f,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
    ):
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        failed = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT, env=env).returncode
    last = (running.read_text(encoding="utf-8").strip().splitlines() or [""])[-1]
    if failed or last.startswith("stopped at step"):
        sys.exit(f"{' '.join(command[1:])} did not come to its end: {last}")
    running.rename(printed)
    print(f"{folder}: held-out loss {load_run(folder)[1][-1][HELD_OUT]:.3f}", flush=True)


def time_to(rows, loss):
    """Seconds at which the held-out loss first was that low, between two evaluations by a straight line; else None."""
    before = None
    for time, value in ((row["elapsed_s"], row[HELD_OUT]) for row in rows if HELD_OUT in row):
        if value <= loss:
            return (
                time
                if before is None
                else before[0] + (time - before[0]) * (before[1] - loss) / (before[1] - value)
            )
        before = (time, value)
    return None


def times_faster(rows, others):
    """How many times sooner than another a run is at the lowest loss that both reach; below 1 it is later."""
    goal = max(min(row[HELD_OUT] for row in run if HELD_OUT in row) for run in (rows, others))
    ours, theirs = time_to(rows, goal), time_to(others, goal)
    return theirs / ours if ours else float("inf")


def table(contenders):
    """Lines of markdown: medians over seeds, the range of the losses, and the time to a loss beside the first one."""
    lines = [
        "| recipe | parameters | MFLOP/token | tokens/s | steps | tokens | held-out loss at 15 % | at 25 % | "
        "sooner at a loss than the first by |",
        "| --- |" + " ---: |" * 8,
    ]
    for c in contenders:
        last = [rows[-1] for _, rows in c.runs]
        losses = sorted(row[HELD_OUT] for row in last)
        typical = {
            name: statistics.median(row[name] for row in last)
            for name in ("tokens", "step", "val_loss_25")
        }
        speed = statistics.median(row["tokens"] / row["elapsed_s"] for row in last)
        pairs = zip(c.runs, contenders[0].runs, strict=False)
        ratio = statistics.median(times_faster(a[1], b[1]) for a, b in pairs)
        size, work = c.runs[0][0]["parameters"] / 1e6, c.runs[0][0]["flops_per_token"] / 1e6
        lines.append(
            f"| {c.name} | {size:.1f}M | {work:,.1f} | {speed:,.0f} | {typical['step']:,.0f} | "
            f"{typical['tokens'] / 1e6:.1f}M | {statistics.median(losses):.3f} ({losses[0]:.3f} to "
            f"{losses[-1]:.3f}) | {typical['val_loss_25']:.3f} | {ratio:.2f} |"
        )
    return lines


def write_csv(contenders, path):
    """One line a run, with what made it."""
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        names = ("val_loss_15", "val_loss_25", "step", "tokens", "elapsed_s")
        writer.writerow(
            ["date", "device", "threads", "commit", "recipe", "seed", "budget_hours", *names]
        )
        for c in contenders:
            for facts, rows in c.runs:
                made = [
                    facts.get("date", ""),
                    facts["device"],
                    facts["threads"],
                    facts["commit"][:7],
                ]
                asked = [facts["settings"][name] for name in ("seed", "budget_hours")]
                writer.writerow([*made, c.name, *asked, *(rows[-1][n] for n in names)])


def load_run(folder):
    """(run.json, rows of log.csv) of a finished run; exits if folder holds none."""
    try:
        facts, rows = json.loads((Path(folder) / "run.json").read_text()), record.read_log(folder)
        rows[-1][HELD_OUT], facts["parameters"]
    except (OSError, ValueError, LookupError):
        sys.exit(
            f"{folder} holds no finished run of train.py: name one, or several with commas between"
        )
    return facts, rows


def drawn(folders):
    """Contenders of folders with runs; those that differ in their seed alone are one. Equal names become folders."""
    found = {}
    for folder in sorted(folders, key=lambda folder: load_run(folder)[0]["settings"]["seed"]):
        facts, rows = load_run(folder)
        name = Path(folder).name.removesuffix(f"-{facts['settings']['seed']}")
        recipe = str(facts["settings"] | {"seed": 0, "out_dir": name})
        found.setdefault(recipe, Contender(name, folder, [])).runs.append((facts, rows))
    names = [c.name for c in found.values()]
    return [
        c if names.count(c.name) == 1 else Contender(c.recipe, c.recipe, [], c.runs)
        for c in found.values()
    ]


def race(contenders):
    """Run all contenders on data_dir, in turns."""
    require(
        globals(),
        {
            "seeds": (1, 1000),
            "budget_hours": (1e-6, 1e6),
            "evals": (1, 10**6),
            "eval_rows": (1, 10**8),
        },
    )
    if not contenders or len({c.name for c in contenders}) < len(contenders):
        sys.exit(
            "name at least one recipe, each of them once: python race.py config/small.py config/crammed.py"
        )
    if shrink and not re.fullmatch(r"[1-9][\d.]*(,[1-9][\d.]*){2}", shrink):
        sys.exit(
            f"shrink={shrink} should be three numbers, like 4,3,64: by what to divide layers, width and batch"
        )
    try:
        meta = json.loads((Path(data_dir) / "meta.json").read_text())
        data = meta["sha256"]["train.bin"]
        common = {
            "data_dir": data_dir,
            "vocab_size": meta["vocab_size"],
            "seq_len": meta["seq_len"],
        }
    except (OSError, ValueError, LookupError):
        sys.exit(f"{data_dir} holds no data: run python prepare.py --data_dir={data_dir} first")
    common |= {"budget_hours": budget_hours, "evals": evals, "eval_rows": eval_rows}
    common |= {
        k: v for k, v in (flag[2:].split("=", 1) for flag in FLAGS) if k not in settings(__file__)
    }
    if taken := {"seed", "init"} & common.keys():
        sys.exit(
            f"{taken.pop()} is for race.py to set: leave it out (--seeds=3 runs seeds 0, 1 and 2)"
        )
    planned = [(c, *wanted(c, common, seed)) for seed in range(seeds) for c in contenders]
    for c, flags, values in planned:
        run(c, flags, values, data)
        c.runs.append(load_run(flags["out_dir"]))


def main():
    folder = Path(out_dir)
    if (folder / "race.md").exists() and not (folder / "race.csv").exists():
        sys.exit(
            f"{folder}/race.md is there without a race.csv: it is not ours, choose another --out_dir"
        )
    if plot:
        contenders = drawn(plot.split(","))
    else:
        contenders = [contender(text) for text in sys.argv[1:] if not text.startswith("--")]
        race(contenders)
    folder.mkdir(parents=True, exist_ok=True)
    lines = table(contenders)
    print("", *lines, "", sep="\n")
    write_beside(folder / "race.csv", lambda path: write_csv(contenders, path))
    write_beside(
        folder / "race.md", lambda path: path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    )
    record.overlay(
        {c.name: [rows for _, rows in c.runs] for c in contenders}, HELD_OUT, folder / "race.png"
    )
    print(f"{folder}: race.md (this table), race.csv (every run), race.png")


if __name__ == "__main__":
    safety.run(main, out_dir, "the same command does the runs that are missing")
