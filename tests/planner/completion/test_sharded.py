"""The choice of sharded layers against brute force, priced by the cost model."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement, Recompute
from megatron_hetero.cost.placing import with_sharded_layers
from megatron_hetero.cost.sync.sharded import exchange_times, slowest_layer
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.planner.api import plan_and_explain, plan_cluster
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload

SHARDS = Objective(shards_layers=True)


def problem_of(draw: random.Random) -> tuple[Problem, tuple[Chain, ...]]:
    """A problem of two or three like or unlike nodes, a structure, and memory between what all
    layers take whole and what they take sharded and recomputed."""
    num_replicas, depth = draw.choice([(2, 1), (3, 1), (2, 2)])
    num_layers = draw.randint(3, 9) if depth == 1 else draw.randint(3, 6)
    overlaps = draw.random() < 0.5
    workload = make_workload(
        num_layers,
        draw.choice([512, 2048]),
        4 * num_replicas,
        use_distributed_optimizer=True,
        recompute=draw.choice(["none", "none", "full"]),
        grad_reduce_in_bf16=draw.random() < 0.3,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        vocab_size=draw.choice([1000, 20000]),
    )
    nodes = [(f"n{r}", draw.choice([FAST, SLOW]), 2 * depth) for r in range(num_replicas)]
    between = Link(draw.choice([3e9, 3e11]), 1e-6)
    structure = []
    for name, *_ in nodes:
        width = draw.choice([1, 1, 2])
        structure.append(
            tuple(Unit(name, tuple(range(s * width, (s + 1) * width))) for s in range(depth))
        )
    problem = make_problem(
        make_cluster(*nodes, between=between, limits=FREE), workload, None, CostModel, SHARDS
    )
    rows = problem.costs.vocab_rows(sorted({len(u.indices) for c in structure for u in c}))
    fitted = []
    for r, (name, gpu, count) in enumerate(nodes):
        peaks = []
        kinds: tuple[tuple[Recompute | None, int], ...] = ((None, 0), ("full", 1))
        for recompute, part in kinds:
            layers = [num_layers - depth + 1, *[1] * (depth - 1)]
            replicas = tuple(
                PlacedReplica(
                    tuple(
                        PlacedStage(u.devices, n, None, recompute)
                        for u, n in zip(chain, layers, strict=True)
                    ),
                    4,
                )
                for chain in structure
            )
            placement = with_sharded_layers(Placement(replicas), [part * n for n in layers])
            costs = problem.costs.sharded_as(placement)
            memory = costs.stage_memory(placement.replicas[r], 0, rows)
            peaks.append(memory.peak_bytes(layers[0]))
        most, least = peaks
        size = int(0.9 * least + draw.random() * (1.1 * most - 0.9 * least))
        fitted.append((name, replace(gpu, memory_bytes=size), count))
    cluster = make_cluster(*fitted, between=between, limits=FREE)
    return make_problem(cluster, workload, None, CostModel, SHARDS), tuple(structure)


def brute_force_s(problem: Problem, structure: tuple[Chain, ...]) -> float:
    """The least seconds of the slowest stage over all layers, numbers of sharded ones and
    recomputes."""
    num_layers, depth = problem.num_layers, len(structure[0])
    rows = problem.costs.vocab_rows(sorted({len(u.indices) for c in structure for u in c}))
    splits = [s for s in product(range(1, num_layers + 1), repeat=depth) if sum(s) == num_layers]
    found_s = inf
    known: dict[tuple[int, int, int], float] = {}
    for split in splits:
        slowest_s = 0.0
        for index, own in enumerate(split):
            if (index, own, split[0]) not in known:
                known[index, own, split[0]] = min(
                    stage_s(problem, structure, split, index, sharded, rows)
                    for sharded in range(own + 1)
                )
            slowest_s = max(slowest_s, known[index, own, split[0]])
        found_s = min(found_s, slowest_s)
    return found_s


def stage_s(
    problem: Problem,
    structure: tuple[Chain, ...],
    split: tuple[int, ...],
    index: int,
    sharded: int,
    rows: int,
) -> float:
    """Seconds of one stage of all replicas with so many sharded layers."""
    own = split[index]
    ways: list[tuple[Recompute, int | None]] = [
        ("none", None),
        ("selective", None),
        ("full", None),
    ]
    ways += [("full", k) for k in range(1, own)]
    counts = [sharded if s == index else 0 for s in range(len(split))]
    passes, ends = [], []
    for r in range(len(structure)):
        best: PassTimes | None = None
        for recompute, number in ways:
            replicas = tuple(
                PlacedReplica(
                    tuple(
                        PlacedStage(u.devices, n, None, recompute, number)
                        if s == index
                        else PlacedStage(u.devices, n)
                        for s, (u, n) in enumerate(zip(chain, split, strict=True))
                    ),
                    4,
                )
                for chain in structure
            )
            placement = with_sharded_layers(Placement(replicas), counts)
            costs = problem.costs.sharded_as(placement)
            replica = placement.replicas[r]
            memory = costs.stage_memory(replica, index, rows)
            if memory.peak_bytes(own) > memory.capacity_bytes:
                continue
            times = costs.stage(replica.without_sharding, index, rows).times
            if best is None or times.total_s < best.total_s:
                best = times
        if best is None:
            return inf
        passes.append(best)
        unit, last = structure[r][index], index == len(split) - 1
        ends.append(costs.group_pieces(unit.devices, None, rows).stage(0, index == 0, last))
    reduce_s, gather_s = costs.layer_exchange_s([x.stages[index] for x in replicas])
    layer = slowest_layer(passes, ends, own)
    overlaps = problem.workload.training.overlap_param_gather
    waits = exchange_times(sharded, gather_s, reduce_s, layer, overlaps=overlaps)
    forward_s = max(one.forward_s for one in passes) + waits.forward_s
    return forward_s + max(one.backward_s for one in passes) + waits.backward_s


@pytest.mark.parametrize("num", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_choices_against_brute_force(num: int) -> None:
    draw = random.Random(22)
    num_chosen = num_infeasible = 0
    for _ in range(num):
        problem, structure = problem_of(draw)
        completer = Completer(problem, shards=True)
        least_s = brute_force_s(problem, structure)
        made = completer.in_step(structure, 1)
        if made is None:
            assert least_s == inf
            assert completer.complete(structure, 1) is None
            num_infeasible += 1
            continue
        slowest_s = max(option.time_s for option in made.filled[0].options)
        assert slowest_s == pytest.approx(least_s, rel=1e-12)
        cost = problem.costs.placement(made.placement(1))
        assert cost.missing_bytes <= 0
        if any(made.sharded or ()):
            num_chosen += 1
            for index, option in enumerate(made.filled[0].options):
                priced = [r.stages[index].times.total_s for r in cost.replicas]
                assert max(priced) == pytest.approx(option.time_s)
                # Replicas keep step where they gather layers together; elsewhere each has its own.
                if made.sharded is not None and made.sharded[index]:
                    assert min(priced) == pytest.approx(max(priced))
    assert num_chosen > num / 12
    assert num_infeasible > num / 20


def small_cards(memory_gib: int) -> Problem:
    """Four equal cards on fast links, which no plan divides otherwise than by replicas."""
    gpu = replace(SLOW, memory_bytes=memory_gib << 30)
    limits = Limits(
        memory_reserve_bytes=0,
        max_tensor_parallel=1,
        max_pipeline_parallel=1,
        as_given=("context_parallel",),
    )
    workload = make_workload(
        12,
        2048,
        8,
        use_distributed_optimizer=True,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
        ffn_hidden_size=8192,
        seq_length=4096,
        max_position_embeddings=4096,
    )
    cluster = make_cluster(("a", gpu, 4), limits=limits)
    return make_problem(cluster, workload, None, CostModel)


def test_sharded_layers_take_the_place_of_recompute() -> None:
    problem = small_cards(8)
    whole = plan_cluster(problem.cluster, problem.workload)
    sharded, explained = plan_and_explain(problem.cluster, problem.workload, objective=SHARDS)
    assert not whole.layout.has_sharded_layers
    assert any(stage.recompute == "full" for r in whole.replicas for stage in r.stages)
    assert sharded.layout.has_sharded_layers
    assert sharded.estimates is not None
    assert whole.estimates is not None
    assert sharded.estimates.step_time_s < 0.98 * whole.estimates.step_time_s
    assert sharded.estimates.bound_s is None
    (stage,) = explained.sharded
    assert stage.num_sharded == sharded.replicas[0].stages[0].shape.num_sharded_layers
    assert stage.saved_bytes > 0
    assert stage.missing_bytes > 0
    simulated = simulate_plan(sharded, problem.cluster)
    assert simulated.step_time_s == pytest.approx(sharded.estimates.step_time_s, rel=0.01)


def test_layers_stay_whole_where_that_is_as_fast() -> None:
    problem = small_cards(24)
    plans = [
        plan_cluster(problem.cluster, problem.workload, objective=objective)
        for objective in (Objective(), SHARDS)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("num", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_no_plan_is_slower_than_without(num: int) -> None:
    draw = random.Random(7)
    found = []
    for _ in range(num):
        problem, _ = problem_of(draw)
        plans = []
        for objective in (Objective(), SHARDS):
            try:
                plan = plan_cluster(
                    problem.cluster, problem.workload, objective=objective, bounded=False
                )
            except InfeasiblePlanError:
                plans.append(inf)
                continue
            assert plan.estimates is not None
            plans.append(plan.estimates.step_time_s)
        assert plans[1] <= plans[0]
        found.append(plans[0])
    assert min(found) < inf


def test_small_cards_train_what_did_not_fit() -> None:
    problem = small_cards(5)
    with pytest.raises(InfeasiblePlanError):
        plan_cluster(problem.cluster, problem.workload)
    made = plan_cluster(problem.cluster, problem.workload, objective=SHARDS)
    assert made.layout.has_sharded_layers
