r"""A rival of config/small.py: a fresh model of transformers, trained by transformers' own Trainer.

    pip install -r requirements-dev.txt
    python results/race.py --rival=modernbert --lr=2e-3 --mask=0.3 --minutes=60

Data, sizes and batch are those of config/small.py, so data/small must be there; collator, AdamW,
loop and initial weights are those of transformers. out_dir gets the curve and the model, for
finetune_glue.py --baseline=hf:OUT_DIR; race.csv beside it gets the result. The hours of one core:

    export OMP_NUM_THREADS=1
    python train.py config/small.py --out_dir=out/small_hour
    python results/race.py --rival=modernbert --mask=0.30 --lr=2e-3 --beta2=0.98 --minutes=60 \
      --out_dir=out/race/modernbert
    python results/race.py --rival=bert --mask=0.30 --lr=5e-4 --beta2=0.98 --minutes=60 \
      --out_dir=out/race/bert
    sed -i 's/"classifier_pooling": "cls"/"classifier_pooling": "mean"/' \
      out/race/modernbert/config.json
    python finetune_glue.py config/small.py --glue_dir=GLUE --seeds=2 --hf_lr=3e-4 --hf_batch=16 \
      --tasks=stsb,cola,sst2,mrpc,rte --model=out/race/modernbert --baseline=hf:out/race/modernbert

small.py and crammed BERT take --model alone, without --baseline, --hf_lr and --hf_batch, fresh
weights --model=out/small_hour --baseline=scratch. SST-2/train.tsv was cut to 6,001 lines.
"""

import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nanocram.settings import configure

# fmt: off
rival = "modernbert"    # modernbert | bert
lr = 0.001              # peak learning rate of AdamW
beta2 = 0.999           # of AdamW, the Trainer's default
mask = 0.15             # share of tokens to predict; of these 80 % become [MASK]
minutes = 10.0          # wall-clock budget, from the first step on, with compiling
compile = True          # the Trainer's torch_compile
seed = 0                # of the weights, the order of the rows and the masks
evals = 20              # evaluations, evenly spread over the run; they cost no budget
out_dir = ""            # '' = out/race/ and a name
# fmt: on
SETTINGS = configure(globals())

import numpy as np
import torch
import transformers as hf
from torch import nn

import train
from model import mixed_precision
from nanocram import machine
from nanocram.data import Rows, held_out, load_meta
from nanocram.model_folder import modernbert_config
from nanocram.tokenizer import CLS

WARMUP = 0.03  # first share of the run, in which the rate rises; then it falls to 0
SETUP = 3  # the first steps compile: the budget counts them, the schedule begins behind them


def make_model():
    """The rival, with as many parameters as a ModernBERT of the recipe's sizes has."""
    theirs = {"head_transform": True, "neighbour_heads": False}
    c = replace(train.model_config(), **theirs, n_narrow=0, dropout=0.0)
    fields = modernbert_config(c)
    if rival == "modernbert":
        fields["sparse_prediction"] = True  # logits of the masked tokens alone
        return hf.ModernBertForMaskedLM(hf.ModernBertConfig.from_dict(fields))
    if rival != "bert":
        sys.exit(f"rival={rival} is unknown: choose modernbert or bert")
    sizes = "vocab_size hidden_size num_hidden_layers num_attention_heads".split()
    bert = hf.BertConfig(**{name: fields[name] for name in sizes})
    bert.intermediate_size = 3 * c.n_inner // 2  # two such matrices are as large as GeGLU's three
    bert.max_position_embeddings = train.seq_len
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0  # less than one epoch
    return hf.BertForMaskedLM(bert)


def load_recipe(*others):
    """(training rows (N, T), held-out sets, data folder) of config/small.py.

    Sets train's settings by it, and before by other recipes."""
    for path in (*others, "config/small.py"):
        recipe = runpy.run_path(str(ROOT / path))
        vars(train).update({name: recipe[name] for name in train.SETTINGS if name in recipe})
    data, width = Path(train.data_dir), train.seq_len
    load_meta(data, vocab_size=train.vocab_size, seq_len=width)
    rows = np.fromfile(data / "train.bin", np.uint16).reshape(-1, width)  # in memory
    val_rows = Rows(data / "val.bin", width).read(0, train.eval_rows)
    return rows, held_out(val_rows, train.micro_batch), data


def make_loss(body, head, dev, amp_dtype):
    """As that of model.py: the mean loss, with logits at the predicted positions alone."""

    def loss_fn(ids, positions, labels):
        with mixed_precision(dev, amp_dtype):
            hidden = body(ids)  # (B, T, C)
            at = positions[:, :, None].expand(-1, -1, hidden.shape[-1])
            logits = head(hidden.gather(1, at)).float().flatten(0, 1)  # (B · K, V)
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": total / labels.numel()}

    return loss_fn


