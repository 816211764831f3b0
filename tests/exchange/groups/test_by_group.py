"""Exchanges by groups of machines: exact whatever the uplinks, in parts that suit them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hetero.exchange.check import faults
from megatron_hetero.exchange.groups.by_group import grouping_of, plan_by_group
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose

PURPOSES: tuple[Purpose, ...] = ("all_reduce", "reduce_scatter", "all_gather")
Groups = list[list[str]]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[str], Groups, list[list[int]]]:
    """Machines of some holders, groups with machines that hold nothing too, and uplinks."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    starts = [0, *accumulate(sizes)]
    groups = [[f"m{i}" for i in range(a, b)] for a, b in pairwise(starts)]
    uplinks = [[draw(st.integers(1, 40)) for _ in group] for group in groups]
    machines = st.sampled_from([name for group in groups for name in group])
    holders = draw(st.lists(machines, min_size=2, max_size=9))
    assume(grouping_of(holders, groups) is not None)
    return holders, groups, uplinks


@given(scenes(), st.sampled_from(PURPOSES), st.integers(1, 3000), st.data())
def test_every_element_is_summed_once_whatever_the_uplinks(
    scene: tuple[list[str], Groups, list[list[int]]],
    purpose: Purpose,
    size: int,
    data: st.DataObject,
) -> None:
    holders, groups, uplinks = scene
    owners = None
    if purpose != "all_reduce" and data.draw(st.booleans()):
        ends = sorted(data.draw(st.lists(st.integers(0, size), min_size=len(holders) - 1,
                                         max_size=len(holders) - 1)))  # fmt: skip
        spans = zip([0, *ends], [*ends, size], strict=True)
        owners = [Owned(a, b, h) for h, (a, b) in enumerate(spans) if b > a]
    plan = plan_by_group(holders, groups, size, purpose, owners, uplinks)
    assert plan is not None
    assert next(faults(plan), None) is None


@given(scenes())
def test_no_holder_receives_more_than_the_buffer_at_a_time(
    scene: tuple[list[str], Groups, list[list[int]]],
) -> None:
    """Prices count one buffer for what arrives beside a bucket."""
    holders, groups, uplinks = scene
    size = 1 << 20
    plan = plan_by_group(holders, groups, size, "all_reduce", None, uplinks)
    assert plan is not None
    assert plan.most_received() <= size + 64  # cuts are of whole elements


@given(scenes(), st.integers(1, 5))
def test_alike_uplinks_are_equal_parts(
    scene: tuple[list[str], Groups, list[list[int]]], uplink: int
) -> None:
    holders, groups, _ = scene
    # Groups of as many machines that hold anything are alike too.
    used = [[name for name in group if name in holders] for group in groups]
    assume(len({len(group) for group in used if group}) == 1)
    alike = [[uplink] * len(group) for group in groups]
    assert grouping_of(holders, groups, alike) == grouping_of(holders, groups)


def seconds(plan: ExchangePlan, speeds: list[int]) -> list[float]:
    """[holder] -> for how long its uplink is taken, in the busier direction."""
    sent, received = [0.0] * len(speeds), [0.0] * len(speeds)
    for _, source, there, start, stop, _ in plan.table.tolist():
        sent[source] += (stop - start) / plan.size
        received[there] += (stop - start) / plan.size
    return [max(a, b) / speed for a, b, speed in zip(sent, received, speeds, strict=True)]


@given(st.lists(st.integers(1, 40), min_size=3, max_size=8))
def test_uplinks_of_owners_take_equally_long(speeds: list[int]) -> None:
    """And the exchange takes as long as the owners', or the slowest machine to send all once."""
    names = [f"m{i}" for i in range(len(speeds))]
    alone = [[name] for name in names]
    plan, even = (
        plan_by_group(names, alone, 1 << 20, "all_reduce", None, uplinks)
        for uplinks in ([[speed] for speed in speeds], ())
    )
    assert plan is not None and even is not None
    found = seconds(plan, speeds)
    owning = {owned.holder for owned in plan.owners}
    owners_s = max(found[holder] for holder in owning)
    assert all(found[holder] == pytest.approx(owners_s, rel=1e-3) for holder in owning)
    assert max(found) == pytest.approx(max(owners_s, 1 / min(speeds)), rel=1e-3)
    assert max(found) <= max(seconds(even, speeds)) * (1 + 1e-3)


def test_slow_machines_own_less() -> None:
    """Four machines of 4 and four of 1: the fast ones own a quarter each, and the exchange takes
    1 / 1.75 of that with equal parts."""
    speeds = [4] * 4 + [1] * 4
    names = [f"m{i}" for i in range(8)]
    alone, uplinks = [[name] for name in names], [[speed] for speed in speeds]
    made = [plan_by_group(names, alone, 8000, "all_reduce", None, u) for u in (uplinks, ())]
    unlike, even = (max(seconds(plan, speeds)) for plan in made if plan is not None)
    assert unlike == pytest.approx(1.0)
    assert even == pytest.approx(1.75)
