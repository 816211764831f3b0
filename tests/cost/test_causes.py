"""The causes of a stage's time: they are its price, told apart."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.causes import causes_of_pieces, stage_causes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.cost.placing import placement_of
from tests.cost.builders import make_cluster, make_workload, place

CLUSTER = make_cluster(("a", gpu_type("A100-80GB"), 2), ("b", gpu_type("L40S"), 2))
"""Real types: those of the builders launch in no time."""
LAYOUTS = ("tp1:3,tp2:1 @4", "tp2:2,tp2(3:1):2 @4")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective", "flash_attention": False},
        {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 96,
            "sequence_parallel": True,
        },
        {"mtp_num_layers": 1},
        {"micro_batch_size": 2, "global_batch_size": 8},
    ],
)
def test_causes_of_pieces_sum_to_the_price(layout: str, changes: dict[str, Any]) -> None:
    """No scaling: the parts themselves reach it, on both stages."""
    costs, replica, rows = priced(layout, changes)
    for index in range(2):
        causes = causes_of_pieces(costs, replica, index, rows)
        price = costs.stage(replica, index, rows)
        assert causes.total_s == pytest.approx(price.times.total_s, rel=1e-12)
        assert stage_causes(costs, replica, index, rows).total_s == pytest.approx(causes.total_s)


def test_small_work_waits_for_the_host_and_large_work_does_not() -> None:
    small, large = (
        causes_of_pieces(*of[:2], 0, of[2])
        for of in (
            priced(LAYOUTS[0], {}),
            priced(LAYOUTS[0], {"hidden_size": 4096, "seq_length": 4096}),
        )
    )
    assert small.launches_s > 0.5 * small.total_s
    assert large.launches_s < 0.1 * large.total_s
    assert large.products_s > 0.5 * large.total_s


def test_recomputation_adds_a_forward_pass_of_each_cause() -> None:
    large = {"hidden_size": 4096, "seq_length": 4096}
    plain, again = (
        causes_of_pieces(*of[:2], 0, of[2])
        for of in (priced(LAYOUTS[1], large), priced(LAYOUTS[1], {**large, "recompute": "full"}))
    )
    # The embedding is not computed again; it has no products.
    assert again.products_s == pytest.approx(plain.products_s * 4 / 3)
    assert again.communication_s == pytest.approx(plain.communication_s * 3 / 2, rel=0.2)


def priced(layout: str, changes: dict[str, Any]) -> tuple[CostModel, PlacedReplica, int]:
    workload = make_workload(**changes)
    costs = CostModel(CLUSTER, workload)
    placement = placement_of(place(layout, workload, CLUSTER), CLUSTER)
    return costs, placement.replicas[0], costs.vocab_rows(placement.widths)
