"""Money: machines by the hour, and bytes between sites.

A machine with a price of its own is paid for whole once any of its GPUs is used; a GPU type's price
is paid for each GPU in use.  Idle machines cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.units import HOUR_S


@dataclass(frozen=True)
class Traffic:
    """Bytes of a single cause between two sites in a step, there and back, and the price.

    `boundary`: (replica, stage before it); None is the exchange of gradients, and of new weights.
    """

    boundary: tuple[int, int] | None
    sites: tuple[str, str]
    num_bytes: float
    price: float


@dataclass(frozen=True)
class Price:
    """Costs in the currency of the cluster file: machines for an hour, traffic of one step.

    `traffic` is what costs something, the dearest first.
    """

    per_hour: float
    traffic: tuple[Traffic, ...] = ()

    @property
    def egress_per_step(self) -> float:
        """Sum the price of all traffic of a step."""
        return sum(part.price for part in self.traffic)

    def of_step(self, step_time_s: float) -> float:
        """Price a step of `step_time_s` seconds."""
        return self.per_hour * step_time_s / HOUR_S + self.egress_per_step

    def of_tokens(self, num_tokens: float, step_time_s: float, tokens_per_step: float) -> float:
        """Price the training of `num_tokens` tokens.

        Args:
            num_tokens: of the whole run.
            step_time_s: seconds of a step.
            tokens_per_step: tokens of the global batch.
        """
        return self.of_step(step_time_s) * num_tokens / tokens_per_step


def price_per_hour(cluster: Cluster, devices: Iterable[Device]) -> float | None:
    """Sum the hourly prices of the machines and GPUs in use; None where one is not given."""
    # GPUs in use by node.
    used: dict[str, int] = {}
    for device in devices:
        used[device.node] = used.get(device.node, 0) + 1
    total = 0.0
    rented: set[str] = set()
    for name, num_gpus in sorted(used.items()):
        node = cluster.node_by_name[name]
        if node.price_per_hour is not None:
            # Islands of a machine are nodes of their own, but the machine is paid for once.
            if node.machine not in rented:
                total += node.price_per_hour
            rented.add(node.machine)
        elif node.gpu_price_per_hour is not None:
            total += num_gpus * node.gpu_price_per_hour
        else:
            return None
    return total


def price_of(costs: CostModel, placement: Placement, cost: PlacementCost) -> Price | None:
    """Price a placed and timed plan in money; None where a machine's price is not given."""
    per_hour = price_per_hour(costs.cluster, placement.devices())
    if per_hour is None:
        return None
    if not costs.cluster.prices_per_gb:  # what goes where takes longer to count than all the rest
        return Price(per_hour)
    return Price(per_hour, _traffic(costs, placement, cost))


def _traffic(costs: CostModel, placement: Placement, cost: PlacementCost) -> tuple[Traffic, ...]:
    """Sum the traffic by cause and pair of sites."""
    nodes, prices = costs.cluster.node_by_name, costs.cluster.prices_per_gb
    found: dict[tuple[tuple[int, int] | None, tuple[str, str]], tuple[float, float]] = {}
    for boundary, (here, there), num_bytes in costs.traffic(placement, cost):
        sites = nodes[here].site, nodes[there].site
        # Traffic inside a site, and between sites without a price, costs nothing.
        each = prices.get(sites)
        if each:
            # Both directions between two sites are one entry.
            key = boundary, (min(sites), max(sites))
            carried, price = found.get(key, (0.0, 0.0))
            found[key] = carried + num_bytes, price + each * num_bytes / 1e9
    parts = [Traffic(*key, *value) for key, value in found.items()]
    return tuple(sorted(parts, key=lambda part: (-part.price, part.boundary or (-1, -1))))
