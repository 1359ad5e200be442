"""Fine-tune a pre-trained model on GLUE by the paper's protocol, several seeds a task.

    python finetune_glue.py --model=out/fineweb                         # eight tasks, from the Hub
    python finetune_glue.py --model=out/tiny --glue_dir=path/to/GLUE --tasks=cola,rte --seeds=1
    python finetune_glue.py --model=out/fineweb --baseline=scratch      # the pre-training's worth
    for s in 0 1 2 3 4; do
      python finetune_glue.py --model=out/fineweb --seeds=1 --first_seed=$s &
    done; wait                                                          # five at once, on a GPU

The protocol is that of arXiv 2212.14034, section 5; docs/how_it_works.md says where it is not. The
model's folder gets glue.md, the table, and glue.jsonl, a line a run; after a stop the same command
does what is not in there yet. Steps this small should leave a GPU waiting, so that there
five processes share out the seeds; on a CPU they would fight for the cores.
"""

import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nanocram.configurator import configure, require

# fmt: off
model = "out/fineweb"      # folder of a run of train.py; the results go there too
glue_dir = ""              # folder of the official files (CoLA/train.tsv, perhaps .gz); '' = Hub
tasks = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte"  # wnli, which the paper leaves out, can be named
seeds = 5                  # fine-tunings of each task: fresh layers, dropout, order of rows differ
first_seed = 0             # number of the first one: other processes may do others, for one table
epochs = 5                 # passes over a task's training data
baseline = ""              # instead of model: scratch | hf:PATH_OR_NAME | hf:…-untrained
save_models = False        # keep the classifier of each task's seed 0, as MODEL/TASK
glue_batch = 16            # rows per optimiser step
glue_lr = 4e-5             # peak learning rate of AdamW
glue_warmup = 0.1          # share of the steps in which it rises
glue_schedule = "cosine"   # cosine | linear: how it then falls to 0
glue_beta2 = 0.98          # of AdamW; beta1 is 0.9
glue_eps = 1e-6            # of AdamW
glue_weight_decay = 0.0    # of AdamW, decoupled; not of norms and biases
glue_pooling = "cls"       # what the classifier reads: cls | mean (over all tokens)
glue_dropout = 0.1         # in the blocks and before the classifier
glue_seq_len = 128         # longest input in tokens; what is longer is cut
hf_batch = 32              # rows per step of --baseline=hf:…, as the paper did with BERT
hf_lr = 2e-5               # and its peak learning rate
device = "auto"            # auto | cuda | mps | cpu
dtype = "auto"             # auto | bfloat16 | float16 | float32: of the matrix products
# fmt: on

SETTINGS = configure(globals())  # before the heavy imports, so that --help is quick

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from tqdm import tqdm

from model import Classifier, MaskedLM, mixed_precision
from nanocram import glue, machine, model_folder, record, safety
from nanocram.data import Ragged, batches_by_length
from nanocram.tokenizer import CLS, PAD, SEP, Tokenizer, truncated

# The paper's values, those of BERT for --baseline=hf:…; a table names what a run did otherwise.
# fmt: off
PAPER = {"epochs": 5, "glue_warmup": 0.1, "glue_schedule": "cosine", "glue_beta2": 0.98,
         "glue_eps": 1e-6, "glue_weight_decay": 0.0, "glue_seq_len": 128}
PAPER_OURS = PAPER | {"glue_batch": 16, "glue_lr": 4e-5, "glue_dropout": 0.1, "glue_pooling": "cls"}
PAPER_BERT = PAPER | {"hf_batch": 32, "hf_lr": 2e-5}
# fmt: on
LINE_SECONDS = 180.0  # between two lines about progress where there is no terminal
CODE = machine.code_hash(__file__)  # what made a run, as it was when this began


@dataclass
class Candidate:
    """What is fine-tuned: our model, the same without pre-training, or one of transformers'."""

    name: str
    weights: str  # fingerprint of all that fine-tuning starts from
    encode: Callable  # [(sentence,) or (first, second), …] -> rows: (ids, length of the first)
    build: Callable  # number of outputs -> module: (ids, attention_mask, token_type_ids) -> outputs
    pad: int
    two_types: bool  # whether token types tell the first sentence from the second
    batch: int
    lr: float
    paper: dict  # settings of the paper that apply to it


def check_length(name, longest):
    """Exit if a model cannot read glue_seq_len tokens, padded to a multiple of 8; 0: no limit."""
    most = longest // 8 * 8
    if 0 < most < glue_seq_len:
        sys.exit(f"{name} takes at most {longest} tokens: type --glue_seq_len={most}")


