"""The exchange of gradients as collectives on the cluster's paths.

gradients      collectives of a plan's gradients and new weights
by_group       what an exchange by groups of machines takes
rank_sets      ranks that exchange a divided bucket
stock_buckets  stock Megatron's buckets
"""
