"""Prices of sequences on groups of a described cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.cost.work.profile import PIECES, PointKey, Profile, _shape_key
from megatron_hetero.errors import InfeasiblePlanError, UnsupportedError
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import Workload
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.batch import deal_batch
from megatron_hetero.sequences.deal.dealt import check_deal
from megatron_hetero.sequences.price.token_rates import TokenRates, token_rates
from tests.cost.builders import FAST, OLD, SLOW, make_cluster, make_workload

NEAR = Link(200e9, 2e-6)
NONE_KEPT = KeptFree(0, 0)


def job(**changes: object) -> Workload:
    made = make_workload(num_layers=8, hidden_size=1024)
    return replace(
        made,
        model=replace(made.model, position_embedding="rope"),
        training=replace(
            made.training, precision="bf16", recompute="full", attention_dropout=0.0,
            hidden_dropout=0.0, use_distributed_optimizer=True, **changes,
        ),
    )  # fmt: skip


def whole_model(workload: Workload, gpu: object, length: int) -> tuple[float, float]:
    """Seconds and bytes of one sequence on one GPU, as the planner's own model has them."""
    at = replace(
        workload,
        model=replace(workload.model, seq_length=length),
        training=replace(workload.training, micro_batch_size=1),
    )
    share = even_share(at.model, 1)
    rows = padded_vocab_size(at.model)
    pieces = price_pieces(at, None, [(gpu, share)], NEAR, rows)  # type: ignore[list-item]
    memory = stage_memory(
        at, gpu, share, first=True, last=True, num_in_flight=1, vocab_rows=rows,
        kept_free=NONE_KEPT, holders=StateHolders(4, 4),
    )  # type: ignore[arg-type]  # fmt: skip
    count = at.model.num_layers
    return pieces.stage(count, True, True).total_s, float(memory.peak_bytes(count))


@pytest.mark.parametrize("gpu", [FAST, SLOW], ids=lambda g: g.name)
@pytest.mark.parametrize("length", [512, 20_000, 131_072])
def test_one_gpu_takes_what_the_planners_model_says(gpu: object, length: int) -> None:
    rates = token_rates(job(), gpu, 4, NONE_KEPT)  # type: ignore[arg-type]
    seconds, num_bytes = whole_model(job(), gpu, length)
    found = rates.fixed_s + length * (rates.token_s + rates.pair_s * length / 2)
    # Three rates for a curve: seconds of products grow a little faster than their FLOPs.
    assert found == pytest.approx(seconds, rel=0.012)
    held = gpu.memory_bytes - rates.room_bytes + length * rates.token_bytes  # type: ignore[attr-defined]
    assert held == pytest.approx(num_bytes, rel=1e-3)


def test_attention_with_dropout_keeps_memory_for_pairs() -> None:
    def rates(dropout: float) -> TokenRates:
        training = replace(job().training, precision="fp16", attention_dropout=dropout)
        return token_rates(replace(job(), training=training), OLD, 4, NONE_KEPT)

    # The card is too old for flash attention, not for every kernel that stores no scores.
    assert not rates(0.1).is_fused and rates(0.1).pair_bytes > 0
    assert rates(0.0).pair_bytes == pytest.approx(0.0, abs=1e-6)


def test_measured_times_stretch_modelled_ones() -> None:
    workload = job()
    # The sum of a tied weight's gradients is in no piece that is measured.
    workload = replace(workload, model=replace(workload.model, tied_embeddings=False))
    points = {}
    for piece in PIECES:
        rows = padded_vocab_size(workload.model)
        found = price_pieces(workload, None, [(FAST, even_share(workload.model, 1))], NEAR, rows)
        part = {"embedding": found.embedding, "decoder_layer": found.layer, "head": found.head}
        key = PointKey("FAST", "bf16", 1, piece, "full", False, _shape_key(workload.model))
        slower = PassTimes(2 * part[piece].forward_s, 2 * part[piece].backward_s)
        points[key] = ((workload.training.micro_batch_size, slower),)
    plain = token_rates(workload, FAST, 4, NONE_KEPT)
    measured = token_rates(workload, FAST, 4, NONE_KEPT, Profile(points))
    assert measured.is_measured and not plain.is_measured
    assert measured.token_s == pytest.approx(2 * plain.token_s, rel=1e-6)
    assert measured.pair_s == pytest.approx(2 * plain.pair_s, rel=1e-6)


def test_groups_follow_sites_types_and_nodes() -> None:
    cluster = make_cluster(
        ("a", FAST, 4), ("b", SLOW, 4), ("c", FAST, 4), sites=["x", "x", "y"],
        limits=Limits(memory_reserve_bytes=0, idle_devices=("b:3",)),
    )  # fmt: skip
    groups = cluster_groups(cluster, job())
    assert [d.name for d in groups.devices] == [
        *(f"a:{i}" for i in range(4)), "b:0", "b:1", "b:2", *(f"c:{i}" for i in range(4)),
    ]  # fmt: skip
    spans = {(g.first, g.stop) for g in groups.tree.groups}
    assert {(0, 11), (0, 7), (0, 4), (4, 7), (4, 6), (6, 7), (7, 11)} <= spans
    kinds = {(g.first, g.stop): g.kind for g in groups.tree.groups}
    assert kinds[0, 4] == kinds[7, 11] and kinds[0, 1] == kinds[8, 9] != kinds[4, 5]


def test_unlike_shares_are_faster_than_equal_ones_and_never_slower_than_groups_of_one_type() -> (
    None
):
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(50e9, 1e-5))
    lengths = np.array([16_384.0, 65_536.0])
    workload = job()
    of = {rule: cluster_groups(cluster, workload, rule=rule) for rule in ("balanced", "equal")}  # type: ignore[arg-type]
    best = {
        rule: np.array([p.fixed_s + p.seconds(lengths) for p in g.tree.kinds[0].prices]).min(axis=0)
        for rule, g in of.items()
    }
    assert (best["equal"] > 1.15 * best["balanced"]).all()
    alike = cluster_groups(cluster, workload, only_alike=True)
    assert alike.tree.longest_sequence < of["balanced"].tree.longest_sequence
    batch = [65_536, 9000, 2000, 2000, 700, 30_000]
    mixed, apart = deal_batch(of["balanced"].tree, batch), deal_batch(alike.tree, batch)
    check_deal(of["balanced"].tree, batch, mixed)
    assert mixed.seconds <= apart.seconds * 1.005


def test_a_window_takes_work_from_long_sequences_alone() -> None:
    cluster = make_cluster(("a", FAST, 2))
    full, narrow = (cluster_groups(cluster, job(), window=w).tree for w in (None, 1024))
    lengths = np.array([512.0, 60_000.0])
    one, other = (t.kinds[-1].prices[0].seconds(lengths) for t in (full, narrow))
    assert one[0] == pytest.approx(other[0]) and one[1] > 1.5 * other[1]


def test_what_cannot_be_is_refused() -> None:
    big = make_workload(num_layers=96, hidden_size=8192)
    with pytest.raises(InfeasiblePlanError, match="SLOW cannot hold the whole model"):
        cluster_groups(make_cluster(("b", SLOW, 4)), big)
    with pytest.raises(UnsupportedError, match="no GPU"):
        cluster_groups(make_cluster(("b", OLD, 4)), job())
