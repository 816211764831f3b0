"""One rank of a rehearsal: Megatron's own training, stretched and held to the links.

The hooks are on functions that both our executor and stock Megatron's schedules call. The first
steps run as fast as this machine can; from their times the ranks agree on one time scale.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock, now, sleep_until
from megatron_hetero.lab.rehearse.exchange import GradientHooks, Pass
from megatron_hetero.lab.rehearse.interleaved import StockPasses, batched_p2p_ops
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network
from megatron_hetero.lab.rehearse.links.transport import Transport
from megatron_hetero.lab.rehearse.progress import StepProgress
from megatron_hetero.lab.rehearse.small import SmallModel
from megatron_hetero.schedule.exchange.gradients import LastBackward
from megatron_hetero.schedule.programme import COMPUTE
from megatron_hetero.schedule.simulator.parts import ChunkTimes

WARMUP_STEPS = 2
SLACK = 3.0
"""The stretched step is at least so many times as long as this machine takes for its arithmetic."""
MOST_TRIES = 4
"""Steps that are run for each one that is wanted, if this machine disturbs them."""
MOST_LATE = 0.02
"""A step counts if this machine made no rank lose more than this part of it."""
_STRETCH_ON = 1.5
"""By so much the time scale grows after a disturbed step."""
_WITH_COLLECTIVES = ("forward", "backward", "backward_input")
"""Passes whose end means that all members of a tensor-parallel group have begun them."""
_LEAST_ALLOWANCE_S = 0.2
_BEGIN_IN_S = 0.01


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank's GPU, in the cluster's seconds: passes of each chunk, and the
    optimizer."""

    chunks: tuple[ChunkTimes, ...]
    update_s: float
    num_micro_batches: int
    last_backward: LastBackward | None = None

    @property
    def busy_s(self) -> float:
        """Return the seconds of all computations of one step."""
        passes_s = sum(c.seconds("forward") + c.seconds("backward") for c in self.chunks)
        return self.num_micro_batches * passes_s

    @property
    def shortest_s(self) -> float:
        """Return the seconds of the shortest pass."""
        return min(min(c.seconds("forward"), c.seconds("backward")) for c in self.chunks)


class RehearsalDone(Exception):  # noqa: N818
    """Exit from training: all ranks have seen enough steps."""


