"""Small moves in a completed placement, each priced exactly.

Single layers move inside the slowest replicas, then single micro-batches from these to others; last
come their launch counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.step_cost import ReplicaCost
from megatron_hetero.planner.completion.counts import search_counts
from megatron_hetero.planner.refit.refit import Refitter, on_devices_of, places, with_option

_WORTH = 1 - 1e-4
"""A move must bring the slowest pipeline below this part of its time."""


class Polish:
    """Moves on one placement; replicas that are alike move together."""

    def __init__(self, refitter: Refitter, placement: Placement) -> None:
        self.refitter = refitter
        self.replicas = list(placement.replicas)
        self.own_size = refitter.costs.workload.training.micro_batch_size
        self.priced = [refitter.price(replica) for replica in self.replicas]
        self.work = 0

    def run(self, max_work: int) -> Placement:
        """Return the placement after all moves that help, or as many as `max_work` (stages times
        micro-batches priced) allows: at most half of it for layers and micro-batches, the rest for
        launch counts."""
        for_layers = max_work // 2 if self.refitter.costs.has_launch_counts else max_work
        while self.work < for_layers:
            slowest_s = max(cost.pipeline_s for cost in self.priced)
            if not self._move_micro_batch(slowest_s) and not self._move_layer(
                slowest_s, for_layers
            ):
                break
        if not self.refitter.given:
            self._search_counts(max_work)
        return Placement(tuple(self.replicas))

    def _search_counts(self, max_work: int) -> None:
        """Launch counts of the replicas that end last, as long as better ones are found."""
        costs, rows = self.refitter.costs, self.refitter.vocab_rows
        while costs.has_launch_counts and self.work < max_work:
            last = self._slowest()
            before = self.replicas[last]
            (found, cost), work = search_counts(
                costs, before, self.priced[last], rows, max_work - self.work
            )
            self.work += work
            if found == before:
                return
            self._put(before, found, cost)

    def _put(self, before: PlacedReplica, after: PlacedReplica, cost: ReplicaCost) -> None:
        """Change all replicas that are like `before`."""
        shape = self.refitter.key(before)
        for r, replica in enumerate(self.replicas):
            if self.refitter.key(replica) == shape:
                self.replicas[r], self.priced[r] = on_devices_of(after, replica), cost

    def _slowest(self) -> int:
        return max(range(len(self.replicas)), key=lambda r: self.priced[r].pipeline_s)

    def _move_micro_batch(self, slowest_s: float) -> bool:
        """Go from the replica that ends last to the one that ends first, where sizes are equal."""
        source = self._slowest()
        giver = self.replicas[source]
        takers = [
            r
            for r, replica in enumerate(self.replicas)
            if r != source and replica.micro_batch_size == giver.micro_batch_size
        ]
        if giver.num_micro_batches == 1 or not takers:
            return False
        target = min(takers, key=lambda r: (self.priced[r].pipeline_s, r))
        changed = {
            source: _with_micro_batches(giver, giver.num_micro_batches - 1),
            target: _with_micro_batches(
                self.replicas[target], self.replicas[target].num_micro_batches + 1
            ),
        }
        costs = {r: self.refitter.price(replica) for r, replica in changed.items()}
        self.work += sum(len(x.stages) * x.num_micro_batches for x in changed.values())
        limit_s = _WORTH * slowest_s
        if any(cost.pipeline_s >= limit_s or not cost.fits for cost in costs.values()):
            return False
        for r, replica in changed.items():
            self.replicas[r], self.priced[r] = replica, costs[r]
        return True

    def _move_layer(self, slowest_s: float, max_work: int) -> bool:
        """Move one layer between two stages of the replicas that end last."""
        source = self._slowest()
        before = self.replicas[source]
        for moved in self._with_layer_moved(before):
            if self.work >= max_work:
                return False
            self.work += len(moved.stages) * moved.num_micro_batches
            cost = self.refitter.price(moved)
            if cost.pipeline_s < _WORTH * slowest_s and cost.fits:
                self._put(before, moved, cost)
                return True
        return False

    def _with_layer_moved(self, replica: PlacedReplica) -> Iterator[PlacedReplica]:
        size = replica.micro_batch_size or self.own_size
        table = self.refitter.options(size)
        has_counts = replica.launch_counts is not None
        options = [table.of(p) for p in places(replica, replica.num_in_flight, has_counts)]
        stages = replica.stages
        for source, giver in enumerate(stages):
            for target, taker in enumerate(stages):
                more = taker.num_layers + 1
                if target == source or giver.num_layers == 1 or more > len(options[target]):
                    continue
                fewer = giver.num_layers - 1
                changed = list(stages)
                changed[source] = with_option(giver, fewer, options[source][fewer - 1])
                changed[target] = with_option(taker, more, options[target][more - 1])
                yield replace(replica, stages=tuple(changed))


def _with_micro_batches(replica: PlacedReplica, count: int) -> PlacedReplica:
    counts = replica.launch_counts
    if counts is not None:
        counts = tuple(min(launched, count) for launched in counts)
    return replace(replica, num_micro_batches=count, launch_counts=counts)
