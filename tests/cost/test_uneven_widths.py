"""Groups of one node in widths that do not divide the model are in the bound of plans that have
one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.kinds import group_widths
from megatron_hetero.bounds.space import why_outside
from megatron_hetero.bounds.step_time import step_time_bound, thorough_bound, work_bound_s
from megatron_hetero.cluster.limits import CHOICES, Limits
from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.widths import uneven_widths
from megatron_hetero.model.spec import Workload
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import all_placements
from tests.planner.strategies import workloads

ONLY_SHARES = Limits(
    memory_reserve_bytes=0, as_given=tuple(choice for choice in CHOICES if choice != "shares")
)


class _AllWidths(CostModel):
    """Lets brute force enumerate groups of every width."""

    def widths(self, node: Node) -> tuple[int, ...]:
        return tuple(sorted({*super().widths(node), *uneven(self, node)}))


def uneven(costs: CostModel, node: Node) -> tuple[int, ...]:
    return uneven_widths(costs.cluster, costs.workload, node)


def with_shares(costs: CostModel, placement: Placement) -> Placement:
    """Groups whose width does not divide the model in shares as equal as can be."""
    nodes = costs.cluster.node_by_name

    def own(stage: PlacedStage) -> PlacedStage:
        is_uneven = stage.width in uneven(costs, nodes[stage.devices[0].node])
        return replace(stage, shares=(1,) * stage.width) if is_uneven else stage

    return Placement(
        tuple(replace(r, stages=tuple(map(own, r.stages))) for r in placement.replicas)
    )


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.booleans(), workloads(max_layers=3, max_micro_batches=3))
def test_no_placement_with_them_is_faster(slow: bool, alone: bool, workload: Workload) -> None:
    nodes = [("a", SLOW if slow else FAST, 3), ("b", FAST, 1)][: 1 if alone else 2]
    costs = CostModel(make_cluster(*nodes, limits=ONLY_SHARES), workload)
    assume(3 in uneven(costs, costs.cluster.nodes[0]))
    bounds_s = [
        bound(costs, uneven=True).step_time_s for bound in (step_time_bound, thorough_bound)
    ]
    bounds_s.append(work_bound_s(costs, uneven=True))
    num_with_shares = 0
    for placement in all_placements(costs.cluster, workload, _AllWidths(costs.cluster, workload)):
        own = with_shares(costs, placement)
        cost = costs.placement(own)
        if cost.missing_bytes <= 0:
            num_with_shares += own.has_shares
            assert why_outside(costs, own, cost) is None
            assert max(bounds_s) <= cost.step_time_s * (1 + 1e-9)
    assume(num_with_shares)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(3, 24),
    st.integers(2, 8),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(1, 5),
)
def test_the_least_of_a_width_is_no_more_than_a_group_takes(
    heads: int, width: int, recompute: str, in_flight: int
) -> None:
    workload = make_workload(
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=64,
        ffn_hidden_size=64 * heads + 64,
        recompute=recompute,
    )
    cluster = make_cluster(("a", FAST, width), limits=ONLY_SHARES)
    costs, node = CostModel(cluster, workload), cluster.nodes[0]
    assume(width in uneven(costs, node))
    assert width in group_widths(costs, node, uneven=True)
    assert width not in group_widths(costs, node, uneven=False)
    devices, shares = tuple(Device("a", i) for i in range(width)), (1,) * width
    rows = costs.vocab_rows([width])
    group = costs.group_pieces(devices, shares, rows)
    least = costs.pieces(node, width, workload.model.vocab_size)
    assert least.layer.total_s <= group.layer.total_s * (1 + 1e-12)
    assert least.head.total_s <= group.head.total_s * (1 + 1e-12)
    assert least.embedding.total_s <= group.embedding.total_s * (1 + 1e-12)

    ahead = PlacedStage((Device("a", 0),), 1)
    stages = [PlacedStage(devices, 2, shares)] + [ahead] * (in_flight - 1)
    memories = costs.stage_memories(PlacedReplica(tuple(stages), 8), 0, rows)
    memory = costs.memory(node, width, True, in_flight == 1, in_flight, workload.model.vocab_size)
    assert memory.peak_bytes(2) <= max(m.peak_bytes(2) for m in memories)
