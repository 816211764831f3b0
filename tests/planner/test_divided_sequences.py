"""Context parallelism in the search: found where sequences are long, and as good as brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import placement_of, with_optimizer_shares
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.canonical import arranged
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.oracle.structures import all_structures, compositions
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit, divides, joined_units
from megatron_hetero.schedule.estimate import estimate_plan, plan_cost
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.strategies import cases

GIVEN = replace(FREE, as_given=tuple(name for name in CHOICES if name != "context_parallel"))
NONE = replace(FREE, as_given=CHOICES)
PCIE = Link(10e9, 1e-5)
LATENT: dict[str, object] = {
    "kv_lora_rank": 256,
    "q_lora_rank": 512,
    "qk_head_dim": 96,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 96,
}


def long_job(seq_length: int = 65536, **changes: object) -> Workload:
    return make_workload(
        **{
            "num_layers": 4,
            "hidden_size": 1024,
            "global_batch_size": 2,
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
            "flash_attention": True,
            "use_distributed_optimizer": True,
            "recompute": "full",
            **changes,
        }
    )


def every_structure(problem: Problem) -> Iterator[tuple[Chain, ...]]:
    """Every choice of groups, of stages made of them, of replicas and of stage orders."""
    seen = set()
    flat = {tuple(sorted(u for chain in s for u in chain)) for s in all_structures(problem)}
    for groups in sorted(flat):
        for stages in _stages(groups):
            if all(problem.may_be_a_unit(unit) for unit in stages):
                for structure in _chains(stages):
                    if len(structure) in problem.replica_counts() and structure not in seen:
                        seen.add(structure)
                        yield structure


def _stages(groups: tuple[Unit, ...]) -> Iterator[tuple[Unit, ...]]:
    """Every way to make stages of whole groups of one width."""
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for chosen in product((False, True), repeat=len(rest)):
        own = [first, *(g for g, c in zip(rest, chosen, strict=True) if c)]
        if len({unit.width for unit in own}) == 1:
            left = tuple(g for g, c in zip(rest, chosen, strict=True) if not c)
            one = own[0] if len(own) == 1 else joined_units(own)
            for others in _stages(left):
                yield (one, *others)


def _chains(stages: tuple[Unit, ...]) -> Iterator[tuple[Chain, ...]]:
    """Every way to put stages into chains, whose order does not count."""
    if not stages:
        yield ()
        return
    first, rest = stages[0], stages[1:]
    for structure in _chains(rest):
        yield tuple(sorted((*structure, (first,))))
        for r, chain in enumerate(structure):
            for s in range(len(chain) + 1):
                longer = (*chain[:s], first, *chain[s:])
                yield tuple(sorted((*structure[:r], longer, *structure[r + 1 :])))


def brute_force_s(problem: Problem) -> float | None:
    """The fastest step of all placements, at the job's own settings and 1F1B's launch counts, as a
    plan is priced: with queues, and with stock Megatron's waits where stock Megatron runs it."""
    best: float | None = None
    for placement, (cost, rank_order) in sorted(
        fitting(problem).items(), key=lambda item: item[1][0].step_time_s
    ):
        # Queues make no step shorter; the exchange of stock Megatron is another, and may.
        if rank_order is None and best is not None and cost.step_time_s >= best:
            continue
        plan = bare_plan(problem, Candidate(placement, cost, "", rank_order), {})
        step_s = plan_cost(plan, problem.costs, placement, cost).step_time_s
        best = step_s if best is None else min(best, step_s)
    return best


def fitting(problem: Problem) -> dict[Placement, tuple[PlacementCost, RankOrder | None]]:
    """Every placement that fits, by the cost model alone, and the ranks of stock Megatron."""
    costs, total = problem.costs, problem.num_micro_batches
    found: dict[Placement, tuple[PlacementCost, RankOrder | None]] = {}
    for structure in every_structure(problem):
        if max(map(len, structure)) > problem.num_layers:
            continue
        splits = [compositions(problem.num_layers, len(chain)) for chain in structure]
        for layers in product(*splits):
            for counts in compositions(total, len(structure)):
                replicas = tuple(
                    PlacedReplica(
                        tuple(
                            replace(unit.stage, num_layers=n)
                            for unit, n in zip(chain, own, strict=True)
                        ),
                        count,
                    )
                    for chain, own, count in zip(structure, layers, counts, strict=True)
                )
                placement, rank_order = arranged(Placement(replicas), problem.gpus)
                if placement.has_context_parallel:
                    shares = [[None] * len(r.stages) for r in placement.replicas]
                    placement = with_optimizer_shares(placement, shares)
                if placement not in found:
                    cost = costs.placement(placement)
                    if cost.missing_bytes <= 0:
                        found[placement] = cost, rank_order
    return found


def check_near_brute_force(cluster: Cluster, workload: Workload) -> None:
    """Raise AssertionError where the search is more than half a per cent behind."""
    least_s = brute_force_s(make_problem(cluster, workload))
    if least_s is None:
        with pytest.raises(InfeasiblePlanError):
            plan_cluster(cluster, workload)
        return
    estimates = plan_cluster(cluster, workload).estimates
    assert estimates is not None
    assert estimates.step_time_s <= 1.005 * least_s


