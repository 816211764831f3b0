"""The table of chains, beside every chain that there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.least_chains import ChainTimes, rounded_down
from megatron_hetero.bounds.chains.stages import ChainStageOptions
from tests.bounds.chains.chain_options import NUM_LAYERS, SHAPE, options, steps_of
from tests.planner.naive import parts


def chain_s(found: ChainStageOptions, chain: list[tuple[int, int]], number: int) -> float:
    """The least step of a chain of (kind, layers), first stage first, by the module's formula."""
    end_s = None
    behind = -1
    for index, (kind, layers) in reversed(list(enumerate(chain))):
        place = 2 * (index == 0) + (index == len(chain) - 1)
        in_flight = min(len(chain) - index, number, found.max_in_flight) - 1
        own_s = number * found.rate_s[kind, place, in_flight, layers]
        own_s += found.update_s[kind, place, layers]
        time_s = found.time_s[kind, place, in_flight, layers]
        if end_s is None:
            end_s = own_s
        else:
            busy_s = number * found.send_rate_s[kind, behind]
            end_s = max(own_s, time_s + max(busy_s, found.trip_s[kind, behind] + end_s))
        behind = kind
    assert end_s is not None
    return float(end_s)


def brute_force(found: ChainStageOptions, room: tuple[int, ...], number: int) -> float:
    """The least of all chains on so many GPUs of each class."""
    best = inf
    for depth in range(1, NUM_LAYERS + 1):
        for kinds in product(range(len(found.width)), repeat=depth):
            taken = [0] * len(room)
            for kind in kinds:
                taken[int(found.gpu_class[kind])] += int(found.width[kind])
            if any(t > have for t, have in zip(taken, room, strict=True)):
                continue
            for layers in parts(NUM_LAYERS, depth):
                best = min(best, chain_s(found, list(zip(kinds, layers, strict=True)), number))
    return best


@settings(max_examples=40)
@given(options(), st.integers(1, 5))
def test_the_table_has_the_least_of_all_chains(found: ChainStageOptions, number: int) -> None:
    """Never more, and less by the roundings of single precision alone."""
    times = ChainTimes(found, NUM_LAYERS, SHAPE, steps_of(found))
    (least,) = times.least_s([(number, number)], inf)
    for room in product(*(range(n) for n in SHAPE)):
        expected = brute_force(found, room, number)
        assert least[room] <= expected
        assert least[room] == pytest.approx(expected, rel=2 * (1 - rounded_down(NUM_LAYERS)))


@settings(max_examples=30)
@given(options())
def test_more_gpus_never_take_longer_and_more_work_never_less(found: ChainStageOptions) -> None:
    times = ChainTimes(found, NUM_LAYERS, SHAPE, steps_of(found))
    least = times.least_s([(1, 1), (2, 2), (5, 5)], inf)
    for axis in (1, 2):
        before, after = np.delete(least, -1, axis), np.delete(least, 0, axis)
        assert (after <= before).all()
    assert (least[1:] >= least[:-1]).all()
    assert np.isinf(least[:, 0, 0]).all()  # no GPUs, no chain


@settings(max_examples=30)
@given(options(), st.integers(1, 4), st.integers(1, 4))
def test_a_range_is_no_longer_than_its_most_and_no_shorter_than_its_least(
    found: ChainStageOptions, fewest: int, more: int
) -> None:
    """With the memory that the least of them take."""
    times = ChainTimes(found, NUM_LAYERS, SHAPE, steps_of(found))
    alone = times.least_s([(fewest, fewest), (fewest + more, fewest + more)], inf)
    (both,) = times.least_s([(fewest, fewest + more)], inf)
    assert (both <= alone[1] * (1 + 1e-12)).all()
    assert (both >= alone[0] * (1 - 1e-12)).all()


@settings(max_examples=20)
@given(options(), st.integers(1, 4))
def test_ranges_do_not_know_each_other(found: ChainStageOptions, number: int) -> None:
    times = ChainTimes(found, NUM_LAYERS, SHAPE, steps_of(found))
    (alone,) = times.least_s([(number, number)], inf)
    among = times.least_s([(1, 1), (number, number), (9, 9)], inf)[1]
    assert np.array_equal(alone, among)


@settings(max_examples=30)
@given(options(), st.integers(1, 4))
def test_what_takes_longer_than_the_cut_is_left_out(found: ChainStageOptions, number: int) -> None:
    """Whatever is done before the cut is there with its own time; the rest may be infinite."""
    times = ChainTimes(found, NUM_LAYERS, SHAPE, steps_of(found))
    (every,) = times.least_s([(number, number)], inf)
    cut_s = float(np.median(every[np.isfinite(every)])) if np.isfinite(every).any() else 1.0
    cut_s /= rounded_down(NUM_LAYERS) ** 2  # of real seconds, rounded neither down nor up
    (some,) = times.least_s([(number, number)], cut_s)
    late = every > cut_s
    assert np.array_equal(some[~late], every[~late])
    assert (some[late] >= every[late]).all()


@settings(max_examples=30)
@given(options(), st.integers(1, 4))
def test_an_exchange_counts_for_the_cut_alone(found: ChainStageOptions, number: int) -> None:
    exchanging = replace(found, sync_s=np.full_like(found.sync_s, 100.0))
    tables = [
        ChainTimes(of, NUM_LAYERS, SHAPE, steps_of(of)).least_s([(number, number)], inf)
        for of in (found, exchanging)
    ]
    assert np.array_equal(*tables)
    cut = ChainTimes(exchanging, NUM_LAYERS, SHAPE, steps_of(found))
    assert np.isinf(cut.least_s([(number, number)], 99.0)).all()
