"""log.csv, where a run writes its numbers, and loss.png, which shows them. To draw it anew:
python -c "from nanocram import runlog; runlog.plot('out/tiny')"
"""

import contextlib
import csv
import gc
import io
from pathlib import Path

from nanocram.safety import extra, set_aside, write_beside, write_text

COLUMNS = "elapsed_s step tokens flops loss val_loss_15 val_loss_25 val_nats_per_char".split()
COLUMNS += "lr batch_size mask_rate grad_norm skipped muon_lr".split()  # then what else there is


def read_log(folder, before_writing=False):
    """The lines of log.csv as [{column: number}], without empty fields and broken lines. Before it
    is written anew, one with anything else in it, a spreadsheet's, is set aside."""
    path = Path(folder) / "log.csv"
    text = path.read_text("utf-8-sig", "replace") if path.exists() else ""
    lines, n_cells = [], 0
    for cells in csv.DictReader(text.splitlines()):
        n_cells += sum(any(cell or "") for cell in cells.values())  # of one too many, a list
        line = {}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError, TypeError):
                line[name] = int(cell) if str(cell).isdecimal() else float(cell)
        if "step" in line and "elapsed_s" in line and None not in cells.values():  # it was cut
            lines.append(line)
    if before_writing and sum(map(len, lines)) < n_cells:
        set_aside(path, f"is not as train.py wrote it, and the run keeps {len(lines)} of its lines")
    return lines


@extra("new log.csv, its lines are kept")
def write_log(folder, lines):
    """Write log.csv, numbers with 6 digits; return True, or None where that failed."""
    text = io.StringIO()
    columns = {name: None for names in (COLUMNS, *lines) for name in names}
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in line.items()})
    write_text(folder / "log.csv", text.getvalue())
    return True


@extra("loss.png")
def plot(folder):
    """Draw loss.png from log.csv: losses by the clock. Without matplotlib there is none."""
    from matplotlib.figure import Figure

    if not (lines := read_log(folder)):
        return
    unit, seconds = ("hours", 3600) if lines[-1]["elapsed_s"] > 7200 else ("minutes", 60)
    axes = Figure(figsize=(8, 4.5), dpi=120, layout="constrained").subplots()

    def draw(column, **style):
        points = [(line["elapsed_s"] / seconds, line[column]) for line in lines if column in line]
        axes.plot(*zip(*points, strict=True), **style)

    draw("loss", color="0.75", lw=1, label="training, at the run's masking rate")
    draw("val_loss_25", color="tab:orange", marker="o", ms=3, label="held out, 25 % masked")
    draw("val_loss_15", color="tab:blue", marker="o", ms=3, label="held out, 15 % masked")
    axes.set_xlabel(f"wall clock ({unit}); {lines[-1]['tokens'] / 1e6:,.1f}M tokens")
    axes.set_ylabel("loss (nats per predicted token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    write_beside(Path(folder) / "loss.png", lambda path: axes.figure.savefig(path, format="png"))
    gc.collect()  # a figure is one large cycle; those of a long run made a process 50 MB larger
