"""What transformers reads of a model folder, after an edit of model.py too; what load() does."""

import pytest
import torch
import transformers
from conftest import error, padded_batch, random_model
from test_model import architectures

from nanocram.model_folder import load, not_native, save

HF_MLM = transformers.AutoModelForMaskedLM
SEVERAL = {"head_transform": True, "linear_bias": True, "norm_bias": True, "norm_eps": 1e-3}


@pytest.mark.parametrize("switches", [*architectures({}), SEVERAL], ids=str)
@torch.no_grad()
def test_what_is_saved_is_loaded_and_what_is_called_a_modernbert_is_one(tmp_path, switches):
    """transformers computes our logits. A switch that a fork has added says what else it is."""
    model = random_model(**switches).float()  # whose weights are what a run's are
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    ids, mask = padded_batch(150)
    found = model(ids, attention_mask=mask)
    assert torch.equal(found, again(ids, attention_mask=mask))
    assert again.decoder.weight is again.model.embeddings.tok_embeddings.weight
    if not not_native(model):
        theirs, info = HF_MLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(theirs).__name__ == "ModernBertForMaskedLM"
        assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
        wanted = theirs.double()(ids, attention_mask=mask).logits[mask.bool()]
        exact = model.double()(ids, attention_mask=mask)[mask.bool()]
        # they compute angles in float32; a head that does nothing has one more norm
        allowed = 0.0 if model.config.head_transform else min(0.25, 3 * model.config.norm_eps)
        assert error(exact, wanted) < 1e-4 + allowed


def test_what_is_no_modernbert_is_not_called_one():
    """By its switches, or by tensors that an edit has added, changed, or shares between layers."""
    for switches in ({}, {"n_narrow": 1}, {"head_transform": True, "linear_bias": True}):
        assert not_native(random_model(**switches)) == ""
    both = not_native(random_model(position_embedding="learned", n_narrow=2))
    assert "position_embedding=learned" in both and "n_narrow=2" in both
    for place, name in (("model.layers.1", "conv"), ("model.layers.1.attn", "norm"), ("", "bend")):
        model = random_model()
        setattr(model.get_submodule(place), name, torch.nn.LayerNorm(32, bias=False))
        assert not_native(model) == f"{place}.{name}.weight".lstrip(".")
    model = random_model()
    model.model.layers[2] = model.model.layers[1]
    assert not_native(model).startswith("no model.layers.2.")
    model = random_model()
    model.model.layers[1].mlp.Wo.weight = torch.nn.Parameter(torch.ones(32, 25))
    assert not_native(model) == "model.layers.1.mlp.Wo.weight"


def refused(folder, match):
    with pytest.raises(ValueError, match=f"^.*{match}.*$"):
        load(folder)


def test_what_transformers_has_saved(tmp_path):
    """As it was, it comes back; trained further, with another head or another's, it is refused."""
    model = random_model().float()
    if not_native(model):
        pytest.skip("this fork's model is no ModernBERT")
    save(model, tmp_path / "ours")
    theirs = HF_MLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "again")
    ids, _ = padded_batch(150)
    assert torch.equal(load(tmp_path / "again")(ids), model(ids))
    with torch.no_grad():
        theirs.head.dense.weight[0, 1] = 0.5
    theirs.save_pretrained(tmp_path / "trained")
    refused(tmp_path / "trained", r"head\.dense\.weight")
    kind = transformers.AutoModelForSequenceClassification
    kind.from_pretrained(tmp_path / "ours", num_labels=3).save_pretrained(tmp_path / "fine-tuned")
    refused(tmp_path / "fine-tuned", "fine-tuned")
    bert = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "--baseline=hf:FOLDER")


def test_broken_folders_are_one_line(tmp_path):
    refused(tmp_path, "is no model folder")
    save(random_model(linear_bias=True), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"linear_bias": true', '"linear_bias": 0'))
    refused(tmp_path, r"model\.layers\.0\.")  # torch names the tensor
    (tmp_path / "config.json").write_text(config)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(tmp_path, "is no model folder")
