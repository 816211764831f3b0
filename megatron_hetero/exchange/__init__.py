"""The exchange of gradients as data, planned on a tree of links.

tree          devices, what joins them, and the uplink of each
from_cluster  the tree of some holders of a cluster
plan          rounds of transfers between holders
baselines     rings, halving and doubling, parameter servers, binary trees
shares        parts that members own where uplinks differ
price         GenModel's seconds of a plan on a tree
programmes    what each holder does, and whether all come to their end
check         proof that a plan does what it is for
"""
