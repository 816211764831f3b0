"""Planning of a fleet, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf, isfinite

from megatron_hetero import __version__
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.serving.compose.milp import serve_cheapest, serve_most
from megatron_hetero.serving.compose.problem import Composition
from megatron_hetero.serving.fleet.forecast import forecast_of
from megatron_hetero.serving.fleet.offers import Fleet, make_fleet
from megatron_hetero.serving.fleet.place import hand_overs_of, placed_replicas
from megatron_hetero.serving.fleet.plan import (
    EngineSettings,
    Goal,
    PlannedClass,
    ServedAs,
    ServingPlan,
)
from megatron_hetero.serving.fleet.pools import has_prices
from megatron_hetero.serving.fleet.search import FoundFleet, search_fleet
from megatron_hetero.serving.fleet.unserved import refuse_unserved
from megatron_hetero.serving.prices.basis import PriceBasis, price_basis
from megatron_hetero.serving.prices.engine import (
    ENGINES,
    LATENT_BLOCK_TOKENS,
    Engine,
    EngineName,
)
from megatron_hetero.serving.prices.measured import EngineStep, profile_for
from megatron_hetero.serving.prices.memory import weight_bytes
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.steps import ReplicaStage, stage_prices
from megatron_hetero.serving.workload.requests import RequestMix


def planned_fleet(
    cluster: Cluster,
    served: ServedModel,
    mix: RequestMix,
    goal: Goal = "throughput",
    engine: EngineName = "vllm",
    budget_per_hour: float = inf,
    gap: float = 5e-3,
    seed: int = 0,
    compares_engines: bool = False,
    measured: Sequence[EngineStep] = (),
) -> tuple[ServingPlan, Fleet, FoundFleet]:
    """Plan a fleet; return the plan, the choices, and the choice made.

    Args:
        cluster: machines, links, prices.
        served: the model, its formats.
        mix: classes of requests.
        goal: as `search_fleet`.
        engine: that runs the replicas; "any" allows pipelines that no engine runs.
        budget_per_hour: limit of machines and GPUs, beside the cluster's own.
        gap: at which the programme may stop.
        seed: of simulated arrivals.
        compares_engines: also find what the engine's restrictions cost.
        measured: steps of the engine on these GPUs, which win over tables.
    Raises:
        InfeasiblePlanError: the weights, a class or the deadlines hold nowhere.
        UsageError: money is asked for and the cluster has no prices, or no measured step is of the
            engine and the formats.
    """
    most = cluster.limits.max_price_per_hour
    budget_per_hour = min(budget_per_hour, inf if most is None else most)
    if not has_prices(cluster) and (goal == "cost" or isfinite(budget_per_hour)):
        raise UsageError(
            "cluster.yaml has no prices: give its machines or gpu_types a price_per_hour, or leave "
            "--budget, --goal cost and max_price_per_hour out"
        )
    fleet = make_fleet(cluster, served, _engine(engine, cluster, served, measured), mix)
    refuse_unserved(fleet)
    found = search_fleet(fleet, goal, budget_per_hour, gap, seed)
    other = None
    if compares_engines and engine != "any":
        unbound = _engine("any", cluster, served, measured)
        other = _figure_of(unbound, cluster, served, mix, goal, budget_per_hour, gap)
    return _plan(fleet, found, goal, budget_per_hour, seed, other), fleet, found


def _engine(
    name: EngineName, cluster: Cluster, served: ServedModel, measured: Sequence[EngineStep]
) -> Engine:
    engine = replace(ENGINES[name], profile=profile_for(measured, name, served))
    if served.model.kv_lora_rank and name != "sglang":
        engine = replace(engine, block_tokens=LATENT_BLOCK_TOKENS)
    # Engines take one part of every card: the smallest one says which leaves the reserve.
    smallest = min(node.gpu_type.memory_bytes for node in cluster.nodes)
    left = 1 - (cluster.limits.memory_reserve_bytes or 0) / smallest
    return replace(engine, memory_part=min(engine.memory_part, max(0.0, floor(left * 100) / 100)))


def _figure_of(
    engine: Engine,
    cluster: Cluster,
    served: ServedModel,
    mix: RequestMix,
    goal: Goal,
    budget_per_hour: float,
    gap: float,
) -> float | None:
    """Return the goal's figure in rates under another engine's rules."""
    # Other rules give other shapes, so the whole fleet is priced anew.
    problem = make_fleet(cluster, served, engine, mix).composing(budget_per_hour)
    try:
        if goal == "cost":
            return serve_cheapest(problem, gap).cost_per_hour
        return serve_most(problem, gap).scale
    except InfeasiblePlanError:
        return None


def _plan(
    fleet: Fleet,
    found: FoundFleet,
    goal: Goal,
    budget_per_hour: float,
    seed: int,
    any_engine: float | None,
) -> ServingPlan:
    served, engine, whole = fleet.served, fleet.engine, found.at_full_time
    composition = found.composition
    value = composition.cost_per_hour if goal == "cost" else composition.scale
    # The model as one stage, whose weights are those that every replica has to load.
    (alone,) = stage_prices(
        (ReplicaStage(fleet.pools[0].gpu, 1, served.model.num_layers),), served
    )  # fmt: skip
    return ServingPlan(
        goal,
        EngineSettings(
            engine.name, engine.memory_part, engine.block_tokens, engine.max_batched_tokens
        ),
        ServedAs(
            served.source, served.model.num_layers, served.weights, served.keys_values,
            weight_bytes(alone), served.is_quantized,
        ),
        tuple(
            PlannedClass(
                c.name,
                c.rate_per_s,
                c.input_tokens.mean,
                c.output_tokens.mean,
                c.first_token_s if isfinite(c.first_token_s) else None,
                c.between_tokens_s if isfinite(c.between_tokens_s) else None,
            )
            for c in fleet.mix.classes
        ),
        placed_replicas(fleet, composition),
        composition.scale,
        whole.bound,
        # Machines of one's own may cost nothing.
        abs(whole.bound - value) / value if value else 0.0,
        found.utilization,
        composition.cost_per_hour if has_prices(fleet.cluster) else None,
        budget_per_hour if isfinite(budget_per_hour) else None,
        forecast_of(found.run, found.load, seed),
        any_engine,
        f"megatron-hetero {__version__}",
        _bases(fleet, composition),
        hand_overs_of(fleet, composition),
    )  # fmt: skip


def _bases(fleet: Fleet, composition: Composition) -> tuple[PriceBasis, ...]:
    """Return what prices the GPU types of a composition, each type and width once."""
    stages = {
        (stage.gpu.name, stage.width): stage.gpu
        for name in sorted(composition.counts)
        for stage in fleet.offered[name].shape.pipeline.stages
    }
    return tuple(
        price_basis(gpu, width, fleet.engine) for (_, width), gpu in sorted(
            stages.items(), key=lambda item: item[0]
        )
    )  # fmt: skip
