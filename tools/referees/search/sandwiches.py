"""Shapes of a replica with one kind of GPUs in the middle and another at one or both ends.

The ends of a pipeline are unlike its middle: the first stage holds the embedding and keeps most
micro-batches, the last one has the head.  So where GPUs are of two kinds, the kind that has less
memory or speed may do best at both ends, with few layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import Kind
from tools.referees.search.shape_layout import Shape

_MAX_SHAPES = 400
_MAX_ENDS = 4
"""Stages at either end."""
_LEAST_USED = 0.9
"""The part of the GPUs of both kinds that all replicas together take."""
_MAX_KINDS = 4


def sandwiches(problem: Problem, kinds: Sequence[Kind]) -> list[Shape]:
    """Return those that use nearly all GPUs of two kinds, the best by their speed and depth
    alone."""
    if len(kinds) > _MAX_KINDS:
        return []
    ranked: list[tuple[float, Shape]] = []
    for inner, outer in permutations(range(len(kinds)), 2):
        for widths in product(kinds[inner].widths, kinds[outer].widths):
            ranked += _of_pair(problem, kinds, (inner, outer), widths)
    return [shape for _, shape in sorted(set(ranked))[:_MAX_SHAPES]]


def _of_pair(
    problem: Problem, kinds: Sequence[Kind], pair: tuple[int, int], widths: tuple[int, int]
) -> Iterator[tuple[float, Shape]]:
    """Yield about the step's seconds, and the shape."""
    costs, rows = problem.costs, problem.costs.vocab_rows(sorted(widths))
    gpus = [sum(len(problem.gpus[node.name]) for node in kinds[k].nodes) for k in pair]
    speeds = [
        1 / costs.pieces(kinds[k].node, width, rows).layer.total_s
        for k, width in zip(pair, widths, strict=True)
    ]
    middle, end = ((k, width) for k, width in zip(pair, widths, strict=True))
    for before, behind in product(range(_MAX_ENDS + 1), repeat=2):
        num_ends = before + behind
        for num_inner in range(1, problem.max_stages() - num_ends + 1) if num_ends else ():
            count = min(gpus[0] // (num_inner * widths[0]), gpus[1] // (num_ends * widths[1]))
            used = count * (num_inner * widths[0] + num_ends * widths[1])
            if not count or used < _LEAST_USED * sum(gpus):
                continue
            period_s = problem.num_layers / (num_inner * speeds[0] + num_ends * speeds[1])
            each = -(-problem.num_micro_batches // count)
            step_s = (each + num_inner + num_ends - 1) * period_s
            yield step_s, ((end,) * before + (middle,) * num_inner + (end,) * behind)
