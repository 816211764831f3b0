"""A pipeline of processes that sleep instead of computing: the runtime's own executor, boundaries
and gloo, with passes of known length and messages that leave late.

What is measured is the executor's waiting: every pass sleeps as long as it is told, every message
is handed to gloo when its link would have delivered it.  Nothing here knows what a simulation says.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.plan.sharding.stage_ranges import StageRanks
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.gradients import weight_gradients
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.steps.executor import Executor
from megatron_hetero.schedule.orders.list_schedule import TimedPipeline
from megatron_hetero.schedule.parts import ChunkTimes
from megatron_hetero.schedule.programme import Schedule

_ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
_BEGIN_IN_S = 0.05


def measure(
    pipeline: TimedPipeline, schedule: Schedule, scale: float, folder: Path, num_steps: int = 2
) -> float:
    """Return the seconds of a step in the pipeline's own unit of time, the quickest of `num_steps`.

    Disturbances of this machine only ever add time, so the quickest says most about the schedule.

    Args:
        scale: seconds that a unit of time lasts here.
    """

    def stage(rank: int) -> None:
        ends = _run_stage(pipeline, schedule, scale, folder, rank, num_steps)
        (folder / f"ends-{rank}.json").write_text(json.dumps(ends))

    num_stages = pipeline.num_stages
    run_jobs([LocalJob("sleeping", num_stages, stage, folder)], 600)
    ends = [json.loads((folder / f"ends-{s}.json").read_text()) for s in range(num_stages)]
    return min(max(step) for step in zip(*ends, strict=True)) / scale


def _run_stage(
    pipeline: TimedPipeline,
    schedule: Schedule,
    scale: float,
    folder: Path,
    rank: int,
    num_steps: int,
) -> list[float]:
    """Return the seconds from the common begin to this stage's end, [step]."""
    backend.activate_cpu_backend()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), pipeline.num_stages)
    timeout = timedelta(minutes=5)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=pipeline.num_stages, timeout=timeout
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, pipeline_dtype=torch.float32
    )
    config.calculate_per_token_loss = True
    boundaries = _boundaries(pipeline, scale, rank, config)
    chunks = [_Chunk(times, scale, config) for times in pipeline.times[rank]]
    executor = Executor(schedule, rank)
    ends = []
    for _ in range(num_steps):
        begin_s = _agree(time.monotonic() + _BEGIN_IN_S)
        _sleep_until(begin_s)
        executor.run(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=chunks,
            seq_length=2,
            micro_batch_size=1,
            p2p_communicator=SimpleNamespace(boundaries=boundaries),  # type: ignore[arg-type]
            pg_collection=SimpleNamespace(tp=_ALONE, cp=_ALONE),
        )
        ends.append(time.monotonic() - begin_s)
    dist.barrier()
    return ends


def _agree(at_s: float) -> float:
    """Return the latest of all ranks' moments; the clock is one for all processes of a machine."""
    value = torch.tensor([at_s], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _boundaries(
    pipeline: TimedPipeline, scale: float, rank: int, config: Any
) -> dict[int, Boundary]:
    groups = SimpleNamespace(tensor=_ALONE)
    found: dict[int, Boundary] = {}
    for number, (before, after) in enumerate(pairwise(pipeline.chain)):
        ends = (before, after)
        forward, backward = ((dist.new_group(sorted(ends)),) for _ in range(2))
        if rank == before:
            hop = pipeline.forward_hops[number]
            found[number] = _LateBoundary(groups, StageRanks((after,)), forward, backward, config)
        elif rank == after:
            hop = pipeline.backward_hops[number]
            found[number] = _LateBoundary(groups, StageRanks((before,)), backward, forward, config)
        else:
            continue
        found[number].set_link(hop.serialisation_s * scale, hop.latency_s * scale)
    return found


class _LateBoundary(Boundary):
    """A boundary whose messages leave when its link would have delivered them."""

    def set_link(self, serialisation_s: float, latency_s: float) -> None:
        self._serialisation_s, self._latency_s = serialisation_s, latency_s
        self._free_at_s = 0.0
        self._due: queue.Queue[tuple[float, torch.Tensor]] = queue.Queue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, tensor: torch.Tensor, announce: bool = False) -> None:
        self._free_at_s = max(time.monotonic(), self._free_at_s) + self._serialisation_s
        self._due.put((self._free_at_s + self._latency_s, tensor))

    def _deliver(self) -> None:
        while True:
            at_s, tensor = self._due.get()
            _sleep_until(at_s)
            super().send(tensor)
            self._due.task_done()

    def forget_sends(self, num_arrived: int) -> None:
        """Forget sends that have arrived, and so left before; the thread above notes it a moment
        later."""
        super().forget_sends(min(num_arrived, self._num_forgotten + len(self._sent)))

    def finish_sends(self) -> None:
        self._due.join()
        super().finish_sends()


class _Chunk(torch.nn.Module):
    """A model chunk in Megatron's terms whose passes sleep."""

    def __init__(self, times: ChunkTimes, scale: float, config: Any) -> None:
        super().__init__()
        self.config, self.times, self.scale = config, times, scale
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self._input,) = tensors

    def forward(self) -> torch.Tensor:
        given = self._input
        if given is None:
            given = torch.zeros(2, 1, 4, requires_grad=True)
        return _Sleep.apply(given, self.times, self.scale)


class _Sleep(torch.autograd.Function):
    """The identity, in the time of a chunk's passes."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, times: ChunkTimes, scale: float) -> torch.Tensor:
        ctx.times, ctx.scale = times, scale
        time.sleep(times.forward_s * scale)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights = _Later(ctx.times.backward_weight_s * ctx.scale)
        time.sleep(ctx.times.backward_input_s * ctx.scale)
        if not weight_gradients.put_off(weights):
            weights.make()
        return gradient.clone(), None, None


class _Later:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def make(self) -> None:
        time.sleep(self._seconds)


def _forward_step(data: Any, chunk: Any) -> Any:
    def loss(output: torch.Tensor) -> Any:
        return output.sum(), torch.tensor(1, dtype=torch.int), {}

    return chunk(), loss


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
