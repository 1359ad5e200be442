"""The paper's minimal change of the training, with crammed BERT's architecture.

AdamW at 5e-4, batches of 8,192 rows, a cosine over the budget and 15 % masks (arXiv 2212.14034,
section 5; its authors' train=bert-base). Their script has another run with 1,536 rows, which is
that configuration's own size: --batch_size=1536 --batch_start=1536.
"""

include("crammed.py")  # see the note there on position_embedding
out_dir = "out/bert_minimal_train"
# BERT's optimiser, but with decoupled decay, no dropout and a schedule that ends with the budget
lr = 5e-4
grad_clip = 0.0
schedule = "cosine"
warmup = 0.06
batch_start = 8192
batch_ramp = 0.0
mask_rate = 0.15
mask_rate_end = 0.15
