"""What Sailor's simulator takes at least: for the lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from math import inf

from megatron_hetero.cluster.nodes import Device, Node
from tools.referees.sailor import WIDEST_IN_SYNC
from tools.referees.sailor_costs import SailorCosts
from tools.referees.sailor_tables import ELEMENT_BYTES, Endpoint
from tools.referees.waiting.rules import FillRules, Room


class SailorRules(FillRules):
    """Every replica alone is a lower bound of the lockstep that it runs in.

    Replicas with equal layers are one of Sailor's pipelines.  With one pipeline the slowest stage's
    ring counts; with several, the slowest ring inside one and another ring between them.
    """

    counts_alike = True
    has_apart_exchange = True

    def __init__(self, costs: SailorCosts) -> None:
        self.costs = costs
        params = [ELEMENT_BYTES * e.num_params for e in costs.referee.tables.memory(1)]
        self._sums = [0, *accumulate(params)]
        self._num_layers = costs.workload.model.num_layers
        self._ends = _endpoints(costs.cluster.nodes)
        self._partners = {
            here: [(a, b) for there in self._ends for a, b in ((here, there), (there, here))]
            for here in self._ends
        }
        self._inside_s = cache(self._inside)
        self._least_inside_s = cache(self._least_inside)
        self._least_between_s = cache(self._least_between)
        self._sizes = sorted(set(self._stage_sizes()))

    def boundary_s(
        self,
        here: Sequence[Node],
        width: int,
        there: Sequence[Node],
        other_width: int,
        to_last: bool,
    ) -> tuple[float, float]:
        """Each stage is charged what it sends, the last one twice."""
        pairs = [
            (
                tuple(Device(a.name, i) for i in range(width)),
                tuple(Device(b.name, i) for i in range(other_width)),
            )
            for a in _unlike(here)
            for b in _unlike(there)
        ]
        hop = self.costs.hop
        return (
            min(hop(a, b).total_s for a, b in pairs),
            (1 + to_last) * min(hop(b, a).total_s for a, b in pairs),
        )

    def stage_exchange_s(
        self,
        nodes: Sequence[Node],
        width: int,
        num_layers: int,
        first: bool,
        last: bool,
        num_replicas: int,
    ) -> float:
        """With one pipeline: the ring between this stage and any other, divided at most as this
        stage divides it."""
        if num_replicas == 1 or not 0 < num_layers <= self._num_layers:
            return 0.0
        num_bytes = self._stage_bytes(num_layers, first, last)
        return min(
            self._inside_s(num_bytes / part, num_replicas, end)
            for part in range(1, min(WIDEST_IN_SYNC, width) + 1)
            for end in _endpoints(nodes)
        )

    def apart_exchange_s(self, room: Room) -> float | None:
        """With `k` pipelines one has at least 1 / k of the replicas, and the ring between them
        carries the largest stage of the longest one.  Replicas of one stage are all alike, so those
        of all pipelines but one have more stages, and more GPUs."""
        total, num = self._sums[-1], room.num_replicas
        rooms = {size: max(1, room.most_gpus(size)) for size in range(1, num + 1)}
        least_s = inf
        for k in range(2, min(num, 1 + room.most_deep) + 1):
            together = max(-(-num // k), num - room.most_deep)
            # A stage is divided by no more than its GPUs.
            inside_s = min(
                (
                    self._least_inside_s(total / rooms[size], size)
                    for size in range(together, num - k + 2)
                ),
                default=inf,
            )
            least_s = min(least_s, inside_s + self._least_between_s(k, max(2, room.most_stages)))
        return least_s if least_s < inf else None

    def _least_between(self, num_pipelines: int, most_stages: int) -> float:
        """The least ring between pipelines of which the longest has no more stages."""
        at_least = max(self._sums[-1] / most_stages, self._stage_bytes(1, True, False))
        return min(
            self.costs.referee.all_reduce_s(size, num_pipelines, end, end)
            for size in self._sizes
            if size >= at_least * (1 - 1e-9)
            for end in self._ends
        )

    def _least_inside(self, at_least: float, num_ranks: int) -> float:
        """The least ring of any stage with so many bytes for each of its GPUs, or more."""
        if num_ranks == 1:
            return 0.0
        parts = range(1, WIDEST_IN_SYNC + 1)
        sizes = {size / part for size in self._sizes for part in parts}
        return min(
            self._inside_s(size, num_ranks, end)
            for size in sizes
            if size >= at_least * (1 - 1e-9)
            for end in self._ends
        )

    def _inside(self, num_bytes: float, num_ranks: int, end: Endpoint) -> float:
        return min(
            self.costs.referee.all_reduce_s(num_bytes, num_ranks, a, b)
            for a, b in self._partners[end]
        )

    def _stage_sizes(self) -> Iterable[int]:
        """Bytes of all stages that there can be."""
        for layers in range(1, self._num_layers):
            yield self._stage_bytes(layers, False, False)
            yield self._stage_bytes(layers, True, False)
            yield self._stage_bytes(layers, False, True)
        yield self._sums[-1]

    def _stage_bytes(self, num_layers: int, first: bool, last: bool) -> int:
        """Of a stage with so many layers, the least wherever it stands."""
        if first and last:
            return self._sums[-1]
        if first:
            return self._sums[1 + num_layers]
        if last:
            return self._sums[-1] - self._sums[1 + self._num_layers - num_layers]
        return min(
            self._sums[start + num_layers] - self._sums[start]
            for start in range(1, self._num_layers - num_layers + 2)
        )


def _unlike(nodes: Sequence[Node]) -> list[Node]:
    """One node of each zone and GPU type."""
    return list({(n.site, n.gpu_type.name): n for n in nodes}.values())


def _endpoints(nodes: Sequence[Node]) -> list[Endpoint]:
    return [(n.site, n.gpu_type.name, 1) for n in _unlike(nodes)]
