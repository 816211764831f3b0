"""The end of a search: the best with queues, of stock Megatron's with its waiting for sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate import rescore as module
from megatron_hetero.planner.evaluate.rescore import Rescorer, distinct
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.schedule.simulator.shared_paths import queued, sharing_replicas
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=8, global_batch_size=16, seq_length=1024)


def boxes(between: Link, memory_mib: int = 1 << 20) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_mib << 20) for gpu in (FAST, SLOW))
    return make_cluster(("a", fast, 2), ("b", slow, 2), between=between)


CROWDED = replace(
    boxes(Link(1e9, 1e-4)),
    limits=replace(AS_GIVEN, first_stage_nodes=("a",), last_stage_nodes=("b",), num_replicas=2),
)
"""Two pipelines, both of which have to cross the link between the nodes."""


def searched(cluster: Cluster, objective: Objective | None = None) -> Scoreboard:
    board = Scoreboard(make_problem(cluster, WORKLOAD, objective=objective or Objective()))
    for strategy in (Columns(), Symmetric(), Constructive()):
        strategy.search(board)
    return board


@pytest.mark.parametrize("cluster", [CROWDED, boxes(Link(3e9, 2e-5)), boxes(Link(2e8, 1e-4))])
def test_the_best_is_the_best_of_all_with_their_queues(cluster: Cluster) -> None:
    board = searched(cluster)
    best = Rescorer(board).best()
    assert best is not None
    costs = board.problem.costs
    for candidate in board.ranking_of_all[:12]:
        if not candidate.is_stock:
            with_queues = queued(costs, candidate.placement, candidate.cost)
            assert best.step_time_s <= with_queues.step_time_s * (1 + 0.006)


def test_what_a_search_simulated_is_remembered_however_far_behind_it_is_priced() -> None:
    board, rescorer = searched(CROWDED), Rescorer(searched(CROWDED))
    best = rescorer.best()
    assert best is not None
    last = board.ranking_with_counts[-1]
    quick = replace(last, cost=best.cost)  # as if it did not wait at all
    board.keep_simulated(last, quick)
    assert board.simulated == ((quick, last),)
    Rescorer(board).best()
    assert (last.placement, last.rank_order) in board.with_queues


def test_queues_never_make_a_step_shorter() -> None:
    board = searched(CROWDED)
    rescorer = Rescorer(board)
    longer = 0
    for candidate in board.ranking_with_counts[:10]:
        if candidate.is_stock:
            continue
        found = rescorer.with_queues(candidate)
        assert found.placement == candidate.placement
        assert found.step_time_s >= candidate.step_time_s * (1 - 1e-9)
        longer += found.step_time_s > candidate.step_time_s * (1 + 1e-6)
        if not sharing_replicas(CROWDED, candidate.placement):
            assert found.step_time_s == pytest.approx(candidate.step_time_s)
    assert longer


def test_what_is_simulated_is_remembered_and_counted_once() -> None:
    board = searched(CROWDED)
    rescorer = Rescorer(board)
    candidate = next(
        c
        for c in board.ranking_with_counts
        if not c.is_stock and sharing_replicas(CROWDED, c.placement)
    )
    messages = rescorer.num_messages(candidate)
    assert messages > 0
    left = rescorer._left
    first = rescorer.with_queues(candidate)
    assert rescorer._left == left - messages
    assert rescorer.num_messages(candidate) == 0
    assert rescorer.with_queues(candidate).cost is first.cost
    assert rescorer._left == left - messages
    assert Rescorer(board).num_messages(candidate) == 0  # the board remembers


def test_a_part_of_a_step_tells_about_the_queues_of_the_whole() -> None:
    board = searched(CROWDED)
    rescorer = Rescorer(board)
    longest = 0.0
    for candidate in board.ranking_with_counts[:10]:
        messages = rescorer.num_messages(candidate)
        if candidate.is_stock or messages < 2:
            continue
        part = rescorer.with_part_of_queues(candidate, messages * 3 // 4)
        assert rescorer.num_messages(candidate) == messages  # the whole is not known by it
        assert part.step_time_s >= candidate.step_time_s * (1 - 1e-9)
        whole = rescorer.with_queues(candidate)
        assert part.step_time_s == pytest.approx(whole.step_time_s, rel=0.05)
        assert rescorer.with_part_of_queues(candidate, messages).cost is whole.cost
        longest = max(longest, whole.step_time_s / candidate.step_time_s)
    assert longest > 1.01  # some do wait


def test_the_limit_of_messages_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_MESSAGES", 1)
    board = searched(CROWDED)
    best = Rescorer(board).best()
    assert best is not None  # the best is simulated anyhow
    whole = searched(CROWDED)
    monkeypatch.setattr(module, "_MAX_MESSAGES", 10**9)
    thorough = Rescorer(whole).best()
    assert thorough is not None
    assert len(board.with_queues) < len(whole.with_queues)
    assert thorough.key <= best.key


def test_the_best_of_stock_is_stock_and_among_the_best() -> None:
    board = searched(boxes(Link(3e9, 2e-5)))
    rescorer = Rescorer(board)
    stock, best = rescorer.best_stock(), rescorer.best()
    assert stock is not None and best is not None
    assert stock.is_stock and stock.keeps_limits
    assert best.key <= stock.key


def test_a_board_without_plans_has_no_best() -> None:
    board = Scoreboard(make_problem(boxes(Link(3e9, 2e-5), memory_mib=20), WORKLOAD))
    Constructive().search(board)
    assert Rescorer(board).best() is None
    assert Rescorer(board).best_stock() is None


def test_plans_that_keep_no_limit_are_not_the_best() -> None:
    board = searched(boxes(Link(3e9, 2e-5)), Objective(num_steps=1.0, deadline_s=1e-9))
    assert board.nearest is not None
    assert Rescorer(board).best() is None
    assert Rescorer(board).best_stock() is None


def test_distinct_placements_differ_in_more_than_layers() -> None:
    board = searched(CROWDED)
    found = distinct(board.ranking_with_counts)
    keys = [(c.structure, c.has_counts) for c in found]
    assert len(set(keys)) == len(keys)
    assert found[0] is board.ranking_with_counts[0]
    # Of each the first, which is the best.
    for one in found:
        alike = [
            c
            for c in board.ranking_with_counts
            if (c.structure, c.has_counts) == (one.structure, one.has_counts)
        ]
        assert one is alike[0]


@pytest.mark.parametrize("more", [1, 2, 4, 100])
def test_further_ahead_by_hand(more: int) -> None:
    """Every stage but the last launches so many more, as far as there are micro-batches."""
    board = searched(CROWDED)
    replica = next(r for c in board.ranking for r in c.placement.replicas if len(r.stages) > 1)
    *ahead, last = module._further(replica, more).num_in_flight
    *before, own_last = replica.num_in_flight
    assert last == own_last
    assert ahead == [min(n + more, replica.num_micro_batches) for n in before]
