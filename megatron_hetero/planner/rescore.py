"""The end of a search: its best placements with queues on the paths that replicas share.

The strategies compare by the cost model, which is quick and never slower than the simulation
(`schedule.shared_paths`).  So the best by simulation is found by pricing placements in the order of
the cost model until the next one could not be better even without queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.planner.counts import with_counts, with_replicas
from megatron_hetero.planner.local import unlike
from megatron_hetero.planner.scoreboard import Candidate, Scoreboard
from megatron_hetero.schedule.shared_paths import num_messages, queued, sharing_replicas

_MAX_SHAPES = 12
_MAX_MESSAGES = 60_000
"""Limit in messages simulated, of all placements together; the best is simulated anyhow."""
_MORE_AHEAD = (1, 2, 4)


class Rescorer:
    """Prices placements of one board with their queues."""

    def __init__(self, board: Scoreboard) -> None:
        self.board = board
        self.costs = board.problem.costs
        self._left = _MAX_MESSAGES

    def best(self) -> Candidate | None:
        """The best placement of the board by simulation; None where the board has none."""
        ranking = self.board.ranking_of_all
        if not ranking or not self.costs.has_variants or not ranking[0].keeps_limits:
            return self.board.best
        best: Candidate | None = None
        for candidate in unlike(ranking, _MAX_SHAPES):
            if best is not None and best.key <= candidate.key:
                break
            if best is not None and not self._may_simulate(candidate.placement):
                break
            exact = self._queued(candidate)
            if best is None or exact.key < best.key:
                best = exact
        if best is None or not self._may_simulate(best.placement):
            return best
        for further in self._further_ahead(best):
            if further.key < best.key:
                best = further
        return best

    def _may_simulate(self, placement: Placement) -> bool:
        return num_messages(placement, sharing_replicas(placement)) <= self._left

    def _queued(self, candidate: Candidate) -> Candidate:
        placement = candidate.placement
        self._left -= num_messages(placement, sharing_replicas(placement))
        cost = queued(self.costs, placement, candidate.cost)
        return self.board.candidate(placement, cost, candidate.strategy, candidate.rank_order)

    def _further_ahead(self, best: Candidate) -> Iterator[Candidate]:
        """The placement with more forwards ahead where replicas share a path: they hide queues as
        they hide the hops themselves."""
        placement = best.placement
        sharing = sharing_replicas(placement)
        costs = self.costs.sharded_as(placement)
        rows = costs.vocab_rows(placement.widths)
        for more in _MORE_AHEAD if sharing and self.costs.has_launch_counts else ():
            counted = [(r, costs.replica(r, rows)) for r in placement.replicas]
            for r in sharing:
                ahead = _further(placement.replicas[r], more)
                priced = ahead, costs.replica(ahead, rows)
                if all(stage.missing_bytes <= 0 for stage in priced[1].stages):
                    counted[r] = priced
            changed = with_replicas(costs, counted, rows)
            if changed[0] == placement or not self._may_simulate(changed[0]):
                return
            yield self._queued(replace(best, placement=changed[0], cost=changed[1]))


def _further(replica: PlacedReplica, more: int) -> PlacedReplica:
    """Every stage but the last launches so many forwards more, as far as there are."""
    most = replica.num_micro_batches
    *ahead, last = replica.num_in_flight
    return with_counts(replica, [*(min(count + more, most) for count in ahead), last])
