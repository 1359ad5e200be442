"""A BERT of 1.7M parameters: what the factors of the race are measured with, five minutes each on one CPU core.

Small enough to be well past the plateau by then, where 4.8M parameters have hardly left it. Data: config/small.py's.
"""

data_dir = "data/small"
out_dir = "out/mini"
budget_hours = 0.083333
vocab_size = 8192
n_layer = 4
n_head = 2
n_embd = 128
n_inner = 256
zero_init = False
micro_batch = 32
batch_size = 64
batch_start = 64
mask_rate = 0.25
mask_rate_end = 0.25
mask_token_share = 0.8
random_token_share = 0.1
muon_lr = 0.03
lr = 0.009
schedule = "triangle"
evals = 8
eval_rows = 192
compile = False
