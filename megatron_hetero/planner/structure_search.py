"""One search over structures: best first, each priced more closely only while it can win.

A structure says which GPUs form which stages of which replicas; its layers, recompute, micro-batch
size, launch counts and shares of the batch follow (`completion`).  It is first estimated
(`evaluate.tail` adds the gradient exchange), then priced whole, then tuned by the recurrence of
1F1B, and last, where replicas share paths, simulated.  A structure that is still the best after all
this is expanded: all structures one move away (`moves`) join the search.  It starts from the
structures that other strategies left on the board.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from megatron_hetero.cost.choices import may_mix_sizes
from megatron_hetero.model.spec import TokenDispatcher
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.optimizer_shares import by_room
from megatron_hetero.planner.completion.unlike_sizes import mixed
from megatron_hetero.planner.evaluate.candidate import NEAR
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import THOROUGH, Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.moves.unlike_groups import in_unlike_parts, joined
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.problem import Structure, chains_of, layers_of
from megatron_hetero.planner.seeds.divided import divided_structures
from megatron_hetero.planner.seeds.starts import promising

_MAX_ESTIMATED = 400
"""Structures one move away with an estimated exchange."""
_FEW_DIVIDED = 32
"""Structures with divided sequences that are completed, if another structure fits."""
_NUM_JOINED = 3
"""Fastest structures with stages joined into groups of unequal shares."""
_ROUNDS = 3
"""Rounds of descents from single starts; the better half goes on, with twice the work."""
PART = 4
"""Thorough tuning gets one part in so many of the work; so do divided sequences and joined stages,
where something fits without them."""


class StructureSearch:
    """See the module."""

    name = "structures"

    def __init__(
        self,
        max_work: int = 1_000_000,
        num_starts: int = 12,
        num_whole: int = 24,
        num_tuned: int = 6,
        work_per_gpu: int = 30_000,
        slack: float = 1.15,
        effort: int = 1,
        moves: bool = True,
    ) -> None:
        """`effort`: so many times the work; without `moves` it only completes and tunes what is on
        the board."""
        self.moves = moves
        self.max_work = effort * max_work
        """Limit of all work, in units of about 10 microseconds."""
        self.work_per_gpu = effort * work_per_gpu
        """Limit of the work for each GPU: in smaller clusters less is left to find."""
        self.num_starts = num_starts
        """Each is descended from for a while before all go on together."""
        self.num_tuned = num_tuned
        """Of all structures, those that are tuned thoroughly and varied at the end."""
        self.num_whole = num_whole
        """Of the structures one move away, those that are kept."""
        self.slack = slack
        """Structures that are slower than the best by more are left."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`; does nothing where senders wait for receivers."""
        if not board.problem.workload.training.waits_for_receivers:
            Loop(board, self).run()


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


