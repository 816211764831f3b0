"""One way to set stock Megatron's flags: all divisions of the layers, and what none falls below."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.place import NEVER
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.settings import StockRecompute, StockSettings
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import parts
from tests.planner.stock.enumerated import stock_grids

MIB = 1 << 20
RECOMPUTES: tuple[StockRecompute, ...] = ("as needed", "none", "selective", "full")


def problem_of(memory_mib: int = 1 << 20, between: Link | None = None) -> Problem:
    fast, slow = (replace(gpu, memory_bytes=memory_mib * MIB) for gpu in (FAST, SLOW))
    cluster = make_cluster(("a", fast, 2), ("b", slow, 2), between=between or Link(3e9, 2e-5))
    return make_problem(cluster, make_workload(num_layers=6, global_batch_size=8, seq_length=1024))


def grids(problem: Problem, num_stages: int, num_replicas: int = 1) -> list[StockGrid]:
    found = [
        grid
        for grid in stock_grids(problem)[0]
        if grid.num_stages == num_stages and len(grid.chains) == num_replicas and grid.width == 1
    ]
    assert found
    return found


def divisions(num_stages: int) -> np.ndarray:
    return np.array(list(parts(6, num_stages)), np.int64)


def placed(grid: StockGrid, layers: tuple[int, ...], number: int) -> Placement:
    return Placement(
        tuple(
            PlacedReplica(
                tuple(PlacedStage(u.devices, n) for u, n in zip(chain, layers, strict=True)), number
            )
            for chain in grid.chains
        )
    )


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_no_division_is_quicker_than_the_quick_time(
    recompute: StockRecompute, num_stages: int, num_replicas: int
) -> None:
    problem = problem_of()
    for grid in grids(problem, num_stages, num_replicas)[:4]:
        case = StockCase(problem, grid, StockSettings(1, recompute))
        least = case.least_times_s(divisions(num_stages))
        assert case.pace_s() <= case.quick_s() <= least.min() * (1 + 1e-9)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_times_are_never_below_the_cost_models_pipelines(num_stages: int) -> None:
    """Stock Megatron waits for its sends; the cost model's 1F1B does not."""
    problem = problem_of()
    grid = grids(problem, num_stages)[0]
    case = StockCase(problem, grid, StockSettings(1, "none"))
    of = divisions(num_stages)
    for layers, least_s in zip(of.tolist(), case.least_times_s(of).tolist(), strict=True):
        cost = problem.costs.placement(placed(grid, tuple(layers), 8))
        assert least_s >= cost.pipelines_s * (1 - 1e-9)
        assert least_s <= 2 * cost.step_time_s


@pytest.mark.parametrize("memory_mib", [100, 200, 300, 450])
def test_what_does_not_fit_is_infinite(memory_mib: int) -> None:
    problem = problem_of(memory_mib)
    grid = grids(problem, 2)[0]
    case = StockCase(problem, grid, StockSettings(1, "none"))
    of = divisions(2)
    for layers, least_s in zip(of.tolist(), case.least_times_s(of).tolist(), strict=True):
        fits = problem.costs.placement(placed(grid, tuple(layers), 8)).missing_bytes <= 0
        assert (least_s < inf) == fits


@pytest.mark.parametrize("memory_mib", [200, 240, 300])
def test_recompute_as_needed_is_as_little_as_fits(memory_mib: int) -> None:
    problem = problem_of(memory_mib)
    grid = grids(problem, 2)[0]
    case = StockCase(problem, grid, StockSettings(1, "as needed"))
    of = divisions(2)
    numbers = case.layers_to_recompute(of)
    costs = problem.costs
    for layers, number in zip(of.tolist(), numbers.tolist(), strict=True):

        def fits(some: int, layers: list[int] = layers) -> bool:
            (own,) = placed(grid, tuple(layers), 8).replicas
            stages = tuple(
                replace(s, recompute="full", recompute_num_layers=min(some, s.num_layers))
                for s in own.stages
            )
            if not some:
                stages = own.stages
            return costs.placement(Placement((replace(own, stages=stages),))).missing_bytes <= 0

        least = next((some for some in range(max(layers) + 1) if fits(some)), NEVER)
        assert number == least or (number >= NEVER and least == NEVER)


