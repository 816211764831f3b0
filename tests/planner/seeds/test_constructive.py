"""Placements built from widths and deals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds import constructive as module
from megatron_hetero.planner.seeds.constructive import Constructive, cut_node, layers_per_s
from megatron_hetero.planner.units import Unit
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import naive_placements
from tests.planner.strategies import clusters, workloads

WORKLOAD = make_workload(num_layers=6, global_batch_size=8)


def problem_of(*nodes: tuple, **limits: object) -> Problem:
    cluster = make_cluster(*nodes, limits=replace(AS_GIVEN, **limits))  # type: ignore[arg-type]
    return make_problem(cluster, WORKLOAD)


def unit(name: str, *indices: int) -> Unit:
    return Unit(name, indices)


@settings(max_examples=30)
@given(clusters(max_gpus=4), workloads(max_layers=4, max_micro_batches=4))
def test_it_is_near_what_one_would_try_by_hand_or_better(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    board = Scoreboard(problem)
    Constructive().search(board)
    costs = [problem.costs.placement(p) for p in naive_placements(cluster, workload)]
    fitting = [c.step_time_s for c in costs if c.missing_bytes <= 0]
    if fitting:
        assert board.best is not None
        # Layers follow from quick times, in which small exchanges are left out.
        assert board.best.step_time_s <= 1.1 * min(fitting)


def test_a_node_is_cut_into_groups_of_one_width_and_a_rest() -> None:
    problem = problem_of(("a", FAST, 7))
    node = problem.nodes[0]
    assert [u.indices for u in cut_node(problem, node, 4)] == [(0, 1, 2, 3), (4, 5), (6,)]
    assert [u.width for u in cut_node(problem, node, 2)] == [2, 2, 2, 1]
    assert [u.width for u in cut_node(problem, node, 1)] == [1] * 7


def test_idle_gpus_are_in_no_group() -> None:
    problem = problem_of(("a", FAST, 4), idle_devices=("a:1",))
    found = cut_node(problem, problem.nodes[0], 2)
    assert [u.indices for u in found] == [(0, 2), (3,)]


def test_speeds_are_those_of_a_layer() -> None:
    problem = problem_of(("a", FAST, 2), ("b", SLOW, 2))
    for name, width in (("a", 1), ("a", 2), ("b", 1)):
        of = unit(name, *range(width))
        node = problem.cluster.node_by_name[name]
        layer_s = problem.costs.pieces(node, width, 1000).layer.total_s
        assert layers_per_s(problem, of) == pytest.approx(1 / layer_s)
    assert layers_per_s(problem, unit("a", 0)) > layers_per_s(problem, unit("b", 0))


WEIGHTS = {"a": 3.0, "b": 1.0}


def weight(of: Unit) -> float:
    return WEIGHTS[of.node]


def test_the_heaviest_go_to_the_lightest() -> None:
    """Weights 3, 3, 1, 1, 1 among two: 3 + 1 + 1 and 3 + 1."""
    units = [unit("a", 0), unit("a", 1), *(unit("b", i) for i in range(3))]
    deal = module._balanced(units, 2, weight)
    assert [sum(map(weight, own)) for own in deal] == [5.0, 4.0]
    assert [u.node for u in deal[0]] == ["a", "b", "b"]


def test_cards_are_dealt_in_turn() -> None:
    units = [unit("a", i) for i in range(5)]
    assert module._dealt(units, 2) == [units[0::2], units[1::2]]


def test_runs_of_neighbours_by_hand() -> None:
    """Weights 3, 1, 1, 1: a run of the first alone, and one of the others."""
    units = [unit("a", 0), unit("b", 0), unit("b", 1), unit("b", 2)]
    assert module._contiguous(units, 2, weight) == [units[:1], units[1:]]
    assert module._contiguous(units, 4, weight) == [[u] for u in units]


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=9), st.integers(1, 5))
def test_every_unit_is_dealt_once_and_every_replica_has_one(names: list[str], num: int) -> None:
    if num > len(names):
        return
    units = [unit(name, i) for i, name in enumerate(names)]
    for deal in (
        module._balanced(units, num, weight),
        module._dealt(units, num),
        module._contiguous(units, num, weight),
    ):
        assert len(deal) == num and all(deal)
        assert sorted(u for own in deal for u in own) == sorted(units)
    run = module._contiguous(units, num, weight)
    assert [u for own in run for u in own] == units  # neighbours stay neighbours


def test_widths_are_chosen_for_classes_of_like_nodes_or_left_idle_and_one_unit_alone() -> None:
    problem = problem_of(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 1))
    found = {
        tuple(sorted((u.node, u.width) for u in units)) for units in module._width_choices(problem)
    }
    fast = {(), (("a", 2), ("b", 2)), (("a", 1),) * 2 + (("b", 1),) * 2}
    expected = {tuple(sorted((*one, *rest))) for one in fast for rest in ((), (("c", 1),))}
    alone = {(("a", 1),), (("a", 2),)}
    assert found == (expected | alone) - {()}


def test_replica_counts_leave_no_pipeline_too_long() -> None:
    problem = problem_of(("a", FAST, 8), max_pipeline_parallel=2)
    assert min(module._replica_counts(problem, 8)) == 4
    assert module._replica_counts(problem_of(("a", FAST, 8), num_replicas=2), 8) == [2]


def test_less_work_prices_fewer_placements() -> None:
    problem = problem_of(("a", FAST, 4), ("b", SLOW, 4))
    boards = []
    for work in (10, 100, 24_000):
        boards.append(Scoreboard(problem))
        Constructive(max_work=work).search(boards[-1])
    priced = [board.num_priced for board in boards]
    assert priced == sorted(priced) and priced[0] < priced[-1]
    assert all(board.best is not None for board in boards)
