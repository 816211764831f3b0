"""The expected change of a loss by the rounding of weights to fp8, beside roundings that are made.
"""

from __future__ import annotations

import numpy
import torch

from megatron_hetero.lab.verify.distance.fp8 import loss_rounding
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard


def test_the_change_is_that_of_roundings_by_unlike_scales() -> None:
    drawn = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 48, generator=drawn)
    gradient = torch.randn(64, 48, generator=drawn)
    scales = torch.rand(400, generator=drawn) + 0.5
    changes = []
    for scale in scales:
        rounded = (weight * scale).to(torch.float8_e4m3fn).float() / scale
        changes.append(float(((rounded - weight) * gradient).sum()))
    made = numpy.sqrt(numpy.mean(numpy.square(changes)))
    loss = 7.0
    expected = loss_rounding(record(weight, gradient, loss)) * loss
    # The bound takes all numbers for those with the largest part lost.
    assert 0.5 * expected < made <= expected


def test_what_is_not_multiplied_in_fp8_counts_for_nothing() -> None:
    ones = torch.ones(4, 4)
    assert loss_rounding(record(ones, ones, 1.0, "embedding.word_embeddings.weight")) == 0
    assert loss_rounding(record(ones[0], ones[0], 1.0, "linear_fc1.bias")) == 0


def record(
    weight: torch.Tensor, gradient: torch.Tensor, loss: float, name: str = "linear_fc1.weight"
) -> RankRecord:
    shape = tuple(weight.shape)
    return RankRecord(
        arrays={f"gradient/1/{name}": gradient.numpy(), f"weight/0/{name}": weight.numpy()},
        shards={name: ParameterShard(name, shape, 0, ((0, shape[0]),), False, False)},
        losses={1: loss},
        norms={1: (1.0).hex()},
        samples=[],
    )
