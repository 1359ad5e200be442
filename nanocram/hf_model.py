"""Classes of transformers around model.py. The folder of a model that is no ModernBERT has a copy
of both files, which transformers runs once a user has typed trust_remote_code=True.
"""

import sys

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_outputs
from transformers.utils import can_return_tuple

# transformers 4 would take that of a folder of the same name
sys.modules.pop(f"{__package__}.model", None)
from .model import Classifier, MaskedLM, ModelConfig, init_weights


class NanocramConfig(PretrainedConfig):
    model_type = "nanocram"  # config.json has the fields of ModelConfig by this name, too
    classifier_pooling = "cls"  # or mean
    classifier_dropout = 0.1


class NanocramModel(PreTrainedModel):
    config_class = NanocramConfig
    base_model_prefix = "net"
    output = modeling_outputs.BaseModelOutput  # hidden states (B, T, C)
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        sizes = ModelConfig(**config.nanocram | {"vocab_size": config.vocab_size})
        with torch.device("cpu"):  # not on "meta": tables of positions are in no file
            self.net = self.build(MaskedLM(sizes)).to(torch.get_default_dtype())
        self.tables = {m: dict(m.named_buffers(recurse=False)) for m in self.net.modules()}
        self.post_init()

    def build(self, masked_lm):
        masked_lm.head = masked_lm.decoder = nn.Identity()
        return masked_lm

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None):
        """Of tokens (B, T); attention_mask (B, T) is 0 at padding."""
        net = self.net.model if self.output is modeling_outputs.BaseModelOutput else self.net
        found = net(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        found = found[0] if isinstance(found, tuple) else found  # a second head's, in training
        if labels is None:
            return self.output(found) if net is not self.net else self.output(logits=found)
        given = {"logits": found, "pooled_logits": found, "labels": labels, "config": self.config}
        loss = self.loss_function(vocab_size=self.config.vocab_size, **given)
        return self.output(loss, found)

    def init_weights(self):  # a fresh model stays as model.py has made it
        self.tie_weights()

    @torch.no_grad()
    def _init_weights(self, module):
        """Make what the folder lacks as in a fresh model: a head, tables that version 5 empties."""
        for name in module._non_persistent_buffers_set & self.tables.get(module, {}).keys():
            module.get_buffer(name).copy_(self.tables[module][name])
        names = [name for name, m in self.named_modules() if m is module]
        if not names:  # a table that was made larger
            return init_weights(self.config.hidden_size)(module)
        own, mark = module.named_parameters(recurse=False), "_is_hf_initialized"
        lacking = {name: p for name, p in own if not hasattr(p, mark)}
        # version 4.51 marks none: of a module around a new head others may have been in the folder
        is_new = isinstance(module, Classifier) or hasattr(module, "reset_parameters")
        if lacking and (is_new or hasattr(self.get_input_embeddings().weight, mark)):
            fresh = type(self)(self.config).get_submodule(names[0])
            for name, p in lacking.items():
                p.copy_(fresh.get_parameter(name))

    @property
    def _tied_weights_keys(self):  # an edit may use a layer twice
        first, named = {}, self.named_parameters(remove_duplicate=False)
        return {name: first[p] for name, p in named if first.setdefault(p, name) != name}

    @property
    def base_model(self):  # without the head, so that to freeze this leaves the head to train
        return self.net.model

    def get_input_embeddings(self):
        return self.net.model.embeddings.tok_embeddings

    def set_input_embeddings(self, table):
        self.net.model.embeddings.tok_embeddings = table


class NanocramForMaskedLM(NanocramModel):
    output = modeling_outputs.MaskedLMOutput  # logits (B, T, V)

    def build(self, masked_lm):
        return masked_lm

    def get_output_embeddings(self):
        return self.net.decoder

    def set_output_embeddings(self, decoder):
        self.net.decoder = decoder


class NanocramForSequenceClassification(NanocramModel):
    output = modeling_outputs.SequenceClassifierOutput  # logits (B, num_labels)

    def build(self, masked_lm):
        c = self.config
        return Classifier(masked_lm, c.num_labels, c.classifier_dropout, c.classifier_pooling)


class NanocramForTokenClassification(NanocramModel):
    output = modeling_outputs.TokenClassifierOutput  # logits (B, T, num_labels)

    def build(self, masked_lm):
        c = self.config
        linear = nn.Linear(c.hidden_size, c.num_labels).apply(init_weights(c.hidden_size))
        masked_lm.decoder = nn.Sequential(nn.Dropout(c.classifier_dropout), linear)
        return masked_lm
