"""Messages of a boundary with memory prepared on a rank, and the tensors made of these on arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Arrival:
    """A tensor under way: `finish` after its messages have arrived gives it its shape.

    `group`: whose ranks have a part each and gather them or, `is_led`, the first of which has all.
    `dtype` is what it becomes on this stage; None is what crossed.
    """

    own: torch.Tensor
    shape: tuple[int, ...]
    group: dist.ProcessGroup | None
    is_led: bool = False
    dtype: torch.dtype | None = None

    def finish(self) -> torch.Tensor:
        flat = self.own
        # The first rank has everything, and gives it to the group.
        if self.group is not None and self.is_led:
            dist.broadcast(flat, group=self.group, group_src=0)
        elif self.group is not None:
            flat = self.own.new_empty(self.own.numel() * self.group.size())
            dist.all_gather_into_tensor(flat, self.own, group=self.group)
        # Equal parts may be longer than the tensor together: cut the end off.
        arrived = flat[: prod(self.shape)].view(self.shape)
        return arrived.to(self.dtype or arrived.dtype).requires_grad_()


@dataclass(frozen=True)
class Announced:
    """A message of which the shape is under way: `told` will be (tokens, sequences), whole."""

    works: list[dist.Work]
    told: torch.Tensor
    messages: list[dist.P2POp]


@dataclass(frozen=True)
class UnderWay:
    """Posted receives, with the present knowledge of the arrival."""

    works: list[dist.Work]
    arrival: Arrival
    messages: list[dist.P2POp]


def by_group(ops: list[dist.P2POp]) -> Iterator[list[dist.P2POp]]:
    """Yield runs of messages of one group: a batch is of one."""
    for _, batch in groupby(ops, key=lambda op: id(op.group)):
        yield list(batch)
