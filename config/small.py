"""A BERT of 3.1M parameters on 50M tokens of FineWeb: an evening, 2.4 hours, of two CPU cores.

A tenth of a day: 21 tokens per parameter, where a GPU's day has 26 or more. So what shapes the
learning is the day's, as train.py has it, but for the sizes and a constant batch.
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
eval_rows = 1024
compile = False  # no faster on a CPU in float32; in bfloat16, 256 wide, 1.2 times as fast

# finetune_glue.py
# the paper's 4e-5 is for 40 times as many parameters; see results/README.md
glue_lr = 3e-4
