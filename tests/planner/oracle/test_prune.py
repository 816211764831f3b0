"""What exact search leaves out: nothing that fits and is in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import Placement
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.oracle.prune import Pruner, kinds_of, wanted_placements
from megatron_hetero.planner.oracle.structures import all_structures
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Unit
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import all_placements
from tests.planner.strategies import clusters, workloads

EVERYTHING = 10**8
WORKLOAD = make_workload(num_layers=4, global_batch_size=4)


def boxes(memory_bytes: int = 1 << 40) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    return make_cluster(("a", fast, 1), ("b", slow, 2))


def by_shape(problem: Problem, placement: Placement) -> tuple[object, ...]:
    """Equal for placements that differ in a node's equal GPUs and in the order of replicas."""
    return tuple(
        sorted(
            (
                r.num_micro_batches,
                tuple((s.devices[0].node, s.width, s.num_layers) for s in r.stages),
            )
            for r in placement.replicas
        )
    )


@settings(max_examples=15)
@given(
    clusters(max_gpus=3),
    workloads(max_layers=3, max_micro_batches=3),
    st.sampled_from([1.0, 1.2, 2.0]),
)
def test_every_placement_in_time_is_wanted(
    cluster: Cluster, workload: Workload, slack: float
) -> None:
    problem = make_problem(cluster, workload)
    priced = [
        (p, problem.costs.placement(p)) for p in all_placements(cluster, workload, problem.costs)
    ]
    fitting = [(p, c.step_time_s) for p, c in priced if c.missing_bytes <= 0]
    if not fitting:
        return
    limit_s = slack * min(s for _, s in fitting)
    wanted = wanted_placements(problem, limit_s, EVERYTHING)
    assert wanted is not None
    shapes = {by_shape(problem, p) for p in wanted}
    assert {by_shape(problem, p) for p, s in fitting if s <= limit_s} <= shapes
    every = {by_shape(problem, p) for p, _ in priced}
    assert shapes <= every


def test_a_longer_limit_wants_no_fewer() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    sizes = []
    for limit_s in (1e-6, 2e-3, 4e-3, 8e-3, 1.0):
        wanted = wanted_placements(problem, limit_s, EVERYTHING)
        assert wanted is not None
        sizes.append(len(wanted))
    assert sizes[0] == 0 and sizes == sorted(sizes) and sizes[-1] > sizes[1]


def test_with_all_the_time_all_that_fits_is_wanted_once() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    wanted = wanted_placements(problem, 1e9, EVERYTHING)
    assert wanted is not None
    shapes = [by_shape(problem, p) for p in wanted]
    every = {by_shape(problem, p) for p in all_placements(problem.cluster, WORKLOAD)}
    assert set(shapes) == every
    # Replicas that are alike may come with their shares in another order, no placement twice.
    assert len(set(wanted)) == len(wanted)


@pytest.mark.parametrize("memory_mib", [60, 120, 200])
def test_what_lacks_memory_in_every_plan_is_not_wanted(memory_mib: int) -> None:
    problem = make_problem(boxes(memory_mib << 20), WORKLOAD)
    wanted = wanted_placements(problem, 1e9, EVERYTHING)
    roomy = wanted_placements(make_problem(boxes(), WORKLOAD), 1e9, EVERYTHING)
    assert wanted is not None and roomy is not None
    assert len(wanted) < len(roomy)
    shapes = {by_shape(problem, p) for p in wanted}
    for placement in roomy:
        if problem.costs.placement(placement).missing_bytes <= 0:
            assert by_shape(problem, placement) in shapes


def test_efforts_are_kept_to() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    whole = wanted_placements(problem, 1e9, EVERYTHING)
    assert whole is not None
    least = (len(whole) + len(list(all_structures(problem)))) * problem.num_layers
    assert wanted_placements(problem, 1e9, least - 1) is None
    low, high = least - 1, EVERYTHING
    while high - low > 1:
        middle = (low + high) // 2
        found = wanted_placements(problem, 1e9, middle)
        assert found in (None, whole)
        low, high = (middle, high) if found is None else (low, middle)
    assert wanted_placements(problem, 1e9, high + 1) == whole


def test_a_pruner_says_when_it_has_given_up() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    structure = max(all_structures(problem), key=lambda s: sum(map(len, s)))
    pruner = Pruner(problem, 1e9, 3)
    list(pruner.fillings(structure))
    assert pruner.is_over
    enough = Pruner(problem, 1e9, 10**6)
    assert list(enough.fillings(structure))
    assert not enough.is_over


def test_one_gpu_by_hand() -> None:
    """Four micro-batches on one GPU: in time if the limit is their seconds, and not below."""
    problem = make_problem(make_cluster(("a", FAST, 1)), WORKLOAD)
    node = problem.cluster.node_by_name["a"]
    time_s = problem.costs.pieces(node, 1, 1000).stage(4, True, True).total_s
    structure = ((Unit("a", (0,)),),)
    late, just = Pruner(problem, 3.99 * time_s, 100), Pruner(problem, 4 * time_s, 100)
    assert not late.may_hold_it(structure) and just.may_hold_it(structure)
    assert list(late.fillings(structure)) == []
    assert list(just.fillings(structure)) == [(((4,),), (4,))]


def test_kinds_forget_which_gpu_of_a_node_it_is() -> None:
    chain = (Unit("a", (0, 1)), Unit("b", (3,)))
    assert kinds_of(chain) == (("a", 2), ("b", 1))
    assert kinds_of((Unit("a", (2, 3)), Unit("b", (0,)))) == kinds_of(chain)
