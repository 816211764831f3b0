"""Gradients and the optimizer across replicas that divide parameters differently.

sync              the gradient sync of one rank
buckets           slices, holders and buckets, in one order on all ranks
memory            where slices lie in this rank's memory
reduction         one bucket, reduced whole or to its owners
hooks             when a gradient is complete
sync_off          when a step's sync may start
weight_gradients  backward passes in two parts
optimizer         Megatron's distributed optimizer over owned pieces
optimizer_shards  owners of the optimizer's state
parameter_gather  new weights on their way from their owners
"""
