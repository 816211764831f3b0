"""Movements between plans: exact on small ones, nothing where nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.memory.holdings import (
    StateSizes,
    held_bytes,
    holdings,
    overlap_bytes,
    parts_of_plan,
    without,
)
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.movement import Mover, surviving
from megatron_hetero.cost.parameters import layer_params, stage_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.spec import Workload
from tests.cost.builders import BETWEEN, CLUSTER, INSIDE, make_workload, place

WORKLOAD = make_workload()


def kept_by(layout: str, workload: Workload = WORKLOAD):
    return holdings(workload, parts_of_plan(place(layout, workload)))


def mover(layout: str, store: float | None = None, workload: Workload = WORKLOAD, alive=None):
    kept = kept_by(layout, workload)
    return Mover(CLUSTER, StateSizes(workload), surviving(kept, frozenset(alive or kept)), store)


def layer_bytes(workload: Workload = WORKLOAD) -> int:
    states = state_bytes(workload.training)
    share = even_share(workload.model, 1)
    return layer_params(workload.model, share) * (states.weight + states.optimizer)


def test_devices_keep_weights_and_optimizer_of_their_stage() -> None:
    """But for norms, which members of a group keep whole, those of a layer are what memory says."""
    states = state_bytes(WORKLOAD.training)
    sizes, kept = StateSizes(WORKLOAD), kept_by("tp1:3,tp1:1 @4")
    model = WORKLOAD.model
    params = stage_params(model, even_share(model, 1), 3, True, False, 1024)
    positions = model.max_position_embeddings * model.hidden_size
    expected = (params - positions) * (states.weight + states.optimizer)
    assert held_bytes(sizes, kept["a:0"]) == pytest.approx(expected, rel=1e-3)
    split = kept_by("tp2:3,tp2:1 @4")
    assert held_bytes(sizes, split["a:0"]) == pytest.approx(expected / 2, rel=1e-3)
    assert held_bytes(sizes, split["a:1"]) == held_bytes(sizes, split["a:0"])


def test_a_layer_that_changes_hands_is_fetched_once() -> None:
    movement = mover("tp1:2,tp1:2 @4").to(kept_by("tp1:1,tp1:3 @4"))
    assert movement.moved_bytes == pytest.approx(layer_bytes())
    assert movement.lost_bytes == 0
    assert movement.time_s == pytest.approx(layer_bytes() / INSIDE.bytes_per_s)
    # Between nodes: the third stage, on b, takes a layer of the second, on a.
    movement = mover("tp1:1,tp1:2,tp1:1 @4").to(kept_by("tp1:1,tp1:1,tp1:2 @4"))
    assert movement.moved_bytes == pytest.approx(layer_bytes())
    assert movement.time_s == pytest.approx(layer_bytes() / BETWEEN.bytes_per_s)
    movement = mover("tp1:1,tp1:2,tp1:1 @4", store=1e8).to(kept_by("tp1:1,tp1:1,tp1:2 @4"))
    assert movement.time_s == pytest.approx(layer_bytes() / 1e8)


def test_a_new_replica_fetches_from_the_nearest_holders_in_turn() -> None:
    """Two replicas on a; two GPUs of b become replicas, and a's network sends to both."""
    whole = held_bytes(StateSizes(WORKLOAD), kept_by("tp1:4 @4")["a:0"])
    new = kept_by("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1")
    movement = mover("tp1:4 @2 | tp1:4 @2").to(new)
    assert movement.moved_bytes == pytest.approx(2 * whole)
    # b's second GPU may ask b's first one only after the move: both come over the network.
    assert movement.time_s == pytest.approx(2 * whole / BETWEEN.bytes_per_s)


def test_what_nobody_has_any_more_comes_from_the_store() -> None:
    alive = ["a:0", "b:0", "b:1"]  # the second stage, of one device, is lost
    new = kept_by("tp1:2,tp1:2 @4")
    lost = mover("tp1:2,tp1:2 @4", alive=alive).to(new)
    size = held_bytes(StateSizes(WORKLOAD), new["a:1"])
    # A tied embedding is also on the first stage.
    tied = WORKLOAD.model.tied_embeddings
    assert lost.moved_bytes == pytest.approx(size)
    assert lost.lost_bytes == pytest.approx(2 * layer_bytes()) if tied else pytest.approx(size)
    assert lost.time_s is None
    stored = mover("tp1:2,tp1:2 @4", 1e9, alive=alive).to(new)
    assert stored.time_s == pytest.approx(size / 1e9)


