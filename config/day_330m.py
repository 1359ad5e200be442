"""A day on a large card, an A100 or an H100: 1,024 wide and 28 layers deep as ModernBERT-large.

By results/isoflop.py, continued over five orders of magnitude, such a day wants 130M to 1,300M
parameters, so its gain over the default is not certain, and it has not been run on a card.
"""

out_dir = "out/day_330m"
n_layer = 28
n_head = 16
n_embd = 1024
n_inner = 2048
micro_batch = 128
