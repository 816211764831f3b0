"""The aim of a search, and the limits of time and money on the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.price import Price, price_of
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.errors import UsageError, some_of

ObjectiveName = Literal["throughput", "cheapest", "fewest-gpus"]
OBJECTIVES: tuple[ObjectiveName, ...] = ("throughput", "cheapest", "fewest-gpus")


@dataclass(frozen=True)
class Objective:
    """The fastest plan, the plan with the cheapest tokens, or the plan with the fewest GPUs, among
    plans that do `num_steps` steps within `deadline_s` and `budget`.

    `num_steps` may be a fraction (tokens divided by those of a step); it is needed for a deadline
    and a budget.  Money is in the currency of the cluster file.
    """

    name: ObjectiveName = "throughput"
    num_steps: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    stock_only: bool = False
    """True if stock Megatron must be able to run the plan, without the plug-in."""
    shards_layers: bool = False
    """True if the replicas of a plan may divide the weights of some layers."""

    @property
    def is_fastest_step(self) -> bool:
        """Return whether nothing but the step time counts."""
        return replace(self, shards_layers=False) == THROUGHPUT

    @property
    def max_step_s(self) -> float | None:
        """Longest step that meets the deadline."""
        if self.deadline_s is None or self.num_steps is None:
            return None
        return self.deadline_s / self.num_steps

    @property
    def max_price_per_step(self) -> float | None:
        """Return what a step may cost within the budget."""
        if self.budget is None or self.num_steps is None:
            return None
        return self.budget / self.num_steps

    def needs_prices(self, cluster: Cluster) -> bool:
        """Return whether the comparison of plans needs the prices of machines."""
        limited = cluster.limits.max_price_per_hour is not None
        return self.name == "cheapest" or self.budget is not None or limited

    def may_want_fewer(self, cluster: Cluster) -> bool:
        """Return whether a plan on fewer machines can beat a faster plan."""
        return self.name != "throughput" or self.needs_prices(cluster)

    def standing(
        self, costs: CostModel, placement: Placement, cost: PlacementCost, time_s: float
    ) -> Standing:
        """Return how a placement stands.

        Args:
            time_s: its step time as the ranking counts it.
        """
        cluster = costs.cluster
        # Prices are looked up only where something depends on them.
        price = price_of(costs, placement, cost) if self.needs_prices(cluster) else None
        num_gpus = sum(1 for _ in placement.devices()) if self.name == "fewest-gpus" else 0
        excess = max(self._excesses(cluster, cost.step_time_s, price), default=0.0)
        return Standing(excess, self._value(num_gpus, time_s, price))

    def standing_of(
        self, cluster: Cluster, num_gpus: int, step_s: float, price: Price | None
    ) -> Standing:
        """Return the standing of a plan on this many GPUs, with steps of `step_s` at a price."""
        price = price if self.needs_prices(cluster) else None
        excess = max(self._excesses(cluster, step_s, price), default=0.0)
        return Standing(excess, self._value(num_gpus, step_s, price))

    def _value(self, num_gpus: int, time_s: float, price: Price | None) -> float:
        if self.name == "fewest-gpus":
            return float(num_gpus)
        return price.of_step(time_s) if self.name == "cheapest" and price is not None else 0.0

    def _excesses(self, cluster: Cluster, step_s: float, price: Price | None) -> Iterator[float]:
        # Each limit as the part by which it is exceeded, so that unlike limits compare.
        if self.max_step_s is not None:
            yield max(0.0, (step_s - self.max_step_s) / self.max_step_s)
        if price is None:
            return
        limit = cluster.limits.max_price_per_hour
        if limit is not None:
            yield max(0.0, (price.per_hour - limit) / limit)
        if self.max_price_per_step is not None:
            spent = price.of_step(step_s)
            yield max(0.0, (spent - self.max_price_per_step) / self.max_price_per_step)


@dataclass(frozen=True, order=True)
class Standing:
    """`excess`: by which part the worst limit of time or money is exceeded, 0.0 if none is;
    `value`: what the objective makes small, 0.0 if that is the step time alone."""

    excess: float = 0.0
    value: float = 0.0


THROUGHPUT = Objective()
KEEPS_LIMITS = Standing()


def check_objective(objective: Objective, cluster: Cluster, nodes: tuple[Node, ...]) -> None:
    """Refuse an objective with missing data.

    Args:
        nodes: those that plans may use.
    Raises:
        UsageError: prices are missing, or the number of steps, or the deadline.
    """
    # Fewest GPUs is meaningless without a deadline.
    if objective.name == "fewest-gpus" and objective.deadline_s is None:
        raise UsageError(
            "--objective fewest-gpus looks for the fewest GPUs that meet a deadline: give "
            '--deadline, for example --deadline "36 h", and --steps or --tokens'
        )
    # Limits of a run need the run's length.
    for flag, given in (("--deadline", objective.deadline_s), ("--budget", objective.budget)):
        if given is not None and objective.num_steps is None:
            raise UsageError(
                f"{flag} is for a whole training run: say how long that is, by --steps or "
                "--tokens (or --train-iters or --train-samples among the job's own flags)"
            )
    # Objectives and limits of money need every price.
    unpriced = [
        node for node in nodes if node.price_per_hour is None and node.gpu_price_per_hour is None
    ]
    if unpriced and objective.needs_prices(cluster):
        asks = {
            "--objective cheapest": objective.name == "cheapest",
            "--budget": objective.budget is not None,
            "limits.max_price_per_hour": cluster.limits.max_price_per_hour is not None,
        }
        names = list(dict.fromkeys(node.machine for node in unpriced))
        raise UsageError(
            f"{' and '.join(name for name, asked in asks.items() if asked)} needs the price of "
            f"every machine; {cluster.source or 'the cluster'} has none for {some_of(names)}. Give "
            "price_per_hour for each node (the whole machine) or for its GPU type (each GPU), or "
            "leave the node idle by limits.idle"
        )
