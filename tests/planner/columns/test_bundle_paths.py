"""The dynamic programme over blocks: the optimum of every sequence, and what its path costs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.planner.columns.bundle_paths import BlockMenu, BundlePaths, HeldLayers
from megatron_hetero.planner.shapes.kinds import NodeBlock

PERIODS_S = np.array([1.0, 2.5, 4.0])


@st.composite
def menus(draw: st.DrawFn) -> tuple[BlockMenu, np.ndarray]:
    """A few blocks, and their prices."""
    num_layers, depth = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    blocks = tuple(
        NodeBlock(kind, 1, (1,) * draw(st.integers(1, 2)))
        for kind in range(draw(st.integers(1, 3)))
    )
    layers = st.integers(0, num_layers)

    def held() -> HeldLayers:
        shape = (depth, len(blocks), len(PERIODS_S))
        drawn = [draw(layers) for _ in range(int(np.prod(shape)))]
        found = np.array(drawn, np.int16).reshape(shape)
        for index, block in enumerate(blocks):
            # Each stage has a layer, and a pipeline is no longer than the depth.
            found[:, index][found[:, index] < len(block.widths)] = 0
            found[max(depth - len(block.widths) + 1, 0) :, index] = 0
        base = np.array([draw(st.sampled_from([0.0, 0.3])) for _ in range(depth * len(blocks))])
        return HeldLayers(found, base.reshape(depth, len(blocks)))

    some = [draw(st.sampled_from([0.5, 0.75, 1.0])) for _ in blocks]
    hops = [draw(st.sampled_from([0.0, 0.25, 2.0])) for _ in blocks]
    menu = BlockMenu(
        blocks,
        num_layers,
        PERIODS_S,
        np.array(some),
        held(),
        held(),
        np.array(hops),
        np.array([draw(st.booleans()) for _ in blocks]),
        np.array([draw(st.booleans()) for _ in blocks]),
    )
    return menu, np.array([draw(st.sampled_from([0.0, 1.0, 3.5])) for _ in blocks])


def cost_of(menu: BlockMenu, prices: np.ndarray, path: tuple[int, ...], period: int) -> float:
    """What a pipeline of block numbers, last block first, costs; infinite if it is none."""
    left, stages, cost, before = menu.num_layers, 0, 0.0, None
    if not menu.may_start[path[-1]] or not menu.may_end[path[0]]:
        return np.inf
    for place, index in enumerate(path):
        if stages >= len(menu.held.layers):
            return np.inf
        is_first = place == len(path) - 1
        held = menu.first if is_first else menu.held
        most = int(held.layers[stages, index, period])
        num_held = left if is_first else most
        if not 0 < num_held <= most or num_held < len(menu.blocks[index].widths):
            return np.inf
        seconds = num_held * menu.layer_s[index] + held.base_s[stages, index]
        seconds += 0.0 if before is None else menu.hops_s[index]
        cost += prices[index] + seconds / menu.periods_s[period]
        left, stages = left - num_held, stages + len(menu.blocks[index].widths)
        before = index
    return cost if left == 0 else np.inf


@given(menus(), st.sampled_from([0.5, 2.5, 10.0]))
def test_no_sequence_of_blocks_is_cheaper(
    case: tuple[BlockMenu, np.ndarray], step_s: float
) -> None:
    menu, prices = case
    paths = BundlePaths(menu, prices, step_s)
    assert list(paths.periods_s) == [p for p in PERIODS_S if p <= step_s]
    for period in range(len(paths.periods_s)):
        every = (
            path
            for length in range(1, menu.num_layers + 1)
            for path in product(range(len(menu.blocks)), repeat=length)
        )
        least = min(cost_of(menu, prices, path, period) for path in every)
        assert paths.end_cost[period] == pytest.approx(least)
        numbers = [menu.blocks.index(block) for block in paths.blocks(period)]
        if np.isfinite(least):
            found = cost_of(menu, prices, tuple(reversed(numbers)), period)
            assert found == pytest.approx(least)
        else:
            assert numbers == []


@given(menus(), st.sampled_from([2.5, 10.0]), st.floats(-3.0, 3.0))
def test_what_is_worth_too_little_is_left_out_and_nothing_else(
    case: tuple[BlockMenu, np.ndarray], step_s: float, least_worth: float
) -> None:
    menu, prices = case
    every = BundlePaths(menu, prices, step_s)
    some = BundlePaths(menu, prices, step_s, least_worth)
    for period, cost in enumerate(every.end_cost):
        if cost < 1 + step_s / every.periods_s[period] - least_worth:
            assert some.end_cost[period] == cost
            assert some.blocks(period) == every.blocks(period)
        else:
            assert some.end_cost[period] == np.inf
            assert some.blocks(period) == ()
