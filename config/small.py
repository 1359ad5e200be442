"""A BERT of 3.1M parameters on 50M tokens of FineWeb: an evening, 2.4 hours, of two CPU cores.

A tenth of a day: 21 tokens per parameter, where a GPU's day has 34 or more. So what shapes the
learning is the day's, as train.py has it, but for the sizes, a constant batch and Muon's rate.
"""

# prepare.py
data_dir = "data/small"
max_hub_tokens = 50000000
vocab_size = 8192

# train.py
out_dir = "out/small"
budget_hours = 2.4
n_layer = 4
n_head = 3
n_embd = 192
n_inner = 384
micro_batch = 64
batch_size = 64  # in a miniature 16 to 128 rows tie, 32 and 64 lowest: results/README.md
batch_start = 64
muon_lr = 0.01  # ties with 0.02 in the miniature 64 wide; a loss 0.05 lower at 128 (one seed)
eval_rows = 1024
compile = False  # no faster on a CPU at this size

# finetune_glue.py
# the paper's 4e-5 is for 40 times as many parameters; see results/README.md
glue_lr = 3e-4
