"""The exchange of gradients as data.

plan        rounds of transfers between holders
baselines   rings, halving and doubling, parameter servers
shares      parts that members own where uplinks differ
terms       what GenModel counts of a plan
programmes  what each holder does, and whether all come to their end
check       proof that a plan does what it is for
"""
