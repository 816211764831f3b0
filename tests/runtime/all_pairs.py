"""All-pairs selection: few cases in which every pair of values of two factors occurs.

A greedy form of AETG (Cohen, Dalal, Fredman, Patton: The AETG System, IEEE TSE 23(7), 1997): each
case begins with a pair that no case has yet, and takes for every other factor the value that adds
most new pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Choice = tuple[str, str]
"""A factor and one of its values."""
Pair = tuple[Choice, Choice]
"""In the order of the factors."""


@dataclass(frozen=True)
class Exclusion:
    """Two values that do not go together, and why."""

    first: Choice
    second: Choice
    reason: str


class Space:
    """Factors, their values, and the pairs of values that exclude each other."""

    def __init__(
        self, factors: Mapping[str, Sequence[str]], exclusions: Sequence[Exclusion]
    ) -> None:
        self.factors = {name: tuple(values) for name, values in factors.items()}
        self._order = {name: i for i, name in enumerate(self.factors)}
        self.excluded = {self.pair(e.first, e.second): e.reason for e in exclusions}
        for pair in self.excluded:
            for factor, value in pair:
                if value not in self.factors[factor]:
                    raise ValueError(f"{factor} has no value {value!r}")

    def pair(self, a: Choice, b: Choice) -> Pair:
        return (a, b) if self._order[a[0]] < self._order[b[0]] else (b, a)

    def pairs(self, first: str, second: str) -> list[Pair]:
        """All pairs of two factors, those that exclude each other too."""
        return [
            self.pair((first, a), (second, b))
            for a in self.factors[first]
            for b in self.factors[second]
        ]

    def allowed_pairs(self) -> set[Pair]:
        every = (p for a, b in combinations(self.factors, 2) for p in self.pairs(a, b))
        return {pair for pair in every if pair not in self.excluded}

    def pairs_of(self, case: Mapping[str, str]) -> set[Pair]:
        return {self.pair(a, b) for a, b in combinations(case.items(), 2)}

    def select(
        self,
        rng: random.Random,
        fixed: Callable[[int], Mapping[str, str]],
        is_possible: Callable[[Mapping[str, str]], bool],
        num_candidates: int = 12,
    ) -> Iterator[dict[str, str]]:
        """Cases without end, each the best of some candidates; all pairs come soon.

        Args:
            fixed: values that the case of a number has to have.
            is_possible: the last word on a case, for what exclusions of two cannot say.
        """
        open_pairs = self.allowed_pairs()
        number = 0
        while True:
            best: dict[str, str] | None = None
            most = tries = 0
            while best is None or tries < num_candidates:
                tries += 1
                if tries > 10_000:
                    raise ValueError(f"no case with {dict(fixed(number))} is possible")
                # What is left may be impossible beside what is fixed.
                begin = open_pairs if tries < 500 else set()
                case = self._candidate(rng, dict(fixed(number)), begin)
                if case is None:
                    continue
                gain = self._gain(case, open_pairs)
                # The last word is the dearest: it is asked for what would be the best alone.
                if (best is None or gain > most) and is_possible(case):
                    best, most = case, gain
            open_pairs -= self.pairs_of(best)
            number += 1
            yield best

    def _gain(self, case: Mapping[str, str], open_pairs: set[Pair]) -> int:
        return len(self.pairs_of(case) & open_pairs)

    def _candidate(
        self, rng: random.Random, case: dict[str, str], open_pairs: set[Pair]
    ) -> dict[str, str] | None:
        begin = sorted(p for p in open_pairs if all(case.get(f, v) == v for f, v in p))
        if begin:
            case.update(rng.choice(begin))
        if any(pair in self.excluded for pair in self.pairs_of(case)):
            return None
        rest = [name for name in self.factors if name not in case]
        rng.shuffle(rest)
        for name in rest:
            possible = [
                value
                for value in self.factors[name]
                if not any(self.pair((name, value), o) in self.excluded for o in case.items())
            ]
            if not possible:
                return None
            new = {
                value: sum(self.pair((name, value), o) in open_pairs for o in case.items())
                for value in possible
            }
            most = max(new.values())
            # Nothing new to gain: leave room for chance, so that longer runs vary everything.
            best = [v for v in possible if new[v] == most] if most else possible
            case[name] = rng.choice(best)
        return {name: case[name] for name in self.factors}
