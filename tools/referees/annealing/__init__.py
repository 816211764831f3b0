"""Simulated annealing over whole plans: a referee of the planner's search, which it knows not.

A state is a plan with all that it says: groups of GPUs and their order, replicas, layers,
recompute, launch counts, micro-batch sizes, shares of the batch.  A random move changes places, and
the product fills them anew (`Completer`), or it changes one of the others alone.  Unequal shares,
divided sequences and sharded layers are only kept from where it starts.

run        one run, from a random plan or from a given one
places     random moves of groups of GPUs
settings   random moves of layers, recompute, launch counts and shares of the batch
prices     steps as the product prices them, each only as far as its limit asks
"""
