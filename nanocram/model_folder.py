"""The model folder: config.json and model.safetensors, which transformers loads. Where the model
computes what a ModernBERT does it is one, and runs no code of ours; any other one carries model.py,
and hf_model.py, which puts transformers' classes around it.

    python -c "from nanocram import model_folder; print(model_folder.load('out/tiny').config)"
"""

import functools
import json
import runpy
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import ROPE_THETA, MaskedLM, ModelConfig
from nanocram.edits import small_model
from nanocram.machine import float32_products
from nanocram.safety import say_once, write_beside, write_text

# The code that a folder may carry, as this process has it: somebody may edit model.py meanwhile.
HERE = Path(__file__).parent
FILES = HERE.parent / "model.py", HERE / "hf_model.py"
CODE = {path.name: path.read_text("utf-8") for path in FILES}
AUTO_MAP = {
    "AutoConfig": "hf_model.NanocramConfig",
    "AutoModel": "hf_model.NanocramModel",
    "AutoModelForMaskedLM": "hf_model.NanocramForMaskedLM",
    "AutoModelForSequenceClassification": "hf_model.NanocramForSequenceClassification",
    "AutoModelForTokenClassification": "hf_model.NanocramForTokenClassification",
}
# Fields that it has in common with a ModernBERT.
SHARED = (
    "dtype vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings"
)
# Its matrices that are several here: Muon orthogonalises each by itself.
JOINED = {".Wqkv.": (".Wq.", ".Wk.", ".Wv."), ".Wi.": (".Wi.", ".Wg.")}


def modernbert_config(c):
    """ModernBERT's own fields of config.json, for a model of the sizes of c, a ModelConfig."""
    return {
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM"],
        "dtype": "float32",
        "tie_word_embeddings": True,
        "hidden_activation": "gelu",
        "classifier_pooling": "cls",
        "global_rope_theta": ROPE_THETA,
        "local_rope_theta": ROPE_THETA,
        "global_attn_every_n_layers": 1,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": c.vocab_size,
        "hidden_size": c.n_embd,
        "intermediate_size": c.n_inner,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "max_position_embeddings": c.max_seq_len,
        "norm_eps": c.norm_eps,
        "norm_bias": c.norm_bias,
        "attention_bias": c.query_bias,
        "mlp_bias": c.linear_bias,
        "classifier_bias": c.head_bias,
        "decoder_bias": c.decoder_bias,
        "classifier_activation": "gelu" if c.head_transform else "linear",
    }


def modernbert_logits(tensors, c, ids, mask):
    """The logits (B, T, V) of a ModernBERT (arXiv 2412.13663) of the sizes of c, a ModelConfig, for
    tokens and attention_mask (B, T). It takes what it reads out of tensors, {our name: tensor}, and
    raises KeyError, RuntimeError or AssertionError if one is missing or of another shape."""

    def linear(x, name, size, bias):
        bias = tensors.pop(f"{name}.bias") if bias else None
        y = F.linear(x, tensors.pop(f"{name}.weight"), bias)
        assert y.shape[-1] == size, name
        return y

    def norm(x, name):
        bias = tensors.pop(f"{name}.bias") if c.norm_bias else None
        return F.layer_norm(x, (c.n_embd,), tensors.pop(f"{name}.weight"), bias, c.norm_eps)

    frequency = ROPE_THETA ** -torch.arange(0, 1, 2 * c.n_head / c.n_embd, dtype=torch.float64)
    angles = torch.outer(torch.arange(ids.shape[1]), frequency)  # (T, D / 2)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(x):  # each pair of channels is a complex number
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag), -1)

    table = tensors.pop("model.embeddings.tok_embeddings.weight")
    x = norm(table[ids], "model.embeddings.norm")  # (B, T, C)
    for i in range(c.n_layer):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.attn_norm") if i else x
        biases = {"Wq": c.query_bias, "Wk": c.query_bias, "Wv": c.linear_bias}
        qkv = (linear(h, f"{layer}.attn.{name}", c.n_embd, bias) for name, bias in biases.items())
        q, k, v = (y.unflatten(-1, (c.n_head, -1)).transpose(1, 2) for y in qkv)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, mask[:, None, None].bool())
        x = x + linear(y.transpose(1, 2).flatten(2), f"{layer}.attn.Wo", c.n_embd, c.linear_bias)
        h = norm(x, f"{layer}.mlp_norm")
        h, gate = (
            linear(h, f"{layer}.mlp.{name}", c.n_inner, c.linear_bias) for name in ("Wi", "Wg")
        )
        x = x + linear(F.gelu(h) * gate, f"{layer}.mlp.Wo", c.n_embd, c.linear_bias)
    x = norm(x, "model.final_norm")
    if c.head_transform:
        x = norm(F.gelu(linear(x, "head.dense", c.n_embd, c.head_bias)), "head.norm")
    return F.linear(x, table, tensors.pop("decoder.bias") if c.decoder_bias else None)


