"""Lower bounds: a step time that no plan beats, and the proof.

step_time    the bound of a job, put together from the others
estimate     `Estimates` of a priced placement, with its bound
launches     branch and bound over replicas that may launch ahead
packing      whole replicas packed into the GPUs of the cluster
sites        the bytes that cross the lines between sites
divided      the bound of plans that divide sequences (context parallelism)
free_groups  the bound of groups of any GPUs in any shares
space        the plans for which the bound holds
counting     GPUs of a cluster, counted coarsely or finely
effort       limits of work for each kind of proof
"""
