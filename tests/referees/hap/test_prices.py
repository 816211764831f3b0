"""Seconds and bytes of programs by hand, and what prices of any program keep to."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.collectives import (
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)
from tests.referees.hap.random_prices import random_graph, random_prices, random_shares
from tests.referees.hap.random_programs import random_program
from tools.referees.hap.prices import (
    ProgramPrices,
    program_bytes,
    program_s,
    terms_of,
)
from tools.referees.hap.states import (
    Graph,
    Instruction,
    Rule,
    State,
    Step,
    operator,
)

LINK = Link(100.0, 0.5)
GRAPH = Graph(
    (
        Step("input", (Rule("tokens", (), (("A", "tokens"),)),), computes=False),
        operator("first", {"A": "th"}, {"B": "th"}),
        operator("second", {"B": "sh"}, {"C": "sh"}),
        Step("turn", (Rule("whole", (("C", "whole"),), ()),), computes=False, is_turn=True),
        operator("third", {"A": "th", "C": "sh"}, {"dW": "hc"}, ()),
    ),
    {"A": "th", "B": "th", "C": "th", "dW": "hc"},
    frozenset({"dW"}),
)
PRICES = ProgramPrices(
    GRAPH,
    {
        ("first", "tokens"): ((0.0, 4.0), (1.0, 8.0)),
        ("second", "whole"): ((3.0, 0.0), (2.0, 0.0)),
        ("third", "whole"): ((1.0, 0.0), (5.0, 0.0)),
    },
    {"A": 40.0, "B": 60.0, "C": 60.0, "dW": 200.0},
    LINK,
    (0.0, 0.0),
    stored_bytes={("input", "tokens"): (1.0, 10.0)},
    kept_bytes={"A": 8.0, "B": 16.0, "C": 32.0},
    room_bytes=(inf, inf),
)
PROGRAM = (
    Instruction("demand", "input", "tokens"),
    Instruction("compute", "first", "tokens"),
    Instruction("all-gather", "B", "whole", "tokens"),
    Instruction("compute", "second", "whole"),
    Instruction("demand", "turn", "whole"),
    Instruction("all-gather", "A", "whole", "tokens"),
    Instruction("compute", "third", "whole"),
)
SHARES = {"tokens": (0.75, 0.25), "columns": (0.5, 0.5), "sequences": (0.5, 0.5)}


def test_gpus_wait_for_each_other_in_every_collective() -> None:
    """3 against 3 seconds; gathered, filled up to the larger share; 3 against 2; 1 against 5."""
    gathers_s = [0.5 + 0.75 * size / 100 for size in (60, 40)]
    assert program_s(PROGRAM, PRICES, SHARES) == pytest.approx(3 + 3 + 5 + sum(gathers_s))
    # Nobody waits within a segment: the slower one of both steps may be another GPU.
    assert [len(of) for of in terms_of(PROGRAM, PRICES).segments] == [1, 1, 1]


def test_what_is_kept_for_the_backward_pass_takes_memory() -> None:
    """A is read behind the turn, in its shares; B is not, and C is kept whole.  What was gathered
    before the turn is gone."""
    assert program_bytes(PROGRAM, PRICES, SHARES) == pytest.approx(
        (1 + 7.5 + 0.75 * 8 + 32, 1 + 2.5 + 0.25 * 8 + 32)
    )


@pytest.mark.parametrize("count", [2, 3, 8])
def test_in_equal_shares_collectives_take_what_rings_take(count: int) -> None:
    prices = replace(PRICES, room_bytes=(inf,) * count)
    shares = {"tokens": (1 / count,) * count, "columns": (1 / count,) * count}

    def price_s(kind: str, name: str, before: State, state: State) -> float:
        return prices.collective_s(Instruction(kind, name, state, before), shares)  # type: ignore[arg-type]

    assert price_s("all-reduce", "B", "partial", "whole") == ring_all_reduce_s(60, count, LINK)
    assert price_s("all-gather", "B", "tokens", "whole") == pytest.approx(
        ring_all_gather_s(60, count, LINK)
    )
    assert price_s("reduce-scatter", "B", "partial", "tokens") == pytest.approx(
        ring_reduce_scatter_s(60, count, LINK)
    )
    assert price_s("slice", "B", "whole", "tokens") == 0
    # The sum of a weight gradient is one for all micro-batches.
    summed_s = replace(prices, num_micro_batches=8).collective_s(
        Instruction("all-reduce", "dW", "whole", "partial"), shares
    )
    assert 8 * summed_s == pytest.approx(ring_all_reduce_s(200, count, LINK))


def test_side_by_side_weights_are_gathered_as_often_as_the_busiest_gpu_needs_them() -> None:
    prices = replace(PRICES, side_by_side=True, num_bytes={"W": 100.0})
    gather = Instruction("all-gather", "W", "whole", "elements")
    whole_s = ring_all_gather_s(100, 2, LINK)
    for share in (0.5, 0.75):
        shares = {"sequences": (share, 1 - share), "elements": (0.9, 0.1)}
        assert prices.collective_s(gather, shares) == pytest.approx(share * whole_s)
    # And each keeps all of a micro-batch of its own.
    kept = prices.bytes_of(("A", "sequences"), False, {"sequences": (0.75, 0.25)})
    assert kept == (8.0, 8.0)


def test_of_random_programs() -> None:
    """One GPU alone never waits; a program lasts as long as one GPU's steps at least; and equal
    shares are no dearer in collectives than unlike ones."""
    for seed in range(25):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(2, 6))
        count = rng.randint(2, 4)
        prices, shares = random_prices(rng, graph, count), random_shares(rng, count)
        program = random_program(graph, rng)
        terms = terms_of(program, prices)
        steps = [held for segment in terms.segments for held in segment]
        assert [name for name, _ in steps] == [step.name for step in graph.steps if step.computes]
        own_s = [sum(of) for of in zip(*[prices.step_s(*h, shares) for h in steps], strict=True)]
        sent_s = sum(prices.collective_s(one, shares) for one in terms.collectives)
        assert max(own_s) + sent_s <= program_s(program, prices, shares) * (1 + 1e-12)
        assert program_s(program, prices, shares) <= (sum(own_s) + sent_s) * (1 + 1e-12)
        equal = dict.fromkeys(shares, (1 / count,) * count)
        for one in terms.collectives:
            assert prices.collective_s(one, equal) <= prices.collective_s(one, shares) + 1e-12
        alone = replace(
            prices,
            compute_s={key: of[:1] for key, of in prices.compute_s.items()},
            room_bytes=prices.room_bytes[:1],
        )
        whole = dict.fromkeys(shares, (1.0,))
        expected_s = sum(sum(alone.compute_s[held][0]) for held in steps)
        assert program_s(program, alone, whole) == pytest.approx(expected_s)
