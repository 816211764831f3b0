"""One search over structures: best first, each priced more closely only while it can win.

A structure says which GPUs form which stages of which replicas; its layers, recompute, micro-batch
size, launch counts and shares of the batch follow (`completion`).  It is first estimated
(`evaluate.tail` adds the gradient exchange), then priced whole, then tuned by the recurrence of
1F1B, and last, where replicas share paths, simulated.  A structure that is still the best after all
this is expanded: all structures one move away (`moves`) join the search.  It starts from the
structures that other strategies left on the board.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from math import inf

from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.candidate import NEAR, Candidate
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import THOROUGH, Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.starts import promising
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.objectives.objective import Standing
from megatron_hetero.planner.shapes.divided import divided_structures

_WORTH = 1 - 5e-4
"""A structure that shortens the step to less than this part of it is worth more patience."""
_MAX_ESTIMATED = 400
"""Of the structures one move away, those whose exchange is estimated."""
_MANY_DIVIDED, _FEW_DIVIDED = 400, 32
"""Structures that divide sequences which are completed, where nothing else fits, and else."""
_DIVIDED_PART = 4
"""And the part of the work, one in so many, that goes on from them where something else fits."""


class StructureSearch:
    """See the module."""

    name = "structures"

    def __init__(
        self,
        max_work: int = 1_500_000,
        num_starts: int = 12,
        num_whole: int = 24,
        num_descents: int = 6,
        num_tuned: int = 6,
        patience: int = 12,
        work_per_gpu: int = 40_000,
        slack: float = 1.15,
        effort: int = 1,
    ) -> None:
        """`effort`: so many times the work and the patience."""
        self.max_work = effort * max_work
        """Limit of all work, in units of about 10 microseconds."""
        self.patience = effort * patience
        """So many structures are gone on from without a better one before a descent ends."""
        self.work_per_gpu = effort * work_per_gpu
        """Limit of the work for each GPU: in smaller clusters less is left to find."""
        self.num_starts = num_starts
        self.num_descents = num_descents
        """Of the starts, those that are each descended from for a while before all go on."""
        self.num_tuned = num_tuned
        """Of all structures, those that are tuned thoroughly at the end."""
        self.num_whole = num_whole
        """Of the structures one move away, those that are kept."""
        self.slack = slack
        """Structures that are slower than the best by more are left."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`; does nothing where prices know no settings of a stage."""
        costs = board.problem.costs
        if costs.has_variants and costs.has_launch_counts:
            Loop(board, self).run()


