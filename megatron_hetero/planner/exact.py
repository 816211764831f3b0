"""The best plan of a small problem by the cost model, with its proof: what is not priced cannot
win."""

from __future__ import annotations

from math import inf

from megatron_hetero.cost.placement import Placement
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.constructive import Constructive
from megatron_hetero.planner.equal_replicas import EqualReplicas
from megatron_hetero.planner.exhaustive import all_structures
from megatron_hetero.planner.fill import placed_replica
from megatron_hetero.planner.objective import THROUGHPUT
from megatron_hetero.planner.problem import Chain
from megatron_hetero.planner.prune import Filling, Pruner
from megatron_hetero.planner.scoreboard import Scoreboard, ranked_time_s
from megatron_hetero.planner.symmetric import Symmetric

EXACT_RELAXES = (
    "nothing: every plan was priced or cannot be faster; launch counts are 1F1B's or the rule's"
)
_MAX_PLACEMENTS = 100_000
_MAX_STRUCTURES = 50_000


class Exact:
    """Prices every placement that a quick plan does not rule out: units, replicas, stage orders,
    layers and micro-batches.

    The bound of the plan is then its own step time.  Launch counts are those of 1F1B, and those of
    the rule where they gain (`counts.LaunchRule`), as in every strategy.
    """

    name = "exact"

    def __init__(self, max_placements: int = _MAX_PLACEMENTS) -> None:
        self.max_placements = max_placements

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`.

        Raises:
            UsageError: there are more placements than can be priced.
        """
        problem = board.problem
        pruner = Pruner(problem, _limit_s(board))
        wanted: list[tuple[tuple[Chain, ...], Filling]] = []
        for number, structure in enumerate(all_structures(problem)):
            if number > _MAX_STRUCTURES:
                raise self._too_many(board)
            if not pruner.may_hold_it(structure):
                continue
            for filling in pruner.fillings(structure):
                wanted.append((structure, filling))
                if len(wanted) > self.max_placements:
                    raise self._too_many(board)
        for structure, (layers, shares) in wanted:
            replicas = zip(structure, layers, shares, strict=True)
            board.score(Placement(tuple(placed_replica(*r) for r in replicas)), self.name)
        board.is_exact = board.best is not None

    def _too_many(self, board: Scoreboard) -> UsageError:
        problem = board.problem
        return UsageError(
            f"--strategy exact would have to price more than {self.max_placements} plans or look "
            f"at more than {_MAX_STRUCTURES} sets of pipelines of {problem.num_gpus} GPUs, "
            f"{problem.num_layers} layers and {problem.num_micro_batches} micro-batches; "
            "use --strategy auto, which prints a lower bound and the gap to it"
        )


def _limit_s(board: Scoreboard) -> float:
    """The step time of a plan found quickly; slower ones need not be priced where nothing but speed
    counts."""
    if board.problem.objective != THROUGHPUT:
        return inf
    quick = Scoreboard(board.problem)
    for strategy in (Symmetric(), Constructive(), EqualReplicas()):
        strategy.search(quick)
    if quick.best is None or not quick.ranking:
        return inf
    best, first = quick.best, quick.ranking[0]
    # The best of 1F1B's own launch counts is kept as well.
    return max(ranked_time_s(best.placement, best.cost), first.step_time_s)
