"""Structures of one search on the rungs of the ladder: completed, priced, tuned, simulated."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import inf

from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.optimizer_shares import by_room
from megatron_hetero.planner.division.counts import WORTH
from megatron_hetero.planner.evaluate.candidate import NEAR, Candidate, is_plain
from megatron_hetero.planner.evaluate.canonical import arranged
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rescore import SHORT, Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.tail import Tails
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.shapes.kinds import kinds_of
from megatron_hetero.planner.units import Chain, Structure
from megatron_hetero.rounding import ranked

_TUNING, THOROUGH = 30_000, 300_000
"""Limits in operations of the recurrence, of a quick and of a thorough tuning."""


_Outline = tuple[int, Chain, list[tuple[str, int]]]
"""What tells chains apart: a number of its shape, the chain, and the node and kind of each part."""


class Rungs:
    """The means to raise structures of one board up the ladder; counts the work, in units of about
    10 microseconds.

    `shards`: with sharded layers, and only structures that may have some.  `dealt_by`: as of
    `Completer`.
    """

    def __init__(
        self,
        board: Scoreboard,
        *,
        shards: bool = False,
        dealt_by: TokenDispatcher | None = None,
    ) -> None:
        self.board = board
        self.kind_of = {
            node.name: k for k, kind in enumerate(kinds_of(board.problem)) for node in kind.nodes
        }
        self.problem = board.problem
        self.completer = Completer(board.problem, shards=shards, dealt_by=dealt_by)
        self.rescorer = Rescorer(board)
        self.tails = Tails(board.problem)
        self._num_kinds = 1 + max(self.kind_of.values(), default=0)
        self._outlines: dict[int, _Outline] = {}
        """By the identity of chains, which are kept in them."""
        self.work = 0
        self.best_s = inf
        """The shortest step, with queues, of the structures that were simulated."""
        self.num = 0

    @property
    def done(self) -> int:
        """Work so far."""
        return self.work + self.completer.work

    def sized(self, structure: Structure) -> Completion | None:
        """Complete it at the best of all sizes."""
        return next(iter(self.sizes(structure)), None)

    def sizes(self, structure: Structure) -> list[Completion]:
        """Complete the structure at the best micro-batch size, and at a second size as good; if no
        size fits, at each with the optimizer's states divided by free memory: the smaller, the more
        equal their parts, which the exchange tells."""
        sizes = self.completer.sizes(len(structure))
        found = [one for size in sizes if (one := self.completer.complete(structure, size))]
        # Sharded layers and dealt experts have completions of their own.
        if not found and not self.completer.shards and self.completer.dealt_by is None:
            found = [one for size in sizes if (one := by_room(self.completer, structure, size))]
        found.sort(key=lambda completion: ranked(completion.quick_s))
        if found and found[0].optimizer_shares is not None:
            return found
        # A second size nearly as good may win once it is priced.
        return [one for one in found[:2] if one.quick_s < 1.05 * found[0].quick_s]

    def estimated(self, found: Completion) -> Climber:
        """Return the first rung of a structure that no move led to; of experts that are dealt out
        without their exchange, which is another than `Tails` estimates."""
        self.num += 1
        tail_s = self.tails.estimate_s(found) if self.completer.dealt_by is None else 0.0
        return Climber((Standing(), found.quick_s + tail_s), self.num, found, None)

    def price(self, estimated: Climber) -> list[Climber]:
        """Price it whole, as completed and as the flags say."""
        found = estimated.found
        own = self.completer.own_size
        nodes: list[Climber] = []
        # The job's own flags may win too: they need no plug-in.
        options = self.sizes(found.structure) or [found]
        given = self.completer.complete(found.structure, own, given=True)
        if given is not None and given.quick_s < NEAR * options[0].quick_s:
            options.append(given)
        for option in options:
            nodes += self.priced(estimated, option)
        return nodes

    def priced(self, estimated: Climber, found: Completion) -> list[Climber]:
        """Return the node of a completion, if it fits; on less crowded paths it waits less."""
        candidate = self.candidate(found)
        if candidate is None:
            return []
        self.num += 1
        gain, contention = estimated.gain, candidate.contention
        # Queues grow with contention, so that a quieter path waits in proportion less.
        wait = 1.0
        if estimated.contention:
            wait += (estimated.wait - 1) * min(1.0, contention / estimated.contention)
        standing, time_s = candidate.coarse_key
        key = standing, time_s * gain * wait
        quick_s = found.quick_s
        return [Climber(key, self.num, found, candidate, gain, wait, contention, quick_s=quick_s)]

    def tune(self, node: Climber, before: Candidate, max_work: int = _TUNING) -> Climber:
        """Return the node with its pipelines tuned."""
        found = self.completer.tune(node.found, max_work)
        # Nothing was tuned: the price stays as it is.
        if found is node.found:
            return replace(node, tuned=True)
        candidate = self.candidate(found)
        # Tuning by the recurrence may lose by the whole price: then the node stays.
        if candidate is None or before.key < candidate.key:
            candidate = before
        self.num += 1
        gain = candidate.step_time_s / before.step_time_s
        standing, time_s = candidate.coarse_key
        key = standing, time_s * node.wait
        return replace(
            node,
            key=key,
            number=self.num,
            found=found,
            candidate=candidate,
            gain=gain,
            tuned=True,
        )

    def queued(self, node: Climber, candidate: Candidate) -> Climber:
        """Return the node with queues on shared paths, by events; its pipelines launch further
        ahead while that shortens the step."""
        simulated = self.simulated(candidate)
        for further in self.rescorer.further_ahead(candidate):
            # Further launches can at best reach the step without queues, which has to be worth it.
            if not candidate.step_time_s < min(simulated.step_time_s, self.best_s) * WORTH:
                break
            other = self.simulated(further)
            if not other.key < simulated.key:
                break
            candidate, simulated = further, other
        wait = simulated.step_time_s / candidate.step_time_s
        key = simulated.coarse_key
        self.best_s = min(self.best_s, key[1])
        self.num += 1
        return replace(
            node,
            key=key,
            number=self.num,
            candidate=candidate,
            wait=wait,
            contention=candidate.contention,
            queued=True,
        )

    def simulated(self, candidate: Candidate) -> Candidate:
        """Return it with queues, of long steps by a part; the board keeps both.  Other prices know
        no queues."""
        if not self.problem.costs.has_variants:
            return candidate
        # Each simulated message takes about two units of work.
        self.work += 2 * min(self.rescorer.num_messages(candidate), SHORT)
        simulated = self.rescorer.with_part_of_queues(candidate, SHORT)
        self.board.keep_simulated(candidate, simulated)
        return simulated

    def candidate(self, found: Completion) -> Candidate | None:
        """Price it whole."""
        board = self.board
        placement = found.placement(self.completer.own_size)
        self.work += 25 * sum(map(len, found.structure))
        # Plain placements go through the board, which keeps them in one form.
        if is_plain(placement):
            candidate = board.score_with_counts(placement, "structures")
        else:
            cost = board.whole_cost(placement)
            placement, rank_order = arranged(placement, self.problem.gpus)
            candidate = board.keep_refined(placement, cost, "structures", rank_order)
        return candidate

    def image(self, structure: Structure) -> Hashable:
        """Return equal for structures in which like nodes are exchanged as a whole."""
        numbers: dict[str, int] = {}
        counts = [0] * self._num_kinds
        image: list[int] = []
        # Structures share chains, which are known by identity: quicker than by the names in them.
        known = self._outlines.get
        outlines = [known(id(chain)) or self._outline(chain) for chain in structure]
        # Chains of one shape are neighbours, whatever their nodes are called.
        outlines.sort()
        for shape, _, nodes in outlines:
            # No node has a number below zero.
            image.append(-1 - shape)
            for node, kind in nodes:
                # Nodes are numbered as they come, within their kind.
                number = numbers.get(node)
                if number is None:
                    counts[kind] += 1
                    number = numbers[node] = counts[kind] * self._num_kinds + kind
                image.append(number)
        return tuple(image)

    def _outline(self, chain: Chain) -> _Outline:
        nodes = [(node, self.kind_of[node]) for unit in chain for node, _ in unit.parts]
        made = self._outlines[id(chain)] = self.completer.shape(chain), chain, nodes
        return made
