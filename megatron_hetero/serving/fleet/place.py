"""From numbers of replicas to replicas on named GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.serving.compose.problem import Composition
from megatron_hetero.serving.fleet.offers import Fleet
from megatron_hetero.serving.fleet.plan import HandOver, Phase, PlannedReplica, PlannedStage

_SHORT: Mapping[str, str] = {"both": "replica", "prefill": "prefill", "decode": "decode"}


def placed_replicas(fleet: Fleet, found: Composition) -> tuple[PlannedReplica, ...]:
    """Place every replica of an answer.

    Widths are powers of two: the widest groups first, each in the first machine that still has
    room, leave no gap that a later one would need.
    """
    copies = [
        (name, number) for name in sorted(found.counts) for number in range(found.counts[name])
    ]  # fmt: skip
    # (pool, width, key of the stage) of every group of GPUs.
    wanted = [
        (fleet.offered[name].shape.pools[stage], s.width, (name, number, stage))
        for name, number in copies
        for stage, s in enumerate(fleet.offered[name].shape.pipeline.stages)
    ]
    # Pool -> machines, each with the GPUs that are left.
    free = {pool.name: [list(devices) for _, devices in pool.devices] for pool in fleet.pools}
    given: dict[tuple[str, int, int], tuple[Device, ...]] = {}
    # Hand out GPUs, the widest groups first.
    # Of equally wide groups by key, so that equal plans come out equal.
    for pool, width, key in sorted(wanted, key=lambda w: (-w[1], w[2])):
        machine = next(devices for devices in free[pool] if len(devices) >= width)
        given[key] = tuple(machine[:width])
        del machine[:width]
    # Number the replicas of each phase, and divide the rates of like replicas evenly.
    numbers: dict[str, int] = {}
    replicas = []
    for name, number in copies:
        offered = fleet.offered[name]
        phase: Phase = offered.phase  # type: ignore[assignment]
        numbers[phase] = numbers.get(phase, 0) + 1
        count = found.counts[name]
        stages = tuple(
            _stage(fleet.cluster, given[name, number, place], stage.num_layers)
            for place, stage in enumerate(offered.shape.pipeline.stages)
        )
        replicas.append(
            PlannedReplica(
                f"{_SHORT[phase]}-{numbers[phase] - 1}",
                phase,
                offered.shape.place,
                stages,
                tuple(rate / count for rate in found.rates[name]),
                offered.rates.pool.tokens,
                fleet.engine.max_sequences * len(stages),
                found.utilization.get(name, 0.0),
            )
        )
    return tuple(replicas)


def hand_overs_of(fleet: Fleet, found: Composition) -> tuple[HandOver, ...]:
    """Return the flows of an answer by pair of places."""
    at = {(fleet.offered[name].phase, fleet.offered[name].shape.place) for name in found.counts}
    # A flow that is a rounding error of the programme may be of a place without replicas.
    pairs = sorted(
        {(a, b) for a, b, _ in found.flows if ("prefill", a) in at and ("decode", b) in at}
    )
    classes = range(len(fleet.mix.classes))
    return tuple(
        HandOver(a, b, tuple(found.flows.get((a, b, w), 0.0) for w in classes)) for a, b in pairs
    )


def _stage(cluster: Cluster, devices: tuple[Device, ...], num_layers: int) -> PlannedStage:
    node = cluster.node_by_name[devices[0].node]
    names = tuple(device.name for device in devices)
    return PlannedStage(names, node.host, node.gpu_type.name, num_layers)
