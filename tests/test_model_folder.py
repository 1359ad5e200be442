"""What transformers reads of a model folder, after an edit of model.py too; what load() does."""

import json
import os
import random

import pytest
import torch
import transformers
from conftest import ROOT, SIZES, error, model_config, padded_batch, random_model
from test_model import BERT, architectures
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from nanocram.model_folder import MODERNBERT, hash_of_code, load, not_native, save

HF_MLM = transformers.AutoModelForMaskedLM
POSITIONS = {"position_embedding": "sinusoidal", "token_values": True}
SEVERAL = {"head_transform": True, "linear_bias": True, "norm_bias": True, "norm_eps": 1e-3}


@pytest.mark.parametrize("switches", [*architectures({}), SEVERAL], ids=str)
@torch.no_grad()
def test_what_is_saved_is_loaded_and_transformers_computes_it(tmp_path, switches):
    """As a ModernBERT where it is one, else by the code that the folder carries."""
    model = random_model(**switches).float()  # whose weights are what a run's are
    save(model, tmp_path)
    again = load(tmp_path)
    ids, mask = padded_batch(150)
    found = model(ids, attention_mask=mask)
    assert torch.equal(found, again(ids, attention_mask=mask))
    assert again.decoder.weight is again.model.embeddings.tok_embeddings.weight
    is_native = not not_native(model.config)
    assert (tmp_path / "model.py").exists() is not is_native
    how = {"trust_remote_code": not is_native, "output_loading_info": True}
    theirs, info = HF_MLM.from_pretrained(tmp_path, **how)
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    wanted = theirs.double()(ids, attention_mask=mask).logits[mask.bool()]
    exact = model.double()(ids, attention_mask=mask)[mask.bool()]
    # they compute angles in float32; a head that does nothing has one more norm
    allowed = 0.0 if model.config.head_transform else min(0.25, 3 * model.config.norm_eps)
    assert error(exact, wanted) < (1e-4 + allowed if is_native else 1e-9)
    path = tmp_path / "config.json"  # older ones of ours name no class
    path.write_text(path.read_text().replace('"architectures"', '"others"'))
    assert torch.equal(load(tmp_path)(ids, attention_mask=mask), found)


@pytest.mark.parametrize("switches", [POSITIONS, BERT], ids=str)
def test_classes_of_transformers_around_a_model_of_ours(tmp_path, switches):
    """Hidden states, losses, ties, labels; saved by transformers, moved. No code runs untrusted."""
    model = random_model(**switches).float()
    save(model, tmp_path / "ours")
    with pytest.raises(ValueError, match="trust_remote_code"):
        HF_MLM.from_pretrained(tmp_path / "ours", trust_remote_code=False)
    trusted = {"trust_remote_code": True}
    ids, mask = padded_batch(60)
    base = transformers.AutoModel.from_pretrained(tmp_path / "ours", **trusted)
    assert_close(base(ids, mask, return_dict=False)[0], model.model(ids, None, mask))
    theirs = HF_MLM.from_pretrained(tmp_path / "ours", attn_implementation="eager", **trusted)
    labels = ids.masked_fill(mask == 0, -100)
    found = theirs(ids, mask, labels=labels)
    assert_close(found.loss, cross_entropy(model(ids, None, mask).mT, labels))
    half = HF_MLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16, **trusted)
    assert error(half(ids, mask).logits.float(), found.logits) < 0.1
    theirs.resize_token_embeddings(model.config.vocab_size + 5)
    theirs.save_pretrained(tmp_path / "larger")
    larger = HF_MLM.from_pretrained((tmp_path / "larger").rename(tmp_path / "moved"), **trusted)
    assert_close(larger(ids, mask).logits[..., :-5], found.logits)
    assert larger.get_output_embeddings().weight is larger.get_input_embeddings().weight

    for task, shape in (("Sequence", (3, 4)), ("Token", (3, 60, 4))):
        auto = getattr(transformers, f"AutoModelFor{task}Classification")
        how = {"num_labels": 4, "output_loading_info": True, **trusted}
        theirs, info = auto.from_pretrained(tmp_path / "ours", **how)
        theirs(ids, mask, labels=torch.zeros(shape[:-1], dtype=torch.long)).loss.backward()
        for name in info["missing_keys"]:  # model.py draws a new head; norms have ones, biases 0
            p = theirs.get_parameter(name)
            assert p.grad is not None and not name.startswith("net.model.")
            wanted = 0.02 * (768 / 32) ** 0.5 if p.ndim == 2 else float("norm" in name)
            assert p.square().mean().sqrt().item() == pytest.approx(wanted, rel=0.3)
        theirs.eval().save_pretrained(tmp_path / task)
        again = auto.from_pretrained(tmp_path / task, **trusted)
        assert_close(again(ids, mask).logits, theirs(ids, mask).logits)
        refused(tmp_path / task, "fine-tuned")


def test_an_edit_of_what_model_py_computes_is_seen():
    """Not one of comments, docstrings, blank lines, settings or the loss. If this fails, and with
    MODERNBERT set to what it says this file's first test passes, it still is a ModernBERT."""
    code = (ROOT / "model.py").read_text("utf-8")
    if hash_of_code(code) != MODERNBERT:
        said = f'set MODERNBERT = "{hash_of_code(code)}", and see if the tests above pass'
        (pytest.fail if "UPSTREAM" in os.environ else pytest.skip)(said)
    same = {"# (B, T, C)": "#", "Shapes:": "Sizes:", "\n    def forward": "\n\n    def forward"}
    same |= {"losses.mean()": "losses.sum()", "zero_init: bool": "zero_init: bool = True"}
    for old, new in same.items():
        assert old in code and hash_of_code(code.replace(old, new)) == MODERNBERT, old
    for old in ("x + self.drop", "10000.0", "F.gelu", "        x = x"):
        assert old in code and hash_of_code(code.replace(old, f" {old}1")) != MODERNBERT, old
    for switches in ({}, {"n_narrow": 1}, {"head_transform": True, "linear_bias": True}):
        assert not not_native(model_config(**SIZES, **switches))


def refused(folder, match):
    with pytest.raises(ValueError, match=f"^.*{match}.*$"):
        load(folder)


def test_what_transformers_has_saved(tmp_path):
    """As it was, it comes back; trained further, with another head or another's, it is refused."""
    model = random_model().float()
    if not_native(model.config):
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
    bert = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "--baseline=hf:FOLDER")


def test_broken_folders_are_one_line(tmp_path):
    refused(tmp_path, "is no model folder")
    save(random_model(linear_bias=True), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    ours = {"n_head": 4, "norm_eps": 1e-3, "position_embedding": "sinusoidal", "n_narrow": 2}
    edits = [{"nanocram": config["nanocram"] | {name: ours[name]}} for name in ours]
    edits += [{"num_attention_heads": 4}, {"layer_types": ["full_attention", "sliding_attention"]}]
    for edit in edits if config["model_type"] == "modernbert" else ():  # it may be none in a fork
        path.write_text(json.dumps(config | edit))
        refused(tmp_path, "config.json contradicts itself: ")
    path.write_text(json.dumps(config))
    weights = (tmp_path / "model.safetensors").read_bytes()
    noise = random.Random(0).randbytes(64)
    for damaged in (weights[: len(weights) // 2], weights[:-999] + noise + weights[64 - 999 :]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        refused(tmp_path, "is no model folder")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"no model\.safetensors: save_pretrained\(max_shard_size")
