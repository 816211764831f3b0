"""Lower bounds: the time that no plan can be faster than, and the proof.

step_time    the bound of a job, put together
estimate     `Estimates` of a priced placement, with its bound
launches     branch and bound over replicas that may launch ahead
packing      whole replicas packed into the GPUs there are
sites        bytes that lines between sites let through
free_groups  the bound of groups of any GPUs in any shares
space        the plans that a bound is a bound of
counting     GPUs of a cluster, counted coarsely or finely
effort       limits of work for each kind of proof
"""
