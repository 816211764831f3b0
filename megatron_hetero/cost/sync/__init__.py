"""Seconds of the exchange of gradients.

gradients  the exchange between replicas, and of tied embeddings
groups     runs of layers with the same holders
runs       their exchanges and the prices of these, as far as rooms do not count
buckets    gradients that travel together
room       memory for those that are under way
sharded    what exchanges of sharded layers add to passes
least      the least that any exchange takes, for bounds
exchange_clock  when exchanges that share paths are done
holders    ranks that reduce gradients together
communicators  those of every rank of a job, and NCCL's buffers for them
"""
