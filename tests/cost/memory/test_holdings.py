"""What each device of a plan keeps, as intervals: all of the model, each part as often as held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.memory.holdings import (
    Holdings,
    StagePart,
    StateSizes,
    held_bytes,
    holdings,
    overlap_bytes,
    parts_of_placement,
    parts_of_plan,
    without,
)
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.spec import Workload
from tests.cost.builders import CLUSTER, make_workload, place

WORKLOAD = make_workload(num_layers=4, tied_embeddings=False, position_embedding="rope")
DIVIDED = replace(WORKLOAD, training=replace(WORKLOAD.training, use_distributed_optimizer=True))
LAYOUTS = (
    "tp1:4 @4",
    "tp2:2,tp1:1,tp1:1 @4",
    "tp2(3:1):4 @2 | tp1:1,tp1:3 @2",
    "tp1:2,tp1:2 @3 | tp2:4 @1",
)


def held(layout: str, workload: Workload) -> Holdings:
    return holdings(workload, parts_of_plan(place(layout, workload)))


def covered(found: Holdings, state: str) -> dict[tuple[str, int], float]:
    """How often each tensor is kept, over all devices."""
    total: dict[tuple[str, int], float] = {}
    for kept in found.values():
        for (name, layer, of), intervals in kept.items():
            if of == state:
                size = sum(stop - start for start, stop in intervals)
                total[name, layer] = total.get((name, layer), 0.0) + size
    return total


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workload", [WORKLOAD, DIVIDED])
def test_weights_are_kept_once_by_each_replica(layout: str, workload: Workload) -> None:
    num_replicas = layout.count("|") + 1
    found = covered(held(layout, workload), "weights")
    assert set(found) == {
        *(("attention", i) for i in range(4)),
        *(("mlp", i) for i in range(4)),
        ("embedding", 0),
        ("head", 0),
    }
    assert all(size == pytest.approx(num_replicas) for size in found.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_kept_once_in_all_with_the_distributed_optimizer(layout: str) -> None:
    plain, divided = held(layout, WORKLOAD), held(layout, DIVIDED)
    assert covered(plain, "optimizer") == covered(plain, "weights")
    assert all(size == pytest.approx(1.0) for size in covered(divided, "optimizer").values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_intervals_rise_and_do_not_overlap(layout: str) -> None:
    for kept in held(layout, DIVIDED).values():
        for intervals in kept.values():
            ends = [end for interval in intervals for end in interval]
            assert ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_placement_keeps_what_its_plan_keeps(layout: str) -> None:
    plan = place(layout, WORKLOAD)
    assert parts_of_placement(placement_of(plan, CLUSTER)) == parts_of_plan(plan)


def test_bytes_of_the_whole_model() -> None:
    """On one GPU: weights in bf16, and 12 bytes of states for each parameter."""
    (kept,) = held("tp1:4 @4", WORKLOAD).values()
    states = state_bytes(WORKLOAD.training)
    total = num_parameters(WORKLOAD) * (states.weight + states.optimizer)
    assert held_bytes(StateSizes(WORKLOAD), kept) == pytest.approx(total)
    assert overlap_bytes(StateSizes(WORKLOAD), kept, kept) == pytest.approx(total)
    assert overlap_bytes(StateSizes(WORKLOAD), kept, {}) == 0.0


def test_shares_of_a_group_by_hand() -> None:
    """3 to 1: of eight heads six and two."""
    found = held("tp2(3:1):4 @4", WORKLOAD)
    assert found["a:0"]["attention", 2, "weights"] == ((0.0, 0.75),)
    assert found["a:1"]["attention", 2, "weights"] == ((0.75, 1.0),)
    assert found["a:1"]["embedding", 0, "weights"] == ((0.75, 1.0),)


def test_states_of_two_replicas_by_hand() -> None:
    """One is cut in two: each slice is divided among the two replicas."""
    found = held("tp1:4 @2 | tp2:4 @2", DIVIDED)
    assert found["a:0"]["mlp", 1, "optimizer"] == ((0.0, 0.25), (0.5, 0.75))
    assert found["a:1"]["mlp", 1, "optimizer"] == ((0.25, 0.5),)
    assert found["b:0"]["mlp", 1, "optimizer"] == ((0.75, 1.0),)


def test_tied_words_are_the_embedding_on_both_ends() -> None:
    tied = make_workload(num_layers=4, tied_embeddings=True)
    found = held("tp1:2,tp1:2 @4", tied)
    for kept in found.values():
        assert kept["embedding", 0, "weights"] == ((0.0, 1.0),)
        assert ("head", 0, "weights") not in kept


def test_whole_experts_are_kept_by_their_shares() -> None:
    moe = make_workload(num_layers=2, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256)
    part = StagePart(("x:0", "x:1"), (0, 1), None, 0, (6, 2))
    found = holdings(moe, [[part]])
    assert found["x:0"]["mlp", 0, "weights"] == ((0.0, 0.75),)
    assert found["x:1"]["mlp", 0, "weights"] == ((0.75, 1.0),)
    assert found["x:0"]["attention", 0, "weights"] == ((0.0, 0.5),)


edges = st.lists(st.floats(0, 1), min_size=2, max_size=8, unique=True).map(sorted)


@settings(max_examples=60)
@given(edges, edges)
def test_what_is_left_of_an_interval(one: list[float], own: list[float]) -> None:
    interval = one[0], one[-1]
    pairs = list(zip(own[::2], own[1::2], strict=False))
    left = list(without(interval, pairs))
    for point in [
        (a + b) / 2
        for a, b in zip(sorted([*one, *own]), sorted([*one, *own])[1:], strict=False)
        if a < b
    ]:
        inside = interval[0] <= point <= interval[1]
        taken = any(a <= point <= b for a, b in pairs)
        assert any(a <= point <= b for a, b in left) == (inside and not taken)
    assert list(without((0.0, 1.0), [(0.0, 1.0)])) == []


OVER_REPLICAS = (
    "tp1ep4:4 @1 | tp1ep4:4 @1 | tp1ep4:4 @1 | tp1ep4:4 @1",
    "tp1ep2:2,tp1:2 @2 | tp1ep2:2,tp1:2 @2",
    "tp2ep2etp2:4 @2 | tp2ep2etp2:4 @2",
    "tp4ep2etp1:4 @4",
    "tp1ep2:4 @1 | tp1ep2:4 @1 | tp2ep2:4 @2",
    "tp1ep2:4 @1 | tp1ep2:4 @1 | tp1:3,tp1:1 @2",
)


@pytest.mark.parametrize("layout", OVER_REPLICAS)
@pytest.mark.parametrize("divides", [False, True])
def test_experts_over_replicas_are_kept_once_by_each_group(layout: str, divides: bool) -> None:
    """And a device keeps as much as its memory is priced with."""
    job = make_workload(
        num_layers=4,
        tied_embeddings=False,
        position_embedding="rope",
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=512,
        sequence_parallel=True,
        use_distributed_optimizer=divides,
    )
    plan = place(layout, job)
    found = holdings(job, parts_of_plan(plan))
    placement = placement_of(plan, CLUSTER)
    assert found == holdings(job, parts_of_placement(placement))
    for (name, _), size in covered(found, "optimizer").items():
        if name in ("mlp", "attention") and divides:
            assert size == pytest.approx(1.0)
    costs = CostModel(CLUSTER, job).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    sizes = StateSizes(job)
    for replica in placement.replicas:
        for s, stage in enumerate(replica.stages):
            for device, memory in zip(
                stage.devices, costs.stage_memories(replica, s, rows), strict=True
            ):
                kept = {
                    key: own for key, own in found[device.name].items() if key[2] == "optimizer"
                }
                layers = {key: own for key, own in kept.items() if key[0] in ("mlp", "attention")}
                priced = stage.num_layers * memory.per_layer["optimizer"]
                assert held_bytes(sizes, layers) == pytest.approx(priced, rel=0.02)
