"""A* finds the fastest program: all programs of small graphs are tried beside it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from time import perf_counter
from typing import Literal

import pytest

from tests.referees.hap.random_prices import random_graph, random_prices, random_shares
from tools.referees.hap.prices import (
    ProgramPrices,
    Shares,
    after_turn,
    program_bytes,
    program_s,
)
from tools.referees.hap.search import ProgramSearch
from tools.referees.hap.states import Held, Instruction, LayerProgram

Vector = tuple[float, ...]


def fastest_of_all(
    prices: ProgramPrices, shares: Shares, limit_s: float
) -> tuple[float, LayerProgram] | None:
    """Try every program that takes no more than a limit: every rule of every step, and every
    collective (or two, where there is no single one) for each input that is not there.  What was
    reached once with the same tensors, seconds and bytes is not gone on from again."""
    best: list[tuple[float, LayerProgram]] = []
    seen = set()
    count = prices.num_gpus

    read = [
        {t for step in prices.graph.steps[i:] for t in step.reads}
        for i in range(len(prices.graph.steps) + 1)
    ]

    def later(index: int) -> set[str]:
        return read[index]

    def ready(
        needs: list[Held], there: dict[Held, bool], clocks: Vector, done: LayerProgram
    ) -> Iterator[tuple[dict[Held, bool], Vector, LayerProgram]]:
        """Yield what is there once all needs are, one collective or two for each that is not."""
        missing = [need for need in needs if need not in there]
        if not missing:
            yield there, clocks, done
            return
        (tensor, wanted), others = missing[0], missing[1:]
        steps = [
            (held[1], kind, state)
            for held in list(there)
            if held[0] == tensor
            for kind, state in prices.graph.conversions(held)
        ]
        direct = [one for one in steps if one[2] == wanted]
        for before, kind, state in direct or steps:
            one = Instruction(kind, tensor, state, before)
            made, after = {**there, (tensor, state): True}, sent(one, clocks)
            if direct:
                yield from ready(others, made, after, (*done, one))
                continue
            for further, end in prices.graph.conversions((tensor, state)):
                if end == wanted and (tensor, state) not in there:
                    two = Instruction(further, tensor, end, state)
                    both = {**made, (tensor, end): True}
                    yield from ready(others, both, sent(two, after), (*done, one, two))

    def sent(one: Instruction, clocks: Vector) -> Vector:
        seconds = prices.collective_s(one, shares)
        if one.kind == "slice":
            return clocks
        if one.name in prices.graph.weight_gradients and one.state == "whole":
            return tuple(c + seconds for c in clocks)
        return (max(clocks) + seconds,) * count

    def go(
        index: int, there: dict[Held, bool], clocks: Vector, taken: Vector, done: LayerProgram
    ) -> None:
        limit = best[0][0] if best else limit_s
        if max(clocks) > limit:
            return
        if index == len(prices.graph.steps):
            best[:] = [(max(clocks), done)]
            return
        state = index, frozenset(there.items()), clocks, taken
        if state in seen:
            return
        seen.add(state)
        step = prices.graph.steps[index]
        for rule in step.rules:
            for held, behind, so_far in ready(list(rule.needs), there, clocks, done):
                lines = prices.compute_s.get((step.name, rule.division), ((0.0, 0.0),) * count)
                part = shares.get(rule.division, (1.0,) * count)  # type: ignore[call-overload]
                own = tuple(c + a + b * x for c, (a, b), x in zip(behind, lines, part, strict=True))
                left, bytes_ = held, taken
                if step.is_turn:
                    left = after_turn(held, step)
                    for tensor, at in left:
                        if tensor in later(index + 1):
                            size = prices.kept_bytes.get(tensor, 0.0)
                            each = shares.get(at, (1.0,) * count)  # type: ignore[call-overload]
                            bytes_ = tuple(b + size * x for b, x in zip(bytes_, each, strict=True))
                if (step.name, rule.division) in prices.stored_bytes:
                    a, b = prices.stored_bytes[step.name, rule.division]
                    bytes_ = tuple(t + a + b * x for t, x in zip(bytes_, part, strict=True))
                if any(t > room for t, room in zip(bytes_, prices.room_bytes, strict=True)):
                    continue
                made = {**left, **dict.fromkeys(rule.makes, False)}
                made = {h: copy for h, copy in made.items() if h[0] in later(index + 1)}
                kind: Literal["compute", "demand"] = "compute" if step.computes else "demand"
                one = Instruction(kind, step.name, rule.division)
                go(index + 1, made, own, bytes_, (*so_far, one))

    go(0, {}, (0.0,) * count, (0.0,) * count, ())
    return best[0] if best else None


def mismatches(
    seeds: range, most_operators: int, most_gpus: int
) -> tuple[int, int, float, float, int, int]:
    """Compare on random graphs: (mismatches, without any program, seconds of both, nodes expanded
    with the estimate and with 0)."""
    wrong = empty = 0
    own_s = all_s = 0.0
    expanded = [0, 0]
    for seed in seeds:
        rng = Random(seed)
        count = rng.randint(2, most_gpus)
        graph = random_graph(rng, rng.randint(2, most_operators))
        prices, shares = random_prices(rng, graph, count), random_shares(rng, count)
        start = perf_counter()
        found = ProgramSearch(prices, shares).best()
        own_s += perf_counter() - start
        without = ProgramSearch(prices, shares, estimates=False).best()
        start = perf_counter()
        limit = float("inf") if found is None else found.seconds * (1 + 1e-9)
        best = fastest_of_all(prices, shares, limit)
        all_s += perf_counter() - start
        if found is None or best is None or without is None:
            empty += 1
            wrong += not (found is None and best is None and without is None)
            continue
        same = pytest.approx(best[0], rel=1e-9)
        wrong += not (found.seconds == same and without.seconds == same)
        # What a program costs is said in one more place, which the linear programme follows.
        assert program_s(found.program, prices, shares) == pytest.approx(found.seconds, rel=1e-9)
        taken = program_bytes(found.program, prices, shares)
        assert all(t <= room * (1 + 1e-9) for t, room in zip(taken, prices.room_bytes, strict=True))
        expanded[0] += found.num_expanded
        expanded[1] += without.num_expanded
    return wrong, empty, own_s, all_s, *expanded


def test_no_program_is_faster_on_small_graphs() -> None:
    wrong, empty, *_ = mismatches(range(40), 5, 2)
    assert wrong == 0
    assert empty < 10


@pytest.mark.slow
def test_no_program_is_faster_on_eight_operators_and_three_gpus() -> None:
    wrong, empty, own_s, all_s, expanded, without = mismatches(range(200), 8, 3)
    print(
        f"200 graphs: A* {own_s:.2f} s, all programs {all_s:.2f} s; "
        f"{expanded} nodes, {without} with estimate 0"
    )
    assert wrong == 0
    assert empty < 50
    assert expanded < without
