"""1F1B pipelines that share paths, run together: when each stage's last pass ends.

The planner simulates thousands of such crowds.  A compiled loop (`_kernels.c`) runs them; where it
is not compiled, the simulator's engine does, with results equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_hetero.kernels import KERNELS
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.parts import ChunkTimes, Crossing, Pipeline, SendMode
from megatron_hetero.schedule.simulator.engine import computed_until_s


@dataclass(frozen=True)
class OneFOneB:
    """A replica that runs 1F1B.

    Attributes:
        launch_counts: forwards launched up to the first backward, shape [stage].
        num_micro_batches: of the replica in a step.
        forward_s: seconds of a forward pass, shape [stage].
        backward_s: seconds of a backward pass, shape [stage].
        forward: crossing of an activation over each boundary, shape [stage - 1].
        backward: crossing of a gradient over each boundary, shape [stage - 1].
        sends: what a sender does after a send, in one piece: none overlap.
    """

    launch_counts: tuple[int, ...]
    num_micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward: tuple[Crossing, ...]
    backward: tuple[Crossing, ...]
    sends: SendMode = "buffered"

    @property
    def waits(self) -> bool | None:
        """Return whether a sender waits until the receiver has the message; None where that depends
        on the message."""
        if self.sends != "rendezvous":
            return self.sends == "waited"
        # By rendezvous only large messages are waited for.
        eager = {crossing.is_eager for crossing in (*self.forward, *self.backward)}
        return None if len(eager) > 1 else eager == {False}


def crowd_ends_s(pipelines: Sequence[OneFOneB]) -> tuple[tuple[float, ...], ...]:
    """Simulate the pipelines of a step together; return seconds, shape [pipeline][stage].

    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    # The compiled loop, unless messages of one pipeline behave unlike each other.
    if KERNELS is not None:
        found = _compiled(pipelines)
        if found is not None:
            return found
    # The engine also says which stage waits for ever, and at which operation.
    until_s = computed_until_s([_in_full(pipeline) for pipeline in pipelines])
    return tuple(
        tuple(until_s[number, stage] for stage in range(len(pipeline.launch_counts)))
        for number, pipeline in enumerate(pipelines)
    )


def _compiled(pipelines: Sequence[OneFOneB]) -> tuple[tuple[float, ...], ...] | None:
    numbers: dict[str, int] = {}

    def of(crossing: Crossing) -> tuple[list[int], list[float], float]:
        # Paths as numbers, which all pipelines share: that makes them queue on each other.
        paths = [numbers.setdefault(path, len(numbers)) for path, _ in crossing.hops]
        return paths, [seconds for _, seconds in crossing.hops], crossing.latency_s

    # Where some messages of a pipeline are waited for and others not, only the engine knows.
    waits = [one.waits for one in pipelines]
    if None in waits:
        return None
    given = [
        (
            one.launch_counts,
            one.num_micro_batches,
            bool(one.waits),
            one.forward_s,
            one.backward_s,
            [of(crossing) for crossing in one.forward],
            [of(crossing) for crossing in one.backward],
        )
        for one in pipelines
    ]
    assert KERNELS is not None
    return KERNELS.shared_ends(given, len(numbers))


_known_order = lru_cache(maxsize=16)(one_f_one_b)
"""Schedule of 1F1B pipelines, made once for all pipelines of equal counts."""


def _in_full(one: OneFOneB) -> Pipeline:
    """Return the pipeline with its schedule, in the terms of the engine."""
    return Pipeline(
        _known_order(len(one.launch_counts), one.num_micro_batches, one.launch_counts),
        tuple(
            (ChunkTimes(forward_s, backward_s),)
            for forward_s, backward_s in zip(one.forward_s, one.backward_s, strict=True)
        ),
        one.forward,
        one.backward,
        one.sends,
    )