class Loop(Rungs):
    """A search on a single board; `StructureSearch` has the limits."""

    def __init__(
        self,
        board: Scoreboard,
        options: StructureSearch,
        *,
        shards: bool = False,
        dealt_by: TokenDispatcher | None = None,
    ) -> None:
        super().__init__(board, shards=shards, dealt_by=dealt_by)
        self.options = options
        self.seen: set[Hashable] = set()
        self.own_work = min(options.max_work, options.work_per_gpu * board.problem.num_gpus)
        self.max_work = self.own_work
        self.expanded_of: set[Hashable] = set()
        self.fastest: list[Climber] = []
        """Of the structures that went up the whole ladder, the first ones."""

    def run(self) -> None:
        options = self.options
        chosen = promising(
            self.board,
            self.tails,
            self.sized,
            self.image,
            self.kind_of if options.moves else {},
            options.num_starts,
        )
        self.seen.update(chosen)
        starts = [self.estimated(start) for start in chosen.values()]
        # Half of the work is kept for the descent of all together.
        half = self.max_work // 2
        # In the largest clusters a price takes a good part of the work.
        priced = [self.price(start) if self.done < half else [start] for start in starts]
        heap = self.narrowed(priced)
        heapify(heap)
        self.descend(Descent(heap), self.max_work)
        if options.moves:
            self.divide()
            self.join()
        # Thorough tuning of the fastest, within its own part of the work.
        most = self.done + self.own_work // PART
        for node in self.fastest:
            if self.done < most:
                self.vary(node)

    def narrowed(self, starts: Sequence[list[Climber]]) -> list[Climber]:
        """Descend from each start alone, the better half ever further; what is left of all.

        One step of a long structure may take more than a descent's part of a round: then those that
        promise least wait.
        """
        priced = sorted(sorted(start) for start in starts if start)
        # What pricing yields beside each start joins the common heap later.
        left = [one for start in priced for one in start[1:]]
        descents = [Descent(start[:1], alone=True) for start in priced]
        work = (self.max_work // 2 - self.done) // _ROUNDS
        for _ in range(_ROUNDS):
            most = self.done + work
            for descent in descents:
                if self.done < most:
                    self.descend(descent, self.done + work // len(descents))
            # The better half goes on alone; nodes of the other half wait for the common descent.
            descents.sort(key=Descent.reached)
            half = (len(descents) + 1) // 2
            left += [node for descent in descents[half:] for node in descent.heap]
            descents = descents[:half]
        return left + [node for descent in descents for node in descent.heap]

    def vary(self, node: Climber) -> None:
        """Tune one of the fastest structures once more, for longer; and try what the search does
        not: unlike micro-batch sizes, and optimizer states by free memory."""
        found = node.found
        others = [by_room(self.completer, found.structure, found.filled[0].size)]
        if may_mix_sizes(self.problem.costs):
            others.append(mixed(self.completer, found))
        new = [other for other in others if other is not None and other is not found]
        varied = [one for other in new for one in self._priced(node, other)]
        for one in (node, *varied):
            if one.candidate is not None:
                tuned = self.tune(one, one.candidate, THOROUGH)
                if tuned.candidate is not None and tuned < node:
                    self.queued(tuned, tuned.candidate)

    def divide(self) -> None:
        """Go on from structures that divide sequences."""
        # With something that fits, divided sequences get a small part of the work.
        most = _MAX_ESTIMATED if self.known_s == inf else _FEW_DIVIDED
        divided = divided_structures(self.problem, self.known_s, most)
        self.go_on_from(chain(divided, in_unlike_parts(self.problem)))

    def join(self) -> None:
        """Go on from structures with groups of unlike shares, made of the fastest; where nothing
        fits, of what lacks memory."""
        shape, heap = self.completer.shape, list[Climber]()
        self.max_work = self.done + self.own_work // PART
        for node in self.fastest[:_NUM_JOINED]:
            structure = node.found.structure
            self.expand(node, joined(self.problem, structure, node.found.layers, shape), heap)
        self.descend(Descent(heap), self.max_work)
        lacking = self.board.out_of_memory.fastest if self.known_s == inf else ()
        self.go_on_from(
            structure
            for one in lacking[:_NUM_JOINED]
            for structure in joined(
                self.problem, tuple(chains_of(one.placement)), layers_of(one.placement), shape
            )
        )

    def go_on_from(self, structures: Iterable[Structure], slack: float = NEAR) -> None:
        """Descend from structures with a promised step of at most `slack` times the shortest
        known."""
        # Without anything that fits there is no step to compare with, and all work is free.
        most_s, part = slack * self.known_s, 1 if self.known_s == inf else PART
        found = (self.sized(structure) for structure in structures)
        ranked = sorted(self.estimated(one) for one in found if one is not None)
        nodes = [node for node in ranked[: self.options.num_starts] if node.time_s < most_s]
        self.seen.update([self.image(node.found.structure) for node in nodes])
        heapify(nodes)
        self.max_work = self.done + self.own_work // part
        self.descend(Descent(nodes), self.max_work)

    @property
    def known_s(self) -> float:
        """The shortest step known before queues; infinite where nothing fits."""
        best = self.board.nearest
        return inf if best is None else best.step_time_s

    def descend(self, descent: Descent, limit: int) -> None:
        """Go on best first, until the work is done or nothing left comes near."""
        heap, alone = descent.heap, descent.alone
        while heap and self.done < limit:
            node = heappop(heap)
            best = descent.best
            # Alone, a descent is measured by its own best.
            best_s = self.best_s if not alone else inf if best is None else best.time_s
            if node.time_s > self.options.slack * best_s:
                heappush(heap, node)
                break
            # One rung up the ladder: price, tune, queue; at the top the structure is expanded.
            candidate = node.candidate
            if candidate is None:
                for priced in self.price(node):
                    heappush(heap, priced)
            elif not node.tuned:
                heappush(heap, self.tune(node, candidate))
            elif not node.queued:
                heappush(heap, self.queued(node, candidate))
            else:
                if best is None or node < best:
                    descent.best = node
                self.keep(node)
                self.expand(node, self.moved(node), heap)

    def keep(self, node: Climber) -> None:
        """Keep a structure at the top of the ladder, if among the fastest."""
        ranked = sorted([*self.fastest, node])
        # Reversed, so that of equal images the fastest stays.
        best = {self.image(one.found.structure): one for one in reversed(ranked)}
        self.fastest = sorted(best.values())[: self.options.num_tuned]

    def moved(self, node: Climber) -> Iterable[Structure]:
        """Return the structures one move away; none where it was asked before."""
        own = self.image(node.found.structure)
        if own in self.expanded_of or not self.options.moves:
            return ()
        self.expanded_of.add(own)
        return neighbours(self.problem, node.found.structure, self.completer.shape)

    def expand(self, node: Climber, structures: Iterable[Structure], heap: list[Climber]) -> None:
        """Put the most promising of the structures that a node leads to on the heap."""
        if node.candidate is None:
            return
        # Complete each new structure that the node leads to.
        image, size = self.image, node.found.filled[0].size
        ranked: list[tuple[float, int, Hashable, Completion]] = []
        for number, structure in enumerate(structures):
            key = image(structure)
            if key in self.seen:
                continue
            if self.done > self.max_work:
                break
            self.work += sum(map(len, structure))
            found = self.completer.complete(structure, size)
            # With equal parts of the states it does not fit; by free memory it may.
            if found is None and node.found.optimizer_shares is not None:
                found = by_room(self.completer, structure, size)
            if found is not None:
                ranked.append((found.quick_s, number, key, found))
        # Order by quick seconds, then by an estimate of the exchange for the nearest.
        ranked.sort(key=lambda entry: entry[:2])
        cost = node.candidate.cost
        # What the estimate misses of the node's own exchange is missed of its neighbours' too.
        own_tail_s = cost.gradient_sync_s + cost.update_s
        tail_s = own_tail_s - self.tails.estimate_s(node.found)
        limit_s = self.options.slack * node.time_s
        # What pricing showed of the node is hoped of its neighbours.
        hope = node.time_s / (node.quick_s + own_tail_s)
        near: list[tuple[float, int, Hashable, Completion]] = []
        for quick_s, number, key, found in ranked:
            if quick_s * hope > limit_s or len(near) > _MAX_ESTIMATED:
                break
            self.work += 2
            least_s = quick_s + max(cost.update_s, tail_s + self.tails.estimate_s(found))
            near.append((least_s, number, key, found))
        ranked = sorted(near, key=lambda entry: entry[:2])
        # The best few go on the heap.
        for quick_s, _, key, found in ranked[: self.options.num_whole]:
            # Two moves may lead to the same structure.
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
