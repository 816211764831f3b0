"""Where an idle GPU is tried."""

from __future__ import annotations

from megatron_hetero.planner.advise import idle
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Unit, make_problem
from megatron_hetero.planner.shapes.constructive import Constructive
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.search.local import neighbours


def test_replicas_that_are_alike_are_tried_once() -> None:
    """Three replicas of one GPU, two of them on equal nodes: each new shape comes once."""
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1), ("d", SLOW, 1))
    shape = Filler(make_problem(cluster, make_workload(4, 8))).shape
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


def test_the_best_place_is_found_without_pricing_every_one_whole() -> None:
    problem = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 4)), make_workload(12, 1024))
    board = Scoreboard(problem)
    Constructive().search(board)
    tried = list(neighbours(problem, Filler(problem), board.ranking[0].placement))
    every, some, few = Scoreboard(problem), Scoreboard(problem), Scoreboard(problem)
    priced = [every.score_with_counts(placement, "idle check", whole=True) for placement in tried]
    best = min((found for found in priced if found is not None), key=lambda found: found.key)
    assert idle._best_of(some, tried, len(tried)) == best
    assert some.num_priced < every.num_priced
    assert idle._best_of(few, tried, 2) is not None and few.num_priced == 2
