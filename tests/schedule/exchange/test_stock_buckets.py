"""Buckets of stock Megatron by hand, where stages overlap and where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.parameters import further_params, layer_params, routed_params
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import placement_of, with_expert_groups
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.schedule.exchange.stock_buckets import StockBuckets, stock_bucket_elements
from tests.cost.builders import make_workload
from tests.schedule.simulator.test_step import placed, three_nodes

ROWS = 1024
DEVICES = ["a:0", "b:0"], ["a:1", "b:1"]


def buckets(layout: str, rows: int, **changes: Any) -> tuple[ModelSpec, list[tuple[int, int, int]]]:
    """The model, and (stage, parameters, layer) of each bucket."""
    made = placed(layout, *DEVICES, **changes)
    assert made.workload is not None
    model = made.workload.model
    of_stages = StockBuckets(
        placement_of(made, three_nodes()), model, made.workload.training, rows, {}
    )
    return model, [(b.holders[0][1], b.num_params, b.layer) for b, _ in of_stages]


@pytest.mark.parametrize("positions", [ROWS, ROWS - 64])
def test_learned_positions_as_large_as_the_words_end_no_bucket(positions: int) -> None:
    """Only the word embedding does: the positions before it go along with the first layers."""
    model, found = buckets(
        "tp1:2,tp1:2 @4 | tp1:2,tp1:2 @4",
        ROWS,
        overlap_grad_reduce=True,
        position_embedding="learned_absolute",
        max_position_embeddings=positions,
        tied_embeddings=False,
    )
    params = 2 * layer_params(model, even_share(model, 1))
    words = ROWS * model.hidden_size
    assert params + 2 * words < stock_bucket_elements(2)
    assert found[0] == (0, params + positions * model.hidden_size + words, EMBEDDING)
    assert [stage for stage, _, _ in found] == [0, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_of_the_words_has_a_bucket_of_its_own(tied: bool) -> None:
    """Under the distributed optimizer, also where last stages copy it for further tokens alone."""
    model, found = buckets(
        "tp1:2,tp1:2 @4 | tp1:2,tp1:2 @4",
        ROWS,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        tied_embeddings=tied,
        mtp_num_layers=1,
    )
    words = ROWS * model.hidden_size
    assert [size for stage, size, _ in found if stage == 0][-1] == words
    assert words in [size for stage, size, _ in found if stage == 1]
    assert model.copies_words


def test_one_stage_has_the_layers_of_further_tokens_behind_its_own() -> None:
    shape: dict[str, Any] = {"overlap_grad_reduce": True, "tied_embeddings": False}
    plain = buckets("tp1:4 @4 | tp1:4 @4", ROWS, **shape)[1]
    model, found = buckets("tp1:4 @4 | tp1:4 @4", ROWS, **shape, mtp_num_layers=2)
    more = sum(size for _, size, _ in found) - sum(size for _, size, _ in plain)
    assert more == further_params(model, even_share(model, 1))


@pytest.mark.parametrize("apart", [False, True])
def test_experts_of_a_group_on_several_nodes_have_a_ring_for_each_of_its_ranks(apart: bool) -> None:
    """Two context-parallel ranks deal the experts out; of the second replica they are on two nodes,
    so that the second rank's ring takes another path than the first one's."""
    there = (Device("b", 0), Device("c" if apart else "b", 1))
    frame = Placement(
        tuple(
            PlacedReplica((PlacedStage(devices, 4, context_parallel=2),), 2)
            for devices in ((Device("a", 0), Device("a", 1)), there)
        )
    )
    workload = make_workload(4, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)
    of_stages = StockBuckets(
        with_expert_groups(frame, (2, 1)), workload.model, workload.training, ROWS, {}
    )
    found = list(of_stages.of_experts())
    assert sum(bucket.num_params for bucket, _ in found) == 4 * routed_params(workload.model)
    rings = [[g.devices for g in groups] for _, groups in found]
    here = Device("a", 0), Device("a", 1)
    assert rings == ([[here[:1], there[:1]], [here[1:], there[1:]]] if apart else [[here, there]])
