"""Predicted beside measured: the arithmetic of MFU, the line, what is written for TensorBoard."""

from __future__ import annotations

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.runtime.observe.step_time import (
    Prediction,
    prediction_of,
    step_line,
    step_values,
)
from tests.runtime.observe.test_stage_ratio import planned
from tests.runtime.workloads import workload


def test_the_flops_are_those_of_the_model() -> None:
    """Count by hand: 6 for each weight of a product and token (tied head counted as a product), and
    the causal half of the scores; 8 sequences of 48 tokens."""
    job = workload(num_layers=8, global_batch_size=8, add_bias_linear=False)
    model = job.model
    layer = 4 * model.hidden_size**2 + 2 * model.hidden_size * model.ffn_hidden_size
    products = model.num_layers * layer + model.hidden_size * 1024
    scores = 2 * model.num_layers * model.seq_length * model.hidden_size / 2
    flops = 6 * (products + scores) * 8 * model.seq_length
    assert prediction_of(planned(), job).flops == pytest.approx(flops, rel=0.01)


def test_the_peak_is_that_of_all_gpus() -> None:
    """One A100 and three RTX 4090."""
    job = workload(num_layers=8, global_batch_size=8, precision="bf16")
    a100, rtx = gpu_type("A100-40GB").peak_flops["bf16"], gpu_type("RTX-4090").peak_flops["bf16"]
    assert a100 is not None and rtx is not None
    found = prediction_of(planned(), job)
    assert found.flops_per_s == a100 + 3 * rtx
    assert found.mfu(2.0) == pytest.approx(found.flops / (a100 + 3 * rtx) / 2)


def test_the_line_and_the_values() -> None:
    prediction = Prediction(2.0, 8, 4e12, 5e12)
    assert step_line(prediction, 2.5) == (
        "step: 2.5 s, predicted 2 s (1.25 times) | MFU: 32.0%, predicted 40.0%"
    )
    assert step_values(prediction, 2.5) == {
        "step-time/measured": 2.5, "step-time/predicted": 2.0,
        "mfu/measured": pytest.approx(0.32), "mfu/predicted": pytest.approx(0.4),
    }  # fmt: skip


def test_an_unknown_gpu_has_no_mfu() -> None:
    prediction = Prediction(2.0, 8, 4e12, None)
    assert step_line(prediction, 2.5) == "step: 2.5 s, predicted 2 s (1.25 times)"
    assert set(step_values(prediction, 2.5)) == {"step-time/measured", "step-time/predicted"}
