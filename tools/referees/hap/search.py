"""The fastest program of a layer at given shares, by A*.

A node is a step that comes next, and the tensors that are there, each in its states.  From a node
each rule of the step leads on, once the collectives have run that bring its inputs into the states
that it needs (`Graph.ways`).  GPUs that are ahead carry their lead to the next collective, and
memory is limited, so of two ways to one node both are kept unless one is no worse on every GPU, in
seconds and in bytes.

What is left is estimated from below (`estimate`), so the first program that comes out of the queue
is the fastest.  (HAP's released code has 0 in the estimate's place.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from itertools import count

from megatron_hetero.rounding import at_most
from tools.referees.hap.estimate import Estimate, There
from tools.referees.hap.prices import (
    ProgramPrices,
    Shares,
    after_turn,
)
from tools.referees.hap.states import (
    Held,
    Instruction,
    LayerProgram,
    Rule,
    Step,
)

Allowed = Callable[[Step, Rule], bool]
"""Whether a program may follow a rule."""


@dataclass(frozen=True)
class FastestProgram:
    """The fastest program, its seconds, and how many nodes the search went on from."""

    program: LayerProgram
    seconds: float
    num_expanded: int


@dataclass(frozen=True, slots=True)
class _SearchNode:
    index: int
    there: There
    clocks: tuple[float, ...]
    taken: tuple[float, ...]
    before: _SearchNode | None = None
    by: Instruction | None = None

    @property
    def program(self) -> LayerProgram:
        found, node = [], self
        while node.by is not None and node.before is not None:
            found.append(node.by)
            node = node.before
        return tuple(reversed(found))


class ProgramSearch:
    """The search at one price list and shares.

    Args:
        prices: of the steps on the group.
        shares: of its GPUs.
        allowed: which rules programs may follow; None is all.
        estimates: False leaves the estimate at 0, as the released code does.
    """

    def __init__(
        self,
        prices: ProgramPrices,
        shares: Shares,
        allowed: Allowed | None = None,
        *,
        estimates: bool = True,
    ) -> None:
        self._prices, self._shares, self._graph = prices, shares, prices.graph
        steps = prices.graph.steps
        self._rules = [
            [rule for rule in step.rules if allowed is None or allowed(step, rule)]
            for step in steps
        ]
        self._rule_s = [
            [prices.step_s(step.name, rule.division, shares) for rule in rules]
            for step, rules in zip(steps, self._rules, strict=True)
        ]
        self._read: list[frozenset[str]] = [frozenset()]
        for step in reversed(steps):
            self._read.append(self._read[-1] | step.reads)
        self._read.reverse()
        self._estimate = Estimate(prices, shares, self._rules) if estimates else None
        self._collective_s: dict[Instruction, float] = {}

    def best(self) -> FastestProgram | None:
        """Return the fastest program that fits; None where none does."""
        order, queue = count(), list[tuple[float, int, int, _SearchNode]]()
        none = (0.0,) * self._prices.num_gpus
        start = _SearchNode(0, frozenset(), none, none)
        heappush(queue, (0.0, 0, next(order), start))
        seen: dict[tuple[int, There], list[tuple[float, ...]]] = {}
        num_expanded = 0
        while queue:
            bound, _, _, node = heappop(queue)
            if node.index == len(self._graph.steps):
                return FastestProgram(node.program, bound, num_expanded)
            own = (*node.clocks, *node.taken)
            kept = seen.setdefault((node.index, node.there), [])
            if any(_no_worse(other, own) for other in kept):
                continue
            kept.append(own)
            num_expanded += 1
            for further in self._further(node):
                further_s = self._bound(further)
                if further_s is not None:
                    # Of equal bounds the one that is further on.
                    heappush(queue, (further_s, -further.index, next(order), further))
        return None

    def _bound(self, node: _SearchNode) -> float | None:
        if self._estimate is None:
            return max(node.clocks)
        rest_s = self._estimate.rest_s(node.index, node.there)
        return None if rest_s is None else max(_sum(node.clocks, rest_s))

    def _further(self, node: _SearchNode) -> Iterator[_SearchNode]:
        """Yield the nodes behind the next step, one for each rule: what it needs comes in the way
        that lets all GPUs go on soonest, for all ways leave the same behind them."""
        step = self._graph.steps[node.index]
        for rule, seconds in zip(self._rules[node.index], self._rule_s[node.index], strict=True):
            ready: _SearchNode | None = node
            for need in rule.needs:
                if ready is not None:
                    ready = self._with(ready, need)
            further = None if ready is None else self._done(ready, step, rule, seconds)
            if further is not None:
                yield further

    def _with(self, node: _SearchNode, need: Held) -> _SearchNode | None:
        """Return the node at which a tensor is there in a state; None where no way leads there."""
        held = dict(node.there)
        if need in held:
            return node
        ways = self._graph.ways(need, held)
        ends = [reduce(self._sent, way, node) for way in ways]
        return min(ends, key=lambda end: end.clocks, default=None)

    def _sent(self, node: _SearchNode, instruction: Instruction) -> _SearchNode:
        """Return the node behind a collective."""
        made = node.there | {((instruction.name, instruction.state), True)}
        clocks = self._after(node.clocks, instruction)
        return _SearchNode(node.index, made, clocks, node.taken, node, instruction)

    def _done(
        self,
        node: _SearchNode,
        step: Step,
        rule: Rule,
        seconds: tuple[float, ...],
    ) -> _SearchNode | None:
        """Return the node behind a step; None where it does not fit."""
        prices, taken, further = self._prices, node.taken, self._read[node.index + 1]
        there = dict(node.there)
        if step.is_turn:
            there = after_turn(there, step)
            for one in there:
                if one[0] in further:
                    taken = _sum(taken, prices.bytes_of(one, False, self._shares))
        stored = (step.name, rule.division)
        if not step.computes and stored in prices.stored_bytes:
            taken = _sum(taken, prices.bytes_of(stored, True, self._shares))
        if not all(at_most(t, r) for t, r in zip(taken, prices.room_bytes, strict=True)):
            return None
        there = {**there, **dict.fromkeys(rule.makes, False)}
        left = frozenset(item for item in there.items() if item[0][0] in further)
        instruction = Instruction(
            "compute" if step.computes else "demand", step.name, rule.division
        )
        return _SearchNode(
            node.index + 1, left, _sum(node.clocks, seconds), taken, node, instruction
        )

    def _after(self, clocks: tuple[float, ...], instruction: Instruction) -> tuple[float, ...]:
        """Return the clocks of all GPUs behind a collective."""
        if instruction not in self._collective_s:
            seconds = self._prices.collective_s(instruction, self._shares)
            self._collective_s[instruction] = seconds
        seconds = self._collective_s[instruction]
        if instruction.kind == "slice":
            return clocks
        if self._prices.is_summed_once(instruction):
            return tuple([clock + seconds for clock in clocks])
        return (max(clocks) + seconds,) * len(clocks)


def _sum(one: tuple[float, ...], other: tuple[float, ...] | list[float]) -> tuple[float, ...]:
    return tuple([a + b for a, b in zip(one, other, strict=True)])


def _no_worse(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
