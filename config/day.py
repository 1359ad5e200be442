"""A GPU's day in miniature: 1.0M parameters see 64M tokens, sixty each, on one CPU core.

A GPU's day has 26 (T4) to 435 (H100) tokens for each of 120M parameters; three minutes of
config/tiny.py have 3 to 6. What shapes the learning, but for the sizes, the filter and the constant
batch, is as train.py has it, so that what wins here says something of its defaults. It is counted
in steps, so that other work on the machine changes no result.
"""

# prepare.py: the vocabulary of a small model; 190 MB of text make 52M tokens
data_dir = "data/day"
max_hub_tokens = 60000000
vocab_size = 4096
filter_ratio = 0.0

# train.py
out_dir = "out/day"
max_steps = 15625  # of 32 rows: 64M tokens
n_layer = 3
n_head = 2
n_embd = 128
n_inner = 256
micro_batch = 32
batch_size = 32
batch_start = 32
eval_rows = 1024
