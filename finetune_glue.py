"""Fine-tune a pre-trained model on GLUE by the protocol of the paper, several seeds a task, and print where it stands.

    python finetune_glue.py --model=out/fineweb_edu                       # eight tasks, five seeds, data from the Hub
    python finetune_glue.py --model=out/tiny --glue_dir=path/to/GLUE --tasks=cola,rte --seeds=1
    python finetune_glue.py --model=out/fineweb_edu --baseline=scratch    # what the pre-training was worth

One set of hyper-parameters for all tasks (arXiv 2212.14034, section 5), each task's own training data and nothing else,
the score after the last epoch, the median over seeds. The model's folder gets glue.md, the table, and glue.json, every
seed's scores; a run that was stopped goes on behind the last (task, seed) that is in there.
"""

import difflib
import hashlib
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from configurator import configure, require, settings

model = "out/fineweb_edu"    # folder of a run of train.py; the results go there too
glue_dir = ""                # folder of the official files (CoLA/train.tsv, …), perhaps gzipped; '' = from the Hub
tasks = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte"  # the paper leaves out wnli; it can be named
seeds = 5                    # fine-tunings of each task: of the fresh layers, the dropout and the order of the rows
epochs = 5                   # passes over a task's training data
baseline = ""                # instead of the model: scratch (the same without pre-training) | hf:PATH_OR_NAME
predict_test = False         # write the files for gluebenchmark.com too
glue_batch = 16              # rows per optimiser step
glue_lr = 4e-5               # peak learning rate of AdamW
glue_warmup = 0.1            # share of the steps in which it rises; then a cosine down to 0
glue_beta2 = 0.98            # of AdamW; beta1 is 0.9
glue_eps = 1e-6              # of AdamW
glue_weight_decay = 0.0      # of AdamW, decoupled
glue_dropout = 0.1           # in the blocks and before the classifier
glue_seq_len = 128           # longest input in tokens, a multiple of 8; what is longer is cut
hf_batch = 32                # rows per optimiser step of --baseline=hf:…, as the paper did with BERT
hf_lr = 2e-5                 # and its peak learning rate
glue_cache = "data/glue_tokens"  # folder of the tokenised data; '' = tokenise anew every time
device = "auto"              # auto | cuda | mps | cpu
dtype = "auto"               # auto | bfloat16 | float16 | float32: of the matrix products; weights stay float32

if __name__ == "__main__":  # before the heavy imports, so that --help and a typo are answered at once
    configure(globals())

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import glue
import machine
import record
from model import Classifier, MaskedLM, load, write_beside
from tokenizer import CLS, PAD, SEP, Tokenizer

PROTOCOL = ("epochs", "glue_batch", "glue_lr", "glue_warmup", "glue_beta2", "glue_eps", "glue_weight_decay",
            "glue_dropout", "glue_seq_len", "hf_batch", "hf_lr", "dtype")  # fmt: skip
POOL = 64  # batches' worth of shuffled rows that are sorted by length together


@dataclass
class System:
    """What is fine-tuned: this model, the same without pre-training, or one of transformers'."""

    name: str
    weights: str  # fingerprint of what fine-tuning starts from
    tokenizer: str  # fingerprint
    encode: Callable  # [(sentence,) or (first, second), …] -> [(ids, how many of them belong to the first), …]
    pad: int
    two_types: bool  # whether it tells the first sentence from the second by token types
    build: Callable  # number of outputs -> module: (ids, attention_mask, token_types) -> outputs
    batch: int
    lr: float


