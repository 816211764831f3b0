"""Unlike stages and widths: groups, boundaries, shards, and messages between stages.

groups             the process groups of a rank
building           how they are made, in one order on all ranks
connecting         their communicators and connections, made at the start
boundary           activations between unlike widths, every byte once
pipeline           the boundaries of a rank, as Megatron asks for them
arrivals           messages of a boundary that are under way
traffic            bytes handed to the transport, beside the least
shards             the part of every parameter that a rank holds
shard_tables       the parts of all ranks
texts              texts of all ranks on every rank
tensor_place       a rank's place in its tensor-parallel group
context_place      a rank's tokens of every sequence
masked_attention   attention under a mask of ours
fused_rows         rows of attention by torch's fused kernels, which store no scores
context_attention  attention over divided sequences
"""
