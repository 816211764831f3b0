"""No bound of stock's search is above what it bounds: of forms, grids, whole layers, divisions."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import dispatchers, expert_groups
from megatron_hetero.model.training import CpCommType
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.best import StockBest
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import divisions_in_time, stage_divisions
from megatron_hetero.planner.stock.forms import contexts, forms, groups_fit_grid
from megatron_hetero.planner.stock.grid_bounds import GridBounds
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks, grids_of
from megatron_hetero.planner.stock.limits import StockLimits
from megatron_hetero.planner.stock.orders import stock_ranks
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.planner.stock.rates import GroupForm, StockRates
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.strategies import clusters

SLACK = 1 + 1e-9


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few GPUs and a model with experts, or long sequences."""
    cluster = draw(clusters(max_gpus=8, limits=FREE))
    num_experts = draw(st.sampled_from([0, 4, 8]))
    workload = make_workload(
        num_layers=draw(st.integers(2, 6)),
        global_batch_size=draw(st.sampled_from([4, 8, 16])),
        seq_length=draw(st.sampled_from([256, 1024])),
        num_experts=num_experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=512,
        vocab_size=draw(st.sampled_from([1000, 32000])),
        sequence_parallel=num_experts > 0 or draw(st.booleans()),
        use_distributed_optimizer=draw(st.booleans()),
        flash_attention=True,
        per_token_loss=True,
        grouped_experts=True,
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        cp_comm_type=draw(st.sampled_from(get_args(CpCommType))),
    )
    return make_problem(cluster, workload)


def drawn_case(problem: Problem, data: st.DataObject) -> tuple[StockRanks, StockCase]:
    """Any grid that Megatron takes, with any way to deal experts out."""
    every, _ = stock_ranks(problem, 100)
    ranks = data.draw(st.sampled_from(every))
    context = data.draw(st.sampled_from(contexts(problem, ranks)))
    batch = problem.workload.training.global_batch_size
    grids = [g for g in grids_of(problem, ranks, context) if batch % g.num_replicas == 0]
    grids = [g for g in grids if g.num_stages <= problem.num_layers]
    assume(grids)
    grid = data.draw(st.sampled_from(grids))
    num_gpus = len(ranks.units) * ranks.width
    groups = [
        one
        for one in (None, *expert_groups(problem.costs, ranks.width, num_gpus))
        if groups_fit_grid(grid, one)
    ]
    assume(groups)
    sequences = batch // grid.num_replicas
    size = data.draw(st.sampled_from([n for n in (1, 2, 4) if sequences % n == 0]))
    number, depth = sequences // size, grid.num_stages
    may_cut = depth > 1 and number % depth == 0
    most = problem.num_layers // depth if may_cut else 1
    chunks = data.draw(st.integers(1, min(most, 3)))
    own = StockSettings(
        size,
        data.draw(st.sampled_from(["as needed"] if chunks == 1 else ["none", "full"])),
        chunks,
        data.draw(st.sampled_from(groups)),
        data.draw(st.sampled_from(dispatchers(problem.costs))),
    )
    return ranks, StockCase(problem, grid, own, StockPrices(problem))


