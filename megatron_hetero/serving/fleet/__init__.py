"""From a cluster and a workload to a serving plan.

pools     machines that are alike
shapes    pipelines that could be replicas
offers    shapes and classes as a problem of composition
unserved  why no replica serves a class
forecast  a composition, simulated
story     a minute of a fleet, and what other deadlines cost
search    the programme's answers, judged and improved by simulation
place     replicas on named GPUs
plan      the plan and its invariants
file      serve.json
api       planning in one call
"""
