"""Errors planted in the runtime on purpose: a check that cannot fail proves nothing.

catalogue      every planted error by its name
between_ranks  errors of boundaries, sums of gradients and new weights
within_rank    errors of samples, losses, norm, start and update
newer          errors of rows of attention, experts over replicas, buckets, resumed checkpoints
features       errors of exchange groups, experts, latent attention, context, logs
"""
