"""A timeline of real training steps (`--hetero-timeline FILE`): the operations of every stage.

Only the steps that are recorded are timed; all others cost one comparison between steps. A recorded
step begins behind a barrier, so that the ranks' clocks need not agree; on GPUs the times are those
of CUDA events. The file opens in ui.perfetto.dev, and `megatron-hetero report --measured FILE`
draws it below the prediction.

While a step is recorded, timing wrappers that change nothing else replace Megatron's `forward_step`
and `backward_step`, the function that finishes gradients, and the optimizer's `step`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_hetero.files import write_json
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.gradients.weight_gradients import WeightGradients
from megatron_hetero.runtime.parallel.texts import gather_texts
from megatron_hetero.schedule.of_plan import replica_schedule
from megatron_hetero.schedule.parts import OpSpan
from megatron_hetero.schedule.programme import COMPUTE, Operation, OperationKind
from megatron_hetero.schedule.simulator.timelines import StageTimeline
from megatron_hetero.schedule.simulator.trace import chrome_trace


@dataclass(frozen=True)
class MeasuredStep:
    """One recorded step: its number, its seconds, and the spans of each rank."""

    number: int
    seconds: float
    stages: tuple[StageTimeline, ...]


class TimelineRecorder:
    """Observer of Megatron's log (`runtime.megatron.training_log`) that records steps in between.

    It records steps `first .. end - 1`; the first step of a job cannot be recorded.
    """

    def __init__(self, plan: Plan, path: Path, first: int, end: int) -> None:
        self._plan, self._path = plan, path
        self._first, self._end = first, end
        self._model: Sequence[Any] = ()
        self._step: _Recording | None = None
        self._steps: list[MeasuredStep] = []

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Store the model, for the gradient finishing function in the model's configuration."""
        self._model = model
        return model

    def observe(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        """End or begin a recording between two steps. Collective where a step is recorded.

        Args:
            iteration: the step.
            loss_dict: Megatron's losses; not read.
            grad_norm: Megatron's norm; not read.
        """
        if self._step is not None:
            spans, seconds = self._step.end()
            self._step = None
            # Every rank's spans meet, and rank 0 writes the file anew with each step.
            texts = gather_texts(json.dumps([seconds, spans]))
            if dist.get_rank() == 0:
                self._steps.append(measured_step(self._plan, iteration, texts))
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, timeline_to_data(self._plan, self._steps))
                print(f"> step {iteration} is in the timeline {self._path}", flush=True)
        # The next step begins as soon as this call is over.
        if self._first <= iteration + 1 < self._end:
            self._step = _Recording(get_model_config(self._model[0]))


class _Recording:
    """Recording of one step of this rank."""

    def __init__(self, config: Any) -> None:
        self._marks: list[tuple[str, Any, Any]] = []
        self._on_gpu = backend.cuda_is_usable()
        self._replaced: list[tuple[Any, str, Any]] = []
        # Stock Megatron's schedules and ours call the same functions for a pass.
        self._replace(schedules, "forward_step", "pass")
        self._replace(schedules, "backward_step", "pass")
        self._replace(WeightGradients, "make", "pass")
        self._replace(config, "finalize_model_grads_func", "gradient_sync")
        self._replace(ChainedOptimizer, "step", "step")
        # All ranks begin the step together: their times have one zero.
        dist.barrier()
        self._begin = self._mark()

    def end(self) -> tuple[list[tuple[str, float, float]], float]:
        """End the recording; return spans (kind, start, end) and the step's seconds."""
        last = self._mark()
        for owner, name, function in reversed(self._replaced):
            setattr(owner, name, function)
        if self._on_gpu:
            # All events are done once the last one is.
            last.synchronize()
        spans = [(kind, self._seconds(a), self._seconds(b)) for kind, a, b in self._marks]
        return spans, self._seconds(last)

    def _replace(self, owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)
        self._replaced.append((owner, name, function))

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._span(kind):
                return function(*args, **kwargs)

        setattr(owner, name, timed)

    @contextlib.contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((kind, start, self._mark()))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if self._on_gpu:
            return float(self._begin.elapsed_time(mark)) / 1e3
        return cast(float, mark - self._begin)


def measured_step(plan: Plan, number: int, texts: Sequence[str]) -> MeasuredStep:
    """Combine the records of the ranks, [rank] as JSON of [seconds, spans].

    The first place of a tensor-parallel group stands for all of it.

    Args:
        plan: the plan.
        number: the step.
        texts: the records.
    """
    stages = []
    longest_s = 0.0
    for place, text in zip(rank_table(plan), texts, strict=True):
        seconds, spans = json.loads(text)
        longest_s = max(longest_s, seconds)
        if place.tensor_rank:
            continue
        # A span does not know its micro-batch: the order of the programme tells.
        passes = [span for span in spans if span[0] == "pass"]
        operations = _operations(plan, place.replica, place.stage, len(passes))
        found = [
            OpSpan(operation.kind, operation.micro_batch, operation.chunk, start_s, end_s)
            for operation, (_, start_s, end_s) in zip(operations, passes, strict=True)
        ]
        # The exchange of gradients and the optimizer's step belong to no micro-batch.
        found += [
            OpSpan(cast(OperationKind, kind), -1, 0, start_s, end_s)
            for kind, start_s, end_s in spans
            if kind != "pass"
        ]
        devices = plan.replicas[place.replica].stages[place.stage].devices
        ordered = tuple(sorted(found, key=lambda span: span.start_s))
        stages.append(StageTimeline(place.replica, place.stage, devices, ordered, (), 0))
    return MeasuredStep(
        number, longest_s, tuple(sorted(stages, key=lambda s: (s.replica, s.stage)))
    )


def _operations(plan: Plan, replica: int, stage: int, num_passes: int) -> list[Operation]:
    """Return the operations that the passes of a stage were: those of its programme, in order."""
    schedule = replica_schedule(plan, replica)
    due = [o for i in schedule.programmes[stage] for o in i if o.kind in COMPUTE]
    if len(due) == num_passes:
        return due
    # A batch of another size (--step-batch-size-schedule): as many of each kind, in turn.
    kinds = [operation.kind for operation in due]
    counts: Counter[str] = Counter()
    found = []
    for index in range(num_passes):
        kind = kinds[index % len(kinds)]
        found.append(Operation(kind, counts[kind]))
        counts[kind] += 1
    return found


def timeline_to_data(plan: Plan, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Build a trace file that also has, for programs, the figures of the median step."""
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    lanes = {f"measured, step {step.number}": step.stages for step in steps}
    return {
        **chrome_trace(lanes),
        "layout": format_layout(plan.layout),
        "measured_step_time_s": middle.seconds,
        "step": middle.number,
        "step_times_s": {str(step.number): step.seconds for step in steps},
        "stages": [
            {
                "replica": stage.replica,
                "stage": stage.stage,
                "devices": list(stage.devices),
                "operations": [operation._asdict() for operation in stage.operations],
            }
            for stage in middle.stages
        ],
    }


def recorder_of(plan: Plan, path: Path | None, args: Any) -> TimelineRecorder | None:
    """Build the recorder that the command line asks for; None without a path.

    Megatron's `--profile-step-start` and `--profile-step-end` choose the steps.
    """
    if path is None:
        return None
    return TimelineRecorder(plan, path, args.profile_step_start, args.profile_step_end)