def our_candidate(folder, scratch):
    """The Candidate of a model folder of train.py; exits if it is none."""
    folder = Path(folder)
    try:
        pretrained = model_folder.load(folder)
    except ValueError as e:
        sys.exit(str(e))
    tokenizer = Tokenizer(folder / "tokenizer.json")
    if isinstance(pretrained, Classifier):
        sys.exit(f"{folder} is fine-tuned already: name the folder that train.py wrote")
    config = replace(pretrained.config, dropout=glue_dropout)
    check_length(folder, config.max_seq_len)

    def encode(texts):
        for text in texts:
            parts = [tokenizer.encode(part) for part in text]
            # Beside one [CLS] and one [SEP] for each part.
            keep = truncated([len(part) for part in parts], glue_seq_len - 1 - len(parts))
            parts = [np.append(part[:n], SEP) for part, n in zip(parts, keep, strict=True)]
            yield np.concatenate([[CLS], *parts]), 1 + len(parts[0])

    def build(n_outputs):
        masked_lm = MaskedLM(config)
        if not scratch:
            masked_lm.load_state_dict(pretrained.state_dict())
        return Classifier(masked_lm, n_outputs, glue_dropout, glue_pooling)

    name = folder.resolve().name + (" without pre-training" if scratch else "")
    vocabulary = glue.fingerprint((folder / "tokenizer.json").read_bytes())
    tensors = b"" if scratch else (folder / "model.safetensors").read_bytes()
    weights = glue.fingerprint(vocabulary, model_folder.distinguishing_fields(config), tensors)
    # Pre-training has one token type: for another a second sentence would get an untrained vector.
    return Candidate(name, weights, encode, build, PAD, False, glue_batch, glue_lr, PAPER_OURS)


class HuggingFace(nn.Module):
    """A classifier of transformers with the signature of ours."""

    def __init__(self, name, n_outputs, untrained=False, **options):
        from transformers import AutoConfig
        from transformers import AutoModelForSequenceClassification as Auto

        super().__init__()
        if untrained:
            config = AutoConfig.from_pretrained(name, num_labels=n_outputs, **options)
            self.model = Auto.from_config(config, dtype=torch.float32)
            self.info = {"missing_keys": [], "mismatched_keys": []}
            return
        options |= {"num_labels": n_outputs, "dtype": torch.float32, "output_loading_info": True}
        # An old head may have had other labels.
        self.model, self.info = Auto.from_pretrained(name, ignore_mismatched_sizes=True, **options)

    def forward(self, ids, attention_mask, token_type_ids):
        mask = None if attention_mask is None else attention_mask.long()
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=ids, attention_mask=mask, **types).logits


