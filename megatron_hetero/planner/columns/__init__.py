"""Seeds for clusters of many nodes: column generation over bundles of replicas (slabs).

strategy     the main search of large clusters
kinds        equal nodes, and ways to cut them
slab_mix     which slabs a pool is divided into
slab_paths   the cheapest sequence of blocks for every period
slab_shapes  slabs made without prices
pricing      the best slabs for given prices of nodes
other_recompute  seeds that the job's own recompute hides
packing      packing in fractions, a linear programme with few rows
site_mixes   what each of several sites is divided into
walks        short walks through a few places
"""
