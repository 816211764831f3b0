"""The loop of the search: which structures one move away are kept."""

from __future__ import annotations

import pytest

from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.loop import Climber, Descent, Loop, SearchLimits
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.units import chains_of
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


def start_of(problem: Problem, rungs: Rungs) -> Climber:
    """The best grid, priced."""
    (best, *_) = search(problem, strategies=[Symmetric()]).ranking
    found = rungs.sized(tuple(chains_of(best.placement)))
    assert found is not None
    return rungs.price(rungs.estimated(found))[0]


@pytest.mark.parametrize("num_whole", [3, 24])
def test_a_structure_that_several_moves_lead_to_is_kept_once(num_whole: int) -> None:
    problem = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 4)), make_workload(12, 64))
    heaps, works = [], []
    for times in (1, 3):
        rungs = Rungs(Scoreboard(problem))
        loop = Loop(rungs, SearchLimits(num_whole=num_whole))
        node = start_of(problem, rungs)
        moved = list(neighbours(problem, node.found.structure, rungs.completer.shape))
        assert len({rungs.image(one) for one in moved}) < len(moved)
        heap: list[Climber] = []
        before = rungs.work
        loop.expand(node, moved * times, heap)
        works.append(rungs.work - before)
        images = [rungs.image(one.found.structure) for one in heap]
        assert len(set(images)) == len(images) <= num_whole
        heaps.append(images)
        # What was kept is not kept again.
        again: list[Climber] = []
        loop.expand(node, moved, again)
        assert not {rungs.image(one.found.structure) for one in again} & set(images)
    assert heaps[0] == heaps[1] and works[0] == works[1]
    assert len(heaps[0]) >= 3


def test_a_search_beside_another_has_to_come_near_its_best() -> None:
    problem = make_problem(make_cluster(("a", FAST, 2)), make_workload(4, 8))
    whole = search(problem)
    rungs = Rungs(Scoreboard(problem))
    loop = Loop(rungs, SearchLimits(), whole, part=0.5)
    assert whole.nearest is not None and loop.known_s == whole.nearest.step_time_s
    assert loop.own_work == SearchLimits().work_per_gpu * 2 // 2
    # Structures twice as slow are not gone on from.
    (slow,) = [tuple(chains_of(whole.ranking[0].placement))]
    assert loop.go_on_from([slow], slack=0.0) is None and not loop.fastest
    descent = Descent([])
    loop.descend(descent, loop.max_work)
    assert descent.best is None
