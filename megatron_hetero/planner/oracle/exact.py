"""The best plan of a small problem by the cost model, with its proof: what is not priced cannot
win."""

from __future__ import annotations

from megatron_hetero.errors import UsageError
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import THROUGHPUT
from megatron_hetero.planner.oracle.exhaustive import limit_s
from megatron_hetero.planner.oracle.prune import wanted_placements
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.symmetric import Symmetric

EXACT_RELAXES = (
    "nothing: every plan was priced or cannot be faster; launch counts are 1F1B's or the rule's"
)
_MAX_WORK = 3_000_000
"""As `wanted_placements` counts it: some minutes."""


class Exact:
    """Prices every placement that a quick plan does not rule out: units, replicas, stage orders,
    layers and micro-batches.

    The bound of the plan is then its own step time.  Launch counts are those of 1F1B, and those of
    the rule where they gain (`counts.LaunchRule`), as in every strategy.
    """

    name = "exact"

    def __init__(self, max_work: int = _MAX_WORK) -> None:
        self.max_work = max_work

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`.

        Raises:
            UsageError: there are more placements than can be priced.
        """
        wanted = wanted_placements(board.problem, _quick_limit_s(board), self.max_work)
        if wanted is None:
            raise self._too_many(board)
        for placement in wanted:
            board.score(placement, self.name)
        if not wanted:  # nothing fits: what comes nearest is said
            Constructive().search(board)
        board.is_exact = board.best is not None

    def _too_many(self, board: Scoreboard) -> UsageError:
        problem = board.problem
        return UsageError(
            f"--strategy exact would have to look at more than {self.max_work} ways to split "
            f"layers and micro-batches, or price nearly as many plans, of {problem.num_gpus} GPUs, "
            f"{problem.num_layers} layers and {problem.num_micro_batches} micro-batches; "
            "use --strategy auto, which prints a lower bound and the gap to it"
        )


def _quick_limit_s(board: Scoreboard) -> float:
    """`limit_s` of plans found quickly."""
    quick = Scoreboard(board.problem)
    # A quick plan rules others out by its speed, so only where speed alone counts.
    if board.problem.objective == THROUGHPUT:
        for strategy in (Columns(), Symmetric(), Constructive()):
            strategy.search(quick)
    return limit_s(quick)
