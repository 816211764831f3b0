"""Shapes again, each laid out as well as exchanges of like groups allow.

Where a shape's stages stand decides what its messages and its gradients cost: like stages on one
node exchange gradients inside it, but then crowd the paths to the next ones.  `spread` relieves
paths, in clusters of any size; here every exchange is priced, which a small cluster allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Chain
from megatron_hetero.planner.shapes.shape_layout import Shape
from megatron_hetero.planner.shapes.shape_search import MAX_KINDS, ShapeSearch

MAX_GPUS_EXCHANGED = 64
"""With more, one shape has too many exchanges to price."""
_PROMISING = 0.97
"""Of a step, what its pipelines may take so that exchanges are worth a look."""
_NUM_CLIMBS = 3
"""Of the shapes that are laid out, those that are climbed from."""
_WORTH = 1 - 1e-9
"""Less is rounding."""


class Exchanges:
    """Hill climbing over shapes with launch counts, from those whose pipelines promise most."""

    name = "exchanges"

    def __init__(self, num_starts: int = 12, max_work: int = 90_000) -> None:
        self.num_starts = num_starts
        """Shapes to lay out anew."""
        self.max_work = max_work
        """Limit in stages priced, of all climbs together."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        if problem.num_gpus > MAX_GPUS_EXCHANGED or not problem.costs.has_launch_counts:
            return
        search = ExchangingSearch(board, self.name, self.max_work)
        if len(search.kinds) > MAX_KINDS:
            return
        promises_s: dict[Shape, float] = {}
        for candidate in board.ranking_with_counts:
            if len(candidate.placement.replicas) > 1 and search.is_promising(candidate):
                pipelines_s = _pipelines_s(candidate)
                shape = search.shape_of(candidate)
                promises_s[shape] = min(pipelines_s, promises_s.get(shape, pipelines_s))
        starts = sorted(promises_s, key=lambda shape: (promises_s[shape], shape))
        laid_out = []
        for shape in starts[: self.num_starts]:
            found = search.price(shape, None)
            if found is not None:
                laid_out.append((found.key, shape))
        for _, shape in sorted(laid_out)[:_NUM_CLIMBS]:
            search.climb(shape, (self.max_work - search.work) // 2)


class ExchangingSearch(ShapeSearch):
    """Shapes with their groups exchanged."""

    def __init__(self, board: Scoreboard, name: str, max_work: int) -> None:
        super().__init__(board, name, launch_ahead=True)
        self.max_work = max_work

    def is_promising(self, candidate: Candidate) -> bool:
        """Whether another layout of its shape may be the best placement of all."""
        known_s = min(candidate.step_time_s, self.board.ranking_with_counts[0].step_time_s)
        return _pipelines_s(candidate) < _PROMISING * known_s

    def better_laid_out(
        self,
        chains: Sequence[Chain],
        layers: Sequence[int],
        shares: Sequence[int],
        candidate: Candidate,
    ) -> Candidate:
        """See `ShapeSearch`; steepest descent over the exchanges."""
        best = super().better_laid_out(chains, layers, shares, candidate)
        improved = True
        while improved and self.is_promising(candidate):
            improved, start = False, chains
            for exchanged in self._exchanges(start):
                if self.work >= self.max_work:
                    break
                found = self.score_shares(exchanged, layers, shares)
                if found and found.step_time_s < _WORTH * candidate.step_time_s:
                    candidate, chains, improved = found, exchanged, True
        return min(best, candidate, key=lambda c: c.key)

    def _exchanges(self, chains: Sequence[Chain]) -> Iterator[list[Chain]]:
        """The chains after each exchange of two like groups on unlike nodes."""
        places = [(r, s) for r, chain in enumerate(chains) for s in range(len(chain))]
        for i, (r, s) in enumerate(places):
            for q, t in places[i + 1 :]:
                one, other = chains[r][s], chains[q][t]
                is_like = self.kind_of[one.node] == self.kind_of[other.node]
                if one.node != other.node and is_like and one.width == other.width:
                    pipelines = [list(chain) for chain in chains]
                    pipelines[r][s], pipelines[q][t] = other, one
                    yield [tuple(pipeline) for pipeline in pipelines]


def _pipelines_s(candidate: Candidate) -> float:
    return max(replica.pipeline_s for replica in candidate.cost.replicas)
