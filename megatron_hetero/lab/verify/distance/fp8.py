"""Change of the loss by the rounding of weights to fp8, in first order.

A plan's tensor-parallel ranks scale their parts of a weight by themselves
(`--fp8-recipe tensorwise`), so the plan rounds weights otherwise than one process does, without any
error. The distance of the one process's own loss from fp32 is a single draw of that rounding and
may be next to nothing by chance; this is the draw's expected size.
"""

from __future__ import annotations

from math import sqrt

import numpy

from megatron_hetero.lab.verify.processes.record import RankRecord

_ROUNDING = 2.0**-4 / sqrt(3)
"""Root of the mean square of a rounding to three bits behind the first, relative, at most: it is
even within half of the last bit."""
_IN_FP8 = "linear_"
"""Part of the name of each weight multiplied in fp8: linear_qkv, linear_proj, linear_fc1,
linear_fc2."""


def loss_rounding(reference: RankRecord) -> float:
    """Return the most, over steps, by which the rounding of weights is expected to move the loss,
    relative to the loss.

    Args:
        reference: the one process, whose gradients and weights are whole.
    """
    most = 0.0
    for step in reference.steps:
        square = 0.0
        for name, shard in reference.shards.items():
            # Biases and norms are not multiplied in fp8.
            if _IN_FP8 not in name or len(shard.global_shape) < 2:
                continue
            gradient = reference.arrays[f"gradient/{step}/{name}"].astype(numpy.float64)
            weight = reference.arrays[f"weight/{step - 1}/{name}"]
            # Independent rounding errors of the weights: squares of gradient times weight add up.
            square += float(numpy.square(gradient * weight).sum())
        most = max(most, _ROUNDING * sqrt(square) / abs(reference.losses[step]))
    return most
