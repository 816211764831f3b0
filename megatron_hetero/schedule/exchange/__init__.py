"""The exchange of gradients as collectives on the cluster's paths.

gradients      collectives of a plan's gradients and new weights
early          gradients that are exchanged within the backward passes
first_use      new weights that travel during the first forward passes
taken          what an exchange takes from the cluster's paths
rank_sets      ranks that exchange a divided bucket
stock_buckets  stock Megatron's buckets
"""
