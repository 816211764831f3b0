"""Replicas as the job's flags say: beside all splits of layers, and where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import Placement
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.completion.filled import Filled, placed_replica
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import AS_GIVEN, BETWEEN, FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import parts
from tests.planner.strategies import clusters, workloads

WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)


def problem_of(
    memory_bytes: int = 1 << 40, between: Link = BETWEEN, limits: Limits = AS_GIVEN
) -> Problem:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    nodes = ("a", fast, 2), ("b", slow, 2), ("c", slow, 2)
    return make_problem(make_cluster(*nodes, between=between, limits=limits), WORKLOAD)


def chain(*names: str) -> Chain:
    return tuple(Unit(name[0], tuple(map(int, name[1:]))) for name in names)


def placed(problem: Problem, chains: list[Chain]) -> Placement | None:
    own_flags = OwnFlags(problem)
    filled = [own_flags.nearest(one, len(chains))[1] for one in chains]
    return own_flags.placement(chains, filled)


@settings(max_examples=60)
@given(clusters(max_gpus=4), workloads(max_layers=7, max_micro_batches=6), st.integers(1, 6))
def test_layers_are_the_best_of_all_that_fit(
    cluster: Cluster, workload: Workload, num_replicas: int
) -> None:
    problem = make_problem(cluster, workload)
    units = tuple(Unit(n.name, (i,)) for n in problem.nodes for i in problem.gpus[n.name])
    units = units[: problem.num_layers]
    # So many replicas leave one of them as many micro-batches at most.
    num_replicas = min(num_replicas, problem.num_micro_batches)
    most = problem.num_micro_batches - num_replicas + 1
    costs = problem.costs.sharded_among(num_replicas)
    nodes, last, rows = problem.cluster.node_by_name, len(units) - 1, costs.vocab_rows([1])
    fits, found = OwnFlags(problem).nearest(units, num_replicas)
    assert sum(found.layers) == problem.num_layers and min(found.layers) >= 1
    pieces = [costs.pieces(nodes[u.node], 1, rows) for u in units]
    rooms = [
        costs.memory(
            nodes[u.node], 1, i == 0, i == last, min(len(units) - i, most), rows
        ).max_layers
        for i, u in enumerate(units)
    ]

    def slowest_s(split: tuple[int, ...]) -> float:
        return max(
            piece.stage(n, i == 0, i == last).total_s
            for i, (n, piece) in enumerate(zip(split, pieces, strict=True))
        )

    fitting = [
        split
        for split in parts(problem.num_layers, len(units))
        if all(n <= room for n, room in zip(split, rooms, strict=True))
    ]
    assert fits == bool(fitting)
    if fitting:
        assert slowest_s(found.layers) == pytest.approx(min(map(slowest_s, fitting)))


def test_where_nothing_fits_the_split_that_lacks_least() -> None:
    problem = problem_of(memory_bytes=100 << 20)
    units = chain("a0", "b0", "c0")
    fits, found = OwnFlags(problem).nearest(units)
    assert not fits and OwnFlags(problem).chain(units) is None
    nodes, costs = problem.cluster.node_by_name, problem.costs
    rows = costs.vocab_rows([1])
    memories = [
        costs.memory(nodes[u.node], 1, i == 0, i == 2, 3 - i, rows) for i, u in enumerate(units)
    ]

    def missing(split: tuple[int, ...]) -> int:
        return max(m.peak_bytes(n) - m.capacity_bytes for n, m in zip(split, memories, strict=True))

    assert missing(found.layers) == min(map(missing, parts(6, 3)))


def test_more_stages_than_layers_are_refused() -> None:
    problem = problem_of()
    with pytest.raises(ValueError, match="6 layers"):
        OwnFlags(problem).nearest(chain("a0", "a1", "b0", "b1", "c0", "c1", "c1"))


def test_a_limit_of_layers_by_stage_is_kept() -> None:
    own_flags = OwnFlags(problem_of())
    free = own_flags.chain(chain("a0", "b0"))
    held = own_flags.chain(chain("a0", "b0"), limits=(3, 6))
    assert free is not None and free.layers[0] > 3
    assert held is not None and held.layers == (3, 3)
    assert own_flags.chain(chain("a0", "b0"), limits=(2, 3)) is None


def test_like_chains_are_filled_once() -> None:
    own_flags = OwnFlags(problem_of())
    one = own_flags.chain(chain("a0", "b0"))
    assert own_flags.chain(chain("a1", "c1")) is one
    assert own_flags.chain(chain("b0", "a0")) is not one
    assert own_flags.chain(chain("a0", "b0"), 4) is not one


def test_quick_times_are_lines() -> None:
    filled = Filled((3, 3), (), None, 1, 5.0, 2.0)
    assert filled.quick_time_s(1) == 5.0
    assert filled.quick_time_s(4) == 11.0


def test_quick_times_by_hand_on_one_gpu() -> None:
    """One stage: the first micro-batch takes as long as any other, and no hop."""
    problem = problem_of()
    filled = OwnFlags(problem).chain(chain("a0"))
    assert filled is not None
    node, rows = problem.cluster.node_by_name["a"], problem.costs.vocab_rows([1])
    time_s = problem.costs.pieces(node, 1, rows).stage(6, True, True).total_s
    assert (filled.fill_s, filled.period_s) == pytest.approx((time_s, time_s))


def test_a_placement_shares_the_batch_by_speed() -> None:
    problem = problem_of()
    placement = placed(problem, [chain("a0"), chain("b0")])
    assert placement is not None
    fast, slow = (replica.num_micro_batches for replica in placement.replicas)
    assert fast + slow == 8 and fast > slow >= 1


def test_chains_that_the_limits_forbid_are_none() -> None:
    pinned = problem_of(limits=replace(AS_GIVEN, first_stage_nodes=("a",), max_pipeline_parallel=2))
    assert placed(pinned, [chain("a0", "b0")]) is not None
    assert placed(pinned, [chain("b0", "a0")]) is None
    assert placed(pinned, [chain("a0", "b0", "c0")]) is None


def test_more_replicas_than_micro_batches_are_none() -> None:
    workload = make_workload(num_layers=2, global_batch_size=2)
    problem = make_problem(make_cluster(("a", FAST, 4)), workload)
    units = [chain(f"a{i}") for i in range(3)]
    assert placed(problem, units[:2]) is not None
    assert placed(problem, units) is None


@pytest.mark.parametrize("memory_bytes", [1 << 40, 100 << 20])
def test_given_layers_stay_whether_they_fit_or_not(memory_bytes: int) -> None:
    problem = problem_of(memory_bytes)
    own_flags = OwnFlags(problem)
    chains = [chain("a0", "b0"), chain("c0")]
    filled = [own_flags.keeping(chains[0], (2, 4)), own_flags.keeping(chains[1], (6,))]
    placement = own_flags.placement(chains, filled)
    assert placement is not None
    assert [[s.num_layers for s in r.stages] for r in placement.replicas] == [[2, 4], [6]]
    assert sum(r.num_micro_batches for r in placement.replicas) == 8
    # Kept layers are timed as those found are.
    if (found := own_flags.chain(chains[0])) is not None:
        assert own_flags.keeping(chains[0], found.layers) == found


def test_a_number_of_replicas_that_the_limits_forbid_is_none() -> None:
    problem = problem_of(limits=replace(AS_GIVEN, num_replicas=2))
    assert placed(problem, [chain("a0")]) is None
    assert placed(problem, [chain("a0"), chain("b0")]) is not None


def test_a_replica_from_its_parts() -> None:
    made = placed_replica(chain("a01", "b0"), (4, 2), 5)
    assert [len(s.devices) for s in made.stages] == [2, 1]
    assert [s.num_layers for s in made.stages] == [4, 2]
    assert made.num_micro_batches == 5
    with pytest.raises(ValueError, match="shorter"):
        placed_replica(chain("a01", "b0"), (4,), 5)
