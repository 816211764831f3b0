"""HexiScale's cost model: the published plans' figures, and its diagram column by column."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.referees.hexiscale import (
    DEVICE_TYPES,
    MODELS,
    NOT_EXPRESSIBLE_S,
    Gpu,
    Hexiscale,
    Pipeline,
    Stage,
    columns_s,
)


def machine(name: str, device_type: str, num_gpus: int) -> list[Gpu]:
    return [Gpu(name, i, DEVICE_TYPES[device_type]) for i in range(num_gpus)]


def pipeline(num_micro_batches: int, *stages: tuple[list[Gpu], int]) -> Pipeline:
    return Pipeline(tuple(Stage(tuple(g), n) for g, n in stages), num_micro_batches)


A100 = machine("a", "A100", 3)
RTX4090 = machine("b", "4090", 3)
RTX3090 = machine("c", "3090", 2)


def test_h1() -> None:
    one, two, three = RTX4090
    plan = [
        pipeline(24, ([one], 3), ([two], 4), ([three], 1), (A100[:2], 16), (A100[2:], 8)),
    ]
    referee = Hexiscale(MODELS["7B"], 0.5 * 1024**3)
    assert round(referee.step_s(plan), 3) == 10.093
    assert referee.missing_bytes(plan) < 0


def test_h2() -> None:
    gpus = [*RTX4090, *RTX3090, *A100]
    layers = (4, 4, 2, 2, 1, 9, 9, 9)
    plan = [pipeline(24, *(([g], n) for g, n in zip(gpus, layers, strict=True)))]
    referee = Hexiscale(MODELS["13B"], 0.5 * 1024**3)
    assert round(referee.step_s(plan), 3) == 17.202
    assert referee.missing_bytes(plan) < 0


def test_h3_and_its_tokens_per_s() -> None:
    types = ["3080Ti", "3090", "4090", "4090", "4090"]
    machines = [machine(str(i), name, 8) for i, name in enumerate(types)]
    layers = (2, 4, 8, 8, 10)
    plan = [
        pipeline(30, *(([m[j]], n) for m, n in zip(machines, layers, strict=True)))
        for j in range(8)
    ]
    referee = Hexiscale(MODELS["7B"], 0.7 * 1024**3)
    step_s = referee.step_s(plan)
    assert round(step_s, 3) == 37.809
    assert 240 * 4096 / step_s >= 26_000
    assert referee.missing_bytes(plan) < 0


def test_memory_that_does_not_fit() -> None:
    plan = [pipeline(1, (machine("x", "T4A", 1), 32))]
    assert Hexiscale(MODELS["7B"], 1e9).missing_bytes(plan) > 0


def test_a_narrow_group_repeats_its_gpus_opposite_a_wide_one() -> None:
    """Widths 4 and 2: two matched groups, each of one GPU of either machine."""
    wide, narrow = machine("w", "A100", 4), machine("n", "A100", 2)
    referee = Hexiscale(MODELS["7B"], 1e9)
    plan = [pipeline(1, (wide, 32)), pipeline(1, (narrow, 32))]
    layer_bytes = 12 * 4096**2 * 2
    assert referee.sync_s(plan) == pytest.approx(32 * 2 * 2 * layer_bytes / (2 * 2 * 1e9))


def test_widths_that_the_released_code_cannot_match_are_not_expressible() -> None:
    groups = [tuple(machine(str(width), "A100", width)) for width in (1, 2, 5)]
    assert Hexiscale(MODELS["13B"], 1e9).layer_sync_s(groups) == NOT_EXPRESSIBLE_S
    assert Hexiscale(MODELS["13B"], 1e9).layer_sync_s(groups[::2]) < NOT_EXPRESSIBLE_S


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=7), st.integers(1, 12))
def test_the_diagram(cells_s: list[float], num_micro_batches: int) -> None:
    """Written out: every column is as long as its slowest busy stage; and no shorter than 1F1B's
    lower bound, so a bound on our own pipelines holds there too."""
    total_s = 0.0
    for column in count():
        busy = [cell_s for s, cell_s in enumerate(cells_s) if s <= column < s + num_micro_batches]
        if not busy:
            break
        total_s += max(busy)
    assert columns_s(cells_s, num_micro_batches) == pytest.approx(total_s)
    least_s = (num_micro_batches - 1) * max(cells_s) + sum(cells_s)
    assert total_s >= least_s * (1 - 1e-12)
