"""The search for a plan.  Importing it loads neither torch nor megatron.

api               from a cluster and a workload to a plan
request           options that do not go together
problem           what is searched: usable devices, in an order that no file changes
portfolio         the strategies of a search, and their order
strategy          the interface of every strategy
structure_search  one best-first search over structures, the core of `--strategy auto`
objective         the measure that plans are compared by, and limits of time and money
objective_bound   lower bounds of the other objectives
one_library       plans keep to one communication library
mixture           stages in precisions of their own, where the user asks for them
precision         the precision of a job that names none: what all GPUs have, or the faster
measured_sizes    micro-batch sizes that a profile speaks for
exchange_groups   groups of machines for the exchange of gradients
outcome           what a plan means for a whole run
written           a placement as a plan
"""

from __future__ import annotations

from megatron_hetero.planner.api import plan_and_explain, plan_cluster

__all__ = ["plan_and_explain", "plan_cluster"]