@pytest.mark.parametrize("attention", [{}, LATENT])
def test_a_sequence_that_no_gpu_holds_is_divided(attention: dict[str, object]) -> None:
    """Two nodes of one GPU each, where tensor parallelism cannot be: nothing fits without."""
    heads = {"num_attention_heads": 16, "num_query_groups": 16, "kv_channels": 128, **attention}
    workload = long_job(131072, num_layers=2, hidden_size=2048, sequence_parallel=True, **heads)
    nodes = ("a", SLOW, 1), ("b", SLOW, 1)
    with pytest.raises(InfeasiblePlanError):
        plan_cluster(make_cluster(*nodes, limits=NONE), workload)
    cluster = make_cluster(*nodes, limits=GIVEN)
    plan = plan_cluster(cluster, workload)
    assert format_layout(plan.layout) == "tp1cp2:2 @2"
    assert plan == plan_cluster(cluster, workload)
    again = estimate_plan(plan, cluster)
    assert plan.estimates is not None and plan.estimates.step_time_s == again.step_time_s
    assert plan.estimates.devices == again.devices
    bound_s = plan.estimates.bound_s
    assert bound_s is not None and bound_s <= plan.estimates.step_time_s


def test_groups_over_slow_links_divide_sequences_and_not_weights() -> None:
    """Over PCIe a ring of keys and values hides behind attention, and tensor parallelism not."""
    nodes = ("a", FAST, 2), ("b", SLOW, 2)
    given = make_cluster(*nodes, inside=PCIE, limits=NONE)
    workload = long_job(131072, num_layers=8, global_batch_size=4, sequence_parallel=True)
    before, after = (
        plan_cluster(cluster, workload) for cluster in (given, replace(given, limits=GIVEN))
    )
    assert before.estimates is not None and after.estimates is not None
    assert after.layout.has_context_parallel
    assert after.estimates.step_time_s < 0.9 * before.estimates.step_time_s
    assert after.estimates.bound_s is not None
    assert before.estimates.bound_with_context_parallel_s is None  # the cluster forbids it
    assert after.estimates.bound_with_context_parallel_s is None  # the bound is of all plans
    placement = placement_of(before, cluster := replace(given, limits=GIVEN))
    costs = make_problem(cluster, workload).costs
    beside = estimates_of(costs, placement, costs.placement(placement))
    assert beside.bound_s is not None and beside.bound_with_context_parallel_s is not None
    assert beside.bound_s > after.estimates.step_time_s  # so it is no bound of all plans
    assert beside.bound_with_context_parallel_s <= after.estimates.step_time_s


def test_one_stage_alone_divides_sequences() -> None:
    """Beside a slower card on a last stage of its own."""
    cluster = make_cluster(("a", FAST, 3), ("b", SLOW, 1), inside=Link(100e9, 3e-6), limits=GIVEN)
    plan = plan_cluster(cluster, long_job(65536, num_layers=4, global_batch_size=2))
    assert format_layout(plan.layout) == "tp1cp2:3,tp1:1 @2"


@pytest.mark.parametrize("counts", [(2, 1), (2, 2), (3, 1), (4, 0), (4, 1)])
def test_every_structure_with_a_divided_stage_is_listed_once(counts: tuple[int, int]) -> None:
    """As a plain enumeration, which merges groups one by one, tells."""
    nodes = [(name, FAST, n) for name, n in zip("ab", counts, strict=True) if n]
    problem = make_problem(make_cluster(*nodes, limits=GIVEN), long_job(4096))
    listed = [_kind(found) for found in all_structures(problem, divided=True)]
    wanted = {_kind(found) for found in every_structure(problem) if divides(found)}
    assert len(listed) == len(set(listed))
    assert set(listed) == wanted


def _kind(structure: tuple[Chain, ...]) -> tuple[object, ...]:
    """Up to the choice among a node's equal GPUs."""
    chains = [[(u.form, tuple(node for node, _ in u.parts)) for u in own] for own in structure]
    return tuple(sorted(map(tuple, chains)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_single_divided_stage_behind_a_plain_one_is_found(sequence_parallel: bool) -> None:
    """Found by brute force: no start of the search and no move of its fastest leads to it."""
    cluster = make_cluster(("a", FAST, 3), ("b", SLOW, 1), inside=Link(100e9, 3e-6), limits=GIVEN)
    workload = long_job(
        4096, num_layers=2, sequence_parallel=sequence_parallel, use_distributed_optimizer=False
    )
    check_near_brute_force(cluster, workload)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=cases(12), deadline=None)
@given(
    counts=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]),
    seq_length=st.sampled_from([4096, 32768, 65536, 131072]),
    num_layers=st.integers(1, 4),
    batch=st.integers(1, 3),
    inside=st.sampled_from([PCIE, Link(100e9, 3e-6)]),
    sequence_parallel=st.booleans(),
    divides_states=st.booleans(),
)
def test_small_boxes_are_planned_as_well_as_by_brute_force(
    counts: tuple[int, int],
    seq_length: int,
    num_layers: int,
    batch: int,
    inside: Link,
    sequence_parallel: bool,
    divides_states: bool,
) -> None:
    a, b = counts
    cluster = make_cluster(("a", FAST, a), ("b", SLOW, b), inside=inside, limits=GIVEN)
    workload = long_job(
        seq_length,
        num_layers=num_layers,
        global_batch_size=batch,
        sequence_parallel=sequence_parallel,
        use_distributed_optimizer=divides_states,
    )
    check_near_brute_force(cluster, workload)


def test_a_stage_over_machines_keeps_to_the_ranks_whichever_machine_comes_last() -> None:
    """The machine of the last place has the last ranks, also where a stage before begins there."""
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), limits=FREE)
    problem = make_problem(cluster, long_job(num_layers=3))
    divided = PlacedStage((Device("a", 0), Device("b", 0)), 2, context_parallel=2)
    stages = PlacedStage((Device("b", 1),), 1), divided
    for order in (stages, (divided, PlacedStage((Device("a", 1),), 1))):
        placement = Placement((PlacedReplica(order, 2),))
        cost = problem.costs.placement(placement)
        plan = bare_plan(problem, Candidate(placement, cost, ""), {})
        validate_plan(plan, cluster)
