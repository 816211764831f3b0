"""Sums of two holders stand for rounds of an exchange: the same sums, the same bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.exchange.plan import ExchangePlan

Structure = list["Structure"] | None
"""Members of a group; None is a holder."""


def grouping_of(structure: Structure, holders: list[int]) -> Grouping | int:
    if structure is None:
        return holders.pop()
    return even([grouping_of(member, holders) for member in structure])


def run(plan: ExchangePlan, *, by_pairs: bool) -> list[list[Counter[int]]]:
    """Return [holder] -> [element] -> how often it has the part of each holder in the end."""
    have = [[Counter({h: 1}) for _ in range(plan.size)] for h in range(plan.num_holders)]
    sums = pair_sums(plan) if by_pairs else {}
    for number in range(plan.num_rounds):
        before = [list(own) for own in have]
        for t in plan.transfers():
            own = sums.get(t.source)
            if t.round == number and (own is None or number not in (own.round, own.round + 1)):
                for e in range(t.start, t.stop):
                    there = before[t.source][e]
                    have[t.destination][e] = have[t.destination][e] + there if t.reduces else there
        for (a, b), start, stop in {s[1:] for s in sums.values() if s.round == number}:
            for e in range(start, stop):
                have[a][e] = have[b][e] = before[a][e] + before[b][e]
    return have


structures = st.recursive(
    st.none(), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=8
)


@given(st.lists(structures, min_size=2, max_size=3), st.integers(1, 60), st.randoms())
def test_pairs_have_the_sums_and_the_bytes_of_the_rounds(members, size, random) -> None:  # type: ignore[no-untyped-def]
    count = str(members).count("None")
    group = grouping_of(members, random.sample(range(count), count))
    plan = grouped_plan("drawn", "all_reduce", size, group)
    assert run(plan, by_pairs=True) == run(plan, by_pairs=False)
    for holder, own in pair_sums(plan).items():
        # An all-reduce of two sends half of the range each way, and then the sum of the other half.
        rows = [t for t in plan.transfers() if holder == t.source and t.round >= own.round]
        sent = sum(t.stop - t.start for t in rows if t.round <= own.round + 1)
        assert sent == own.stop - own.start
        assert all(t.destination in own.holders for t in rows if t.round <= own.round + 1)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(2, 300))
def test_two_groups_alike_are_pairs_of_the_same_place(machines: int, each: int, size: int) -> None:
    names = [f"{site}{m}" for site in "ab" for m in range(machines) for _ in range(each)]
    groups = [[f"{site}{m}" for m in range(machines)] for site in "ab"]
    plan = plan_by_group(names, groups, size, "all_reduce")
    assert plan is not None
    half = machines * each
    sums = pair_sums(plan)
    assert {own.holders for own in sums.values()} <= {(h, h + half) for h in range(half)}
    if size >= 2 * half:
        assert len(sums) == 2 * half
        spans = np.array(sorted((own.start, own.stop) for own in set(sums.values())))
        assert spans[0, 0] == 0 and spans[-1, 1] == size
        assert (spans[1:, 0] == spans[:-1, 1]).all()


@pytest.mark.parametrize(
    "group",
    [
        even([0, 1, 2]),  # a library's ring would wait for one message after the other
        even([even([0, 1]), even([2, 3, 4])]),  # 1 sums with 3 and 4 in turn with 0 and 2
        even([even([0, 1]), 2]),
        Grouping((0, 1), (0.7, 0.3)),  # other bytes
        Grouping((even([0, 1]), even([2, 3])), (0.7, 0.3)),
    ],
)
def test_other_exchanges_are_left_to_rounds(group: Grouping) -> None:
    plan = grouped_plan("other", "all_reduce", 600, group)
    assert pair_sums(plan) == {}
    assert run(plan, by_pairs=True) == run(plan, by_pairs=False)


def test_only_an_all_reduce_has_such_sums() -> None:
    for purpose in ("reduce_scatter", "all_gather"):
        assert pair_sums(grouped_plan("one way", purpose, 8, even([0, 1]))) == {}
    assert pair_sums(grouped_plan("alone", "all_reduce", 8, 0)) == {}