def hugging_face_candidate(name):
    """The Candidate of an encoder of transformers, a folder or a name on the Hub; exits if none.

    NAME-untrained, where it is no folder, is NAME with its weights drawn anew."""
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # or each fine-tuning tells that the classifier is new
    logging.disable_progress_bar()
    untrained = name.endswith("-untrained") and not Path(name).is_dir()
    if untrained:
        name = name.removesuffix("-untrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        net = HuggingFace(name, 2, untrained)
        words = tokenizer.backend_tokenizer.to_str()
    except Exception as e:  # no network, no such model, no fast tokenizer: each raises another
        sys.exit(f"transformers cannot load {name}: {safety.first_line(e, 200)}")

    # The classifier is new, and some models have a pooler that was not pre-trained.
    prefix = net.model.base_model_prefix + "."
    base = {key: t for key, t in net.model.state_dict().items() if key.startswith(prefix)}
    mismatched = [key for key, *_ in net.info["mismatched_keys"]]
    not_loaded = base.keys() & {*net.info["missing_keys"], *mismatched}
    wrong = sorted(key for key in not_loaded if "pooler" not in key)
    if wrong:
        sys.exit(f"{name} is incomplete: {wrong[0]} is missing or of another shape")
    config = net.model.config
    pad = tokenizer.pad_token_id
    if pad is None or len(tokenizer) > config.vocab_size:
        sys.exit(f"{name} has no padding token, or too many others for its model: name another")
    check_length(name, getattr(config, "max_position_embeddings", 0))
    two_types = "token_type_ids" in tokenizer.model_input_names

    def encode(texts):
        options = {"truncation": True, "max_length": glue_seq_len}
        # In parts, for the tokenizer needs some kB a row.
        for start in range(0, len(texts), 10000):
            columns = [list(column) for column in zip(*texts[start : start + 10000], strict=True)]
            batch = tokenizer(*columns, return_token_type_ids=two_types, **options)
            for i, ids in enumerate(batch["input_ids"]):
                first = batch["token_type_ids"][i].count(0) if two_types else len(ids)
                yield np.array(ids), first

    build = partial(HuggingFace, name, untrained=untrained, local_files_only=True)
    tensors = [] if untrained else [tensor.numpy().tobytes() for tensor in base.values()]
    weights = glue.fingerprint(words, config.to_json_string(), *tensors)
    name += " without pre-training" if untrained else ""
    return Candidate(name, weights, encode, build, pad, two_types, hf_batch, hf_lr, PAPER_BERT)


def tokenised(candidate, task, split):
    """What Ragged takes, of a split, and "source", a fingerprint of it; exits like glue.read."""
    texts, labels = glue.read(task, split, glue_dir)
    rows = list(candidate.encode(texts))
    return {
        "ids": np.concatenate([ids for ids, _ in rows]).astype(np.int32),
        "length": np.array([len(ids) for ids, _ in rows]),
        "first": np.array([first for _, first in rows]),
        "labels": labels,
        "source": glue.fingerprint(*texts, labels.tobytes()),
    }


def read_tasks(candidate, names):
    """{task: {split: arrays}}; exits like glue.read."""
    result = {}
    for name in tqdm(names, desc="reading", leave=False, disable=None):
        splits = glue.TASKS[name].rows
        result[name] = {split: tokenised(candidate, name, split) for split in splits}
    return result


def progress_bar(data, todo, batch, dev):
    """A bar over all fine-tunings; on a terminal it moves, elsewhere it prints every few minutes.

    It counts what costs: tokens on a CPU, but steps on a GPU, where a step costs its launches."""
    lengths = [data[name]["train"]["length"] for name, _ in todo]
    if dev.type == "cpu":
        unit, once = " tokens", sum(int(length.sum()) for length in lengths)
    else:
        unit, once = " steps", sum(max(1, len(length) // batch) for length in lengths)
    pause = 0.1 if sys.stderr.isatty() else LINE_SECONDS
    look = {"unit": unit, "unit_scale": True, "smoothing": 0.02, "mininterval": pause}
    return tqdm(total=epochs * once, disable=not todo, **look)


def lr_scale(step, steps):
    """Learning rate as a share of its peak: a linear warm-up, then a cosine or line from 1 to 0."""
    warm = int(glue_warmup * steps)
    if step < warm:
        return step / warm
    progress = (step - warm) / (steps - warm)
    if glue_schedule == "linear":
        return 1 - progress
    return 0.5 + 0.5 * math.cos(math.pi * progress)


def fine_tune(candidate, net, data, seed, amp_dtype, tick):
    """Fine-tune net on data, a Ragged; tick(tokens) after each step.

    Returns its speed and train_loss, the mean of the last epoch's losses: cross-entropy in nats, of
    a regression the mean squared error. Where that is near a constant answer's, ln(classes) or the
    labels' variance, little was learnt that a dev set could show; dropout raises it."""
    start = time.perf_counter()
    dev = data.dev
    lr = candidate.lr
    betas = (0.9, glue_beta2)
    fused = dev.type in ("cuda", "cpu")
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr, betas, glue_eps, glue_weight_decay, fused=fused)
    # Gradients in float16 underflow unless they are scaled; in other precisions this does nothing.
    scaler = torch.amp.GradScaler(dev.type, enabled=amp_dtype == torch.float16)
    # Rows of like length share a batch, so that little is padded: not the paper's, but faster.
    batches = []
    for epoch in range(epochs):
        batches += batches_by_length(data.length, candidate.batch, (seed, epoch))
    last_epoch = len(batches) - len(batches) // epochs  # its first step
    losses = []  # of the last epoch, on the device

    net.train()
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_scale(step, len(batches))
        inputs, labels = data.batch(rows)
        with mixed_precision(dev, amp_dtype):
            outputs = net(*inputs).float()  # (B, n_outputs)
        loss_fn = F.mse_loss if labels.is_floating_point() else F.cross_entropy
        loss = loss_fn(outputs.squeeze(1), labels)  # the one column of a regression becomes (B,)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step >= last_epoch:
            losses.append(loss.detach())
        tick(int(data.length[rows].sum()))
    losses = torch.stack(losses).cpu()  # waits for the device, here alone
    finite = losses[losses.isfinite()]  # in float16 a step may be skipped
    train_loss = round(finite.mean().item(), 4)
    seconds = time.perf_counter() - start
    speed = sum(len(rows) for rows in batches) / seconds
    speeds = {"seconds": round(seconds, 2), "rows_per_second": round(speed, 1)}
    return {"train_loss": train_loss} | speeds


@torch.inference_mode()
def predict(net, data, amp_dtype):
    """Outputs (N, n_outputs) for the rows of data; FloatingPointError if they are not finite."""
    order = np.argsort(data.length, kind="stable")
    outputs = []  # by length, as order says
    net.eval()
    for rows in np.split(order, range(64, len(order), 64)):
        inputs, _ = data.batch(rows)
        with mixed_precision(data.dev, amp_dtype):
            outputs.append(net(*inputs).float())
    outputs = torch.cat(outputs).cpu().numpy()
    if not np.isfinite(outputs).all():
        raise FloatingPointError("outputs not finite: try --dtype=float32 or a lower learning rate")
    return outputs[np.argsort(order)]  # in the order of the file


def data_facts(splits):
    """What tells the data of a task: rows and fingerprints of its training and dev sets."""
    return {
        "rows": {split: len(arrays["length"]) for split, arrays in splits.items()},
        "data": {split: arrays["source"] for split, arrays in splits.items()},
    }


def refuse_other(folder):
    """Exit if a folder for a classifier exists and is not ours."""
    config = folder / "config.json"
    text = config.read_text(errors="replace") if config.is_file() else ""
    is_ours = '"nanocram"' in text and '"id2label"' in text
    has_begun = False  # a kill in its first moment leaves config.json.tmp
    if folder.is_dir():
        has_begun = all(path.name == "config.json.tmp" for path in folder.iterdir())
    if folder.exists() and not (is_ours or has_begun):
        sys.exit(f"{folder} is no classifier of ours: move it away, or leave out --save_models")


def kept_classifier(name):
    """The fingerprint of the classifier that is kept of a task, '' where there is none."""
    path = Path(model) / name / "model.safetensors"
    return glue.fingerprint(path.read_bytes()) if path.exists() else ""


def identity(candidate, dev, amp_dtype):
    """What a run is of: name with what is not the paper's, fingerprint of the weights, settings."""
    protocol = {key: globals()[key] for key in candidate.paper}
    changed = [f"{k}={value}" for k, value in protocol.items() if value != candidate.paper[k]]
    if amp_dtype != machine.pick(dev.type, "auto")[1]:
        changed.append(f"dtype={dtype}")
    return {
        "system": ", ".join([candidate.name, *changed]),
        "weights": candidate.weights,
        "settings": protocol | {"dtype": str(amp_dtype)},
    }


def stored_runs(who, warn=False):
    """The runs in glue.jsonl of that identity, in their order."""
    runs = glue.read_runs(model, warn)
    return [run for run in runs if all(run[key] == value for key, value in who.items())]


def find_finished(who, data):
    """{(task, seed): run} of the runs in glue.jsonl that need not be done again, of any seed."""
    result = {}
    for run in stored_runs(who, warn=True):
        name, seed = run["task"], run["seed"]
        if name not in data or run["data"] != data_facts(data[name])["data"]:
            continue
        is_kept = True
        if save_models and seed == 0:
            is_kept = kept_classifier(name) == run.get("classifier")
        if is_kept:
            result[name, seed] = run
    return result


def fine_tune_and_score(candidate, name, seed, splits, dev, amp_dtype, tick):
    """One task with one seed: what a line of glue.jsonl says of it."""
    task = glue.TASKS[name]
    data = {s: Ragged(a, candidate.pad, candidate.two_types, dev) for s, a in splits.items()}
    torch.manual_seed(seed)
    net = candidate.build(len(task.labels) or 1).to(dev)  # a regression has one output
    run = {"task": name, "seed": seed, "scores": {}, **data_facts(splits)}
    training_set = data.pop("train")
    run |= fine_tune(candidate, net, training_set, seed, amp_dtype, tick)
    for split, rows in data.items():
        # MNLI has two dev sets: the scores of the second have names of their own.
        end = "_mm" if split.endswith("mismatched") else ""
        scores = glue.score(name, splits[split]["labels"], predict(net, rows, amp_dtype))
        run["scores"] |= {metric + end: value for metric, value in scores.items()}

    # With the tokenizer beside it, transformers reads the folder as it is.
    if save_models and seed == 0:
        folder = Path(model) / name
        model_folder.save(net, folder, task.labels)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            safety.write_text(folder / file, (Path(model) / file).read_text("utf-8"))
        run["classifier"] = kept_classifier(name)
    facts = machine.describe(dev)
    shown = ("date", "device", "threads", "torch", "commit")
    return run | {key: facts[key] for key in shown} | {"code": CODE}


def check_settings():
    """The names of the tasks; exits with one line for settings that cannot work."""
    counts = ("seeds", "epochs", "glue_batch", "hf_batch")
    shares = ("glue_lr", "hf_lr", "glue_warmup", "glue_beta2", "glue_eps", "glue_dropout")
    limits = dict.fromkeys(counts, (1, 65536)) | dict.fromkeys(shares, (0, 0.99999))
    limits |= {"glue_weight_decay": (0, 1e3), "glue_seq_len": (16, 65536), "first_seed": (0, 65536)}
    limits |= {"glue_schedule": ("cosine", "linear"), "glue_pooling": ("cls", "mean")}
    limits |= {"device": ("auto", "cuda", "mps", "cpu")}
    limits |= {"dtype": ("auto", "bfloat16", "float16", "float32")}
    require(globals(), limits)
    if baseline not in ("", "scratch") and not re.match("hf:.", baseline):
        sys.exit("no such baseline: type --baseline=scratch, or --baseline=hf:PATH_OR_NAME")
    if save_models and first_seed:
        sys.exit("--save_models keeps the classifiers of seed 0: leave out --first_seed")
    if baseline and save_models:
        sys.exit("--save_models keeps classifiers of the model: leave it out, or --baseline")
    if not Path(model).is_dir():
        sys.exit(f"{model} not found: name the folder of a run of train.py, --model=out/NAME")
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    for name in names:
        if name not in glue.TASKS:
            sys.exit(f"there is no task {name!r}: choose from {', '.join(glue.TASKS)}")
    return names


def main():
    names = check_settings()
    folder = Path(model)
    dev, amp_dtype = machine.pick(device, dtype)
    # A folder that cannot be written shows now, not after the first task.
    with glue.results_lock(folder):
        pass
    if save_models:
        for name in names:
            refuse_other(folder / name)

    # What is fine-tuned: the model, or what it is compared with.
    if baseline.startswith("hf:"):
        candidate = hugging_face_candidate(baseline[3:])
    else:
        candidate = our_candidate(model, baseline == "scratch")
    hyper = f"{epochs} epochs, batch {candidate.batch}, AdamW {candidate.lr:g}"
    print(f"{candidate.name} on {dev.type} in {amp_dtype}: {hyper}, {glue_seq_len} tokens")

    # The data, and what has been done with them already.
    data = read_tasks(candidate, names)
    who = identity(candidate, dev, amp_dtype)
    wanted = [(name, seed) for name in data for seed in range(first_seed, first_seed + seeds)]
    stored = find_finished(who, data)
    finished = [stored[job] for job in wanted if job in stored]
    if finished:
        print(f"{len(finished)} of {len(wanted)} fine-tunings are in {folder}/glue.jsonl already")
        others = {run.get("code", CODE) for run in finished} - {CODE}
        if others:
            print(f"of them some are by code {', '.join(others)}, today's is {CODE}: delete these")
        # A table is about the data of a task's last run: where that had others, these come again.
        last = {run["task"]: run["data"] for run in stored_runs(who)}
        glue.add_runs(folder, [run for run in finished if run["data"] != last[run["task"]]])

    # Each task with each seed. One that diverges does not end the others.
    todo = [job for job in wanted if job not in stored]
    failed = []
    with progress_bar(data, todo, candidate.batch, dev) as bar:

        def tick(tokens):
            bar.update(tokens if dev.type == "cpu" else 1)

        for name, seed in todo:
            job = f"{name}, seed {seed}"
            bar.set_description(job)
            try:
                run = fine_tune_and_score(candidate, name, seed, data[name], dev, amp_dtype, tick)
            except FloatingPointError as e:
                failed.append(f"{job}: {e}")
                continue
            glue.add_runs(folder, [who | run])
            scores = ", ".join(f"{key} {value:.1f}" for key, value in run["scores"].items())
            speed = f"{run['seconds']:.0f} s, {run['rows_per_second']:,.0f} rows/s"
            loss = f"training loss {run['train_loss']:.2f} in the last epoch"
            bar.write(f"{job}: {scores}  ({loss}; {speed})")

    # The table of everything in glue.jsonl. Of processes that end together, each with seeds of its
    # own, the last one that is let in sees all seeds.
    with glue.results_lock(folder):
        results = glue.runs_by_name(glue.read_runs(folder))
        table = glue.table(results)
        print("", *table, *glue.footnotes(results), "", sep="\n")
        record.write_card(folder, table)
    print(f"{folder}: glue.md (this table, and each score's spread), glue.jsonl")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    size = "hf_batch" if baseline.startswith("hf:") else "glue_batch"
    half = f"--{size}={max(1, globals()[size] // 2)} (no longer the paper's protocol)"
    safety.run(main, model, "the same command goes on where it stopped", lambda: half)
