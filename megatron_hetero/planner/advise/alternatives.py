"""Plans beside the chosen plan: how each loses, or what is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, Plan, ReplicaShape
from megatron_hetero.planner.evaluate.candidate import NEAR, Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.best import StockResult
from megatron_hetero.planner.stock.by_hand import plans_by_hand
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.stock import reasons_not_stock
from megatron_hetero.units import format_duration

_NUM_RUNNERS_UP = 3
_WITHOUT_QUEUES = "priced without waiting for paths that replicas share"


@dataclass(frozen=True)
class Alternative:
    """Another plan that fits, and how the plan loses."""

    layout: str
    strategy: str
    step_time_s: float
    slower_by: float
    """Ratio to the plan's step time, minus 1."""
    because: str
    settings: str = ""
    """The plan's settings beside the layout, in words."""


@dataclass(frozen=True)
class Shortage:
    """A plan that does not fit, and the memory missing per GPU of the worst stage, without the
    reserve."""

    layout: str
    devices: tuple[str, ...]
    gpu_type: str
    missing_bytes: int
    reserve_bytes: int


def layout_text(placement: Placement) -> str:
    """Return the one-line layout of a placement."""
    return format_layout(
        Layout(
            tuple(
                ReplicaShape(
                    tuple(s.shape for s in r.stages),
                    r.num_micro_batches,
                    r.micro_batch_size,
                )
                for r in placement.replicas
            )
        )
    )


def shortage_of(problem: Problem, miss: Candidate) -> Shortage:
    """Return the missing memory of a placement's worst stage."""
    stages = [
        (cost, stage)
        for replica, replica_cost in zip(miss.placement.replicas, miss.cost.replicas, strict=True)
        for stage, cost in zip(replica.stages, replica_cost.stages, strict=True)
    ]
    cost, stage = max(stages, key=lambda item: item[0].missing_bytes)
    return Shortage(
        layout_text(miss.placement),
        tuple(device.name for device in stage.devices),
        problem.cluster.node_by_name[stage.devices[0].node].gpu_type.name,
        cost.missing_bytes,
        cost.memory.base["reserve"],
    )


def alternative_to(problem: Problem, other: Candidate, best: Candidate) -> Alternative:
    """Return another candidate beside the best."""
    sizes = _micro_batch_sizes(problem, other.placement)
    is_alike = sizes == _micro_batch_sizes(problem, best.placement)
    return Alternative(
        layout_text(other.placement),
        other.strategy,
        other.step_time_s,
        other.step_time_s / best.step_time_s - 1,
        _why_worse(problem, other, best),
        "" if is_alike else f"micro-batches of {' and '.join(map(str, sorted(sizes)))}",
    )


def simplest_beside(problem: Problem, other: Candidate, best: Candidate) -> Alternative:
    """Return a candidate that is simpler than the best; `settings` says what stock Megatron
    lacks."""
    # `reasons_not_stock` reads a plan; estimates do not matter to it.
    reasons = () if other.is_stock else reasons_not_stock(bare_plan(problem, other, {}))
    needs = f"plug-in needed for {'; '.join(reasons)}" if reasons else "stock Megatron runs it"
    found = alternative_to(problem, other, best)
    return replace(found, settings="\n".join(filter(None, (found.settings, needs))))


def stock_alternative_to(problem: Problem, found: StockResult, best: Candidate) -> Alternative:
    """Return stock Megatron's best plan over all flags, compared with the best plan."""
    plan, cluster = found.plan, problem.cluster
    assert plan.workload is not None  # the search gives it one
    costs = CostModel(cluster, plan.workload, problem.costs.profile)
    cost = plan_cost(plan, costs, placement_of(plan, cluster))
    more_s = found.step_time_s - best.step_time_s
    # Where its exchange, which is not the plug-in's, makes a difference, the parts say nothing.
    shorter_s, longer_s = sorted((cost.step_time_s, found.step_time_s))
    is_as_priced = longer_s <= NEAR * shorter_s
    return Alternative(
        format_layout(plan.layout),
        "stock",
        found.step_time_s,
        found.step_time_s / best.step_time_s - 1,
        # Orders of other schedules have no parts to compare.
        _why_slower(cost, best.cost)
        if is_as_priced and plan.schedule == "1f1b"
        else f"its simulated step takes {format_duration(max(more_s, 0.0))} more",
        settings_text(plan, _micro_batch_sizes(problem, best.placement)),
    )


