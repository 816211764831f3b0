"""What the lower bound asks of prices whose stages wait for each other, as in a pipeline that fills
and drains: other systems' cost models (`tools/referees`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_hetero.cluster.spec import Node


@dataclass(frozen=True)
class Room:
    """Limits to replicas that share GPUs: by their number, and by their price in units of the
    cheapest GPU's."""

    num_replicas: int
    num_gpus: int
    least_gpus: int
    """Of any replica."""
    budget: float
    least_price: float
    """Of any replica."""

    @property
    def is_enough(self) -> bool:
        """Whether there is room for all replicas."""
        too_dear = self.num_replicas * self.least_price > self.budget * (1 + 1e-6)
        return self.num_replicas * self.least_gpus <= self.num_gpus and not too_dear

    def most_gpus(self, together: int) -> int:
        """GPUs of the smallest of so many replicas, at most, beside the others."""
        others = self.num_replicas - together
        by_number = self.num_gpus - others * self.least_gpus
        by_price = self.budget - others * self.least_price
        return int(min(by_number, by_price + 1e-6) / together)

    @property
    def most_stages(self) -> int:
        """Of any replica."""
        return self.most_gpus(1)

    @property
    def most_deep(self) -> int:
        """Replicas of more than one GPU, at most."""
        most = self.num_replicas
        if self.least_gpus < 2:
            spare = self.num_gpus - self.num_replicas * self.least_gpus
            most = min(most, spare // (2 - self.least_gpus))
        if self.least_price < 2:
            left = self.budget - self.num_replicas * self.least_price
            most = int(min(most, left / (2 - self.least_price) + 1e-6))
        return max(0, most)


@runtime_checkable
class HasFillRules(Protocol):
    """Prices that say how their pipelines fill and drain."""

    def fill_rules(self) -> FillRules:
        """Return what their pipelines take at least."""


class FillRules(ABC):
    """A replica of stages s with m micro-batches makes every step last at least

        sum of (t_s + f_s) + max over s of ((m - 1) t_s + x_s)

    t_s: seconds of the stage for a micro-batch, boundaries included; f_s: what its layers add once;
    x_s: its exchange.  All seconds are of the cheapest plan of so many replicas.
    """

    counts_alike: bool
    """Whether the replica with most micro-batches sets the pace of all."""
    has_apart_exchange: bool = False
    """Whether there are plans whose exchange is not x_s but `apart_exchange_s`."""

    @abstractmethod
    def boundary_s(
        self,
        here: Sequence[Node],
        width: int,
        there: Sequence[Node],
        other_width: int,
        to_last: bool,
    ) -> tuple[float, float]:
        """What a boundary adds at least to the stage before it, on GPUs of one of the nodes `here`,
        and to the stage behind it, on one of `there`; infinite where there is no such boundary."""

    def layer_exchange_s(self, nodes: Sequence[Node], width: int, num_replicas: int) -> float:
        """f_s of one layer."""
        return 0.0

    def stage_exchange_s(
        self,
        nodes: Sequence[Node],
        width: int,
        num_layers: int,
        first: bool,
        last: bool,
        num_replicas: int,
    ) -> float:
        """x_s."""
        return 0.0

    def apart_exchange_s(self, room: Room) -> float | None:
        """The exchange of a plan whose replicas do not exchange stage by stage, so that x_s does
        not hold; None where no such plan has this room."""
        return None
