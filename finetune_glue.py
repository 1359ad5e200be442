"""Fine-tune a pre-trained model on GLUE by the protocol of the paper, several seeds a task, and print where it stands.

    python finetune_glue.py --model=out/fineweb_edu                       # eight tasks, five seeds, data from the Hub
    python finetune_glue.py --model=out/tiny --glue_dir=path/to/GLUE --tasks=cola,rte --seeds=1
    python finetune_glue.py --model=out/fineweb_edu --baseline=scratch    # what the pre-training was worth

One set of hyper-parameters for all tasks (arXiv 2212.14034, section 5), each task's own training data and nothing else,
the score after the last epoch, the median over seeds. The model's folder gets glue.md, the table, and glue.json, every
seed's scores; a run that was stopped does what is not in there yet.
"""

import difflib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanocram.configurator import configure, require

model = "out/fineweb_edu"  # folder of a run of train.py; the results go there too
glue_dir = (
    ""  # folder of the official files (CoLA/train.tsv, …), perhaps gzipped; '' = from the Hub
)
tasks = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte"  # with commas between; wnli, which the paper leaves out, can be named
seeds = 5  # fine-tunings of each task, which differ in fresh layers, dropout and order of the rows
epochs = 5  # passes over a task's training data
baseline = ""  # instead of the model: scratch (the same without pre-training) | hf:PATH_OR_NAME
save_models = False  # keep the classifier of each task's first seed, as MODEL/TASK, a model folder
predict_test = (
    False  # write the files for gluebenchmark.com too; what was done without them is repeated
)
glue_batch = 16  # rows per optimiser step
glue_lr = 4e-5  # peak learning rate of AdamW
glue_warmup = 0.1  # share of the steps in which it rises; then a cosine down to 0
glue_beta2 = 0.98  # of AdamW; beta1 is 0.9
glue_eps = 1e-6  # of AdamW
glue_weight_decay = 0.0  # of AdamW, decoupled
glue_dropout = 0.1  # in the blocks and before the classifier
glue_seq_len = 128  # longest input in tokens, a multiple of 8; what is longer is cut
hf_batch = 32  # rows per optimiser step of --baseline=hf:…, as the paper did with BERT
hf_lr = 2e-5  # and its peak learning rate
glue_cache = "data/glue_tokens"  # folder of the tokenised data; '' = tokenise anew every time
device = "auto"  # auto | cuda | mps | cpu
dtype = "auto"  # auto | bfloat16 | float16 | float32: of the matrix products; weights stay float32

if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a typo are answered at once
    configure(globals())

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from model import Classifier, MaskedLM
from nanocram import glue, machine, record, safety
from nanocram.data import Ragged, batches_by_length
from nanocram.model_folder import load, maker, save
from nanocram.tokenizer import CLS, PAD, SEP, Tokenizer, truncated

# The paper's values: a table names what a run did otherwise.
PAPER = {
    "epochs": 5,
    "glue_warmup": 0.1,
    "glue_beta2": 0.98,
    "glue_eps": 1e-6,
    "glue_weight_decay": 0.0,
    "glue_seq_len": 128,
}
PAPER_OURS = PAPER | {"glue_batch": 16, "glue_lr": 4e-5, "glue_dropout": 0.1}
PAPER_HF = PAPER | {"hf_batch": 32, "hf_lr": 2e-5}


@dataclass
class System:
    """What is fine-tuned: this model, the same without pre-training, or one of transformers'."""

    name: str
    weights: str  # fingerprint of all that fine-tuning starts from
    tokenizer: str  # fingerprint of what encode does
    encode: Callable  # [(sentence,) or (first, second), …] -> [(ids, how many of them belong to the first), …]
    pad: int
    two_types: bool  # whether it tells the first sentence from the second by token types
    build: Callable  # number of outputs -> module: (ids, attention_mask, token_types) -> outputs
    batch: int
    lr: float
    paper: dict  # settings of the paper that apply to it


