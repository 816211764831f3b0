"""Where an idle GPU is tried."""

from __future__ import annotations

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.advise import idle
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.units import Unit, chains_of
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


def test_replicas_that_are_alike_are_tried_once() -> None:
    """Three replicas of one GPU, two of them on equal nodes: each new shape comes once."""
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1), ("d", SLOW, 1))
    shape = Completer(make_problem(cluster, make_workload(4, 8))).shape
    chains = [(Unit(node, (0,)),) for node in "abc"]
    unit = Unit("d", (0,))
    every = list(insertions(chains, [unit], range(1, 5)))
    assert len(every) == 3 * 2 + 1, "before and behind each, and as a replica of its own"
    some = list(insertions(chains, [unit], range(1, 5), shape))
    # Before and behind one of the two fast GPUs; with the slow one both orders are the same.
    assert len(some) == 2 + 1 + 1
    shapes = {tuple(sorted(map(shape, tried), key=repr)) for tried in every}
    assert {tuple(sorted(map(shape, tried), key=repr)) for tried in some} == shapes
    assert len(shapes) == len(some)


def _tried(problem: Problem, *, only_one: bool) -> tuple[Candidate, int]:
    """Return the fastest of some plans, and how many were priced."""
    board = Scoreboard(problem)
    Constructive().search(board)
    best = board.ranking[0]
    rungs = Rungs(Scoreboard(problem))
    tried = neighbours(problem, tuple(chains_of(best.placement)), rungs.completer.shape)
    sized = [one for structure in tried if (one := rungs.sized(structure)) is not None]
    until = 0 if only_one else 10**9
    found = idle._best_of(rungs, sorted(map(rungs.estimated, sized)), until, best)
    assert found is not None
    # Simulated, as what was found is: queues make a step longer.
    first = rungs.simulated(rungs.board.ranking_of_all[0])
    assert found.step_time_s <= first.step_time_s * (1 + 1e-12)
    return found, rungs.board.num_priced


def test_of_the_places_those_with_the_shortest_estimates_are_priced() -> None:
    problem = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 4)), make_workload(12, 1024))
    of_one, num_of_one = _tried(problem, only_one=True)
    of_all, num_of_all = _tried(problem, only_one=False)
    assert num_of_one < num_of_all
    assert of_one.step_time_s >= of_all.step_time_s


def test_when_the_work_is_done_a_like_node_elsewhere_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes are alike, but for their sites; one is in the plan."""
    nodes = [(name, FAST, 1) for name in "abc"]
    problem = make_problem(make_cluster(*nodes, sites=("x", "y", "z")), make_workload(4, 8))
    stage = PlacedStage((Device("a", 0),), 4)
    only_on_a = Placement((PlacedReplica((stage,), problem.num_micro_batches),))
    best = Scoreboard(problem).score(only_on_a, "given")
    assert best is not None
    tried = idle.idle_reasons(problem, best)
    assert set(tried) == {"b:0", "c:0"} and all(t.startswith("in the best") for t in tried.values())
    monkeypatch.setattr(idle, "_MAX_WORK", 1)
    tried = idle.idle_reasons(problem, best)
    assert tried["b:0"].startswith("in the best place tried")
    assert tried["c:0"] == f"not tried, but GPUs like it on b: {tried['b:0']}"
