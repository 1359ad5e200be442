"""Fine-tune a pre-trained model on GLUE by the paper's protocol, several seeds a task.

    python finetune_glue.py --model=out/fineweb                         # eight tasks, from the Hub
    python finetune_glue.py --model=out/tiny --glue_dir=path/to/GLUE --tasks=cola,rte --seeds=1
    python finetune_glue.py --model=out/fineweb --baseline=scratch      # its pre-training's worth

The protocol is that of arXiv 2212.14034, section 5, but for what docs/how_it_works.md lists. The
model's folder gets glue.jsonl (runs) and glue.md (table). Rerun the command to continue.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from nanocram.settings import check, configure

# fmt: off
model = "out/fineweb"      # folder of a run of train.py; the results go there too
glue_dir = ""              # folder of the official files (CoLA/train.tsv); '' = Hub
tasks = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte"  # wnli, which the paper leaves out, can be named
seeds = 5                  # fine-tunings of each task: fresh layers, dropout, order of rows differ
first_seed = 0             # number of the first one: other processes may do others, for one table
epochs = 5                 # passes over a task's training data
baseline = ""              # fine-tune something else for comparison: scratch | hf:PATH_OR_NAME
trust_remote_code = False  # with hf: run the code that the folder carries
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
from torch.optim import AdamW

from model import Classifier, MaskedLM, mixed_precision
from nanocram import glue, machine, model_folder, safety
from nanocram.data import Ragged, batches_by_length
from nanocram.tokenizer import CLS, PAD, SEP, Tokenizer

# The paper's values, and those of BERT for --baseline=hf:…; a table names what a run did otherwise.
PAPER = {"epochs": 5, "glue_warmup": 0.1, "glue_schedule": "cosine", "glue_beta2": 0.98}
PAPER |= {"glue_eps": 1e-6, "glue_weight_decay": 0.0, "glue_seq_len": 128}
PAPER_OURS = PAPER | {"glue_batch": 16, "glue_lr": 4e-5, "glue_dropout": 0.1, "glue_pooling": "cls"}
PAPER_BERT = PAPER | {"hf_batch": 32, "hf_lr": 2e-5}


class Ours:
    """A model folder of train.py, or its architecture without the pre-training."""

    def __init__(self, folder, scratch):
        self.pad, self.two_types = PAD, False  # another type's vector would be untrained
        self.batch, self.lr, self.paper = glue_batch, glue_lr, PAPER_OURS
        try:
            self.pretrained = model_folder.load(folder)
        except ValueError as e:
            sys.exit(str(e))
        self.tokenizer = Tokenizer(Path(folder, "tokenizer.json"))
        self.max_seq_len = self.pretrained.config.max_seq_len
        self.scratch = scratch
        self.name = Path(folder).resolve().name + (" without pre-training" if scratch else "")
        if (code := model_folder.hash_of_code()) != model_folder.MODERNBERT:
            self.name += f" by model.py {code[:6]}"  # an edited one computes another model
        self.weights = "" if scratch else model_folder.fingerprint(self.pretrained.state_dict())

    def encode(self, texts):
        """[(sentence,) or (first, second), …] -> rows: (ids, length of the first)."""
        for text in texts:
            parts = [self.tokenizer.encode(part) for part in text]
            # the longer text gives: the shorter one is cut to half of the room at most
            room = glue_seq_len - 1  # beside [CLS]
            for n_done, i in enumerate(np.argsort([*map(len, parts)], kind="stable")):
                parts[i] = np.append(parts[i][: room // (len(parts) - n_done) - 1], SEP)
                room -= len(parts[i])
            yield np.concatenate([[CLS], *parts]), 1 + len(parts[0])

    def build(self, n_outputs):
        masked_lm = MaskedLM(replace(self.pretrained.config, dropout=glue_dropout))
        if not self.scratch:
            masked_lm.load_state_dict(self.pretrained.state_dict())
        return Classifier(masked_lm, n_outputs, glue_dropout, glue_pooling)


class HuggingFace:
    """An encoder of transformers, a folder or a name on the Hub, with the interface of Ours."""

    def __init__(self, name):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

        self.auto = AutoModelForSequenceClassification
        self.trusted = {"trust_remote_code": trust_remote_code}
        self.batch, self.lr, self.paper = hf_batch, hf_lr, PAPER_BERT
        logging.set_verbosity_error()  # it warns of each new classifier
        logging.disable_progress_bar()
        self.name = name
        torch.manual_seed(0)  # a pooler may be new, and is a part of the fingerprint
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, **self.trusted)
            self.tokenizer.model_max_length = glue_seq_len
            net, info = self.load(2)
        except Exception as e:  # no network, no such model: each raises something else
            hint = "read its code, then type --trust_remote_code=True"
            why = hint if "trust_remote_code" in str(e) else safety.first_line(e)
            sys.exit(f"transformers cannot load {name}: {why}")
        self.weights = model_folder.fingerprint(net.base_model.state_dict())
        self.max_seq_len = getattr(net.config, "max_position_embeddings", 0)
        self.pad = self.tokenizer.pad_token_id
        self.two_types = "token_type_ids" in self.tokenizer.model_input_names
        # only the classifier may be new, and perhaps a pooler before it
        new = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
        prefix = next(name for name, m in net.named_modules() if m is net.base_model) + "."
        if wrong := [key for key in new if key.startswith(prefix) and "pooler" not in key]:
            sys.exit(f"{name} is incomplete: {min(wrong)} is missing or of another shape")
        if self.pad is None or len(self.tokenizer) > net.config.vocab_size:
            sys.exit(f"{name} has no padding token, or too many others for its model")

    def load(self, n_outputs, **options):
        options |= {"num_labels": n_outputs, "dtype": torch.float32, "output_loading_info": True}
        options |= self.trusted
        net, info = self.auto.from_pretrained(self.name, ignore_mismatched_sizes=True, **options)
        kind = (net.config.architectures or ["Model"])[0]
        if not kind.endswith(("ForMaskedLM", "ForPreTraining", "Model")):
            # its head was trained for other labels, or for these in another order: draw a new one
            trained, net = net, self.auto.from_config(net.config, **self.trusted)
            net.base_model.load_state_dict(trained.base_model.state_dict())
        return net, info

    def encode(self, texts):
        for text in texts:
            row = self.tokenizer(*text, truncation=True)
            ids = row["input_ids"]
            yield np.array(ids), row["token_type_ids"].count(0) if self.two_types else len(ids)

    def build(self, n_outputs):
        return self.load(n_outputs, local_files_only=True)[0]


def lr_scale(step, steps):
    """Learning rate as a share of its peak: a linear warm-up, then a cosine or line from 1 to 0."""
    warm = int(glue_warmup * steps)
    if step < warm:
        return step / warm
    progress = (step - warm) / (steps - warm)
    half_wave = 0.5 + 0.5 * math.cos(math.pi * progress)
    return half_wave if glue_schedule == "cosine" else 1 - progress


def outputs_of(net, inputs, amp_dtype):
    """Outputs (B, n_outputs) of a Classifier of ours, or of transformers, which returns more."""
    with mixed_precision(inputs["input_ids"].device, amp_dtype):
        found = net(**inputs)
    return getattr(found, "logits", found).float()


def fine_tune(candidate, net, data, seed, amp_dtype, bar):
    """Fine-tune net on data, a Ragged; return the last epoch's mean loss, nats or squares."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    fused = data.dev.type in ("cuda", "cpu")
    betas = (0.9, glue_beta2)
    optimizer = AdamW(groups, candidate.lr, betas, glue_eps, glue_weight_decay, fused=fused)
    # in float16 the loss is scaled, so that small gradients survive
    scaler = torch.amp.GradScaler(data.dev.type, enabled=amp_dtype == torch.float16)
    # rows of like length share a batch, so that little is padded: not the paper's, but faster
    batches = []
    for epoch in range(epochs):
        batches += batches_by_length(data.length, candidate.batch, (seed, epoch))
    net.train()
    losses = []  # on the device
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = candidate.lr * lr_scale(step, len(batches))
        inputs, labels = data.batch(rows)
        outputs = outputs_of(net, inputs, amp_dtype)
        loss_fn = F.mse_loss if labels.is_floating_point() else F.cross_entropy
        loss = loss_fn(outputs.squeeze(1), labels)  # the one column of a regression becomes (B,)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        bar.update(len(rows))
    losses = torch.stack(losses[-(len(batches) // epochs) :])  # of the last epoch
    return losses[losses.isfinite()].mean().item()  # in float16 a step may be skipped


@torch.inference_mode()
def predict(net, data, amp_dtype):
    """Outputs (N, n_outputs) for the rows of data."""
    order = np.argsort(data.length, kind="stable")
    net.eval()
    batches = np.split(order, range(64, len(order), 64))  # of like length
    outputs = [outputs_of(net, data.batch(rows)[0], amp_dtype) for rows in batches]
    return torch.cat(outputs).cpu().numpy()[np.argsort(order)]  # in the order of the file


def fine_tune_and_score(candidate, task, seed, splits, dev, amp_dtype, bar):
    """{"train_loss", "scores", "constant"} of one task with one seed; no scores if it diverged."""
    data = {s: Ragged(*rows, candidate.pad, candidate.two_types, dev) for s, rows in splits.items()}
    torch.manual_seed(seed)
    net = candidate.build(len(glue.TASKS[task].labels) or 1).to(dev)  # a regression has one output
    loss = fine_tune(candidate, net, data.pop("train"), seed, amp_dtype, bar)
    outputs = {split: predict(net, rows, amp_dtype) for split, rows in data.items()}
    scores, answers = {}, set()
    if all(np.isfinite(values).all() for values in outputs.values()):
        for split, values in outputs.items():
            # MNLI has two dev sets: the scores of the second have names of their own
            end = "_mm" if split.endswith("mismatched") else ""
            found = glue.score(task, splits[split][1], values)
            scores |= {metric + end: value for metric, value in found.items()}
            answers.update(values.argmax(1).tolist())
    train_loss = round(loss, 4) if scores else None  # JSON has no NaN
    constant = len(answers) == 1 and bool(glue.TASKS[task].labels)
    return {"train_loss": train_loss, "scores": scores, "constant": constant}


@machine.training_kernels()
def main():
    is_hf = baseline.startswith("hf:")
    allowed = {
        "baseline": ("scratch", baseline if is_hf or not baseline else "hf:PATH_OR_NAME"),
        "glue_schedule": ("cosine", "linear"),
        "glue_pooling": ("cls", "mean"),
        "seeds epochs glue_batch hf_batch": (1, math.inf),
        "glue_lr hf_lr glue_eps glue_weight_decay": (0, math.inf),
        "first_seed": (0, 2**62),
        "glue_seq_len": (8, math.inf),
        "glue_warmup glue_beta2 glue_dropout": (0, 0.99999),
    }
    check(globals(), allowed)
    folder = Path(model)
    if not folder.is_dir():
        sys.exit(f"{model} not found: name the folder of a run of train.py, --model=out/NAME")
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    if unknown := set(names) - glue.TASKS.keys():
        sys.exit(f"there is no task {min(unknown)!r}: choose from {', '.join(glue.TASKS)}")
    dev, amp_dtype = machine.pick(device, dtype)

    candidate = HuggingFace(baseline[3:]) if is_hf else Ours(folder, baseline == "scratch")
    longest = candidate.max_seq_len // 8 * 8  # batches are padded to a multiple of 8
    if 0 < longest < glue_seq_len:
        sys.exit(f"{candidate.name} takes shorter inputs: type --glue_seq_len={longest}")
    settings = {key: globals()[key] for key in candidate.paper}
    changed = [f"{key}={value}" for key, value in settings.items() if value != candidate.paper[key]]
    precision = str(amp_dtype).removeprefix("torch.")
    name = ", ".join([f"{candidate.name} {candidate.weights[:6]}".strip(), precision, *changed])
    what = {"name": name, "settings": settings | {"dtype": precision}, "weights": candidate.weights}
    what |= machine.describe(dev)
    print(f"{name} on {what['device']}: batch {candidate.batch}, AdamW {candidate.lr:g}")

    # read all data before the first fine-tuning, and see what has been done already
    data, runs = {}, []
    for task in safety.Bar(names, desc="reading", leave=False):
        splits = {split: glue.read(task, split, glue_dir) for split in glue.TASKS[task].rows}
        rows = [(list(candidate.encode(texts)), labels) for texts, labels in splits.values()]
        data[task] = dict(zip(splits, rows, strict=True))
        facts = {"task": task, **glue.facts(splits)}
        for flaw in glue.flaws([facts]):
            safety.say(f"WARNING: {flaw}")
        runs += [{**what, **facts, "seed": first_seed + i} for i in range(seeds)]
    try:
        done = glue.read_runs(folder)
        known = [done[glue.key(run)] for run in runs if glue.key(run) in done]
        glue.add_runs(folder, *known)  # they are the last ones now; and it can be written
    except OSError as e:
        sys.exit(f"{folder} cannot be written ({e.strerror}): make a copy, type --model=COPY")
    todo = [run for run in runs if glue.key(run) not in done]
    if known:
        print(f"{len(known)} of {len(runs)} fine-tunings are in {folder}/glue.jsonl already")

    total = epochs * sum(run["rows"]["train"] for run in todo)
    with safety.Bar(total=total, unit=" rows", unit_scale=True) as bar:
        for run in todo:
            task, seed = run["task"], run["seed"]
            bar.set_description(f"{task}, seed {seed}")
            job = candidate, task, seed, data[task], dev, amp_dtype, bar
            seconds, found = machine.timed(dev, fine_tune_and_score, *job)
            glue.add_runs(folder, run | found | {"seconds": round(seconds, 1)})
            said = [f"{metric} {value:.1f}" for metric, value in found["scores"].items()]
            loss = f"training loss {found['train_loss']} in the last epoch"
            said += [loss] if said else ["diverged"]
            said += ["each answer is the same"] * found["constant"]
            bar.write(f"{task}, seed {seed}: {', '.join(said)}; {seconds:.0f} s")

    # the table of all runs so far, others' too; the last process to end has them all
    table = glue.table(glue.add_runs(folder).values())
    print(f"\n{table}\n{folder}: glue.md (this table), glue.jsonl (every run)")


if __name__ == "__main__":
    safety.run(main, model, "rerun to continue", "start fewer at a time, or lower --glue_batch")
