"""The longest step proved impossible: below every plan, and how far it goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.effort import QUICK, ProofEffort
from megatron_hetero.bounds.launches import _grouped, _ranges, launch_bound_s
from megatron_hetero.bounds.step_time import work_bound_s
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import micro_batch_sizes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, workloads

BOXES = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
WORKLOAD = make_workload(num_layers=4, global_batch_size=4)


def proved_s(
    cluster: Cluster,
    workload: Workload,
    enough_s: float = inf,
    effort: ProofEffort = QUICK,
    steps: list[float] | None = None,
) -> float:
    costs = CostModel(cluster, workload)
    sizes = [costs.variant(micro_batch_size=size) for size in micro_batch_sizes(costs)]
    least_s = work_bound_s(costs)
    enough_s = min(enough_s, 50 * least_s)
    found_s, _ = launch_bound_s(
        sizes,
        [work_bound_s(c) for c in sizes],
        gpu_classes(costs),
        least_s,
        enough_s,
        effort,
        None if steps is None else steps.append,
    )
    return found_s


@settings(max_examples=6)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_what_is_proved(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    assume(best_s is not None)
    assert best_s is not None
    assert work_bound_s(CostModel(cluster, workload)) <= proved_s(cluster, workload) * (1 + 1e-9)
    assert proved_s(cluster, workload) <= best_s * (1 + 1e-9)


def test_the_bound_is_near_the_best_plan_of_a_small_cluster() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    best_s = best_step_time_s(cluster, WORKLOAD)
    assert best_s is not None
    assert proved_s(cluster, WORKLOAD) >= 0.8 * best_s
    assert proved_s(cluster, WORKLOAD) > work_bound_s(CostModel(cluster, WORKLOAD))


def test_more_gpus_and_free_settings_prove_no_more() -> None:
    less = proved_s(make_cluster(("a", FAST, 1), ("b", SLOW, 2)), WORKLOAD)
    assert proved_s(BOXES, WORKLOAD) <= less * (1 + 1e-9)
    small = make_cluster(("a", FAST, 1), ("b", SLOW, 1))
    assert proved_s(replace(small, limits=FREE), WORKLOAD) <= proved_s(small, WORKLOAD)


@pytest.mark.parametrize("layers", [2, 4])
def test_more_layers_take_longer(layers: int) -> None:
    one = make_workload(num_layers=layers, global_batch_size=4)
    two = make_workload(num_layers=2 * layers, global_batch_size=4)
    assert proved_s(BOXES, one) < proved_s(BOXES, two)


def test_it_ends_where_enough_is_proved() -> None:
    whole_s = proved_s(BOXES, WORKLOAD)
    work_s = work_bound_s(CostModel(BOXES, WORKLOAD))
    between_s = (whole_s + work_s) / 2
    assert work_s < between_s < whole_s
    assert proved_s(BOXES, WORKLOAD, enough_s=between_s) == pytest.approx(between_s)


def test_less_work_proves_less() -> None:
    few = [proved_s(BOXES, WORKLOAD, effort=ProofEffort(n, 128)) for n in (0, 3000, 10**9)]
    assert few == sorted(few)
    assert few[0] >= work_bound_s(CostModel(BOXES, WORKLOAD))


def test_what_is_proved_only_grows() -> None:
    steps: list[float] = []
    found_s = proved_s(BOXES, WORKLOAD, steps=steps)
    assert steps == sorted(steps)
    assert steps[-1] <= found_s * (1 + 1e-9)


def test_a_wanted_number_of_replicas_proves_no_less() -> None:
    free_s = proved_s(BOXES, WORKLOAD)
    found = {}
    for num in (1, 2, 4):
        limited = replace(BOXES, limits=replace(AS_GIVEN, num_replicas=num))
        found[num] = proved_s(limited, WORKLOAD)
        assert found[num] >= free_s * (1 - 1e-6)
    assert max(found.values()) > free_s


def test_what_no_plan_can_do_is_enough() -> None:
    """Five replicas of four micro-batches: nothing is left to prove."""
    limited = replace(BOXES, limits=replace(AS_GIVEN, num_replicas=5))
    work_s = work_bound_s(CostModel(limited, WORKLOAD))
    assert proved_s(limited, WORKLOAD, enough_s=3 * work_s) == pytest.approx(3 * work_s)
    tiny = make_cluster(("a", replace(FAST, memory_bytes=20 << 20), 2))
    work_s = work_bound_s(CostModel(tiny, WORKLOAD))
    assert proved_s(tiny, WORKLOAD, enough_s=3 * work_s) == pytest.approx(3 * work_s)


@given(st.integers(1, 3000), st.sampled_from([2.0, 1.5, 1.2, 1.05]), st.integers(1, 100))
def test_ranges_are_all_numbers_once(largest: int, ratio: float, small: int) -> None:
    found = _ranges(largest, ratio, small)
    assert found[0][0] == 1 and found[-1] == (largest, largest)
    last = 0
    for least, most in found:
        assert least == last + 1 or (least, most) == (largest, largest)
        assert least <= most
        assert most <= 2 * least
        if least >= small:
            assert most <= max(least, ratio * least)
        last = most
    assert last == largest


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30, unique=True).map(sorted))
def test_groups_are_runs_up_to_four_times_their_first(numbers: list[int]) -> None:
    found = [numbers[part] for part in _grouped(numbers)]
    assert [n for run in found for n in run] == numbers
    assert all(run and run[-1] <= 4 * run[0] for run in found)
    for before, after in pairwise(found):
        assert after[0] > 4 * before[0]  # no run could be longer
