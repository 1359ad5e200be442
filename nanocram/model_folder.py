"""The model folder: config.json and model.safetensors, natively a ModernBERT wherever the model is one.

    python -c "from nanocram import model_folder; print(model_folder.load('out/tiny').config)"
    python -c "from transformers import AutoModelForMaskedLM as M; print(M.from_pretrained('out/tiny'))"

transformers loads such a folder with no code of ours. What is no ModernBERT is saved under our own names, for load().
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from model import ROPE_THETA, Classifier, MaskedLM, ModelConfig
from nanocram.safety import write_beside


def not_native(config):
    """Why a model of this config is no ModernBERT, in a few words; '' where it is one."""
    works = {
        "n_narrow": [0, 1],
        "position": ["rope"],
        "post_norm": [False],
        "embedding_norm": [True],
        "first_attn_norm": [False],
        "final_norm": [True],
        "head_transform": [True],
        "token_types": [0],
        "activation": ["geglu", "relu2"],
    }
    return ", ".join(
        f"{k}={getattr(config, k)}" for k, v in works.items() if getattr(config, k) not in v
    )


def folder_config(config, labels=None):
    """The dict of config.json: ModernBERT's own keys where the model is one, and ours under "nanocram" always.

    labels: of a Classifier, the names of its outputs; () for a regression."""
    ours = {"nanocram": asdict(config)}
    if labels is not None:
        names = dict(enumerate(labels or ("LABEL_0",)))
        ours |= {
            "id2label": names,
            "label2id": {name: i for i, name in names.items()},
            "classifier_dropout": 0.1,
            "problem_type": "single_label_classification" if labels else "regression",
        }
    if not_native(config):
        return {"model_type": "nanocram", **ours}
    kind = "ForMaskedLM" if labels is None else "ForSequenceClassification"
    relu2 = (
        config.activation == "relu2"
    )  # relu(a) · g with a = g = Wi x is relu², exactly: Wi is stored twice
    return {
        "architectures": [f"ModernBert{kind}"],
        "model_type": "modernbert",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": config.max_seq_len,
        "hidden_activation": "relu" if relu2 else "gelu",
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.linear_bias,
        "mlp_bias": config.linear_bias,
        "classifier_bias": config.linear_bias,
        "decoder_bias": config.decoder_bias,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
        "tie_word_embeddings": True,
        "global_attn_every_n_layers": 1,
        "global_rope_theta": ROPE_THETA,
        "local_rope_theta": ROPE_THETA,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "bos_token_id": 1,
        "sep_token_id": 2,
        "eos_token_id": 2,
        **ours,
    }


def to_folder_keys(state, config):
    """Our state dict under the names and shapes of the model folder: q, k, v as one matrix, the tied decoder once."""
    state = {k: v for k, v in state.items() if k != "decoder.weight"}
    if not_native(config):
        return state
    for key in [k for k in state if ".attn.Wq." in k]:
        parts = [state.pop(key.replace("Wq", name)) for name in ("Wq", "Wk", "Wv")]
        state[key.replace("Wq", "Wqkv")] = torch.cat(parts)
    if config.activation == "relu2":
        state |= {k: torch.cat((v, v)) for k, v in state.items() if ".mlp.Wi." in k}
    return state


def from_folder_keys(state, config):
    """The inverse of to_folder_keys; takes the dict apart."""
    for key in [k for k in state if ".attn.Wqkv." in k]:
        for name, part in zip(("Wq", "Wk", "Wv"), state.pop(key).chunk(3), strict=True):
            state[key.replace("Wqkv", name)] = part
    if config.activation == "relu2" and not not_native(config):
        state |= {k: v.chunk(2)[0] for k, v in state.items() if ".mlp.Wi." in k}
    return state


def save(model, folder, labels=None, **facts):
    """Write config.json and model.safetensors (float32) of a MaskedLM into folder, each beside its goal and renamed.

    With labels, the names of its outputs or () for a regression, of a Classifier. facts go into config.json."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(path):
        try:
            save_file(weights, path, metadata={"format": "pt"})
        except SafetensorError as e:  # its word for a full disk, among others
            raise OSError(str(e)) from None

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = to_folder_keys({k: plain(v) for k, v in model.state_dict().items()}, model.config)
    weights = {k: v.detach().to("cpu", torch.float32).contiguous() for k, v in state.items()}
    config = folder_config(model.config, labels) | facts
    write_beside(folder / "config.json", lambda p: p.write_text(json.dumps(config, indent=2)))
    write_beside(folder / "model.safetensors", write)


def plain(tensor):
    """The tensor behind a DTensor of one process, sharing its memory (train.py --offload=True); others as they are."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor


def complaint(state, wanted):
    """The first thing that is wrong with a state dict beside one with the right names and shapes, or ''."""
    for name in sorted(state.keys() | wanted.keys()):
        if name not in wanted or name not in state:
            return f"{name} is {'missing' if name in wanted else 'unknown'}"
        if state[name].shape != wanted[name].shape:
            return f"{name} is of shape {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}"
        if not torch.isfinite(state[name]).all():
            return f"{name} is not finite everywhere"
    return ""


def load(folder, device="cpu"):
    """The MaskedLM or Classifier in folder, in evaluation mode. Raises ValueError: what is wrong and what to type."""
    from safetensors.torch import load_file

    try:
        settings = json.loads((Path(folder) / "config.json").read_text())
        model, state = (
            MaskedLM(ModelConfig(**settings["nanocram"])),
            load_file(Path(folder) / "model.safetensors"),
        )
        state = {
            k: v.reshape(v.shape or (1,)) for k, v in state.items()
        }  # position_scale was a scalar once
        if "id2label" in settings:
            model = Classifier(model, len(settings["id2label"]))
        if wrong := complaint(state, to_folder_keys(model.state_dict(), model.config)):
            raise ValueError(wrong)
        state = from_folder_keys(state, model.config)
        if isinstance(model, MaskedLM):
            state["decoder.weight"] = state["model.embeddings.tok_embeddings.weight"]
        model.load_state_dict(state)
    except Exception as e:  # there are many ways to be broken
        raise ValueError(
            f"{folder} is no model folder of train.py, name the out_dir of a run: {e!r:.150}"
        ) from None
    return model.to(device).eval()


def maker(folder):
    """What made the classifier in folder, '' where there is no folder; exits if something else is there."""
    try:
        return json.loads((folder / "config.json").read_text())["made"] if folder.exists() else ""
    except (OSError, ValueError, LookupError, TypeError):
        sys.exit(
            f"{folder} exists and is no classifier of ours: move it away, or leave out --save_models"
        )
