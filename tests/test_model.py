"""model.py beside transformers, torch's own attention and float64."""

import contextlib
import copy
import itertools
import math
from dataclasses import asdict, fields

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import SIZES, error, model_config, new_run, padded_batch, random_model, randomise
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as module
import train
from model import Classifier, MaskedLM, ModelConfig, math_attention
from nanocram.edits import check_mixing
from nanocram.model_folder import not_native, save
from nanocram.settings import configure

POSITIONS = torch.tensor([[0, 3, 16], [11, 1, 1], [4, 2, 0]])  # to read of padded_batch()


def recipe(name):
    """The ModelConfig of one of our recipes."""
    space = dict(vars(train))
    configure(space, [f"config/{name}.py"])
    return ModelConfig(**{f.name: space[f.name] for f in fields(ModelConfig)})


CRAMMED, BERT = (asdict(recipe(name)) | SIZES for name in ("crammed", "bert"))
# Parts of our names, and transformers' for its BERT.
BERTS_NAMES = {
    "model.layers": "bert.encoder.layer",
    "model.embeddings.norm": "bert.embeddings.LayerNorm",
    "model.embeddings": "bert.embeddings",
    "tok_embeddings": "word_embeddings",
    "type_embeddings": "token_type_embeddings",
    "attn.Wq": "attention.self.query",
    "attn.Wk": "attention.self.key",
    "attn.Wv": "attention.self.value",
    "attn.Wo": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "mlp.Wi": "intermediate.dense",
    "mlp.Wo": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions.decoder",
}


def test_the_original_bert_equals_transformers_bert():
    model = random_model(**BERT)
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 160}
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval().double()
    state = {"cls.predictions.bias": model.decoder.bias}
    for name, tensor in model.state_dict().items():
        for our_part, their_part in BERTS_NAMES.items():
            name = name.replace(our_part, their_part)
        state[name] = tensor
    missing, _ = theirs.load_state_dict(state, strict=False)  # a fork may have a second head
    assert all("position_ids" in m or "token_type_ids" in m for m in missing)
    ids, mask = padded_batch(17)
    types = (torch.arange(17) > 8).long().expand(3, -1)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, token_type_ids=types)
        bert = theirs(ids, attention_mask=mask, token_type_ids=types).logits
        assert torch.allclose(ours[mask.bool()], bert[mask.bool()], atol=1e-4)
        assert torch.allclose(model(ids), theirs(ids).logits, atol=1e-4)


def test_attention_by_products_is_torchs():
    q, k, v = (torch.randn(3, 2, n, 8).double() for n in (5, 17, 17))
    mask = padded_batch(17)[1][:, None, None].bool()
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.allclose(math_attention(q, k, v, mask, 0.0), wanted)


def others(field):
    """Values of a field of ModelConfig, which a fork may have added, beside its default."""
    value = getattr(train, field.name, field.default)
    if isinstance(value, bool):
        return [not value]
    choices = {"activation": module.ACTIVATIONS, "position_embedding": module.POSITION_EMBEDDINGS}
    choices |= {"n_layer": [4, 5], "n_head": [4], "n_embd": [36], "dropout": [0.01, 0.9]}
    choices |= {name: [SIZES[name] + 1] for name in SIZES.keys() - choices.keys()}
    return choices.get(field.name, [0.01, 30.0] if isinstance(value, float) else [1, 2, 16])


def architectures(*bases):
    """Switches of random_model(): each base's, with our recipes' and any one other that fits."""
    each = [{f.name: value} for f in fields(ModelConfig) for value in others(f)]
    found = []
    for base, switches in itertools.product(bases, [{}, CRAMMED, BERT, *each]):
        with contextlib.suppress(ValueError):
            model_config(**SIZES | base | switches)  # raises where they do not fit
            if base | switches not in found:
                found.append(base | switches)
    return found


@pytest.mark.parametrize("switches", architectures({"n_narrow": 0}, {"n_narrow": 2}), ids=str)
def test_computing_only_what_is_read_changes_nothing_nor_does_padding(switches, capsys):
    """Logits and gradients at some positions are the whole row's; the check of edits is silent."""
    model = random_model(**switches)
    check_mixing(model.config, 150)
    assert not capsys.readouterr().out
    ids, mask = padded_batch(150)
    everywhere = model(ids, attention_mask=mask)
    wanted = everywhere.gather(1, POSITIONS[..., None].expand(-1, -1, everywhere.shape[-1]))
    chosen = model(ids, POSITIONS, attention_mask=mask)
    # our rounding is 1e-9 of that; an edit may round to float32 somewhere
    assert torch.allclose(chosen, wanted, atol=1e-4)
    assert torch.allclose(model(ids[2:, :5]), everywhere[2:, :5], atol=1e-4)
    # logits need not depend on each weight of a fork
    how = {"inputs": [*model.parameters()], "retain_graph": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(x.square().sum(), **how) for x in (chosen, wanted)]
    # a bias of Wk has a gradient of rounding errors alone
    scale = max(g.abs().max().item() for g in gradients[1])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6 * scale)


