"""Expert parallelism in the search: found where it is faster, or alone fits, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.space import why_outside
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.dealt_experts import check_dealt_experts
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.planner import plan_cluster
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.cost.builders import FAST, FREE, GIB, SLOW, make_cluster, make_workload, place

DIVIDED = replace(FREE, as_given=("shares",))


def many_experts(**changes: object) -> Workload:
    """32 narrow experts, of which each token has eight."""
    return make_workload(
        **{
            "num_layers": 8,
            "hidden_size": 1024,
            "global_batch_size": 16,
            "seq_length": 4096,
            "max_position_embeddings": 4096,
            "flash_attention": True,
            "sequence_parallel": True,
            "num_experts": 32,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 512,
            "add_bias_linear": False,
            **changes,
        }
    )


def mixed(limits: Limits = FREE, memory_gib: int = 16) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_gib * GIB) for gpu in (FAST, SLOW))
    return make_cluster(("a", fast, 4), ("b", slow, 4), limits=limits)


def test_many_experts_are_dealt_out_and_the_step_is_shorter() -> None:
    job = many_experts()
    plan, divided = (plan_cluster(mixed(limits, 3), job) for limits in (FREE, DIVIDED))
    validate_plan(plan, mixed(memory_gib=3))
    assert "ep" in format_layout(plan.layout) and "ep" not in format_layout(divided.layout)
    assert plan.estimates is not None and divided.estimates is not None
    assert plan.estimates.step_time_s < 0.98 * divided.estimates.step_time_s
    assert plan.estimates.bound_s is not None
    assert plan.estimates.bound_s <= plan.estimates.step_time_s * (1 + 1e-12)


@pytest.mark.parametrize("num_experts", [3, 8])
def test_experts_with_biases_are_whole_in_every_plan(num_experts: int) -> None:
    """Megatron refuses biases of divided experts, and divides them where nothing is dealt out."""
    workload = many_experts(
        num_experts=num_experts,
        moe_router_topk=1,
        moe_ffn_hidden_size=24576 // num_experts,
        grouped_experts=True,
        add_bias_linear=True,
    )
    found = plan_cluster(mixed(), workload)
    stages = [stage.shape for replica in found.replicas for stage in replica.stages]
    assert {shape.expert_width for shape in stages} == {1}
    check_dealt_experts(found, has_biases=True)
    # Stock Megatron divides experts in a group unless flags say otherwise.
    wide = plan_from_layout(parse_layout("tp2:8 @16"), workload)
    with pytest.raises(UnsupportedError, match="tp2:8 divides each expert among 2 ranks"):
        check_dealt_experts(wide, has_biases=True)
    assert "experts with biases that are divided (etp)" in reasons_not_stock(wide)


def test_a_dense_model_has_nothing_to_deal() -> None:
    job = make_workload(num_layers=8, seq_length=1024, sequence_parallel=True)
    assert "ep" not in format_layout(plan_cluster(mixed(), job).layout)


@pytest.mark.parametrize(
    ("layout", "limits", "why"),
    [
        ("tp4ep4:4,tp4:4 @16", FREE, None),
        ("tp4ep4:4,tp4:4 @16", DIVIDED, "where the search may not"),
        ("tp4ep4(2:1:1:1):4,tp4:4 @16", FREE, "dealt out unequally"),
        ("tp4:4,tp4:4 @16", DIVIDED, None),
    ],
)
def test_the_bound_is_of_plans_that_deal_out_equal_numbers(
    layout: str, limits: Limits, why: str | None
) -> None:
    cluster, job = mixed(limits, 40), many_experts()
    placement = placement_of(place(layout, job, cluster), cluster)
    costs = CostModel(cluster, job)
    cost = costs.placement(placement)
    found = why_outside(costs, placement, cost)
    assert found is None if why is None else found is not None and why in found
    # Outside of it the bound by work alone holds, which experts on any GPU cannot beat.
    assert why_outside(costs, placement, cost, free_groups=True) is None
    bound_s = estimates_of(costs, placement, cost).bound_s
    assert bound_s is not None and 0 < bound_s <= cost.step_time_s
