"""The model folder, which transformers loads: config.json, model.safetensors and, if the model is
not surely a ModernBERT, its code: model.py, and hf_model.py, the classes of transformers around it.
"""

import hashlib
import json
import re
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import safetensors
import torch

from model import FOR_TRAINING, ROPE_THETA, MaskedLM, ModelConfig
from nanocram.safety import say_once, write_beside, write_text
from nanocram.tokenizer import Tokenizer

# What a folder carries where the model is no ModernBERT: its classes for transformers, and the code
# as this process has it, for somebody may edit model.py meanwhile.
KINDS = "Config Model ForMaskedLM ForSequenceClassification ForTokenClassification".split()
AUTO_MAP = {f"Auto{x.replace('For', 'ModelFor')}": f"hf_model.Nanocram{x}" for x in KINDS}
CODE = {"hf_model.py": Path(__file__).with_name("hf_model.py").read_text("utf-8")}
CODE["model.py"] = Path(sys.modules["model"].__file__).read_text("utf-8")
# hash_of_code() of the model.py that tests/test_model_folder.py found to be a ModernBERT
MODERNBERT = "58c58a871125a1fe"
# what a ModernBERT has, of what ModelConfig lets one choose
NATIVE = {"activation": "geglu", "position_embedding": "rope", "embedding_norm": True}
NATIVE |= {"final_norm": True, "first_attn_norm": False, "post_norm": False, "token_types": 0}
# fields of config.json that other programs may change, for the model computes the same
FREE = {"model_type", "architectures", "dtype", "tie_word_embeddings", "classifier_pooling"}
FREE |= {f"{name}_token_id" for name in ("pad", "cls", "sep", "bos", "eos")}
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


def hash_of_code(code=CODE["model.py"]):
    """A hash of a model.py, but for comments, docstrings, fields of ModelConfig and make_loss()."""
    code = re.sub(r'def make_loss\(.*?\n(?=\S)|""".*?"""|#[^\n]*', "", code, flags=re.DOTALL)
    code = re.sub(r"\n(FOR_TRAINING =|    \w+: (int|float|bool|str)\b).*", "", code)
    return hashlib.sha256(re.sub(r"\s+\n", "\n", code).encode()).hexdigest()[:16]


def fingerprint(tensors):
    """16 hexadecimal digits of SHA-256 over the bytes of a state dict's tensors, in its order."""
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def not_native(c):
    """Why a MaskedLM of this ModelConfig is not surely a ModernBERT; '' where it is one."""
    native = {f.name: f.default for f in fields(c) if f.default is not MISSING}  # a fork's, too
    native |= NATIVE | {"n_narrow": min(c.n_narrow, 1)}  # one changes nothing
    bound = sorted(native.keys() - FOR_TRAINING - {"neighbour_heads"})  # which save() translates
    wrong = [f"{name}={getattr(c, name)}" for name in bound if getattr(c, name) != native[name]]
    return ", ".join(wrong + ["an edited model.py"] * (hash_of_code() != MODERNBERT))


def save(model, folder, **facts):
    """Write config.json, with facts, and model.safetensors (float32); raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to("cpu", torch.float32).contiguous() for k, v in model.state_dict().items()}
    config = modernbert_config(model.config)
    if is_tied := "decoder.weight" not in dict(model.named_parameters()):
        del weights["decoder.weight"]
    if not not_native(model.config):
        weights = to_folder_keys(weights, model.config)
    else:
        weights = {f"net.{key}": tensor for key, tensor in weights.items()}
        shared = "vocab_size hidden_size num_hidden_layers num_attention_heads"
        config = {name: config[name] for name in (*shared.split(), "max_position_embeddings")}
        config |= {"model_type": "nanocram", "tie_word_embeddings": is_tied}
        config |= {"architectures": ["NanocramForMaskedLM"], "auto_map": AUTO_MAP}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # for pipelines of transformers 4
        for name, code in CODE.items():
            write_text(folder / name, code)
    config |= {"nanocram": asdict(model.config), **facts}
    write_text(folder / "config.json", json.dumps(config, indent=2))
    weights = dict(sorted(weights.items()))

    def write(path):
        # by hand: safetensors writes two entries of metadata in a random order
        header, end = {"__metadata__": {"format": "pt", "sha256": fingerprint(weights)}}, 0
        for name, tensor in weights.items():
            place = [end, end := end + tensor.nbytes]
            header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.writelines(tensor.numpy() for tensor in weights.values())

    write_beside(folder / "model.safetensors", write)


def read_weights(folder):
    """The tensors in model.safetensors; raises ValueError if it is missing or damaged."""
    path = folder / "model.safetensors"
    if not path.exists():  # shards, or pytorch_model.bin, of another program
        raise ValueError("no model.safetensors: save_pretrained(max_shard_size='1TB'), or resume")
    with safetensors.safe_open(path, "pt") as file:
        weights = {key: file.get_tensor(key) for key in sorted(file.keys())}
        checksum = (file.metadata() or {}).get("sha256")  # other programs save none
    if checksum and checksum != fingerprint(weights):
        raise ValueError(f"{path.name} is damaged: delete it, and a resume from ckpt.pt writes it")
    return weights


def load(folder, device="cpu"):
    """The MaskedLM in folder, by the model.py here, evaluating; raises ValueError."""
    folder = Path(folder)
    try:
        spec = json.loads((folder / "config.json").read_text("utf-8"))
        state = read_weights(folder)
        kind = spec.get("architectures", ["NanocramForMaskedLM"])[0]  # older folders have none
        if "nanocram" not in spec or not kind.endswith("ForMaskedLM"):
            raise ValueError("fine-tuned, or not of train.py: for GLUE type --baseline=hf:FOLDER")
        own = "auto_map" in spec and (folder / "model.py").read_text("utf-8")
        if (hash_of_code(own) if own else MODERNBERT) != hash_of_code():
            say_once(f"WARNING: {folder} is by another model.py, and the one here computes it")
        model = MaskedLM(c := ModelConfig(**spec["nanocram"]))
        found, is_native = spec["nanocram"] | spec, spec["model_type"] == "modernbert"
        wanted = modernbert_config(c)
        wanted["layer_types"] = ["full_attention"] * c.n_layer  # as transformers 5 writes it
        wanted |= NATIVE | {"n_narrow": min(c.n_narrow, 1)} if is_native else {}
        if other := [k for k in wanted.keys() - FREE if found.get(k, wanted[k]) != wanted[k]]:
            raise ValueError(f"config.json contradicts itself: {min(other)}={found[min(other)]}")
        state = {key.removeprefix("net."): tensor for key, tensor in state.items()}
        if is_native:
            state = from_folder_keys(state, model.config)
        state.setdefault("decoder.weight", state["model.embeddings.tok_embeddings.weight"])
        model.load_state_dict(state)
    except Exception as e:  # there are many ways to be broken
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise ValueError(f"{folder} is no model folder of train.py: {reason}") from None
    model.trained_on = spec.get("trained_on") or {}
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
    except ValueError as e:
        sys.exit(f"init must be scratch, resume, auto or a model folder: {e}")
    theirs, ours = (Path(place, "tokenizer.json") for place in (folder, data_dir))
    if not ours.exists() or Tokenizer(ours).vocabulary != Tokenizer(theirs).vocabulary:
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
