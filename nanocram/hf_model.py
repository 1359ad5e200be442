"""Any model.py in transformers. The folder of a model that is no ModernBERT has a copy of this file
and of model.py, which transformers runs once a user has typed trust_remote_code=True.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_outputs
from transformers.utils import can_return_tuple

from .model import Classifier, MaskedLM, ModelConfig, init_weights


class NanocramConfig(PretrainedConfig):
    """The folder's config.json; its nanocram has the fields of ModelConfig."""

    model_type = "nanocram"
    classifier_pooling = "cls"  # or mean
    classifier_dropout = 0.1


class NanocramModel(PreTrainedModel):
    """Hidden states (B, T, C). Classes with a head build on this one; all have a module of model.py
    in net."""

    config_class = NanocramConfig
    base_model_prefix = "net"
    output = modeling_outputs.BaseModelOutput
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        sizes = ModelConfig(**config.nanocram | {"vocab_size": config.vocab_size})
        with torch.device("cpu"):  # not on "meta": tables of positions are in no file
            self.net = self.build(MaskedLM(sizes))
        self.tables = {m: dict(m.named_buffers(recurse=False)) for m in self.net.modules()}
        self.post_init()

    def build(self, masked_lm):
        masked_lm.head = masked_lm.decoder = nn.Identity()
        return masked_lm

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None):
        """Of tokens (B, T); attention_mask (B, T) is 0 at padding."""
        net = self.net.model if type(self) is NanocramModel else self.net
        found = net(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        if labels is None:
            return self.output(found) if net is not self.net else self.output(logits=found)
        given = {"logits": found, "pooled_logits": found, "labels": labels, "config": self.config}
        loss = self.loss_function(vocab_size=self.config.vocab_size, **given)
        return self.output(loss, found)

    def init_weights(self):  # a fresh model stays as model.py has made it
        self.tie_weights()

    @torch.no_grad()
    def _init_weights(self, module):
        """Make what the folder lacks: a new head, and tables, which transformers 5 empties."""
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        init_weights(self.config.hidden_size)(module)
        for name in module._non_persistent_buffers_set:
            module.get_buffer(name).copy_(self.tables[module][name])

    @property
    def base_model(self):  # without the head, which whoever freezes it trains
        return self.net.model

    def get_input_embeddings(self):
        return self.net.model.embeddings.tok_embeddings

    def set_input_embeddings(self, table):
        self.net.model.embeddings.tok_embeddings = table


class NanocramForMaskedLM(NanocramModel):
    """Logits (B, T, V)."""

    output = modeling_outputs.MaskedLMOutput
    _tied_weights_keys = {"net.decoder.weight": "net.model.embeddings.tok_embeddings.weight"}  # noqa: RUF012

    def build(self, masked_lm):
        return masked_lm

    def get_output_embeddings(self):
        return self.net.decoder

    def set_output_embeddings(self, decoder):
        self.net.decoder = decoder


class NanocramForSequenceClassification(NanocramModel):
    """Logits (B, num_labels)."""

    output = modeling_outputs.SequenceClassifierOutput

    def build(self, masked_lm):
        c = self.config
        return Classifier(masked_lm, c.num_labels, c.classifier_dropout, c.classifier_pooling)


class NanocramForTokenClassification(NanocramModel):
    """Logits (B, T, num_labels)."""

    output = modeling_outputs.TokenClassifierOutput

    def build(self, masked_lm):
        c = self.config
        head = nn.Sequential(
            nn.Dropout(c.classifier_dropout), nn.Linear(c.hidden_size, c.num_labels)
        )
        masked_lm.decoder = head.apply(init_weights(c.hidden_size))
        return masked_lm