def divisions_of(case: StockCase) -> np.ndarray:
    found, is_all = divisions_in_time(case, float("inf"), 5000)
    assert is_all
    return found


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.data())
def test_each_bound_is_at_most_the_next(problem: Problem, data: st.DataObject) -> None:
    assume(problem.nodes)
    ranks, case = drawn_case(problem, data)
    rates = StockRates(problem, stock_ranks(problem, 100)[0])
    form = GroupForm(case.grid.width, case.grid.context_parallel, case.settings)
    plain = replace(case.settings, expert_groups=None)
    bounds = {
        "any dealing": rates.dealt_pace_s(ranks, replace(form, settings=plain)),
        "form": rates.pace_s(ranks, form),
        # A grid without room for the model is left out.
        "grid": next(
            (
                bound_s
                for grid, bound_s in zip(
                    *GridBounds(problem, rates).paces_s(ranks, form, case.num_chunks), strict=True
                )
                if grid.shape == case.grid.shape
            ),
            np.inf,
        ),
        "pace": case.pace_s(),
        "any chunks": case.quick_s(4),
        "quick": case.quick_s(),
        "whole layers": case.least_s(),
    }
    event(f"experts {case.settings.expert_groups is not None}, chunks {case.num_chunks}")
    assert bounds["any dealing"] <= bounds["form"] * SLACK
    assert bounds["form"] <= bounds["pace"] * SLACK
    assert bounds["any chunks"] <= bounds["quick"] * SLACK
    of = divisions_of(case)
    if not len(of):
        return
    least = case.least_times_s(of)
    for name, bound_s in bounds.items():
        assert bound_s <= least.min() * SLACK, name
    if np.isinf(least).all():
        return
    # The division of the lowest bound, as Megatron would run it.
    best = int(np.argmin(least))
    kept = int(case.layers_to_recompute(case.stages_of(of[best : best + 1]))[0])
    plan = stock_plan(case, of[best].tolist(), kept)
    step = simulate_plan(plan, problem.cluster, is_stock=True)
    assert least[best] <= step.step_time_s * SLACK


