"""The best plan of stock Megatron is the best of all that its flags can say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.widths import usable_gpus, usable_widths
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan, Replica, Stage, StageShape
from megatron_hetero.plan.stock_ranks import RANK_ORDERS, places_by_rank
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock import divisions as stock_divisions
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import stage_divisions
from megatron_hetero.planner.stock.limits import StockLimits, limits_beside_a_plan
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import parts
from tests.planner.stock.enumerated import stock_grids
from tests.planner.strategies import clusters, workloads

PLAIN = StockLimits(most_chunks=1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    clusters(max_gpus=3),
    workloads(max_layers=4, max_micro_batches=4),
    st.sampled_from([0, 20 << 20, 40 << 20]),
)
def test_no_plan_of_a_small_cluster_is_faster(
    cluster: Cluster, workload: Workload, reserve: int
) -> None:
    held = tuple(name for name in cluster.limits.as_given if name != "micro_batch_size")
    limits = replace(cluster.limits, memory_reserve_bytes=reserve, as_given=held)
    cluster = replace(cluster, limits=limits)
    result = best_stock_plan(make_problem(cluster, workload), PLAIN)
    expected = min(step_times_s(cluster, workload), default=None)
    if expected is None:
        assert result is None
        return
    assert result is not None and result.is_exact
    assert result.step_time_s == pytest.approx(expected, rel=1e-9)
    assert reasons_not_stock(result.plan) == ()
    validate_plan(result.plan, cluster)


@pytest.mark.parametrize("most", [1, 3, 20])
def test_a_search_that_was_cut_short_says_so(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it says that its answer is exact, it is that of the whole search."""
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    problem = make_problem(cluster, make_workload(num_layers=12, global_batch_size=6))
    whole = best_stock_plan(problem, PLAIN)
    monkeypatch.setattr(stock_divisions, "MAX_DIVISIONS", most)
    monkeypatch.setattr(stock_divisions, "FEW_DIVISIONS", most)
    cut = best_stock_plan(problem, replace(PLAIN, few_divisions=most))
    assert whole is not None and cut is not None and whole.is_exact
    assert cut.step_time_s >= whole.step_time_s * (1 - 1e-9)
    if cut.is_exact:
        assert cut.step_time_s == pytest.approx(whole.step_time_s)
    assert cut.num_bounded < whole.num_bounded or most == 20
    spent = best_stock_plan(problem, StockLimits(num_simulated=0))
    assert spent is None or not spent.is_exact


def step_times_s(cluster: Cluster, workload: Workload) -> Iterator[float]:
    """Simulated steps of all plans that fit, by plain enumeration."""
    names = [node.name for node in cluster.nodes if usable_gpus(cluster, node)]
    for size in range(1, len(names) + 1):
        for order in permutations(names, size):
            most = [len(usable_gpus(cluster, cluster.node_by_name[name])) for name in order]
            for counts in product(*(range(1, n + 1) for n in most)):
                devices = [
                    f"{n}:{i}" for n, count in zip(order, counts, strict=True) for i in range(count)
                ]
                yield from of_devices(cluster, workload, devices)


def of_devices(cluster: Cluster, workload: Workload, devices: list[str]) -> Iterator[float]:
    nodes = cluster.node_by_name
    for width in range(1, len(devices) + 1):
        groups = [tuple(devices[i : i + width]) for i in range(0, len(devices), width)]
        on = [{name.partition(":")[0] for name in group} for group in groups]
        if len(devices) % width or any(len(held) > 1 for held in on):
            continue
        if any(width not in usable_widths(cluster, workload, nodes[min(held)]) for held in on):
            continue
        for num_replicas in range(1, len(groups) + 1):
            if len(groups) % num_replicas:
                continue
            depth = len(groups) // num_replicas
            for rank_order in RANK_ORDERS:
                places = places_by_rank(rank_order, num_replicas, depth, 1)
                at = {(d, p): groups[rank] for rank, (d, p, _) in enumerate(places)}
                yield from of_grid(cluster, workload, at, num_replicas, depth)


