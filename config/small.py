"""A BERT of 4.7M parameters on 50M tokens of English: an hour of two CPU cores.

On cores with AMX an hour holds some 25 tokens for each parameter, as many as the smallest card's
day. So what shapes the learning is the day's, as train.py has it, but for the sizes and a constant
batch. Other cores are slower, up to seven times without bfloat16: --budget_hours=3. Without a C
compiler, or in float32, where compiling gains nothing: --compile=False.
"""

# prepare.py
data_dir = "data/small"
max_tokens = 50_000_000  # of the Hub; text of your own is read whole
vocab_size = 8192

# train.py
out_dir = "out/small"
budget_hours = 1.0
n_layer = 4
n_head = 4
n_embd = 256
n_inner = 512
micro_batch = 64
batch_size = 64  # in a miniature 16 to 128 rows tie, 32 and 64 lowest: results/README.md
batch_start = 64
eval_rows = 1024

# finetune_glue.py
# The paper's are 4e-5, dropout of 0.1 and [CLS], for 25 times as many parameters. With dropout the
# model of 2.4 hours did not even fit STS-B's training rows. [CLS] is never predicted in
# pre-training: the mean over all tokens has 2.6 times its STS-B (results/README.md).
glue_lr = 3e-4
glue_dropout = 0.0
glue_pooling = "mean"
