"""The fastest program of a layer at given shares, by A*.

A node is a step that comes next, and the tensors that are there, each in its states.  From a node
one rule of the step leads on, or a collective on one of the step's inputs.  GPUs that are ahead
carry their lead to the next collective, and memory is limited, so of two ways to one node both are
kept unless one is no worse on every GPU, in seconds and in bytes.

The estimate of what is left: each GPU does all steps that remain, each under the rule that takes
this GPU the least, and nothing is sent.  No program is faster, and going on never lowers what was
reached plus estimate, so the first program that comes out of the queue is the fastest.  (HAP's
released code has 0 in its place.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from megatron_hetero.planner.synthesis.prices import (
    ProgramPrices,
    Shares,
    after_turn,
)
from megatron_hetero.planner.synthesis.states import (
    Held,
    Instruction,
    LayerProgram,
    Rule,
    Step,
)

Allowed = Callable[[Step, Rule], bool]
"""Whether a program may follow a rule."""
_There = frozenset[tuple[Held, bool]]
"""What is there, and whether a collective made it."""
_SLACK = 1e-12


@dataclass(frozen=True)
class FastestProgram:
    """The fastest program, its seconds, and how many nodes the search went on from."""

    program: LayerProgram
    seconds: float
    num_expanded: int


@dataclass(frozen=True, slots=True)
class _Node:
    index: int
    there: _There
    clocks: tuple[float, ...]
    taken: tuple[float, ...]
    before: _Node | None = None
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
        rest = [(0.0,) * prices.num_gpus]
        for step, seconds in zip(reversed(steps), reversed(self._rule_s), strict=True):
            self._read.append(self._read[-1] | step.reads)
            least = [min(of) for of in zip(*seconds, strict=True)] or [0.0] * prices.num_gpus
            rest.append(_sum(rest[-1], least) if estimates else rest[-1])
        self._read.reverse()
        rest.reverse()
        self._rest = rest
        self._collective_s: dict[Instruction, float] = {}

    def best(self) -> FastestProgram | None:
        """Return the fastest program that fits; None where none does."""
        order, queue = count(), list[tuple[float, int, int, _Node]]()
        none = (0.0,) * self._prices.num_gpus
        start = _Node(0, frozenset(), none, none)
        heappush(queue, (self._bound(start), 0, next(order), start))
        seen: dict[tuple[int, _There], list[tuple[float, ...]]] = {}
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
                # Of equal bounds the one that is further on.
                entry = self._bound(further), -further.index, next(order), further
                heappush(queue, entry)
        return None

    def _bound(self, node: _Node) -> float:
        return max(_sum(node.clocks, self._rest[node.index]))

    def _further(self, node: _Node) -> Iterator[_Node]:
        step = self._graph.steps[node.index]
        held = dict(node.there)
        for rule, seconds in zip(self._rules[node.index], self._rule_s[node.index], strict=True):
            if all(need in held for need in rule.needs):
                further = self._done(node, step, rule, held, seconds)
                if further is not None:
                    yield further
        for one in sorted(held):
            if one[0] not in step.reads:
                continue
            for kind, state in self._graph.conversions(one):
                if (one[0], state) not in held:
                    instruction = Instruction(kind, one[0], state, one[1])
                    made = node.there | {((one[0], state), True)}
                    clocks = self._after(node.clocks, instruction)
                    yield _Node(node.index, made, clocks, node.taken, node, instruction)

    def _done(
        self,
        node: _Node,
        step: Step,
        rule: Rule,
        held: dict[Held, bool],
        seconds: tuple[float, ...],
    ) -> _Node | None:
        """Return the node behind a step; None where it does not fit."""
        prices, taken, further = self._prices, node.taken, self._read[node.index + 1]
        there = held
        if step.is_turn:
            there = after_turn(held, step)
            for one in there:
                if one[0] in further:
                    taken = _sum(taken, prices.bytes_of(one, False, self._shares))
        stored = (step.name, rule.division)
        if not step.computes and stored in prices.stored_bytes:
            taken = _sum(taken, prices.bytes_of(stored, True, self._shares))
        if any(t > r * (1 + _SLACK) for t, r in zip(taken, prices.room_bytes, strict=True)):
            return None
        there = {**there, **dict.fromkeys(rule.makes, False)}
        left = frozenset(item for item in there.items() if item[0][0] in further)
        instruction = Instruction(
            "compute" if step.computes else "demand", step.name, rule.division
        )
        return _Node(node.index + 1, left, _sum(node.clocks, seconds), taken, node, instruction)

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