def ours(folder, scratch):
    """The System of a model folder of train.py; exits with one line if it is none, or its parts do not match."""
    try:
        pretrained, tokenizer = load(folder), Tokenizer(Path(folder) / "tokenizer.json")
    except ValueError as e:
        sys.exit(str(e))
    if isinstance(pretrained, Classifier):
        sys.exit(f"{folder} is fine-tuned already: name the folder that train.py wrote")
    config = replace(pretrained.config, dropout=glue_dropout)
    if tokenizer.vocab_size != config.vocab_size:
        sys.exit(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} entries, the model {config.vocab_size}: they do "
            "not belong together, copy tokenizer.json from the data_dir of the run"
        )
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

    name, key = (
        Path(folder).resolve().name,
        glue.fingerprint((Path(folder) / "tokenizer.json").read_bytes()),
    )
    tensors = b"" if scratch else (Path(folder) / "model.safetensors").read_bytes()
    weights = glue.fingerprint(key, asdict(config), tensors)
    name = f"{name} without pre-training" if scratch else name
    return System(
        name=name,
        weights=weights,
        tokenizer=key,
        encode=encode,
        pad=PAD,
        two_types=config.token_types > 1,
        build=build,
        batch=glue_batch,
        lr=glue_lr,
        paper=PAPER_OURS,
    )


class HuggingFace(nn.Module):
    """A classifier of transformers with the signature of ours."""

    def __init__(self, name, n_outputs, **options):
        from transformers import AutoModelForSequenceClassification as Auto

        super().__init__()
        options |= {
            "dtype": torch.float32,
            "ignore_mismatched_sizes": True,
        }  # an old head may have had other labels
        self.model, self.info = Auto.from_pretrained(
            name, num_labels=n_outputs, output_loading_info=True, **options
        )

    def forward(self, ids, attention_mask, token_types):
        mask = None if attention_mask is None else attention_mask.long()
        types = {} if token_types is None else {"token_type_ids": token_types}
        return self.model(input_ids=ids, attention_mask=mask, **types).logits


