"""Exchanges by groups of holders, as plans and jobs have them.

grouping      reduce-scatters from groups of holders
by_group      inside machines, inside groups of them, between the groups
regions       sites that are near to each other
uplinks       relative bandwidths of machines, by which groups of them own parts
pairs         rounds of two holders for which a library has one call
"""
