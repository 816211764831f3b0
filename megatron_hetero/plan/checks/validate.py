"""Validation of a plan: every invariant, in an order in which later ones may trust earlier ones.

One function states one invariant; they live in `structure` (the plan by itself), `schedule`,
`sharding`, `devices`, `workload`, `estimates` and `cluster`.  Every way into a Plan ends here.
"""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.checks import cluster as check_cluster
from megatron_hetero.plan.checks import devices as check_devices
from megatron_hetero.plan.checks import estimates as check_estimates
from megatron_hetero.plan.checks import schedule as check_schedule
from megatron_hetero.plan.checks import sharding as check_sharding
from megatron_hetero.plan.checks import structure as check_structure
from megatron_hetero.plan.checks import workload as check_workload
from megatron_hetero.plan.checks.violation import Violation
from megatron_hetero.plan.plan import Plan

MAX_SHOWN = 5
"""A plan with one wrong number often breaks the same invariant at every stage."""


def validate_plan(plan: Plan, cluster: Cluster | None = None, source: str = "") -> None:
    """Refuse a plan that breaks an invariant; with `cluster`, also one that is not for it.

    Args:
        source: the plan's file, where there is one; messages begin with it.
    Raises:
        PlanFormatError: names replica and stage, the value, what is allowed and what to do.
    """
    violations = first_violations(plan, cluster)
    if violations:
        where = f"{source}: " if source else ""
        text = format_messages([f"{where}{v.message}" for v in violations])
        raise PlanFormatError(text + _which_changed(plan, cluster, source))


def is_made_for(plan: Plan, cluster: Cluster) -> bool | None:
    """Return whether the plan was made for this content of a cluster file; None if the plan names
    none, as a plan of a layout."""
    # Imported here: most checks need none of the modules that read cluster files.
    from megatron_hetero.cluster.file.description import cluster_hash

    made_for = plan.inputs.get("cluster")
    return None if made_for is None else made_for == cluster_hash(cluster)


def _which_changed(plan: Plan, cluster: Cluster | None, source: str) -> str:
    """Tell whether the plan or the cluster has changed since the plan was made."""
    # A plan that is broken by itself needs no comparison with the cluster.
    if cluster is None or first_violations(plan):
        return ""
    made_for = is_made_for(plan, cluster)
    if made_for is None:
        return ""
    name, cluster_name = source or "the plan", cluster.source or "the cluster file"
    if made_for:
        return f"\n({cluster_name} is what the plan was made for: {name} was changed since.)"
    return (
        f"\n({cluster_name} is not what the plan was made for: it was changed since, or is another "
        f"one. `megatron-hetero plan --cluster {cluster_name} --near {name}` plans again near it.)"
    )


def first_violations(plan: Plan, cluster: Cluster | None = None) -> tuple[Violation, ...]:
    """Find all violations of the first invariant that is broken; empty for a valid plan."""
    # One invariant at a time: later ones may assume the earlier ones.
    for invariant in (
        *check_structure.INVARIANTS,
        *check_schedule.INVARIANTS,
        *check_sharding.INVARIANTS,
        *check_devices.INVARIANTS,
        *check_workload.INVARIANTS,
        *check_estimates.INVARIANTS,
    ):
        if violations := tuple(invariant(plan)):
            return violations
    # What is checked against a cluster comes last, on a plan that is sound by itself.
    if cluster is not None:
        for cluster_invariant in check_cluster.INVARIANTS:
            if violations := tuple(cluster_invariant(plan, cluster)):
                return violations
    return ()


def format_messages(messages: list[str]) -> str:
    """Join the first few messages, a line each, and the number of those left out."""
    left_out = len(messages) - MAX_SHOWN
    return "\n".join(messages[:MAX_SHOWN] + ([f"... and {left_out} more"] if left_out > 0 else []))
