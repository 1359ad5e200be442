"""The whole model: embeddings, transformer blocks, masked-language-model head, classifier head.

    python -c "import model; print(model.MaskedLM(model.ModelConfig()))"

The default is the paper's size (arXiv 2212.14034) in the form that is natively a ModernBERT (arXiv 2412.13663), names
of modules included. The switches of ModelConfig, a line or two each, also make the paper's crammed BERT, the original
BERT and NarrowBERT.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ModelConfig:
    """Sizes and switches of the model; train.py has a global of the same name for each."""

    vocab_size: int = 32768
    max_seq_len: int = 512
    n_layer: int = 16
    n_narrow: int = 0
    n_head: int = 12
    n_embd: int = 768
    n_inner: int = 1536
    activation: str = "geglu"
    position: str = "rope"
    post_norm: bool = False
    embedding_norm: bool = True
    first_attn_norm: bool = False
    final_norm: bool = True
    head_transform: bool = True
    linear_bias: bool = False
    norm_bias: bool = False
    decoder_bias: bool = True
    token_types: int = 0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    zero_init: bool = True

    def __post_init__(self):
        """Raise ValueError, naming the field and a value that works, for sizes that cannot be built."""
        for name in (
            name for name, choices in CHOICES.items() if getattr(self, name) not in choices
        ):
            raise ValueError(
                f"{name}={getattr(self, name)} is unknown: choose one of {', '.join(CHOICES[name])}"
            )
        if (
            min(
                self.vocab_size,
                self.max_seq_len,
                self.n_layer,
                self.n_head,
                self.n_embd,
                self.n_inner,
            )
            < 1
        ):
            raise ValueError(
                "vocab_size, max_seq_len, n_layer, n_head, n_embd and n_inner must be at least 1"
            )
        if self.n_embd % (2 * self.n_head):
            near = max(1, round(self.n_embd / (2 * self.n_head))) * 2 * self.n_head
            raise ValueError(
                f"n_embd={self.n_embd} must be an even multiple of n_head={self.n_head}: try {near}"
            )
        if not 0 <= self.n_narrow < self.n_layer:
            raise ValueError(
                f"n_narrow={self.n_narrow} must lie between 0 and {self.n_layer - 1}: one stays full"
            )
        if not (0 <= self.dropout < 1 and self.norm_eps > 0 and self.token_types >= 0):
            raise ValueError(
                "dropout must lie in [0, 1), norm_eps above 0, and token_types be 0 (no table) or more"
            )


CHOICES = {"activation": ("geglu", "relu2", "gelu"), "position": ("rope", "sinusoidal", "learned")}
ROPE_THETA = 10000.0


def layer_norm(config):
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Tokens (B, T) to vectors (B, T, C); absolute positions and token types are added where the config has them."""

    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = config.position
        if config.position == "learned":
            self.position_embeddings = nn.Embedding(config.max_seq_len, config.n_embd)
        elif (
            config.position == "sinusoidal"
        ):  # the paper's: a fixed table times one learnt scale (section 4.2)
            self.position_scale = nn.Parameter(
                torch.full((1,), config.n_embd**-0.5)
            )  # fully_shard takes no scalar
            angles = position_angles(config.max_seq_len, config.n_embd)  # (T, C / 2)
            table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(
                1
            )  # sin on even, cos on odd channels
            self.register_buffer("position_table", table, persistent=False)
        self.type_embeddings = (
            nn.Embedding(config.token_types, config.n_embd) if config.token_types else None
        )
        self.norm = layer_norm(config) if config.embedding_norm else nn.Identity()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, ids, token_types=None):
        x = self.tok_embeddings(ids)
        if self.position == "learned":
            x = x + self.position_embeddings.weight[: ids.shape[1]]
        elif self.position == "sinusoidal":
            x = x + self.position_scale * self.position_table[: ids.shape[1]]
        if self.type_embeddings is not None:
            x = x + self.type_embeddings(
                torch.zeros_like(ids) if token_types is None else token_types
            )
        return self.drop(self.norm(x))


def position_angles(length, width):
    """Angles (length, width / 2) of position t in channel pair i: t · theta^(−2i / width) (arXiv 1706.03762, 3.5)."""
    frequency = ROPE_THETA ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequency)