@functools.cache
@torch.no_grad()
@float32_products("highest")
def modernbert_names(fields):
    """Names of the parameters of a MaskedLM with these fields of ModelConfig, if a small one of the
    same code has the tensors and the logits of modernbert_logits(); else []."""
    config = ModelConfig(**dict(fields))
    model, ids, _ = small_model(config, min(1024, config.max_seq_len))
    model, ids = model.double(), ids[:1]
    mask = (torch.arange(ids.shape[1])[None] < 0.75 * ids.shape[1]).long()
    tensors = dict(model.named_parameters())
    names = [*tensors]
    try:
        wanted = modernbert_logits(tensors, model.config, ids, mask)
    except (KeyError, RuntimeError, AssertionError):
        return []
    difference = (model(ids, attention_mask=mask) - wanted)[mask == 1]
    # the angles are in float32
    is_equal = not tensors and difference.norm() < 1e-5 * wanted.norm()
    return names if is_equal else []


def is_modernbert(model):
    """Whether a MaskedLM computes what a ModernBERT of its sizes does, whatever its code says."""
    names = [name for name, _ in model.named_parameters()]  # one, where two layers share it
    return names == modernbert_names(tuple(asdict(model.config).items()))


def save(model, folder, **facts):
    """Write config.json, with facts, and model.safetensors (float32); raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to("cpu", torch.float32).contiguous() for k, v in model.state_dict().items()}
    config = modernbert_config(model.config)
    if is_tied := "decoder.weight" not in dict(model.named_parameters()):
        del weights["decoder.weight"]
    if is_modernbert(model):
        weights = to_folder_keys(weights, model.config)
    else:
        weights = {f"net.{key}": tensor for key, tensor in weights.items()}
        config = {name: config[name] for name in SHARED.split()}
        config |= {"model_type": "nanocram", "architectures": ["NanocramForMaskedLM"]}
        # pipelines of transformers 4 ask for the class of the tokenizer
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": AUTO_MAP}
        config["tie_word_embeddings"] = is_tied
        for name, code in CODE.items():
            write_text(folder / name, code)
    config |= {"nanocram": asdict(model.config), **facts}
    write_text(folder / "config.json", json.dumps(config, indent=2))
    # a layer that an edit uses twice is written twice
    first = {v.data_ptr(): k for k, v in reversed(weights.items())}
    weights = {k: v if first[v.data_ptr()] == k else v.clone() for k, v in weights.items()}

    def write(temporary):
        for stray in folder.glob(".tmp*"):  # of a save_file() that was killed
            stray.unlink()
        try:
            save_file(weights, temporary, metadata={"format": "pt"})
        except SafetensorError as e:  # a full disk, say
            raise OSError(str(e)) from None
        # save_file() lets nobody but the owner read
        shutil.copymode(folder / "config.json", temporary)

    write_beside(folder / "model.safetensors", write)


def load(folder, device="cpu", trust_remote_code=False):
    """The MaskedLM in folder, evaluating; computed by this model.py, or by the one that the folder
    carries, if that is trusted. Raises ValueError: what is wrong."""
    folder = Path(folder)
    code = {"ModelConfig": ModelConfig, "MaskedLM": MaskedLM}
    try:
        spec = json.loads((folder / "config.json").read_text("utf-8"))
        state = load_file(folder / "model.safetensors")
        if "nanocram" not in spec or any("classifier." in key for key in state):
            raise ValueError("fine-tuned, or not of train.py: for GLUE type --baseline=hf:FOLDER")
        if "auto_map" in spec and trust_remote_code:
            code = runpy.run_path(str(folder / "model.py"))
        elif "auto_map" in spec and (folder / "model.py").read_text("utf-8") != CODE["model.py"]:
            say_once(
                f"WARNING: {folder} has a model.py of its own, and this one computes its model"
            )
        config = code["ModelConfig"](**spec["nanocram"])
        model = code["MaskedLM"](config)
        state = {key.removeprefix("net."): tensor for key, tensor in state.items()}
        if spec["model_type"] == "modernbert":
            state = from_folder_keys(state, config)
        state.setdefault("decoder.weight", state["model.embeddings.tok_embeddings.weight"])
        model.load_state_dict(state)
    except Exception as e:  # there are many ways to be broken
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise ValueError(f"{folder} is no model folder of train.py: {reason}") from None
    model.trained_on = spec.get("trained_on", {})
    return model.to(device).eval()


def load_into(model, folder):
    """Give a MaskedLM the weights in folder; return what they have read."""
    theirs = load(folder)
    model.load_state_dict(theirs.state_dict())
    return theirs.trained_on


def config_for_rows(folder, data_dir):
    """The fields of its ModelConfig; exits if rows of data_dir are not of the folder's tokens."""
    try:
        config = asdict(load(folder).config)
        vocabulary = Path(folder, "tokenizer.json").read_bytes()
    except (ValueError, OSError) as e:
        sys.exit(f"init must be scratch, resume, auto or a model folder: {e}")
    ours = Path(data_dir, "tokenizer.json")
    if not ours.exists() or ours.read_bytes() != vocabulary:
        sys.exit(f"{data_dir} has no rows of its tokens: give prepare.py --tokenizer={folder}")
    return config


