"""Layers and launch counts of one pipeline, beside all that there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Filled, least_time_s
from megatron_hetero.planner.completion.tuner import Tuner
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import parts

WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)
CHAIN: Chain = (Unit("a", (0,)), Unit("b", (0,)), Unit("c", (0,)))
NEAR, FAR = Link(1e12, 0.0), Link(1e9, 3e-3)


def boxes(between: Link, memory_bytes: int = 1 << 40) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    return make_cluster(
        ("a", fast, 1), ("b", slow, 1), ("c", fast, 1), between=between, limits=FREE
    )


def tuner_of(
    between: Link, number: int = 8, given: bool = False, memory_bytes: int = 1 << 40
) -> tuple[Tuner, Filled, Problem]:
    problem = make_problem(boxes(between, memory_bytes), WORKLOAD)
    completer = Completer(problem)
    found = completer.complete((CHAIN,), 1, given)
    assert found is not None
    tables = completer.table((CHAIN,), 1, given)
    return Tuner(completer, tables, CHAIN, number), found.filled[0], problem


def priced_s(problem: Problem, filled: Filled, number: int) -> float:
    stages = tuple(
        PlacedStage(unit.devices, n, None, option.recompute, option.num_recomputed)
        for unit, n, option in zip(CHAIN, filled.layers, filled.options, strict=True)
    )
    cost = problem.costs.replica(PlacedReplica(stages, number, filled.counts), 1024)
    assert cost.fits
    return cost.pipeline_s


def all_counts(number: int) -> list[tuple[int, ...]]:
    counts = product(range(1, number + 1), range(1, number + 1), [1])
    return [c for c in counts if all(a >= b for a, b in pairwise(c))]


@pytest.mark.parametrize("between", [NEAR, FAR, Link(5e8, 1e-3), Link(1e10, 2e-2)])
@pytest.mark.parametrize("number", [2, 5])
def test_tuned_pipelines_are_near_the_best_of_all(between: Link, number: int) -> None:
    tuner, filled, problem = tuner_of(between, number)
    found, time_s = tuner.run(filled, 10**6)
    assert time_s == pytest.approx(priced_s(problem, found, number))
    assert sum(found.layers) == 6
    best_s = inf
    for counts in all_counts(number):
        for layers in parts(6, 3):
            one = tuner.price(layers, counts, inf)
            best_s = best_s if one is None else min(best_s, one[0])
    assert best_s <= time_s * (1 + 1e-12)
    assert time_s <= best_s * 1.01


@pytest.mark.parametrize("between", [NEAR, FAR])
def test_tuning_never_loses_and_more_work_never_loses(between: Link) -> None:
    before_s = None
    for work in (0, 1_000, 10_000, 100_000):
        tuner, filled, problem = tuner_of(between)
        _, time_s = tuner.run(filled, work)
        counts = filled.counts and tuple(min(c, 8) for c in filled.counts)
        assert time_s <= priced_s(problem, replace(filled, counts=counts), 8) * (1 + 1e-12)
        if before_s is not None:
            assert time_s <= before_s
        before_s = time_s


def test_as_given_only_layers_move() -> None:
    tuner, filled, _ = tuner_of(FAR, given=True)
    assert not tuner.has_counts
    for step in tuner.steps():
        assert all(counts == tuner.own for _, counts in step(filled.layers, tuner.own))
    found, _ = tuner.run(filled, 10**5)
    assert found.counts is None


def test_fill_and_period_make_up_the_pipelines_seconds() -> None:
    tuner, filled, _ = tuner_of(FAR)
    found, time_s = tuner.run(filled, 10**5)
    assert found.fill_s + 7 * found.period_s == pytest.approx(time_s)
    assert found.period_s == pytest.approx(max(option.time_s for option in found.options))


def test_a_pipeline_short_of_memory_is_near_the_best_of_all() -> None:
    """Its counts take memory that its layers would need to recompute less."""
    fewer = 0
    for memory_mib in range(170, 330, 20):
        tuner, filled, _ = tuner_of(FAR, memory_bytes=memory_mib << 20)
        found, time_s = tuner.run(filled, 10**6)
        every = product(all_counts(8), parts(6, 3))
        priced = [tuner.price(layers, counts, inf) for counts, layers in every]
        assert time_s <= 1.01 * min(one[0] for one in priced if one is not None)
        fewer += found.counts != tuner_of(FAR)[0].run(filled, 10**6)[0].counts
    assert fewer  # with all the memory there is it launches otherwise


def test_prices_that_cannot_win_are_not_made() -> None:
    tuner, filled, _ = tuner_of(FAR)
    assert tuner.price(filled.layers, tuner.own, inf) is not None
    other = (filled.layers[0] - 1, filled.layers[1] + 1, filled.layers[2])
    work = tuner.work
    assert tuner.price(other, tuner.own, 0.0) is None  # below what is a lower bound
    assert tuner.work == work + 16
    assert tuner.price(other, tuner.own, inf) is not None
    assert tuner.price((6, 6, 6), (1, 1, 1), 1e9) is not None


@pytest.mark.parametrize("between", [NEAR, FAR])
def test_bounds_are_below_times(between: Link) -> None:
    tuner, _, _ = tuner_of(between)
    for counts in all_counts(8):
        for layers in parts(6, 3):
            priced = tuner.price(layers, counts, inf)
            if priced is not None:
                times_s = [option.time_s for option in priced[1]]
                assert least_time_s(times_s, tuner.trips_s, 8) <= priced[0] * (1 + 1e-12)


def test_trials_keep_all_layers_and_counts_fall() -> None:
    tuner, _, _ = tuner_of(FAR)
    trials = [trial for step in tuner.steps() for trial in step((4, 1, 1), (6, 2, 1))]
    assert len({counts for _, counts in trials}) > 4 and len({of for of, _ in trials}) > 2
    for layers, counts in trials:
        assert sum(layers) == 6 and min(layers) >= 1
        assert counts[-1] == 1 and max(counts) <= 8
        assert all(a >= b for a, b in pairwise(counts))
        assert all(a >= b for a, b in zip(counts, tuner.own, strict=True))
