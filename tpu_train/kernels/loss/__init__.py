"""The final projection and what a loss needs of its logits, without the logits in memory.

`linear_logsumexp` gives each row's log-sum-exp over the vocabulary and its label's logit; cross-entropy, ignored
labels, z-loss and the combination of vocabulary shards are a few lines on these two vectors (`reference.py`).
"""
