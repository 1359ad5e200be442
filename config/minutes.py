"""The day's rehearsal: 42 minutes of an RTX 4090, by arithmetic, or nine of an H100.

48.3M parameters, by all of train.py's defaults but for the sizes. An H100 reached 0.527 nats per
character in nine minutes, and a mean of 72.2 on five GLUE tasks, with the settings below, other
text and an older start: results/README.md. On it type --budget_hours=0.15.
"""

# prepare.py: a twelfth of the day's text and of its download
data_dir = "data/minutes"
max_tokens = 800_000_000

# train.py
out_dir = "out/minutes"
budget_hours = 0.7
n_layer = 12
n_head = 8
n_embd = 512
n_inner = 1024
micro_batch = 512  # of 128 tokens
batch_size = 2048
batch_start = 512
checkpoint_minutes = 4.0

# finetune_glue.py: much better for models of up to 48M; not tried on a day's
glue_batch = 32
glue_lr = 1e-4
glue_dropout = 0.0
glue_pooling = "mean"
