"""Prices of groups and memories, and that like is priced once."""

from __future__ import annotations

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.unit_prices import UnitPrices
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(1e9, 1e-3))
WORKLOAD = make_workload(num_layers=4, global_batch_size=8, seq_length=1024)


def devices(name: str, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(name, i) for i in indices)


def prices(workload: object = WORKLOAD) -> UnitPrices:
    return UnitPrices(CLUSTER, workload)  # type: ignore[arg-type]


def test_like_groups_are_priced_once() -> None:
    own = prices()
    assert own.group_pieces(devices("a", 0, 1), None, 1024) is own.group_pieces(
        devices("a", 2, 3), None, 1024
    )
    node = CLUSTER.nodes[0]
    memory = own.memory(node, 1, True, False, 2, 1024)
    assert own.memory(node, 1, True, False, 2, 1024) is memory
    assert own.memory(node, 1, True, False, 3, 1024) is not memory


def test_an_equal_group_of_one_node_is_its_pieces() -> None:
    own = prices()
    for name in "ab":
        node = CLUSTER.node_by_name[name]
        stage = PlacedStage(devices(name, 0, 1), 4)
        assert own.stage_pieces(stage, 1024) is own.pieces(node, 2, 1024)
    shared = PlacedStage(devices("a", 0, 1), 4, (3, 1))
    assert (
        own.stage_pieces(shared, 1024).layer.total_s
        > own.pieces(CLUSTER.nodes[0], 2, 1024).layer.total_s
    )


def test_a_width_that_does_not_divide_is_priced_by_its_fullest_member() -> None:
    own, node = prices(), CLUSTER.nodes[0]
    three = own.pieces(node, 3, 1024).layer
    assert own.group_pieces(devices("a", 0, 1, 2), (1, 1, 1), 1024).layer == three
    # Of eight heads, three GPUs have three, three and two.
    memories = [own.memory(node, width, False, False, 1, 1024) for width in (2, 3, 4)]
    weights = [memory.per_layer["weights"] for memory in memories]
    assert weights == sorted(weights, reverse=True) and len(set(weights)) == 3


def test_rows_are_padded_for_all_widths() -> None:
    own = prices()
    assert own.vocab_rows([1]) == 1024
    assert own.vocab_rows([2, 3]) == 1536
    assert own.vocab_rows([4]) == 1024
