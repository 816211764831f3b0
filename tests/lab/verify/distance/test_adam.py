"""Part of a distance that Adam makes of unlike gradients: exact on a run of torch's own Adam."""

from __future__ import annotations

import numpy
import pytest
import torch

from megatron_hetero.lab.verify.distance.adam import AdamSettings, explained_difference
from megatron_hetero.lab.verify.distance.compare import ADAM_ARITHMETIC_TOLERANCE
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
SIZE, STEPS = 4096, 5
SHARD = ParameterShard(NAME, (SIZE,), 0, ((0, SIZE),), False, False)


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) * 1e-3 for _ in range(STEPS)]


def run(made: list[torch.Tensor], max_norm: float, decay: float, rate: float) -> RankRecord:
    """A run of torch's Adam in fp32 on given gradients, clipped as Megatron clips."""
    weight = torch.linspace(-0.05, 0.05, SIZE).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    arrays = {f"weight/0/{NAME}": weight.detach().numpy().copy()}
    norms = {}
    for step, gradient in enumerate(made, 1):
        norm = float(gradient.double().norm())
        norms[step] = norm.hex()
        arrays[f"gradient/{step}/{NAME}"] = gradient.numpy().copy()
        weight.grad = gradient * min(1.0, max_norm / (norm + 1e-6))
        optimizer.step()
        arrays[f"weight/{step}/{NAME}"] = weight.detach().numpy().copy()
    return RankRecord(arrays, {NAME: SHARD}, {}, norms, [])


@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
def test_rounding_of_gradients_explains_the_difference(max_norm: float) -> None:
    """The difference itself is near a thousandth of the update, the old bound."""
    settings = AdamSettings(0.9, 0.95, 1e-8, max_norm)
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(SIZE, generator=generator) * 1e-7 for _ in range(STEPS)]
    one = run(gradients(), max_norm, 0.01, 1e-3)
    other = run([g + n for g, n in zip(gradients(), noise, strict=True)], max_norm, 0.01, 1e-3)
    found = explained_difference(NAME, SHARD, other, one.arrays, one.norms, settings)
    for step in range(1, STEPS + 1):
        apart = other.arrays[f"weight/{step}/{NAME}"].astype("float64")
        apart = apart - one.arrays[f"weight/{step}/{NAME}"]
        moved = one.arrays[f"weight/{step}/{NAME}"] - one.arrays[f"weight/0/{NAME}"]
        unit = numpy.spacing(numpy.abs(one.arrays[f"weight/{step}/{NAME}"]))
        left = numpy.maximum(numpy.abs(apart - found[step]) - step * unit, 0)
        length = numpy.linalg.norm(moved)
        assert numpy.linalg.norm(apart) / length > 20 * ADAM_ARITHMETIC_TOLERANCE
        assert numpy.linalg.norm(left) / length < ADAM_ARITHMETIC_TOLERANCE / 4


def test_a_wrong_update_is_not_explained() -> None:
    one, other = run(gradients(), 1.0, 0.01, 1e-3), run(gradients(), 1.0, 0.01, 1.001e-3)
    found = explained_difference(NAME, SHARD, other, one.arrays, one.norms, AdamSettings())
    assert not any(part.any() for part in found.values())
