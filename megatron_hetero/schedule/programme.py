"""What every pipeline stage does, in order, as data.

A programme is a sequence of instructions; an instruction is a tuple of operations that are posted
together (a lone computation, a lone message, or the fused send and receive of stock 1F1B) and ends
when all of them have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_hetero.errors import PlanFormatError

OperationKind = Literal[
    "forward",
    "backward",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
    "gradient_sync",
    "step",
]


@dataclass(frozen=True)
class Operation:
    """`micro_batch` is -1 for the two operations of the whole batch (gradient_sync, step)."""

    kind: OperationKind
    micro_batch: int = -1

    def __str__(self) -> str:
        return self.kind if self.micro_batch < 0 else f"{self.kind}({self.micro_batch})"


Instruction = tuple[Operation, ...]
Programme = tuple[Instruction, ...]


@dataclass(frozen=True)
class Schedule:
    """The programmes of one replica's stages, shape [stage]."""

    programmes: tuple[Programme, ...]
    num_micro_batches: int

    @property
    def num_stages(self) -> int:
        """Length of the pipeline."""
        return len(self.programmes)


def one_f_one_b(
    num_stages: int, num_micro_batches: int, launch_counts: Sequence[int] | None = None
) -> Schedule:
    """Non-interleaved 1F1B as Megatron runs it
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
    return Schedule(
        tuple(
            _one_f_one_b_stage(
                num_micro_batches,
                min(count - 1, num_micro_batches),
                is_first=stage == 0,
                is_last=stage == num_stages - 1,
            )
            for stage, count in enumerate(counts)
        ),
        num_micro_batches,
    )


def launch_counts(stage_times_s: Sequence[float], hop_times_s: Sequence[float]) -> tuple[int, ...]:
    """Launch counts that hide the round trip of every hop (rule generalised from HARP).

    L_last = 1 and L_i = L_{i+1} + 1 + ceil(2 c_i / T), T being the slowest stage.

    Args:
        stage_times_s: forward + backward of one micro-batch, shape [stage].
        hop_times_s: one crossing of each boundary, shape [stage - 1].
    """
    period_s = max(stage_times_s)
    counts = [1]
    for hop_s in reversed(hop_times_s):
        round_trips = -int(-2 * hop_s // period_s)
        counts.append(counts[-1] + 1 + round_trips)
    return tuple(reversed(counts))


def _one_f_one_b_stage(
    num_micro_batches: int, num_warmup: int, *, is_first: bool, is_last: bool
) -> Programme:
    """One stage: warm-up forwards, then forward/backward pairs with fused messages, then drain."""
    programme: list[Instruction] = []

    def post(*operations: Operation) -> None:
        """Append the operations that have a partner: the ends of the pipeline have none."""
        kept = tuple(
            o
            for o in operations
            if not (is_first and o.kind in ("recv_forward", "send_backward"))
            and not (is_last and o.kind in ("send_forward", "recv_backward"))
        )
        if kept:
            programme.append(kept)

    for k in range(num_warmup):
        post(Operation("recv_forward", k))
        post(Operation("forward", k))
        post(Operation("send_forward", k))
    num_steady = num_micro_batches - num_warmup
    if num_steady:
        post(Operation("recv_forward", num_warmup))
    for k in range(num_steady):
        ahead = num_warmup + k
        post(Operation("forward", ahead))
        post(Operation("send_forward", ahead), Operation("recv_backward", k))
        post(Operation("backward", k))
        if k + 1 < num_steady:
            post(Operation("send_backward", k), Operation("recv_forward", ahead + 1))
        else:
            post(Operation("send_backward", k))
    for k in range(num_steady, num_micro_batches):
        post(Operation("recv_backward", k))
        post(Operation("backward", k))
        post(Operation("send_backward", k))
    post(Operation("gradient_sync"))
    post(Operation("step"))
    return tuple(programme)
