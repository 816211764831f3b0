"""GenTree: exchanges generated for a tree of links, beside the exchanges that jobs run.

tree          devices, what joins them, and the uplink of each
from_cluster  the tree of some holders of a cluster
price         GenModel's seconds of a plan on a tree
baselines     rings, parameter servers, binary trees and more, to compare with
capacities    bandwidth of each branch
generate      plans made for a tree, and the choice among all
least         a bound by bytes alone
"""
