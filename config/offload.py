"""A model larger than the card: 2.2B parameters in host memory.

Weights, gradients and AdamW's moments take 35 GB, and 44 as pinned memory comes and with room to
read a checkpoint. Two blocks of 66M parameters are on the device (nanocram/offload.py). Micro-
batches of many rows hide the copies, large batches make the host's AdamW worth while. A day of one
card is far too short to train so many: this is for the machine whose memory, not time, is the
limit. The folder takes 35 GB of disk, 61 while a checkpoint is written.
"""

out_dir = "out/offload"
offload = True
n_layer = 32
n_head = 40
n_embd = 2560
n_inner = 5120
# AdamW: Muon's products would be the host's to compute
optimizer = "adamw"
lr = 2e-4
beta2 = 0.98
weight_decay = 0.01
batch_size = 4096
batch_start = 1024
checkpoint_minutes = 60  # each writes 35 GB
