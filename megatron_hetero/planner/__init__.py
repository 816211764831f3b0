"""The search for a plan.  Importing it loads neither torch nor megatron.

found             the best of a search, or the error that says why there is nothing
api               from a cluster and a workload to a plan
answer            the candidate asked for, as a plan, and why it is good
units             GPUs that hold a stage, and chains and structures of them
problem           what is searched: usable devices, in an order that no file changes
portfolio         the strategies of a search, and their order
strategy          the interface of every strategy
structure_search  the search over structures, the core of `--strategy auto`: starts, loop, the end
loop              structures best first, each priced more closely only while it can win
beside            such a search beside another one, with a board of its own
sharded_search    plans with sharded layers, behind a search with whole ones
dealt_search      plans with experts over replicas, behind a search without
exchange_groups   groups of machines for the exchange of gradients
replica_shapes    the part of a replica on which its price depends
objective         the measure that plans are compared by, and limits of time and money
request           options that do not go together
stock_strategy    `plan --stock` and `plan --strategy stock`
faster_flags      Megatron flags that would shorten the step
"""

from __future__ import annotations

from megatron_hetero.planner.api import plan_and_explain, plan_cluster

__all__ = ["plan_and_explain", "plan_cluster"]
