"""Bounds of a plan in half precision, from what half precision does to one process.

A tensor has enough elements to show how far rounding moves it (`measure.FLOOR_FACTOR`). A loss or a
gradient norm is one number a step: rounding moves it up or down by chance, and in few steps it can
be moved very little each time. 7 % of sound plans pass four times the largest distance of two
steps. So the bound is Student's: the distances of n steps are drawings from a distribution
about zero of unknown width, which n drawings tell the better the more they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from scipy.special import stdtrit

from megatron_hetero.lab.verify.distance.compare import Tolerances, relative, tolerances
from megatron_hetero.lab.verify.distance.fp8 import loss_rounding
from megatron_hetero.lab.verify.distance.measure import FLOOR_FACTOR
from megatron_hetero.lab.verify.processes.record import SKIPPED, RankRecord
from megatron_hetero.model.spec import ModelSpec

FALSE_ALARMS = 1e-3
"""Part of the sound plans whose loss, or norm, may exceed its bound in some step by chance."""


def half_precision_tolerances(
    reference: RankRecord,
    single: RankRecord,
    model: ModelSpec,
    optimizer: str,
    has_fp8: bool = False,
) -> Tolerances:
    """Return the bounds of a plan in half precision, from the one-process run in half precision and
    in fp32.

    The latter is `single`. Tensors are held to the same factor by `compare` with `single` for its
    floor. With `has_fp8` the loss may move by what the rounding of weights to fp8 does too.
    """
    losses = [relative(single.losses[s], reference.losses[s]) for s in single.steps]
    norms = [
        relative(float.fromhex(single.norms[s]), float.fromhex(reference.norms[s]))
        for s in single.steps
        if SKIPPED not in (single.norms[s], reference.norms[s])
    ]
    of_fp8 = FLOOR_FACTOR * loss_rounding(reference) if has_fp8 else 0.0
    fp32 = tolerances(model, optimizer)
    # A floor of equal casts may be below what fp32 sums in another order differ by.
    return replace(
        fp32,
        loss=max(fp32.loss, bound_of_chance(losses), of_fp8),
        gradient_norm=max(fp32.gradient_norm, bound_of_chance(norms)),
    )


def bound_of_chance(distances: Sequence[float]) -> float:
    """Return the most by which rounding moves a number of the plan's in any step.

    The greater of two: `FLOOR_FACTOR` times the worst distance, as for tensors, and sqrt(2) t s.
    Here s is the root of the mean square of the n distances; t is the quantile of Student's
    distribution with n degrees of freedom that n further drawings exceed, on either side, in
    `FALSE_ALARMS` of all cases (Bonferroni's bound); and sqrt(2) is there because the distances are
    those of one rounded run from an exact one, while plan and one process are both rounded. The
    second is the greater one up to about 8 steps.

    Args:
        distances: of one process in half precision from itself in fp32, step by step.
    """
    count = len(distances)
    if not count:
        return 0.0
    spread = sqrt(sum(d * d for d in distances) / count)
    quantile = float(stdtrit(count, 1 - FALSE_ALARMS / (2 * count)))
    return max(FLOOR_FACTOR * max(distances), sqrt(2) * quantile * spread)