def by_hand_alternatives(
    problem: Problem, best: Candidate, sizes: frozenset[int] | None = None
) -> tuple[Alternative, ...]:
    """Return what people do without a planner, beside the best.

    Args:
        sizes: the best's micro-batch sizes, where they are not those of its placement in this job.
    """
    sizes = sizes or _micro_batch_sizes(problem, best.placement)
    return tuple(
        Alternative(
            format_layout(found.plan.layout),
            found.name,
            found.step_time_s,
            found.step_time_s / best.step_time_s - 1,
            "the same layers on every stage",
            settings_text(found.plan, sizes),
        )
        for found in plans_by_hand(problem)
    )


def _micro_batch_sizes(problem: Problem, placement: Placement) -> frozenset[int]:
    job = problem.workload.training.micro_batch_size
    return frozenset(r.micro_batch_size or job for r in placement.replicas)


def settings_text(plan: Plan, sizes: frozenset[int] = frozenset({1})) -> str:
    """Return micro-batch size, recompute and model chunks of a plan of stock Megatron.

    Args:
        sizes: micro-batch sizes that go without saying.
    """
    training = plan.workload.training if plan.workload else None
    words = []
    if training is not None and {training.micro_batch_size} != sizes:
        words.append(f"micro-batches of {training.micro_batch_size}")
    stages = plan.replicas[0].stages
    some = max((stage.recompute_num_layers or 0 for stage in stages), default=0)
    if some:
        words.append(f"{some} layers of a stage recomputed")
    elif training is not None and training.recompute != "none":
        words.append(f"{training.recompute} recompute")
    if stages[0].chunks:
        words.append(f"interleaved, {len(stages[0].chunks)} chunks a stage")
    return "; ".join(words)


def runners_up(
    problem: Problem, board: Scoreboard, best: Candidate, stock: Candidate | None
) -> tuple[Alternative, ...]:
    """Return the next best plans, each of another structure than the best plan, the best stock plan
    and the plans before. Layer counts and the choice among equal nodes are no part of a structure.
    Each plan is priced like the best, with queues; `settings` names plans too large for the queues.
    """
    # What is shown anyhow, as the plan or as the stock plan, is no runner-up.
    seen = [_structure(problem, best.placement)]
    if stock is not None:
        seen.append(_structure(problem, stock.placement))
    rescorer = Rescorer(board)
    found: list[Alternative] = []
    for candidate in board.ranking_of_all:
        structure = _structure(problem, candidate.placement)
        if candidate.keeps_limits and structure not in seen and len(found) < _NUM_RUNNERS_UP:
            seen.append(structure)
            # A step too long to simulate is named as such.
            if rescorer.may_simulate(candidate):
                other = alternative_to(problem, rescorer.with_queues(candidate), best)
            else:
                other = replace(alternative_to(problem, candidate, best), settings=_WITHOUT_QUEUES)
            found.append(other)
    if problem.objective.name == "throughput":
        found.sort(key=lambda other: other.step_time_s)
    return tuple(found)


def _structure(problem: Problem, placement: Placement) -> list[list[tuple[str, str, int]]]:
    """Return site, GPU and width of each stage."""
    nodes = problem.cluster.node_by_name
    return sorted(
        [
            (nodes[d.node].site, nodes[d.node].gpu_type.name, stage.width)
            for stage in replica.stages
            for d in stage.devices[:1]
        ]
        for replica in placement.replicas
    )


def _why_worse(problem: Problem, other: Candidate, best: Candidate) -> str:
    """Return the loss by the objective, or if there is none, the cause of the longer step."""
    more, least = (
        problem.objective.standing(problem.costs, c.placement, c.cost, c.step_time_s).value
        for c in (other, best)
    )
    # No worse by the objective's own measure: then the step says why.
    if more <= least:
        why = _why_slower(other.cost, best.cost)
        return f"without forwards launched ahead {why}" if _lacks_counts(other, best) else why
    if problem.objective.name == "fewest-gpus":
        return f"it takes {more - least:.0f} more GPUs"
    if not least:  # on machines at no price
        return "its tokens cost money"
    return f"its tokens cost {more / least - 1:.1%} more"


def _lacks_counts(other: Candidate, best: Candidate) -> bool:
    """Return whether `best` is `other` with launch counts added."""
    plain, own = (
        [replace(r, launch_counts=None) for r in c.placement.replicas] for c in (other, best)
    )
    return best.has_counts and not other.has_counts and plain == own


def _why_slower(other: PlacementCost, best: PlacementCost) -> str:
    """Return the part of the step that grew most."""
    growth = {
        "its slowest pipeline": other.pipelines_s - best.pipelines_s,
        "its gradient exchange": other.gradient_sync_s - best.gradient_sync_s,
        "its optimizer update": other.update_s - best.update_s,
    }
    cause = max(growth, key=lambda key: growth[key])
    if growth[cause] <= 0:
        return "it takes no longer"
    return f"{cause} takes {format_duration(growth[cause])} more"