def to_folder_keys(state, config):
    """Our state dict as ModernBERT has it."""
    if not config.head_transform:
        state = {key.replace("model.final_norm", "head.norm"): t for key, t in state.items()}
    state |= only_in_modernbert(config)
    for joined, names in JOINED.items():
        for key in [key.replace(names[-1], "{}") for key in state if names[-1] in key]:
            state[key.format(joined)] = torch.cat([state.pop(key.format(n)) for n in names])
    return state


def from_folder_keys(state, config):
    """The inverse of to_folder_keys(); raises ValueError if a tensor that it adds was trained."""
    for joined, names in JOINED.items():
        for key in [key for key in state if joined in key]:
            parts = state.pop(key).chunk(len(names))
            for name, part in zip(names, parts, strict=True):
                state[key.replace(joined, name)] = part
    for key, tensor in only_in_modernbert(config).items():
        if not torch.equal(state.pop(key), tensor):
            raise ValueError(f"{key} was trained elsewhere: only --baseline=hf:FOLDER takes it")
    if not config.head_transform:
        state = {key.replace("head.norm", "model.final_norm"): t for key, t in state.items()}
    return state


def only_in_modernbert(config):
    """{key: tensor} that a ModernBERT has, and our model lacks. It has biases of Wv and Wo wherever
    it has those of Wq and Wk: ours are zeros. Without a head transform a head's dense layer is the
    identity, its norm our final norm, and the final norm has ones; normalising twice changes at
    most a share of norm_eps / 2, where the variance is 1 or more."""
    C, found = config.n_embd, {}
    for i in range(config.n_layer if config.query_bias and not config.linear_bias else 0):
        found |= {f"model.layers.{i}.attn.{name}.bias": torch.zeros(C) for name in ("Wv", "Wo")}
    if not config.head_transform:
        found |= {"head.dense.weight": torch.eye(C), "model.final_norm.weight": torch.ones(C)}
        found |= {"head.dense.bias": torch.zeros(C)} if config.head_bias else {}
        found |= {"model.final_norm.bias": torch.zeros(C)} if config.norm_bias else {}
    return found
