"""1F1B: warm-up forwards, then one forward and one backward in turn, then the drain."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.schedule.programme import Operation, Schedule, build_schedule


def one_f_one_b(
    num_stages: int, num_micro_batches: int, launch_counts: Sequence[int] | None = None
) -> Schedule:
    """Build non-interleaved 1F1B as Megatron runs it
    (`forward_backward_pipelining_without_interleaving`).

    Args:
        launch_counts: forwards launched up to the first backward, shape [stage]; None is 1F1B's
            own, `num_stages - stage`.  Counts above `num_micro_batches` are clipped.
    Raises:
        PlanFormatError: sizes below 1, or counts that increase along the pipeline or end below 1.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise PlanFormatError(
            f"a schedule needs at least one stage and one micro-batch; found {num_stages} stages "
            f"and {num_micro_batches} micro-batches"
        )
    counts = list(launch_counts or range(num_stages, 0, -1))
    if len(counts) != num_stages or counts[-1] < 1 or sorted(counts, reverse=True) != counts:
        raise PlanFormatError(
            f"launch counts {counts} do not suit {num_stages} stages: give one for each stage, "
            "none larger than the one before it, the last at least 1"
        )
    return build_schedule(
        [stage_order(num_micro_batches, count) for count in counts], num_micro_batches
    )


def stage_order(num_micro_batches: int, launch_count: int) -> tuple[Operation, ...]:
    """Return the computations of one stage, in order."""
    # Of the launched forwards the last one belongs to the steady state.
    num_warmup = min(launch_count - 1, num_micro_batches)
    order = [Operation("forward", k) for k in range(num_warmup)]
    for k in range(num_micro_batches - num_warmup):
        order += [Operation("forward", num_warmup + k), Operation("backward", k)]
    first_left = num_micro_batches - num_warmup
    order += [Operation("backward", k) for k in range(first_left, num_micro_batches)]
    return tuple(order)


def launch_counts(stage_times_s: Sequence[float], hop_times_s: Sequence[float]) -> tuple[int, ...]:
    """Compute launch counts that hide the round trip of every hop (rule generalised from HARP).

    L_last = 1 and L_i = L_{i+1} + 1 + ceil(2 c_i / T), T being the slowest stage.

    Args:
        stage_times_s: forward + backward of one micro-batch, shape [stage].
        hop_times_s: one crossing of each boundary, shape [stage - 1].

    >>> launch_counts([1.0, 1.0, 1.0], [0.25, 0.0])
    (4, 2, 1)
    """
    # From the last stage back: each hop adds its round trip in periods, rounded up.
    period_s = max(stage_times_s)
    counts = [1]
    for hop_s in reversed(hop_times_s):
        round_trips = -int(-2 * hop_s // period_s)
        counts.append(counts[-1] + 1 + round_trips)
    return tuple(reversed(counts))
