"""The published algorithm (HexiScale, arXiv 2409.01143): hierarchical graph partitioning.

strategy   the algorithm
graph      the graph that it partitions
partition  multilevel partition into parts of given sizes
"""
