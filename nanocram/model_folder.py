"""The model folder: config.json and model.safetensors, a ModernBERT wherever the model is one,
which transformers loads with no code of ours. Others keep our own names, for load():

    python -c "from nanocram import model_folder; print(model_folder.load('out/tiny').config)"
"""

import json
import shutil
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import FOR_TRAINING, ROPE_THETA, MaskedLM, ModelConfig
from nanocram.safety import write_beside, write_text

# The switches that decide the architecture, as ModernBERT has them.
NATIVE = {
    "activation": "geglu",
    "position_embedding": "rope",
    "post_norm": False,
    "embedding_norm": True,
    "first_attn_norm": False,
    "final_norm": True,
    "token_types": 0,
}
# ModernBERT's fields of config.json: those that never change, and our names for the others.
FIXED = {
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
}
SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "max_seq_len",
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "attention_bias": "query_bias",
    "mlp_bias": "linear_bias",
    "classifier_bias": "head_bias",
    "decoder_bias": "decoder_bias",
}
# Its matrices that are several here: Muon orthogonalises each by itself.
JOINED = {".Wqkv.": (".Wq.", ".Wk.", ".Wv."), ".Wi.": (".Wi.", ".Wg.")}


def not_native(model):
    """Why a MaskedLM is no ModernBERT, in a few words; '' where it is one. Only tests/test_edit.py
    sees an edit that has neither a switch of its own, nor parameters or buffers."""
    have = asdict(model.config)
    # save() adds what a model lacks by two of these; a fork's switches have a default
    known = {*NATIVE, *SAME.values(), "head_transform", "neighbour_heads", *FOR_TRAINING}
    native = NATIVE | {f.name: f.default for f in fields(model.config) if f.name not in known}
    native["n_narrow"] = min(have["n_narrow"], 1)  # one narrow layer computes what none does
    wrong = [f"{name}={have[name]}" for name in native if have[name] != native[name]]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = native_shapes(model.config)
    other = [name for name, t in tensors.items() if t.shape != shapes.get(name)]
    other += [f"no {name}" for name in shapes if name not in tensors]  # a layer that is there twice
    return ", ".join(wrong or other[:1])


def native_shapes(config):
    """{our name: shape} of the parameters and buffers of a ModernBERT of these sizes."""
    V, C, n_head, inner = config.vocab_size, config.n_embd, config.n_head, config.n_inner
    block = {f"attn.W{name}": (C, C) for name in "qkvo"} | {"attn_norm": (C,), "mlp_norm": (C,)}
    block |= {"mlp.Wi": (inner, C), "mlp.Wg": (inner, C), "mlp.Wo": (C, inner)}
    modules = {"model.embeddings.norm": (C,), "model.final_norm": (C,), "decoder": (V, C)}
    for i in range(config.n_layer):
        modules |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    del modules["model.layers.0.attn_norm"]
    if config.head_transform:
        modules |= {"head.dense": (C, C), "head.norm": (C,)}
    shapes = dict.fromkeys(("model.rope_cos", "model.rope_sin"), (config.max_seq_len, C // n_head))
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        kind = next((kind for kind in ("norm", "head", "decoder") if kind in name), "linear")
        kind = "query" if name.endswith(("Wq", "Wk")) else kind
        if getattr(config, f"{kind}_bias"):
            shapes[f"{name}.bias"] = shape[:1]
    shapes["model.embeddings.tok_embeddings.weight"] = shapes.pop("decoder.weight")  # one tensor
    return shapes


def modernbert_config(config):
    """ModernBERT's own fields of config.json, for a model of the sizes of config."""
    same = {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
    same["classifier_activation"] = "gelu" if config.head_transform else "linear"
    return FIXED | same


def save(model, folder, **facts):
    """Write config.json, with facts, and model.safetensors (float32); raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to("cpu", torch.float32).contiguous() for k, v in model.state_dict().items()}
    config = {"model_type": "nanocram"}
    if "decoder.weight" not in dict(model.named_parameters()):  # no edit has untied it
        del weights["decoder.weight"]
    if not not_native(model):
        weights, config = to_folder_keys(weights, model.config), modernbert_config(model.config)
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


def load(folder, device="cpu"):
    """The MaskedLM in folder, evaluating; raises ValueError: what is wrong."""
    folder = Path(folder)
    try:
        spec = json.loads((folder / "config.json").read_text("utf-8"))
        state = load_file(folder / "model.safetensors")
        if "nanocram" not in spec or "classifier.weight" in state:
            raise ValueError("fine-tuned, or not of train.py: for GLUE type --baseline=hf:FOLDER")
        config = ModelConfig(**spec["nanocram"])
        model = MaskedLM(config)
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