def test_stage_layers_are_those_that_fit_and_are_in_time() -> None:
    problem = problem_of(320)
    grid = grids(problem, 2)[0]
    case = StockCase(problem, grid, StockSettings(1, "none"))
    every = case.stage_layers(inf)
    least = case.least_times_s(divisions(2))
    for layers, least_s in zip(divisions(2).tolist(), least.tolist(), strict=True):
        is_there = all(n in of for n, of in zip(layers, every, strict=True))
        assert is_there == (least_s < inf)
    below_s = float(np.median(least[np.isfinite(least)]))
    soon = case.stage_layers(below_s)
    for layers, least_s in zip(divisions(2).tolist(), least.tolist(), strict=True):
        if least_s < below_s:  # nothing that could be sooner is left out
            assert all(n in of for n, of in zip(layers, soon, strict=True))
    assert case.stage_layers(0.0) == [[], []]


@pytest.mark.parametrize(("chunks", "vocab_size"), [(2, 1000), (3, 1000), (3, 20_000)])
def test_interleaved_stages_take_and_keep_what_the_simulation_says(
    chunks: int, vocab_size: int
) -> None:
    """On two machines, whose messages share no path: equal steps; what fits there fits here, also
    where most layers are kept at another moment than the head; but that the simulation counts up
    to three messages that wait to be sent, as the plug-in has them."""
    workload = make_workload(
        num_layers=9, global_batch_size=8, seq_length=1024, vocab_size=vocab_size
    )
    messages = 3 * 2 * workload.model.seq_length * workload.model.hidden_size
    found = set()
    for memory_mib in (260, 300, 340, 400, 640, 680, 720, 760, 1 << 20):
        fast, slow = (replace(gpu, memory_bytes=memory_mib * MIB) for gpu in (FAST, SLOW))
        cluster = make_cluster(("a", fast, 1), ("b", slow, 1), between=Link(3e9, 2e-5))
        problem = make_problem(cluster, workload)
        for grid in grids(problem, 2):
            case = StockCase(problem, grid, StockSettings(1, "none", chunks))
            of = np.array(list(parts(9, 2 * chunks))[::3], np.int64)
            for division, least_s in zip(of.tolist(), case.least_times_s(of).tolist(), strict=True):
                step = simulate_plan(stock_plan(case, division, 0), cluster, is_stock=True)
                over = max(t.peak_memory_bytes - t.capacity_bytes for t in step.timelines)
                found.add(over <= 0)
                assert least_s < inf if over <= 0 else least_s == inf or over <= messages
                if over <= 0:
                    assert least_s == pytest.approx(step.step_time_s, rel=1e-9)
    assert found == {True, False}


def test_chunks_sum_to_stages() -> None:
    problem = problem_of()
    case = StockCase(problem, grids(problem, 2)[0], StockSettings(1, "none", 3))
    # Chunk by chunk: stage 0 has layers 1, 3 and 5 of these, stage 1 the others.
    assert case.stages_of(np.array([[1, 2, 3, 4, 5, 6]])).tolist() == [[9, 12]]
    assert (
        case.sends,
        StockCase(problem, grids(problem, 2)[0], StockSettings(1, "none")).sends,
    ) == (
        "overlapped",
        "waited",
    )


def test_micro_batches_of_a_case() -> None:
    problem = problem_of()
    one = StockCase(problem, grids(problem, 2)[0], StockSettings(2, "none"))
    two = StockCase(problem, grids(problem, 2, 2)[0], StockSettings(1, "none"))
    assert (one.num_micro_batches, two.num_micro_batches) == (4, 4)


def test_slower_links_never_make_it_sooner() -> None:
    of = divisions(2)
    times = []
    for link in (Link(3e10, 1e-6), Link(3e9, 2e-5), Link(3e8, 1e-3)):
        problem = problem_of(between=link)
        grid = next(g for g in grids(problem, 2) if {u.node for u in g.chains[0]} == {"a", "b"})
        times.append(StockCase(problem, grid, StockSettings(1, "none")).least_times_s(of))
    assert (times[0] <= times[1]).all() and (times[1] < times[2]).all()
