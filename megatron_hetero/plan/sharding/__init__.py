"""Pieces of tensors on the devices of a stage, as arithmetic.

expert_groups ranks that deal experts out over replicas
shards        shard tables: the edges between the pieces of a tensor's devices
stage_ranges  parts of an activation on the ranks of a stage
token_shares  the tokens of a sequence on context-parallel ranks
"""
