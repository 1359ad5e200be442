"""A small BERT on the embedded corpus in three minutes, sized for two CPU cores.

They buy a model that fills in plain words. For a classifier or sentence vectors it was no better
than fresh weights on 2026-11-23, and worse at the small learning rates of large models, since its
token table is eight times as large (results/README.md). Begin at 1e-3 to 2e-3, or train it longer.
"""

# prepare.py
data_dir = "data/tiny"
source = "data/sample.txt.gz"
vocab_size = 4096
filter_ratio = 0.0  # books: there is nothing to drop

# train.py
out_dir = "out/tiny"
budget_hours = 0.05
n_layer = 3
n_head = 2
n_embd = 128
n_inner = 256
micro_batch = 32
batch_size = 32
batch_start = 32
# in 1,000 steps these two are worth 0.12 nats: results/sooner.csv, seed 0
lr = 0.009
mask_rate_end = 0.3  # more tokens to learn from
evals = 6
eval_rows = 192
checkpoint_minutes = 1.0
compile = False  # up to 50 s of the three minutes, for 19 to 42 % more speed
