"""How fast train.py's model is beside transformers' ModernBERT of the same sizes.

    python results/bench_modernbert.py config/small.py --compile=False
    python results/bench_modernbert.py --micro_batch=256    # on a GPU

Settings are those of train.py. A step is AdamW's, of micro_batch rows of random tokens; the models
take turns, so that other work on the machine hits both. A figure is a median, with the range of the
middle 80 %.
"""

import statistics
import sys
from pathlib import Path

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bench
import train
from model import mixed_precision
from nanocram import machine, safety
from nanocram.data import IGNORE
from nanocram.model_folder import modernbert_config
from nanocram.settings import configure

AS_THEIRS = {  # our settings
    "activation": "geglu",
    "position_embedding": "rope",
    "post_norm": False,
    "embedding_norm": True,
    "first_attn_norm": False,
    "final_norm": True,
    "head_transform": True,
    "token_types": 0,
    "n_narrow": 0,
    "neighbour_heads": False,
    "token_values": False,
    "dropout": 0.0,
}
ROUNDS = 5
TURN_SECONDS = 2.0  # at least one step


def make_step(model, loss_fn):
    """A function that takes a step of AdamW on loss_fn(), the mean loss of a batch."""
    loss_fn = torch.compile(loss_fn) if train.compile else loss_fn
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        loss_fn().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_models(run, batch):
    """{name: (model, its mean loss of batch, a function)}: that of a train.Run with AS_THEIRS, and
    transformers' with either head. batch: as train.masked_batch() makes it."""
    ids, positions, labels = batch  # (B, T), (B, K), (B, K)
    config, dev, amp_dtype = run.model.config, run.device, run.amp_dtype
    models = {"nanocram": (run.model, lambda: run.loss_fn(*batch)["loss"])}

    all_labels = torch.full_like(ids, IGNORE).scatter(1, positions, labels)  # (B, T)
    for head in ("dense", "sparse"):  # logits at all tokens, or at the masked ones
        fields = modernbert_config(config) | {"sparse_prediction": head == "sparse"}
        theirs = ModernBertForMaskedLM(ModernBertConfig.from_dict(fields)).to(dev).train()

        def loss_fn(theirs=theirs):
            with mixed_precision(dev, amp_dtype):
                return theirs(input_ids=ids, labels=all_labels).loss

        models[f"transformers, {head} head"] = theirs, loss_fn
    return models


@machine.training_kernels()
def main():
    vars(train).update(AS_THEIRS)
    run = bench.new_run()
    batch = train.masked_batch(run, 0, run.micro_batch, train.row_shape(bench.MIDDLE))
    models = make_models(run, batch)
    steps = {name: make_step(*model) for name, model in models.items()}
    for step in steps.values():  # the first step compiles
        for _ in range(4):
            step()
    seconds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, found in seconds.items():
            end = sum(found) + TURN_SECONDS
            while sum(found) < end:
                found.append(machine.timed(run.device, steps[name])[0])

    how = f"{'compiled' if train.compile else 'eager'}, {run.amp_dtype}, {run.micro_batch} rows"
    print(f"\n| {machine.device_name(run.device)}, {how} | tokens/s | nanocram is faster by |")
    print("| --- | ---: | ---: |")
    speeds = {name: [batch[0].numel() / s for s in found] for name, found in seconds.items()}
    for name, found in speeds.items():
        faster = statistics.median(speeds["nanocram"]) / statistics.median(found)
        print(f"| {name} | {bench.median_and_range(found)} | {faster:.2f} |")


if __name__ == "__main__":
    configure(vars(train), sys.argv[1:])
    safety.run(main, "bench_modernbert.py", "nothing was kept", "type a smaller --micro_batch")
