"""Where an idle GPU is tried."""

from __future__ import annotations

from megatron_hetero.planner.advise import idle
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Unit, chains_of, make_problem
from megatron_hetero.planner.shapes.constructive import Constructive
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.search.local import neighbours


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


def test_of_the_places_those_with_the_shortest_estimates_are_priced() -> None:
    problem = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 4)), make_workload(12, 1024))
    board = Scoreboard(problem)
    Constructive().search(board)
    best = board.ranking[0].placement
    tried = [tuple(chains_of(one)) for one in neighbours(problem, Filler(problem), best)]
    found, priced = {}, {}
    for most in (2, len(tried)):
        rungs = Rungs(Scoreboard(problem))
        sized = [one for structure in tried if (one := rungs.sized(structure)) is not None]
        candidate = idle._best_of(rungs, map(rungs.estimated, sized), most)
        assert candidate is not None
        found[most], priced[most] = candidate.step_time_s, rungs.board.num_priced
        assert candidate.step_time_s <= rungs.board.ranking_of_all[0].step_time_s * (1 + 1e-12)
    assert priced[2] < priced[len(tried)]
    assert found[2] >= found[len(tried)]
