"""Measured step time beside its prediction, during training, and the model FLOPs utilization (MFU).

FLOPs are those of the model (`model.blocks`: products, and the causal half of the scores; the
backward pass twice the forward; nothing for recomputing), over the peaks of the plan's GPUs, as in
PaLM (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.observe.log_values import write_values

_BACKWARD_OVER_FORWARD = 2


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a step.

    `flops_per_s` is the peak of all GPUs of the plan together; None if the catalogue lacks one of
    them.
    """

    step_s: float
    global_batch_size: int
    flops: float
    flops_per_s: float | None

    def mfu(self, step_s: float) -> float | None:
        """Return the MFU of a step that takes `step_s` seconds."""
        return None if self.flops_per_s is None else self.flops / self.flops_per_s / step_s


def prediction_of(plan: Plan, workload: Workload) -> Prediction:
    """Return the prediction of a plan with estimates for its workload.

    Raises:
        ValueError: the plan has no estimates.
    """
    if plan.estimates is None:
        raise ValueError("a plan without estimates predicts nothing")
    forward = sum(
        block.matmul_flops_forward + block.attention_flops_forward for block in blocks(workload)
    )
    batch = workload.training.global_batch_size
    return Prediction(
        plan.estimates.step_time_s,
        batch,
        (1 + _BACKWARD_OVER_FORWARD) * forward * batch,
        _peak_flops_per_s(plan, workload.training.precision),
    )


def _peak_flops_per_s(plan: Plan, precision: str) -> float | None:
    known = gpu_type_names()
    total = 0.0
    for name in plan.type_by_device.values():
        peak = gpu_type(name).peak_flops.get(precision) if name in known else None
        if peak is None:
            return None
        total += peak
    return total or None


class StepTime:
    """Observer of Megatron's log on the printing rank, with an added line for each interval.

    It measures the median time from one step's end to the next in the interval, which validation
    and checkpoints between steps do not move. The job's first step warms up and does not count.
    """

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._last: float | None = None
        self._steps_s: list[float] = []

    def observe(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size
        from megatron.training import get_args

        now = time.perf_counter()
        # Batches may grow (--step-batch-size-schedule); the plan's step is of its own batch.
        if self._last is not None and (
            get_current_global_batch_size() == self._prediction.global_batch_size
        ):
            self._steps_s.append(now - self._last)
        self._last = now
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        if iteration % get_args().log_interval or not self._steps_s or not is_last_rank:
            return
        measured_s, self._steps_s = median(self._steps_s), []
        line = step_line(self._prediction, measured_s)
        print(f" [plan] iteration {iteration:8d} | {line} |", flush=True)
        write_values(step_values(self._prediction, measured_s), iteration)


def step_line(prediction: Prediction, measured_s: float) -> str:
    """Format measured and predicted time and MFU for the log."""
    ratio = measured_s / prediction.step_s
    line = f"step: {measured_s:.4g} s, predicted {prediction.step_s:.4g} s ({ratio:.2f} times)"
    mfu, promised = prediction.mfu(measured_s), prediction.mfu(prediction.step_s)
    if mfu is None or promised is None:
        return line
    return f"{line} | MFU: {mfu:.1%}, predicted {promised:.1%}"


def step_values(prediction: Prediction, measured_s: float) -> Mapping[str, float]:
    """Return measured and predicted time and MFU by name, for TensorBoard and W&B."""
    values = {"step-time/measured": measured_s, "step-time/predicted": prediction.step_s}
    mfu, promised = prediction.mfu(measured_s), prediction.mfu(prediction.step_s)
    if mfu is not None and promised is not None:
        values |= {"mfu/measured": mfu, "mfu/predicted": promised}
    return values
