"""`plan --stage-precision mixed`: stages in what their GPUs have, and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import stage_precisions

MIXED = "--stage-precision mixed"
"""The flag's words. The flag belongs to `plan`, not to Megatron."""

_REFUSED: Mapping[str, Callable[[Workload], bool]] = {
    "--num-experts": lambda w: w.model.num_experts > 0,
    "--fp8-format": lambda w: w.training.fp8,
    "--grad-reduce-in-bf16": lambda w: w.training.grad_reduce_in_bf16,
}


def with_mixed_precisions(workload: Workload) -> Workload:
    """Return the job with stages in the precisions of the stages' GPUs."""
    return replace(workload, training=replace(workload.training, mixes_precisions=True))


def in_one_precision(training: TrainingSpec) -> TrainingSpec:
    """Return the training with all stages in the job's precision."""
    return replace(training, mixes_precisions=False)


def check_mixture(workload: Workload) -> None:
    """Refuse flags that conflict with stages in unlike precisions.

    Raises:
        UnsupportedError: the message names them.
    """
    if not workload.training.mixes_precisions:
        return
    found = [flag for flag, asks in _REFUSED.items() if asks(workload)]
    if found:
        raise UnsupportedError(
            f"{MIXED} does not go with {', '.join(found)} yet: leave "
            f"{'it' if len(found) == 1 else 'them'} out, or plan in one precision."
        )


def mixture_words(plan: Plan) -> str:
    """Describe the precision of each kind of GPU in a plan of unlike precisions, and the effect on
    numbers; return "" for a plan in a single precision."""
    if plan.workload is None:
        return ""
    job = plan.workload.training.precision
    # precision -> GPU type -> how many.
    where: dict[str, dict[str, int]] = {}
    types = plan.type_by_device
    for replica, row in zip(plan.replicas, stage_precisions(plan, job), strict=True):
        for stage, precision in zip(replica.stages, row, strict=True):
            for device in stage.devices:
                counts = where.setdefault(precision, {})
                name = types.get(device, device)
                counts[name] = counts.get(name, 0) + 1
    if len(where) < 2:
        return ""
    parts = (
        f"{precision} on {' and '.join(f'{n} {name}' for name, n in counts.items())}"
        for precision, counts in where.items()
    )
    return (
        f"{', '.join(parts)}; gradients and main weights in fp32. "
        f"It rounds otherwise than {job} alone (docs/precision.md)"
    )
