"""Rules of the lower bound for other systems' cost models, whose stages wait for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_hetero.cluster.nodes import Node


@dataclass(frozen=True)
class Room:
    """Limits to replicas that share GPUs: by their number, and by their price in units of the
    cheapest GPU's."""

    num_replicas: int
    num_gpus: int
    least_gpus: int
    """GPUs of any replica, at least."""
    budget: float
    least_price: float
    """Price of any replica, at least."""

    @property
    def is_enough(self) -> bool:
        """Return whether there is room for all replicas."""
        too_dear = self.num_replicas * self.least_price > self.budget * (1 + 1e-6)
        return self.num_replicas * self.least_gpus <= self.num_gpus and not too_dear

    def most_gpus(self, together: int) -> int:
        """Bound the GPUs of the smallest of `together` replicas from above, beside the others."""
        others = self.num_replicas - together
        by_number = self.num_gpus - others * self.least_gpus
        by_price = self.budget - others * self.least_price
        return int(min(by_number, by_price + 1e-6) / together)

    @property
    def most_stages(self) -> int:
        """Bound the stages of any replica from above."""
        return self.most_gpus(1)

    @property
    def most_deep(self) -> int:
        """Bound the number of replicas of more than one GPU from above."""
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
    x_s: its exchange.  All seconds are of the cheapest plan of that number of replicas.
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
        """Return the least seconds that a boundary adds to the stage before it and to the stage
        behind it; infinite where there is no such boundary.

        Args:
            here: nodes where the stage before the boundary may be.
            width: its tensor-parallel width.
            there: nodes where the stage behind the boundary may be.
            other_width: its tensor-parallel width.
            to_last: whether the stage behind it is the last one.
        """

    def layer_exchange_s(self, nodes: Sequence[Node], width: int, num_replicas: int) -> float:
        """Return f_s of one layer, seconds."""
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
        """Return x_s, seconds.

        Args:
            nodes: where the stage may be.
            width: its tensor-parallel width.
            num_layers: of the stage.
            first, last: whether the stage holds the embedding, the head.
            num_replicas: of the plan.
        """
        return 0.0

    def apart_exchange_s(self, room: Room) -> float | None:
        """Return the exchange of plans whose replicas do not exchange stage by stage, where x_s
        does not hold; None where no such plan has this room."""
        return None
