"""Paths that replicas share: groups are exchanged to relieve them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Line, Link
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.step_cost import path_seconds
from megatron_hetero.planner.problem import Chain, Problem, Unit, make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.search.spread import Spreader

BETWEEN = Link(1e9, 1e-5)


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