def report(result, run, sets, out):
    """Add held-out losses and the machine to the result; print it, and to race.csv beside out."""
    result |= {name: round(train.estimate_loss(run, sets[name]), 5) for name in sets}
    facts = machine.describe(torch.device("cpu")) | {"transformers": hf.__version__}
    names = "date commit device threads torch transformers"
    result |= {name: facts[name] for name in names.split()}
    print(result)
    with open(out.parent / "race.csv", "a") as f:
        if not f.tell():
            print(*result, sep=",", file=f)
        print(*result.values(), sep=",", file=f)


class Clock(hf.TrainerCallback):
    """Ends the run with the budget, is its schedule, and writes the curve."""

    def __init__(self, evaluate, path):
        self.evaluate, self.path = evaluate, path
        self.begun = self.setup = None
        self.ended = self.evals_done = 0  # seconds of the budget at the end of the last step
        path.write_text("seconds,step,loss,val_loss_15\n")

    def lr_scale(self, _step):
        """Learning rate as a share of its peak; 0 while the first steps compile."""
        if self.setup is None:
            return 0.0
        progress = (time.monotonic() - self.begun - self.setup) / (60 * minutes - self.setup)
        return max(0.0, min(progress / WARMUP, (1 - progress) / (1 - WARMUP)))

    def on_step_begin(self, *_, **kwargs):
        self.begun = self.begun or time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        before, self.ended = self.ended, time.monotonic() - self.begun
        if state.global_step == SETUP:
            self.setup = self.ended
        # the next step would be over too late
        control.should_training_stop = 2 * self.ended - before > 60 * minutes
        number = int(evals * self.ended / (60 * minutes))
        if number > self.evals_done and not control.should_training_stop:
            self.evals_done = number
            loss = state.log_history[-1]["loss"] if state.log_history else ""
            with open(self.path, "a") as f:
                f.write(f"{self.ended:.1f},{state.global_step},{loss},{self.evaluate():.5f}\n")
            self.begun = time.monotonic() - self.ended


@machine.training_kernels()
def main():
    dev, amp_dtype = machine.pick("cpu", "auto")
    rows, sets, data = load_recipe()
    out = Path(out_dir or f"out/race/{rival}_lr{lr:g}_mask{mask:g}_{minutes:g}min")
    out.mkdir(parents=True, exist_ok=True)

    hf.set_seed(seed)
    model = make_model()
    tokenizer = hf.AutoTokenizer.from_pretrained(data)
    collator = hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=mask)

    def collate(numbers):
        # left alone, it looks for special tokens in Python, and never hides [SEP]: the held-out
        # rows do
        ids = torch.from_numpy(rows[numbers].astype(np.int64))
        ids, labels = collator.torch_mask_tokens(ids, special_tokens_mask=ids == CLS)
        return {"input_ids": ids, "labels": labels}

    arguments = hf.TrainingArguments(
        str(out), max_steps=10**8, per_device_train_batch_size=train.batch_size, use_cpu=True,
        bf16=amp_dtype == torch.bfloat16, torch_compile=compile, learning_rate=lr,
        weight_decay=0.01, adam_beta2=beta2, seed=seed, remove_unused_columns=False,
        save_strategy="no", logging_steps=20, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    head = model.cls if rival == "bert" else nn.Sequential(model.head, model.decoder)
    loss_fn = make_loss(lambda ids: model.base_model(input_ids=ids)[0], head, dev, amp_dtype)
    run = SimpleNamespace(model=model, device=dev, loss_fn=loss_fn)
    clock = Clock(lambda: train.estimate_loss(run, sets["val_loss_15"]), out / "log.csv")
    trainer = hf.Trainer(model, arguments, collate, range(len(rows)), callbacks=[clock])
    optimizer = trainer.create_optimizer()  # the Trainer's own; but a schedule by the clock
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, clock.lr_scale)
    trainer.train()
    if clock.setup is None:
        sys.exit(f"{minutes} minutes are over within the first {SETUP} steps: type more --minutes")

    steps, tokens = trainer.state.global_step, train.batch_size * train.seq_len
    result = {name: globals()[name] for name in SETTINGS if name not in ("evals", "out_dir")}
    result |= {"head": "dense" if rival == "bert" else "sparse"}
    result |= {"parameters": model.num_parameters(), "steps": steps, "tokens": steps * tokens}
    speed = (steps - SETUP) * tokens / (clock.ended - clock.setup)
    result |= {"tokens_per_s": round(speed), "setup_seconds": round(clock.setup, 1)}
    report(result, run, sets, out)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
