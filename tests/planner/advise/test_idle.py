"""Where an idle GPU is tried."""

from __future__ import annotations

from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Unit, make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


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