def test_forms_that_have_a_shorter_like_are_left_out() -> None:
    h100 = gpu_type("H100-80GB")
    cluster = make_cluster(("a", h100, 8), limits=FREE)
    workload = make_workload(
        seq_length=4096, global_batch_size=8, flash_attention=True, per_token_loss=True
    )
    problem = make_problem(cluster, workload)
    (ranks,) = [r for r in stock_ranks(problem)[0] if r.width == 1 and len(r.units) == 8]
    found = {(f.context_parallel, f.settings.micro_batch_size) for f in forms(problem, ranks)}
    assert found == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1)}
    # What is left out takes no less time than its like.
    for context in (2, 4):
        steps_s = []
        for size, own in ((context, context), (1, 1)):
            replicas = 8 // own // 2
            (grid,) = [
                g
                for g in grids_of(problem, ranks, own)
                if g.num_replicas == replicas and g.rank_order == "tp-dp-pp"
            ]
            case = StockCase(problem, grid, StockSettings(size, "as needed"))
            steps_s.append(float(case.least_times_s(np.array([[2, 2]]))[0]))
        assert steps_s[1] <= steps_s[0] * SLACK
    held = replace(cluster, limits=replace(FREE, num_replicas=2))
    every = {
        (f.context_parallel, f.settings.micro_batch_size)
        for f in forms(make_problem(held, workload), ranks)
    }
    assert (2, 2) in every


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.data())
def test_a_form_that_is_left_out_is_no_quicker_than_its_like(
    problem: Problem, data: st.DataObject
) -> None:
    """On any nodes, with experts dealt out or not."""
    assume(problem.nodes)
    batch = problem.workload.training.global_batch_size
    cases = []
    for ranks in stock_ranks(problem, 100)[0]:
        for context in contexts(problem, ranks):
            for grid in grids_of(problem, ranks, context):
                sequences, rest = divmod(batch, grid.num_replicas)
                sizes = [n for n in (2, 4) if gcd(n, context) > 1 and sequences % n == 0]
                is_laid = grid.rank_order == "tp-dp-pp" and grid.num_stages <= problem.num_layers
                cases += [(grid, n) for n in sizes if not rest and is_laid]
    assume(cases)
    grid, size = data.draw(st.sampled_from(cases))
    num_gpus = len(grid.ranks.units) * grid.width
    every = (None, *expert_groups(problem.costs, grid.width, num_gpus))
    fitting = [own for own in every if groups_fit_grid(grid, own)]
    assume(fitting)
    groups = data.draw(st.sampled_from(fitting))
    divisor = gcd(grid.context_parallel, size)
    (like,) = [
        one
        for one in grids_of(problem, grid.ranks, grid.context_parallel // divisor)
        if one.num_stages == grid.num_stages and one.rank_order == "tp-dp-pp"
    ]
    assume(groups_fit_grid(like, groups))
    prices = StockPrices(problem)
    case, other = (
        StockCase(problem, one, StockSettings(number, "as needed", 1, groups), prices)
        for one, number in ((grid, size), (like, size // divisor))
    )
    of = stage_divisions(problem.num_layers, [range(1, problem.num_layers + 1)] * grid.num_stages)
    assert (other.least_times_s(of) <= case.least_times_s(of) * SLACK).all()


@pytest.mark.parametrize("chunks", [1, 2])
def test_two_short_steps_tell_how_long_a_long_one_takes(chunks: int) -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(3e9, 2e-5), limits=FREE)
    workload = make_workload(
        num_layers=8, global_batch_size=128, seq_length=1024, hidden_size=1024
    )
    problem = make_problem(cluster, workload)
    grid: StockGrid = next(
        grid
        for ranks in stock_ranks(problem)[0]
        if ranks.width == 1 and len(ranks.units) == 8
        for grid in grids_of(problem, ranks, 1)
        if grid.num_stages == 2 and grid.rank_order == "tp-dp-pp"
    )
    case = StockCase(problem, grid, StockSettings(1, "none", chunks))
    division = (5, 3) if chunks == 1 else (3, 1, 2, 2)
    whole, short = (
        StockBest(problem, StockLimits(num_messages=number)) for number in (10**9, 10)
    )
    assert whole.try_division(case, division, 1.0) and short.try_division(case, division, 1.0)
    exact, told = whole.result(True, 0), short.result(True, 0)
    assert exact is not None and told is not None
    assert exact.is_simulated and not told.is_simulated and exact.plan == told.plan
    assert told.step_time_s == pytest.approx(exact.step_time_s, rel=0.01)
    # Too many messages for two short steps as well: its price stands, not its bound.
    none = StockBest(problem, StockLimits(num_messages=10, num_short_messages=10))
    assert not none.try_division(case, division, 1e-3)
    left = none.result(True, 0)
    assert left is not None and left.is_simulated and left.plan == exact.plan
    assert left.step_time_s == pytest.approx(exact.step_time_s, rel=0.01)
    # Nor does it beat what is known to be faster than that.
    none.keep(exact.plan, 0.9 * exact.step_time_s)
    best = none.result(True, 0)
    assert best is not None and best.step_time_s == 0.9 * exact.step_time_s


def test_a_step_of_few_micro_batches_is_simulated_in_place_of_two_short_ones() -> None:
    cluster = make_cluster(("a", FAST, 4), between=Link(3e9, 2e-5), limits=FREE)
    problem = make_problem(cluster, make_workload(num_layers=8, global_batch_size=16))
    (ranks,) = [own for own in stock_ranks(problem)[0] if own.width == 1 and len(own.units) == 4]
    grid = next(own for own in grids_of(problem, ranks, 1) if own.num_stages == 2)
    case = StockCase(problem, grid, StockSettings(1, "none", 1))
    assert case.num_micro_batches == 8
    found = StockBest(problem, StockLimits(num_messages=10))
    step_s = found.try_division(case, (4, 4), 1e-3)
    best = found.result(True, 0)
    assert best is not None and best.is_simulated and best.step_time_s == step_s
    assert step_s == simulate_plan(best.plan, cluster, is_stock=True).step_time_s


def cluster_with_room() -> Cluster:
    return make_cluster(("a", FAST, 2), ("b", SLOW, 2), limits=FREE)


def test_chunks_make_room_for_the_head() -> None:
    workload = make_workload(num_layers=16, global_batch_size=8, vocab_size=120_000)
    problem = make_problem(cluster_with_room(), workload)
    grid = next(
        grid
        for ranks in stock_ranks(problem)[0]
        if ranks.width == 1 and len(ranks.units) == 2
        for grid in grids_of(problem, ranks, 1)
        if grid.num_stages == 2
    )
    case = StockCase(problem, grid, StockSettings(1, "none", 2))
    ways = case.chunks_of_stages()
    assert {tuple(way[0, 7].tolist()) for way in ways} == {(4, 3), (3, 4)}
    last = {tuple(way[1, 8].tolist()) for way in ways}
    assert (4, 4) in last and any(own[1] < 4 for own in last)
    for way in ways:
        layers = np.arange(2, 17)
        assert (way[:, 2:].sum(axis=2) == layers).all() and (way[:, 2:] >= 1).all()
