"""The paper's minimal change of the training, with crammed BERT's architecture.

AdamW at 5e-4, batches of 8,192 rows, a cosine over the budget and 15 % masks (arXiv 2212.14034,
section 5; its authors' train=bert-base). Their script has another run with 1,536 rows, which is
that configuration's own size: --batch_size=1536 --batch_start=1536.
"""

# data and architecture: those of config/crammed.py, with the note there on position_embedding
data_dir = "data/crammed"
out_dir = "out/bert_minimal_train"
source = "monology/pile-uncopyrighted"
max_tokens = 5_530_000_000
order = "curriculum"
position_embedding = "sinusoidal"
max_seq_len = 128
first_attn_norm = True
norm_bias = True
decoder_bias = False
norm_eps = 1e-12
zero_init = False
# optimiser: BERT's, but decoupled decay, no dropout and a schedule that ends with the budget
optimizer = "adamw"
lr = 5e-4
beta2 = 0.98
adam_eps = 1e-12
weight_decay = 0.01
grad_clip = 0.0
schedule = "cosine"
warmup = 0.06
# batch
micro_batch = 512
batch_size = 8192
batch_start = 8192
batch_ramp = 0.0
# objective
mask_rate = 0.15
mask_rate_end = 0.15
mask_token_share = 0.8
random_token_share = 0.1
