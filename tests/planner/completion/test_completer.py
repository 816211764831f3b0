"""Structures completed: within memory, as fast as can be, and tuned never for the worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Completion, Filled
from megatron_hetero.planner.completion.optimizer_shares import by_room
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.unlike_sizes import mixed
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit, chains_of
from tests.cost.builders import FAST, FREE, GIB, SLOW, make_cluster, make_workload
from tests.planner.completion.boxes import FAR, WORKLOAD, boxes, chain
from tests.planner.naive import parts
from tests.planner.strategies import clusters, workloads


def pipelines_s(problem: Problem, completion: Completion) -> float:
    placement = completion.placement(problem.workload.training.micro_batch_size)
    return problem.costs.placement(placement).pipelines_s


def random_structure(problem: Problem, cuts: list[bool]) -> tuple[Chain, ...]:
    """Single GPUs of all nodes, cut into replicas."""
    units = [Unit(node.name, (i,)) for node in problem.nodes for i in problem.gpus[node.name]]
    made: list[list[Unit]] = [[]]
    for unit, is_cut in zip(units, cuts, strict=False):
        made[-1].append(unit)
        if is_cut:
            made.append([])
    return tuple(tuple(c) for c in made if c)


@settings(max_examples=60)
@given(
    clusters(max_gpus=5),
    workloads(max_layers=6, max_micro_batches=8),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_what_is_completed_fits_and_does_the_whole_batch(
    cluster: Cluster, workload: Workload, cuts: list[bool]
) -> None:
    problem = make_problem(replace(cluster, limits=FREE), workload)
    structure = random_structure(problem, cuts)
    assume(max(map(len, structure)) <= problem.num_layers)
    completer = Completer(problem)
    for size in completer.sizes(len(structure)):
        completion = completer.complete(structure, size)
        if completion is None:
            continue
        placement = completion.placement(workload.training.micro_batch_size)
        assert chains_of(placement) == list(structure)
        assert problem.costs.placement(placement).missing_bytes <= 0
        total = sum(r.num_micro_batches for r in placement.replicas)
        assert total * size == workload.training.global_batch_size
        for replica in placement.replicas:
            assert sum(stage.num_layers for stage in replica.stages) == problem.num_layers
        tuned = completer.tune(completion, 20_000)
        assert problem.costs.placement(tuned.placement(1)).missing_bytes <= 0
        assert pipelines_s(problem, tuned) <= pipelines_s(problem, completion) * (1 + 1e-9)
        # After tuning, seconds are the recurrence's own.
        assert tuned.quick_s == pytest.approx(
            max(r.pipeline_s for r in problem.costs.placement(tuned.placement(1)).replicas)
        )


def test_layers_are_the_best_of_all_splits() -> None:
    problem = make_problem(boxes(between=Link(1e12, 0.0), free=False), WORKLOAD)
    structure = (chain("a0", "b0", "c0"),)
    found = Completer(problem).complete(structure, 1)
    assert found is not None
    costs = problem.costs
    times = [costs.pieces(costs.cluster.node_by_name[n], 1, 1024) for n in ("a", "b", "c")]

    def slowest_s(split: tuple[int, ...]) -> float:
        return max(
            piece.stage(n, i == 0, i == 2).total_s
            for i, (n, piece) in enumerate(zip(split, times, strict=True))
        )

    best_s = min(map(slowest_s, parts(6, 3)))
    assert slowest_s(found.filled[0].layers) == pytest.approx(best_s)
    assert found.filled[0].layers[0] > found.filled[0].layers[1]  # the fast GPU has more


def test_a_size_that_does_not_divide_the_batch_or_leaves_a_replica_idle_is_none() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    completer = Completer(problem)
    assert completer.complete((chain("a0"),), 3) is None
    structure = (chain("a0"), chain("b0"), chain("c0"))
    assert completer.complete(structure, 4) is None  # two micro-batches for three replicas
    assert completer.complete(structure, 2) is not None


def test_what_does_not_fit_is_none() -> None:
    problem = make_problem(boxes(memory_bytes=160 << 20), WORKLOAD)
    completer = Completer(problem)
    assert completer.complete((chain("a0"),), 1) is None
    assert completer.complete((chain("a0", "a1", "b0", "b1", "c0", "c1"),), 1) is not None


def test_sizes_divide_the_batch_and_begin_with_the_jobs() -> None:
    workload = make_workload(num_layers=6, global_batch_size=12, micro_batch_size=2)
    completer = Completer(make_problem(boxes(), workload))
    assert completer.sizes(1) == (2, 1, 3, 4, 6, 12)
    assert completer.sizes(4) == (2, 1, 3)
    given_ = Completer(make_problem(boxes(free=False), workload))
    assert given_.sizes(1) == (2,)


def test_far_links_are_hidden_and_as_given_they_are_not() -> None:
    structure = (chain("a0", "b0"),)
    ahead = Completer(make_problem(boxes(), WORKLOAD)).complete(structure, 1)
    given_ = Completer(make_problem(boxes(), WORKLOAD)).complete(structure, 1, given=True)
    assert ahead is not None and given_ is not None
    counts = ahead.filled[0].counts
    assert counts is not None and counts[0] > 2 and counts[-1] == 1
    assert given_.filled[0].counts is None
    assert given_.is_given and not ahead.is_given
    assert ahead.quick_s < given_.quick_s


def test_tuning_gains_on_a_far_link() -> None:
    """Beside what completion alone makes of it, by the cost model's own recurrence."""
    workload = make_workload(num_layers=12, global_batch_size=32, seq_length=1024)
    problem = make_problem(boxes(between=Link(1e9, 3e-3)), workload)
    completer = Completer(problem)
    structure = (chain("a0", "b0", "c0"), chain("a1", "b1", "c1"))
    found = completer.complete(structure, 1)
    assert found is not None
    tuned = completer.tune(found, 100_000)
    assert pipelines_s(problem, tuned) < 0.99 * pipelines_s(problem, found)
    assert tuned.structure == structure


