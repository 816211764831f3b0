"""Difference between the weights of two runs that Adam makes of a difference between gradients.

Adam divides by the root of the second moment. Where a gradient g is large beside its rounding d, an
update changes by d/g; where it is not, rounding decides the sign of the update. If gradients have a
density p near zero, the mean square of the change of an update is about p d (8 + 2 c^2), of the
order of 1e-6 with d of 1e-7 of the largest gradient. Its root, a thousandth of the whole update, is
chance: only luck could keep a bound near it.

The comparison therefore removes this part. Both runs' gradients are recorded as their optimizers
saw them; Adam is computed in fp64 from both, and the difference of the two results is *explained*.
The rest is rounding of Adam's own arithmetic in fp32 and of the weights: about a dozen operations,
each with half a unit (2^-24) of a number not much larger than the update, in both runs: 2 * 12 *
2^-24 = 1.4e-6 of an update, three times as much where moments cancel
(`compare.ADAM_ARITHMETIC_TOLERANCE`). A wrong gradient shows in the gradients, and in the norm and
the loss of every step; a wrong update, or weights that did not arrive, show here.

The learning rate (with warm-up, decay, multiples for single tensors) is taken from the one process:
the factor between its step and its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from megatron_hetero.lab.verify.processes.record import SKIPPED, RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard


@dataclass(frozen=True)
class AdamSettings:
    """Values of `--adam-beta1`, `--adam-beta2`, `--adam-eps` and `--clip-grad` (0: no clipping)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_norm: float = 1.0


class _Moments:
    """State of Adam for one tensor, in fp64."""

    def __init__(self, settings: AdamSettings) -> None:
        self._settings = settings
        self._count = 0
        self._first: numpy.ndarray | float = 0.0
        self._second: numpy.ndarray | float = 0.0

    def update(self, gradient: numpy.ndarray, norm: str) -> numpy.ndarray:
        """Update the moments; return the step without learning rate and weight decay."""
        s = self._settings
        clipped = gradient.astype(numpy.float64)
        if s.max_norm > 0:
            # As megatron.core.optimizer.clip_grads: never longer than allowed.
            clipped = clipped * min(1.0, s.max_norm / (float.fromhex(norm) + 1e-6))
        self._count += 1
        self._first = s.beta1 * self._first + (1 - s.beta1) * clipped
        self._second = s.beta2 * self._second + (1 - s.beta2) * clipped**2
        # Moments without the bias of their start at zero (Kingma and Ba 2015, algorithm 1).
        first = self._first / (1 - s.beta1**self._count)
        second = self._second / (1 - s.beta2**self._count)
        direction: numpy.ndarray = first / (numpy.sqrt(second) + s.epsilon)
        return direction


def explained_difference(
    name: str,
    shard: ParameterShard,
    record: RankRecord,
    reference: Mapping[str, numpy.ndarray],
    norms: Mapping[int, str],
    settings: AdamSettings,
) -> dict[int, numpy.ndarray]:
    """Compute, by step, the distance of a rank's weights that Adam explains.

    It is the difference between the weights that Adam makes of the rank's gradients and of the one
    process's.

    Args:
        name: name of the tensor.
        shard: the part of it that the rank holds.
        record: the record of the rank.
        reference: the one process's arrays, cut to the part of `shard`.
        norms: the gradient norms of the one process, by step.
        settings: settings of Adam.
    """
    # Moments of both runs, step by step.
    own, others = _Moments(settings), _Moments(settings)
    total: numpy.ndarray | float = 0.0
    found = {}
    for step in sorted(norms):
        # The reference's own step gives the rate; the rest is the difference of both directions.
        if SKIPPED not in (norms[step], record.norms[step]):
            due = others.update(reference[f"gradient/{step}/{name}"], norms[step])
            mine = own.update(record.arrays[f"gradient/{step}/{name}"], record.norms[step])
            moved = reference[f"weight/{step}/{name}"].astype(numpy.float64)
            moved = moved - reference[f"weight/{step - 1}/{name}"]
            # The rate is the least-squares factor between the one process's
            # direction and its own move.
            square = float((due * due).sum())
            rate = -float((moved * due).sum()) / square if square else 0.0
            # Differences add up from step to step, as the weights do.
            total = total - rate * (mine - due)
        found[step] = numpy.asarray(total)
    return found
