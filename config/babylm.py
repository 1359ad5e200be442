"""BabyLM's strict-small track: a BERT from 10M words, read ten times at most (docs/babylm.md).

4.7M parameters, for CPU cores. A card takes 36M: --n_layer=12 --n_head=8 --n_embd=512
--n_inner=1024 (not measured on a GPU yet).
"""

include("small.py")  # the sizes, a vocabulary of 8,192, how to fine-tune so small a model
data_dir = "data/babylm"
out_dir = "out/babylm"
source = "data/text/*.train.txt"
documents = "lines"  # one sentence or utterance each
filter_ratio = 0.0  # each word counts: drop none
max_epochs = 10
# BabyLM's checkpoints, but for chck_100M, which is the finished model
snapshots = ",".join(map(str, [*range(1, 10), *range(10, 100, 10)]))
