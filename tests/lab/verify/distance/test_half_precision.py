"""Bounds of losses and norms in half precision: as many false alarms as they say, and no more."""

from __future__ import annotations

import numpy
import pytest

from megatron_hetero.lab.verify.distance.half_precision import FALSE_ALARMS, bound_of_chance
from megatron_hetero.lab.verify.distance.measure import FLOOR_FACTOR


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_sound_plans_exceed_the_bound_as_often_as_is_said(steps: int) -> None:
    """Rounding is drawn: the one process's from fp32, and the plan's from the one process's."""
    drawn = numpy.random.default_rng(steps).standard_normal((20_000, 2, steps))
    floor, plan = numpy.abs(drawn[:, 0]), numpy.abs(drawn[:, 1] - drawn[:, 0])
    alarms = sum(p.max() > bound_of_chance(f) for p, f in zip(plan, floor, strict=True))
    of_four = sum(p.max() > FLOOR_FACTOR * f.max() for p, f in zip(plan, floor, strict=True))
    assert alarms <= 1.5 * FALSE_ALARMS * len(drawn)
    # The bound of tensors does not serve: chance alone passes it many times as often.
    assert of_four > 5 * FALSE_ALARMS * len(drawn)


def test_many_steps_are_held_to_the_bound_of_tensors() -> None:
    floor = numpy.abs(numpy.random.default_rng(0).standard_normal(30))
    assert bound_of_chance(floor) == pytest.approx(FLOOR_FACTOR * floor.max())


def test_a_loss_or_norm_without_steps_has_no_rounding() -> None:
    assert bound_of_chance([]) == 0.0
