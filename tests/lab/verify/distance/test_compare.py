"""Distances that `verify` measures: exact answers on records of one tensor."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from megatron_hetero.lab.verify.distance.compare import Distances, compare, tolerances
from megatron_hetero.lab.verify.processes.floor import round_anew
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard
from tests.runtime.workloads import workload

NAME = "decoder.final_layernorm.weight"
UPDATE = 1e-5
UNIT = 2.0**-24
"""In the last place of an fp32 number below 1."""


def record(weights: list[float]) -> RankRecord:
    """Record a run of one tensor of 48 ones: its weight after each step, with one element that
    differs."""
    start = numpy.ones(48, "float32")
    arrays = {f"weight/0/{NAME}": start}
    for step, weight in enumerate(weights, 1):
        arrays[f"gradient/{step}/{NAME}"] = start
        after = numpy.full(48, numpy.float32(1.0 - step * UPDATE))
        after[7] += numpy.float32(weight)
        arrays[f"weight/{step}/{NAME}"] = after
    steps = range(1, len(weights) + 1)
    return RankRecord(
        arrays,
        {NAME: ParameterShard(NAME, (48,), 0, ((0, 48),), False, False)},
        dict.fromkeys(steps, 1.0),
        dict.fromkeys(steps, (1.0).hex()),
        [0] * len(weights),
        loss_scales=dict.fromkeys(steps, 1.0),
    )


def distance(differences: list[float], optimizer: str = "adam") -> Distances:
    reference = record([0.0] * len(differences))
    model = workload().model
    return compare(reference, [record(differences)], [0], model, optimizer)


def test_a_unit_in_the_last_place_a_step_is_rounding() -> None:
    """Such a unit would exceed the bound beside an update as small as this one."""
    assert UNIT / (UPDATE * math.sqrt(48)) > 0.8e-3
    assert distance([UNIT, 2 * UNIT, 3 * UNIT]).weights.value == 0


@pytest.mark.parametrize("differences", [[2 * UNIT], [UNIT, 3 * UNIT], [-2 * UNIT]])
def test_more_than_that_counts(differences: list[float]) -> None:
    expected = UNIT / numpy.linalg.norm(numpy.full(48, len(differences) * UPDATE))
    assert distance(differences).weights.value == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_weight_that_is_no_number_is_never_within_a_bound(optimizer: str) -> None:
    found = distance([float("nan")], optimizer)
    assert not found.within(tolerances(workload().model, optimizer))


def test_another_rounding_moves_every_weight_by_one_unit() -> None:
    modules = [torch.nn.Linear(40, 30) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    before = [p.detach().clone() for p in modules[0].parameters()]
    for module in modules:
        round_anew(module)
    for old, new, again in zip(before, *(m.parameters() for m in modules), strict=True):
        old_bits, new_bits = (t.detach().view(torch.int32) for t in (old, new))
        assert set((new_bits - old_bits).flatten().tolist()) == {-1, 1}
        assert torch.equal(new, again)  # a floor is the same in every run
