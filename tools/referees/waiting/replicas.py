"""The lower bound for pipelines whose stages wait for each other: branch and bound over the number
of replicas.

A range of numbers is bounded together, at the least that any of them takes.  The range with the
least bound is the one that holds the whole bound down: it is proved further, then halved.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.cost.model import CostModel
from tools.referees.waiting.counts import CountProver
from tools.referees.waiting.kinds import KindMaker
from tools.referees.waiting.prices import Prover
from tools.referees.waiting.rules import FillRules
from tools.referees.waiting.share import Share, shares_of

_MAX_WORK = 2_000_000_000
"""Numbers computed: after that nothing more is proved."""
_AHEAD = 1.02
"""A range is proved this far beyond the next one, then that one has its turn."""
_MAX_COUNTS = 100_000
"""Steps to tabulate chains by GPUs for one cap: above it replicas are not packed whole."""
_ROUNDS_WIDE = 2
_FINEST_WIDE = 1.06
"""Rounds of a range of numbers, and how near caps are told apart there: it is halved anyway."""
_ROUNDS = 25


def fill_bound_s(
    costs: CostModel,
    rules: FillRules,
    classes: Sequence[GpuClass],
    least_s: float,
    enough_s: float,
) -> float:
    """The longest step proved impossible, from `least_s` on and as far as `enough_s`."""
    search = _ReplicaSearch(costs, rules, classes, least_s)
    if search.maker.is_empty:
        return least_s
    proved_s = search.run(enough_s, apart=False)
    if rules.has_apart_exchange:
        proved_s = search.run(proved_s, apart=True)
    return proved_s


@dataclass
class _Branch:
    """A range of numbers of replicas; every step lasts `extra_s` longer than what is proved."""

    prover: Prover
    extra_s: float = 0.0
    is_counted: bool = False

    @property
    def proved_s(self) -> float:
        return self.prover.proved_s + self.extra_s

    @property
    def is_wide(self) -> bool:
        return self.prover.share.fewest < self.prover.share.most


class _ReplicaSearch:
    def __init__(
        self, costs: CostModel, rules: FillRules, classes: Sequence[GpuClass], least_s: float
    ) -> None:
        training = costs.workload.training
        self.rules = rules
        self.num_gpus = [c.num_gpus for c in classes]
        self.maker = KindMaker(costs, rules, classes)
        self.num_micro_batches = training.global_batch_size // training.micro_batch_size
        self.least_s = least_s
        self.wanted = costs.cluster.limits.num_replicas
        self.work = 0

    def run(self, enough_s: float, *, apart: bool) -> float:
        """See `fill_bound_s`.

        Args:
            apart: over plans whose exchange is `FillRules.apart_exchange_s`; else over all others.
        """
        most = min(self.num_micro_batches, sum(self.num_gpus))
        first = (1, most) if self.wanted is None else (self.wanted, self.wanted)
        if first[1] > most:
            return self.least_s
        heap = [(self.least_s, 0, self._branch(*first, apart, enough_s, None))]
        number = 1
        while True:
            proved_s, _, branch = heapq.heappop(heap)
            if proved_s >= enough_s or self.work > _MAX_WORK:
                return min(proved_s, enough_s)
            prover = branch.prover
            if not prover.done:
                others_s = heap[0][0] if heap else enough_s
                target_s = min(enough_s, max(others_s, proved_s) * _AHEAD) - branch.extra_s
                self.work -= prover.table.work
                if branch.is_wide:
                    prover.run(target_s, _ROUNDS_WIDE, _FINEST_WIDE)
                else:
                    prover.run(target_s, _ROUNDS)
                self.work += prover.table.work
                prover.done |= branch.is_wide
                pieces = [branch]
            elif not branch.is_wide and branch.is_counted:
                return min(proved_s, enough_s)
            elif not branch.is_wide:
                branch.is_counted = True
                if apart:
                    branch.extra_s = self._apart_s(prover, enough_s) - prover.proved_s
                    heapq.heappush(heap, (branch.proved_s, number, branch))
                    number += 1
                    continue
                if self._table_size(prover) <= _MAX_COUNTS:
                    count = CountProver(prover.table, self.num_gpus, prover.share)
                    most_s = min(enough_s - branch.extra_s, prover.limit_s)
                    prover.proved_s = count.proved_s(prover.proved_s, most_s)
                pieces = [branch]
            else:
                share = prover.share
                middle = int((share.fewest * share.most) ** 0.5)
                ranges = ((share.fewest, middle), (middle + 1, share.most))
                pieces = [self._branch(*ends, apart, enough_s, prover) for ends in ranges]
            for piece in pieces:
                heapq.heappush(heap, (piece.proved_s, number, piece))
                number += 1

    def _branch(
        self, fewest: int, most: int, apart: bool, enough_s: float, parent: Prover | None
    ) -> _Branch:
        maker, share = self.maker, self._share(fewest, most)
        kinds = maker.plain() if apart else maker.of_replicas(fewest, most)
        least_s = parent.proved_s if parent else self.least_s
        prover = Prover(kinds, maker.num_layers, self.num_gpus, share, least_s, parent)
        return _Branch(prover)

    def _apart_s(self, prover: Prover, enough_s: float) -> float:
        """The longest step proved impossible for plans that `apart_exchange_s` is of."""
        low, high = prover.proved_s, max(prover.proved_s, enough_s)
        if self._is_apart_impossible(prover, high):
            return high
        while high > low * 1.002:
            middle = (low + high) / 2
            if self._is_apart_impossible(prover, middle):
                low = middle
            else:
                high = middle
        return low

    def _is_apart_impossible(self, prover: Prover, step_s: float) -> bool:
        room = prover.room(step_s)
        if not room.is_enough:
            return True
        exchange_s = self.rules.apart_exchange_s(room)
        return exchange_s is None or step_s - exchange_s <= prover.proved_s

    def _table_size(self, prover: Prover) -> int:
        table = prover.table
        states = prod(n + 1 for n in self.num_gpus) * table.depth * table.num_layers
        return states * len(table.kinds.width) ** 2

    def _share(self, fewest: int, most: int) -> Share:
        return shares_of(self.num_micro_batches, fewest, most, self.rules.counts_alike)
