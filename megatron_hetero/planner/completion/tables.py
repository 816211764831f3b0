"""What a completer knows of stages: options, filled chains and hops of one micro-batch size."""

from __future__ import annotations

from megatron_hetero.cost.memory.device import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.completion.sharded import ShardedOptions
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.problem import Chain, divides

Options = list[tuple[tuple[StageOption, ...], tuple[float, ...]]]
"""By stage: its options by layers, and their seconds."""


class Tables:
    """Stage options of one micro-batch size, vocabulary and set of holders."""

    def __init__(self, costs: CostModel, rows: int, given: bool) -> None:
        self.options = StageOptions(costs, rows, given)
        self.given = given
        self.costs = costs
        self.known: dict[tuple[object, ...], tuple[tuple[StageOption, ...], tuple[float, ...]]] = {}
        self.filled: dict[tuple[object, ...], Filled | None] = {}
        self.tuned: dict[tuple[object, ...], tuple[Filled, float, int]] = {}
        """Tuned pipelines, their seconds, and the work that they took."""
        self.hops: dict[tuple[object, ...], tuple[float, float]] = {}
        self.sharded: dict[tuple[int, bool], ShardedOptions] = {}


def holders_of(structure: tuple[Chain, ...]) -> StateHolders:
    """Count the holders of the optimizer's states: of any layer the fewest that it may have.

    Of groups that divide sequences each holds all that its stage does.
    """
    ends = [(chain[0].context_parallel, chain[-1].context_parallel) for chain in structure]
    tied = sum(
        [first + (len(c) > 1) * last for c, (first, last) in zip(structure, ends, strict=True)]
    )
    if not divides(structure):
        return StateHolders(len(structure), tied)
    fewest = sum([min([unit.context_parallel for unit in chain]) for chain in structure])
    return StateHolders(fewest, tied, sum(n for n, _ in ends), sum(n for _, n in ends))
