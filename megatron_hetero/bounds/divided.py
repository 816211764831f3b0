"""The bound of plans with context parallelism, whose stages divide each sequence.

`bounds.step_time` is of plans without: a stage of several groups may hold what no single group
holds, and so be faster.  docs/bound.md has the proof of this one.
"""

from __future__ import annotations

from math import inf

from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.bounds.step_time import work_bound_s
from megatron_hetero.cost.choices import context_parallels, shares_tokens
from megatron_hetero.cost.model import CostModel


def divided_bound_s(costs: CostModel) -> float:
    """Return a lower bound of the step of every plan, with context parallelism or without, by work
    alone. Infinite if no plan may have context parallelism, 0 if nothing is known.

    With measured times, which need not be those of groups of unlike GPUs, nothing is known, nor
    where these may be in a narrower precision than a GPU would have alone.
    """
    if not context_parallels(costs, 1, len(costs.cluster.devices)):
        return inf
    if costs.profile is not None or costs.workload.training.mixes_precisions:
        return 0.0
    in_equal_parts_s = work_bound_s(costs, divided=True)
    if not shares_tokens(costs):
        return in_equal_parts_s
    return min(in_equal_parts_s, free_groups_bound_s(costs) or 0.0)


def bound_with_context_parallel_s(costs: CostModel, bound_s: float) -> float | None:
    """Return `divided_bound_s` beside a bound of plans without context parallelism; None where
    that one holds for all plans."""
    divided_s = divided_bound_s(costs)
    return divided_s if divided_s < bound_s else None
