"""BabyLM's strict-small track: a BERT from 10M words, read ten times at most (docs/babylm.md).

4.7M parameters, for CPU cores. A card takes 36M: --n_layer=12 --n_head=8 --n_embd=512
--n_inner=1024 (not measured on a GPU yet).
"""

# prepare.py
data_dir = "data/babylm"
source = "text/*.train.txt"
documents = "lines"  # one sentence or utterance each, as BLiMP and most of GLUE have them
vocab_size = 8192
filter_ratio = 0.0  # each word counts: drop none

# train.py
out_dir = "out/babylm"
max_epochs = 10
snapshots = ",".join(map(str, [*range(1, 10), *range(10, 101, 10)]))  # as BabyLM wants them
n_layer = 4
n_head = 4
n_embd = 256
n_inner = 512
micro_batch = 64
batch_size = 64
batch_start = 64
eval_rows = 1024

# finetune_glue.py, as in small.py
glue_lr = 3e-4
glue_dropout = 0.0
glue_pooling = "mean"
