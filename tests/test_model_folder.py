"""What transformers reads of a model folder, and what load() does.

After an edit of model.py that has no switch, run this file: the first test asks whether a folder
that says ModernBERT still computes what transformers does.
"""

import json
from dataclasses import fields

import pytest
import torch
import transformers
from conftest import model_config
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from model import CHOICES, MaskedLM, ModelConfig
from nanocram.model_folder import load, not_native, save

SIZES = dict(vocab_size=90, max_seq_len=160, n_layer=3, n_head=2, n_embd=32, n_inner=24)
HF_MLM = transformers.AutoModelForMaskedLM
HF_CLASSIFIER = transformers.AutoModelForSequenceClassification


def random_model(**switches):
    """A small model whose every parameter is random, so that none can be left out unnoticed."""
    torch.manual_seed(0)
    model = MaskedLM(model_config(**(SIZES | switches))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def batch():
    """Tokens (3, 150) and their attention_mask; two rows are padded."""
    torch.manual_seed(1)
    ids, mask = torch.randint(4, 90, (3, 150)), torch.ones(3, 150, dtype=torch.long)
    mask[1, 120:] = 0
    mask[2, 5:] = 0
    return ids, mask


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"linear_bias": True, "norm_bias": True},
        {"decoder_bias": False},
        {"head_transform": True, "linear_bias": True, "norm_bias": True, "norm_eps": 1e-3},
        {"norm_eps": 1e-3},  # it counts twice beside an identity head
    ],
)
@torch.no_grad()
def test_the_folder_is_a_modernbert(tmp_path, switches):
    model = random_model(**switches)
    save(model, tmp_path)
    theirs, info = HF_MLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "ModernBertForMaskedLM"
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids, mask = batch()
    wanted = theirs(ids, attention_mask=mask).logits[mask.bool()]
    found = model(ids, attention_mask=mask)[mask.bool()]
    tolerance = 1e-5 if model.config.head_transform else max(1e-5, model.config.norm_eps)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


def test_what_is_native():
    def why(**switches):
        return not_native(random_model(**switches))

    assert why() == why(n_narrow=1) == why(head_transform=True, linear_bias=True) == ""
    assert why(activation="relu2") == "activation=relu2"
    both = why(position_embedding="learned", n_narrow=2)
    assert "position_embedding=learned" in both and "n_narrow=2" in both


def test_parameters_that_modernbert_lacks_are_seen(tmp_path):
    """Those of an edit without a switch: transformers would load the folder without them."""
    for place, name in (("model.layers.1", "conv"), ("model.layers.1.attn", "norm"), ("", "bend")):
        model = random_model()
        setattr(model.get_submodule(place), name, torch.nn.LayerNorm(32, bias=False))
        assert not_native(model) == f"{place}.{name}.weight".lstrip(".")
        save(model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nanocram"
    model.scale = torch.nn.Parameter(torch.ones(1))
    assert not_native(model) == "scale"


def test_what_was_fine_tuned_is_refused(tmp_path):
    """It has a head that was not pre-trained."""
    save(random_model(head_transform=True), tmp_path / "ours")
    theirs = HF_CLASSIFIER.from_pretrained(tmp_path / "ours", num_labels=3)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="fine-tuned"):
        load(tmp_path / "theirs")


def test_what_transformers_made_of_a_model_without_head_transform(tmp_path):
    """Saved as it was, it comes back; trained further, it is refused."""
    model = random_model()
    save(model, tmp_path / "ours")
    theirs = HF_MLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "again")
    ids, _ = batch()
    assert torch.equal(load(tmp_path / "again")(ids), model(ids))
    with torch.no_grad():
        theirs.head.dense.weight[0, 1] = 0.5
    theirs.save_pretrained(tmp_path / "trained")
    with pytest.raises(ValueError, match=r"head\.dense\.weight"):
        load(tmp_path / "trained")


def config_or_reject(**changes):
    try:
        return model_config(**changes)
    except ValueError:  # n_narrow and n_layer do not fit, or a fork's switches
        reject()


def configs():
    choices = {name: st.sampled_from(values) for name, values in CHOICES.items()}
    switches = {f.name: st.booleans() for f in fields(ModelConfig) if f.type is bool}
    sizes = {"vocab_size": st.integers(8, 60), "n_layer": st.integers(1, 3)}
    sizes |= {"n_head": st.sampled_from([1, 2]), "n_embd": st.sampled_from([8, 16])}
    sizes |= {"n_inner": st.integers(1, 20), "token_types": st.sampled_from([0, 2])}
    sizes |= {"max_seq_len": st.just(20), "n_narrow": st.integers(0, 2)}
    return st.builds(config_or_reject, **sizes, **choices, **switches)


@settings(max_examples=20, deadline=None)
@given(configs())
def test_save_and_load_any_architecture(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("model")
    model = MaskedLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    save(model, folder)
    again = load(folder)
    assert again.config == config
    ids = torch.randint(0, config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))
    assert again.decoder.weight is again.model.embeddings.tok_embeddings.weight


def test_broken_folders_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="is no model folder"):
        load(tmp_path)
    save(random_model(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="is no model folder") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    bert = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--baseline=hf:FOLDER"):  # another's model
        load(tmp_path)
    save(random_model(linear_bias=True), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["nanocram"]["linear_bias"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.") as error:  # torch names the tensor
        load(tmp_path)
    assert "\n" not in str(error.value)
