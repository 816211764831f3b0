"""The precision of a group of GPUs, where stages may compute in precisions of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.model.training import Precision, TrainingSpec

_INSTEAD: tuple[Precision, ...] = ("fp16", "fp32")


def precision_on(training: TrainingSpec, gpus: Iterable[GpuType]) -> Precision:
    """Return what a group of GPUs computes in: the job's precision; with `mixes_precisions`, where
    one of them lacks it, fp16 if all have that, else fp32."""
    if not training.mixes_precisions:
        return training.precision
    types = list(gpus)
    # All GPUs of the group compute in one precision: the first that all of them have.
    for precision in (training.precision, *_INSTEAD):
        if all(gpu.peak_flops.get(precision) is not None for gpu in types):
            return precision
    return training.precision


def training_on(training: TrainingSpec, gpus: Iterable[GpuType]) -> TrainingSpec:
    """Return the training as a group of GPUs does it (`precision_on`)."""
    precision = precision_on(training, gpus)
    return training if precision == training.precision else replace(training, precision=precision)
