"""A new serving plan beside the running plan: replicas that stay, replicas that move, and the gain.

A replica stays where its stages are on the same GPUs with the same layers: a new phase or new
weights of the router need no reload.  Others load their weights again, during which their GPUs
serve nothing.  The rule is HexGen-3's: the change pays where what the new plan serves more over the
time until the next change exceeds what the reload loses.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.serving.fleet.plan import PlannedReplica, ServingPlan

LOAD_BYTES_PER_S = 1e9
"""Bytes/s at which a replica reads weights, unless the user gives a rate."""
START_S = 60.0
"""From a process to a ready engine beside its weights: captured graphs, communicators."""


@dataclass(frozen=True)
class Change:
    """Difference between a new plan and the running plan.

    Attributes:
        stays: (old, new) replicas on the same GPUs with the same layers, by name.
        stops, starts: others.
        reload_s: until the last new replica serves.
        kept_part: of the old plan's rates that go on meanwhile.
        gain: of the scale, new over old; below 1 where machines were lost.
        pays: whether the change serves more over `stable_s`.
    """

    stays: tuple[tuple[str, str], ...]
    stops: tuple[str, ...]
    starts: tuple[str, ...]
    reload_s: float
    kept_part: float
    gain: float
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
    by_place = {_place(replica): replica for replica in old.replicas}
    stays, starts = [], []
    for replica in new.replicas:
        before = by_place.get(_place(replica))
        # Another model or format loads anew everywhere.
        if before is None or old.model != new.model:
            starts.append(replica)
        else:
            stays.append((before.name, replica.name))
    kept = {name for name, _ in stays}
    stops = tuple(r.name for r in old.replicas if r.name not in kept)
    reload_s = 0.0
    if starts:
        # All replicas load at once, each its own weights.
        reload_s = START_S + new.model.weight_bytes / load_bytes_per_s
    # Requests come in where prefill is; replicas that only decode would count them twice.
    total = sum(sum(r.rates) for r in old.replicas if r.phase != "decode")
    going = sum(
        sum(r.rates) for r in old.replicas if r.name in kept and r.phase != "decode"
    )  # fmt: skip
    kept_part = going / total if total else 0.0
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
        new.scale / before_scale if before_scale else float("inf"),
        stable_s,
        new_served > before_scale * stable_s,
    )


def _place(replica: PlannedReplica) -> tuple[tuple[frozenset[str], int], ...]:
    return tuple((frozenset(stage.devices), stage.num_layers) for stage in replica.stages)
