"""The race's fourth: the crammed BERT of "Cramming", trained by its authors' own code.

    git clone https://github.com/JonasGeiping/cramming ../cramming   # from the top of nanocram
    git -C ../cramming checkout 196c991
    pip install -r requirements-dev.txt hydra-core einops evaluate pynvml
    python results/race_cramming.py --minutes=60 --lr=2e-3

Data, sizes and batch, without a ramp, are those of config/small.py: data/small must be there.
Model, initial weights, masks, sparse prediction, AdamW and schedule are those of the authors'
arch=crammed-bert train=bert-o4, whose own rate is 1e-3; matrix products are in bfloat16. out_dir
gets the curve and the weights, as a model of config/crammed.py: finetune_glue.py --model=OUT_DIR.
race.csv beside it gets the result.
"""

import shutil
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from nanocram.settings import configure

# fmt: off
cramming = "../cramming"  # folder of the authors' repository
lr = 0.001              # peak learning rate of AdamW; 0.001 is the authors'
minutes = 10.0          # wall-clock budget, with setting up and compiling
compile = True          # the authors' torch.compile
seed = 0                # of the weights and the masks; the rows come in the order of the file
evals = 20              # evaluations, evenly spread over the run; they cost no budget
out_dir = ""            # '' = out/race/ and a name
# fmt: on
SETTINGS = configure(globals())

warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch has changed

import hydra
import numpy as np
import torch
import transformers as hf
from race import SETUP, load_recipe, make_loss, report
from torch import nn

import train
from model import MaskedLM
from nanocram import machine, model_folder

# transformers 5 has moved it; the authors need it for uploads to the Hub alone
hf.utils.generic.working_or_temp_dir = None
sys.path.insert(0, str(Path(cramming).resolve()))
import cramming as theirs
from cramming.backend import torch_default
from cramming.backend.optimizers import schedulers

RENAMED = {
    "encoder.embedding.pos_embedding.scale_factor": "model.embeddings.position_scale",
    "encoder.embedding.word_embedding": "model.embeddings.tok_embeddings",
    "encoder.embedding": "model.embeddings",
    "encoder": "model",
    "norm1": "attn_norm",
    "norm2": "mlp_norm",
    "attn.dense": "attn.Wo",
    "ffn.dense_in": "mlp.Wi",
    "ffn.dense_out": "mlp.Wo",
}


class Clock:
    """Stands in for the module time in the authors' engine and schedule: evaluations cost none."""

    paused = 0.0

    def time(self):
        return time.time() - self.paused


def make_config():
    """The authors' configuration, by their own files, with what is not their recipe's."""
    changes = [
        "arch=crammed-bert",
        "train=bert-o4",
        f"arch.num_transformer_layers={train.n_layer}",
        f"arch.hidden_size={train.n_embd}",
        f"arch.intermed_size={2 * train.n_inner}",  # with the gate; 4 times hidden_size, as theirs
        f"arch.attention.num_attention_heads={train.n_head}",
        f"arch.embedding.max_seq_length={train.seq_len}",
        f"data.vocab_size={train.vocab_size}",
        f"data.seq_length={train.seq_len}",
        f"train.batch_size={train.batch_size}",
        "train.batch_size_ramp=0",  # small.py's batch is constant, too
        f"train.optim.lr={lr}",
        f"budget={minutes / 60}",
        f"seed={seed}",
        f"impl.microbatch_size={train.batch_size}",
        f"impl.compile_torch={compile}",
        "impl.threads=0",  # one core: no further process that masks
        "impl.pin_memory=False",  # there is no GPU
    ]
    folder = Path(cramming).resolve() / "cramming/config"
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        return hydra.compose("cfg_pretrain", overrides=changes)


def to_ours(state):
    """Their state dict as that of our MaskedLM, which computes the same."""
    ours = {}
    for name, value in state.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if name.endswith("mlp.Wi.weight"):  # two matrices in one, the gate first
            ours[name.replace("Wi", "Wg")], value = value.chunk(2)
        if name.endswith("query_key_value.weight"):  # head by head
            parts = value.view(train.n_head, 3, -1, train.n_embd).transpose(0, 1).flatten(1, 2)
            layer = name.partition("self_attention")[0]
            ours |= {f"{layer}W{x}.weight": part for x, part in zip("qkv", parts, strict=True)}
        elif not name.endswith("norm_factor"):  # 1/√D, a constant
            ours[name] = value
    return ours


