"""Choice of replicas on unlike GPUs, and of the requests for each replica. Engines, batching,
routers and the transfer of keys and values are other people's. The rooms, in the order in which the
data travels: workload, prices, compose, simulate, fleet, launch.

checks  what would stop a fleet, found in its files
replan  a new plan beside the one that runs
"""
