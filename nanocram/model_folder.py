"""The model folder: config.json and model.safetensors, a ModernBERT wherever the model is one.

    python -c "from nanocram import model_folder; print(model_folder.load('out/tiny').config)"
    python -c "from transformers import AutoModel; print(AutoModel.from_pretrained('out/tiny'))"

transformers loads such a folder with no code of ours. What is no ModernBERT is saved under our own
names, for load().
"""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from model import ROPE_THETA, Classifier, MaskedLM, ModelConfig
from nanocram.safety import first_line, write_beside, write_text

# The switches that make another architecture, as ModernBERT has them.
NATIVE = {
    "activation": "geglu",
    "position_embedding": "rope",
    "post_norm": False,
    "embedding_norm": True,
}
NATIVE |= {"first_attn_norm": False, "final_norm": True, "token_types": 0}

# Our fields by ModernBERT's names, and what never changes.
SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "max_seq_len",
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "attention_bias": "linear_bias",
    "mlp_bias": "linear_bias",
    "classifier_bias": "head_bias",
    "decoder_bias": "decoder_bias",
}
# Fields that change no computation of a ModernBERT, or are looked at by themselves.
APART = {"n_narrow", "head_transform", "dropout", "zero_init"}
# Fields of ModelConfig and State by the names that they had until November 2026.
RENAMED = {"position": "position_embedding", "start_seconds": "setup_seconds"}
RENAMED |= {"skipped_in_row": "consecutive_skips"}
FIXED = {"model_type": "modernbert", "dtype": "float32", "tie_word_embeddings": True}
FIXED |= {"hidden_activation": "gelu", "classifier_pooling": "cls"}
FIXED |= {"global_rope_theta": ROPE_THETA, "local_rope_theta": ROPE_THETA}
FIXED |= {"global_attn_every_n_layers": 1, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
FIXED |= {"bos_token_id": 1, "eos_token_id": 2}


# A ModernBERT so small that model.py can be asked at any time what it computes: of 128 tokens the
# last one's first four logits, with a head and without, as transformers has them (test_model.py).
PROBE = {"vocab_size": 12, "max_seq_len": 128, "n_layer": 4, "n_head": 2, "n_embd": 8}
PROBE |= {"n_inner": 12, "n_narrow": 0, "linear_bias": False, "norm_bias": False}
PROBE |= {"decoder_bias": False, "norm_eps": 1e-5, "dropout": 0.0, "zero_init": False}
PROBE_THETA = 10000.0
PROBE_IDS = torch.arange(128)[None] % 12
PROBE_LOGITS = {
    True: (1.178206, -0.393363, -1.788460, -2.380637),
    False: (0.480757, -0.009538, -0.495408, -0.758930),
}


def probe(config):
    """(MaskedLM, logits (4,)) of config, but for what PROBE has; its weights are a formula's."""
    with torch.random.fork_rng(devices=[]):  # a run's random numbers stay what they were
        probed = MaskedLM(replace(config, **PROBE)).eval()
    for name, tensor in probed.state_dict().items():
        angles = 0.7 * torch.arange(tensor.numel()) + sum(name.encode())
        tensor.copy_(1.5 * angles.sin().view(tensor.shape))
    with torch.no_grad():
        return probed, probed(PROBE_IDS, PROBE_IDS.new_tensor([[127]]))[0, 0, :4]


def is_edited(config):
    """Whether model.py computes something else than transformers' ModernBERT: a fork may have
    changed a layer that has no switch. With another ROPE_THETA, which config.json says, it is not
    known."""
    if ROPE_THETA != PROBE_THETA:
        return False
    wanted = torch.tensor(PROBE_LOGITS[config.head_transform])
    try:
        return not torch.allclose(probe(config)[1], wanted, rtol=1e-4, atol=1e-4)
    except Exception:  # it has other arguments, or shapes that do not fit: no ModernBERT either
        return True


def not_native(config):
    """Why a model of this config is no ModernBERT, in a few words; '' where it is one.

    Nor is it one where a fork's switch is not at its default, or after an edit of model.py that
    changes what is computed (biases are not looked at)."""
    wrong = [name for name, value in NATIVE.items() if getattr(config, name) != value]
    known = {*NATIVE, *SAME.values(), *APART}
    added = [f for f in fields(config) if f.name not in known]
    wrong += [f.name for f in added if getattr(config, f.name) != f.default]
    if config.n_narrow > 1:  # one narrow layer computes what the full model does
        wrong.append("n_narrow")
    if not wrong and is_edited(config):
        return "model.py as it was edited"
    return ", ".join(f"{name}={getattr(config, name)}" for name in wrong)


def modernbert_shape(config):
    """ModernBERT's own keys of config.json, for a model of the sizes of config."""
    found = FIXED | {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
    found["classifier_activation"] = "gelu" if config.head_transform else "linear"
    return found


def folder_config(config, labels=None):
    """The dict of config.json: ModernBERT's own keys where the model is one, ours always.

    labels: of a Classifier, the names of its outputs; () for a regression."""
    found = {"model_type": "nanocram"}
    if not not_native(config):
        task = "ForMaskedLM" if labels is None else "ForSequenceClassification"
        found = modernbert_shape(config) | {"architectures": [f"ModernBert{task}"]}
    if labels is not None:
        names = labels or ("LABEL_0",)
        found["id2label"] = dict(enumerate(names))
        found["label2id"] = {name: i for i, name in enumerate(names)}
        found["problem_type"] = "single_label_classification" if labels else "regression"
    return found | {"nanocram": asdict(config)}


def distinguishing_fields(config):
    """{field: value} by which models are compared: one that a fork has added only where it is not
    at its default."""
    known = {*NATIVE, *SAME.values(), *APART}
    default_of = {field.name: field.default for field in fields(config)}
    all_fields = asdict(config).items()
    return {name: v for name, v in all_fields if name in known or v != default_of[name]}


def today(saved, known, where):
    """{field: value} as older code, or a fork's, has saved it, by today's names.

    A field that is not among the known ones is named in a line and left out."""
    renamed = {RENAMED.get(name, name): value for name, value in saved.items()}
    gone = [str(name) for name in renamed if name not in known]
    if gone:
        print(f"{where} also has what this code does not know, left out: {', '.join(gone)}")
    return {name: value for name, value in renamed.items() if name in known}


def to_folder_keys(state, config, is_native):
    """Our state dict under the names of the model folder: the tied decoder once, q, k, v as one."""
    state = {key: tensor for key, tensor in state.items() if key != "decoder.weight"}
    if not is_native:
        return state
    for key in [key for key in state if ".attn.Wq." in key]:
        parts = [state.pop(key.replace("Wq", name)) for name in ("Wq", "Wk", "Wv")]
        state[key.replace("Wq", "Wqkv")] = torch.cat(parts)
    if not config.head_transform:
        for key in [key for key in state if key.startswith("model.final_norm.")]:
            state[key.replace("model.final_norm", "head.norm")] = state[key]
        state |= identity_head(config)
    return state


def from_folder_keys(state, config, is_native):
    """The inverse of to_folder_keys(); raises ValueError if an identity_head() was trained."""
    for key in [key for key in state if ".attn.Wqkv." in key]:
        for name, part in zip(("Wq", "Wk", "Wv"), state.pop(key).chunk(3), strict=True):
            state[key.replace("Wqkv", name)] = part
    if is_native and not config.head_transform:
        for key, tensor in identity_head(config).items():
            if not torch.equal(state.pop(key), tensor):
                raise ValueError(f"{key} was trained elsewhere; try --baseline=hf:FOLDER")
        for key in [key for key in state if key.startswith("head.norm.")]:
            state[key.replace("head.norm", "model.final_norm")] = state.pop(key)
    return state


def identity_head(config):
    """The weights that a ModernBERT needs for its head where our model has none.

    The head's dense layer is the identity. Its norm has our final norm's weights, and the final
    norm before it has ones: normalising twice differs from once by no more than norm_eps / 2 of it,
    where the variance is 1 or more."""
    width = config.n_embd
    weights = {"head.dense.weight": torch.eye(width), "model.final_norm.weight": torch.ones(width)}
    if config.head_bias:
        weights["head.dense.bias"] = torch.zeros(width)
    if config.norm_bias:
        weights["model.final_norm.bias"] = torch.zeros(width)
    return weights


def save(model, folder, labels=None):
    """Write config.json and model.safetensors (float32) of a MaskedLM or Classifier into folder.

    labels as for folder_config. Raises OSError where that fails."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = to_folder_keys(model.state_dict(), model.config, not not_native(model.config))
    weights = {k: v.detach().to("cpu", torch.float32).contiguous() for k, v in state.items()}
    config = folder_config(model.config, labels)
    if labels is not None:
        config["classifier_pooling"] = model.pooling  # ModernBERT's names
        config["classifier_dropout"] = model.drop.p
    write_text(folder / "config.json", json.dumps(config, indent=2))
    write_beside(folder / "model.safetensors", lambda path: write_tensors(weights, path))


def write_tensors(tensors, path):
    """Write {name: float32 tensor} as safetensors: the header's length, the header, the data.

    The library's save_file() writes a hidden file of its own, which a kill leaves behind for good,
    and which nobody but its owner may read; its save() holds all of them in memory once more."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.numpy())


def load(folder, device="cpu"):
    """The MaskedLM or Classifier in folder, evaluating; raises ValueError: what is wrong."""
    from safetensors.torch import load_file

    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        state = load_file(Path(folder) / "model.safetensors")
        # Not by today's not_native(): defaults of a fork's switches may have been others then.
        is_native = config["model_type"] == "modernbert"
        known = {field.name for field in fields(ModelConfig)}
        model = MaskedLM(ModelConfig(**today(config["nanocram"], known, folder)))
        # Of two labels without names, transformers writes none.
        labels = config.get("id2label", ("LABEL_0", "LABEL_1"))
        if "id2label" in config or "ForSequenceClassification" in str(config.get("architectures")):
            if not model.config.head_transform:
                raise ValueError("a classifier of transformers' making; try --baseline=hf:FOLDER")
            pooling = config.get("classifier_pooling", "cls")
            dropout = config.get("classifier_dropout", 0.1)
            model = Classifier(model, len(labels), dropout, pooling)
        wrong = misfit(state, to_folder_keys(model.state_dict(), model.config, is_native))
        if wrong:
            raise ValueError(wrong)
        state = from_folder_keys(state, model.config, is_native)
        if isinstance(model, MaskedLM):
            state["decoder.weight"] = state["model.embeddings.tok_embeddings.weight"]
        model.load_state_dict(state)
    except Exception as e:  # there are many ways to be broken
        why = f"name the out_dir of a run ({type(e).__name__}: {first_line(e)})"
        raise ValueError(f"{folder} is no model folder of train.py: {why}") from None
    return model.to(device).eval()


def misfit(state, wanted):
    """What is wrong with a state dict: a name or shape not as in wanted, or not finite; or ''."""
    for name in sorted(state.keys() | wanted.keys()):
        if name not in wanted:
            return f"{name} is unknown"
        if name not in state:
            return f"{name} is missing"
        shape, right = tuple(state[name].shape), tuple(wanted[name].shape)
        if shape != right:
            return f"{name} is of shape {shape}, not {right}"
    return not_finite(state)


def not_finite(state):
    """Which tensor of a state dict has an infinity or a NaN in it, in a few words, or ''."""
    wrong = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    return f"{wrong[0]} is not finite everywhere" if wrong else ""