@machine.training_kernels()
def main():
    dev, amp_dtype = machine.pick("cpu", "auto")
    rows, sets, data = load_recipe("config/crammed.py")
    out = Path(out_dir or f"out/race/crammed-bert_lr{lr:g}_{minutes:g}min")
    out.mkdir(parents=True, exist_ok=True)

    cfg = make_config()
    theirs.utils.set_random_seed(seed)
    model = theirs.construct_model(cfg.arch, cfg.data.vocab_size)
    scale = model.encoder.embedding.pos_embedding.scale_factor
    head = nn.Sequential(model.prediction_head, model.decoder)
    loss_fn = make_loss(model.encoder, head, dev, amp_dtype)
    run = SimpleNamespace(model=model, device=dev, loss_fn=loss_fn)
    tokenizer = hf.AutoTokenizer.from_pretrained(data)
    tokenizer.model_max_length = train.seq_len
    # as the authors' collator takes them
    dataset = torch.utils.data.StackDataset(input_ids=torch.from_numpy(rows.astype(np.int64)))

    clock = schedulers.time = torch_default.time = Clock()
    begun = clock.time()  # the engine begins the schedule now too; it compiles at the first step
    parts = model, dataset, tokenizer, cfg.train, cfg.impl
    setup = {"device": dev, "dtype": torch.float}
    engine, optimizer, _, loader = theirs.load_backend(*parts, setup=setup)
    # on a CPU the engine would compute in float32
    engine.amp_settings.update(enabled=amp_dtype != torch.float32, dtype=amp_dtype)
    engine.train(cfg.train.pretrain_in_train_mode)  # False: their pre-training has no dropout

    budget, ended, evals_done, losses = 60 * minutes, 0.0, 0, []
    (out / "log.csv").write_text("seconds,step,loss,val_loss_15\n")
    for step, batch in enumerate(loader, 1):
        losses.append(engine.step(engine.to_device(batch)))
        before, ended = ended, clock.time() - begun
        if step == SETUP:
            setup_seconds = ended
        if 2 * ended - before > budget:  # the next step would be over too late
            break
        number = int(evals * ended / budget)
        if number > evals_done:
            evals_done, start = number, time.time()
            loss = torch.stack(losses[-20:]).mean().item()
            val_loss = train.estimate_loss(run, sets["val_loss_15"])  # leaves it in training mode
            engine.train(cfg.train.pretrain_in_train_mode)
            with open(out / "log.csv", "a") as log:
                print(f"{ended:.1f},{step},{loss:.4f},{val_loss:.5f}", file=log)
            clock.paused += time.time() - start

    result = {"rival": "crammed-bert", "lr": lr, "beta2": optimizer.defaults["betas"][1]}
    result |= {"mask": cfg.train.objective.mlm_probability, "minutes": minutes, "compile": compile}
    parameters = sum(p.numel() for p in model.parameters())
    result |= {"seed": seed, "head": "sparse", "parameters": parameters}
    tokens = train.batch_size * train.seq_len
    result |= {"steps": step, "tokens": step * tokens}
    result |= {"tokens_per_s": round((step - SETUP) * tokens / (ended - setup_seconds))}
    result |= {"setup_seconds": round(setup_seconds, 1)}
    report(result, run, sets, out)
    print(f"scale of the positions: {scale.item():.4f}, at first {train.n_embd**-0.5:.4f}")
    ours = MaskedLM(train.model_config())
    ours.load_state_dict(to_ours(model.state_dict()))
    loss_fn = make_loss(ours.model, nn.Sequential(ours.head, ours.decoder), dev, amp_dtype)
    run = SimpleNamespace(model=ours, device=dev, loss_fn=loss_fn)
    print(f"the same weights in ours: {train.estimate_loss(run, sets['val_loss_15']):.5f}")
    model_folder.save(ours, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / name, out)


if __name__ == "__main__":
    main()
