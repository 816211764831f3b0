"""Changes to placements, kept while they help.

neighbours      every move of the search over structures, written once
local           small changes to the best placements
exchanges       like groups exchanged by price
refine          the best shapes with settings of their own
launch_ahead    placements whose warm-up hides slow hops
other_settings  shapes under other micro-batch sizes and recompute
unlike_groups   stages joined into one group in shares
group_shares    shares of unlike GPUs by speed and memory
joins           replicas side by side joined into one
annealing       simulated annealing (`--strategy thorough`)
"""
