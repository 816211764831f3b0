"""Unlike micro-batch sizes of the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hetero.planner.division.counts import WORTH

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer
    from megatron_hetero.planner.completion.filled import Completion


def mixed(completer: Completer, found: Completion) -> Completion:
    """Return a completion with other micro-batch sizes in equal replicas, if the last replica then
    ends earlier."""
    if found.sharded is not None or found.optimizer_shares is not None:
        return found
    for shape in dict.fromkeys(map(completer.shape, found.structure)):
        for size in completer.sizes(len(found.structure)):
            sizes = [
                size if completer.shape(chain) == shape else own.size
                for chain, own in zip(found.structure, found.filled, strict=True)
            ]
            other = completer.in_sizes(found.structure, sizes)
            if other is not None and other.quick_s < WORTH * found.quick_s:
                found = other
    return found
