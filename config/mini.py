"""A BERT of 1.7M parameters for five minutes of one CPU core.

The races of results/README.md measure their factors with it. It is small enough to be well past the
plateau by then; 4.8M parameters end no lower after ten minutes. It is counted in steps, for the
clock is the larger noise on a machine that is a fifth slower at times.
"""

# prepare.py: as config/small.py has it
data_dir = "data/small"
max_hub_tokens = 50000000
vocab_size = 8192

# train.py
out_dir = "out/mini"
max_steps = 540
n_layer = 4
n_head = 2
n_embd = 128
n_inner = 256
head_transform = True  # as its races in results/README.md had it
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
