"""The lower bound of a job under a referee's prices."""

from __future__ import annotations

from math import inf

from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.effort import QUICK, THOROUGH, ProofEffort
from megatron_hetero.bounds.step_time import WORK_BOUND_RELAXES, Bound, work_bound_s
from megatron_hetero.cost.model import CostModel
from megatron_hetero.errors import UsageError
from tools.referees.waiting.replicas import fill_bound_s
from tools.referees.waiting.rules import HasFillRules

FILL_BOUND_RELAXES = (
    "whole replicas, which GPUs share a node, part of the gradient exchange, update"
)
_MAX_LAYER_OPTIONS = 4000
"""With more layers times the ways to hold them, the bound is that by work alone."""


def referee_bound(
    costs: CostModel,
    enough_s: float = inf,
    effort: ProofEffort = THOROUGH,
    *,
    uneven: bool = False,
) -> Bound:
    """Return the best bound known under a referee's prices; see `bounds.step_time.Prove`.

    Args:
        costs: a referee's prices.
        enough_s: a longer step need not be proved.
        effort: how large a cluster may be for more than the bound by work.
        uneven: as of `step_time_bound`; referees know no such groups.

    Raises:
        UsageError: the prices are no referee's.
    """
    if not isinstance(costs, HasFillRules):
        raise UsageError(f"{type(costs).__name__} does not say how its pipelines fill")
    classes = gpu_classes(costs, uneven=uneven)
    work_s = work_bound_s(costs, uneven=uneven)
    num_gpus = sum(c.num_gpus for c in classes)
    max_gpus = effort.max_gpus if num_gpus <= effort.max_gpus else QUICK.max_gpus
    num_options = sum(len(c.widths) for c in classes)
    too_large = costs.workload.model.num_layers * num_options > _MAX_LAYER_OPTIONS
    if not classes or too_large or num_gpus > max_gpus:
        return Bound(work_s, WORK_BOUND_RELAXES)
    proved_s = fill_bound_s(costs, costs.fill_rules(), classes, work_s, enough_s)
    return Bound(proved_s, FILL_BOUND_RELAXES)
