"""Like groups stand in for each other: what is exchanged holds the same groups of each kind."""

from __future__ import annotations

from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.moves.like_groups import lengthwise
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.units import Unit, chains_of
from tests.planner.moves.test_neighbours import check
from tests.planner.strategies import cases, clusters, workloads


@settings(max_examples=cases(30), deadline=None)
@given(cluster=clusters(max_gpus=8), workload=workloads(6, 8))
def test_lengthwise_holds_the_same_groups_of_each_kind(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    like = problem.likeness.node
    kind_of = {node.name: like(node.name) for node in problem.nodes}
    for found in search(problem, strategies=[Symmetric()]).ranking_of_all[:5]:
        structure = tuple(chains_of(found.placement))
        laid = lengthwise(structure, kind_of)
        check(problem, laid)
        assert sorted(map(repr, sum(laid, ()))) == sorted(map(repr, sum(structure, ())))
        for chain, other in zip(structure, laid, strict=True):
            for unit, moved in zip(chain, other, strict=True):
                assert (like(unit.node), unit.form) == (like(moved.node), moved.form)
        assert lengthwise(laid, kind_of) == laid


def test_lengthwise_keeps_activations_inside_nodes() -> None:
    side_by_side = tuple(tuple(Unit(node, (r,)) for node in "abcd") for r in range(2))
    laid = lengthwise(side_by_side, dict.fromkeys("abcd", 0))
    assert [[unit.node for unit in chain] for chain in laid] == [list("aabb"), list("ccdd")]
