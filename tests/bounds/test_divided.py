"""The bound of plans whose stages divide sequences: below every such plan, and not idle."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.divided import bound_with_context_parallel_s, divided_bound_s
from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.bounds.step_time import WORK_BOUND_RELAXES, work_bound_s
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import shares_tokens
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.divided import divided_structures
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.strategies import cases, clusters


@settings(max_examples=cases(12), deadline=None)
@given(
    data=st.data(),
    cluster=clusters(max_gpus=6, limits=FREE),
    seq_length=st.sampled_from([512, 8192, 65536]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_no_plan_that_divides_sequences_beats_the_bound(
    data: st.DataObject, cluster: Cluster, seq_length: int, flags: tuple[bool, bool, bool]
) -> None:
    num_experts = data.draw(st.sampled_from([0, 4]))
    workload = make_workload(
        data.draw(st.integers(1, 6)),
        global_batch_size=4,
        seq_length=seq_length,
        max_position_embeddings=seq_length,
        flash_attention=flags[0],
        fused_scores="nowhere" if flags[0] or data.draw(st.booleans()) else "divided",
        sequence_parallel=flags[1] or num_experts > 0,
        use_distributed_optimizer=flags[2],
        num_experts=num_experts,
        moe_ffn_hidden_size=256,
        moe_router_topk=1,
        add_bias_linear=False,
    )
    problem = make_problem(cluster, workload)
    starts = divided_structures(problem, inf, 100)
    assume(starts)
    structure = data.draw(st.sampled_from(starts))
    completer = Completer(problem)
    for _ in range(3):
        for size in completer.sizes(len(structure)):
            found = None
            if max(map(len, structure)) <= problem.num_layers:
                found = completer.complete(structure, size)
            if found is None:
                continue
            placement = found.placement(1)
            cost = problem.costs.placement(placement)
            assert cost.missing_bytes <= 0  # what is completed fits
            bound_s = divided_bound_s(problem.costs)
            assert 0 < bound_s <= cost.step_time_s * (1 + 1e-9)
            if placement.has_context_parallel:
                estimates = estimates_of(problem.costs, placement, cost)
                assert estimates.bound_s == pytest.approx(bound_s)
                assert estimates.bound_relaxes == WORK_BOUND_RELAXES
                if shares_tokens(problem.costs):
                    unlike = with_unlike_shares(placement, data)
                    step_s = problem.costs.placement(unlike).step_time_s
                    assert bound_s <= step_s * (1 + 1e-9)
        moved = list(neighbours(problem, structure, completer.shape))
        structure = data.draw(st.sampled_from(moved)) if moved else structure


def with_unlike_shares(placement: Placement, data: st.DataObject) -> Placement:
    """The placement, its stages that divide sequences in shares of any size."""

    def changed(stage: PlacedStage) -> PlacedStage:
        count = stage.context_parallel
        if count == 1:
            return stage
        shares = data.draw(st.lists(st.integers(1, 16), min_size=count, max_size=count))
        return replace(stage, context_shares=tuple(shares) if len(set(shares)) > 1 else None)

    return Placement(
        tuple(replace(r, stages=tuple(map(changed, r.stages))) for r in placement.replicas)
    )


def test_a_long_sequence_divided_evenly_is_near_its_bound() -> None:
    """Attention of a million tokens takes nearly all of a step, and divides evenly."""
    workload = make_workload(
        seq_length=1 << 20,
        max_position_embeddings=1 << 20,
        global_batch_size=1,
        flash_attention=True,
        hidden_size=256,
        recompute="none",
    )
    big = replace(FAST, memory_bytes=1 << 50)
    cluster = make_cluster(("a", big, 4), limits=FREE, inside=Link(1e12, 1e-6))
    problem = make_problem(cluster, workload)
    steps_s = [
        problem.costs.placement(found.placement(1)).step_time_s
        for structure in divided_structures(problem, inf, 100)
        if (found := Completer(problem).complete(structure, 1)) is not None
    ]
    bound_s = work_bound_s(problem.costs, divided=True)
    assert bound_s <= min(steps_s) < 1.02 * bound_s


@pytest.mark.parametrize(("seq_length", "is_faster_fused"), [(16, False), (8192, True)])
def test_the_faster_attention_counts_where_only_divided_sequences_fuse_it(
    seq_length: int, is_faster_fused: bool
) -> None:
    cluster = make_cluster(("a", SLOW, 2), limits=FREE)

    def bound_s(fused_scores: str) -> float:
        length = {"seq_length": seq_length, "max_position_embeddings": seq_length}
        changes = {"flash_attention": False, "fused_scores": fused_scores}
        found = free_groups_bound_s(CostModel(cluster, make_workload(**length, **changes)))
        assert found is not None
        return found

    stored_s, fused_s = bound_s("nowhere"), bound_s("everywhere")
    assert (fused_s < stored_s) == is_faster_fused
    assert bound_s("divided") == min(stored_s, fused_s)


def test_nothing_is_said_where_no_plan_may_divide_sequences() -> None:
    nodes, workload = ("a", FAST, 2), make_workload(seq_length=8192, sequence_parallel=True)
    costs = CostModel(make_cluster(nodes, limits=FREE), workload)
    least_s = divided_bound_s(costs)
    assert 0 < least_s < inf
    assert bound_with_context_parallel_s(costs, 1.01 * least_s) == least_s
    assert bound_with_context_parallel_s(costs, least_s) is None
    further = replace(workload.model, mtp_num_layers=1)
    for other in (
        CostModel(make_cluster(nodes, limits=AS_GIVEN), workload),
        CostModel(make_cluster(("a", FAST, 1), limits=FREE), workload),
        CostModel(make_cluster(nodes, limits=FREE), replace(workload, model=further)),
    ):
        assert bound_with_context_parallel_s(other, 1e9) is None
    mixed = replace(workload.training, mixes_precisions=True)
    unknown = CostModel(costs.cluster, replace(workload, training=mixed))
    assert bound_with_context_parallel_s(unknown, 1e9) == 0.0
