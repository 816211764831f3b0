"""Layers and launch counts of one pipeline, beside all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest

from megatron_hetero.cluster.spec import Cluster, Link
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.completion.tuner import Tuner
from megatron_hetero.planner.problem import Chain, Problem, Unit, make_problem
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
    tables = completer._table((CHAIN,), 1, given)
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
    assert list(tuner.starts(tuner.own)) == []
    assert list(tuner.further_ahead(tuner.own)) == []
    assert all(other >= 0 and together is None for _, other, together in tuner.steps(3))
    found, _ = tuner.run(filled, 10**5)
    assert found.counts is None


def test_fill_and_period_make_up_the_pipelines_seconds() -> None:
    tuner, filled, _ = tuner_of(FAR)
    found, time_s = tuner.run(filled, 10**5)
    assert found.fill_s + 7 * found.period_s == pytest.approx(time_s)
    assert found.period_s == pytest.approx(max(option.time_s for option in found.options))


def test_counts_further_ahead_are_falling_and_no_more_than_micro_batches() -> None:
    tuner, _, _ = tuner_of(FAR)
    found = list(tuner.further_ahead((5, 2, 1)))
    assert found[:4] == [(6, 3, 1), (4, 3, 1), (7, 4, 1), (5, 4, 1)]
    assert found[-1] == (8, 8, 1)
    for counts in found:
        assert counts[-1] == 1 and max(counts) <= 8
        assert all(a >= b for a, b in pairwise(counts))


def test_rules_hide_the_hops_by_hand() -> None:
    """A stage launches ahead by what the way to the last stage and back takes of a period."""
    tuner, filled, _ = tuner_of(FAR)
    once, twice = tuner.rules(filled.layers)
    assert once[-1] == twice[-1] == 1
    assert all(a >= b for a, b in pairwise(once))
    assert twice[:-1] == tuple(min(2 * count, 8) for count in once[:-1])
    near, _, _ = tuner_of(NEAR)
    (less, _) = near.rules(filled.layers)
    assert all(a <= b for a, b in zip(less, once, strict=True)) and less != once


def test_counts_are_fewer_where_layers_do_not_fit_otherwise() -> None:
    """Free memory leaves them; a tight one halves what is beyond 1F1B's own."""
    roomy, _, _ = tuner_of(FAR)
    assert roomy.fitted((2, 2, 2), (8, 8, 1), False) == (8, 8, 1)
    assert roomy.fitted((2, 2, 2), roomy.own, True) == roomy.own
    between = 0
    for memory_mib in range(170, 330, 10):
        tight, _, _ = tuner_of(FAR, memory_bytes=memory_mib << 20)
        counts = tight.fitted((2, 2, 2), (8, 8, 1), True)
        between += counts not in (tight.own, (8, 8, 1))
        counts = tight.fitted((2, 2, 2), (8, 8, 1), False)
        assert all(a >= b for a, b in pairwise(counts))
        assert all(a <= b for a, b in zip(counts, (8, 8, 1), strict=True))
        if counts != tight.own:
            assert tight.price((2, 2, 2), counts, inf) is not None
    assert between  # some have room for a part of them


def test_free_counts_do_not_make_a_stage_recompute_more() -> None:
    fewer = 0
    for memory_mib in range(170, 330, 20):
        tight, _, _ = tuner_of(FAR, memory_bytes=memory_mib << 20)
        counts = tight.fitted((2, 2, 2), (8, 8, 1), True)
        plain = tight.price((2, 2, 2), tight.own, inf)
        made = tight.price((2, 2, 2), counts, inf)
        assert plain is not None and made is not None
        for before, after in zip(plain[1], made[1], strict=True):
            assert after.time_s <= before.time_s
        fewer += counts != (8, 8, 1)
    assert fewer


def test_prices_are_remembered_and_those_that_cannot_win_are_not_made() -> None:
    tuner, filled, _ = tuner_of(FAR)
    first = tuner.price(filled.layers, tuner.own, inf)
    work = tuner.work
    assert tuner.price(filled.layers, tuner.own, inf) is first
    assert tuner.work == work
    other = (filled.layers[0] - 1, filled.layers[1] + 1, filled.layers[2])
    assert tuner.price(other, tuner.own, 0.0) is None  # below what is a lower bound
    assert tuner.price(other, tuner.own, inf) is not None  # but it is not forgotten
    assert tuner.price((6, 6, 6), (1, 1, 1), 1e9) is not None


def all_moved(
    tuner: Tuner, layers: tuple[int, ...], beat: float
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for step in tuner.steps(len(layers)):
        yield from tuner.moved(layers, tuner.own, step, beat)


def test_moved_layers_keep_their_sum_and_no_stage_is_empty() -> None:
    tuner, _, _ = tuner_of(FAR)
    trials = list(all_moved(tuner, (4, 1, 1), inf))
    assert trials
    for layers, counts in trials:
        assert sum(layers) == 6 and min(layers) >= 1
        assert all(a >= b for a, b in pairwise(counts)) and counts[-1] >= 1
    assert list(tuner.moved((4, 1, 1), tuner.own, (1, 0, None), inf)) == []


def test_moves_that_are_left_out_beat_nothing() -> None:
    """None of them is as fast as what is to be beaten, and some are left out."""
    tuner, _, _ = tuner_of(NEAR)
    first = tuner.price((4, 1, 1), tuner.own, inf)
    assert first is not None
    for part in (0.5, 0.7, 1.0):
        every, kept = (list(all_moved(tuner, (4, 1, 1), b)) for b in (inf, part * first[0]))
        left_out = [trial for trial in every if trial not in kept]
        assert left_out or part > 0.5
        for layers, counts in left_out:
            found = tuner_of(NEAR)[0].price(layers, counts, inf)
            assert found is None or found[0] >= part * first[0]
