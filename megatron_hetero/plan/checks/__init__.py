"""Invariants of a plan, a function for each, and the order of the checks.

validate   all of them, in an order in which later ones may trust earlier ones
structure  shapes, layers, micro-batches, recompute
workload   widths that divide the model, batches that add up
devices    each GPU in one place, ranks that bind
cluster    the devices are there, the limits hold
estimates  estimates of this plan, and possible
schedule   launch counts, chunks, orders
sharding   layers whose weights the replicas divide
violation  what an invariant reports
"""
