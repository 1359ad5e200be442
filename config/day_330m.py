"""A day on an A100 or larger: 1,024 wide and 28 layers deep as ModernBERT-large.

By results/cards.py a day on an A100 wants some 320M parameters, on an H100 some 470M. That
continues small curves over four orders of magnitude; a gain over the default was not measured. An
H100 took 209,312 tokens/s with 128 rows a pass, 49 % of its products' speed (2026-11-26, 5a7f4f8).
"""

out_dir = "out/day_330m"
n_layer = 28
n_head = 16
n_embd = 1024
n_inner = 2048
