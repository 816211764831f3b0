"""Local search: small changes to the best placements, kept while they help."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import fine_moves, insertions, replaced
from megatron_hetero.planner.moves.idle_groups import idle_of
from megatron_hetero.planner.problem import Chain, Problem, Unit, chains_of
from tools.referees.search.joins import joined_replicas
from tools.referees.search.unlike import unlike


class LocalSearch:
    """Hill climbing from each of the best placements so far, first improvement taken.

    Fine moves shift one layer between two stages or one micro-batch between two replicas; coarse
    moves shift, exchange, drop, add, split or join units, and fill again.
    """

    name = "local"

    def __init__(self, num_starts: int = 6, max_work: int = 60_000, max_gpus: int = 256) -> None:
        self.num_starts = num_starts
        self.max_gpus = max_gpus
        """Above this, a move changes too little of a step to be worth its price."""
        self.max_work = max_work
        """Limit in stages priced (a placement of n stages counts n)."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        if board.problem.num_gpus > self.max_gpus:
            return
        filler = Filler(board.problem)
        if board.nearest is None:
            self._repair(board, filler)

        def score(placement: Placement) -> Candidate | None:
            return board.score(placement, self.name)

        starts = unlike(board.ranking, self.num_starts)
        for candidate in starts:
            climb(board.problem, filler, score, candidate, self.max_work // len(starts))

    def _repair(self, board: Scoreboard, filler: Filler) -> None:
        """From the placement that lacks least memory to one that fits, if moves lead there."""
        work = 0
        miss = None
        while board.nearest is None and miss is not board.out_of_memory.nearest:
            miss = board.out_of_memory.nearest
            if miss is None:
                return
            for placement in neighbours(board.problem, filler, miss.placement):
                fitting = board.score(placement, self.name)
                work += sum(len(r.stages) for r in placement.replicas)
                if fitting is not None or work > self.max_work:
                    return
                if board.out_of_memory.nearest is not miss:
                    break


def climb(
    problem: Problem,
    filler: Filler,
    score: Callable[[Placement], Candidate | None],
    best: Candidate,
    max_work: int,
) -> None:
    """Hill climbing from `best`, first improvement taken; the board behind `score` keeps it all.

    Args:
        max_work: limit in stages priced.
    """
    work = 0
    improved = True
    while improved:
        improved = False
        for placement in neighbours(problem, filler, best.placement):
            candidate = score(placement)
            work += sum(len(r.stages) for r in placement.replicas)
            if candidate is not None and candidate.key < best.key:
                best, improved = candidate, True
                break
            if work > max_work:
                return


def neighbours(problem: Problem, filler: Filler, placement: Placement) -> Iterator[Placement]:
    """All placements one move away, fine moves first."""
    yield from fine_moves(placement)
    if placement.has_shares:
        return  # chains are filled by groups of one node that divide evenly
    yield from joined_replicas(problem, placement)
    chains = chains_of(placement)
    seen = {tuple(chains)}
    for moved in _chain_moves(problem, chains):
        if moved not in seen:
            seen.add(moved)
            filled = filler.placement(moved)
            if filled is not None:
                yield filled


def _chain_moves(problem: Problem, chains: list[Chain]) -> Iterator[tuple[Chain, ...]]:
    """Structural moves; each result is a tuple of non-empty chains of disjoint units."""
    counts = problem.replica_counts()
    yield from insertions(chains, _idle_units(problem, chains), counts)
    for r, chain in enumerate(chains):
        for s, unit in enumerate(chain):
            without = replaced(chains, r, (*chain[:s], *chain[s + 1 :]))
            if len(without) in counts and without:
                yield tuple(without)
            yield from insertions(without, [unit], counts)
            for pieces in _recut(problem, chain, s):
                yield tuple(replaced(chains, r, pieces))
    places = [(r, s) for r, chain in enumerate(chains) for s in range(len(chain))]
    for i, (r, s) in enumerate(places):
        for q, t in places[i + 1 :]:
            one, other = chains[r][s], chains[q][t]
            if (one.node, one.width) != (other.node, other.width):
                swapped = [list(chain) for chain in chains]
                swapped[r][s], swapped[q][t] = other, one
                yield tuple(tuple(chain) for chain in swapped)


def _recut(problem: Problem, chain: Chain, index: int) -> Iterator[Chain]:
    """The unit at `index` cut in two stages, or joined with the next one on the same node."""
    unit = chain[index]
    widths = problem.widths[unit.node]
    for width in widths:
        if width < unit.width and unit.width - width in widths:
            left, right = (
                Unit(unit.node, unit.indices[:width]),
                Unit(unit.node, unit.indices[width:]),
            )
            yield (*chain[:index], left, right, *chain[index + 1 :])
    if index + 1 < len(chain) and chain[index + 1].node == unit.node:
        joined = tuple(sorted(unit.indices + chain[index + 1].indices))
        if len(joined) in widths:
            yield (*chain[:index], Unit(unit.node, joined), *chain[index + 2 :])


def _idle_units(problem: Problem, chains: list[Chain]) -> list[Unit]:
    """Of every node with idle GPUs, the first of them in each width that they allow."""
    units = []
    for name, idle in idle_of(problem, chains).items():
        units += [Unit(name, idle[:w]) for w in problem.widths[name] if w <= len(idle)]
    return units
