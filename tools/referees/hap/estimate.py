"""What is left of a program takes at least so long, on each GPU: the estimate of A*.

A GPU that never waits for others does the steps that remain, and the collectives.  Of that the
least is found exactly, for each part of the graph by itself: a step and the collectives on its
inputs belong to one part, tensors that other parts make or read are there in every state, and each
GPU may follow rules of its own.  So the sum over the parts is no more than any program takes, and
going on by a step never takes off more than that step takes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tools.referees.hap.prices import ProgramPrices, Shares, after_turn
from tools.referees.hap.states import Held, Rule, State

There = frozenset[tuple[Held, bool]]
"""What is there, and whether a collective made it."""
Vector = tuple[float, ...]


class Estimate:
    """The estimate at one price list and shares.

    Args:
        prices: of the steps on the group.
        shares: of its GPUs.
        rules: of each step, that programs may follow.
    """

    def __init__(
        self, prices: ProgramPrices, shares: Shares, rules: Sequence[Sequence[Rule]]
    ) -> None:
        every = frozenset(step.name for step in prices.graph.steps)
        self._parts = [
            _ClockBound(prices, shares, rules, names) for names in prices.graph.parts or (every,)
        ]

    def rest_s(self, index: int, there: There) -> Vector | None:
        """Return the seconds that are left on each GPU at least; None where nothing leads on.

        Args:
            index: of the next step.
            there: the tensors that are there.
        """
        found = [part.rest_s(index, part.of(there)) for part in self._parts]
        own = [vector for vector in found if vector is not None]
        if len(own) < len(found):
            return None
        return tuple([sum(of) for of in zip(*own, strict=True)])


class _ClockBound:
    def __init__(
        self,
        prices: ProgramPrices,
        shares: Shares,
        rules: Sequence[Sequence[Rule]],
        names: frozenset[str],
    ) -> None:
        self._prices, self._shares, self._rules = prices, shares, rules
        self._steps = prices.graph.steps
        self._owned = [not step.computes or step.name in names for step in self._steps]
        self._tracked = {
            tensor
            for step, owned in zip(self._steps, self._owned, strict=True)
            if owned
            for rule in step.rules
            for tensor, _ in rule.makes
        }
        # What two parts read is brought into a state once, for both.
        self._tracked -= {
            tensor
            for step, owned in zip(self._steps, self._owned, strict=True)
            if not owned
            for tensor in step.reads
        }
        # What only steps of other parts read is not told apart.
        self._read: list[set[str]] = [set()]
        for step, owned in zip(reversed(self._steps), reversed(self._owned), strict=True):
            self._read.append(self._read[-1] | (step.reads & self._tracked if owned else set()))
        self._read.reverse()
        self._found: dict[tuple[int, There], Vector | None] = {}
        self._ways: dict[tuple[Held, tuple[State, ...]], tuple[float, tuple[Held, ...]]] = {}
        self._step_s = {
            (step.name, rule.division): prices.step_s(step.name, rule.division, shares)
            for step, own in zip(self._steps, rules, strict=True)
            for rule in own
        }
        self._nothing = (0.0,) * prices.num_gpus

    def of(self, there: There) -> There:
        """Return what of this part is there."""
        return frozenset(item for item in there if item[0][0] in self._tracked)

    def rest_s(self, index: int, there: There) -> Vector | None:
        while index < len(self._steps) and not self._owned[index]:
            index += 1
        if index == len(self._steps):
            return self._nothing
        there = frozenset(item for item in there if item[0][0] in self._read[index])
        key = index, there
        if key not in self._found:
            self._found[key] = self._least(index, there)
        return self._found[key]

    def _least(self, index: int, there: There) -> Vector | None:
        step, best = self._steps[index], None
        for rule in self._rules[index]:
            held, sent_s = dict(there), 0.0
            for need in rule.needs:
                if need in held or need[0] not in self._tracked:
                    continue
                states = tuple([state for tensor, state in held if tensor == need[0]])
                if (need, states) not in self._ways:
                    self._ways[need, states] = self._shortest(need, held)
                way_s, made = self._ways[need, states]
                if not made:
                    break
                sent_s += way_s
                held.update(dict.fromkeys(made, True))
            else:
                if step.is_turn:
                    held = after_turn(held, step)
                held.update(dict.fromkeys(rule.makes, False))
                rest = self.rest_s(index + 1, frozenset(held.items()))
                if rest is None:
                    continue
                own = self._step_s[step.name, rule.division]
                total = tuple([sent_s + a + b for a, b in zip(own, rest, strict=True)])
                best = total if best is None else tuple(map(min, best, total))
        return best

    def _shortest(self, need: Held, there: Collection[Held]) -> tuple[float, tuple[Held, ...]]:
        """Return the seconds of the shortest way to a state, and what it leaves; nothing where
        there is none."""
        found = [
            (
                sum([self._prices.collective_s(one, self._shares) for one in way]),
                tuple([(one.name, one.state) for one in way]),
            )
            for way in self._prices.graph.ways(need, there)
        ]
        return min(found, default=(0.0, ()))