def fingerprint(*parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
    return digest.hexdigest()[:16]


def truncated(lengths, limit):
    """How much of one or two texts of these lengths fits into limit tokens: the longer gives first."""
    short = min(*lengths, limit // 2) if len(lengths) == 2 else 0
    long = min(max(lengths), limit - short)
    return [long] if len(lengths) == 1 else [short, long] if lengths[0] <= lengths[1] else [long, short]


def ours(folder, scratch):
    """The System of a model folder of train.py; exits with one line if it is none, or its parts do not match."""
    try:
        pretrained, tokenizer = load(folder), Tokenizer(Path(folder) / "tokenizer.json")
    except ValueError as e:
        sys.exit(str(e))
    config = replace(pretrained.config, dropout=glue_dropout)
    if tokenizer.vocab_size != config.vocab_size:
        sys.exit(f"{folder}: the tokenizer has {tokenizer.vocab_size} entries, the model {config.vocab_size}: they do "
                 "not belong together, copy tokenizer.json from the data_dir of the run")  # fmt: skip
    if (most := config.max_seq_len) < glue_seq_len:
        sys.exit(f"{folder} takes at most {most} tokens: type --glue_seq_len={most // 8 * 8}")

    def encode(texts):
        for text in texts:
            parts = [tokenizer.encode(t) for t in text]
            keep = truncated([len(p) for p in parts], glue_seq_len - 1 - len(parts))
            closed = [np.append(p[:n], SEP) for p, n in zip(parts, keep, strict=True)]
            yield np.concatenate(([CLS], *closed)), 1 + len(closed[0])

    def build(n_outputs):
        masked_lm = MaskedLM(config)
        if not scratch:
            masked_lm.load_state_dict(pretrained.state_dict())
        return Classifier(masked_lm, n_outputs, glue_dropout)

    weights = json.dumps(asdict(config)) if scratch else (Path(folder) / "model.safetensors").read_bytes()
    name = Path(folder).resolve().name + " without pre-training" * scratch
    key = fingerprint((Path(folder) / "tokenizer.json").read_bytes())
    return System(name, fingerprint(weights), key, encode, PAD, config.token_types > 1, build, glue_batch, glue_lr)


class HuggingFace(nn.Module):
    """A classifier of transformers with the signature of ours."""

    def __init__(self, name, n_outputs):
        from transformers import AutoModelForSequenceClassification as Auto

        super().__init__()
        self.model = Auto.from_pretrained(name, num_labels=n_outputs, dtype=torch.float32)

    def forward(self, ids, attention_mask, token_types):
        types = {} if token_types is None else {"token_type_ids": token_types}
        return self.model(input_ids=ids, attention_mask=attention_mask, **types).logits


def hugging_face(name):
    """The System of an encoder of transformers, a folder or a name on the Hub."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()  # or each fine-tuning tells that the classifier is new
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(name)
        entries = HuggingFace(name, 2).model.config.vocab_size
    except ImportError:
        sys.exit("--baseline=hf:… needs a package: pip install transformers")
    except Exception as e:
        sys.exit(f"transformers cannot load {name}: {(str(e).strip() or repr(e)).splitlines()[0]:.200}")
    if tokenizer.pad_token_id is None or len(tokenizer) > entries:
        sys.exit(f"{name}: its tokenizer has {len(tokenizer)} entries, the model {entries}, or it knows no padding")
    two_types = "token_type_ids" in tokenizer.model_input_names

    def encode(texts):
        columns = [list(column) for column in zip(*texts, strict=True)]
        batch = tokenizer(*columns, truncation=True, max_length=glue_seq_len, return_token_type_ids=two_types)
        ids = batch["input_ids"]
        types = batch["token_type_ids"] if two_types else ids
        return [(np.array(i), t.count(0) if two_types else len(i)) for i, t in zip(ids, types, strict=True)]

    def build(n_outputs):
        return HuggingFace(name, n_outputs)

    key = fingerprint(tokenizer.backend_tokenizer.to_str())
    return System(name, fingerprint(name), key, encode, tokenizer.pad_token_id, two_types, build, hf_batch, hf_lr)


def tokenised(system, task, split):
    """{"ids" (all tokens, one row behind the other), "length", "first", "labels"} of a split, arrays, from the cache.

    Raises what glue.read raises."""
    part = glue.AX if task == "ax" else glue.TASKS[task]
    source = glue.find(part, split, glue_dir).read_bytes() if glue_dir else "hub"
    key = fingerprint(system.tokenizer, glue_seq_len, task, split, source)
    path = Path(glue_cache) / f"{task}-{split}-{key}.npz"
    if glue_cache and path.exists():
        try:
            with np.load(path) as arrays:
                return dict(arrays)
        except Exception:  # a damaged cache is no cache
            path.unlink()
    texts, labels = glue.read(task, split, glue_dir)
    rows = list(system.encode(texts))
    arrays = {"ids": np.concatenate([ids for ids, _ in rows]).astype(np.int32),
              "length": np.array([len(ids) for ids, _ in rows]), "first": np.array([first for _, first in rows]),
              "labels": np.zeros(0) if labels is None else labels}  # fmt: skip

    def write(temporary):
        with open(temporary, "wb") as f:  # np.savez would add its own suffix to a path
            np.savez(f, **arrays)

    if glue_cache:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path, write)
    return arrays


class Data:
    """A split on the device; batches are gathered there, so that a step moves only the numbers of its rows."""

    def __init__(self, arrays, pad, two_types, dev):
        self.length, self.pad, self.two_types, self.dev = arrays["length"], pad, two_types, dev
        start = np.cumsum(self.length) - self.length
        self.ids, self.start, self.end, self.first = (
            torch.from_numpy(a).to(dev) for a in (arrays["ids"], start, start + self.length, start + arrays["first"])
        )
        labels = torch.from_numpy(arrays["labels"])
        self.labels = (labels.float() if labels.is_floating_point() else labels).to(dev)

    def width(self, rows):
        """The longest of rows, rounded up to a multiple of 8."""
        return int(-(-self.length[rows].max() // 8) * 8)

    def batch(self, rows):
        """(ids, attention_mask, token_types) (B, T) of rows; the mask is None where nothing is padded."""
        which, T = torch.from_numpy(rows).to(self.dev, non_blocking=True), self.width(rows)
        at = self.start[which, None] + torch.arange(T, device=self.dev)  # (B, T)
        real = at < self.end[which, None]
        ids = self.ids[at.clamp_(max=len(self.ids) - 1)].long().masked_fill_(~real, self.pad)
        types = ((at >= self.first[which, None]) & real).long() if self.two_types else None
        return ids, None if self.length[rows].min() == T else real, types


def batches(length, size, seed):
    """One epoch: shuffled row numbers in batches of similar length, in random order; an incomplete batch is dropped."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(length))
    rows = rows[: len(rows) - len(rows) % size] if len(rows) > size else rows
    pools = (rows[i : i + POOL * size] for i in range(0, len(rows), POOL * size))
    rows = np.concatenate([pool[np.argsort(length[pool], kind="stable")] for pool in pools])
    epoch = np.split(rows, range(size, len(rows), size))
    return [epoch[i] for i in rng.permutation(len(epoch))]


def lr_share(step, steps):
    """Learning rate as a share of its peak: a linear warm-up, then a cosine from 1 to 0."""
    warm = int(glue_warmup * steps)
    return step / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))