def rotate(x, cos, sin):
    """Rotary position embedding (arXiv 2104.09864) of x (B, H, T, D) in the rotate-half layout; cos, sin (T, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rows_at(x, positions):
    """Rows (B, K, C) of x (B, T, C) at positions (B, K); all of x where positions is None."""
    if positions is None:
        return x
    rows = (
        torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    )  # a flat gather: one static index_select
    return (
        x.flatten(0, 1).index_select(0, (rows + positions).flatten()).unflatten(0, positions.shape)
    )


class Attention(nn.Module):
    """Bidirectional multi-head attention. q, k and v are matrices of their own: Muon treats each by itself."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        for name in ("Wq", "Wk", "Wv", "Wo"):
            setattr(self, name, nn.Linear(config.n_embd, config.n_embd, bias=config.linear_bias))

    def forward(self, x, source, rope, mask, positions):
        """Rows x (B, K, C), at positions (B, K) of all T or None for all in order, look at source (B, T, C)."""
        B, T, C = source.shape
        heads = (
            B,
            -1,
            self.n_head,
            C // self.n_head,
        )  # transposed: q (B, H, K, D), k and v (B, H, T, D)
        q, k, v = (
            y.view(heads).transpose(1, 2) for y in (self.Wq(x), self.Wk(source), self.Wv(source))
        )
        if rope is not None:
            cos, sin = (table[:T].to(q.dtype) for table in rope)
            at = slice(None) if positions is None else positions[:, None]  # (B, 1, K)
            q, k = rotate(q, cos[at], sin[at]), rotate(k, cos, sin)
        if q.is_cpu:  # the CPU's flash attention takes half the time in float32 (forward and backward, AVX512-BF16)
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(
                q, k, v, mask, self.dropout if self.training else 0.0
            )
        return self.Wo(y.transpose(1, 2).reshape(B, -1, C))


class MLP(nn.Module):
    """geglu: Wo(gelu(a) · g) with a, g the halves of Wi x (arXiv 2002.05202); relu2: Wo(relu(Wi x)²) (2109.08668)."""

    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        width = config.n_inner * (2 if config.activation == "geglu" else 1)
        self.Wi = nn.Linear(config.n_embd, width, bias=config.linear_bias)
        self.Wo = nn.Linear(config.n_inner, config.n_embd, bias=config.linear_bias)

    def forward(self, x):
        x = self.Wi(x)
        if self.activation == "geglu":
            a, g = x.chunk(2, dim=-1)
            return self.Wo(F.gelu(a) * g)
        return self.Wo(F.relu(x).square() if self.activation == "relu2" else F.gelu(x))


class Block(nn.Module):
    """Attention and MLP, each added to its input; norms before them, or behind the sums."""

    def __init__(self, config, first):
        super().__init__()
        self.post_norm = config.post_norm
        skip = (
            first and not config.post_norm and not config.first_attn_norm
        )  # the embedding norm stands in
        self.attn_norm = nn.Identity() if skip else layer_norm(config)
        self.attn = Attention(config)
        self.mlp_norm = layer_norm(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, mask, source=None, positions=None):
        """Rows x (B, K, C), at positions (B, K), after a look at source (B, T, C), or at one another without it."""
        if self.post_norm:
            x = self.attn_norm(
                x + self.drop(self.attn(x, x if source is None else source, rope, mask, positions))
            )
            return self.mlp_norm(x + self.drop(self.mlp(x)))
        rows = self.attn_norm(x)
        source = rows if source is None else self.attn_norm(source)
        x = x + self.drop(self.attn(rows, source, rope, mask, positions))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class Encoder(nn.Module):
    """Tokens (B, T) to hidden states (B, T, C), or (B, K, C): the last block need not compute what nobody reads.

    Nor need the last n_narrow, if all take keys and values from the last full one (NarrowBERT, arXiv 2301.04761)."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config, first=i == 0) for i in range(config.n_layer))
        self.n_full = config.n_layer - max(1, config.n_narrow)  # one narrow layer is the full model
        self.final_norm = layer_norm(config) if config.final_norm else nn.Identity()
        self.rope = config.position == "rope"
        if self.rope:
            angles = position_angles(config.max_seq_len, config.n_embd // config.n_head).repeat(
                1, 2
            )  # (T, D)
            self.register_buffer("rope_cos", angles.cos(), persistent=False)
            self.register_buffer("rope_sin", angles.sin(), persistent=False)

    def forward(self, ids, attention_mask=None, token_types=None, positions=None):
        mask = (
            None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        )  # (B, 1, 1, T)
        x = self.embeddings(ids, token_types)
        rope = (self.rope_cos, self.rope_sin) if self.rope else None
        for layer in self.layers[: self.n_full]:
            x = layer(x, rope, mask)
        source, x = x, rows_at(x, positions)
        for layer in self.layers[self.n_full :]:
            x = layer(x, rope, mask, source, positions)
        return self.final_norm(x)


def head_transform(config):
    """BERT's dense-GELU-norm before the decoder; in fine-tuning the same weights warm up the classifier."""
    dense = nn.Linear(config.n_embd, config.n_embd, bias=config.linear_bias)
    return nn.Sequential(OrderedDict(dense=dense, act=nn.GELU(), norm=layer_norm(config)))


