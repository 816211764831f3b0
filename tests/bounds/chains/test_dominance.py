"""Options that no least chain needs: tables without them are the same."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.dominance import needed_options
from megatron_hetero.bounds.chains.least_chains import ChainTimes, rounded_down
from megatron_hetero.bounds.chains.stages import ChainStageOptions
from tests.bounds.chains.chain_options import NUM_LAYERS, SHAPE, options, steps_of


@settings(max_examples=25)
@given(options(), st.integers(1, 5), st.booleans())
def test_options_that_are_not_needed_change_no_least_time(
    found: ChainStageOptions, number: int, has_cut: bool
) -> None:
    steps = steps_of(found)
    whole = ChainTimes(found, NUM_LAYERS, SHAPE, steps)
    (every,) = whole.least_s([(number, number)], inf)
    finite = every[np.isfinite(every)]
    cut_s = float(np.median(finite)) if has_cut and len(finite) else inf
    cut_s /= rounded_down(NUM_LAYERS) ** 2  # of real seconds, rounded neither down nor up
    few, rows = needed_options(found, steps, number, cut_s)
    if not len(few.width):
        assert not (every <= cut_s).any()
        return
    (least,) = ChainTimes(few, NUM_LAYERS, SHAPE, rows).least_s([(number, number)], cut_s)
    done = every <= cut_s
    assert least[done] == pytest.approx(every[done], rel=1e-12)


def two_kinds(**changes: object) -> ChainStageOptions:
    """One GPU of one class and one of another: the first is faster everywhere."""
    layers = np.arange(NUM_LAYERS + 1.0)
    times = np.where(layers > 0, layers, inf)
    time_s = np.stack([np.broadcast_to(times * f, (4, 3, NUM_LAYERS + 1)) for f in (1.0, 2.0)])
    made = ChainStageOptions(
        np.array([0, 0]),
        np.array([1, 1]),
        time_s,
        time_s.copy(),
        np.zeros((2, 4, NUM_LAYERS + 1)),
        np.zeros((2, 4, NUM_LAYERS + 1)),
        np.ones((2, 2)),
        np.zeros((2, 2)),
        1,
        1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


STEPS = np.array([[1], [1]])


def kept(found: ChainStageOptions, steps: np.ndarray = STEPS, cut_s: float = inf) -> list[int]:
    """Positions of the options that are left."""
    few, rows = needed_options(found, steps, 4, cut_s)
    assert len(rows) == len(few.width) == few.time_s.shape[0] == few.trip_s.shape[1]
    slowness = few.time_s[:, 0, 0, 1]
    return [0 if s == 1.0 else 1 for s in slowness]


def test_a_slower_option_that_takes_as_much_goes() -> None:
    assert kept(two_kinds()) == [0]


def test_a_slower_option_that_takes_less_stays() -> None:
    assert kept(two_kinds(), np.array([[2], [1]])) == [0, 1]
    assert kept(two_kinds(), np.array([[1, 0], [0, 1]])) == [0, 1]  # of another class


def test_a_slower_option_with_shorter_trips_stays_where_they_count() -> None:
    """Its boundaries save more than its layers take: three seconds each, there and back."""
    far = np.array([[4.0, 4.0], [4.0, 0.5]])
    assert kept(two_kinds(trip_s=far)) == [0, 1]
    near = np.array([[1.0, 1.0], [1.0, 0.9]])
    assert kept(two_kinds(trip_s=near)) == [0]


def test_a_slower_option_that_updates_sooner_stays() -> None:
    update_s = np.zeros((2, 4, NUM_LAYERS + 1))
    update_s[0] = 50.0
    assert kept(two_kinds(update_s=update_s)) == [0, 1]


def test_a_slower_option_that_exchanges_less_stays() -> None:
    sync_s = np.zeros((2, 4, NUM_LAYERS + 1))
    sync_s[0] = 50.0
    assert kept(two_kinds(sync_s=sync_s)) == [0, 1]


def test_a_slower_option_whose_links_are_freer_stays() -> None:
    send_s = np.array([[9.0, 9.0], [9.0, 0.0]])
    assert kept(two_kinds(send_rate_s=send_s)) == [0, 1]


def test_what_holds_more_layers_stays() -> None:
    found = two_kinds()
    time_s = found.time_s.copy()
    time_s[0, :, :, 2:] = inf  # the fast one holds a single layer
    assert kept(replace(found, time_s=time_s, rate_s=time_s.copy())) == [0, 1]


def test_options_that_are_too_late_go() -> None:
    """Four sequences of a layer take 4 s on the fast one, and 8 s on the other."""
    own = np.array([[2], [1]])
    assert kept(two_kinds(), own, 7.0) == [0]
    assert kept(two_kinds(), own, 9.0) == [0, 1]
    few, rows = needed_options(two_kinds(), own, 4, 3.0)
    assert len(few.width) == len(rows) == 0
    few, _ = needed_options(two_kinds(), own, 4, 9.0)
    # And of what stays, what no chain in time has: two layers take 8 s on the fast one.
    assert np.isinf(few.time_s[0, :, :, 3]).all() and np.isfinite(few.time_s[0, :, :, 2]).all()
    assert np.isinf(few.rate_s[1, :, :, 2]).all()
