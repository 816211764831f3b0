"""Attention on an asymmetric plan: positions, latent heads and reported logits.

latent_attention  multi-latent attention on a group
rotary            rotary positions of a rank's own tokens
reported_logits   the largest attention logit of each head
"""
