"""Prices of programs are those of plans: of like GPUs to rounding; of unlike ones nearly, because a
program says where within a layer they wait for each other."""

from __future__ import annotations

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage
from megatron_hetero.errors import UnsupportedError
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.hap.costed import LayerGroup, layer_prices
from tools.referees.hap.forms import (
    CONTEXT,
    TENSOR,
    TENSOR_AND_SEQUENCE,
    RuntimeForm,
)
from tools.referees.hap.layer import TOGETHER
from tools.referees.hap.prices import Shares, program_bytes, program_s
from tools.referees.hap.search import ProgramSearch
from tools.referees.hap.synthesise import placed_layer_s

CLUSTER = make_cluster(("a", FAST, 1), ("b", SLOW, 1), between=Link(25e9, 5e-6))
ALIKE = make_cluster(("a", FAST, 2))
UNLIKE = 0.02
"""Plans have the groups meet twice in a pass; a program has them wait in every collective."""
LINEAR = 0.02
"""A program's price is linear in the shares, as its linear programme needs; the time of a matrix
product is not, because its factors cross the memory whole."""
UNLIKE += LINEAR
SHAPE = {
    "num_layers": 8, "hidden_size": 2048, "seq_length": 2048, "max_position_embeddings": 2048,
    "num_attention_heads": 16, "num_query_groups": 16, "kv_channels": 128,
}  # fmt: skip
EQUAL: Shares = dict.fromkeys(("columns", "tokens", "elements", "sequences"), (0.5, 0.5))  # type: ignore[arg-type]
SHARES: Shares = {
    "columns": (0.75, 0.25),
    "tokens": (0.75, 0.25),
    "elements": (0.5, 0.5),
    "sequences": (0.5, 0.5),
}


def priced(costs: CostModel, form: RuntimeForm, shares: Shares) -> tuple[float, tuple[float, ...]]:
    """Seconds of a layer in a form at shares, and its bytes on each GPU."""
    place = LayerGroup(costs.cluster.devices, 1, 1, 16, (1e12, 1e12))
    prices = layer_prices(costs, place, TOGETHER)
    found = ProgramSearch(prices, shares, form.allows).best()
    assert found is not None
    return program_s(found.program, prices, shares), program_bytes(found.program, prices, shares)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_costs_what_plans_say(
    recompute: str, gated: bool, sequence_parallel: bool
) -> None:
    workload = make_workload(
        **SHAPE, recompute=recompute, gated_mlp=gated, sequence_parallel=sequence_parallel
    )
    form = TENSOR_AND_SEQUENCE if sequence_parallel else TENSOR
    for cluster, parts, within in ((ALIKE, None, LINEAR), (CLUSTER, (3, 1), UNLIKE)):
        costs = CostModel(cluster, workload)
        shares = dict(EQUAL)
        if parts is not None:
            shares["columns"] = SHARES["columns"]
        found_s, _ = priced(costs, form, shares)
        stage = PlacedStage(cluster.devices, 1, parts)
        assert found_s == pytest.approx(placed_layer_s(costs, stage, 16), rel=within)


def test_context_parallelism_costs_what_plans_say() -> None:
    # Fused attention exchanges in a ring where parts are equal.
    workload = make_workload(**SHAPE, flash_attention=False)
    for cluster, parts, within in ((ALIKE, None, LINEAR), (CLUSTER, (3, 1), UNLIKE)):
        costs = CostModel(cluster, workload)
        found_s, _ = priced(costs, CONTEXT, EQUAL if parts is None else SHARES)
        stage = PlacedStage(cluster.devices, 1, context_parallel=2, context_shares=parts)
        # Biases and norms are summed too.
        assert found_s == pytest.approx(placed_layer_s(costs, stage, 16), rel=within)


def test_memory_is_what_plans_say() -> None:
    """Of a layer in unlike shares, whole optimizer states."""
    costs = CostModel(CLUSTER, make_workload(**SHAPE))
    _, found = priced(costs, TENSOR, SHARES)
    replica = PlacedReplica((PlacedStage(CLUSTER.devices, 8, (3, 1)),), 16)
    memories = costs.stage_memories(replica, 0, costs.vocab_rows((2,)))
    for own, memory in zip(found, memories, strict=True):
        assert own == pytest.approx(memory.bytes_per_layer, rel=2e-3)


def test_other_layers_are_refused_by_name() -> None:
    costs = CostModel(CLUSTER, make_workload(num_experts=4, moe_ffn_hidden_size=512))
    place = LayerGroup(CLUSTER.devices, 1, 1, 16, (1e12, 1e12))
    with pytest.raises(UnsupportedError, match="--num-experts"):
        layer_prices(costs, place, TOGETHER)
