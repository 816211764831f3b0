"""Groups of like GPUs exchanged in a completed structure: the same stages, on other nodes.

The nodes of such groups decide what messages and gradients cost.  Two groups on one node exchange
gradients inside it, but contend for the paths to the next stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

from megatron_hetero.planner.completion.completer import Completion
from megatron_hetero.planner.completion.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.tail import Tails
from megatron_hetero.planner.moves.like_groups import like_exchanges
from megatron_hetero.planner.shapes.spread import Spreader
from megatron_hetero.rounding import below

_PROMISING = 0.97
"""Of a step, what its pipelines may take so that other layouts of its groups are worth a look."""
_MAX_ESTIMATED = 60_000
"""Groups in all exchanges that are estimated at a time."""
_NUM_PRICED = 6
"""Of these, the exchanges that are priced."""

Laid = tuple[Completion, Candidate]
"""A completed structure, and its price."""


class Layouts:
    """Exchanges like groups, first to relieve contention, then for the gradient exchange.

    Args:
        kind_of: by node; groups of one kind and width are alike.
        price: prices a completed structure whole; None where it does not fit.
    """

    def __init__(
        self,
        kind_of: Mapping[str, int],
        spreader: Spreader,
        tails: Tails,
        price: Callable[[Completion], Candidate | None],
    ) -> None:
        self.kind_of = kind_of
        self.spreader = spreader
        self.tails = tails
        self.price = price
        self.work = 0
        """Groups looked at."""

    def best(self, found: Completion, candidate: Candidate) -> Laid:
        """Return the best layout that exchanges lead to."""
        laid = found, candidate
        if candidate.is_contended:
            laid = self._spread(*laid)
        while (better := self._exchanged(*laid)) is not None:
            laid = better
        return laid

    def _spread(self, found: Completion, candidate: Candidate) -> Laid:
        """Relieve the busiest path, where that costs little."""
        chains = self.spreader.spread(found.structure, found.num_micro_batches)
        if chains is None:
            return found, candidate
        wider = replace(found, structure=tuple(chains))
        priced = self.price(wider)
        if priced is None or priced.step_time_s > (1 + MIN_GAIN) * candidate.step_time_s:
            return found, candidate
        return wider, priced

    def _exchanged(self, found: Completion, candidate: Candidate) -> Laid | None:
        """Return a layout one exchange away that is faster, of those that should shorten the
        gradient exchange most; None where there is none."""
        pipelines_s = max(replica.pipeline_s for replica in candidate.cost.replicas)
        if pipelines_s >= _PROMISING * candidate.step_time_s:
            return None
        num_groups = sum(map(len, found.structure))
        before_s = self.tails.estimate_s(found)
        ranked: list[tuple[float, int, Completion]] = []
        exchanges = like_exchanges(found.structure, self.kind_of)
        for structure in islice(exchanges, _MAX_ESTIMATED // num_groups):
            moved = replace(found, structure=structure)
            tail_s = self.tails.estimate_s(moved)
            if tail_s < before_s:
                ranked.append((tail_s, len(ranked), moved))
            self.work += num_groups
        for _, _, moved in sorted(ranked, key=lambda entry: entry[:2])[:_NUM_PRICED]:
            priced = self.price(moved)
            if priced is not None and below(priced.step_time_s, candidate.step_time_s):
                return moved, priced
        return None