def hugging_face(name):
    """The System of an encoder of transformers, a folder or a name on the Hub; exits with one line if it is none."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()  # or each fine-tuning tells that the classifier is new
        logging.disable_progress_bar()
        tokenizer, net = AutoTokenizer.from_pretrained(name), HuggingFace(name, 2)
        words = tokenizer.backend_tokenizer.to_str()
    except ModuleNotFoundError as e:
        sys.exit(f"--baseline=hf:{name} needs a package: pip install {e.name}")
    except Exception as e:
        sys.exit(
            f"transformers cannot load {name}: {(str(e).strip() or repr(e)).splitlines()[0]:.200}"
        )
    config, two_types = net.model.config, "token_type_ids" in tokenizer.model_input_names
    base = {
        k: v
        for k, v in net.model.state_dict().items()
        if k.startswith(net.model.base_model_prefix + ".")
    }
    wrong = {
        *net.info["missing_keys"],
        *(key for key, *_ in net.info["mismatched_keys"]),
    } & base.keys()
    if wrong := sorted(key for key in wrong if "pooler" not in key):
        sys.exit(
            f"{name} is incomplete: {len(wrong)} of its weights are missing or of another shape, as {wrong[0]}"
        )
    if tokenizer.pad_token_id is None or len(tokenizer) > config.vocab_size:
        sizes = f"its tokenizer has {len(tokenizer)} entries, the model {config.vocab_size}"
        sys.exit(f"{name} cannot work: {sizes}, the padding token is {tokenizer.pad_token}")
    if 0 < (most := getattr(config, "max_position_embeddings", 0)) < glue_seq_len:
        sys.exit(f"{name} takes at most {most} tokens: type --glue_seq_len={most // 8 * 8}")

    def encode(texts):
        for i in range(0, len(texts), 10000):  # some kB a row are needed on the way
            columns = [list(column) for column in zip(*texts[i : i + 10000], strict=True)]
            batch = tokenizer(
                *columns, truncation=True, max_length=glue_seq_len, return_token_type_ids=two_types
            )
            types = batch["token_type_ids"] if two_types else batch["input_ids"]
            for ids, t in zip(batch["input_ids"], types, strict=True):
                yield np.array(ids), t.count(0) if two_types else len(ids)

    def build(n_outputs):
        return HuggingFace(name, n_outputs, local_files_only=True)

    weights = glue.fingerprint(
        words, config.to_json_string(), *(t.numpy().tobytes() for t in base.values())
    )
    return System(
        name=name,
        weights=weights,
        tokenizer=glue.fingerprint(words, two_types),
        encode=encode,
        pad=tokenizer.pad_token_id,
        two_types=two_types,
        build=build,
        batch=hf_batch,
        lr=hf_lr,
        paper=PAPER_HF,
    )


def tokenised(system, task, split):
    """{"ids" (all tokens, one row behind the other), "length", "first", "labels", "source"} of a split, from the cache.

    Arrays; source is a fingerprint of texts and labels. Raises what glue.read raises."""
    part = glue.AX if task == "ax" else glue.TASKS[task]
    source = glue.find(part, split, glue_dir).read_bytes() if glue_dir else "hub"
    key = glue.fingerprint("format 3", system.tokenizer, glue_seq_len, task, split, source)
    path = Path(glue_cache) / f"{task}-{split}-{key}.npz"
    if glue_cache and path.exists():
        try:
            with np.load(path) as arrays:
                return dict(arrays)
        except Exception:  # a damaged cache is no cache
            path.unlink()
    texts, labels = glue.read(task, split, glue_dir)
    rows = list(system.encode(texts))
    arrays = {
        "ids": np.concatenate([ids for ids, _ in rows]).astype(np.int32),
        "length": np.array([len(ids) for ids, _ in rows]),
        "first": np.array([first for _, first in rows]),
        "labels": np.zeros(0) if labels is None else labels,
        "source": np.array(glue.fingerprint(*texts, b"" if labels is None else labels.tobytes())),
    }
    if glue_cache:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = path.with_name(
            f"{os.getpid()}-{path.name}"
        )  # another process may be writing the same
        np.savez(mine, **arrays)
        mine.replace(path)
    return arrays


def lr_share(step, steps):
    """Learning rate as a share of its peak: a linear warm-up, then a cosine from 1 to 0."""
    warm = int(glue_warmup * steps)
    return (
        step / warm
        if step < warm
        else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))
    )


def train(system, net, data, seed, amp_dtype, tick):
    """Fine-tune net on data; returns the facts of it. tick(tokens) is called after each step."""
    dev, start = data.dev, time.perf_counter()
    optimizer = torch.optim.AdamW(
        net.parameters(),
        system.lr,
        (0.9, glue_beta2),
        glue_eps,
        glue_weight_decay,
        fused=dev.type in ("cuda", "cpu"),
    )
    scaler = torch.amp.GradScaler(dev.type, enabled=amp_dtype == torch.float16)
    steps = [
        rows
        for epoch in range(epochs)
        for rows in batches_by_length(data.length, system.batch, (seed, epoch))
    ]
    net.train()
    for step, rows in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = system.lr * lr_share(step, len(steps))
        inputs, labels = data.batch(rows)
        with torch.autocast(dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
            outputs = net(*inputs).float()  # (B, outputs)
        loss = (
            F.mse_loss(outputs[:, 0], labels)
            if outputs.shape[1] == 1
            else F.cross_entropy(outputs, labels)
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        tick(int(data.length[rows].sum()))
    loss.item()  # waits for the device, here alone
    seconds, rows = time.perf_counter() - start, sum(map(len, steps))
    padded = 1 - float(
        sum(data.length[r].sum() for r in steps) / sum(len(r) * data.width(r) for r in steps)
    )
    return {
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds, 1),
        "padded": round(padded, 4),
    }


@torch.inference_mode()
def predict(net, data, amp_dtype):
    """Outputs (N, n_outputs) for the rows of data, an array; raises FloatingPointError if they are not finite."""
    order, outputs = np.argsort(data.length, kind="stable"), []
    net.eval()
    for rows in np.split(order, range(64, len(order), 64)):
        with torch.autocast(data.dev.type, amp_dtype, enabled=amp_dtype != torch.float32):
            outputs.append(net(*data.batch(rows)[0]).float())
    outputs = torch.cat(outputs).cpu().numpy()
    if not np.isfinite(outputs).all():
        raise FloatingPointError(
            "outputs that are not finite: try --dtype=float32, or a smaller learning rate"
        )
    return outputs[np.argsort(order)]


def check_settings():
    """The names of the tasks; exits with one line for settings that cannot work."""
    require(
        globals(),
        {
            "seeds": (1, 1000),
            "epochs": (1, 1000),
            "glue_batch": (1, 65536),
            "glue_lr": (0, 1),
            "glue_warmup": (0, 0.9),
            "glue_beta2": (0, 0.99999),
            "glue_eps": (0, 1),
            "glue_weight_decay": (0, 1e3),
            "glue_dropout": (0, 0.9),
            "glue_seq_len": (16, 65536),
            "hf_batch": (1, 65536),
            "hf_lr": (0, 1),
            "device": ("auto", "cuda", "mps", "cpu"),
            "dtype": ("auto", "bfloat16", "float16", "float32"),
        },
    )
    if glue_seq_len % 8:
        sys.exit(
            f"glue_seq_len={glue_seq_len} is no multiple of 8: type --glue_seq_len={glue_seq_len // 8 * 8}"
        )
    if baseline not in ("", "scratch") and not re.match("hf:.", baseline):
        sys.exit(
            f"baseline={baseline} is unknown: type --baseline=scratch, or --baseline=hf:PATH_OR_NAME"
        )
    if glue_dir and not Path(glue_dir).is_dir():
        sys.exit(
            f"{glue_dir} is no folder: --glue_dir is one with CoLA/train.tsv and so on, '' takes the Hub's data"
        )
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    for name in (name for name in names if name not in glue.TASKS):
        near = difflib.get_close_matches(name.lower().replace("-", ""), glue.TASKS, 1) or [
            "one of",
            *glue.TASKS,
        ]
        sys.exit(f"there is no task {name!r}: did you mean {' '.join(near)}?")
    return names


def read_all(system, names):
    """{task: {split, or file of a submission: arrays}}; says which tasks and files are missing and leaves them out."""
    from tqdm import tqdm

    result = {}
    for name in tqdm(names, desc="reading", leave=False, disable=None):
        task, files = (
            glue.TASKS[name],
            {file: at for file, at in glue.SUBMISSION.items() if at[0] == name},
        )
        try:
            result[name] = {
                split: tokenised(system, name, split) for split in task.rows if "test" not in split
            }
        except FileNotFoundError as e:
            print(f"{name} is left out: {e}")
            continue
        for file, (_, split) in files.items() if predict_test else ():
            try:
                found = tokenised(system, "ax" if file == "AX.tsv" else name, split)
            except FileNotFoundError as e:
                print(f"{file} is left out: {e}")
                continue
            result[name][file] = found
            if (n := len(found["length"])) != (
                official := (glue.AX if file == "AX.tsv" else task).rows[split]
            ):
                print(f"{file} will have {n:,} rows, the leaderboard wants {official:,}")
    if not result:
        sys.exit(
            "no task is left: point --glue_dir to a folder with the official files, or '' to take the Hub's"
        )
    return result


def facts_of(name, splits):
    """What tells the data of a task: rows and fingerprints of its training and dev sets."""
    known = {split: arrays for split, arrays in splits.items() if split in glue.TASKS[name].rows}
    return {
        "rows": {split: len(a["length"]) for split, a in known.items()},
        "data": {split: str(a["source"]) for split, a in known.items()},
    }


def is_done(run, name, seed, splits, folder):
    """Whether run is this one, on the same data, and its answers to the test sets are in folder as it wrote them."""
    wanted = {"task": name, "seed": seed, **facts_of(name, splits)}
    if any(run[key] != value for key, value in wanted.items()):
        return False
    kept = {file: run["predictions"].get(file) for file in splits if file in glue.SUBMISSION}
    return kept == glue.predictions(splits, folder / f"seed{seed}")


def made(system, run):
    """What made the classifier of a run, so that another one is not taken for it."""
    return glue.fingerprint(
        system.weights, run["task"], run["data"], [globals()[key] for key in system.paper]
    )


def run_once(system, name, seed, splits, folder, dev, amp_dtype, tick):
    """Fine-tune and evaluate one task with one seed, write the answers to its test sets; the run, as in glue.json."""
    task, data = (
        glue.TASKS[name],
        {s: Ragged(a, system.pad, system.two_types, dev) for s, a in splits.items()},
    )
    torch.manual_seed(seed)
    net = system.build(task.n_outputs).to(dev)
    run = {
        "task": name,
        "seed": seed,
        "scores": {},
        **facts_of(name, splits),
        "date": time.strftime("%Y-%m-%d"),
        "device": machine.describe(dev)["device"],
    }
    run |= train(system, net, data["train"], seed, amp_dtype, tick)
    for split in (s for s in splits if s != "train"):
        outputs = predict(net, data[split], amp_dtype)
        if split in glue.SUBMISSION:
            path = folder / f"seed{seed}" / split
            glue.write_predictions(path, glue.AX if split == "AX.tsv" else task, outputs)
        else:
            scores = glue.score(name, splits[split]["labels"], outputs)
            end = "_mm" if split.endswith("mismatched") else ""
            run["scores"] |= {key + end: value for key, value in scores.items()}
    if save_models and not baseline and seed == 0:
        save(net, Path(model) / name, task.labels, made=made(system, run))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(model) / file, Path(model) / name)
    return run | {"predictions": glue.predictions(splits, folder / f"seed{seed}")}


def main():
    from tqdm import tqdm

    names, folder = check_settings(), Path(model)
    dev, amp_dtype = machine.pick(device, dtype)
    if not folder.is_dir():
        sys.exit(f"{model} not found: name the folder of a run of train.py, --model=out/NAME")
    glue.lock(folder).close()  # a folder that cannot be written shows now, not after the first task
    foreign = baseline.startswith("hf:")
    system = hugging_face(baseline[3:]) if foreign else ours(model, baseline == "scratch")
    for name in names if save_models and not baseline else ():
        maker(folder / name)
    print(
        f"{system.name} on {dev.type} in {amp_dtype}: {epochs} epochs, batch {system.batch}, AdamW {system.lr:g}, "
        f"dropout {'its own' if foreign else glue_dropout}, {glue_seq_len} tokens",
        flush=True,
    )
    answers = folder / "_".join(["submission", *re.findall(r"\w+", baseline)])
    try:
        splits = read_all(system, names)
    except ValueError as e:
        sys.exit(str(e))
    changed = [
        f"{key}={globals()[key]}" for key, value in system.paper.items() if globals()[key] != value
    ]
    changed += [f"dtype={dtype}"] if amp_dtype != machine.pick(device, "auto")[1] else []
    entry = {
        "system": ", ".join([system.name, *changed]),
        "weights": system.weights,
        "machine": machine.describe(dev),
        "protocol": {key: globals()[key] for key in system.paper} | {"dtype": str(amp_dtype)},
    }
    every = [(name, seed) for name in splits for seed in range(seeds)]

    def done(jobs):
        """The runs in glue.json that are those of jobs."""
        runs = glue.stored_runs(folder, entry)
        if save_models and not baseline:
            runs = [r for r in runs if r["seed"] or maker(folder / r["task"]) == made(system, r)]
        return {
            job: run for job in jobs for run in runs if is_done(run, *job, splits[job[0]], answers)
        }

    if found := done(every):
        print(f"{len(found)} of {len(every)} fine-tunings are in {folder}/glue.json already")
        glue.add_runs(
            folder, entry, [*found.values()]
        )  # the last ones decide which data the table is about
    todo = [job for job in every if job not in found]
    total = sum(int(splits[name]["train"]["length"].sum()) * epochs for name, _ in todo)
    bar = tqdm(total=total, unit=" tokens", unit_scale=True, disable=None, smoothing=0.02)
    failed = []
    for name, seed in todo:
        bar.set_description(f"{name}, seed {seed}")
        try:
            run = run_once(system, name, seed, splits[name], answers, dev, amp_dtype, bar.update)
        except FloatingPointError as e:
            failed.append(f"{name}, seed {seed}: {e}")
            continue
        glue.add_runs(folder, entry, [run])
        words = ", ".join(f"{key} {value:.1f}" for key, value in run["scores"].items())
        bar.write(
            f"{name}, seed {seed}: {words}  ({run['seconds']:.0f} s, {run['rows_per_second']:,.0f} rows/s, "
            f"{run['padded']:.0%} padding)"
        )
    bar.close()
    if predict_test:
        glue.write_submission(answers, [*done(every).values()])
    with glue.lock(folder):
        record.write_card(folder, glue.markdown(glue.summary(glue.systems_by_name(folder))[0]))
    print("", *glue.table(glue.systems_by_name(folder)), "", sep="\n")
    print(f"{folder}: glue.md (this table, and each score's spread), glue.json")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    size = "hf_batch" if baseline.startswith("hf:") else "glue_batch"
    safety.run(
        main,
        model,
        "the same command goes on with the fine-tuning that was cut short",
        lambda: f"--{size}={max(1, globals()[size] // 2)} (no longer the paper's protocol)",
    )
