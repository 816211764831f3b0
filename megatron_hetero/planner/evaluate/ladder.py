"""Structures on their way up the ladder: estimated, priced, tuned, simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.objective import Standing
from megatron_hetero.rounding import ranked


@dataclass(order=True)
class Climber:
    """A structure on its way: estimated (`candidate` is None), priced, tuned, simulated.

    `gain` is what tuning made of the price; `wait` is what queues on shared paths made of it where
    the busiest path is taken for `contention` of the pipelines' time.  What is one move away hopes
    for as much, until it is tuned and simulated itself; before it is priced it is estimated as
    wrongly as this one was.
    """

    key: tuple[Standing, float]
    number: int
    found: Completion = field(compare=False)
    candidate: Candidate | None = field(compare=False)
    gain: float = field(compare=False, default=1.0)
    wait: float = field(compare=False, default=1.0)
    contention: float = field(compare=False, default=1.0)
    tuned: bool = field(compare=False, default=False)
    queued: bool = field(compare=False, default=False)
    quick_s: float = field(compare=False, default=0.0)
    """Seconds of a priced structure's pipelines as completed, before tuning."""

    def __post_init__(self) -> None:
        standing, time_s = self.key
        self.key = standing, ranked(time_s)

    @property
    def time_s(self) -> float:
        """Seconds of a step, as far as known."""
        return self.key[1]
