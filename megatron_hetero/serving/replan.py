"""A new serving plan beside the running plan: replicas that stay, replicas that move, and the gain.

A replica stays where the same command runs it: on the same GPUs with the same layers, in the same
engine with the same settings.  New weights of the router need no reload, and of vLLM no change from
prefill to decode; a replica that did both is started anew to do one, with a connector.  Others load
their weights again, during which their GPUs serve nothing.  The rule is HexGen-3's: the change pays
where what the new plan serves more over the time until the next change exceeds what the reload
loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.serving.fleet.plan import PlannedReplica, ServingPlan
from megatron_hetero.serving.fleet.pools import free_devices

LOAD_BYTES_PER_S = 1e9
"""Bytes/s at which a replica reads weights, unless the user gives a rate."""
START_S = 60.0
"""From a process to a ready engine beside its weights: captured graphs, communicators."""


@dataclass(frozen=True)
class Change:
    """Difference between a new plan and the running plan.

    Attributes:
        stays: (old, new) replicas that the same command runs, by name.
        stops, starts: others.
        reload_s: until the last new replica serves.
        kept_part: of the old plan's rates that go on meanwhile.
        gain: of the scale, new over old; below 1 where machines were lost; None where the old plan
            serves nothing, as none of its replicas is left.
        pays: whether the change serves more over `stable_s`.
    """

    stays: tuple[tuple[str, str], ...]
    stops: tuple[str, ...]
    starts: tuple[str, ...]
    reload_s: float
    kept_part: float
    gain: float | None
    stable_s: float
    pays: bool


def compare_plans(
    old: ServingPlan,
    new: ServingPlan,
    stable_s: float,
    load_bytes_per_s: float = LOAD_BYTES_PER_S,
    old_scale: float | None = None,
) -> Change:
    """Compare a new plan with the running one.

    Args:
        old: the plan that runs.
        new: for the new rates, machines or prices.
        stable_s: until things change again.
        load_bytes_per_s: at which each replica reads its weights.
        old_scale: of the new workload's rates that the old plan serves; None: as the plan says, of
            replicas whose GPUs are still there.
    """
    # Equal GPUs with equal layers need no reload, whatever the replica is called.
    by_place = {_started(old, replica): replica for replica in old.replicas}
    stays, starts = [], []
    for replica in new.replicas:
        before = by_place.get(_started(new, replica))
        # Another model, format or setting loads anew everywhere.
        if before is None or (old.model, old.engine) != (new.model, new.engine):
            starts.append(replica)
        else:
            stays.append((before.name, replica.name))
    kept = {name for name, _ in stays}
    stops = tuple(r.name for r in old.replicas if r.name not in kept)
    reload_s = 0.0
    if starts:
        # All replicas load at once, each its own weights.
        reload_s = START_S + new.model.weight_bytes / load_bytes_per_s
    kept_part = part_going(old, [replica for replica in old.replicas if replica.name in kept])
    before_scale = old.scale if old_scale is None else old_scale
    # Served in `stable_s`: the new fleet once it is up, and what is kept meanwhile.
    new_served = new.scale * max(0.0, stable_s - reload_s)
    new_served += before_scale * kept_part * min(reload_s, stable_s)
    return Change(
        tuple(stays),
        stops,
        tuple(replica.name for replica in starts),
        reload_s,
        kept_part,
        new.scale / before_scale if before_scale else None,
        stable_s,
        new_served > before_scale * stable_s,
    )


def replicas_left(plan: ServingPlan, cluster: Cluster) -> list[PlannedReplica]:
    """Return the replicas of a plan whose GPUs a cluster still has, of their types and not idle."""
    there = {
        device.name: node.gpu_type.name
        for node in cluster.nodes
        for device in free_devices(cluster, node)
    }
    return [
        replica
        for replica in plan.replicas
        if all(there.get(d) == stage.gpu for stage in replica.stages for d in stage.devices)
    ]


def part_going(plan: ServingPlan, left: Sequence[PlannedReplica]) -> float:
    """Return the part of a plan's requests that some of its replicas serve.

    A request with its phases apart needs both: of these the side that lost more counts.
    """

    def rate(replicas: Sequence[PlannedReplica], phase: str) -> float:
        return sum(sum(r.rates) for r in replicas if r.phase == phase)

    whole, apart = rate(plan.replicas, "both"), rate(plan.replicas, "prefill")
    going = rate(left, "both")
    if apart:
        sides = ("prefill", "decode")
        going += apart * min(rate(left, side) / rate(plan.replicas, side) for side in sides)
    return going / (whole + apart) if whole + apart else 0.0


def _started(
    plan: ServingPlan, replica: PlannedReplica
) -> tuple[str, tuple[tuple[frozenset[str], int], ...]]:
    """Return what a replica's command depends on: its role, and GPUs and layers of its stages."""
    # vLLM's connector serves both sides of a hand-over; SGLang is told its side.
    is_apart = replica.phase != "both" and plan.engine.name != "sglang"
    role = "apart" if is_apart else replica.phase
    return role, tuple((frozenset(stage.devices), stage.num_layers) for stage in replica.stages)
