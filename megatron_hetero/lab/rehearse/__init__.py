"""`megatron-hetero rehearse`: run a plan for real on this machine, as slowly as its GPUs would.

`small` makes a small model in which every run of layers with the same holders is one layer, `board`
is the memory that all ranks share (links, who came when), `clock` stretches computing, `transport`
holds messages and collectives to the links of the cluster, `rank` puts the three on one process of
Megatron's own training, `run` starts the processes and gathers what they saw, and `command` is
behind the command line.
"""
