"""Structures one move away are structures: disjoint groups of usable GPUs, within the limits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.units import Structure, Unit, chains_of
from tests.cost.builders import FAST, make_cluster, make_workload
from tests.planner.strategies import cases, clusters, workloads


def check(problem: Problem, structure: Structure) -> None:
    """Raise AssertionError for what is no structure."""
    assert len(structure) in problem.replica_counts()
    units = [unit for chain in structure for unit in chain]
    places = [(unit.node, index) for unit in units for index in unit.indices]
    assert len(set(places)) == len(places)
    for unit in units:
        assert unit.width in problem.widths[unit.node]
        assert set(unit.indices) <= set(problem.gpus[unit.node])
        assert list(unit.indices) == sorted(unit.indices)
    assert all(problem.chain_is_allowed(chain) for chain in structure)


@settings(max_examples=cases(30), deadline=None)
@given(data=st.data(), cluster=clusters(max_gpus=6), workload=workloads(6, 8))
def test_moves_lead_to_structures(
    data: st.DataObject, cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    board = search(problem, strategies=[Symmetric()])
    found = board.nearest or board.out_of_memory.nearest
    if found is None:
        return
    structure = tuple(chains_of(found.placement))
    shape = Completer(problem).shape
    for _ in range(3):
        moved = list(neighbours(problem, structure, shape))
        for one in moved:
            check(problem, one)
        if moved:
            structure = data.draw(st.sampled_from(moved))


def test_a_move_is_made_in_one_replica_or_in_all_alike() -> None:
    problem = make_problem(make_cluster(("n0", FAST, 4), ("n1", FAST, 4)), make_workload())
    chain = tuple(Unit("n0", (i,)) for i in (0, 1)), tuple(Unit("n0", (i,)) for i in (2, 3))
    moved = set(neighbours(problem, chain, Completer(problem).shape))
    idle = Unit("n1", (0,)), Unit("n1", (1,))
    assert ((*chain[0], idle[0]), chain[1]) in moved
    assert ((*chain[0], idle[0]), (*chain[1], idle[1])) in moved


def test_moves_of_a_long_pipeline_of_like_stages_are_few() -> None:
    def num_moves(depth: int) -> int:
        names = [f"n{i}" for i in range(depth + 4)]
        cluster = make_cluster(*[(name, FAST, 1) for name in names])
        problem = make_problem(cluster, make_workload(64, 8))
        chain = tuple(Unit(name, (0,)) for name in names[:depth])
        return len(set(neighbours(problem, (chain,), Completer(problem).shape)))

    assert num_moves(24) == num_moves(12) > 0
