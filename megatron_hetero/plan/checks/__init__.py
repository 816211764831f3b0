"""Invariants of a plan, a function for each.

validate   all of them; later ones may trust earlier ones, which is the order of the next seven
structure  shapes, layers, micro-batches, recompute
schedule   launch counts, chunks, orders
sharding   layers whose weights the replicas divide
devices    each GPU in one place, ranks that bind
workload   widths that divide the model, batches that add up
estimates  estimates of this plan, and possible
cluster    the devices are there, the limits hold
violation  what an invariant reports
"""
