"""A day on an A100 or larger: 1,024 wide and 28 layers deep as ModernBERT-large.

By results/cards.py a day on such a card wants about so many parameters. That continues small
curves over four orders of magnitude, so a gain over the default is not certain, and not measured.
"""

out_dir = "out/day_330m"
n_layer = 28
n_head = 16
n_embd = 1024
n_inner = 2048
micro_batch = 128
