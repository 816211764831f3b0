"""Planning again after the cluster changed.

replanning     the plan near the old one, the best one, and the way to each
repair         placements near an old plan
relabel        equal GPUs exchanged so that state stays where it is
continuations  candidates with what moving to them takes
"""
