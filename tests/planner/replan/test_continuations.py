"""Ways to go on from an old plan: what moves, and which are worth having."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.holdings import held_bytes
from megatron_hetero.cost.movement import Movement
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.replan.continuations import (
    LEFT_IDLE,
    Continuation,
    Continuations,
    front_of,
)
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=6, global_batch_size=8)
BOXES = make_cluster(("a", FAST, 2), ("b", SLOW, 2))


def old_plan(cluster: Cluster = BOXES) -> Plan:
    return plan_cluster(cluster, WORKLOAD, strategy="constructive")


def continuations(
    old: Plan, cluster: Cluster = BOXES, objective: Objective | None = None
) -> tuple[Continuations, Scoreboard]:
    problem = make_problem(cluster, WORKLOAD, objective=objective or Objective())
    board = Scoreboard(problem)
    Constructive().search(board)
    return Continuations(problem, old, None), board


def way(step_s: float, move_s: float | None, moved: float = 0.0) -> Continuation:
    return Continuation(step_s, Movement(moved, 0.0, move_s), None, None, True)


def test_the_front_by_hand() -> None:
    """What moves more must be faster than all that move less."""
    ways = [way(5.0, 0.0), way(6.0, 1.0), way(4.0, 2.0), way(4.0, 3.0), way(3.0, 9.0)]
    assert [w.step_time_s for w in front_of(ways)] == [5.0, 4.0, 3.0]
    assert [w.movement.time_s for w in front_of(ways)] == [0.0, 2.0, 9.0]
    assert front_of([]) == []


def test_unknown_times_of_moving_come_last_by_bytes() -> None:
    ways = [way(1.0, None, 5.0), way(2.0, None, 3.0), way(9.0, 4.0)]
    assert [w.step_time_s for w in front_of(ways)] == [9.0, 2.0, 1.0]


ways_of = st.lists(
    st.builds(way, st.floats(0.1, 9), st.one_of(st.none(), st.floats(0, 9)), st.floats(0, 9)),
    max_size=8,
)


@given(ways_of)
def test_no_way_beats_one_of_the_front_on_both(ways: list[Continuation]) -> None:
    front = front_of(ways)
    for before, after in pairwise(front):
        assert before.key <= after.key
        assert after.step_time_s < before.step_time_s
    for one in ways:
        assert any(
            kept.key <= one.key and kept.step_time_s <= one.step_time_s * (1 + 2e-6)
            for kept in front
        )


def test_an_unchanged_plan_moves_nothing() -> None:
    found, _ = continuations(old_plan())
    found.add_kept()
    (kept,) = found.found
    assert kept.movement == Movement(0.0, 0.0, 0.0)
    assert kept.plan is not None and kept.is_final
    assert kept.plan.replicas == old_plan().replicas


def test_a_candidate_with_the_same_placement_moves_nothing_either() -> None:
    found, board = continuations(old_plan())
    assert board.best is not None
    moved = [found.way(candidate).movement.moved_bytes for candidate in board.ranking]
    assert min(moved) == pytest.approx(0.0, abs=1.0)
    assert max(moved) > 0


def test_movement_is_no_more_than_what_a_plan_holds() -> None:
    found, board = continuations(old_plan())
    for candidate in board.ranking[:8]:
        of = found.way(candidate)
        assert of.candidate is not None
        assert of.movement.lost_bytes == 0.0  # nothing was lost
        assert 0 <= of.movement.moved_bytes < 1e12


def test_candidates_are_measured_once() -> None:
    found, board = continuations(old_plan())
    assert board.best is not None
    assert found.add(board.best) is not None
    assert found.add(board.best) is None
    assert len(found.found) == 1


def test_candidates_that_break_limits_are_left_out() -> None:
    found, board = continuations(old_plan(), objective=Objective("throughput", 1, 1e-9))
    assert board.best is None and board.nearest is not None
    assert found.add(board.nearest) is None
    found.add_kept()
    assert found.found == []


def test_the_old_plan_pays_its_traffic_from_the_budget_too() -> None:
    """Machines that cost next to nothing, and bytes between their sites that cost a fortune."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), sites=["west", "east"])
    nodes = tuple(replace(node, price_per_hour=1e-9) for node in cluster.nodes)
    free = replace(cluster, nodes=nodes)
    dear = replace(free, prices_per_gb={("west", "east"): 1e3, ("east", "west"): 1e3})
    # A pipeline over both sites, made where traffic is free.
    old = place_in_order(
        replace(plan_from_layout(parse_layout("tp2:3,tp2:3 @8"), WORKLOAD), workload=WORKLOAD), free
    )
    for priced, kept in ((free, 1), (dear, 0)):
        found, _ = continuations(old, priced, Objective("throughput", 1, budget=1e-6))
        found.add_kept()
        assert len(found.found) == kept


def test_stock_alone_wants_stock_alone() -> None:
    found, board = continuations(old_plan(), objective=Objective(stock_only=True))
    added = [found.add(candidate) is not None for candidate in board.ranking]
    assert added == [candidate.is_stock for candidate in board.ranking]


def test_gpus_that_are_lost_or_of_another_type_are_not_alive() -> None:
    old = old_plan()
    idle = replace(BOXES, limits=replace(AS_GIVEN, idle_devices=("b:1",)))
    found, _ = continuations(old, idle)
    assert found.alive == {"a:0", "a:1", "b:0"}
    other = make_cluster(("a", SLOW, 2), ("b", SLOW, 2))
    found, _ = continuations(old, other)
    assert found.alive == {"b:0", "b:1"}
    assert set(found.kept) <= {"b:0", "b:1"}
    assert all(held_bytes(found.sizes, kept) > 0 for kept in found.kept.values())


def test_a_plan_that_lost_a_gpu_is_not_kept() -> None:
    old = old_plan()
    used = [d for r in old.replicas for s in r.stages for d in s.devices]
    idle = replace(BOXES, limits=replace(AS_GIVEN, idle_devices=(used[0],)))
    found, _ = continuations(old, idle)
    found.add_kept()
    assert found.found == []


def test_what_the_old_plan_does_not_use_is_left_idle() -> None:
    larger = make_cluster(("a", FAST, 2), ("b", SLOW, 2), ("c", SLOW, 1))
    found, _ = continuations(old_plan(), larger)
    found.add_kept()
    (kept,) = found.found
    assert kept.plan is not None
    assert kept.plan.idle_reasons["c:0"] == LEFT_IDLE


def test_the_front_is_priced_with_queues() -> None:
    found, board = continuations(old_plan())
    found.add_kept()
    for candidate in board.ranking[:6]:
        found.add(candidate)
    front = found.front(Rescorer(board))
    assert front and all(w.is_final for w in front)
    steps_s = [w.step_time_s for w in front]
    assert steps_s == sorted(steps_s, reverse=True)
    assert front[0].movement.moved_bytes == pytest.approx(0.0, abs=1.0)
