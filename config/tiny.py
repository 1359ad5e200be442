"""A small BERT on the embedded corpus in three minutes, sized for two CPU cores."""

# prepare.py
data_dir = "data/tiny"
source = "data/sample.txt.gz"
vocab_size = 4096
filter_ratio = 0.0  # the threshold fits a vocabulary of 32k; a small one needs more tokens for the same text
val_share = 0.03  # 254 documents only: one in a hundred would be two

# train.py
out_dir = "out/tiny"
budget_hours = 0.05
n_layer = 3
n_head = 4
n_embd = 128
n_inner = 256
micro_batch = 32
batch_size = 32
batch_start = 32
# Three minutes were 1,000 steps of 4,096 tokens when these were tried, 1,500 now. Held-out loss, one run each: Muon as
# here 4.15, AdamW alone at 0.006 4.37; with four layers Muon at 0.02 4.32, AdamW at 0.004 4.41, and 192 wide 4.52.
muon_lr = 0.03
lr = 0.006
schedule = "triangle"
evals = 6
eval_rows = 192
checkpoint_minutes = 1.0
compile = False  # up to 50 s of the three minutes, for a sixth more speed
samples = "once upon a [MASK] there was a king.|there were tears in her [MASK].|he opened the [MASK] and went out."
