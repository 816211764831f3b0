"""The buckets that are priced are those that the runtime makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import layer_tensors, stage_buckets
from megatron_hetero.cost.sync.groups import sync_groups
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.plan.plan import Plan
from tests.schedule.simulator.test_step import placed, three_nodes

ROWS = 1024
PLAIN = {"add_bias_linear": False, "normalization": "RMSNorm", "position_embedding": "rope"}


def plans(tied: bool) -> st.SearchStrategy[Plan]:
    def make(first: int, second: int) -> Plan:
        layout = f"tp1:{first},tp1:{6 - first} @1 | tp1:{second},tp1:{6 - second} @1 | tp1:6 @1"
        devices = ["a:0", "b:0"], ["a:1", "b:1"], ["a:2"]
        return placed(layout, *devices, num_layers=6, tied_embeddings=tied, **PLAIN)

    return st.builds(make, st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=30, deadline=None)
@given(st.booleans().flatmap(plans), st.sampled_from([1, 300_000, 1_500_000, 1 << 40]))
def test_they_are_the_runtimes(plan: Plan, max_elements: int) -> None:
    from megatron_hetero.runtime.gradients.buckets import plan_buckets

    assert plan.workload is not None
    model = plan.workload.model
    placement = placement_of(plan, three_nodes())
    stages = [(r, s) for r, replica in enumerate(plan.replicas) for s in range(len(replica.stages))]
    tables = [shards(model, plan, *stage) for stage in stages]
    theirs = plan_buckets(tables, stages, max_elements)
    ours = stage_buckets(placement, model, ROWS, max_elements)
    assert [b.holders for b in ours] == [tuple(stages[r] for r in b.holders) for b in theirs]
    vectors = 2 * model.hidden_size * model.num_layers
    for a, b in zip(ours, theirs, strict=True):
        elements = 0
        for piece in b.slices:
            shape = piece.shape(tables[b.holders[0]][piece.name])
            elements += shape[0] * (shape[1] if len(shape) > 1 else 1)
        assert abs(a.num_params - elements) <= vectors
    wanted: Counter[object] = Counter()
    for group in sync_groups(placement, model, ROWS):
        wanted[group.holders] += group.num_params
    found: Counter[object] = Counter()
    for bucket in ours:
        found[bucket.holders] += bucket.num_params
    assert found == wanted


@settings(max_examples=20, deadline=None)
@given(st.booleans().flatmap(plans), st.sampled_from(["rope", "learned_absolute"]))
def test_further_tokens_are_priced_alike_in_both_forms(plan: Plan, position: str) -> None:
    """In buckets, and in the planner's quick form: runs of layers."""
    assert plan.workload is not None
    model = replace(plan.workload.model, mtp_num_layers=2, position_embedding=position)
    placement = placement_of(plan, three_nodes())
    found: list[Counter[object]] = []
    for parts in (sync_groups(placement, model, ROWS), stage_buckets(placement, model, ROWS)):
        found.append(Counter())
        for part in parts:
            found[-1][part.holders] += part.num_params
    assert found[0] == found[1]
    assert found[0][((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))] >= ROWS * model.hidden_size


def shards(model: ModelSpec, plan: Plan, r: int, s: int) -> dict[str, object]:
    """The matrices that a rank of tensor-parallel width 1 holds, in the order of Megatron's
    modules; norms are counted with the last matrix of their layer."""
    from megatron_hetero.runtime.parallel.shards import ParameterShard

    stages = plan.replicas[r].stages
    stage = stages[s]
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    words = "embedding.word_embeddings.weight"
    if s == 0:
        shapes[words] = (ROWS, hidden)
    for layer in range(stage.first_layer, stage.first_layer + stage.shape.num_layers):
        at = f"decoder.layers.{layer}."
        shapes[at + "self_attention.linear_proj.weight"] = (hidden, hidden)
        shapes[at + "self_attention.linear_qkv.weight"] = (3 * hidden, hidden)
        shapes[at + "mlp.linear_fc1.weight"] = (ffn, hidden)
        shapes[at + "mlp.linear_fc2.weight"] = (hidden, ffn)
    if s == len(stages) - 1:
        name = words if model.tied_embeddings else "output_layer.weight"
        shapes.setdefault(name, (ROWS, hidden))
    return {
        name: ParameterShard(name, shape, 0, ((0, shape[0]),), True, False)
        for name, shape in shapes.items()
    }


def test_a_layer_is_its_matrices() -> None:
    for tied in (True, False):
        plan = placed("tp1:4 @1", ["a:0"], tied_embeddings=tied)
        assert plan.workload is not None
        model = plan.workload.model
        assert sum(layer_tensors(model)) == layer_params(model, even_share(model, 1))
        assert len(layer_tensors(model)) == 4


def test_each_expert_has_matrices_of_its_own() -> None:
    plan = placed("tp1:4 @1", ["a:0"])
    assert plan.workload is not None
    experts = {"num_experts": 3, "moe_router_topk": 1, "moe_ffn_hidden_size": 64}
    model = replace(plan.workload.model, **experts)
    assert sum(layer_tensors(model)) == layer_params(model, even_share(model, 1))
    num_matrices = 3 if model.gated_mlp else 2
    assert len(layer_tensors(model)) == 3 * num_matrices + 2


def test_wider_groups_fill_a_bucket_later() -> None:
    """The limit is of one rank, and ranks of a group fill their own."""
    shape = {"num_layers": 6, "tied_embeddings": False}
    narrow = placed("tp1:6 @1 | tp1:6 @1", ["a:0"], ["a:1"], **shape)
    wide = placed("tp2:6 @1 | tp2:6 @1", ["a:0", "a:1"], ["b:0", "b:1"], **shape)
    mixed = placed("tp2:6 @1 | tp1:6 @1", ["a:0", "a:1"], ["b:0"], **shape)
    counts = []
    for plan in (narrow, wide, mixed):
        assert plan.workload is not None
        placement = placement_of(plan, three_nodes())
        counts.append(len(stage_buckets(placement, plan.workload.model, ROWS, 2_000_000)))
    assert counts[1] == counts[2] < counts[0]
