"""What HexiScale's cost model takes at least: for the lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron_hetero.cluster.nodes import Device, Node
from tools.referees.hexiscale import DEVICE_TYPES, ELEMENT_BYTES, SYNC_FACTOR
from tools.referees.hexiscale_costs import HexiscaleCosts
from tools.referees.waiting.rules import FillRules


class HexiscaleRules(FillRules):
    """A column of its diagram is at least as long as any stage busy in it, and the exchange of a
    layer as its dearest holder sees it; all layers' exchanges add up."""

    counts_alike = False

    def __init__(self, costs: HexiscaleCosts) -> None:
        self.costs = costs

    def boundary_s(
        self,
        here: Sequence[Node],
        width: int,
        there: Sequence[Node],
        other_width: int,
        to_last: bool,
    ) -> tuple[float, float]:
        """Both directions are charged to the sender.  Machines of a class are alike: any one and,
        where there is one, another."""
        least_s = inf
        for a in here[:2]:
            for b in there[:2]:
                inside = a.name == b.name
                if inside and a.num_gpus < width + other_width:
                    continue
                start = width if inside else 0
                senders = [Device(a.name, i) for i in range(width)]
                receivers = [Device(b.name, start + i) for i in range(other_width)]
                least_s = min(least_s, self.costs.boundary_s(senders, receivers))
        return least_s, 0.0

    def layer_exchange_s(self, nodes: Sequence[Node], width: int, num_replicas: int) -> float:
        """One layer as a holder of `width` GPUs on one of these machines sees the others.

        Every other replica has one partner: on the same machine as long as there are GPUs left, or
        on another one where that network is faster.  Narrower partners make it dearer, and wider
        ones repeat it.
        """
        if num_replicas == 1:
            return 0.0
        layer_bytes = 12 * self.costs.referee.shape.hidden_size**2 * ELEMENT_BYTES
        between = self.costs.referee.between_bytes_per_s
        ways_s = []
        for node in nodes:
            inside = DEVICE_TYPES[node.gpu_type.name].inside_bytes_per_s
            together = min(num_replicas, node.num_gpus - width + 1)
            ways_s += [
                (near - 1) / inside + (num_replicas - near) / between for near in (1, together)
            ]
        return SYNC_FACTOR * 2 * layer_bytes / (width * num_replicas) * min(ways_s)
