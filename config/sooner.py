"""Attention values that also see the embeddings of their tokens: small models learn sooner.

transformers loads the result by the code in its folder. It was tried with small.py's sizes, never
with the default's:

    python train.py config/small.py config/sooner.py --out_dir=out/sooner
"""

token_values = True
