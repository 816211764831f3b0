"""Simulated annealing over the places of the GPUs, for users who can wait a minute or two.

Where no two machines are alike, hill climbing ends early: a better division of the GPUs is several
moves away, and each of these moves alone makes the step longer (Kirkpatrick et al. 1983,
Optimization by Simulated Annealing).  Layers and micro-batches follow from each division (`fill`).
"""

from __future__ import annotations

from math import exp, inf
from random import Random

from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import idle_gpus
from megatron_hetero.planner.problem import Chain, Problem, Unit, chains_of

MAX_GPUS_ANNEALED = 64
"""Of more, one move changes too little."""
_FIRST_TEMPERATURE = 0.03
"""Part of a step that a move may well lose at first."""

_Pipelines = list[list[Unit]]


class Annealing:
    """From the best placement so far, by the step with launch counts; see the module."""

    name = "annealing"

    def __init__(self, num_runs: int = 3, max_work: int = 200_000) -> None:
        self.num_runs = num_runs
        self.max_work = max_work
        """Limit in stages priced, of each run."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        plain = [c for c in board.ranking_with_counts if not c.placement.has_shares]
        if not plain or board.is_exact or problem.num_gpus > MAX_GPUS_ANNEALED:
            return
        first = chains_of(plain[0].placement)
        for seed in range(self.num_runs):
            self._anneal(board, first, plain[0].step_time_s, Random(seed))

    def _anneal(
        self, board: Scoreboard, chains: list[Chain], step_s: float, random: Random
    ) -> None:
        problem, filler, work = board.problem, Filler(board.problem, launch_ahead=True), 0
        first_s = step_s
        while work < self.max_work:
            work += sum(map(len, chains))
            moved = _moved(problem, chains, random)
            placement = filler.placement(moved) if moved else None
            if placement is None:
                continue
            candidate = board.score_with_counts(placement, self.name, whole=True)
            moved_s = inf if candidate is None else candidate.step_time_s
            temperature_s = _FIRST_TEMPERATURE * first_s * max(1e-6, 1 - work / self.max_work)
            if moved_s <= step_s or random.random() < exp((step_s - moved_s) / temperature_s):
                chains, step_s = moved, moved_s


def _moved(problem: Problem, chains: list[Chain], random: Random) -> list[Chain]:
    """Return chains one random move away; empty where what was drawn is no move."""
    pipelines = [list(chain) for chain in chains]
    (move,) = random.choices(
        (_exchange, _shift, _drop, _add, _split, _join), (35, 25, 10, 12, 9, 9)
    )
    if not move(problem, pipelines, random):
        return []
    found = [tuple(pipeline) for pipeline in pipelines if pipeline]
    return found if len(found) in problem.replica_counts() else []


def _place(pipelines: _Pipelines, random: Random) -> tuple[list[Unit], int]:
    pipeline = random.choice(pipelines)
    return pipeline, random.randrange(len(pipeline))


def _insert(pipelines: _Pipelines, unit: Unit, random: Random) -> None:
    """Put it anywhere, or as a replica of its own."""
    replica = random.randrange(len(pipelines) + 1)
    if replica == len(pipelines):
        pipelines.append([unit])
    else:
        pipelines[replica].insert(random.randrange(len(pipelines[replica]) + 1), unit)


def _exchange(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    (one, i), (other, j) = _place(pipelines, random), _place(pipelines, random)
    one[i], other[j] = other[j], one[i]
    return True


def _shift(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    pipeline, i = _place(pipelines, random)
    _insert(pipelines, pipeline.pop(i), random)
    return True


def _drop(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    pipeline, i = _place(pipelines, random)
    del pipeline[i]
    return True


def _add(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    """Return idle GPUs of a node."""
    name = random.choice(problem.nodes).name
    idle = idle_gpus(problem, pipelines, name)
    widths = [width for width in problem.widths[name] if width <= len(idle)]
    if widths:
        _insert(pipelines, Unit(name, idle[: random.choice(widths)]), random)
    return bool(widths)


def _split(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    pipeline, i = _place(pipelines, random)
    unit, half = pipeline[i], pipeline[i].width // 2
    if unit.width % 2 or half not in problem.widths[unit.node]:
        return False
    pipeline[i : i + 1] = [
        Unit(unit.node, unit.indices[:half]),
        Unit(unit.node, unit.indices[half:]),
    ]
    return True


def _join(problem: Problem, pipelines: _Pipelines, random: Random) -> bool:
    """Return two groups of a node in one replica."""
    pipeline, i = _place(pipelines, random)
    unit = pipeline[i]
    others = [
        j
        for j, other in enumerate(pipeline)
        if j != i
        and other.node == unit.node
        and unit.width + other.width in problem.widths[unit.node]
    ]
    if others:
        j = random.choice(others)
        pipeline[i] = Unit(unit.node, tuple(sorted(unit.indices + pipeline[j].indices)))
        del pipeline[j]
    return bool(others)
