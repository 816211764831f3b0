"""Seeds for clusters of many nodes: column generation over bundles of equal replicas.

strategy         the main search of large clusters
bundle_mix       the bundles that a pool of nodes is divided into
bundles          bundles with their layers and quick times
pool_nodes       the nodes of a pool, on which bundles are filled
equal_copies     the bundles of which equal copies end soonest
bundle_paths     the cheapest sequence of blocks for every period
equal_shapes     bundles whose equal copies take up a pool
bundle_shapes    plain bundles, made without prices, and the chains of a bundle
pricing          the best bundles for given prices of nodes
packing          packing in fractions, a linear programme with few rows
site_mixes       the bundles of each of several sites
choice_prices    prices of choices among them, the most promising first
shortest_paths   orders of a few places with the least time between neighbours
"""