def train(system, net, data, seed, amp_dtype, tick):
    """Fine-tune net on data; returns the facts of it. tick(tokens) is called after each step."""
    dev, start = data.dev, time.perf_counter()
    optimizer = torch.optim.AdamW(net.parameters(), system.lr, (0.9, glue_beta2), glue_eps, glue_weight_decay,
                                  fused=dev.type in ("cuda", "cpu"))  # fmt: skip
    scaler = torch.amp.GradScaler(dev.type, enabled=amp_dtype == torch.float16)
    steps = [rows for epoch in range(epochs) for rows in batches(data.length, system.batch, (seed, epoch))]
    loss = torch.zeros(())
    net.train()
    for step, rows in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = system.lr * lr_share(step, len(steps))
        with torch.autocast(dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
            outputs = net(*data.batch(rows)).float()  # (B, outputs)
        labels = data.labels[torch.from_numpy(rows).to(dev, non_blocking=True)]
        loss = F.cross_entropy(outputs, labels) if labels.dtype == torch.int64 else F.mse_loss(outputs[:, 0], labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        tick(int(data.length[rows].sum()))
    loss.item()  # waits for the device, here alone
    seconds, rows = time.perf_counter() - start, sum(map(len, steps))
    padded = 1 - float(sum(data.length[r].sum() for r in steps) / sum(len(r) * data.width(r) for r in steps))
    return {"seconds": round(seconds, 2), "rows_per_second": round(rows / seconds, 1), "padded": round(padded, 4)}


@torch.inference_mode()
def predict(net, data, amp_dtype):
    """Outputs (N, n_outputs) for the rows of data, an array."""
    order, outputs = np.argsort(data.length, kind="stable"), []
    net.eval()
    for rows in np.split(order, range(64, len(order), 64)):
        with torch.autocast(data.dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
            outputs.append(net(*data.batch(rows)).float())
    outputs = torch.cat(outputs).cpu().numpy()
    if not np.isfinite(outputs).all():
        sys.exit("the fine-tuned model gives numbers that are not finite: try --dtype=float32 or a smaller --glue_lr")
    return outputs[np.argsort(order)]


def check_settings():
    """The names of the tasks; exits with one line for settings that cannot work."""
    require(globals(), {
        "seeds": (1, 1000), "epochs": (1, 1000), "glue_batch": (1, 65536), "glue_lr": (0, 1), "glue_warmup": (0, 0.9),
        "glue_beta2": (0, 0.99999), "glue_eps": (0, 1), "glue_weight_decay": (0, 1e3), "glue_dropout": (0, 0.9),
        "glue_seq_len": (16, 65536), "hf_batch": (1, 65536), "hf_lr": (0, 1),
        "device": ("auto", "cuda", "mps", "cpu"), "dtype": ("auto", "bfloat16", "float16", "float32"),
    })  # fmt: skip
    if glue_seq_len % 8:
        sys.exit(f"glue_seq_len={glue_seq_len} is no multiple of 8: type --glue_seq_len={glue_seq_len // 8 * 8}")
    if baseline not in ("", "scratch") and not baseline[3:] * baseline.startswith("hf:"):
        sys.exit(f"baseline={baseline} is unknown: type --baseline=scratch, or --baseline=hf:PATH_OR_NAME")
    if glue_dir and not Path(glue_dir).is_dir():
        sys.exit(f"{glue_dir} is no folder: --glue_dir is one with CoLA/train.tsv and so on, '' takes the Hub's data")
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    for name in (name for name in names if name not in glue.TASKS):
        near = difflib.get_close_matches(name.lower().replace("-", ""), glue.TASKS, 1) or ["one of", *glue.TASKS]
        sys.exit(f"there is no task {name!r}: did you mean {' '.join(near)}?")
    return names


def read_all(system, names):
    """{task: {split, or file of a submission: arrays}}; says which tasks and files are missing and leaves them out."""
    result = {}
    for name in names:
        task = glue.TASKS[name]
        wanted = {split: (name, split) for split in task.rows if not split.startswith("test")}
        answers = {file: where for file, where in glue.SUBMISSION.items() if where[0] == name and predict_test}
        try:
            result[name] = {split: tokenised(system, *where) for split, where in wanted.items()}
        except FileNotFoundError as e:
            print(f"{name} is left out: {e}")
            continue
        for file, (_, split) in answers.items():
            try:
                result[name][file] = tokenised(system, "ax" if split == "diagnostic" else name, split)
            except FileNotFoundError as e:
                print(f"{file} is left out: {e}")
    if not result:
        sys.exit("no task is left: point --glue_dir to a folder with the official files, or '' to take the Hub's")
    return result


def row_counts(name, splits):
    return {split: len(arrays["length"]) for split, arrays in splits.items() if split in glue.TASKS[name].rows}


def is_done(run, name, seed, splits, answers):
    """Whether run is this one, of as many rows, and the answers to its test sets are there as it wrote them."""
    paths = {file: answers / f"seed{seed}" / file for file in splits if file in glue.SUBMISSION}
    found = {file: fingerprint(path.read_bytes()) for file, path in paths.items() if path.exists()}
    kept = {file: run.get("predictions", {}).get(file) for file in paths}
    return (run["task"], run["seed"], run["rows"]) == (name, seed, row_counts(name, splits)) and found == kept


def run_once(system, name, seed, splits, answers, dev, amp_dtype, tick):
    """Fine-tune and evaluate one task with one seed, write its answers to the test sets; the run, as in glue.json."""
    task, data = glue.TASKS[name], {s: Data(a, system.pad, system.two_types, dev) for s, a in splits.items()}
    torch.manual_seed(seed)
    net = system.build(task.n_outputs).to(dev)
    run = {"task": name, "seed": seed, "scores": {}, "rows": row_counts(name, splits)}
    run |= train(system, net, data["train"], seed, amp_dtype, tick)
    for split in (s for s in splits if s != "train"):
        outputs = predict(net, data[split], amp_dtype)
        if split in glue.SUBMISSION:
            path = answers / f"seed{seed}" / split
            glue.write_predictions(path, glue.AX if split == "AX.tsv" else task, outputs)
            run.setdefault("predictions", {})[split] = fingerprint(path.read_bytes())
        else:
            scores = glue.score(name, splits[split]["labels"], outputs)
            run["scores"] |= {key + "_mm" * split.endswith("mismatched"): value for key, value in scores.items()}
    return run


def main():
    from tqdm import tqdm

    names, folder = check_settings(), Path(model)
    dev, amp_dtype = machine.pick(device, dtype)
    if not folder.is_dir():
        sys.exit(f"{model} not found: name the folder of a run of train.py, --model=out/NAME")
    foreign = baseline.startswith("hf:")
    system = hugging_face(baseline[3:]) if foreign else ours(model, baseline == "scratch")
    print(f"{system.name} on {dev.type} in {amp_dtype}: {epochs} epochs, batch {system.batch}, AdamW {system.lr:g}, "
          f"dropout {'its own' if foreign else glue_dropout}, {glue_seq_len} tokens", flush=True)  # fmt: skip
    answers = folder / "_".join(["submission", *re.findall(r"\w+", baseline)])
    try:
        splits = read_all(system, names)
    except ValueError as e:
        sys.exit(str(e))
    protocol = {key: globals()[key] for key in PROTOCOL}
    changed = [f"{key}={value}" for key, value in protocol.items() if value != settings(__file__)[key][0]]
    entry = {"system": ", ".join([system.name, *changed]), "weights": system.weights, "protocol": protocol,
             "machine": machine.describe(dev)}  # fmt: skip
    runs, every = record.glue_runs(folder, entry), [(name, seed) for name in splits for seed in range(seeds)]
    todo = [job for job in every if not any(is_done(run, *job, splits[job[0]], answers) for run in runs)]
    if len(todo) < len(every):
        print(f"{len(every) - len(todo)} of {len(every)} fine-tunings are in {folder}/glue.json already")
    total = sum(int(splits[name]["train"]["length"].sum()) * epochs for name, _ in todo)
    bar = tqdm(total=total, unit=" tokens", unit_scale=True, disable=None, smoothing=0.02)
    for name, seed in todo:
        bar.set_description(f"{name}, seed {seed}")
        run = run_once(system, name, seed, splits[name], answers, dev, amp_dtype, bar.update)
        runs = record.add_glue_run(folder, entry, run)
        words = ", ".join(f"{key} {value:.1f}" for key, value in run["scores"].items())
        bar.write(f"{name}, seed {seed}: {words}  ({run['seconds']:.0f} s, {run['rows_per_second']:,.0f} rows/s, "
                  f"{run['padded']:.0%} padding)")  # fmt: skip
    bar.close()
    if predict_test:
        glue.write_submission(answers, runs)
    print("", *glue.table(record.glue_table(folder)), "", sep="\n")
    print(f"{folder}: glue.md (this table, and each score's spread), glue.json")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped: the same command goes on with the fine-tuning that was cut short")
    except OSError as e:
        sys.exit(f"{e.filename or model}: {e.strerror or e}")
    except torch.OutOfMemoryError:
        sys.exit(f"out of memory: type --glue_batch={max(1, glue_batch // 2)} (that is no longer the paper's protocol)")
