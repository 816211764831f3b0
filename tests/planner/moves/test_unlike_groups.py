"""Stages joined into one group in unequal shares, where the limits allow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.moves.unlike_groups import _may_be_a_group, in_unlike_parts, joined
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.restrictions.mixture import with_mixed_precisions
from megatron_hetero.planner.units import Structure, chains_of, layers_of
from tests.cost.builders import AS_GIVEN, FAST, FREE, OLD, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=6, global_batch_size=8)
ACROSS = replace(FREE, no_tensor_parallel_across=())


def boxes(limits: Limits = ACROSS, sites: list[str] | None = None) -> Cluster:
    nodes = ("a", FAST, 4), ("b", SLOW, 2)
    return make_cluster(*nodes, limits=limits, sites=sites)


def replica(*stages: tuple[str, int], number: int = 8) -> PlacedReplica:
    return PlacedReplica(
        tuple(
            PlacedStage(tuple(Device(name[0], int(i)) for i in name[1:]), n) for name, n in stages
        ),
        number,
    )


def found(
    *replicas: PlacedReplica, cluster: Cluster | None = None, workload: Workload = WORKLOAD
) -> list[Placement]:
    problem = make_problem(cluster or boxes(), workload)
    placement, shape = Placement(replicas), Completer(problem).shape
    made = joined(problem, tuple(chains_of(placement)), layers_of(placement), shape)
    return [placed(structure, problem.num_micro_batches) for structure in made]


def placed(structure: Structure, num_micro_batches: int) -> Placement:
    """The structure with a layer on every stage but the last of each replica."""
    number = num_micro_batches // len(structure)
    return Placement(
        tuple(
            PlacedReplica(
                tuple(
                    replace(unit.stage, num_layers=7 - len(own) if unit is own[-1] else 1)
                    for unit in own
                ),
                number,
            )
            for own in structure
        )
    )


def test_a_fast_and_a_slow_gpu_become_one_group() -> None:
    made = found(replica(("a0", 4), ("b0", 2)))
    assert made
    for placement in made:
        ((stage,),) = (r.stages for r in placement.replicas)
        assert stage.devices == (Device("a", 0), Device("b", 0))
        assert stage.num_layers == 6
        fast, slow = stage.shares or (0, 0)
        assert fast > slow >= 1  # in shares by speed


def test_a_group_with_a_card_that_lacks_the_precision_is_shared_in_one_that_all_have() -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", OLD, 2), limits=ACROSS)
    # Layers that products fill: of small ones launches count, which both cards take alike.
    wide = make_workload(num_layers=6, hidden_size=2048, seq_length=2048, global_batch_size=8)
    mixed = with_mixed_precisions(wide)
    (made, *_) = found(replica(("a0", 4), ("b0", 2)), cluster=cluster, workload=mixed)
    ((stage,),) = (r.stages for r in made.replicas)
    fast, old = stage.shares or (0, 0)
    assert fast > old >= 1


def test_nothing_is_lost_where_stages_are_joined() -> None:
    whole = replica(("a0", 2), ("a1", 1), ("b0", 2), ("b1", 1))
    made = found(whole)
    assert len(made) > 3
    for placement in made:
        assert list(placement.devices()) == [d for s in whole.stages for d in s.devices]
        assert 1 <= len(placement.replicas[0].stages) < 4


def test_replicas_that_are_alike_change_together() -> None:
    made = found(replica(("a0", 4), ("b0", 2), number=4), replica(("a1", 4), ("b1", 2), number=4))
    assert made
    for placement in made:
        one, other = placement.replicas
        assert len(one.stages) == len(other.stages) == 1
        assert one.stages[0].shares == other.stages[0].shares
        assert other.stages[0].devices == (Device("a", 1), Device("b", 1))


def test_replicas_that_are_not_alike_change_by_themselves() -> None:
    made = found(replica(("a0", 4), ("b0", 2), number=4), replica(("a1", 3), ("a2", 3), number=4))
    assert {tuple(len(r.stages) for r in p.replicas) for p in made} == {(1, 2)}


def test_equal_gpus_are_joined_where_their_number_does_not_divide_the_model() -> None:
    """Three GPUs and eight heads: a group that no other strategy has tried."""
    made = found(replica(("a0", 2), ("a1", 2), ("a2", 2)))
    assert [[s.shares for s in p.replicas[0].stages] for p in made] == [[(1, 1, 1)]]
    # Two or four of them the others have tried.
    assert found(replica(("a0", 3), ("a1", 3))) == []


def test_a_group_in_shares_is_not_joined_again() -> None:
    stages = replica(("a01", 3), ("b0", 3)).stages
    shared = PlacedReplica((replace(stages[0], shares=(3, 1)), stages[1]), 8)
    assert found(shared) == []


@pytest.mark.parametrize(
    ("limits", "sites"),
    [
        (FREE, None),  # no groups over nodes
        (AS_GIVEN, None),  # equal shares, as the job's flags say
        (replace(ACROSS, max_tensor_parallel=1), None),
        (replace(ACROSS, no_tensor_parallel_across=("b",)), None),
        (replace(ACROSS, no_tensor_parallel_across=("sites",)), ["here", "there"]),
        (replace(ACROSS, first_stage_nodes=("a",)), None),
        (replace(ACROSS, last_stage_nodes=("b",)), None),
    ],
)
def test_limits_forbid_groups_over_nodes(limits: Limits, sites: list[str] | None) -> None:
    assert found(replica(("a0", 4), ("b0", 2)), cluster=boxes(limits, sites)) == []


def test_sites_alone_do_not_forbid_groups_of_one_site() -> None:
    limits = replace(ACROSS, no_tensor_parallel_across=("sites",))
    assert found(replica(("a0", 4), ("b0", 2)), cluster=boxes(limits))


@pytest.mark.parametrize(
    ("changes", "width", "allowed"),
    [
        ({}, 6, True),
        ({"num_query_groups": 4}, 4, True),
        ({"num_query_groups": 4}, 5, False),  # a head for each
        ({"ffn_hidden_size": 5}, 6, False),
        ({"sequence_parallel": True}, 4, True),
        ({"sequence_parallel": True}, 3, False),  # 256 tokens do not divide by 3
    ],
)
def test_the_model_allows_as_many_as_it_can_divide(
    changes: dict[str, object], width: int, allowed: bool
) -> None:
    problem = make_problem(boxes(), make_workload(num_layers=6, global_batch_size=8, **changes))
    assert _may_be_a_group(problem, problem.cluster.devices[:width]) == allowed


def test_no_more_than_a_few_are_tried() -> None:
    cluster = make_cluster(
        *[(f"{kind}", gpu, 4) for kind, gpu in (("a", FAST), ("b", SLOW))], limits=ACROSS
    )
    own = replica(*[(f"{'ab'[i % 2]}{i // 2}", 1) for i in range(6)])
    made = found(own, cluster=cluster)
    assert 0 < len(made) <= 16
    # Never more than four stages at once.
    assert min(len(p.replicas[0].stages) for p in made) >= 3


LOCAL = {
    "local_layers": True,
    "flash_attention": False,
    "attention_dropout": 0.0,
    "fused_scores": "divided",
}


def token_shares(
    *replicas: PlacedReplica, cluster: Cluster | None = None, **changes: object
) -> list[list[tuple[int, tuple[int, ...] | None]]]:
    """Of each placement offered that divides sequences in unlike shares, for each stage of its
    first replica the number of groups and their shares."""
    workload = make_workload(num_layers=6, global_batch_size=8, **{**LOCAL, **changes})
    made = found(*replicas, cluster=cluster, workload=workload)
    for placement in made:
        replicas = (
            f"{','.join(str(s.shape) for s in r.stages)} @{r.num_micro_batches}"
            for r in placement.replicas
        )
        validate_plan(plan_from_layout(parse_layout("|".join(replicas)), workload))
    of = [[(s.context_parallel, s.context_shares) for s in p.replicas[0].stages] for p in made]
    return [stages for stages in of if any(shares for _, shares in stages)]


def test_stages_of_unlike_gpus_become_one_that_divides_sequences() -> None:
    ((groups, shares),), *_ = token_shares(replica(("a0", 4), ("b0", 2)))
    assert groups == 2 and shares is not None and shares[0] > shares[1]


def test_a_stage_in_equal_parts_of_sequences_gets_unlike_ones() -> None:
    equal = PlacedStage((Device("a", 0), Device("b", 0)), 6, context_parallel=2)
    ((groups, shares),), *_ = token_shares(PlacedReplica((equal,), 8))
    assert groups == 2 and shares is not None and shares[0] > shares[1]
    alike = replace(equal, devices=(Device("a", 0), Device("a", 1)))
    assert token_shares(PlacedReplica((alike,), 8)) == []


def test_wide_groups_divide_sequences_too() -> None:
    made = token_shares(replica(("a01", 3), ("b01", 3)), sequence_parallel=True)
    assert made and all(groups == 2 for ((groups, _),) in made)
    # Groups of one width only.
    assert token_shares(replica(("a01", 3), ("b0", 3))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"flash_attention": True, "fused_scores": "nowhere"},
        {"fused_scores": "nowhere"},
        {"seq_length": 255},
    ],
)
def test_other_jobs_keep_sequences_in_equal_parts(
    changes: dict[str, object],
) -> None:
    assert token_shares(replica(("a0", 4), ("b0", 2)), **changes) == []


@pytest.mark.parametrize("limits", [AS_GIVEN, replace(ACROSS, first_stage_nodes=("a",))])
def test_limits_keep_sequences_in_equal_parts(limits: Limits) -> None:
    assert token_shares(replica(("a0", 4), ("b0", 2)), cluster=boxes(limits)) == []


def test_three_unlike_gpus_begin_as_one_stage_that_divides_sequences() -> None:
    """Three divide no power of two in equal chunks, so no other strategy has them together."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 1), limits=FREE, between=Link(1e11, 1e-6))
    long = {"seq_length": 16384, "max_position_embeddings": 16384}
    workload = make_workload(num_layers=6, global_batch_size=8, **LOCAL, **long)
    made = list(in_unlike_parts(make_problem(cluster, workload)))
    assert made
    for ((unit,),) in made:
        stage = unit.stage
        assert stage.context_parallel == len(stage.devices) == 3
        fast, other, slow = stage.context_shares or (0, 0, 0)
        assert fast > slow < other
    # All alike have nothing to gain, and Transformer Engine's layers have no such shares.
    alike = make_cluster(("a", FAST, 3), limits=FREE)
    assert not list(in_unlike_parts(make_problem(alike, workload)))
    assert not list(in_unlike_parts(make_problem(cluster, WORKLOAD)))


def test_replicas_begin_in_parts_that_are_alike() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), limits=FREE)
    workload = make_workload(num_layers=6, global_batch_size=8, **LOCAL)
    counts = set()
    for structure in in_unlike_parts(make_problem(cluster, workload)):
        placement = placed(structure, 8)
        counts.add(len(placement.replicas))
        assert sorted(placement.devices()) == sorted(cluster.devices)
        (shape,) = {tuple(str(s.shape) for s in r.stages) for r in placement.replicas}
        assert "cp" in shape[0] and "(" in shape[0]
    assert counts == {1, 2}
