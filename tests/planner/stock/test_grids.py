"""Grids of ranks that stock Megatron can lay: beside all sequences of nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.stock_ranks import RANK_ORDERS, places_by_rank
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.orders import stock_ranks
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload
from tests.planner.stock.enumerated import stock_grids

WORKLOAD = make_workload(num_layers=4, global_batch_size=8)


def problem_of(*nodes: tuple, limits: Limits = AS_GIVEN) -> Problem:
    return make_problem(make_cluster(*nodes, limits=limits), WORKLOAD)


def shape(chains: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Equal for grids whose replicas change their places."""
    return tuple(sorted(chains))


def all_grids(problem: Problem) -> set[tuple[int, tuple[tuple[str, ...], ...]]]:
    """Width, and the nodes of every replica's stages, of every sequence of nodes."""
    found = set()
    names = [node.name for node in problem.nodes]
    for width in (1, 2, 4):
        for num in range(1, len(names) + 1):
            for order in permutations(names, num):
                menus = [range(1, len(problem.gpus[name]) // width + 1) for name in order]
                for amounts in product(*menus):
                    groups = [
                        n for n, most in zip(order, amounts, strict=True) for _ in range(most)
                    ]
                    for replicas in problem.replica_counts():
                        stages, rest = divmod(len(groups), replicas)
                        if rest or not 0 < stages <= problem.max_stages():
                            continue
                        for ranks in RANK_ORDERS:
                            place = {
                                (d, p): groups[rank]
                                for rank, (d, p, _) in enumerate(
                                    places_by_rank(ranks, replicas, stages, 1)
                                )
                            }
                            chains = tuple(
                                tuple(place[d, p] for p in range(stages)) for d in range(replicas)
                            )
                            found.add((width, shape(chains)))
    return found


def shapes(grids: tuple[StockGrid, ...]) -> set[tuple[int, tuple[tuple[str, ...], ...]]]:
    return {
        (g.width, shape(tuple(tuple(u.node for u in chain) for chain in g.chains))) for g in grids
    }


@pytest.mark.parametrize(
    "nodes",
    [
        (("a", FAST, 2), ("b", SLOW, 2)),
        (("a", FAST, 3), ("b", SLOW, 1)),
        (("a", FAST, 1), ("b", SLOW, 2), ("c", replace(SLOW, name="OTHER"), 1)),
    ],
)
def test_unlike_nodes_have_every_grid_once(nodes: tuple) -> None:
    problem = problem_of(*nodes)
    grids, is_complete = stock_grids(problem)
    assert is_complete
    assert shapes(grids) == all_grids(problem)
    assert len(grids) == len(shapes(grids))


def test_like_nodes_stand_for_each_other() -> None:
    like = problem_of(("a", FAST, 2), ("b", FAST, 2))
    grids, _ = stock_grids(like)
    renamed = {
        (w, shape(tuple(tuple("ba"["ab".index(n)] for n in chain) for chain in chains)))
        for w, chains in shapes(grids)
    }
    assert shapes(grids) | renamed == all_grids(like)
    assert len(grids) < len(all_grids(like))


def test_nodes_with_other_links_are_not_like() -> None:
    cluster: Cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1))
    links = {
        pair: Link(1e8, 1e-3) if set(pair) == {"a", "c"} else link
        for pair, link in cluster.node_links.items()
    }
    near, _ = stock_grids(make_problem(cluster, WORKLOAD))
    far, _ = stock_grids(make_problem(replace(cluster, node_links=links), WORKLOAD))
    assert len(far) > len(near)


def test_a_grid_uses_each_gpu_once_in_groups_of_one_width() -> None:
    grids, _ = stock_grids(problem_of(("a", FAST, 4), ("b", SLOW, 2)))
    assert {grid.width for grid in grids} == {1, 2, 4}
    for grid in grids:
        units = [unit for chain in grid.chains for unit in chain]
        devices = [device for unit in units for device in unit.devices]
        assert len(devices) == len(set(devices)) == len(grid.ranks.units) * grid.width
        assert {unit.width for unit in units} == {grid.width}
        assert {len(chain) for chain in grid.chains} == {grid.num_stages}


def test_limits_are_kept() -> None:
    nodes = ("a", FAST, 2), ("b", SLOW, 2)
    pinned = replace(AS_GIVEN, first_stage_nodes=("a",), max_pipeline_parallel=2, num_replicas=1)
    grids, _ = stock_grids(problem_of(*nodes, limits=pinned))
    assert grids
    for grid in grids:
        assert len(grid.chains) == 1 and grid.num_stages <= 2
        assert grid.chains[0][0].node == "a"


def test_with_too_many_orders_every_node_gives_all_and_it_says_so() -> None:
    problem = problem_of(("a", FAST, 2), ("b", SLOW, 2))
    every, _ = stock_grids(problem)
    some, is_complete = stock_grids(problem, 3)
    assert not is_complete
    assert shapes(some) < shapes(every)
    singles = [grid for grid in some if grid.width == 1]
    assert {len(grid.ranks.units) for grid in singles} == {2, 4}


def test_among_many_kinds_of_nodes_orders_stay_few_and_all_gpus_are_in_one() -> None:
    """A cluster of a hundred sites has hundreds of kinds, of four kinds a billion orders."""
    types = [replace(SLOW, name=f"TYPE-{number % 3}") for number in range(200)]
    problem = problem_of(*((f"n{i:03}", gpu, 1 + i // 3) for i, gpu in enumerate(types)))
    ranks, is_complete = stock_ranks(problem, 100)
    assert not is_complete
    assert len(ranks) < 3_000
    single = [found for found in ranks if found.width == 1]
    total = sum(node.num_gpus for node in problem.nodes)
    assert max(len(found.units) for found in single) == total
    # Each type of GPU has an order of its own.
    for name in ("TYPE-0", "TYPE-1", "TYPE-2"):
        own = {node.name for node in problem.nodes if node.gpu_type.name == name}
        assert any({unit.node for unit in found.units} == own for found in single)
