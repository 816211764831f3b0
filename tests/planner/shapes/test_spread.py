"""Paths that replicas share: groups are exchanged to relieve them, and slow hops that launch counts
hide do not keep a shape from being found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Line, Link
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.step_cost import path_seconds
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Chain, Problem, Unit, make_problem
from megatron_hetero.planner.shapes.spread import Spreader
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, without_lines
from tools.bench_gaps import jobs

BETWEEN = Link(1e9, 1e-5)
BUDGET = Path(__file__).resolve().parents[3] / "examples/budget"


def problem_of(num_gpus: int) -> Problem:
    """Two nodes of each of two kinds."""
    nodes = [
        ("a", FAST, num_gpus),
        ("b", FAST, num_gpus),
        ("c", SLOW, num_gpus),
        ("d", SLOW, num_gpus),
    ]
    return make_problem(
        make_cluster(*nodes, between=BETWEEN), make_workload(num_layers=8, global_batch_size=16)
    )


KIND_OF = {"a": 0, "b": 0, "c": 1, "d": 1}


def path_loads(problem: Problem, chains: list[Chain], counts: list[int]) -> list[float]:
    """Seconds of each path, as the cost model has them."""
    placement = Placement(
        tuple(
            PlacedReplica(tuple(PlacedStage(unit.devices, 1) for unit in chain), count)
            for chain, count in zip(chains, counts, strict=True)
        )
    )
    costs = tuple(problem.costs.replica(r, 1024) for r in placement.replicas)
    return sorted(path_seconds(placement, costs).values(), reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_it_relieves_the_busiest_path_and_keeps_every_kind_in_its_place(
    data: st.DataObject,
) -> None:
    problem = problem_of(4)
    units = [Unit(node, (index,)) for node in KIND_OF for index in range(4)]
    order = data.draw(st.permutations(units))
    chains = [tuple(order[i : i + 4]) for i in range(0, 16, 4)]
    counts = data.draw(st.lists(st.integers(1, 6), min_size=4, max_size=4))
    found = Spreader(problem, KIND_OF).spread(chains, counts)
    if found is None:
        return
    kinds = [[KIND_OF[unit.node] for unit in chain] for chain in chains]
    assert [[KIND_OF[unit.node] for unit in chain] for chain in found] == kinds
    assert sorted(unit for chain in found for unit in chain) == sorted(units)
    before, after = path_loads(problem, chains, counts), path_loads(problem, found, counts)
    assert sum(s * s for s in after) < sum(s * s for s in before)


def test_two_replicas_take_a_path_each() -> None:
    """Laid out alike they share one path each way; the least that any exchange leaves is half."""
    problem = problem_of(2)
    alike: list[Chain] = [
        (Unit("a", (0,)), Unit("c", (0,)), Unit("d", (0,)), Unit("b", (0,))),
        (Unit("a", (1,)), Unit("c", (1,)), Unit("d", (1,)), Unit("b", (1,))),
    ]
    found = Spreader(problem, KIND_OF).spread(alike, [8, 8])
    assert found is not None
    least = min(
        path_loads(problem, [tuple(one), tuple(other)], [8, 8])[0]
        for ends in permutations([Unit(n, (i,)) for n in "ab" for i in (0, 1)])
        for inner in permutations([Unit(n, (i,)) for n in "cd" for i in (0, 1)])
        for one, other in [
            ((ends[0], *inner[:2], ends[1]), (ends[2], *inner[2:], ends[3])),
        ]
    )
    busiest = path_loads(problem, found, [8, 8])[0]
    assert busiest == pytest.approx(least)
    assert busiest == pytest.approx(path_loads(problem, alike, [8, 8])[0] / 2)


def test_a_crossing_is_moved_off_a_busy_line() -> None:
    """Two replicas go from site to site and back; with groups exchanged neither crosses."""
    problem = problem_of(2)
    west = {"b", "d"}
    nodes = tuple(
        replace(n, site="west" if n.name in west else "east") for n in problem.cluster.nodes
    )
    lines = {pair: (Line(f"line {pair}", 1e8),) for pair in (("east", "west"), ("west", "east"))}
    cluster = replace(problem.cluster, nodes=nodes, site_lines=lines)
    problem = make_problem(cluster, problem.workload)
    chains: list[Chain] = [
        (Unit("a", (0,)), Unit("d", (0,)), Unit("c", (0,)), Unit("b", (0,))),
        (Unit("a", (1,)), Unit("d", (1,)), Unit("c", (1,)), Unit("b", (1,))),
    ]
    found = Spreader(problem, KIND_OF).spread(chains, [8, 8])
    assert found is not None

    def crossings(of: list[Chain]) -> int:
        sites = [["west" if unit.node in west else "east" for unit in chain] for chain in of]
        return sum(a != b for own in sites for a, b in pairwise(own))

    assert crossings(chains) == 6 and crossings(found) == 0


@pytest.mark.slow
def test_a_slow_link_is_crossed_where_launch_counts_hide_it() -> None:
    """The search had left a whole site idle, 3.10 s: with 1F1B's counts each of these hops costs
    more than its GPUs bring, and replicas laid out alike crowd one path."""
    cluster = without_lines(load_cluster(BUDGET / "cluster.yaml"))
    workload = load_workload(BUDGET / "gpt-1.3b.flags")
    board = search(make_problem(cluster, workload))
    best = Rescorer(board).best()
    assert best is not None
    assert best.step_time_s < 2.24
    assert len({device.node for device in best.placement.devices()}) == 4


@pytest.mark.slow
def test_calm_placements_are_simulated_beside_crowded_ones() -> None:
    """Dozens that crowd one path are ahead by the quick price; with their queues they take 11.72 s
    and more, and one that spreads its messages 10.89."""
    (job,) = [job for job in jobs() if job.name.startswith("h100-a100-l40s")]
    cluster = without_lines(load_cluster(job.cluster))
    plan = plan_cluster(cluster, load_workload(job.model, job.flags))
    assert plan.estimates is not None
    assert plan.estimates.step_time_s < 10.90
