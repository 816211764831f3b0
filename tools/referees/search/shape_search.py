"""Shapes of one replica, repeated as often as a cluster has room for: their prices and their
neighbours.

A move changes all replicas at once: a stage comes, goes, or stands elsewhere, becomes wider or
narrower, is cut in two or joined with the next, or gives a layer to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.fill import FilledChain, Filler, placed_replica
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Chain, Problem, chains_of
from megatron_hetero.planner.shapes.kinds import Kind, kinds_of
from tools.referees.search.sandwiches import sandwiches
from tools.referees.search.shape_layout import Shape, ShapeLayouts, equal_shares
from tools.referees.search.spread import Spreader

MAX_KINDS = 32
"""One shape for all replicas uses few kinds of nodes: with more of them, most GPUs would idle."""
_NUM_PRICED = 12
"""Sandwiches to price."""
_NUM_COUNTS = 2
"""Numbers of replicas to price for a shape: the most, and the most with a micro-batch more each."""


class ShapeSearch:
    """Shapes on the nodes of a problem, priced on its board."""

    def __init__(self, board: Scoreboard, name: str) -> None:
        self.board = board
        self.name = name
        self.problem: Problem = board.problem
        self.kinds: Sequence[Kind] = kinds_of(board.problem)
        self.kind_of = {node.name: k for k, kind in enumerate(self.kinds) for node in kind.nodes}
        self.filler = Filler(board.problem)
        self.spreader = Spreader(board.problem, self.kind_of)
        self.work = 0
        self.layouts = ShapeLayouts(board.problem, self.kinds)
        self._promises_s: dict[Shape, float | None] = {}
        self._found: dict[Shape, Candidate | None] = {}

    def shape_of(self, candidate: Candidate) -> Shape:
        """Return the shape of a candidate's first replica."""
        stages = candidate.placement.replicas[0].stages
        return tuple((self.kind_of[s.devices[0].node], s.width) for s in stages)

    def climb(self, shape: Shape, max_work: int) -> None:
        """Go from a shape to better ones, best promise first, while there are any; then layers."""
        limit = self.work + max_work
        best = self.price(shape, None)
        while True:
            better = self._improved(shape, best, limit)
            if better is None:
                break
            shape, best = better
        if best is not None:
            self._shift_layers(best, limit)

    def try_sandwiches(self, max_work: int) -> None:
        """Climb from shapes with one kind of GPUs inside and another at one or both ends, where one
        is better than all that is known: from other shapes they are many moves away."""
        shapes = [s for s in sandwiches(self.problem, self.kinds) if s not in self._found]
        ranked = [(self._promise_s(shape), shape) for shape in shapes]
        order = sorted((promise_s, shape) for promise_s, shape in ranked if promise_s is not None)
        for _, shape in order[:_NUM_PRICED]:
            known = self.board.best
            found = self.price(shape, known)
            self._found[shape] = found
            if found and (known is None or found.key < known.key):
                self.climb(shape, max_work)

    def price(self, shape: Shape, beat: Candidate | None) -> Candidate | None:
        """Return the best placement of a shape; None if it fits nowhere or cannot beat `beat`."""
        best = None
        for count, by_stage in self._layouts(shape):
            # Stage by stage the first replica is known before the others are put anywhere.
            chains = [] if by_stage else self.layouts.chains(shape, count, by_stage)
            filled = self.fill(chains[0] if chains else self.layouts.first_chain(shape, count))
            quick_s = filled.quick_time_s(self.each(count))
            if not filled.fits or (beat and quick_s >= beat.step_time_s):
                continue
            chains = chains or self.layouts.chains(shape, count, by_stage)
            candidate = self.score(chains, filled.layers)
            if candidate and (best is None or candidate.key < best.key):
                best = candidate
        return best

    def each(self, count: int) -> int:
        """Return micro-batches that each of so many replicas does at most."""
        return -(-self.problem.num_micro_batches // count)

    def _improved(
        self, shape: Shape, best: Candidate | None, limit: int
    ) -> tuple[Shape, Candidate] | None:
        """Return the first neighbour that is better, the most promising first."""
        ranked = []
        for moved in dict.fromkeys(self._moves(shape)):
            if moved in self._found:
                continue
            promise_s = self._promise_s(moved)
            if promise_s is not None and (best is None or promise_s < best.step_time_s):
                ranked.append((promise_s, moved))
        for _, moved in sorted(ranked):
            if self.work >= limit:
                return None
            found = self.price(moved, best)
            self._found[moved] = found
            if found and (best is None or found.key < best.key):
                return moved, found
        return None

    def _promise_s(self, shape: Shape) -> float | None:
        if shape not in self._promises_s:
            self._promises_s[shape] = self.quick_time_s(shape)
        return self._promises_s[shape]

    def is_allowed(self, shape: Shape) -> bool:
        """Return whether length and both ends keep to the limits."""
        is_short = 0 < len(shape) <= self.problem.max_stages()
        return is_short and self.kinds[shape[0][0]].may_start and self.kinds[shape[-1][0]].may_end

    def quick_time_s(self, shape: Shape) -> float | None:
        """Return the pipelines' quick time; None where the shape has no room or does not fit."""
        for count, by_stage in self._layouts(shape):
            if by_stage:
                filled = self.fill(self.layouts.first_chain(shape, count))
            else:
                filled = self.fill(self.layouts.chains(shape, count, by_stage)[0])
            if filled.fits:
                return filled.quick_time_s(self.each(count))
        return None

    def fill(self, chain: Chain) -> FilledChain:
        """Return a replica with its layers."""
        rows = self.problem.costs.vocab_rows(sorted({unit.width for unit in chain}))
        return self.filler.chain(chain, rows, self.problem.num_micro_batches)

    def score(self, chains: Sequence[Chain], layers: Sequence[int]) -> Candidate | None:
        """Price replicas of these layers and equal shares of the batch, laid out well."""
        shares = equal_shares(self.problem.num_micro_batches, len(chains))
        if shares is None:
            return None
        candidate = self.score_shares(chains, layers, shares)
        return candidate and self.better_laid_out(chains, layers, shares, candidate)

    def better_laid_out(
        self,
        chains: Sequence[Chain],
        layers: Sequence[int],
        shares: Sequence[int],
        candidate: Candidate,
    ) -> Candidate:
        """Return the best placement of a shape whose first layout gave `candidate`."""
        if not candidate.is_contended:
            return candidate
        wider = self.spreader.spread(chains, shares)
        found = self.score_shares(wider, layers, shares) if wider else None
        return candidate if found is None or candidate.key < found.key else found

    def score_shares(
        self, chains: Sequence[Chain], layers: Sequence[int], shares: Sequence[int]
    ) -> Candidate | None:
        """Return a shape on these groups, with the same layers in all and so many micro-batches
        each."""
        replicas = tuple(
            placed_replica(chain, layers, share)
            for chain, share in zip(chains, shares, strict=True)
        )
        self.work += len(chains) * len(layers)
        return self.board.score(Placement(replicas), self.name)

    def _shift_layers(self, best: Candidate, limit: int) -> None:
        """Move layers from one stage to another, in all replicas at once, while that helps."""
        improved = True
        while improved:
            improved = False
            layers = [stage.num_layers for stage in best.placement.replicas[0].stages]
            chains = chains_of(best.placement)
            for giver in range(len(layers)):
                for taker in range(len(layers)):
                    if giver == taker or layers[giver] == 1 or self.work >= limit:
                        continue
                    moved = list(layers)
                    moved[giver] -= 1
                    moved[taker] += 1
                    found = self.score(chains, moved)
                    if found and found.key < best.key:
                        best, improved = found, True
                        break
                if improved:
                    break

    def _layouts(self, shape: Shape) -> Iterator[tuple[int, bool]]:
        """Yield as many replicas as there is room for, like stages side by side and replica by
        replica; then fewer, with one micro-batch more each.  (How many, and whether stage by
        stage.)"""
        if not self.is_allowed(shape):
            return
        for by_stage in (True, False):
            most = self.layouts.most(shape, by_stage)
            if not most:
                continue
            share = self.each(most)
            for extra in range(_NUM_COUNTS):
                count = -(-self.problem.num_micro_batches // (share + extra))
                fits = count == most or self.layouts.has_room(shape, count, by_stage)
                if count in self.problem.replica_counts() and fits:
                    yield count, by_stage

    def _moves(self, shape: Shape) -> Iterator[Shape]:
        """Yield shapes one move away; equal neighbours are one run, changed at its ends only."""
        menu = [(k, w) for k, kind in enumerate(self.kinds) for w in kind.widths]
        borders = [at for at in range(len(shape) + 1) if shape[at - 1 : at] != shape[at : at + 1]]
        for at in borders:
            for stage in menu:
                yield (*shape[:at], stage, *shape[at:])
        for at in sorted({b for b in borders if b < len(shape)} | {b - 1 for b in borders if b}):
            kind, width = shape[at]
            without = (*shape[:at], *shape[at + 1 :])
            yield without
            for stage in menu:
                yield (*shape[:at], stage, *shape[at + 1 :])
            for to in borders:
                to -= to > at
                yield (*without[:to], shape[at], *without[to:])
            half = (kind, width // 2)
            if width % 2 == 0 and half in menu:
                yield (*shape[:at], half, half, *shape[at + 1 :])
            if at + 1 < len(shape) and shape[at + 1][0] == kind:
                joined = width + shape[at + 1][1]
                if joined in self.kinds[kind].widths:
                    yield (*shape[:at], (kind, joined), *shape[at + 2 :])
