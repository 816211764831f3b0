"""The linear programme of shares: exact answers, and nothing near is better."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from megatron_hetero.cluster.node_links import Link
from tests.referees.hap.random_prices import random_graph, random_prices, random_shares
from tools.referees.hap.prices import (
    ProgramPrices,
    Shares,
    program_bytes,
    program_s,
)
from tools.referees.hap.search import ProgramSearch
from tools.referees.hap.shares import best_shares
from tools.referees.hap.states import Graph, LayerProgram, operator


def one_operator(room: tuple[float, float]) -> tuple[ProgramPrices, LayerProgram]:
    """One operator that takes 0.1 s and 3 s on the first GPU, 0.2 s and 1 s on the second, and
    whose weights take 10 bytes."""
    step = operator("work", {}, {"A": "t"})
    graph = Graph(
        (
            replace(step, name="weights", computes=False, rules=(_columns("W"),)),
            replace(step, rules=(_columns("A"),)),
        ),
        {"A": "c", "W": "c"},
    )
    prices = ProgramPrices(
        graph,
        {("work", "columns"): ((0.1, 3.0), (0.2, 1.0))},
        {},
        Link(1.0, 0.0),
        (0.0, 0.0),
        stored_bytes={("weights", "columns"): (1.0, 10.0)},
        room_bytes=room,
    )
    found = ProgramSearch(replace(prices, room_bytes=(inf, inf)), {"columns": (0.5, 0.5)}).best()
    assert found is not None
    return prices, found.program


def _columns(tensor: str):  # type: ignore[no-untyped-def]
    from tools.referees.hap.states import Rule

    return Rule("columns", (), ((tensor, "columns"),))


@pytest.mark.parametrize(
    ("room", "share"),
    [
        # 0.1 + 3 x = 0.2 + 1 - x
        ((inf, inf), 0.275),
        # of the second at most 1 + 10 y = 5
        ((inf, 5.0), 0.6),
    ],
)
def test_constants_and_memory_count(room: tuple[float, float], share: float) -> None:
    prices, program = one_operator(room)
    found = best_shares(program, prices, {"columns": (0.5, 0.5)})
    assert found is not None
    assert found["columns"] == pytest.approx((share, 1 - share))


def test_no_shares_where_memory_is_too_short() -> None:
    prices, program = one_operator((4.0, 5.0))
    assert best_shares(program, prices, {"columns": (0.5, 0.5)}) is None


def test_least_shares_and_fixed_ones_are_kept() -> None:
    prices, program = one_operator((inf, inf))
    start: Shares = {"columns": (0.5, 0.5)}
    least = best_shares(program, prices, start, least={"columns": 0.4})
    assert least is not None
    assert least["columns"] == pytest.approx((0.4, 0.6))
    assert best_shares(program, prices, start, fixed=("columns",)) == start


def test_no_shares_near_are_faster() -> None:
    """On random programs: it fits, is no slower than the shares it began with, and than shares a
    little away from it."""
    tried = 0
    for seed in range(40):
        rng = Random(seed)
        count = rng.randint(2, 3)
        graph = random_graph(rng, rng.randint(2, 6))
        prices, start = random_prices(rng, graph, count), random_shares(rng, count)
        program = ProgramSearch(prices, start).best()
        if program is None:
            continue
        found = best_shares(program.program, prices, start)
        assert found is not None
        best_s = program_s(program.program, prices, found)
        assert best_s <= program.seconds * (1 + 1e-7)
        assert _fits(program.program, prices, found, 1e-6)
        for _ in range(20):
            near = {d: _near(rng, own) for d, own in found.items()}
            if _fits(program.program, prices, near, 0.0):
                tried += 1
                assert program_s(program.program, prices, near) >= best_s * (1 - 1e-6)
    assert tried > 100


def _fits(program: LayerProgram, prices: ProgramPrices, shares: Shares, slack: float) -> bool:
    taken = program_bytes(program, prices, shares)
    return all(t <= room * (1 + slack) for t, room in zip(taken, prices.room_bytes, strict=True))


def _near(rng: Random, shares: tuple[float, ...]) -> tuple[float, ...]:
    moved = [max(0.0, share + rng.uniform(-0.03, 0.03)) for share in shares]
    return tuple(share / sum(moved) for share in moved)
