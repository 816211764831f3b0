"""Every plan of a small problem: the optimum by the cost model, with its proof."""

from __future__ import annotations

from megatron_hetero.errors import UsageError
from megatron_hetero.planner.exhaustive import all_structures, fillings, num_fillings
from megatron_hetero.planner.scoreboard import Scoreboard

EXACT_RELAXES = "nothing: every plan was priced; launch counts are 1F1B's or the rule's"
_MAX_PLACEMENTS = 100_000


class Exact:
    """Prices every placement: units, replicas, stage orders, layers and micro-batches.

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
        structures = []
        num_placements = 0
        for structure in all_structures(problem):
            structures.append(structure)
            num_placements += num_fillings(problem, structure)
            if num_placements > self.max_placements:
                raise UsageError(
                    f"--strategy exact would have to price more than {self.max_placements} plans "
                    f"of {problem.num_gpus} GPUs, {problem.num_layers} layers and "
                    f"{problem.num_micro_batches} micro-batches; use --strategy auto, which "
                    "prints a lower bound and the gap to it"
                )
        for structure in structures:
            for placement in fillings(problem, structure):
                board.score(placement, self.name)
        board.is_exact = board.best is not None
