"""A day on an RTX 4090 or larger: 1,024 wide and 28 layers deep as ModernBERT-large.

A day on such a card wants as many by results/cards.py, which continues small curves over five
orders of magnitude: so its gain over the default is not certain. It has not been run on a card.
"""

out_dir = "out/day_330m"
n_layer = 28
n_head = 16
n_embd = 1024
n_inner = 2048
micro_batch = 128
