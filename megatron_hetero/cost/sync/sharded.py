"""What the exchanges of sharded layers add to the passes of their stage."""

from __future__ import annotations

from megatron_hetero.cost.work.compute import PassTimes


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
    both_s = gather_s + reduce_s
    if not overlaps or num_layers == 0:
        return PassTimes(num_layers * gather_s, num_layers * both_s)
    return PassTimes(
        gather_s + (num_layers - 1) * max(0.0, gather_s - layer.forward_s),
        both_s + (num_layers - 1) * max(0.0, both_s - layer.backward_s),
    )


def slowest_layer(passes: list[PassTimes], ends: list[PassTimes], num_layers: int) -> PassTimes:
    """Return the passes of one layer on the replica where they last longest.

    Args:
        passes: of the stage in each replica, without exchanges.
        ends: the part of them that is no layer's, in each replica.
        num_layers: of the stage.
    """
    pairs = list(zip(passes, ends, strict=True))
    return PassTimes(
        max(whole.forward_s - end.forward_s for whole, end in pairs) / num_layers,
        max(whole.backward_s - end.backward_s for whole, end in pairs) / num_layers,
    )
