"""Changes to placements, kept while they help.

neighbours      every move of the search over structures, written once
layouts         groups of like GPUs exchanged in a completed structure
fine            single layers, micro-batches and idle GPUs
refine          the best placements with settings of their own
unlike_groups   stages joined into one group in shares
group_shares    shares of unlike GPUs by speed and memory
annealing       simulated annealing (`--strategy thorough`)
"""
