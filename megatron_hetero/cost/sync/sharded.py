"""Seconds added to a stage's passes by the exchanges of sharded layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_hetero.cost.work.compute import PassTimes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exchange_times(
    num_layers: int, gather_s: float, reduce_s: float, layer: PassTimes, *, overlaps: bool
) -> PassTimes:
    """Return what a forward and a backward pass wait for.

    Where exchanges overlap, the weights of the next layer and the gradients of the last one travel
    while a layer computes, one after the other; the first gather of a pass and the last gradients
    of a backward pass have nothing beside them.  10 layers that compute for 3 s forward, with
    gathers of 4 s, wait 4 + 9 (4 - 3) = 13 s in place of 40 s.

    Args:
        num_layers: sharded ones of the stage.
        gather_s: until one layer's weights are gathered.
        reduce_s: until its gradients are with their owners.
        layer: passes of one layer without exchanges.
        overlaps: as with `--overlap-param-gather`.
    """
    # Forward gathers weights; backward gathers once more and sends gradients to owners.
    passes = (gather_s, layer.forward_s), (gather_s + reduce_s, layer.backward_s)
    return PassTimes(*[float(waits_s(num_layers, *own, overlaps=overlaps)) for own in passes])


def waits_s(
    num_layers: int | Ints, exchange_s: float, layer_s: float | Floats, *, overlaps: bool
) -> Floats:
    """Return the seconds for which a pass waits, for any numbers of sharded layers at once.

    Args:
        num_layers: sharded ones of the stage.
        exchange_s: of one layer in this pass.
        layer_s: for which one layer computes, of a shape that goes with `num_layers`.
        overlaps: as of `exchange_times`.
    """
    # Every exchange is waited for in whole.
    if not overlaps:
        return np.asarray(num_layers * exchange_s)
    # The first exchange hides behind nothing, each further one behind a layer.
    further_s = np.maximum(np.subtract(num_layers, 1), 0) * np.maximum(exchange_s - layer_s, 0.0)
    return np.where(np.greater(num_layers, 0), exchange_s + further_s, 0.0)


def slowest_layer(passes: list[PassTimes], ends: list[PassTimes], num_layers: int) -> PassTimes:
    """Return the longest passes of a layer over the replicas.

    Args:
        passes: of the stage in each replica, without exchanges.
        ends: the part of them that is no layer's, in each replica.
        num_layers: of the stage.
    """
    # What is not of the ends divides evenly over the layers.
    pairs = list(zip(passes, ends, strict=True))
    return PassTimes(
        max(whole.forward_s - end.forward_s for whole, end in pairs) / num_layers,
        max(whole.backward_s - end.backward_s for whole, end in pairs) / num_layers,
    )
