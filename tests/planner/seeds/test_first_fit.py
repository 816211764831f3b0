"""What holds a model where no grid does: wide groups at the ends, narrow ones between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.first_fit import FirstFit
from megatron_hetero.planner.seeds.more_room import MoreRoom, missing_room
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.units import Unit
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


def problem_of(num_layers: int, vocab_size: int, memory_mib: int, larger: float) -> Problem:
    """Return a question that no grid answers; two GPUs have `larger` times the memory."""
    large = replace(FAST, memory_bytes=int(larger * memory_mib) << 20)
    small = replace(SLOW, memory_bytes=memory_mib << 20)
    nodes = ("a", large, 2), ("b", small, 1), ("c", small, 3), ("d", small, 1), ("e", small, 2)
    workload = make_workload(
        num_layers, global_batch_size=8, vocab_size=vocab_size, tied_embeddings=False
    )
    return make_problem(make_cluster(*nodes), workload)


@pytest.mark.parametrize("case", [(16, 12_000, 172, 1.0), (12, 24_000, 154, 1.6)])
def test_moves_lead_to_a_plan_that_fits_where_grids_and_single_choices_do_not(
    case: tuple[int, int, int, float],
) -> None:
    problem = problem_of(*case)
    board = Scoreboard(problem)
    for strategy in (Constructive(max_work=2000), Symmetric(max_work=2000)):
        strategy.search(board)
        assert board.best is None
    FirstFit().search(board)
    assert board.best is not None
    cost = problem.costs.placement(board.best.placement)
    assert cost.missing_bytes <= 0
    assert len({stage.width for r in board.best.placement.replicas for stage in r.stages}) > 1


def test_missing_room_by_hand() -> None:
    problem = problem_of(16, 12_000, 172, 1.0)
    completer = Completer(problem)
    narrow = (Unit("a", (0,)), Unit("a", (1,)))
    (rooms,) = completer.rooms((narrow,))
    assert missing_room(completer, (narrow,)) == (rooms.count(0), 16 - sum(rooms))
    wide = (Unit("a", (0, 1)),)
    ((room,),) = completer.rooms((wide,))
    assert missing_room(completer, (wide, wide)) == (0 if room else 2, 2 * (16 - room))


def test_it_ends_with_its_work_and_leaves_alone_what_fits() -> None:
    board = Scoreboard(problem_of(16, 12_000, 172, 1.0))
    Constructive(max_work=2000).search(board)
    assert board.out_of_memory.nearest is not None
    MoreRoom(1).search(board)
    assert board.best is None
    fitting = Scoreboard(problem_of(2, 1_000, 400, 1.0))
    Symmetric().search(fitting)
    before = fitting.num_priced
    MoreRoom(100).search(fitting)
    assert fitting.num_priced == before
