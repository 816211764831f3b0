"""Layers and states divided by the replicas, gathered where a step uses them.

optimizer_shards  owners of the optimizer's state
sharded_buckets   one bucket of such a layer, whose owners keep its parts
sharded_layers    layers of which a rank keeps a part, whole for each pass
ddp_hooks         such layers kept out of Megatron's DDP
parameter_gather  new weights on their way from their owners
"""