def test_alike_replicas_are_completed_alike_and_looked_at_once() -> None:
    completer = Completer(make_problem(boxes(), WORKLOAD))
    found = completer.complete((chain("a0", "b0"), chain("a1", "c0")), 1)
    assert found is not None
    assert found.filled[0] is found.filled[1]
    assert found.num_micro_batches == (4, 4)
    before = completer.work
    assert completer.complete((chain("a0", "b1"), chain("a1", "c1")), 1) is not None
    assert completer.work == before  # known from before


def test_a_faster_replica_takes_more_of_the_batch() -> None:
    found = Completer(make_problem(boxes(), WORKLOAD)).complete((chain("a0"), chain("b0")), 1)
    assert found is not None
    assert found.num_micro_batches[0] > found.num_micro_batches[1] >= 1
    assert sum(found.num_micro_batches) == 8


def test_a_placement_says_only_what_is_not_the_jobs_own() -> None:
    option = StageOption(1.0, 2.0, "full", 2)
    filled = Filled((3, 3), (option, replace(option, recompute=None)), (2, 1), 2, 6.0, 3.0)
    completion = Completion((chain("a0", "b0"),), (filled,), (4,), 15.0, False)
    (own,) = completion.placement(2).replicas
    assert own.micro_batch_size is None
    assert own.launch_counts is None  # 2, 1 are 1F1B's own
    assert [s.recompute for s in own.stages] == ["full", None]
    (other,) = replace(completion, filled=(replace(filled, counts=(7, 1)),)).placement(1).replicas
    assert other.micro_batch_size == 2
    assert other.launch_counts == (4, 1)  # no more than micro-batches


