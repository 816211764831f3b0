"""The loop of the search: structures best first, each priced more closely only while it can win.

A structure is first estimated (`evaluate.tail` adds the gradient exchange), then priced whole, then
tuned by the recurrence of 1F1B, and last, where replicas share paths, simulated.  A structure that
is still the best after all this is expanded: all structures one move away (`moves`) join the loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.optimizer_shares import by_room
from megatron_hetero.planner.evaluate.candidate import NEAR
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.units import Structure
from megatron_hetero.rounding import ranked

MAX_ESTIMATED = 400
"""Structures one move away with an estimated exchange."""
PART = 4
"""Thorough tuning gets one part in so many of the work; so do divided sequences and joined stages,
where something fits without them."""


@dataclass(frozen=True)
class SearchLimits:
    """How far a search goes.

    Attributes:
        max_work: limit of all work, in units of about 10 microseconds.
        work_per_gpu: limit of the work for each GPU; in smaller clusters less is left to find.
        num_starts: each is descended from for a while before all go on together.
        num_tuned: structures that are tuned thoroughly and varied at the end.
        num_whole: structures one move away that are kept.
        slack: structures that are slower than the best by more are left.
        moves: without, what is on the board is completed and tuned, and nothing else.
    """

    max_work: int = 1_000_000
    num_starts: int = 12
    num_whole: int = 24
    num_tuned: int = 6
    work_per_gpu: int = 30_000
    slack: float = 1.15
    moves: bool = True


@dataclass
class Descent:
    """A descent under way: structures that wait, best first, and the best that it came to.

    `alone`: from a single start, so that other descents do not cut it short.
    """

    heap: list[Climber]
    alone: bool = False
    best: Climber | None = None

    def reached(self) -> tuple[object, ...]:
        """Return a key that compares descents by the best node, done or waiting."""
        nodes = [*self.heap[:1], *([] if self.best is None else [self.best])]
        return (False, min(nodes)) if nodes else (True,)


class Loop:
    """A search over structures, within limits.

    Args:
        rungs: raise structures of the board that is searched.
        whole: the board whose shortest step a structure has to come near; that of `rungs` by
            itself.
        part: the part of the work of a whole search that this one is worth.
    """

    def __init__(
        self,
        rungs: Rungs,
        limits: SearchLimits,
        whole: Scoreboard | None = None,
        part: float = 1.0,
    ) -> None:
        self.rungs = rungs
        self.limits = limits
        self.whole = rungs.board if whole is None else whole
        self.problem = rungs.problem
        self.seen: set[Hashable] = set()
        most = min(limits.max_work, limits.work_per_gpu * self.problem.num_gpus)
        self.own_work = int(part * most)
        self.max_work = self.own_work
        self.expanded_of: set[Hashable] = set()
        self.fastest: list[Climber] = []
        """Of the structures that went up the whole ladder, the first ones."""

    @property
    def known_s(self) -> float:
        """The shortest step known before queues; infinite where nothing fits."""
        best = self.whole.nearest
        return inf if best is None else best.step_time_s

    def go_on_from(self, structures: Iterable[Structure], slack: float = NEAR) -> None:
        """Descend from structures with a promised step of at most `slack` times the shortest
        known."""
        # Without anything that fits there is no step to compare with, and all work is free.
        most_s, part = slack * self.known_s, 1 if self.known_s == inf else PART
        work = self.own_work // part
        # In the largest clusters the completions alone may take all of it.
        end, found = self.rungs.done + work, []
        for structure in structures:
            if (one := self.rungs.sized(structure)) is not None:
                found.append(one)
            if self.rungs.done > end:
                break
        estimated = sorted(map(self.rungs.estimated, found))
        nodes = [node for node in estimated[: self.limits.num_starts] if node.time_s < most_s]
        self.seen.update([self.rungs.image(node.found.structure) for node in nodes])
        heapify(nodes)
        self.max_work = self.rungs.done + work
        self.descend(Descent(nodes), self.max_work)

    def descend(self, descent: Descent, limit: int) -> None:
        """Go on best first, until the work is done or nothing left comes near."""
        heap, alone = descent.heap, descent.alone
        while heap and self.rungs.done < limit:
            node = heappop(heap)
            best = descent.best
            # Alone, a descent is measured by its own best.
            best_s = self.rungs.best_s if not alone else inf if best is None else best.time_s
            if node.time_s > self.limits.slack * best_s:
                heappush(heap, node)
                break
            # One rung up the ladder: price, tune, queue; at the top the structure is expanded.
            candidate = node.candidate
            if candidate is None:
                for priced in self.rungs.price(node):
                    heappush(heap, priced)
            elif not node.tuned:
                heappush(heap, self.rungs.tune(node, candidate))
            elif not node.queued:
                heappush(heap, self.rungs.queued(node, candidate))
            else:
                if best is None or node < best:
                    descent.best = node
                self.keep(node)
                self.expand(node, self.moved(node), heap)

    def keep(self, node: Climber) -> None:
        """Keep a structure at the top of the ladder, if among the fastest."""
        fastest = sorted([*self.fastest, node])
        # Reversed, so that of equal images the fastest stays.
        best = {self.rungs.image(one.found.structure): one for one in reversed(fastest)}
        self.fastest = sorted(best.values())[: self.limits.num_tuned]

    def moved(self, node: Climber) -> Iterable[Structure]:
        """Return the structures one move away; none where it was asked before."""
        own = self.rungs.image(node.found.structure)
        if own in self.expanded_of or not self.limits.moves:
            return ()
        self.expanded_of.add(own)
        return neighbours(self.problem, node.found.structure, self.rungs.completer.shape)

    def expand(self, node: Climber, structures: Iterable[Structure], heap: list[Climber]) -> None:
        """Put the most promising of the structures that a node leads to on the heap."""
        if node.candidate is None:
            return
        # Complete each new structure that the node leads to.
        image, size = self.rungs.image, node.found.filled[0].size
        quick: list[tuple[float, int, Hashable, Completion]] = []
        met: set[Hashable] = set()
        for number, structure in enumerate(structures):
            key = image(structure)
            # Two moves may lead to the same structure.
            if key in self.seen or key in met:
                continue
            met.add(key)
            if self.rungs.done > self.max_work:
                break
            self.rungs.work += sum(map(len, structure))
            found = self.rungs.completer.complete(structure, size)
            # With equal parts of the states it does not fit; by free memory it may.
            if found is None and node.found.optimizer_shares is not None:
                found = by_room(self.rungs.completer, structure, size)
            if found is not None:
                quick.append((ranked(found.quick_s), number, key, found))
        # Order by quick seconds, then by an estimate of the exchange for the nearest.
        quick.sort(key=lambda entry: entry[:2])
        cost = node.candidate.cost
        # What the estimate misses of the node's own exchange is missed of its neighbours' too.
        own_tail_s = cost.gradient_sync_s + cost.update_s
        tail_s = own_tail_s - self.rungs.tails.estimate_s(node.found)
        limit_s = self.limits.slack * node.time_s
        # What pricing showed of the node is hoped of its neighbours.
        hope = node.time_s / (node.quick_s + own_tail_s)
        near: list[tuple[float, int, Hashable, Completion]] = []
        for quick_s, number, key, found in quick:
            if quick_s * hope > limit_s or len(near) > MAX_ESTIMATED:
                break
            self.rungs.work += 2
            least_s = quick_s + max(cost.update_s, tail_s + self.rungs.tails.estimate_s(found))
            near.append((ranked(least_s), number, key, found))
        near.sort(key=lambda entry: entry[:2])
        # The best few go on the heap.
        for least_s, _, key, found in near[: self.limits.num_whole]:
            self.seen.add(key)
            self.rungs.num += 1
            heappush(
                heap,
                Climber(
                    (Standing(), least_s * hope),
                    self.rungs.num,
                    found,
                    None,
                    node.gain,
                    node.wait,
                    node.contention,
                ),
            )