def test_the_distributed_optimizer_divides_states_among_replicas() -> None:
    workload = make_workload(use_distributed_optimizer=True)
    states = state_bytes(workload.training)
    sizes = StateSizes(workload)
    one, two = kept_by("tp1:4 @4", workload), kept_by("tp1:4 @2 | tp1:4 @2", workload)
    whole = held_bytes(sizes, one["a:0"])
    weights = whole * states.weight / (states.weight + states.optimizer)
    assert held_bytes(sizes, two["a:0"]) == pytest.approx(weights + (whole - weights) / 2)
    common = overlap_bytes(sizes, two["a:0"], two["a:1"])
    assert common == pytest.approx(weights)
    movement = mover("tp1:4 @2 | tp1:4 @2", workload=workload).to(one)
    assert movement.moved_bytes == pytest.approx((whole - weights) / 2)


LAYOUTS = st.sampled_from(
    ["tp1:4 @4", "tp2:4 @4", "tp2:1,tp1:3 @4", "tp2:3,tp2:1 @4", "tp1:2,tp1:2 @2 | tp2:4 @2"]
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, LAYOUTS, st.booleans())
def test_moved_and_kept_make_up_all(before: str, after: str, divided: bool) -> None:
    workload = make_workload(use_distributed_optimizer=divided, num_query_groups=8)
    sizes = StateSizes(workload)
    old, new = kept_by(before, workload), kept_by(after, workload)
    movement = mover(before, workload=workload).to(new)
    kept = sum(overlap_bytes(sizes, new[d], old.get(d, {})) for d in new)
    assert movement.moved_bytes + kept == pytest.approx(
        sum(held_bytes(sizes, k) for k in new.values())
    )
    assert movement.lost_bytes == 0 and movement.time_s is not None
    if before == after:
        assert movement.moved_bytes == movement.time_s == 0


def test_intervals_without_others() -> None:
    assert list(without((0.0, 1.0), [])) == [(0.0, 1.0)]
    assert list(without((0.0, 1.0), [(0.25, 0.5)])) == [(0.0, 0.25), (0.5, 1.0)]
    assert list(without((0.0, 1.0), [(0.25, 0.5), (0.75, 1.0)])) == [(0.0, 0.25), (0.5, 0.75)]
    assert list(without((0.5, 1.0), [(0.0, 0.5)])) == [(0.5, 1.0)]
    assert list(without((0.5, 1.0), [(0.0, 1.0)])) == []
    assert list(without((0.0, 0.5), [(0.6, 0.7)])) == [(0.0, 0.5)]


BOXES = """
version: 1
nodes:
  - name: box
    gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]
    link: {bandwidth: 12 GB/s, latency: 15 us}
  - name: desk
    gpus: [{type: RTX-3090, count: 1}, {type: RTX-3060, count: 1}]
    link: {bandwidth: 12 GB/s, latency: 15 us}
links: {between_nodes: {bandwidth: 10 Gb/s, latency: 30 us}}
"""


@pytest.mark.parametrize(
    ("had", "gets", "store", "num_copies", "bytes_per_s"),
    [
        # Half from card 0 and half from card 1: all of it over the slot of card 2.
        (["box:0", "box:1"], ["box:2"], None, 1, 12e9),
        # Card 0, of another type, sends to both others over its slot.
        (["box:0"], ["box:1", "box:2"], None, 2, 12e9),
        # One path leads from machine to machine, whichever of their cards use it.
        (["box:0", "box:1"], ["desk:0", "desk:1"], None, 2, 1.25e9),
        # A machine has one way to the store.
        (["desk:0"], ["box:0", "box:1"], 1e9, 2, 1e9),
    ],
)
def test_unlike_cards_of_a_machine_have_slots_of_their_own_and_one_network(
    had: list[str],
    gets: list[str],
    store: float | None,
    num_copies: int,
    bytes_per_s: float,
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOXES, encoding="utf-8")
    sizes, whole = StateSizes(WORKLOAD), kept_by("tp1:4 @4")["a:0"]
    mover = Mover(load_cluster(path), sizes, dict.fromkeys(had, whole), store)
    movement = mover.to(dict.fromkeys([*had, *gets], whole))
    num_bytes = held_bytes(sizes, whole)
    assert movement.moved_bytes == pytest.approx(len(gets) * num_bytes)
    assert movement.time_s == pytest.approx(num_copies * num_bytes / bytes_per_s, rel=0.05)
