"""Replicas side by side on the same nodes, some of them joined into one.

The joined replica comes to each node once and holds there what each of them held, so that nodes
still share nothing but boundaries: layers are exchanged inside nodes, by fewer replicas, of which
one has more stages and more micro-batches.  Moves of single groups do not lead there, because all
layers would cross nodes on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.fill import Pipeline, with_micro_batches
from megatron_hetero.planner.problem import Problem, Unit, unit_of


def joined_replicas(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Of replicas that are alike on the same nodes, two, three, ... joined into one."""
    pipelines = [tuple((unit_of(s), s.num_layers) for s in r.stages) for r in placement.replicas]
    alike: dict[tuple[tuple[str, int, int], ...], list[int]] = {}
    for r, pipeline in enumerate(pipelines):
        alike.setdefault(tuple((u.node, u.width, n) for u, n in pipeline), []).append(r)
    for places in alike.values():
        for number in range(2, len(places) + 1):
            joined = _joined([pipelines[r] for r in places[:number]])
            if joined is not None:
                rest = [p for r, p in enumerate(pipelines) if r not in places[:number]]
                found = with_micro_batches(problem, [joined, *rest])
                if found is not None:
                    yield found


def _joined(pipelines: Sequence[Pipeline]) -> Pipeline | None:
    """None where a node has fewer layers than groups."""
    layers: dict[str, int] = {}
    for unit, num_layers in pipelines[0]:
        layers[unit.node] = layers.get(unit.node, 0) + num_layers
    found: list[tuple[Unit, int]] = []
    for node, num_layers in layers.items():
        units = [unit for pipeline in pipelines for unit, _ in pipeline if unit.node == node]
        if num_layers < len(units):
            return None
        each, more = divmod(num_layers, len(units))
        found += [(unit, each + (i < more)) for i, unit in enumerate(units)]
    return tuple(found)
