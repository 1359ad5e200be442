"""NarrowBERT inside the budget: after 4 of the 16 layers only the tokens to predict go on.

The other 12 layers compute queries and MLP for those tokens alone and take keys and values from the
fourth layer's output (arXiv 2301.04761). In fine-tuning only [CLS] goes through them. All else is
train.py's default.
"""

out_dir = "out/narrow"
n_narrow = 12