class RehearsedRank:
    """Observer of one process's training (`Observer` of `runtime.job.entry`), which stretches
    it."""

    def __init__(
        self,
        rank: int,
        times: RankTimes,
        small: SmallModel,
        board: Board,
        network: Network,
        tensor_ranks: Sequence[int],
        num_steps: int,
        time_scale: float | None,
        progress: StepProgress | None = None,
    ) -> None:
        """Prepare the hooks of a rank.

        Args:
            rank: global rank.
            times: seconds of its passes on the cluster.
            small: the model of the rehearsal.
            board: memory that all ranks share.
            network: hops between ranks.
            tensor_ranks: ranks of its tensor-parallel group.
            num_steps: number of steps that are to count.
            time_scale: fixed time scale; None lets the ranks agree on one.
            progress: progress to write, on one rank only.
        """
        self._progress = progress
        self._num_steps = num_steps
        self._times, self._small = times, small
        self._time_scale = time_scale
        self._tensor_ranks = set(tensor_ranks)
        self.clock = Clock()
        self.transport = Transport(rank, board, network, self.clock, self._tensor_ranks)
        self.transport.activation_ratio = small.activation_ratio
        self._passes = StockPasses()
        self._gradients = GradientHooks(
            small, self.transport, self.clock, self._tensor_ranks, times.last_backward
        )
        self._steps_begun = 0
        self._begun_s = 0.0
        self._free_step_s = 0.0
        self._steps_updated = 0
        self.records: list[dict[str, Any]] = []

    # What `entry` calls.

    def observe_log(self) -> None:
        """Ignore the log."""

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Store what the gradients of this rank stand for."""
        self._gradients.know(model)
        return model

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the data as they are."""
        return provider

    # Hooks.

    def install(self) -> None:
        """Put all hooks in their places, in this process."""
        from megatron.core.optimizer import optimizer
        from megatron.core.pipeline_parallel import p2p_communication, schedules
        from megatron.training import training

        from megatron_hetero.runtime.parallel.executed_step import ExecutedStep

        self.transport.install()
        p2p_communication._p2p_ops = batched_p2p_ops(lambda ops: dist.batch_isend_irecv(ops))
        self._gradients.install()
        training.train_step = self._stepping(training.train_step)
        schedules.forward_step = self._counted("forward", schedules.forward_step)
        schedules.backward_step = self._counted("backward", schedules.backward_step)
        ExecutedStep.do = self._operating(ExecutedStep.do)
        # Not those that exchange new weights after the update.  A chain of none is a rank that
        # owns nothing.
        kinds = optimizer.FP32Optimizer, optimizer.MixedPrecisionOptimizer
        for kind in (*kinds, optimizer.ChainedOptimizer):
            kind.step_with_ready_grads = self._updating(kind.step_with_ready_grads)

    @contextmanager
    def _computing(self, kind: str, micro_batch: int, chunk: int, seconds: float) -> Iterator[None]:
        begin_s, began = self.clock.time(), now()
        # A tensor-parallel group computes in step: its collectives begin with the last member.
        is_joint = len(self._tensor_ranks) > 1 and kind in _WITH_COLLECTIVES
        key = ("pass", min(self._tensor_ranks), self._steps_begun, kind, micro_batch, chunk)
        if is_joint:
            self.transport.board.come(key, begin_s)
        self.transport.is_computing = True

        def begun_s() -> float:
            return self.transport.board.latest_s(key) if is_joint else begin_s

        self._gradients.under_way = Pass(kind, chunk, begun_s, seconds)
        try:
            yield
        finally:
            self.transport.is_computing = False
            self._gradients.under_way = None
        self.clock.computed(kind, micro_batch, chunk, begun_s(), began, seconds)

    def _operating(self, do: Callable[..., None]) -> Callable[..., None]:
        """Wrap our executor's operations, which name their kind, micro-batch and chunk."""

        def held(step: Any, operation: Any, forward: Any) -> None:
            if operation.kind not in COMPUTE:
                return do(step, operation, forward)
            seconds = self._times.chunks[operation.chunk].seconds(operation.kind)
            with self._computing(operation.kind, operation.micro_batch, operation.chunk, seconds):
                return do(step, operation, forward)

        return held

    def _counted(self, kind: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap stock Megatron's `forward_step(_, _, model, ...)` or `backward_step(_, output,
        ...)`.

        Micro-batches of a chunk come in order.
        """

        def held(*args: Any, **kwargs: Any) -> Any:
            if self.transport.is_computing:
                return function(*args, **kwargs)
            passes = self._passes
            if kind == "forward":
                micro_batch, chunk = passes.forward(args[2])
            else:
                micro_batch, chunk = passes.backward(args[1])
            with self._computing(kind, micro_batch, chunk, self._times.chunks[chunk].seconds(kind)):
                result = function(*args, **kwargs)
            if kind == "forward":
                passes.made(result[0], chunk)
            return result

        return held

    def _updating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the optimizer's step; it counts once a step, however many optimizers Megatron has
        chained."""

        def held(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            chained = getattr(optimizer, "chained_optimizers", ())
            if self._steps_updated == self._steps_begun or chained:
                return function(optimizer, *args, **kwargs)
            self._steps_updated = self._steps_begun
            with self._computing("step", -1, 0, self._times.update_s):
                return function(optimizer, *args, **kwargs)

        return held

    # Steps.

    def _stepping(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            result = train_step(*args, **kwargs)
            self._end()
            return result

        return held

    def _begin(self) -> None:
        self._passes = StockPasses()
        if self._steps_begun == WARMUP_STEPS:
            self._agree_on_scale()
        elif self._steps_begun > WARMUP_STEPS:
            self._judge_last_step()
        self._steps_begun += 1
        if self._progress is not None:
            self._progress.begin(self._steps_begun, self._num_kept, self.clock.scale)
        begin_s = self._latest(now()) + _BEGIN_IN_S
        self.transport.sent, self.transport.collectives = [], []
        self.transport.line_s = defaultdict(float)
        self.clock.begin_step(begin_s)
        sleep_until(begin_s)
        self._begun_s = now()

    def _end(self) -> None:
        clock = self.clock
        self._free_step_s = now() - self._begun_s
        if clock.scale == 0:
            return
        length_s = clock.until_s - clock.step_begin_s
        late_s = now() - clock.until_s
        self.records.append(
            {
                "scale": clock.scale,
                "is_disturbed": clock.lost_s + late_s > MOST_LATE * length_s,
                "end_s": length_s + late_s,
                "spans": [list(span) for span in clock.spans],
                "sent": [list(message) for message in self.transport.sent],
                "collectives": self.transport.collectives,
                "line_s": self.transport.line_s,
                "largest_lag_s": clock.largest_lag_s,
                "host_s": sum(clock.host_s),
            }
        )

    def _judge_last_step(self) -> None:
        """Keep a step in which this machine kept pace on all ranks; else try again, more slowly."""
        is_disturbed = bool(self._latest(float(self.records[-1]["is_disturbed"])))
        self.records[-1]["is_disturbed"] = is_disturbed
        if self._num_kept == self._num_steps:
            raise RehearsalDone
        if is_disturbed and self._time_scale is None:
            self._set_scale(_STRETCH_ON * self.clock.scale)

    @property
    def _num_kept(self) -> int:
        return sum(not record["is_disturbed"] for record in self.records)

    def _agree_on_scale(self) -> None:
        """Choose the time scale from the last free step, so slow that most of the time is sleep.

        All ranks together took `_free_step_s`; and no pass may become shorter than this machine
        needs for it when undisturbed.
        """
        times = self._times
        passes_s = sorted(self.clock.host_s)
        typical_s = passes_s[len(passes_s) // 2]
        own = max(SLACK * self._free_step_s / times.busy_s, 2 * typical_s / times.shortest_s)
        self._set_scale(self._time_scale or self._latest(own))

    def _set_scale(self, scale: float) -> None:
        self.clock.scale = scale
        self.clock.allowance_s = max(_LEAST_ALLOWANCE_S, self._times.shortest_s * scale)

    def _latest(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        with self.transport.left_alone():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def save(self, path: Path) -> None:
        """Write the records of the steps, for the parent."""
        path.write_text(json.dumps(self.records))


def read_records(path: Path) -> list[Mapping[str, Any]]:
    """Read the file that `RehearsedRank.save` wrote."""
    records: list[Mapping[str, Any]] = json.loads(path.read_text())
    return records