def test_states_are_divided_among_the_replicas() -> None:
    """With the distributed optimizer two replicas fit where one does not."""
    workload = replace(
        WORKLOAD, training=replace(WORKLOAD.training, use_distributed_optimizer=True)
    )
    tight = [
        mib
        for mib in range(180, 460, 10)
        if Completer(make_problem(boxes(mib << 20), workload)).complete((chain("a0"),), 1) is None
        and Completer(make_problem(boxes(mib << 20), workload)).complete(
            (chain("a0"), chain("a1")), 1
        )
        is not None
    ]
    assert tight


def test_optimizer_states_go_where_there_is_room() -> None:
    """The small card keeps fewer of them than the roomy one, and so the model fits."""
    small = replace(SLOW, name="SMALL", memory_bytes=int(1.15 * GIB))
    cluster = make_cluster(("a", SLOW, 1), ("b", small, 1), limits=FREE)
    workload = make_workload(8, 1024, 8, use_distributed_optimizer=True)
    problem = make_problem(cluster, workload)
    completer, structure = Completer(problem), (chain("a0"), chain("b0"))
    assert completer.complete(structure, 1) is None
    found = by_room(completer, structure, 1)
    assert found is not None and found.optimizer_shares is not None
    (roomy,), (other,) = found.optimizer_shares
    assert (roomy or 1) > (other or 1)
    assert problem.costs.placement(found.placement(1)).missing_bytes <= 0
    tuned = completer.tune(found, 1000)
    assert tuned.optimizer_shares == found.optimizer_shares
    assert tuned.quick_s <= found.quick_s * (1 + 1e-9)
    # One replica has nobody to share with, and a job without ZeRO keeps all states.
    assert by_room(completer, (chain("a0"),), 1) is None
    plain = make_problem(cluster, make_workload(8, 1024, 8))
    assert by_room(Completer(plain), structure, 1) is None


def test_replicas_take_the_sizes_that_suit_them() -> None:
    """A card with ever more room beside a fast one, in a job that waits for launches: mixed sizes
    are never later than one for all, make up the batch, and are unlike where room is scarce."""
    short = make_workload(2, 512, 24, seq_length=256, per_token_loss=True)
    structure, unlike = (chain("a0"), chain("b0")), set()
    for mib in range(100, 400, 40):
        small = replace(SLOW, name="SMALL", memory_bytes=mib << 20)
        cluster = make_cluster(("a", FAST, 1), ("b", small, 1), between=FAR, limits=FREE)
        completer = Completer(make_problem(cluster, short))
        of_one = [completer.complete(structure, size) for size in completer.sizes(2)]
        fitting = [one for one in of_one if one is not None]
        if not fitting:
            continue
        found = min(fitting, key=lambda one: one.quick_s)
        made = mixed(completer, found)
        assert made.quick_s <= found.quick_s
        sequences = zip(made.num_micro_batches, made.filled, strict=True)
        assert sum(number * filled.size for number, filled in sequences) == 24
        assert completer.tune(made, 1000).quick_s <= made.quick_s * (1 + 1e-9)
        unlike.add(len({filled.size for filled in made.filled}))
    assert unlike == {1, 2}


def test_groups_in_shares_are_completed_as_they_are_priced() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    completer = Completer(problem)
    uneven = Unit("a", (0,), 1, (("b", (0,)),), (3, 1)), Unit("c", (0, 1))
    even = Unit("a", (0,), 1, (("b", (0,)),)), Unit("c", (0, 1))
    assert completer.shape(uneven) != completer.shape(even)
    found = completer.complete((uneven,), 1)
    assert found is not None
    placement = found.placement(1)
    assert [stage.shares for stage in placement.replicas[0].stages] == [(3, 1), None]
    assert tuple(chains_of(placement)) == (uneven,)
    priced = problem.costs.placement(placement).replicas[0]
    assert [s.times.total_s for s in priced.stages] == pytest.approx(
        [option.time_s for option in found.filled[0].options]
    )
