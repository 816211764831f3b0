"""The reasons for a plan, as data: the limits that bind, the use of time, the next best plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.causes import StageCauses, stage_causes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.communication.libraries import kept_to_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.alternatives import (
    Alternative,
    Shortage,
    alternative_to,
    by_hand_alternatives,
    runners_up,
    shortage_of,
    stock_alternative_to,
)
from megatron_hetero.planner.advise.sharding import ShardedStage, sharded_stages
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.exchange_groups import ExchangeChoice, exchange_choice
from megatron_hetero.planner.objectives.outcome import Outcome
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.best import StockResult
from megatron_hetero.planner.stock.search import stock_beside_a_plan
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.schedule.estimate import has_orders, plan_cost


@dataclass(frozen=True)
class TimeByCause:
    """Parts of the step as the slowest stage of the last replica lives it; they sum to the step.

    `waiting_s` is pipeline bubble (and waiting for a network path that replicas share).
    """

    compute_s: float
    tensor_parallel_s: float
    boundary_s: float
    waiting_s: float
    gradient_sync_s: float
    update_s: float


@dataclass(frozen=True)
class BindingStage:
    """The slowest stage of the replica that ends last."""

    replica: int
    stage: int
    devices: tuple[str, ...]
    time_s: float
    """Forward and backward of one micro-batch."""


@dataclass(frozen=True)
class StageTime:
    """What the passes of a stage over one micro-batch are spent on; `is_measured` is whether the
    stage's time rests on a profile, and is only divided as the model divides its own."""

    replica: int
    stage: int
    time_s: float
    causes: StageCauses
    is_measured: bool


@dataclass(frozen=True)
class HiddenHop:
    """What a replica's launch counts are for: its slowest hop, and what they save."""

    replica: int
    launch_counts: tuple[int, ...]
    own_launch_counts: tuple[int, ...]
    """Those of 1F1B."""
    boundary: int
    """The slowest hop joins stages `boundary` and `boundary + 1`."""
    round_trip_s: float
    period_s: float
    """Forward and backward of one micro-batch on the slowest stage."""
    pipeline_s: float
    own_pipeline_s: float
    """The pipeline's time under 1F1B's own counts."""


@dataclass(frozen=True)
class Explanation:
    """See the fields; `headroom_bytes` is what each device of the plan has left at its peak.

    `best_stock` is the fastest plan found that stock Megatron can run without the plug-in, in its
    shape and in its order of ranks, of all that its flags can say (`planner.stock.search`); unless
    its step is long, its time is simulated.  It is None where none fits;
    `stock_shortage` is then the one that lacks least (None too if the limits leave stock Megatron
    no plan at all).
    """

    step_time_s: float
    binding: BindingStage
    time_by_cause: TimeByCause
    headroom_bytes: Mapping[str, int]
    best_stock: Alternative | None
    stock_shortage: Shortage | None
    runners_up: tuple[Alternative, ...]
    num_priced: int
    idle_reasons: Mapping[str, str]
    hidden_hops: tuple[HiddenHop, ...] = ()
    interrupted: bool = False
    """True if the user stopped the search early."""
    outcome: Outcome | None = None
    """The plan by its objective; None of a plan that is only explained."""
    simplest: Alternative | None = None
    """The plan nearest to stock Megatron within `simplest_within` of this plan (`advise.simplest`);
    None if the two are the same."""
    simplest_within: float | None = None
    fastest: Alternative | None = None
    """The best plan, if the user asked for the simplest plan near the best."""
    exchange: ExchangeChoice | None = None
    """The step with groups of machines for the exchange of gradients, and without; None where all
    machines are on one site."""
    sharded: tuple[ShardedStage, ...] = ()
    """The stages with sharded layers."""
    by_hand: tuple[Alternative, ...] = ()
    """Plans that people make by hand (`stock.by_hand`), named in `strategy`; plans that do not fit
    are left out."""
    refused: tuple[Alternative, ...] = ()
    """Plans that were found and that no job could run, because on GPUs they would hang."""
    stage_times: tuple[StageTime, ...] = ()
    """All stages, in the layout's order, with the causes of their times."""


def explain_candidate(
    problem: Problem,
    board: Scoreboard,
    best: Candidate,
    idle_reasons: Mapping[str, str] | None = None,
    searched_stock: StockResult | None = None,
) -> Explanation:
    """Explain a placement beside what else is on the board.

    Args:
        searched_stock: the best plan of stock Megatron, in place of the board's.
    """
    placement, cost = best.placement, best.cost
    # Limits that bind, and seconds by cause.
    binding, causes = _causes(placement, cost)
    rows = problem.costs.vocab_rows(placement.widths)
    # Memory left on every used device.
    headroom = {
        device.name: -stage_cost.missing_bytes
        for replica, replica_cost in zip(placement.replicas, cost.replicas, strict=True)
        for stage, stage_cost in zip(replica.stages, replica_cost.stages, strict=True)
        for device in stage.devices
    }
    # Stock Megatron's best beside it, from the board or from its own search.
    stock, stock_miss = Rescorer(board).best_stock(), board.out_of_memory.nearest_stock
    best_stock = alternative_to(problem, stock, best) if stock else None
    if searched_stock is not None and (
        best_stock is None or searched_stock.step_time_s < best_stock.step_time_s
    ):
        best_stock = stock_alternative_to(problem, searched_stock, best)
    return Explanation(
        step_time_s=best.step_time_s,
        binding=binding,
        time_by_cause=causes,
        headroom_bytes=headroom,
        best_stock=best_stock,
        stock_shortage=shortage_of(problem, stock_miss) if stock_miss and not best_stock else None,
        runners_up=runners_up(problem, board, best, stock),
        num_priced=board.num_priced,
        idle_reasons=dict(problem.idle_reasons if idle_reasons is None else idle_reasons),
        hidden_hops=tuple(
            _hidden_hop(problem.costs, r, replica, replica_cost, rows)
            for r, (replica, replica_cost) in enumerate(
                zip(placement.replicas, cost.replicas, strict=True)
            )
            if replica.launch_counts is not None
        ),
        interrupted=board.interrupted,
        exchange=None if board.interrupted else exchange_choice(problem, best),
        sharded=tuple(sharded_stages(problem.costs, placement)),
        refused=tuple(
            replace(alternative_to(problem, one.candidate, best), because=one.why)
            for one in board.refused
        ),
        by_hand=() if board.interrupted else by_hand_alternatives(problem, best),
        stage_times=tuple(_stage_times(problem.costs, placement, cost)),
    )


