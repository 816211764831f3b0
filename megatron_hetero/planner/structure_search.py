"""One search over structures: best first, each priced more closely only while it can win.

A structure says which GPUs form which stages of which replicas; its layers, recompute, micro-batch
size, launch counts and shares of the batch follow (`completion`).  The search starts from the
structures that other strategies left on the board: the loop (`loop`) goes on from each of them
alone, then from all together.  What no move of the loop leads to comes after it: sequences divided
and stages joined, whose shares take long to find, and other settings of the fastest, which change
their order by little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heapify
from itertools import chain
from math import inf

from megatron_hetero.cost.choices import may_mix_sizes
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.optimizer_shares import by_room
from megatron_hetero.planner.completion.unlike_sizes import mixed
from megatron_hetero.planner.evaluate.candidate import NEAR
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import THOROUGH, Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.loop import MAX_ESTIMATED, PART, Descent, Loop, SearchLimits
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.moves.unlike_groups import in_unlike_parts, joined
from megatron_hetero.planner.oracle.structures import all_structures
from megatron_hetero.planner.seeds.divided import divided_structures
from megatron_hetero.planner.seeds.starts import promising
from megatron_hetero.planner.units import Structure, chains_of, layers_of

_FEW_DIVIDED = 32
"""Structures with divided sequences that are completed, if another structure fits."""
_FEW_GPUS = 4
"""GPUs up to which every structure with divided sequences is looked at."""
_NUM_CHANGED = 3
"""Fastest structures of which a single stage divides sequences, or of which stages are joined into
groups of unequal shares."""
_ROUNDS = 3
"""Rounds of descents from single starts; the better half goes on, with twice the work."""


class StructureSearch:
    """See the module."""

    name = "structures"

    def __init__(self, limits: SearchLimits | None = None, effort: int = 1) -> None:
        """`effort`: so many times the work."""
        limits = SearchLimits() if limits is None else limits
        self.limits = replace(
            limits,
            max_work=effort * limits.max_work,
            work_per_gpu=effort * limits.work_per_gpu,
        )

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`; does nothing where senders wait for receivers."""
        if not board.problem.workload.training.waits_for_receivers:
            Phases(Loop(Rungs(board), self.limits)).run()


class Phases:
    """The descents from single starts, the common loop, and what comes after it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.rungs = loop.rungs
        self.problem = loop.problem

    def run(self) -> None:
        limits = self.loop.limits
        chosen = promising(
            self.rungs.board,
            self.rungs.tails,
            self.rungs.sized,
            self.rungs.image,
            self.rungs.kind_of if limits.moves else {},
            limits.num_starts,
        )
        self.loop.seen.update(chosen)
        starts = [self.rungs.estimated(start) for start in chosen.values()]
        # Half of the work is kept for the descent of all together.
        half = self.loop.max_work // 2
        # In the largest clusters a price takes a good part of the work.
        price, rungs = self.rungs.price, self.rungs
        priced = [price(start) if rungs.done < half else [start] for start in starts]
        heap = self.narrowed(priced)
        heapify(heap)
        self.loop.descend(Descent(heap), self.loop.max_work)
        if limits.moves:
            self.divide()
            self.join()
        # Thorough tuning of the fastest, within its own part of the work.
        most = self.rungs.done + self.loop.own_work // PART
        for node in self.loop.fastest:
            if self.rungs.done < most:
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
        work = (self.loop.max_work // 2 - self.rungs.done) // _ROUNDS
        for _ in range(_ROUNDS):
            most = self.rungs.done + work
            for descent in descents:
                if self.rungs.done < most:
                    self.loop.descend(descent, self.rungs.done + work // len(descents))
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
        others = [by_room(self.rungs.completer, found.structure, found.filled[0].size)]
        if may_mix_sizes(self.problem.costs):
            others.append(mixed(self.rungs.completer, found))
        new = [other for other in others if other is not None and other is not found]
        varied = [one for other in new for one in self.rungs.priced(node, other)]
        for one in (node, *varied):
            if one.candidate is not None:
                tuned = self.rungs.tune(one, one.candidate, THOROUGH)
                if tuned.candidate is not None and tuned < node:
                    self.rungs.queued(tuned, tuned.candidate)

    def divide(self) -> None:
        """Go on from structures that divide sequences: of a few GPUs from each that there is."""
        problem, loop = self.problem, self.loop
        if not problem.divides_sequences:
            return
        if problem.num_gpus <= _FEW_GPUS:
            divided, slack = all_structures(problem, divided=True), loop.limits.slack
        else:
            # With something that fits, divided sequences get a small part of the work.
            most = MAX_ESTIMATED if loop.known_s == inf else _FEW_DIVIDED
            divided, slack = iter(divided_structures(problem, loop.known_s, most)), NEAR
        loop.go_on_from(chain(divided, in_unlike_parts(problem)), slack)
        # Grids divide all stages; the fastest structures may gain by a single one.
        shape = self.rungs.completer.shape
        self.change(lambda own: neighbours(problem, own.structure, shape, divided=True))

    def change(self, moves: Callable[[Completion], Iterable[Structure]]) -> None:
        """Go on from what some moves make of the fastest."""
        heap: list[Climber] = []
        self.loop.max_work = self.rungs.done + self.loop.own_work // PART
        for node in self.loop.fastest[:_NUM_CHANGED]:
            self.loop.expand(node, moves(node.found), heap)
        self.loop.descend(Descent(heap), self.loop.max_work)

    def join(self) -> None:
        """Go on from structures with groups of unlike shares, made of the fastest; where nothing
        fits, of what lacks memory."""
        shape = self.rungs.completer.shape
        self.change(lambda own: joined(self.problem, own.structure, own.layers, shape))
        lacking = self.rungs.board.out_of_memory.fastest if self.loop.known_s == inf else ()
        self.loop.go_on_from(
            structure
            for one in lacking[:_NUM_CHANGED]
            for structure in joined(
                self.problem, tuple(chains_of(one.placement)), layers_of(one.placement), shape
            )
        )
