"""The lower bound of large clusters: long axes of prices, many replicas, and what is proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds import counting as bound_counting
from megatron_hetero.bounds import packing as bound_packing
from megatron_hetero.bounds.chains import levels as bound_levels
from megatron_hetero.bounds.chains.axes import Axes, by_speed
from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.chains.levels import chain_times
from megatron_hetero.bounds.chains.stages import StageOptionMaker
from megatron_hetero.bounds.effort import PROOF
from megatron_hetero.bounds.packing import ReplicaTimes, least_packed_s
from megatron_hetero.bounds.step_time import step_time_bound, work_bound_s
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, workloads


def bound_as_of_a_large_cluster_s(costs: CostModel, num_units: int) -> float:
    """By prices, in tables of so many units, and replicas by the concave function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_counting, "_MAX_STATES", 0)
        patch.setattr(bound_counting, "_MAX_COUNTED", 0)
        patch.setattr(bound_levels, "_NUM_UNITS", num_units)
        patch.setattr(bound_packing, "_MAX_PACKED", 0)
        return step_time_bound(costs, effort=PROOF).step_time_s


def check_no_plan_is_faster(cluster: Cluster, workload: Workload, num_units: int) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        bound_s = bound_as_of_a_large_cluster_s(CostModel(cluster, workload), num_units)
        assert bound_s <= best_s * (1 + 1e-9)


SMALL = clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3), st.integers(2, 40)


@settings(max_examples=40, deadline=None)
@given(*SMALL)
def test_no_plan_is_faster(cluster: Cluster, workload: Workload, num_units: int) -> None:
    check_no_plan_is_faster(cluster, workload, num_units)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(*SMALL)
def test_no_plan_of_many_is_faster(cluster: Cluster, workload: Workload, num_units: int) -> None:
    check_no_plan_is_faster(cluster, workload, num_units)


def test_dear_chains_are_no_slower_than_they_are_and_cheap_ones_just_as_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = CostModel(
        make_cluster(("a", FAST, 4), ("b", SLOW, 8)),
        make_workload(num_layers=6, global_batch_size=16),
    )
    classes = gpu_classes(costs)
    options, axes = StageOptionMaker(classes).options([costs], (1, 4)), by_speed([costs], classes)
    ranges = [(1, 2), (3, 8), (9, 16)]
    exact_s, _ = chain_times(options, 6, axes, ranges, 1e9)
    monkeypatch.setattr(bound_levels, "_NUM_UNITS", 12)
    some_s, _ = chain_times(options, 6, axes, ranges, 1e9)
    assert some_s.shape == exact_s.shape == (3, *axes.shape)
    assert (some_s[:, :12] == exact_s[:, :12]).all()
    assert (some_s <= exact_s).all()
    assert (some_s < exact_s).any()
    # Of longer axes too: no chain of six layers costs more than six stages.
    longer_s, _ = chain_times(options, 6, Axes(axes.steps, (4000,)), ranges, 1e9)
    assert longer_s.shape == (3, 4000)
    assert (np.diff(longer_s[:, axes.shape[0] :]) <= 0).all()
    assert np.isfinite(longer_s[:, -1]).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4), st.data())
def test_many_replicas_do_no_more_than_the_concave_function_says(
    rises: list[int], num_replicas: int, data: st.DataObject
) -> None:
    """Beside all options to divide the price."""
    value = np.cumsum(np.array(rises, float))
    prices = range(len(value))
    best = max(
        sum(value[p] for p in chosen)
        for chosen in product(prices, repeat=num_replicas)
        if sum(chosen) <= prices[-1]
    )
    wanted = data.draw(st.integers(1, 50))
    # A replica that does n sequences with so much takes a second.
    least_s = np.where(value >= np.arange(1, 82)[:, None], 1.0, np.inf)
    ranges = np.repeat(np.arange(1, 82)[:, None], 2, axis=1)
    times = [ReplicaTimes(ranges, 1, least_s)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_packing, "_MAX_PACKED", 0)
        proved_s = least_packed_s(times, wanted, (1, num_replicas), 0.5, 1.0)
    assert proved_s < 1.0 or best < wanted
    if num_replicas == 1:
        assert proved_s == 1.0 or best >= wanted


def test_a_large_cluster_is_bounded_by_work_unless_a_proof_is_asked_for() -> None:
    slow = replace(SLOW, memory_bytes=FAST.memory_bytes)
    nodes = [(f"{gpu.name}{i}", gpu, 8) for i in range(10) for gpu in (FAST, slow)]
    workload = make_workload(num_layers=8, global_batch_size=320, hidden_size=2048)
    costs = CostModel(make_cluster(*nodes), workload)
    quick, proof = step_time_bound(costs), step_time_bound(costs, effort=PROOF)
    assert quick.step_time_s == work_bound_s(costs)
    assert "memory" in quick.relaxes
    assert "memory" not in proof.relaxes
    assert proof.step_time_s > 1.02 * quick.step_time_s
