"""Pipelines that stand for ranks: what each of their stages takes for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_hetero.sequences.step_tokens import GroupTokens

_SHORT = 8192
"""Tokens of the sequence at which stages are compared."""


@dataclass(frozen=True)
class StageRates:
    """Seconds of a micro-batch on a stage, forward and backward, and on the way to the next stage.

    It takes `fixed_s`, `token_s` for each token and `square_s` for the square of each sequence's
    length, of which `forward_part` is the forward pass.  The boundary behind the stage takes
    `hop_s` and `hop_token_s` for each token, in one direction; 0 behind the last stage.
    """

    fixed_s: float
    token_s: float
    square_s: float
    forward_part: float
    hop_s: float = 0.0
    hop_token_s: float = 0.0

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the seconds of sequences packed on a single replica."""
        return self.fixed_s + sum(n * (self.token_s + self.square_s * n) for n in lengths)

    def crossing_s(self, num_tokens: int) -> float:
        """Return the seconds in which tokens cross the boundary behind the stage."""
        return self.hop_s + self.hop_token_s * num_tokens


@dataclass(frozen=True)
class PipelineRates:
    """The stages of a replica; `launch_counts` are those of 1F1B, or more, for each stage."""

    stages: tuple[StageRates, ...]
    launch_counts: tuple[int, ...]

    @cached_property
    def other_stages(self) -> float:
        """Return the seconds of all stages but the slowest, and of all boundaries there and back,
        over those of the slowest."""
        each = [stage.seconds([_SHORT]) for stage in self.stages]
        hops_s = sum(2 * stage.crossing_s(_SHORT) for stage in self.stages)
        return (sum(each) + hops_s) / max(each) - 1

    def seconds(self, stage: int, group: GroupTokens | None) -> float:
        """Return the seconds of a micro-batch on a stage; of the filling one without a group.

        Where a group divides its sequences, its seconds are those of the slowest stage.
        """
        if group is None:
            return self.stages[stage].fixed_s
        # A GPU with the whole model takes what its group's price says.
        if len(self.stages) == 1:
            return group.seconds
        lengths = [sum(tokens) for tokens in group.tokens]
        # [stage]: whole sequences on one replica, whose proportions hold for divided ones too.
        each = [rates.seconds(lengths) for rates in self.stages]
        return each[stage] if group.size == 1 else group.seconds * each[stage] / max(each)


WHOLE = PipelineRates((StageRates(0.0, 0.0, 0.0, 1 / 3),), (1,))
"""A GPU with the whole model: what it takes, its groups say."""