class MaskedLM(nn.Module):
    """The masked language model. Its decoder is tied to the token embeddings; only positions asked for are computed."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Encoder(config)
        self.head = head_transform(config) if config.head_transform else nn.Identity()
        self.decoder = nn.Linear(config.n_embd, config.vocab_size, bias=config.decoder_bias)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self.apply(init_weights(config.n_embd))
        if config.zero_init:  # every block starts as the identity (arXiv 1901.09321 and later)
            for layer in self.model.layers:
                nn.init.zeros_(layer.attn.Wo.weight)
                nn.init.zeros_(layer.mlp.Wo.weight)

    def forward(self, ids, positions=None, attention_mask=None, token_types=None):
        """Logits (B, K, V) at positions (B, K) of the tokens ids (B, T); at all T positions where none are given."""
        return self.decoder(self.head(self.model(ids, attention_mask, token_types, positions)))

    def flops_per_token(self, seq_len, predicted):
        """FLOPs per token of forward and backward on rows of T = seq_len tokens, `predicted` of them decoded.

        6 · W + 12 · L · T · C with W matrix weights (arXiv 2001.08361, section 2.1, but attention not causal); what the
        decoded rows alone go through counts by their share. Norms, biases and optimiser are not counted."""
        layers, n_full, share = self.model.layers, self.model.n_full, predicted / seq_len
        every, few = list(layers[:n_full]), [self.head, self.decoder]
        for layer in layers[n_full:]:
            every += [layer.attn.Wk, layer.attn.Wv]
            few += [layer.attn.Wq, layer.attn.Wo, layer.mlp]
        W, W_few = (
            sum(p.numel() for m in ms for p in m.parameters() if p.ndim == 2) for ms in (every, few)
        )
        attention = 12 * (n_full + share * (len(layers) - n_full)) * seq_len * self.config.n_embd
        return 6 * (W + share * W_few) + attention


def make_loss(model, device, amp_dtype):
    """loss(ids, positions, labels): cross-entropy in nats, summed over all labels but -100, a 0-d tensor."""

    def loss(ids, positions, labels):
        # no weight is used twice, and a cache would keep the low-precision copies of all blocks, offloaded ones too
        with torch.autocast(
            device.type, amp_dtype, enabled=amp_dtype != torch.float32, cache_enabled=False
        ):
            logits = model(ids, positions)  # (B, K, V): they exist for the chosen positions only
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    return loss


class Classifier(nn.Module):
    """Logits from the [CLS] row: the MLM head's transform (dense-tanh where it has none), dropout, linear."""

    def __init__(self, masked_lm, n_labels, dropout=0.1):
        super().__init__()
        self.config, width = masked_lm.config, masked_lm.config.n_embd
        self.model = masked_lm.model
        pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh()).apply(init_weights(width))
        self.head = masked_lm.head if masked_lm.config.head_transform else pooler
        self.drop = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, n_labels).apply(init_weights(width))

    def forward(self, ids, attention_mask=None, token_types=None):
        """Logits (B, n_labels) for tokens ids (B, T) that start with [CLS]; attention_mask is 1 at real tokens."""
        x = self.model(ids, attention_mask, token_types, torch.zeros_like(ids[:, :1]))[
            :, 0
        ]  # (B, C)
        return self.classifier(self.drop(self.head(x)))


def init_weights(width):
    """A function for apply(): every matrix and table N(0, 0.02 · √(768 / width)), zero biases.

    0.02 is BERT's (arXiv 1810.04805; the paper's code too), which has width 768; wider models keep it. With it a narrow
    model begins with almost uniform attention: at 128 wide five minutes ended at 5.31 instead of 5.08 (results/)."""
    std = 0.02 * max(1.0, 768 / width) ** 0.5

    def init(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    return init
