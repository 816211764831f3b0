"""Flags that do not go with experts as a plan deals them out."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.plan.plan import Plan


def check_dealt_experts(plan: Plan, *, has_biases: bool) -> None:
    """Refuse experts with biases that several ranks divide, as Megatron does.

    Args:
        plan: of a model with experts.
        has_biases: linear layers have biases, those of experts too.
    Raises:
        UnsupportedError: the message names the flags, and advice.
    """
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    divided = [shape for shape in shapes if shape.expert_width > 1]
    if divided and has_biases:
        raise UnsupportedError(
            f"{divided[0]} divides each expert among {divided[0].expert_width} ranks, and each "
            "would add a bias whole, which Megatron refuses. Add --disable-bias-linear, or deal "
            "whole experts out (ep, etp1)."
        )


def check_dealt_experts_of_job(plan: Plan) -> None:
    """Refuse as `check_dealt_experts`, when a plan becomes flags; a bare layout has no job yet."""
    if plan.workload is not None and plan.workload.model.num_experts:
        check_dealt_experts(plan, has_biases=plan.workload.model.add_bias_linear)
