"""Changes to placements, kept while they help.

neighbours      every move of the search over structures, in tables, and where each is made
places          the places in a replica that moves look at
one_replica     moves inside one replica
two_replicas    moves between two
idle_groups     moves that take idle GPUs
divisions       moves of stages that divide sequences
like_groups     groups of like GPUs that stand in for each other
fine            single layers, micro-batches and idle GPUs
unlike_groups   stages joined into one, of tensors or sequences in shares
group_shares    shares of unlike GPUs by speed and memory
"""
