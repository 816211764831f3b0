"""Step times of the same plan on slightly different clusters: which change is worth money.

The plan stays as it is (a new plan may do better); each variation changes one thing and simulates
the step again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_hetero.cluster.lines import faster_lines
from megatron_hetero.cluster.node_links import Link, mapped_links
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.simulator.step import simulate_plan

SLOWER_GPU = 0.9


@dataclass(frozen=True)
class Variation:
    """A change, the step time under the change, and the ratio of that time to the plan's own, minus
    1."""

    what: str
    step_time_s: float
    change: float


def variations(plan: Plan, cluster: Cluster, profile: Profile | None) -> tuple[Variation, ...]:
    """Simulate the plan with the links between nodes and inside nodes at twice and half the speed,
    and with each GPU type at 90 % of its speed; the largest loss comes first.

    Args:
        plan: valid on `cluster`, with a workload and devices.
        profile: measured times; those of a GPU type change with it.
    """

    def step_time_s(cluster: Cluster, profile: Profile | None) -> float:
        return simulate_plan(plan, cluster, profile=profile).step_time_s

    # The change is relative to the same simulation of the cluster as it is.
    own_s = step_time_s(cluster, profile)
    found = [
        Variation(what, time_s, time_s / own_s - 1)
        for what, changed, with_profile in _changed(plan, cluster, profile)
        for time_s in [step_time_s(changed, with_profile)]
    ]
    return tuple(sorted(found, key=lambda v: -v.change))


def _changed(
    plan: Plan, cluster: Cluster, profile: Profile | None
) -> Iterator[tuple[str, Cluster, Profile | None]]:
    # Only what the plan uses can change its step: the network with several machines.
    if len(plan.hosts) > 1:
        for what, faster, later in (
            ("network between machines at twice its speed", 2.0, 1.0),
            ("network between machines at half its speed", 0.5, 1.0),
            ("network latency ten times higher", 1.0, 10.0),
        ):
            yield what, _with_network(cluster, faster, later), profile
    # Links inside a node where a machine runs several GPUs of the plan.
    if any(len(host.gpu_indices) > 1 for host in plan.hosts):
        nodes = tuple(replace(n, link=n.link.times_as_fast(2.0)) for n in cluster.nodes)
        yield "links inside every node at twice their speed", replace(cluster, nodes=nodes), profile
    # Each type by itself: which of them holds the others up.
    for name in dict.fromkeys(plan.type_by_device.values()):
        changed, with_profile = _with_gpu_speed(cluster, profile, name, SLOWER_GPU)
        yield (
            f"every {name} at {SLOWER_GPU:.0%} of its speed (heat, power limit)",
            changed,
            with_profile,
        )


def _with_gpu_speed(
    cluster: Cluster, profile: Profile | None, name: str, speed: float
) -> tuple[Cluster, Profile | None]:
    """Change every GPU of a type, in the cluster and the profile, to `speed` of its own."""
    nodes = tuple(
        replace(n, gpu_type=_at_speed(n.gpu_type, speed)) if n.gpu_type.name == name else n
        for n in cluster.nodes
    )
    return replace(cluster, nodes=nodes), _profile_at_speed(profile, name, speed)


def _with_network(cluster: Cluster, faster: float, later: float) -> Cluster:
    def change(link: Link) -> Link:
        return replace(
            link.times_as_fast(faster),
            latency_s=link.latency_s * later,
            jitter_s=link.jitter_s * later,
        )

    # Uplinks, paths and lines of sites together, so that no line stays behind.
    return replace(
        cluster,
        nodes=tuple(n.with_faster_network(faster) for n in cluster.nodes),
        node_links=mapped_links(cluster.node_links, change),
        site_lines=faster_lines(cluster.site_lines, faster),
    )


def _at_speed(gpu: GpuType, speed: float) -> GpuType:
    return replace(
        gpu,
        memory_bytes_per_s=gpu.memory_bytes_per_s * speed,
        peak_flops={
            precision: None if peak is None else peak * speed
            for precision, peak in gpu.peak_flops.items()
        },
    )


def _profile_at_speed(profile: Profile | None, gpu_name: str, speed: float) -> Profile | None:
    """Stretch the measured times of a type (the first part of each key)."""
    if profile is None:
        return None
    # A key of a profile begins with the name of the type.
    points = {
        key: tuple(
            (size, PassTimes(times.forward_s / speed, times.backward_s / speed))
            for size, times in curve
        )
        if key[0] == gpu_name
        else curve
        for key, curve in profile.points.items()
    }
    return replace(profile, points=points)
