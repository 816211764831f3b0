"""Which strategies run, in which order, and how a search ends."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.collector import no_collector
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.portfolio import (
    STRATEGIES,
    default_strategies,
    search,
    strategies_of,
)
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.structure_search import StructureSearch
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
WORKLOAD = make_workload(num_layers=4, global_batch_size=4)


class Noted:
    """A strategy that notes its turn, and may be interrupted."""

    name = "noted"

    def __init__(self, turns: list[int], number: int, interrupts: bool = False) -> None:
        self.turns, self.number, self.interrupts = turns, number, interrupts

    def search(self, board: Scoreboard) -> None:
        self.turns.append(self.number)
        assert not gc.isenabled()
        if self.interrupts:
            raise KeyboardInterrupt


def priced(price: float = 1.0) -> Cluster:
    nodes = tuple(replace(node, gpu_price_per_hour=price) for node in CLUSTER.nodes)
    return replace(CLUSTER, nodes=nodes)


def test_every_name_has_strategies_with_names_of_their_own() -> None:
    for name in STRATEGIES:
        made = strategies_of(name)
        assert made and all(strategy.name for strategy in made)
    assert [s.name for s in strategies_of("auto")] == [s.name for s in default_strategies()]


def test_thorough_is_the_same_search_for_longer() -> None:
    for own, longer in zip(default_strategies(), strategies_of("thorough"), strict=True):
        assert type(own) is type(longer)
        if isinstance(own, StructureSearch):
            assert isinstance(longer, StructureSearch)
            for limit in ("max_work", "work_per_gpu"):
                assert getattr(longer.limits, limit) == 10 * getattr(own.limits, limit)
        else:
            assert vars(own) == vars(longer)


def test_a_strategy_is_new_each_time() -> None:
    assert strategies_of("exact")[0] is not strategies_of("exact")[0]


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="choose auto, columns, constructive"):
        strategies_of("best")
    with pytest.raises(UsageError, match="is the default now: use auto"):
        strategies_of("structures")


def test_strategies_run_one_after_the_other_without_the_collector() -> None:
    turns: list[int] = []
    was_enabled = gc.isenabled()
    search(make_problem(CLUSTER, WORKLOAD), strategies=[Noted(turns, i) for i in (2, 0, 1)])
    assert turns == [2, 0, 1]
    assert gc.isenabled() == was_enabled


def test_the_collector_comes_back_after_an_error_and_stays_off_where_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), no_collector():
        assert not gc.isenabled()
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_made_without_the_collector_counts_as_old() -> None:
    """Else the collector would look through all of it as soon as it is back."""
    with no_collector():
        made = [[number] for number in range(5000)]
    assert any(one is made for one in gc.get_objects(generation=2))
    assert not gc.get_freeze_count()


def test_interrupted_with_a_plan_the_search_ends_and_says_so() -> None:
    turns: list[int] = []
    problem = make_problem(CLUSTER, WORKLOAD)
    board = search(problem, strategies=[Constructive(), Noted(turns, 0, True), Noted(turns, 1)])
    assert board.interrupted and board.best is not None
    assert turns == [0]
    assert not search(problem, strategies=[Constructive()]).interrupted


def test_interrupted_without_a_plan_the_interrupt_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(make_problem(CLUSTER, WORKLOAD), strategies=[Noted([], 0, True)])
    assert gc.isenabled()


def test_progress_is_told_of_better_and_better_plans() -> None:
    told: list[tuple[float, int, float]] = []
    problem = make_problem(CLUSTER, WORKLOAD)
    board = search(problem, lambda *news: told.append(news), [Symmetric(), Constructive()])
    assert told and board.best is not None
    steps_s = [step_s for step_s, _, _ in told]
    assert steps_s[-1] == board.best.step_time_s
    assert all(bound_s <= steps_s[-1] for _, _, bound_s in told)
    numbers = [number for _, number, _ in told]
    assert numbers == sorted(numbers) and numbers[-1] <= board.num_priced


def test_fewer_machines_are_looked_at_where_money_counts() -> None:
    """A slow GPU that costs more than the fast one is worth nothing."""
    nodes = tuple(
        replace(node, gpu_price_per_hour=1.0 if node.name == "a" else 50.0)
        for node in CLUSTER.nodes
    )
    problem = make_problem(replace(CLUSTER, nodes=nodes), WORKLOAD, objective=Objective("cheapest"))
    board = search(problem, strategies=[Symmetric()])
    assert board.best is not None
    assert {device.node for device in board.best.placement.devices()} == {"a"}


def test_where_even_all_machines_are_too_slow_fewer_are_not_looked_at() -> None:
    turns: list[int] = []
    late = make_problem(priced(), WORKLOAD, objective=Objective("fewest-gpus", 1, 1e-9))
    search(late, strategies=[Constructive(), Noted(turns, 0)])
    assert turns == [0]
