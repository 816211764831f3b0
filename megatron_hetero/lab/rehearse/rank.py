"""One rank of a rehearsal: Megatron's own training, stretched and held to the links.

The hooks are on functions that both our executor and stock Megatron's schedules call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock, now
from megatron_hetero.lab.rehearse.exchange import GradientHooks, Pass
from megatron_hetero.lab.rehearse.interleaved import StockPasses, batched_p2p_ops
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network
from megatron_hetero.lab.rehearse.links.transport import Transport
from megatron_hetero.lab.rehearse.pace import RankTimes, StepPace
from megatron_hetero.lab.rehearse.progress import StepProgress
from megatron_hetero.lab.rehearse.small import SmallModel
from megatron_hetero.schedule.programme import COMPUTE

_WITH_COLLECTIVES = ("forward", "backward", "backward_input")
"""Passes with collectives: at the end all members of a tensor-parallel group have begun the pass.
"""


class RehearsedRank:
    """`Observer` of a process's training (`runtime.job.entry`) that stretches the training."""

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
        self._times = times
        self._tensor_ranks = set(tensor_ranks)
        self.clock = Clock()
        self.transport = Transport(rank, board, network, self.clock, self._tensor_ranks)
        self.transport.activation_ratio = small.activation_ratio
        self._passes = StockPasses()
        self._gradients = GradientHooks(
            small, self.transport, self.clock, self._tensor_ranks, times.last_backward
        )
        self._steps_updated = 0
        self.pace = StepPace(self.transport, times, num_steps, time_scale, progress)

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

        from megatron_hetero.runtime.parallel.pipeline import always_send_parts
        from megatron_hetero.runtime.steps.executed_step import ExecutedStep

        # Messages and collectives first, then everything that calls them.
        always_send_parts()
        self.transport.install()
        p2p_communication._p2p_ops = batched_p2p_ops(lambda ops: dist.batch_isend_irecv(ops))
        self._gradients.install()
        # Steps, then passes: stock Megatron's schedules and our executor's operations.
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
        key = ("pass", min(self._tensor_ranks), self.pace.num_begun, kind, micro_batch, chunk)
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
        """Wrap our executor's operations; each operation has a kind, a micro-batch and a chunk."""

        def held(step: Any, operation: Any, forward: Any) -> None:
            if operation.kind not in COMPUTE:
                return do(step, operation, forward)
            seconds = self._times.chunks[operation.chunk].seconds(operation.kind)
            with self._computing(operation.kind, operation.micro_batch, operation.chunk, seconds):
                return do(step, operation, forward)

        return held

    def _counted(self, kind: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap stock Megatron's forward or backward step; micro-batches of a chunk come in order.

        Their arguments are `forward_step(_, _, model, ...)` and `backward_step(_, output, ...)`.
        """

        def held(*args: Any, **kwargs: Any) -> Any:
            # A pass within a pass (our executor calls Megatron's functions) is counted once.
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
        """Wrap the optimizer's step, which counts once a step for chained optimizers."""

        def held(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # The chain hands over to its parts, of which the first counts for all.
            chained = getattr(optimizer, "chained_optimizers", ())
            if self._steps_updated == self.pace.num_begun or chained:
                return function(optimizer, *args, **kwargs)
            self._steps_updated = self.pace.num_begun
            with self._computing("step", -1, 0, self._times.update_s):
                return function(optimizer, *args, **kwargs)

        return held

    def _stepping(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step of training."""

        def held(*args: Any, **kwargs: Any) -> Any:
            # Chunks and micro-batches are counted anew in every step.
            self._passes = StockPasses()
            self.pace.begin()
            result = train_step(*args, **kwargs)
            self.pace.end()
            return result

        return held
