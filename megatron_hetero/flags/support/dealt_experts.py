"""Flags that do not go with experts dealt out over replicas, on an asymmetric plan."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.plan.plan import Plan


def check_dealt_experts(plan: Plan, *, has_biases: bool) -> None:
    """Refuse what groups of experts over replicas do not follow in the plug-in's runtime.

    Args:
        plan: the plan.
        has_biases: linear layers have biases, those of experts too.
    Raises:
        UnsupportedError: the message names the flags, and advice.
    """
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    groups = [shape.expert_groups for shape in shapes if shape.expert_groups is not None]
    if any(width > 1 for _, width in groups) and has_biases:
        raise UnsupportedError(
            "etp above 1 divides experts, and each rank would add a bias whole. Add "
            "--disable-bias-linear, or deal whole experts out (etp1)."
        )


def check_dealt_experts_of_job(plan: Plan) -> None:
    """Refuse as `check_dealt_experts`, when a plan becomes flags; a bare layout has no job yet."""
    if plan.workload is not None:
        check_dealt_experts(plan, has_biases=plan.workload.model.add_bias_linear)
