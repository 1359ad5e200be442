"""The paper's minimal change of the architecture: BERT-base with its norms before the blocks.

It is trained as crammed BERT is (arXiv 2212.14034, section 5; its authors'
arch=crammed-bert-simple).
"""

# data: that of config/crammed.py
data_dir = "data/crammed"
out_dir = "out/bert_minimal_arch"
source = "monology/pile-uncopyrighted"
max_tokens = 5_530_000_000
order = "curriculum"
# architecture
n_layer = 12
n_inner = 3072
activation = "gelu"
position_embedding = "learned"
max_seq_len = 128
first_attn_norm = True
final_norm = False
head_transform = True
linear_bias = True
norm_bias = True
norm_eps = 1e-12
zero_init = False
# optimiser, batch and objective: those of config/crammed.py
optimizer = "adamw"
lr = 0.001
beta2 = 0.98
adam_eps = 1e-12
weight_decay = 0.01
grad_clip = 0.5
schedule = "triangle"
micro_batch = 512
batch_size = 8192
batch_start = 512
batch_ramp = 0.6
mask_rate = 0.25
mask_rate_end = 0.25
mask_token_share = 0.8
random_token_share = 0.1
