"""train.py's default with values of attention that have the embeddings of their tokens, too.

It learns sooner in small models, but is no ModernBERT. With other sizes put it behind their recipe:
python train.py config/small.py config/sooner.py
"""

token_values = True
