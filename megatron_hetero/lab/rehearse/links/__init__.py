"""Messages and collectives of a rehearsal, held to the links of the described cluster.

network    the cluster's links, by pairs and groups of ranks
board      memory that all ranks share: occupied links, and arrival times
holding    messages and collectives, delivered when the links would
transport  hooks of `torch.distributed`
works      messages and collectives under way, with their `wait`
"""
