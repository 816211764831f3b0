"""The ring order that Sailor's score is of, beside all orders."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from tools.referees.ring_order import slowest_neighbours
from tools.referees.sailor import Group, Pipeline, Sailor


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[int], list[list[float]]]:
    kinds = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(1, 3), min_size=kinds, max_size=kinds))
    while sum(counts) > 7:
        counts[counts.index(max(counts))] -= 1
    row = st.lists(st.integers(1, 9).map(float), min_size=kinds, max_size=kinds)
    return counts, draw(st.lists(row, min_size=kinds, max_size=kinds))


@given(rings())
def test_never_below_the_best_order_and_never_above_the_order_by_kind(
    ring: tuple[list[int], list[list[float]]],
) -> None:
    counts, cost = ring
    members = [kind for kind, count in enumerate(counts) for _ in range(count)]
    slowest = {
        order: max((cost[i][j] for i, j in pairwise(order)), default=0.0)
        for order in set(permutations(members))
    }
    found = slowest_neighbours(counts, cost)
    assert min(slowest.values()) <= found <= slowest[tuple(members)]


def test_a_slow_kind_stands_between_members_of_another() -> None:
    # Two of kind 0 must not be neighbours: 1 0 1 0 or the like.
    assert slowest_neighbours([2, 2], [[9.0, 1.0], [1.0, 2.0]]) == 1.0


def test_circuits_that_fall_apart_are_joined_by_dearer_arcs() -> None:
    inside, between = 1.0, 5.0
    cost = [[inside, between], [between, inside]]
    assert slowest_neighbours([3, 3], cost) == between


def test_four_zones_exchange_as_fast_as_one() -> None:
    """A ring of zone b alone is slower than any of zones b and f in turn."""
    referee = Sailor("OPT-350", 8)
    chains = {
        zone: (Group(f"us-central1-{zone}", "A100-40", 4, 4),) for zone in ("a", "b", "c", "f")
    }
    one = Pipeline((24,), (chains["a"],) * 32)
    four = Pipeline((24,), tuple(chain for chain in chains.values() for _ in range(8)))
    assert referee.sync_s([four]) == referee.sync_s([one])
