"""The exchange of gradients as data, planned on a tree of links.

tree          devices, what joins them, and the uplink of each
from_cluster  the tree of some holders of a cluster
plan          rounds of transfers between holders
grouping      reduce-scatters from groups of holders
baselines     rings, halving and doubling, parameter servers, binary trees
shares        parts that members own where uplinks differ
price         GenModel's seconds of a plan on a tree
least         what no exchange is faster than
generate      plans made for a tree, and the choice among all
uplinks       relative bandwidths of machines, by which groups of them own parts
by_group      inside machines, inside groups of them, between the groups
pairs         rounds of two holders for which a library has one call
programmes    what each holder does, and whether all come to their end
check         proof that a plan does what it is for
"""
