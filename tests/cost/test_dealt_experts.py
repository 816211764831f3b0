"""Prices of stages that deal whole experts out: parameters, work and memory of each member."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import layer_params, whole_layer_params
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share, largest_fraction, member_shares
from megatron_hetero.cost.work.layer_work import mlp_work
from tests.cost.builders import CLUSTER, FAST, estimate_plan, make_cluster, make_workload, place

JOB: dict[str, Any] = {
    "num_layers": 8,
    "global_batch_size": 16,
    "sequence_parallel": True,
    "num_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 256,
}


@pytest.mark.parametrize("table", [(1, 1), (2, 1), (5, 1)])
def test_the_members_hold_every_expert_once(table: tuple[int, ...]) -> None:
    job = make_workload(**JOB)
    model, training = job.model, job.training
    members = member_shares(model, 2, expert_shares=table)
    assert sum(member.experts for member in members) == 6
    whole = whole_layer_params(model)
    alone = even_share(model, 1)
    held = [layer_params(model, member) - whole for member in members]
    assert sum(held) == layer_params(model, alone) - whole
    assert held[0] >= held[1]
    # The router is on every member; what is routed is divided by the experts.
    work = [mlp_work(model, training, member, True).gemm_flops for member in members]
    router, *products = mlp_work(model, training, alone, True).gemm_flops
    assert sum(map(sum, work)) == pytest.approx(router + sum(products))
    assert largest_fraction(model, members) == max(m.experts for m in members) / 6


def test_a_table_changes_the_estimate_of_its_stage_alone() -> None:
    job = make_workload(**JOB)
    plain, dealt = (
        estimate_plan(place(layout, job), CLUSTER)
        for layout in ("tp2:4,tp2:4 @16", "tp2ep2(2:1):4,tp2:4 @16")
    )
    first, second = (
        dealt.devices[f"a:{i}"].parts_bytes["weights"]
        - plain.devices[f"a:{i}"].parts_bytes["weights"]
        for i in (0, 1)
    )
    assert first > 0 > second and first == -second
    for i in (0, 1):
        assert dealt.devices[f"b:{i}"] == plain.devices[f"b:{i}"]
    assert dealt.step_time_s != plain.step_time_s


def test_prices_of_an_exchange_do_not_depend_on_what_was_priced_before() -> None:
    workload = make_workload(num_experts=6, moe_ffn_hidden_size=2048, num_layers=8)
    cluster = make_cluster(("a", FAST, 4))
    costs = CostModel(cluster, workload)
    even, dealt = (
        placement_of(place(layout, workload, cluster), cluster)
        for layout in ("tp2:8 @2 | tp2:8 @2", "tp2ep2(5:1):8 @2 | tp2ep2(5:1):8 @2")
    )
    costs.placement(even)
    fresh = CostModel(cluster, workload).placement(dealt)
    assert costs.placement(dealt).gradient_sync_s == fresh.gradient_sync_s
