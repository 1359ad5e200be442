"""A BERT for 40 MB to 2 GB of your own text on one GPU: 18M parameters as it is.

It is to see the text some ten times. None of the three was trained, on a GPU or a CPU: what they
would learn is not known. The hours are arithmetic, at 28 TFLOP/s of an RTX 3090, half of what it
should reach in layers of 768 columns; a 4090 should take 0.6 of them. --lr is that of
docs/finetune_own_labels.py: GLUE's with 4.7M and 48M parameters, a guess between them.

    text      tokens    behind the recipe, for train.py                     size    hours    --lr
    40 MB     10M       --n_layer=6 --n_head=4 --n_embd=256 --n_inner=512   8M      0.03     3e-4
    400 MB    100M      nothing                                             18M     0.8      2e-4
    2 GB      500M      --n_layer=12 --n_head=8 --n_embd=512 --n_inner=1024 40M     10       1e-4

The default is --budget_hours=1: type 0.1 for 40 MB, 10 for 2 GB.
"""

# prepare.py: half of the day's vocabulary, any script, and nothing is left out
data_dir = "data/domain"
vocab_size = 16384
normalisation = "plain"
filter_ratio = 0.0

# train.py
out_dir = "out/domain"
budget_hours = 1.0  # 13 passes through 100M tokens, by that arithmetic
n_layer = 8
n_head = 6
n_embd = 384
n_inner = 768
batch_size = 512
batch_start = 256
