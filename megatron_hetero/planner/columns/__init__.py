"""Seeds for clusters of many nodes: column generation over bundles of equal replicas.

strategy         the main search of large clusters
kinds            equal nodes, and their division into blocks
bundle_mix       which bundles a pool is divided into
bundle_paths     the cheapest sequence of blocks for every period
bundle_shapes    bundles made without prices
pricing          the best bundles for given prices of nodes
other_recompute  seeds that the job's own recompute hides
packing          packing in fractions, a linear programme with few rows
site_mixes       what each of several sites is divided into
shortest_paths   orders of a few places with the least time between neighbours
"""
