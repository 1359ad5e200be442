"""The whole model: embeddings, transformer blocks, masked-language-model head, classifier head.

With train.py's defaults it has the paper's size (arXiv 2212.14034) and computes what a ModernBERT
(arXiv 2412.13663) does. The switches of ModelConfig also make the paper's crammed BERT, the
original BERT and NarrowBERT.

Shapes: B rows of T tokens, K of them predicted; C channels in H heads of D; a vocabulary of V.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROPE_THETA = 10000.0

# Activation functions of the MLP. If a name ends in "glu", the MLP is gated (arXiv 2002.05202).
ACTIVATIONS = {
    "geglu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv 2109.08668
    "gelu": F.gelu,  # BERT's
}
POSITION_EMBEDDINGS = ("rope", "sinusoidal", "sinusoidal_fixed", "learned")
# Fields of ModelConfig that change nothing in a finished model: a later run may change them.
FOR_TRAINING = {"dropout", "zero_init"}


@dataclass
class ModelConfig:
    """Sizes and switches; train.py says what each is. To add one, add a field whose default keeps
    the old behaviour, so that older checkpoints load, and a setting of the same name there."""

    vocab_size: int
    max_seq_len: int
    n_layer: int
    n_narrow: int
    n_head: int
    n_embd: int
    n_inner: int
    activation: str
    position_embedding: str
    post_norm: bool
    embedding_norm: bool
    first_attn_norm: bool
    final_norm: bool
    head_transform: bool
    linear_bias: bool
    norm_bias: bool
    decoder_bias: bool
    token_types: int
    norm_eps: float
    dropout: float
    zero_init: bool
    neighbour_heads: bool = False
    token_values: bool = False

    @property
    def query_bias(self):  # and the keys'
        return self.linear_bias or (self.neighbour_heads and self.position_embedding == "rope")

    @property
    def head_bias(self):  # of the head's dense layer: crammed BERT has one without linear_bias
        return self.linear_bias or self.norm_bias

    def __post_init__(self):
        """Raise ValueError for what would be built, and wrong."""
        if self.position_embedding not in POSITION_EMBEDDINGS:
            wanted = " or ".join(POSITION_EMBEDDINGS)
            raise ValueError(f"position_embedding={self.position_embedding}: type {wanted}")
        if self.n_embd % (2 * self.n_head):  # rotary positions turn pairs of a head's channels
            wanted = f"a multiple of {2 * self.n_head}, twice n_head"
            raise ValueError(f"n_embd={self.n_embd} cannot work: type {wanted}")
        if not 0 <= self.n_narrow < self.n_layer:
            raise ValueError(f"n_narrow={self.n_narrow} cannot work: type 0 to {self.n_layer - 1}")


def layer_norm(config):
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.norm_bias)


def position_angles(length, width):
    """Angles (length, width / 2): t · theta^(−2i / width) (arXiv 1706.03762, section 3.5)."""
    frequency = ROPE_THETA ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequency)


def rotate(x, cos, sin):
    """Rotary position embedding (arXiv 2104.09864) of x (B, T, H, D), in the rotate-half layout.
    cos and sin: (T, 1, D), or (B, T, 1, D) where each row has positions of its own. The first half
    of sin is negated, so that a roll swaps the halves, which compiled code does without a copy."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def gather_positions(x, positions):
    """The vectors (B, K, C) of x (B, T, C) at positions (B, K); all of x if positions is None."""
    if positions is None:
        return x
    B, T, _ = x.shape
    # One flat index_select: its shape is static, and its backward pass a single kernel.
    first = torch.arange(B, device=x.device)[:, None] * T
    vectors = x.flatten(0, 1).index_select(0, (first + positions).flatten())
    return vectors.unflatten(0, positions.shape)


class Embeddings(nn.Module):
    """Tokens (B, T) to vectors (B, T, C), with absolute positions and token types if asked for."""

    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = config.position_embedding
        if config.position_embedding == "learned":
            self.position_embeddings = nn.Embedding(config.max_seq_len, config.n_embd)
        elif config.position_embedding.startswith("sinusoidal"):
            # The paper's: a fixed table times a learnt scale. Training takes the scale to 0 in
            # small models, which then learn no positions; sinusoidal_fixed keeps it.
            kind = nn.Parameter if config.position_embedding == "sinusoidal" else nn.Buffer
            self.position_scale = kind(torch.full((1,), config.n_embd**-0.5))
            angles = position_angles(config.max_seq_len, config.n_embd)  # (T, C / 2)
            table = torch.stack((angles.sin(), angles.cos()), dim=-1)  # sin on even, cos on odd
            self.register_buffer("position_table", table.flatten(1), persistent=False)
        if config.token_types:
            self.type_embeddings = nn.Embedding(config.token_types, config.n_embd)
        self.token_types = config.token_types
        self.norm = layer_norm(config) if config.embedding_norm else nn.Identity()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, ids, token_type_ids=None):
        T = ids.shape[1]
        x = self.tok_embeddings(ids)  # (B, T, C)
        if self.position_embedding == "learned":
            x = x + self.position_embeddings.weight[:T]
        elif self.position_embedding.startswith("sinusoidal"):
            x = x + self.position_scale * self.position_table[:T]
        if self.token_types:
            types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids
            x = x + self.type_embeddings(types)
        return self.drop(self.norm(x))


