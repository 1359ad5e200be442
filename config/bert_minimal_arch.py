"""The paper's minimal change of the architecture: BERT-base with its norms before the blocks.

It is trained as crammed BERT is (arXiv 2212.14034, section 5; its authors'
arch=crammed-bert-simple).
"""

include("crammed.py")
out_dir = "out/bert_minimal_arch"
n_layer = 12
n_inner = 3072
activation = "gelu"
position_embedding = "learned"
final_norm = False
head_transform = True
linear_bias = True
decoder_bias = True
