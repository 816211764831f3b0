"""Gradients and the optimizer across replicas that divide parameters differently.

sync              the gradient sync of one rank
buckets           slices, holders and buckets, in one order on all ranks
bucket_groups     process groups in which buckets are exchanged
memory            places of slices in this rank's memory
rank_buckets      the buckets of one rank, each of its class
reduction         one bucket, all-reduced or reduced to its owners
weights           new weights from their owners, and equal ones
equal_weights     equal weights on all holders
room              memory for buckets under way
hooks             reports of complete gradients, from Megatron's DDP
sync_off          the start of a step's sync, delayed to the last gradients
weight_gradients  backward passes in two parts
optimizer         Megatron's distributed optimizer over owned pieces
main_weights      one optimizer over stages in unlike precisions
groups            exchanges by groups of machines
sharding          layers and optimizer states that the replicas divide
"""
