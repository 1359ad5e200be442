"""The original BERT-base, 111,241,472 parameters, inside the budget (arXiv 1810.04805).

Trained as the paper's authors rebuilt it for their comparison (2212.14034; their
train=bert-original): batches of 512 rows of 128 tokens, Adam with coupled decay, no clipping, no
next-sentence task; here the schedule spans the budget. Devlin et al.'s own code takes batches of
256 rows, a tenth of them 512 tokens long, decouples the decay and clips at 1.

The text is not the authors': they took BookCorpus and Wikipedia, of which the first is no longer
handed out, and this is FineWeb. Closer are Wikipedia and books of your own. Give prepare.py both of
these, and train.py the second:

    --source='wikimedia/wikipedia:20231101.en,books/*.txt.gz'
    --data_dir=data/books_wikipedia
"""

# data: unfiltered and shuffled, for filter and order are crammed BERT's
data_dir = "data/unfiltered"
out_dir = "out/bert"
order = "shuffle"
filter_ratio = 0.0
# architecture: learned positions and token types, norms behind the sums, biases everywhere, GELU.
# A small model has not learnt with the table of positions (82M tokens, no decay), nor with decay;
# with --position_embedding=sinusoidal_fixed --weight_decay=0 --lr=0.001 it has (recipes_learn.csv)
n_layer = 12
n_inner = 3072
activation = "gelu"
position_embedding = "learned"
token_types = 2
post_norm = True
final_norm = False
head_transform = True
linear_bias = True
norm_bias = True
norm_eps = 1e-12
dropout = 0.1
zero_init = False
frequency_bias = False
neighbour_heads = False
# optimiser
optimizer = "adam"
lr = 1e-4
beta2 = 0.999
adam_eps = 1e-8
weight_decay = 0.01
grad_clip = 0.0
schedule = "linear"
warmup = 0.01  # 10,000 of a million steps
# batch
micro_batch = 128
batch_size = 512
batch_start = 512
batch_ramp = 0.0
# objective
mask_rate = 0.15
mask_rate_end = 0.15
mask_token_share = 0.8
random_token_share = 0.1