def _stage_times(
    costs: CostModel, placement: Placement, cost: PlacementCost
) -> Iterator[StageTime]:
    """Yield the stages with the causes of their times; equal replicas are told apart once."""
    rows = costs.vocab_rows(placement.widths)
    sharded = costs.sharded_as(placement)
    # Equal replicas share one cost object, which is the key.
    known: dict[int, list[StageCauses]] = {}
    for r, (replica, of) in enumerate(zip(placement.replicas, cost.replicas, strict=True)):
        if id(of) not in known:
            known[id(of)] = [stage_causes(sharded, replica, s, rows) for s in range(len(of.stages))]
        for s, (stage, causes) in enumerate(zip(of.stages, known[id(of)], strict=True)):
            yield StageTime(r, s, stage.times.total_s, causes, stage.measured)


def explain_plan(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None = None,
    strategies: Sequence[Strategy] | None = None,
) -> Explanation:
    """Explain any validated plan, edited by hand or not, beside what a new search finds.

    Args:
        strategies: of that search; by default those of `plan`.
    Raises:
        UsageError: the plan carries no workload.
    """
    if plan.workload is None:
        raise UsageError("the plan carries no model, so it cannot be explained; give the model")
    # Only GPUs of the communication library of the plan count.
    problem = make_problem(kept_to_plan(cluster, plan), plan.workload, profile)
    placement = placement_of(plan, problem.cluster)
    cost = plan_cost(plan, problem.costs, placement)
    candidate = Candidate(placement, cost, "given")
    explanation = explain_candidate(
        problem,
        search(problem, strategies=strategies),
        candidate,
        plan.idle_reasons,
        stock_beside_a_plan(problem),
    )
    # Orders are more than launch counts.
    return replace(explanation, hidden_hops=()) if has_orders(plan) else explanation


def _causes(placement: Placement, cost: PlacementCost) -> tuple[BindingStage, TimeByCause]:
    # The replica that ends last, and its slowest stage.
    r = max(range(len(cost.replicas)), key=lambda i: cost.replicas[i].pipeline_s)
    replica, replica_cost = placement.replicas[r], cost.replicas[r]
    s = max(range(len(replica.stages)), key=lambda i: replica_cost.stages[i].times.total_s)
    stage, stage_cost = replica.stages[s], replica_cost.stages[s]
    busy_s = replica.num_micro_batches * stage_cost.times.total_s
    tensor_parallel_s = replica.num_micro_batches * stage_cost.tensor_parallel_s
    hops = replica_cost.forward_hops + replica_cost.backward_hops
    # The first micro-batch pays every hop once; what else the stage waits is bubble.
    # Where nothing waits, rounding may leave less than nothing.
    idle_s = max(cost.pipelines_s - busy_s, 0.0)
    boundary_s = min(sum(h.total_s for h in hops), idle_s)
    causes = TimeByCause(
        compute_s=busy_s - tensor_parallel_s,
        tensor_parallel_s=tensor_parallel_s,
        boundary_s=boundary_s,
        waiting_s=idle_s - boundary_s,
        gradient_sync_s=cost.gradient_sync_s,
        update_s=cost.update_s,
    )
    devices = tuple(device.name for device in stage.devices)
    return BindingStage(r, s, devices, stage_cost.times.total_s), causes


def _hidden_hop(
    costs: CostModel, index: int, replica: PlacedReplica, cost: ReplicaCost, vocab_rows: int
) -> HiddenHop:
    own = replace(replica, launch_counts=None)
    trips_s = [
        there.total_s + back.total_s
        for there, back in zip(cost.forward_hops, cost.backward_hops, strict=True)
    ]
    slowest = max(range(len(trips_s)), key=lambda i: trips_s[i], default=0)
    return HiddenHop(
        replica=index,
        launch_counts=replica.num_in_flight,
        own_launch_counts=own.num_in_flight,
        boundary=slowest,
        round_trip_s=max(trips_s, default=0.0),
        period_s=max(stage.times.total_s for stage in cost.stages),
        pipeline_s=cost.pipeline_s,
        own_pipeline_s=costs.replica(own, vocab_rows).pipeline_s,
    )