def math_attention(q, k, v, mask, dropout):
    """F.scaled_dot_product_attention with all scores in memory at once. On a CPU in bfloat16 it
    takes 0.4 of the time of torch's kernel, and with 512 keys 0.7."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, H, K, T)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return F.dropout(scores.softmax(-1), dropout) @ v


class Attention(nn.Module):
    """Bidirectional multi-head attention. Muon orthogonalises each of its matrices by itself."""

    def __init__(self, config):
        super().__init__()
        C, bias = config.n_embd, config.linear_bias
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.Wq = nn.Linear(C, C, bias=config.query_bias)
        self.Wk = nn.Linear(C, C, bias=config.query_bias)
        self.Wv = nn.Linear(C, C, bias=bias)
        self.Wo = nn.Linear(C, C, bias=bias)

    def forward(self, queries, keys, values, rope, attention_mask, positions):
        """queries (B, K, C), the tokens at positions (B, K) or all T, attend to all of keys, which
        have values, both (B, T, C). rope: cos and sin (T, 1, D), or None."""
        heads = (self.n_head, -1)
        q = self.Wq(queries).unflatten(-1, heads)  # (B, K, H, D)
        k = self.Wk(keys).unflatten(-1, heads)  # (B, T, H, D)
        v = self.Wv(values).unflatten(-1, heads)
        if rope is not None:
            k = rotate(k, *rope)
            if positions is not None:
                rope = [table[positions] for table in rope]  # (B, K, 1, D): the same for all heads
            q = rotate(q, *rope)
        # transpose after the rotation: the other way round, q and k are copied twice
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, K or T, D)
        dropout = self.dropout if self.training else 0.0
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        by_math = q.is_cpu and q.dtype == torch.bfloat16 and k.shape[2] <= 512
        attend = math_attention if by_math else F.scaled_dot_product_attention
        y = attend(q, k, v, mask, dropout)  # (B, H, K, D)
        return self.Wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated: Wo(act(Wi x) · Wg x). Not gated: Wo(act(Wi x))."""

    def __init__(self, config):
        super().__init__()
        C, inner, bias = config.n_embd, config.n_inner, config.linear_bias
        self.act = ACTIVATIONS[config.activation]
        self.is_gated = config.activation.endswith("glu")
        self.Wi = nn.Linear(C, inner, bias=bias)
        if self.is_gated:  # one matrix with Wi in a ModernBERT; Muon orthogonalises each by itself
            self.Wg = nn.Linear(C, inner, bias=bias)
        self.Wo = nn.Linear(inner, C, bias=bias)

    def forward(self, x):
        h = self.act(self.Wi(x))
        if self.is_gated:
            h = h * self.Wg(x)
        return self.Wo(h)


