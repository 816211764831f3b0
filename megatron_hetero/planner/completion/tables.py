"""What a completer knows of stages: options, filled chains and hops of one micro-batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.completion.sharded import ShardedOptions
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.units import Chain, Unit, divides

Option = tuple[tuple[StageOption, ...], tuple[float, ...]]
"""Options of a stage by layers, and their seconds."""
Options = list[Option]
"""Those of all stages."""
Key = tuple[int, int, int | None, StateHolders | None]
"""Equal for stages with the same options: like groups at the same end, micro-batches in flight,
kept sends, and holders of the states where they are not as of all."""

NO_STATES = StateHolders(inf, inf)
"""As if the optimizer's states took no memory: divided among ever so many devices."""


@dataclass(eq=False)
class Tables:
    """Stage options of one micro-batch size, vocabulary and set of holders.

    `holders_of`: those of the optimizer's states of single units, where they are not as of all.
    """

    costs: CostModel
    options: StageOptions
    holders_of: Mapping[Unit, StateHolders] = field(default_factory=dict)
    known: dict[Key, Option] = field(default_factory=dict)
    filled: dict[tuple[object, ...], Filled | None] = field(default_factory=dict)
    rooms: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Layers for which each stage has room, by shape and most micro-batches."""
    tuned: dict[tuple[object, ...], tuple[Filled, float, int]] = field(default_factory=dict)
    """Tuned pipelines, with their seconds and the work of tuning."""
    hops: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    trips: dict[int, tuple[list[float], float]] = field(default_factory=dict)
    """`PipelineCompleter.trips` by shape."""
    sharded: dict[tuple[int, bool], ShardedOptions] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """Whether all stages do as the job's flags say."""
        return self.options.given

    @cached_property
    def size(self) -> int:
        """Micro-batch size in sequences."""
        return self.costs.workload.training.micro_batch_size


def holders_of(structure: tuple[Chain, ...]) -> StateHolders:
    """Count the holders of the optimizer's states: of any layer the fewest that it may have.

    Of groups that divide sequences each holds all that its stage does.
    """
    ends = [(chain[0].context_parallel, chain[-1].context_parallel) for chain in structure]
    # A tied embedding is on the first and on the last stage, but once where both are one.
    tied = sum(
        [first + (len(c) > 1) * last for c, (first, last) in zip(structure, ends, strict=True)]
    )
    if not divides(structure):
        return StateHolders(len(structure), tied)
    fewest = sum([min([unit.context_parallel for unit in chain]) for chain in structure])
    return StateHolders(fewest, tied, sum(n for n, _ in ends), sum(n for _, n in ends))
