"""The recipe before it, small enough for a CPU: a quarter of its depth, a sixth of its width.

    python train.py config/crammed.py config/shrunk.py --data_dir=data/small --vocab_size=8192
    python race.py config/crammed.py+config/shrunk.py config/bert.py+config/shrunk.py

It divides what the recipe before it says. Adam's learning rate should grow as the width falls
(arXiv 2203.03466, table 3): add --lr=0.006, six times the paper's, where there is no Muon.
"""

n_layer = n_layer // 4
n_narrow = n_narrow // 4
n_head = n_head // 6
n_embd = 64 * n_head  # heads keep their size
n_inner = n_inner // 6
micro_batch = 32
batch_size = batch_size // 16
batch_start = batch_start // 16