def of_grid(
    cluster: Cluster,
    workload: Workload,
    at: dict[tuple[int, int], tuple[str, ...]],
    num_replicas: int,
    depth: int,
) -> Iterator[float]:
    training, num_layers = workload.training, workload.model.num_layers
    sequences, rest = divmod(training.global_batch_size, num_replicas)
    sizes = [] if rest else [b for b in range(1, sequences + 1) if sequences % b == 0]
    some = [("full", k) for k in range(1, num_layers + 1)]
    kinds = [("none", None), ("selective", None), ("full", None), *some]
    for size, (recompute, count), layers in product(sizes, kinds, parts(num_layers, depth)):
        if depth > num_layers:
            continue
        replicas = []
        for d in range(num_replicas):
            stages = tuple(
                Stage(
                    StageShape(len(at[d, p]), n),
                    sum(layers[:p]),
                    at[d, p],
                    recompute=recompute,  # type: ignore[arg-type]
                    recompute_num_layers=count and min(count, n),
                )
                for p, n in enumerate(layers)
            )
            replicas.append(Replica(stages, sequences // size, size))
        plan = Plan(tuple(replicas), workload=workload)
        found = simulate_plan(plan, cluster, is_stock=True)
        if all(s.peak_memory_bytes <= s.capacity_bytes for s in found.timelines):
            yield found.step_time_s


@settings(max_examples=40, deadline=None)
@given(
    clusters(max_gpus=6),
    workloads(max_layers=8, max_micro_batches=8),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_the_bound_is_never_above_the_simulation(
    cluster: Cluster, workload: Workload, zero: bool, overlap: bool, data: st.DataObject
) -> None:
    """And equal to it for one replica on nodes that it does not come back to."""
    training = replace(
        workload.training,
        use_distributed_optimizer=zero,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    workload = replace(workload, training=training)
    problem = make_problem(cluster, workload)
    grids, _ = stock_grids(problem)
    if not grids:
        return
    grid = data.draw(st.sampled_from(grids))
    sequences, rest = divmod(workload.training.global_batch_size, len(grid.chains))
    if rest or grid.num_stages > problem.num_layers:
        return
    size = data.draw(st.sampled_from([b for b in range(1, sequences + 1) if sequences % b == 0]))
    case = StockCase(problem, grid, StockSettings(size, "as needed"))
    every = range(1, problem.num_layers + 1)
    divisions = stage_divisions(problem.num_layers, [every] * grid.num_stages)
    division = divisions[data.draw(st.integers(0, len(divisions) - 1))]
    (bound_s,) = case.least_times_s(division[None])
    (recomputed,) = case.layers_to_recompute(division[None])
    if np.isinf(bound_s):
        return
    plan = stock_plan(case, division.tolist(), int(recomputed))
    found = simulate_plan(plan, cluster, is_stock=True)
    assert bound_s <= found.step_time_s * (1 + 1e-9)
    assert case.quick_s() <= found.step_time_s * (1 + 1e-9)
    nodes = [unit.node for unit in grid.chains[0]]
    is_apart = len(grid.chains) == 1 and len(set(nodes)) == len(nodes)
    if is_apart:
        assert bound_s == pytest.approx(found.step_time_s)


def test_interleaved_stages_with_their_own_micro_batches_are_found() -> None:
    """Few micro-batches on two equal GPUs: the fill of the pipeline is what can be saved."""
    cluster = make_cluster(("a", FAST, 2))
    workload = make_workload(num_layers=8, global_batch_size=4, hidden_size=1024, seq_length=1024)
    cluster = replace(
        cluster, limits=replace(cluster.limits, max_tensor_parallel=1, num_replicas=1)
    )
    problem = make_problem(cluster, workload)
    result = best_stock_plan(problem)
    plain = best_stock_plan(problem, PLAIN)
    assert result is not None and plain is not None
    assert result.step_time_s < plain.step_time_s
    assert result.plan.schedule == "interleaved"
    assert reasons_not_stock(result.plan) == ()
    validate_plan(result.plan, cluster)
    arguments = megatron_args(result.plan)
    assert "--pipeline-model-parallel-layout" in arguments
    assert not any(word.startswith("--hetero") for word in arguments)


def test_layers_of_chunks_move_two_at_a_time() -> None:
    """One at a time leads to 1.098 s here, which a division that was known is faster than."""
    cluster = load_cluster("examples/rtx3080-rtx4090/cluster.yaml")
    script = "examples/rtx3080-rtx4090/gpt-1.3b.sh"
    problem = make_problem(cluster, load_workload(script, ("--global-batch-size=24",)))
    found = best_stock_plan(problem)
    assert found is not None and found.plan.schedule == "interleaved"
    estimates = estimate_plan(found.plan, cluster, bounded=False)
    validate_plan(replace(found.plan, estimates=estimates), cluster)  # memory holds it
    (grid,) = [
        grid
        for grid in stock_grids(problem)[0]
        if [[unit.node, unit.width] for chain in grid.chains for unit in chain]
        == [["fast", 1], ["fast", 1]]
        and grid.num_stages == 2
    ]
    case = StockCase(problem, grid, StockSettings(4, "none", 4))
    known = simulate_plan(stock_plan(case, (3, 3, 3, 3, 3, 4, 4, 1), 0), cluster, is_stock=True)
    assert found.step_time_s <= known.step_time_s


def test_what_does_not_fit_is_recomputed_by_blocks() -> None:
    """The first stage keeps more micro-batches; a few layers of each stage are recomputed."""
    sizes = {"hidden_size": 1024, "seq_length": 1024, "num_layers": 12, "global_batch_size": 8}
    workload = make_workload(**sizes)
    roomy = make_cluster(("a", FAST, 1), ("b", SLOW, 1))
    free = best_stock_plan(make_problem(roomy, workload), PLAIN)
    assert free is not None
    peak = max(s.peak_memory_bytes for s in simulate_plan(free.plan, roomy).timelines)
    for part in (0.9, 0.8, 0.7, 0.6, 0.5):
        fast = replace(FAST, memory_bytes=int(part * peak))
        tight = make_cluster(("a", fast, 1), ("b", replace(SLOW, memory_bytes=int(part * peak)), 1))
        result = best_stock_plan(make_problem(tight, workload), PLAIN)
        if result is None:
            continue
        stages = result.plan.replicas[0].stages
        if stages[0].recompute_num_layers:
            assert result.step_time_s > free.step_time_s
            arguments = megatron_args(result.plan)
            method = arguments.index("--recompute-method")
            assert arguments[method + 1] == "block"
            return
    pytest.fail("no memory led to recompute by blocks")


def test_divisions_that_wait_alike_do_not_take_all_simulations() -> None:
    """Four replicas share the line between two sites, and every division of their layers is a
    quarter slower than its bound."""
    folder = Path(__file__).parents[3] / "examples" / "two-sites"
    problem = make_problem(
        load_cluster(folder / "cluster.yaml"), load_workload(folder / "gpt-2.7b.flags")
    )
    found = best_stock_plan(problem, limits_beside_a_plan(len(problem.cluster.devices)))
    assert found is not None
    # Grids of other numbers of replicas or stages were simulated as well, and one of them won.
    assert found.others
    assert len(found.plan.replicas) != 4


def test_few_whole_nodes_come_in_every_order() -> None:
    """Tied embeddings want both ends of a pipeline on one site, the other site between them."""
    folder = Path(__file__).parents[3] / "examples" / "two-sites"
    problem = make_problem(
        load_cluster(folder / "cluster.yaml"), load_workload(folder / "gpt-2.7b.flags")
    )
    found = best_stock_plan(problem, limits_beside_a_plan(len(problem.cluster.devices)))
    assert found is not None
    (sites, *_) = [
        [problem.cluster.node_by_name[stage.devices[0].split(":")[0]].site for stage in r.stages]
        for r in found.plan.replicas
    ]
    assert sites[0] == sites[-1] != sites[len(sites) // 2]
