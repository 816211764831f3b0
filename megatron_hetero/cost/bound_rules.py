"""What the lower bound asks of prices whose stages wait for each other, as in a pipeline that fills
and drains: other systems' cost models (`tools/referees`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_hetero.cluster.spec import Node


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

    def apart_exchange_s(self, num_replicas: int, num_gpus: int, least_gpus: int) -> float | None:
        """The exchange of a plan whose replicas do not exchange stage by stage, so that x_s does
        not hold; None where no plan of so many replicas is such.

        Args:
            num_gpus: of all replicas together.
            least_gpus: of any replica.
        """
        return None
