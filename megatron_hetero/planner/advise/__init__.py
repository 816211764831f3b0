"""Words about a plan: why it is so, what else there is, what would help.

explain       what binds, where the time goes, what was next best
alternatives  plans beside the one chosen
simplest      the plan nearest to stock within some percent
sharding      what sharded layers cost and save
idle          why a GPU stays unused
capacity      an upper bound on the layers that a cluster holds
holding       GPUs that would hold a model, without a cluster
what_if       what to add first
additions     a cluster with one thing more
"""
