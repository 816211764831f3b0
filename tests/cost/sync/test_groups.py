"""Stages that exchange gradients: each parameter once, with all that hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.parameters import embedding_params, layer_params, routed_params
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import MAX_BUCKET_ELEMENTS, layer_tensors
from megatron_hetero.cost.sync.groups import (
    SyncGroup,
    buffers_of,
    groups_of,
    mean_bucket_params,
    sync_groups,
    witness_of,
)
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.spec import ModelSpec
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, place

WORKLOAD = make_workload(num_layers=8, tied_embeddings=False, position_embedding="rope")
UNTIED = WORKLOAD.model
TIED = make_workload(num_layers=8).model
PER_LAYER = layer_params(UNTIED, even_share(UNTIED, 1))
WORDS = 1024 * 512


def replica(*layers: int, widths: tuple[int, ...] = (), node: str = "a") -> PlacedReplica:
    widths = widths or (1,) * len(layers)
    stages, start = [], 0
    for n, width in zip(layers, widths, strict=True):
        devices = tuple(Device(node, start + i) for i in range(width))
        stages.append(PlacedStage(devices, n))
        start += width
    return PlacedReplica(tuple(stages), 4)


def groups(model: ModelSpec, *replicas: PlacedReplica) -> list[SyncGroup]:
    return list(sync_groups(Placement(replicas), model, 1024))


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, 7), max_size=4)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, 8], strict=True))


FURTHER = [replace(model, mtp_num_layers=n) for model in (UNTIED, TIED) for n in (1, 2)]
"""Models that predict further tokens: their last stages embed the tokens once more."""


@given(st.lists(splits(), min_size=2, max_size=4), st.sampled_from([UNTIED, TIED, *FURTHER]))
def test_every_parameter_is_exchanged_once_by_all_that_hold_it(
    layouts: list[tuple[int, ...]], model: ModelSpec
) -> None:
    replicas = [replica(*layers) for layers in layouts]
    found = groups(model, *replicas)
    norm = 2 * 512  # the last one is not exchanged here: it is small
    workload = replace(WORKLOAD, model=model)
    assert sum(g.num_params for g in found) == num_parameters(workload) - norm
    ends = {tuple((r, s) for r, own in enumerate(replicas) for s in {0, len(own.stages) - 1})}
    by_holders = {group.holders: group.num_params for group in found if not group.num_layers}
    assert not model.copies_words or ends <= by_holders.keys()
    for group in found:
        if not group.num_layers:
            continue
        layers = range(group.first_layer, group.first_layer + group.num_layers)
        for r, s in group.holders:
            first = replicas[r].first_layers[s]
            own = range(first, first + replicas[r].stages[s].num_layers)
            assert set(layers) <= set(own)
        assert [r for r, _ in group.holders] == list(range(len(replicas)))
    runs = [g for g in found if g.num_layers]
    covered = [n for g in runs for n in range(g.first_layer, g.first_layer + g.num_layers)]
    assert sorted(covered) == list(range(8))
    starts = [g.first_layer for g in runs]
    assert starts == sorted(starts, reverse=True)  # deep layers first


def test_runs_by_hand() -> None:
    """3 + 5 beside 4 + 4 layers: runs of 3, of 1 and of 4."""
    head, deep, middle, first, words = groups(UNTIED, replica(3, 5), replica(4, 4))
    assert head == SyncGroup(((0, 1), (1, 1)), WORDS, 8)
    assert deep == SyncGroup(((0, 1), (1, 1)), 4 * PER_LAYER, 4, 4)
    assert middle == SyncGroup(((0, 1), (1, 0)), PER_LAYER, 3, 1)
    assert first == SyncGroup(((0, 0), (1, 0)), 3 * PER_LAYER, 0, 3)
    assert words == SyncGroup(((0, 0), (1, 0)), WORDS)


def test_further_tokens_by_hand() -> None:
    """Both ends hold the words, and learned positions; last stages the layers behind their own."""
    model = replace(UNTIED, mtp_num_layers=1, position_embedding="learned_absolute")
    behind, *runs, before = groups(model, replica(3, 5), replica(4, 4))
    # A layer, the product that joins token and state, and three norms.
    further = PER_LAYER + 2 * 512 * 512 + 3 * 2 * 512
    assert behind == SyncGroup(((0, 1), (1, 1)), WORDS + further, 8)
    assert [run.num_params for run in runs] == [4 * PER_LAYER, PER_LAYER, 3 * PER_LAYER]
    assert before == SyncGroup(((0, 0), (0, 1), (1, 0), (1, 1)), WORDS + 256 * 512)
    # One pipeline exchanges its copies.
    (alone,) = groups(replace(UNTIED, mtp_num_layers=1), replica(4, 4))
    assert alone == SyncGroup(((0, 0), (0, 1)), WORDS)


def test_learned_positions_travel_with_the_first_layers() -> None:
    model = replace(TIED, tied_embeddings=False)
    _, run, _ = groups(model, replica(8), replica(8))
    each = layer_params(model, even_share(model, 1))
    assert run.num_params == 8 * each + embedding_params(model, 1, 0)
    assert embedding_params(model, 1, 0) == 256 * 512


def test_one_replica_exchanges_its_tied_words_alone() -> None:
    assert groups(UNTIED, replica(4, 4)) == []
    (words,) = groups(TIED, replica(4, 4))
    assert words == SyncGroup(((0, 0), (0, 1)), WORDS)
    assert groups(TIED, replica(8)) == []


def test_context_parallel_groups_hold_the_same_and_exchange() -> None:
    two = PlacedStage((Device("a", 0), Device("a", 1)), 8, context_parallel=2)
    found = groups(UNTIED, PlacedReplica((two,), 4))
    assert [g.holders for g in found] == [((0, 0),)] * 3
    placement = Placement((PlacedReplica((two,), 4),))
    halves = groups_of(placement, ((0, 0),))
    assert [half.devices for half in halves] == [(Device("a", 0),), (Device("a", 1),)]


def test_like_replicas_have_one_witness() -> None:
    placement = Placement(
        (
            replica(4, 4),
            replica(4, 4, node="b"),
            replica(4, 4, widths=(2, 1)),
            replica(5, 3),
            replica(5, 3),
        )
    )
    assert witness_of(placement) == [0, 0, 2, 3, 3]


def test_buffers_by_hand() -> None:
    """Of a bucket divided into four sets of ranks a group of four has one each, in place; a single
    GPU packs all four."""
    placement = Placement((replica(8, widths=(4,)), replica(8), replica(8, widths=(2,))))
    rooms = {(0, 0): 4000, (1, 0): 1000, (2, 0): 2000}

    def found(sets: int, is_packed: bool, is_received: bool) -> dict[tuple[int, int], float]:
        return buffers_of(
            placement, rooms, sets, 100.0, is_packed=is_packed, is_received=is_received
        )

    assert found(4, False, False) == {(1, 0): 4 * 0.1, (2, 0): 2 * 0.05}
    assert found(4, False, True) == {(0, 0): 0.025, (1, 0): 4 * 0.2, (2, 0): 2 * 0.1}
    assert found(1, False, False) == {}
    assert found(1, True, True) == {(0, 0): 0.05, (1, 0): 0.2, (2, 0): 0.1}


@pytest.mark.parametrize("sets", [1, 2, 4])
def test_a_mean_bucket_is_nearly_full(sets: int) -> None:
    """Of whole tensors: it lacks less than the largest of them."""
    large = make_workload(hidden_size=4096, num_attention_heads=32, num_query_groups=32).model
    large = replace(large, kv_channels=128)
    mean, limit = mean_bucket_params(large, sets), MAX_BUCKET_ELEMENTS * sets
    assert limit - max(layer_tensors(large)) <= mean <= limit


def test_a_tensor_larger_than_a_bucket_is_one() -> None:
    huge = make_workload(hidden_size=32768, num_attention_heads=256, num_query_groups=256).model
    huge = replace(huge, kv_channels=128)
    tensors = layer_tensors(huge)
    assert min(tensors) > MAX_BUCKET_ELEMENTS
    assert min(tensors) <= mean_bucket_params(huge, 1) <= max(tensors)


def test_small_tensors_fill_the_bucket_by_hand() -> None:
    """Tensors of a layer come in turn until the next one does not fit."""
    model = UNTIED
    tensors, limit = layer_tensors(model), MAX_BUCKET_ELEMENTS
    size, place, sizes = 0, 0, []
    while len(sizes) < 16:
        tensor = tensors[place % len(tensors)]
        if size + tensor > limit:
            sizes.append(size)
            size = 0
        size += tensor
        place += 1
    found = mean_bucket_params(model, 1)
    assert found == pytest.approx(sum(sizes) / 16)


def test_each_part_of_dealt_experts_is_exchanged_by_its_own_holders() -> None:
    job = make_workload(8, num_experts=4, moe_ffn_hidden_size=256, global_batch_size=8)
    pair = "tp1ep2:5,tp1:3 @2"
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4))
    placement = placement_of(place(" | ".join([pair] * 4), job, cluster), cluster)
    dealt = [g for g in sync_groups(placement, job.model, 1024) if g.num_layers]
    experts = 5 * routed_params(job.model)
    whole = 3 * layer_params(job.model, even_share(job.model, 1))
    dense = 5 * layer_params(job.model, even_share(job.model, 1)) - experts
    first, last = ([(r, s) for r in range(4)] for s in (0, 1))
    positions = embedding_params(job.model, 1, 0)
    assert {g.holders: g.num_params for g in dealt} == {
        tuple(last): whole,
        tuple(first[::2]): experts // 2,
        tuple(first[1::2]): experts // 2,
        tuple(first): dense + positions,
    }
    assert witness_of(placement) == [0, 1, 0, 1]
