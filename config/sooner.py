"""Attention values that also see the embeddings of their tokens: small models learn sooner.

transformers cannot load the result. It was tried with small.py's sizes, never with the default's:

    python train.py config/small.py config/sooner.py --out_dir=out/sooner
"""

token_values = True
