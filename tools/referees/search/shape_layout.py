"""Equal replicas on nodes: how many of a shape there is room for, and which GPUs each gets.

A unit goes to the first node of its kind that has enough GPUs left, stage by stage (like stages
share nodes) or replica by replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.shapes.kinds import Kind

ShapeStage = tuple[int, int]
"""(kind, width)."""
Shape = tuple[ShapeStage, ...]
"""The stages of every replica."""

_Run = tuple[int, int]
"""(nodes one after the other, GPUs left on each of them)."""

_MAX_PACKINGS = 8
"""Numbers of replicas to try where as many as the GPUs would do leave odd rests on nodes."""


class ShapeLayouts:
    """Shapes on the nodes of a problem."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind]) -> None:
        self.problem = problem
        self.kinds = kinds

    def most(self, shape: Shape, by_stage: bool) -> int:
        """Return as many replicas as there is room for and the limits allow; zero for none."""
        used: dict[int, int] = {}
        for kind, width in shape:
            used[kind] = used.get(kind, 0) + width
        room = min(len(self.kinds[k].nodes) * self.kinds[k].num_gpus // n for k, n in used.items())
        allowed = self.problem.replica_counts()
        counts = allowed[: max(0, room - allowed.start + 1)][::-1][:_MAX_PACKINGS]
        return next((n for n in counts if self.has_room(shape, n, by_stage)), 0)

    def has_room(self, shape: Shape, count: int, by_stage: bool) -> bool:
        """Return whether `count` replicas fit."""
        if by_stage:
            return self._first_places(shape, count) is not None
        return bool(self._places(shape, count, by_stage))

    def first_chain(self, shape: Shape, count: int) -> Chain:
        """Return the first replica of `chains(shape, count, by_stage=True)`; empty if they do
        not fit."""
        places = self._first_places(shape, count) or []
        return tuple(
            self._unit(kind, width, node, taken)
            for (kind, width), (node, taken) in zip(shape, places, strict=False)
        )

    def chains(self, shape: Shape, count: int, by_stage: bool) -> list[Chain]:
        """`count` replicas on nodes; empty if they do not fit."""
        return [
            tuple(
                self._unit(kind, width, node, taken)
                for (kind, width), (node, taken) in zip(shape, replica, strict=True)
            )
            for replica in self._places(shape, count, by_stage)
        ]

    def _unit(self, kind: int, width: int, node: int, taken: int) -> Unit:
        name = self.kinds[kind].nodes[node].name
        return Unit(name, self.problem.gpus[name][taken : taken + width])

    def _first_places(self, shape: Shape, count: int) -> list[tuple[int, int]] | None:
        """Return (node, GPUs of it taken before) of each stage of the first replica, stage by
        stage; None if not all replicas fit.  Nodes that are equally full are counted, not
        visited."""
        runs: dict[int, list[_Run]] = {}
        places = []
        for kind, width in shape:
            num_gpus = self.kinds[kind].num_gpus
            left = runs.get(kind) or [(len(self.kinds[kind].nodes), num_gpus)]
            node = 0
            for num_nodes, free in left:
                if free >= width:
                    places.append((node, num_gpus - free))
                    break
                node += num_nodes
            filled = _filled(left, width, count)
            if filled is None:
                return None
            runs[kind] = filled
        return places

    def _places(self, shape: Shape, count: int, by_stage: bool) -> list[list[tuple[int, int]]]:
        """Return (node, GPUs of it taken before), [replica][stage]; empty if not all fit."""
        taken = {kind: [0] * len(self.kinds[kind].nodes) for kind, _ in shape}
        places: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        # No node before it has GPUs for this width left: what is taken is never given back.
        start: dict[ShapeStage, int] = dict.fromkeys(shape, 0)
        if by_stage:
            order = [(stage, replica) for stage in shape for replica in places]
        else:
            order = [(stage, replica) for replica in places for stage in shape]
        for stage, replica in order:
            kind, width = stage
            most = self.kinds[kind].num_gpus - width
            of_kind, node = taken[kind], start[stage]
            while node < len(of_kind) and of_kind[node] > most:
                node += 1
            start[stage] = node
            if node == len(of_kind):
                return []
            replica.append((node, of_kind[node]))
            of_kind[node] += width
        return places


def _filled(runs: Sequence[_Run], width: int, count: int) -> list[_Run] | None:
    """Return the nodes after `count` units of a width went to the first ones that have room, or
    None."""
    found: list[_Run] = []
    for num_nodes, free in runs:
        each = free // width
        full = min(num_nodes, count // each) if each else 0
        rest = num_nodes - full
        count -= full * each
        if full:
            found.append((full, free - each * width))
        if count and each and rest:
            found.append((1, free - count * width))
            rest, count = rest - 1, 0
        if rest:
            found.append((rest, free))
    return None if count else found


def equal_shares(num_micro_batches: int, num_replicas: int) -> tuple[int, ...] | None:
    """Share as nearly the same for each as can be, the first ones have more; None when there are
    fewer than replicas."""
    each, more = divmod(num_micro_batches, num_replicas)
    return tuple(each + (r < more) for r in range(num_replicas)) if each else None
