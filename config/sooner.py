"""Attention values that also see the embeddings of their tokens: small models learn sooner.

The result is no ModernBERT. Type it behind another recipe, or alone:

    python train.py config/small.py config/sooner.py
"""

token_values = True