class Loop(Rungs):
    """One search of one board; `StructureSearch` has its limits."""

    def __init__(
        self, board: Scoreboard, options: StructureSearch, *, shards: bool = False
    ) -> None:
        super().__init__(board, shards=shards)
        self.options = options
        self.seen: set[Hashable] = set()
        self.max_work = min(options.max_work, options.work_per_gpu * board.problem.num_gpus)
        self.expanded_of: set[Hashable] = set()
        self.fastest: list[Climber] = []
        """Of the structures that went up the whole ladder, the first ones."""

    def run(self) -> None:
        options = self.options
        chosen = promising(
            self.board, self.tails, self.sized, self.image, self.kind_of, options.num_starts
        )
        self.seen.update(chosen)
        nodes = list(map(self.estimated, chosen.values()))
        few, left = options.num_descents, nodes[options.num_descents :]
        for number, node in enumerate(nodes[:few]):
            part = (self.max_work // 2 - self.done) // (few - number)
            left += self.descend([node], self.done + part)
        heapify(left)
        self.descend(left, self.max_work)
        self.divide()
        self.tune_thoroughly()

    def estimated(self, found: Completion) -> Climber:
        """Return the first rung of a structure that is not one move away from another."""
        self.num += 1
        time_s = found.quick_s + self.tails.estimate_s(found)
        return Climber((Standing(), time_s), self.num, found, None)

    def tune_thoroughly(self) -> None:
        """Tune the fastest structures once more, for longer."""
        for node in self.fastest:
            if node.candidate is not None:
                tuned = self.tune(node, node.candidate, THOROUGH)
                if tuned.candidate is not None and tuned.candidate is not node.candidate:
                    self.queued(tuned, tuned.candidate)

    def divide(self) -> None:
        """Go on from structures that divide sequences, where these promise a shorter step than any
        that does not."""
        best = self.board.nearest
        best_s = inf if best is None else best.step_time_s
        most, part = (_MANY_DIVIDED, 1) if best is None else (_FEW_DIVIDED, _DIVIDED_PART)
        ranked: list[Climber] = []
        for structure in divided_structures(self.problem, best_s, most):
            found = self.sized(structure)
            if found is not None:
                ranked.append(self.estimated(found))
        ranked.sort()
        first = ranked[: self.options.num_starts]
        nodes = [node for node in first if node.time_s < NEAR * best_s]
        self.seen.update([self.image(node.found.structure) for node in nodes])
        heapify(nodes)
        self.max_work = self.done + self.max_work // part
        self.descend(nodes, self.max_work)

    def descend(self, heap: list[Climber], limit: int) -> list[Climber]:
        """Go on best first, until the work is done, patience ends or nothing left comes near;
        what is left."""
        best: Climber | None = None
        first = len(heap) == 1
        idle = 0
        patience = self.options.patience // (2 if first else 1)
        while heap and self.done < limit and idle <= patience:
            node = heappop(heap)
            best_s = inf if first and best is None else self.best_s
            if node.time_s > self.options.slack * best_s:
                heappush(heap, node)
                break
            candidate = node.candidate
            if candidate is None:
                for priced in self.price(node):
                    heappush(heap, priced)
            elif not node.tuned:
                heappush(heap, self.tune(node, candidate))
            elif not node.queued:
                heappush(heap, self.queued(node, candidate))
            else:
                idle += 1
                if best is None or node.time_s < _WORTH * best.time_s:
                    idle = 0
                if best is None or node < best:
                    best = node
                insort(self.fastest, node)
                del self.fastest[self.options.num_tuned :]
                self.expand(node, candidate, heap)
        return heap

    def expand(self, node: Climber, candidate: Candidate, heap: list[Climber]) -> None:
        """Put the most promising structures one move away on the heap."""
        own = self.image(node.found.structure)
        if own in self.expanded_of:
            return
        self.expanded_of.add(own)
        complete, image = self.completer.complete, self.image
        ranked: list[tuple[float, int, Hashable, Completion]] = []
        for number, structure in enumerate(
            neighbours(self.problem, node.found.structure, self.completer.shape)
        ):
            key = image(structure)
            if key in self.seen:
                continue
            if self.done > self.max_work:
                break
            self.work += sum(map(len, structure))
            found = complete(structure, node.found.filled[0].size)
            if found is not None:
                ranked.append((found.quick_s, number, key, found))
        ranked.sort(key=lambda entry: entry[:2])
        cost = candidate.cost
        tail_s = cost.gradient_sync_s + cost.update_s - self.tails.estimate_s(node.found)
        limit_s, hope = self.options.slack * self.best_s, node.gain * node.wait
        near: list[tuple[float, int, Hashable, Completion]] = []
        for quick_s, number, key, found in ranked:
            if quick_s * hope > limit_s or len(near) > _MAX_ESTIMATED:
                break
            self.work += 2
            least_s = quick_s + max(cost.update_s, tail_s + self.tails.estimate_s(found))
            near.append((least_s, number, key, found))
        ranked = sorted(near, key=lambda entry: entry[:2])
        for quick_s, _, key, found in ranked[: self.options.num_whole]:
            if key in self.seen:
                continue
            self.seen.add(key)
            self.num += 1
            heappush(
                heap,
                Climber(
                    (Standing(), quick_s * hope),
                    self.num,
                    found,
                    None,
                    node.gain,
                    node.wait,
                    node.contention,
                ),
            )
