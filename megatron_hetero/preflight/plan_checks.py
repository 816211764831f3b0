"""Checks of a plan against the cluster it is to run on: places, limits, memory, age."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_hetero.cluster.names import device_place
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import HeteroError, PlanFormatError, UnsupportedError
from megatron_hetero.flags.environment import ALLOCATOR_VARIABLE, TIGHT_PART, wastes_no_memory
from megatron_hetero.plan.checks.validate import first_violations, is_made_for
from megatron_hetero.plan.plan import Plan
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.proof.check import check_operations

GIB = 1 << 30


def plan_is_for_the_cluster(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """Find what `validate --cluster` refuses; no other check makes sense after it."""
    for violation in first_violations(plan, cluster):
        yield Finding(
            "plan-not-for-cluster",
            "error",
            ".".join(map(str, violation.keypath)),
            violation.message,
            "plan again for this cluster, or correct the file that is wrong",
        )


def figures_are_fresh(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """Find a plan made for an earlier or another version of the cluster file."""
    # A plan that was made from a layout knows no cluster file, and is no older than one.
    if is_made_for(plan, cluster) is False:
        yield Finding(
            "plan-out-of-date",
            "warning",
            cluster.source or "the cluster file",
            "this file was changed since the plan was made (or is another one), so that neither "
            "the plan's division nor its figures are the best for it any more",
            "plan again (`megatron-hetero plan --near`), or look at `explain --cluster`",
        )


def file_contradicts_itself(cluster: Cluster) -> Iterator[Finding]:
    """Find statements of the cluster file that others of it overrule."""
    for doubt in cluster.doubts:
        yield Finding("cluster-file-doubt", "warning", *doubt)


def operations_end(plan: Plan) -> Iterator[Finding]:
    """Find ranks that would deadlock under NCCL's rules."""
    if plan.workload is None:
        return
    try:
        check_operations(plan, plan.workload)
    except PlanFormatError as error:
        yield Finding(
            "hangs-on-gpus",
            "error",
            "the plan",
            str(error),
            "plan again, or give its stages other orders or launch counts",
        )


def memory_suffices(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None,
    environment: Mapping[str, Mapping[str, str]],
) -> Iterator[Finding]:
    """Find devices with a predicted peak, reserve included, that exceeds or nearly fills the
    memory.

    Args:
        plan: the plan; one without a workload is not checked.
        cluster: the cluster with its devices.
        profile: measurements behind the estimate; without one the catalogue answers.
        environment: node -> variables of its processes, as in `Job`.
    """
    if plan.workload is None:
        return
    # A plan that cannot be priced may still run.
    try:
        estimates = estimate_plan(plan, cluster, profile, bounded=False)
    except UnsupportedError as error:
        yield Finding(
            "memory-unknown",
            "warning",
            "the plan",
            f"its memory cannot be predicted: {error}",
            "watch the first steps with `nvidia-smi`",
        )
        return
    # Too little is an error; little is a warning, unless the allocator wastes nothing.
    for name, device in estimates.devices.items():
        # Bytes of one GPU; the peak includes the reserve.
        left = device.capacity_bytes - device.peak_bytes
        if left < 0:
            yield Finding(
                "memory-exceeded",
                "error",
                name,
                f"the predicted peak, reserve included, is {-left / GIB:.1f} GiB above its "
                f"{device.capacity_bytes / GIB:.1f} GiB",
                "plan again, or recompute more on this stage",
            )
        elif left < TIGHT_PART * device.capacity_bytes and not wastes_no_memory(
            environment[device_place(name)[0]].get(ALLOCATOR_VARIABLE)
        ):
            yield Finding(
                "memory-tight",
                "warning",
                name,
                f"{left / GIB:.2f} GiB are left beside the reserve of "
                f"{device.parts_bytes['reserve'] / GIB:.1f} GiB",
                f"{ALLOCATOR_VARIABLE}=expandable_segments:True, or a larger "
                "limits.memory_reserve and plan again",
            )


def flags_are_in_order(plan: Plan) -> Iterator[Finding]:
    """Find what `megatron-hetero flags` or `launch` refuses: also flags, added or edited, of
    another job than the plan's."""
    from megatron_hetero.flags.launch import node_launches
    from megatron_hetero.flags.planned_sizes import own_flags_differ

    try:
        node_launches(plan, "plan.json")
    except HeteroError as error:
        yield Finding(
            "launch-refused",
            "error",
            "the plan's launch",
            str(error),
            "correct it and plan again",
        )
        return
    differing = own_flags_differ(plan, "the flags of the job")
    if differing:
        yield Finding(
            "launch-refused",
            "error",
            "the job's Megatron flags",
            f"they describe another job than the plan was made for: {'; '.join(differing)}",
            "leave out the flags that change it, or plan again with them",
        )
