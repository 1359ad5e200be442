"""Izsak et al.'s "How to Train BERT with an Academic Budget": a large model, few steps.

Their best command (arXiv 2104.07705): 24 layers of 1,024, AdamW at 1e-3, batches of 4,096 rows, a
linear schedule over the clock; no final norm and norm_eps as in the paper's rebuilding of it
(2212.14034; its authors' arch=crammed-large-izsak), which trains at 2e-3. We keep the rate that its
inventors found best. They had eight cards of 12 GB for a day; on one card this is far from done
when the day is over.

The text is FineWeb. They and the paper's authors took BookCorpus and Wikipedia: config/bert.py says
how to come closer.
"""

# of BERT: data, masks, decay, a constant batch, a linear schedule, dropout; biases, GELU, learned
# positions and the head's transform
include("bert.py")
out_dir = "out/izsak"
# architecture: BERT-large with its norms before the blocks
n_layer = 24
n_head = 16
n_embd = 1024
n_inner = 4096
token_types = 0
post_norm = False
max_seq_len = 128
first_attn_norm = True
norm_eps = 1e-6
# optimiser and batch
optimizer = "adamw"
lr = 0.001
beta2 = 0.98
adam_eps = 1e-6
warmup = 0.06
micro_batch = 32
batch_size = 4096
batch_start = 4096

# finetune_glue.py
# as the paper's authors fine-tune this recipe, and it alone (their eval=GLUE): longer than the
# challenge's five epochs. Without this file the protocol of all others holds.
epochs = 10
glue_batch = 32
glue_lr = 2e-5
glue_warmup = 0.06
glue_schedule = "linear"
glue_weight_decay = 0.1