def test_narrow_layers_against_torchs_own_attention():
    """The last two of three by nn.MultiheadAttention (2301.04761); values have the embeddings."""
    model = random_model(position_embedding="learned", n_narrow=2, token_values=True).model
    ids, mask = padded_batch(17)
    with torch.no_grad():
        embedded = model.embeddings(ids)
        first = model.layers[0](embedded, None, mask)
        x = first.gather(1, POSITIONS[..., None].expand(-1, -1, 32))
        for layer in model.layers[1:]:
            options = {"bias": False, "batch_first": True, "dtype": torch.float64}
            attention = torch.nn.MultiheadAttention(32, 2, **options)
            matrices = [getattr(layer.attn, name).weight for name in ("Wq", "Wk", "Wv")]
            attention.in_proj_weight.copy_(torch.cat(matrices))
            attention.out_proj.weight.copy_(layer.attn.Wo.weight)
            q, kv = layer.attn_norm(x), layer.attn_norm(first)
            v = kv + layer.token_scale * embedded
            x = x + attention(q, kv, v, key_padding_mask=mask == 0)[0]
            x = x + layer.mlp(layer.mlp_norm(x))
        assert torch.allclose(model(ids, POSITIONS, mask), model.final_norm(x), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    # in bfloat16 forty random models have gradients that are 2.5 % off in the median
    [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 5e-2, 0.2)],
)
def test_the_loss_and_its_gradient_are_float64s(train, dtype, loss_error, gradient_error):
    """A mean over all labels; eager and compiled; -100 counts as 0."""
    run = new_run(dtype)
    model, loss_fn = randomise(run.model).eval(), run.loss_fn  # a fork may train on another one
    ids, _ = padded_batch(17)
    labels = ids.gather(1, POSITIONS)
    labels[:, 1] = -100
    exact = copy.deepcopy(model).double()
    logits = exact(ids, POSITIONS)[:, ::2].flatten(0, 1)
    wanted = F.cross_entropy(logits, labels[:, ::2].flatten(), reduction="sum") / labels.numel()
    wanted.backward()

    how = {"backend": "aot_eager_decomp_partition", "fullgraph": True}
    compiled = torch.compile(loss_fn, **how)  # inductor's graphs, but eager kernels
    for training in (loss_fn, compiled):
        model.zero_grad()
        loss = training(ids, POSITIONS, labels)["loss"]
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(wanted.item(), rel=loss_error)
        gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, exact)]
        assert error(*gradients) < gradient_error


@pytest.mark.parametrize("n_narrow", [0, 2])
def test_flops_agree_with_torchs_own_counter(n_narrow):
    model = random_model(n_narrow=n_narrow)
    ids, positions = torch.randint(0, 90, (4, 32)), torch.randint(0, 32, (4, 8))
    # it cannot count flash attention on a CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, positions).sum().backward()
    assert counter.get_total_flops() == model.flops_per_token(32, 8) * ids.numel()


def test_narrow_models_start_with_larger_weights():
    """As much larger than BERT's 0.02 as keeps attention's scores alike; test_parity.py has 768."""
    sizes = dict(vocab_size=500, n_layer=2, n_head=3, n_embd=192, n_inner=384)
    model = Classifier(MaskedLM(model_config(**sizes, zero_init=False)), 64)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            standard_error = 1 / math.sqrt(2 * p.numel())
            assert p.std().item() == pytest.approx(0.04, rel=20 * standard_error), name


@torch.no_grad()
def test_heads_begin_by_attending_to_neighbours(tmp_path):
    """By transformers' weights: even heads to the token before, odd ones to the one behind."""
    ids = torch.arange(5, 85)[None]
    for neighbour_heads in (True, False):
        sizes = SIZES | {"n_head": 4, "n_embd": 256}
        config = model_config(**sizes, neighbour_heads=neighbour_heads)
        model = MaskedLM(config)
        if not_native(model.config):
            pytest.skip("this fork's model is no ModernBERT")
        save(model, tmp_path)
        how = {"attn_implementation": "eager"}
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, **how).eval()
        for weights in theirs(ids, output_attentions=True).attentions:  # (1, H, T, T)
            for head, side in enumerate((-1, 1, -1, 1)):
                of_side = [weights[0, head].diagonal(d).mean() for d in (side, 0, -side)]
                assert (max(of_side) == of_side[0] > 0.2) == neighbour_heads


def test_a_class_in_place_of_attention_begins_so_too():
    fresh = module.Attention(model_config(**SIZES, neighbour_heads=True))
    other = torch.nn.Module()
    other.n_head, other.Wq, other.Wk = fresh.n_head, fresh.Wq, fresh.Wk
    other.apply(module.look_at_neighbours)
    assert other.Wk.bias.abs().max() > 1
    other.Wq = torch.nn.Linear(8, 8, bias=False)
    other.apply(module.look_at_neighbours)


def test_zero_init_makes_every_block_the_identity():
    model = MaskedLM(model_config(**SIZES, zero_init=True)).eval()
    x = model.model.embeddings(padded_batch(17)[0])
    assert torch.equal(model.model.layers[1](x, None, None), x)