class Block(nn.Module):
    """Attention and MLP, each added to its input; norms before them, or after the sums."""

    def __init__(self, config, first):
        super().__init__()
        self.post_norm = config.post_norm
        # as in ModernBERT: the embeddings' norm serves the first attention
        has_attn_norm = not first or config.post_norm or config.first_attn_norm
        self.attn_norm = layer_norm(config) if has_attn_norm else nn.Identity()
        self.attn = Attention(config)
        # the first layer's values are made of the embeddings anyway
        scale = torch.full((config.n_embd,), 0.5)
        self.token_scale = nn.Parameter(scale) if config.token_values and not first else None
        self.mlp_norm = layer_norm(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, attention_mask=None, positions=None, full=None, x0=None):
        """x (B, T, C) has all tokens of each row, in order, x0 their embeddings; attention_mask (B,
        T) is 0 at padding, None where there is none. Returns the vectors at positions (B, K), or
        all. In later narrow layers x has these alone, which attend to full (B, T, C)."""
        # put a layer that mixes tokens here: x still has all of them, in order
        normed = x if self.post_norm else self.attn_norm(x)
        if full is None:
            queries, keys = gather_positions(normed, positions), normed
            x = gather_positions(x, positions)
        else:
            queries, keys = normed, full if self.post_norm else self.attn_norm(full)
        values = keys if self.token_scale is None else keys + self.token_scale * x0
        # from here on the last layer has only the tokens to predict (B, K, C), in random order
        x = x + self.drop(self.attn(queries, keys, values, rope, attention_mask, positions))
        if self.post_norm:
            x = self.attn_norm(x)
            return self.mlp_norm(x + self.drop(self.mlp(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class Encoder(nn.Module):
    """Tokens (B, T) to hidden states: (B, T, C), or (B, K, C) if positions (B, K) are given, for
    the last layer returns these alone. With n_narrow > 1 so do the last n_narrow layers, with keys
    and values from the last full layer (NarrowBERT, arXiv 2301.04761)."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.n_full = config.n_layer - max(1, config.n_narrow)
        self.layers = nn.ModuleList(Block(config, first=i == 0) for i in range(config.n_layer))
        self.residual_dtype = None  # of the sums in full layers; train.Run may set it
        self.post_norm = config.post_norm
        self.final_norm = layer_norm(config) if config.final_norm else nn.Identity()
        self.rope = config.position_embedding == "rope"
        if self.rope:
            angles = position_angles(config.max_seq_len, config.n_embd // config.n_head)
            cos, sin = angles.cos(), angles.sin()  # (T, D / 2), for each half of a head's channels
            self.register_buffer("rope_cos", torch.cat((cos, cos), dim=1), persistent=False)
            self.register_buffer("rope_sin", torch.cat((-sin, sin), dim=1), persistent=False)

    def forward(self, ids, positions=None, attention_mask=None, token_type_ids=None):
        """attention_mask (B, T) is 0 at padding."""
        x = self.embeddings(ids, token_type_ids)  # (B, T, C)
        rope, T, full_dtype, device_type = None, ids.shape[1], x.dtype, x.device.type
        is_mixed = torch.is_autocast_enabled(device_type)
        if self.rope:  # cast the tables once, here, and not in every block
            query_dtype = torch.get_autocast_dtype(device_type) if is_mixed else x.dtype
            tables = self.rope_cos[:T, None], self.rope_sin[:T, None]  # (T, 1, D)
            rope = tuple(table.to(query_dtype) for table in tables)
        if self.residual_dtype and is_mixed and self.n_full and not self.post_norm:
            x = x.to(self.residual_dtype)
        x0 = x
        for layer in self.layers[: self.n_full]:
            x = layer(x, rope, attention_mask, x0=x0)
        full = x.to(full_dtype)
        last, *narrow = self.layers[self.n_full :]
        x = last(full, rope, attention_mask, positions, x0=x0)  # (B, K, C)
        for layer in narrow:
            x = layer(x, rope, attention_mask, positions, full, x0)
        return self.final_norm(x)


def make_head(config):
    """BERT's dense-GELU-norm before the decoder; in fine-tuning it becomes the pooler."""
    dense = nn.Linear(config.n_embd, config.n_embd, bias=config.head_bias)
    return nn.Sequential(OrderedDict(dense=dense, act=nn.GELU(), norm=layer_norm(config)))


def init_weights(width):
    """A function for Module.apply(): matrices and tables N(0, 0.02 · √(768 / width)), biases 0.
    0.02 is BERT's (arXiv 1810.04805), at 768 wide; wider models keep it. Narrower models need more,
    or attention begins almost uniform: at 128 wide, five minutes ended at 5.31 instead of 5.08."""
    std = 0.02 * max(1.0, 768 / width) ** 0.5

    def init(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    return init


@torch.no_grad()
def look_at_neighbours(module):
    """For Module.apply(): even heads begin by attending to the token before, odd ones to the one
    behind. Biases b of keys and R(d) b of queries, R(d) being rotary's turn by d tokens (arXiv
    2104.09864), add to logits a function of the distance t alone, 6 at its peak, where t = d."""
    # Attention, or a class in its place; one without biases begins anywhere
    if getattr(getattr(module, "Wq", None), "bias", None) is None:
        return
    D = module.Wq.out_features // module.n_head
    n = max(1, D // 4)  # the faster half of the frequencies: others hardly tell neighbours apart
    d = 2 * (torch.arange(module.n_head) % 2) - 1
    angles = d[:, None] * position_angles(2, D)[1, :n]  # (H, n)
    size = (6.0 * D**0.5 / n) ** 0.5
    of_queries, of_keys = (W.bias.view(-1, 2, D // 2)[..., :n] for W in (module.Wq, module.Wk))
    of_keys[:, 0] = size  # in the first half of a head's channels: see rotate()
    of_queries[:, 0], of_queries[:, 1] = size * angles.cos(), size * angles.sin()


class MaskedLM(nn.Module):
    """The masked language model; its decoder shares its matrix with the token embeddings."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Encoder(config)
        self.head = make_head(config) if config.head_transform else nn.Identity()
        self.decoder = nn.Linear(config.n_embd, config.vocab_size, bias=config.decoder_bias)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self.apply(init_weights(config.n_embd))
        if config.zero_init:
            # blocks with norms before them then start as the identity (arXiv 1901.09321)
            for layer in self.model.layers:
                nn.init.zeros_(layer.attn.Wo.weight)
                nn.init.zeros_(layer.mlp.Wo.weight)
        if config.neighbour_heads and self.model.rope:
            self.apply(look_at_neighbours)

    def forward(self, ids, positions=None, attention_mask=None, token_type_ids=None):
        """Logits (B, K, V) at positions (B, K) of the tokens ids (B, T); (B, T, V) without."""
        hidden = self.model(ids, positions, attention_mask, token_type_ids)
        return self.decoder(self.head(hidden))

    def flops_per_token(self, seq_len, n_predicted):
        """FLOPs per token of forward and backward, on rows of seq_len tokens: 6 W + 12 L T C with
        W weights of matrices (arXiv 2001.08361, section 2.1, but attention is not causal). What
        only the n_predicted tokens go through counts by their share."""
        share = n_predicted / seq_len
        narrow = self.model.layers[self.model.n_full :]
        for_predicted = [self.head, self.decoder]
        for layer in narrow:
            for_predicted += [layer.attn.Wq, layer.attn.Wo, layer.mlp]
        weights = matrix_weights([*self.model.layers, self.head, self.decoder])
        weights -= (1 - share) * matrix_weights(for_predicted)
        attention_layers = self.model.n_full + share * len(narrow)  # by queries computed
        return 6 * weights + 12 * attention_layers * seq_len * self.config.n_embd


def matrix_weights(modules):
    """The number of weights in the matrices of modules."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)


def mixed_precision(device, dtype):
    """Autocast of the matrix products to dtype on a torch.device; off for float32."""
    # no cache: a weight is cast only once a pass, and a cache would keep all the copies
    return torch.autocast(device.type, dtype, dtype != torch.float32, cache_enabled=False)


def make_loss(model, device, amp_dtype):
    """loss_fn(ids (B, T), positions (B, K), labels (B, K)): {"loss": cross-entropy in nats, the
    mean over all labels, where -100 counts as 0}. It is minimised; log.csv has the means of other
    single numbers, of any name. Evaluations call it too: put an auxiliary loss or smoothed labels
    behind `if model.training`. What changes over the run must be a tensor."""

    def loss_fn(ids, positions, labels):
        with mixed_precision(device, amp_dtype):
            logits = model(ids, positions)
        logits = logits.flatten(0, 1)  # (B · K, V): there are none for other positions
        # no float32 copy of the logits: it would take 6 % of a CPU step at 1M parameters. In
        # bfloat16 the loss is exact to 1e-4, the gradient to 0.2 %.
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").float()
        return {"loss": losses.mean()}

    return loss_fn


class Classifier(nn.Module):
    """Logits from one vector of a row: head, dropout, linear. pooling cls reads [CLS]; mean, the
    mean of all tokens but padding. The head is the masked language model's, or new without one."""

    def __init__(self, masked_lm, n_labels, dropout=0.1, pooling="cls"):
        super().__init__()
        assert pooling in ("cls", "mean"), pooling
        config = masked_lm.config
        init = init_weights(config.n_embd)
        self.pooling = pooling
        self.model = masked_lm.model
        self.head = masked_lm.head if config.head_transform else make_head(config).apply(init)
        self.drop = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.n_embd, n_labels).apply(init)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        """Logits (B, n_labels) for tokens (B, T) that start with [CLS]; attention_mask (B, T) is 1
        at real tokens, 0 at padding. The names are transformers'."""
        first = torch.zeros_like(input_ids[:, :1]) if self.pooling == "cls" else None
        hidden = self.model(input_ids, first, attention_mask, token_type_ids)  # (B, 1 or T, C)
        pooled = hidden[:, 0]  # (B, C)
        if self.pooling == "mean":
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            real = real[..., None].to(hidden.dtype)  # (B, T, 1)
            pooled = (hidden * real).sum(1) / real.sum(1)
        return self.classifier(self.drop(self.head(pooled)))
