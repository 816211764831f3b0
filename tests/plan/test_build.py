"""Plans from layouts, and hosts in the one order that binds ranks to places."""

from __future__ import annotations

import pytest
from hypothesis import given

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import canonical_hosts, in_rank_order, plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Layout, Plan, ReplicaShape, StageShape
from megatron_hetero.plan.ranks import rank_table
from tests.plan.strategies import cluster_of, node, place, placed_plans, workload


def test_layers_follow_each_other() -> None:
    plan = plan_from_layout(parse_layout("tp4:20,tp2:8,tp1:4 @12 | tp1:32 @4"))
    assert [[s.first_layer for s in r.stages] for r in plan.replicas] == [[0, 20, 28], [0]]
    assert plan.layout == parse_layout("tp4:20,tp2:8,tp1:4 @12 | tp1:32 @4")


def test_a_layout_with_a_missing_layer_is_refused() -> None:
    with pytest.raises(
        PlanFormatError, match=r"replica 1 covers layers 0-6 of 8; layer 7 is on no stage"
    ):
        plan_from_layout(parse_layout("tp2:5,tp1:3 @12 | tp1:7 @4"), workload())


def test_the_host_of_the_last_place_comes_last() -> None:
    cluster = cluster_of(node("a", 2), node("b", 2), node("c", 2))
    shapes = [
        ReplicaShape((StageShape(2, 4), StageShape(1, 4)), 8),
        ReplicaShape((StageShape(1, 8),), 8),
    ]
    replicas = place(shapes, ["b:1", "b:0", "a:1", "a:0"])
    hosts = canonical_hosts(replicas, cluster)
    assert [(h.node, h.gpu_indices) for h in hosts] == [("b", (1, 0)), ("a", (1, 0))]
    assert in_rank_order(replicas, hosts) == replicas


def test_hosts_come_site_by_site_and_the_site_of_the_last_place_last() -> None:
    """So that a ring in the order of ranks crosses to each site once."""
    cluster = cluster_of(*(node(n, 1, site=s) for n, s in zip("abcd", "xyxy", strict=True)))
    shape = ReplicaShape((StageShape(1, 3), StageShape(1, 3)), 4)
    for last, order in (("a", "dbca"), ("d", "acbd")):
        rest = [f"{name}:0" for name in "abcd" if name != last]
        hosts = canonical_hosts(place([shape, shape], [*rest, f"{last}:0"]), cluster)
        assert sorted(h.node for h in hosts[:2]) == sorted(order[:2])
        assert hosts[-1].node == last


def test_a_stage_over_two_hosts_is_sorted_with_its_shares() -> None:
    cluster = cluster_of(node("a", 2), node("b", 1))
    shape = ReplicaShape((StageShape(3, 8, (5, 3, 1)),), 16)
    replicas = place([shape], ["b:0", "a:1", "a:0"])
    hosts = canonical_hosts(replicas, cluster)
    (replica,) = in_rank_order(replicas, hosts)
    assert [(h.node, h.gpu_indices) for h in hosts] == [("b", (0,)), ("a", (1, 0))]
    assert replica.stages[0].devices == ("b:0", "a:1", "a:0")

    replicas = place([shape], ["b:0", "a:1", "b:1"])
    hosts = canonical_hosts(replicas, cluster_of(node("a", 2), node("b", 2)))
    (replica,) = in_rank_order(replicas, hosts)
    assert replica.stages[0].devices == ("a:1", "b:0", "b:1")
    assert replica.stages[0].shape.shares == (3, 5, 1)


def test_groups_over_two_hosts_are_sorted_whole_with_their_part_of_a_sequence() -> None:
    cluster = cluster_of(node("a", 2), node("b", 2))
    stage = StageShape(2, 8, (5, 3), context_parallel=2, context_shares=(3, 1))
    replicas = place([ReplicaShape((stage,), 16)], ["b:1", "b:0", "a:0", "a:1"])
    hosts = sorted(canonical_hosts(replicas, cluster), key=lambda host: host.node)
    (replica,) = in_rank_order(replicas, hosts)
    sorted_stage = replica.stages[0]
    assert sorted_stage.devices == ("a:0", "a:1", "b:1", "b:0")
    assert sorted_stage.shape.shares == (5, 3)
    assert sorted_stage.shape.context_shares == (1, 3)


@given(placed_plans())
def test_canonical_hosts_bind_every_rank_to_its_device(planned: tuple[Plan, Cluster]) -> None:
    plan, cluster = planned
    validate_plan(plan, cluster)
    table = rank_table(plan)
    assert len(table) == plan.layout.num_devices
    for place_ in table:
        stage = plan.replicas[place_.replica].stages[place_.stage]
        assert stage.devices[place_.tensor_rank] == place_.device
    last = plan.replicas[-1].stages[-1]
    assert table[-1].device == last.devices[-1]


def test_a_plan_of_a_layout_has_nothing_else() -> None:
    layout = Layout((ReplicaShape((StageShape(1, 3),), 2),))
    plan = plan_from_layout(layout)
    assert plan == Plan(plan.replicas)
    assert plan.replicas[0].stages[0].devices == ()
