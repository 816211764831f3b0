"""Shapes and classes as a problem of composition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.problem import (
    ROUTES,
    Composing,
    Offer,
    Rentable,
    Resource,
    Wire,
)
from megatron_hetero.serving.fleet.pools import Pool, pools_of, wires_of
from megatron_hetero.serving.fleet.shapes import Shape, shapes_of
from megatron_hetero.serving.prices.engine import Engine
from megatron_hetero.serving.prices.prompts import mean_request
from megatron_hetero.serving.prices.rates import NOTHING, PhaseRate, PhaseRates
from megatron_hetero.serving.prices.rates import kv_hand_over_bytes as hand_over_bytes
from megatron_hetero.serving.prices.served import ACTIVATION_BYTES, ServedModel
from megatron_hetero.serving.prices.steps import PipelinePrice, ReplicaStage
from megatron_hetero.serving.workload.requests import RequestMix


@dataclass(frozen=True)
class OfferedReplica:
    """A shape in one phase: its prices, and what it does for each class."""

    shape: Shape
    phase: str
    rates: PhaseRates
    by_class: tuple[PhaseRate, ...]


@dataclass(frozen=True)
class Fleet:
    """All choices for a fleet that serves a given workload."""

    cluster: Cluster
    served: ServedModel
    engine: Engine
    mix: RequestMix
    pools: tuple[Pool, ...]
    wires: tuple[Wire, ...]
    offered: Mapping[str, OfferedReplica]

    def composing(
        self,
        budget_per_hour: float = inf,
        utilization: float = 1.0,
        routes: tuple[tuple[str, ...], ...] = ROUTES,
    ) -> Composing:
        """Return the problem of composition.

        Args:
            budget_per_hour: of machines and GPUs.
            utilization: part of a replica's time that may be taken.
            routes: those that requests may take.
        """
        phases = {phase for route in routes for phase in route}
        offers, resources = [], []
        # Pool -> widths of the stages that any offer has there.
        widths = {
            pool.name: sorted(
                {
                    stage.width
                    for replica in self.offered.values()
                    for name, stage in _stages(replica.shape)
                    if name == pool.name
                }
            )
            for pool in self.pools
        }
        for pool in self.pools:
            for width in widths[pool.name]:
                # Places of a width on a machine: a group never spans machines.
                per_machine = pool.gpus_per_machine // width
                resources.append(Resource(_slot(pool.name, width), pool.name, per_machine))
        prices = {pool.name: pool.gpu_price for pool in self.pools}
        for name, replica in self.offered.items():
            if replica.phase not in phases:
                continue
            # Slot -> places that one replica takes.
            uses: dict[str, int] = {}
            price = 0.0
            for pool_name, stage in _stages(replica.shape):
                price += prices[pool_name] * stage.width
                # A group of some width takes a place of that width, and so places of each smaller
                # one: widths divide each other, so that groups fit if every sum does.
                for width in widths[pool_name]:
                    if width <= stage.width:
                        slot = _slot(pool_name, width)
                        uses[slot] = uses.get(slot, 0) + stage.width // width
            rates = tuple(rate.per_s for rate in replica.by_class)
            offers.append(
                Offer(
                    name, replica.phase, replica.shape.place, rates, uses, price,
                    self._carries(replica),
                )
            )  # fmt: skip
        return Composing(
            tuple(offers),
            tuple(Rentable(p.name, len(p.devices), p.machine_price) for p in self.pools),
            tuple(resources),
            self.mix.demand,
            tuple(kind.name for kind in self.mix.classes),
            routes,
            tuple(
                hand_over_bytes(self.served, kind, self.engine.block_tokens)
                for kind in self.mix.classes
            ),
            self.wires,
            budget_per_hour=budget_per_hour,
            utilization=utilization,
        )

    def _carries(
        self, replica: OfferedReplica
    ) -> tuple[tuple[tuple[str, str], tuple[float, ...]], ...]:
        """Return what goes over the hops of a pipeline: the hidden states of every token."""
        # Hidden states of a token cross each hop once.
        token_bytes = self.served.model.hidden_size * ACTIVATION_BYTES
        # Tokens of a shared prefix are not computed again.
        prompts = [mean_request(c, None).new for c in self.mix.classes]
        answers = [c.output_tokens.mean for c in self.mix.classes]
        phase = replica.phase
        sizes = tuple(
            # Prompts cross in prefill, answers in decode, both where one replica does both.
            token_bytes * ((phase != "decode") * i + (phase != "prefill") * o)
            for i, o in zip(prompts, answers, strict=True)
        )
        hops = pairwise(replica.shape.pools)
        return tuple((pair, tuple(n * s for s in sizes)) for pair, n in Counter(hops).items())


def make_fleet(
    cluster: Cluster, served: ServedModel, engine: Engine, mix: RequestMix
) -> Fleet:  # fmt: skip
    """Price every replica that could run on a cluster.

    Raises:
        InfeasiblePlanError: the weights fit no group of GPUs, or no GPU runs their format.
        UnsupportedError: the engine keeps keys and values in a way that is not priced.
    """
    served = served.under(engine)
    pools = pools_of(cluster)
    shapes = shapes_of(cluster, pools, served, engine)
    if all(served.precision_on(pool.gpu) is None for pool in pools):
        names = ", ".join(dict.fromkeys(pool.gpu.name for pool in pools))
        raise InfeasiblePlanError(
            f"no GPU of this cluster ({names}) runs {served.weights} weights and "
            f"{served.keys_values} keys and values under {engine.name}; take another --weights or "
            "--kv, or other GPUs"
        )
    if not shapes:
        raise InfeasiblePlanError(
            f"the weights of this model ({served.weights}) fit no group of these GPUs that "
            f"{engine.name} runs; take fewer bytes for a weight (--weights fp8 or int4), or larger "
            "GPUs"
        )
    # Prefill apart from decode needs partners that engines can join.
    apart = _may_be_apart(shapes, served, pools)
    offered: dict[str, OfferedReplica] = {}
    for shape in shapes:
        rates = PhaseRates(PipelinePrice(shape.pipeline, served, engine))
        for phase in ("both", "prefill", "decode") if shape.name in apart else ("both",):
            by_class = tuple(rates.rate(phase, kind) for kind in mix.classes)
            # A replica that serves no class is no offer.
            if any(rate is not NOTHING for rate in by_class):
                offered[f"{phase}: {shape.name}"] = OfferedReplica(shape, phase, rates, by_class)
    return Fleet(cluster, served, engine, mix, pools, wires_of(cluster, pools), offered)


def _may_be_apart(
    shapes: Sequence[Shape], served: ServedModel, pools: Sequence[Pool]
) -> set[str]:  # fmt: skip
    """Return the names of shapes that can take part in a hand-over: engines hand keys and values
    over between replicas of equally many stages, in one format, at widths of whole ratios, on one
    maker's cards (those of most GPUs)."""
    num_gpus: Counter[str] = Counter()
    for pool in pools:
        num_gpus[pool.gpu.library] += len(pool.devices) * pool.gpus_per_machine
    most = num_gpus.most_common(1)[0][0]
    # Of pipelines only the shortest take part: both sides must have equally many stages.
    fewest = min(len(shape.pipeline.stages) for shape in shapes)
    found = set()
    for shape in shapes:
        stages = shape.pipeline.stages
        kinds = {(served.precision_on(stage.gpu), stage.gpu.library) for stage in stages}
        if len(stages) == fewest and shape.has_one_width and kinds == {("bf16", most)}:
            found.add(shape.name)
    return found


def _stages(shape: Shape) -> zip[tuple[str, ReplicaStage]]:
    return zip(shape.pools, shape.pipeline.stages, strict=True)


def _slot(pool: str, width: int) -> str:
    return f"{pool}/tp{width}"
