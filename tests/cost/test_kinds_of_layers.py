"""Prices of stages whose layers are of unlike kinds: the sum of what each kind costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_hetero.bounds.step_time import step_time_bound_s
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.planner import plan_cluster
from tests.cost.builders import CLUSTER, make_workload, place

PATTERN = (0, 0, 1, 1, 1, 0, 1, 1)


def job(**changes: object) -> Workload:
    experts = {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 1024,
        "moe_shared_expert_intermediate_size": 512,
    }
    given = {"num_layers": 8, "global_batch_size": 16, "sequence_parallel": True} | experts
    return make_workload(**(given | {"moe_layer_freq": PATTERN} | changes))  # type: ignore[arg-type]


def of_kind(workload: Workload, index: int) -> Workload:
    return replace(workload, model=workload.model.kinds[index])


@pytest.mark.parametrize(
    "layout", ["tp2:3,tp2:5 @16", "tp1:2,tp1:3,tp2:3 @16", "tp2(3:1):6,tp2:2 @16"]
)
def test_a_stage_costs_what_its_layers_cost(layout: str) -> None:
    workload = job()
    placement = placement_of(place(layout, workload), CLUSTER)
    (replica,) = placement.replicas
    costs = CostModel(CLUSTER, workload)
    kinds = [CostModel(CLUSTER, of_kind(workload, i)) for i in (0, 1)]
    rows = costs.vocab_rows(placement.widths)
    for s, stage in enumerate(replica.stages):
        first = replica.first_layers[s]
        sparse = sum(PATTERN[first : first + stage.num_layers])
        counts = sparse, stage.num_layers - sparse
        pieces = [of.stage_pieces(stage, rows) for of in kinds]
        ends = pieces[0].stage(0, s == 0, s == len(replica.stages) - 1)
        layers_s = sum(n * p.layer.total_s for n, p in zip(counts, pieces, strict=True))
        assert costs.stage(replica, s, rows).times.total_s == pytest.approx(
            ends.total_s + layers_s, rel=1e-9
        )
        memories = [of.stage_memories(replica, s, rows) for of in kinds]
        for whole, *of_kinds in zip(costs.stage_memories(replica, s, rows), *memories, strict=True):
            for part in ("weights", "gradients", "optimizer", "activations"):
                due = of_kinds[0].base[part]
                due += sum(n * m.per_layer[part] for n, m in zip(counts, of_kinds, strict=True))
                assert whole.parts_bytes(stage.num_layers)[part] == due


def test_a_model_of_one_kind_is_priced_as_ever() -> None:
    """A list that leaves no layer dense is no list."""
    plain = make_workload(num_layers=8, global_batch_size=16)
    assert plain.model.kinds == ()
    assert CostModel(CLUSTER, plain).of_least_layers().workload is plain


@pytest.mark.parametrize("pattern", [PATTERN, (0,) + (1,) * 7, (1, 0) * 4])
def test_a_plan_is_found_and_not_below_its_bound(pattern: tuple[int, ...]) -> None:
    workload = job(moe_layer_freq=pattern)
    plan = plan_cluster(CLUSTER, workload)
    assert plan.estimates is not None
    bound = step_time_bound_s(CostModel(CLUSTER, workload))
    assert 0 < bound <= plan.estimates.step_time_s
    layers = [0]
    for stage in plan.replicas[0].stages:
        layers.append(layers[-1] + stage.shape.num_layers)
    assert all(a < b for a, b in pairwise(layers))


def test_latents_that_a_width_does_not_divide_are_no_width() -> None:
    model: dict[str, object] = {
        "kv_lora_rank": 30, "qk_head_dim": 32, "qk_pos_emb_head_dim": 3, "v_head_dim": 32,
        "divides_latents": True,
    }  # fmt: skip
    node = CLUSTER.nodes[0]
    dividing = make_workload(num_layers=8, global_batch_size=16, **model)  # type: ignore[arg-type]
    whole = make_workload(
        num_layers=8,
        global_batch_size=16,
        **(model | {"divides_latents": False}),  # type: ignore[arg-type]
    )
    assert isinstance(dividing.model, ModelSpec)
    assert CostModel(CLUSTER, dividing).widths(node) == (1,)
    assert CostModel(CLUSTER, whole).widths(node) == (1, 2)
