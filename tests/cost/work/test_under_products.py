"""Exchanges under products: the larger of the two, and what Transformer Engine's pieces leave."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import get_args

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.spec import GpuType, Link
from megatron_hetero.cost.memory.working import overlap_buffer_bytes
from megatron_hetero.cost.network.seconds import (
    ring_all_gather_s,
    ring_reduce_scatter_s,
    tensor_parallel_times,
)
from megatron_hetero.cost.share import TensorShare, even_share, member_shares
from megatron_hetero.cost.work.compute import speed_of
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.cost.work.under_products import overlapped_parts
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import TensorOverlap, Workload
from tests.cost.builders import make_workload

GPU = gpu_type("H100-80GB")
MINIMAL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "
    "--max-position-embeddings 256 --global-batch-size 16 --micro-batch-size 2 --bf16"
)
ALL: tuple[TensorOverlap, ...] = ("gather", "scatter", "bulk_dgrad", "bulk_wgrad")


def job(overlap: tuple[TensorOverlap, ...] = ALL, **settings: object) -> Workload:
    workload = make_workload()
    model = replace(
        workload.model, hidden_size=8192, num_attention_heads=64, num_query_groups=64,
        kv_channels=128, ffn_hidden_size=32768, seq_length=4096, max_position_embeddings=4096,
    )  # fmt: skip
    training = replace(
        workload.training, precision="bf16", sequence_parallel=True, tp_comm_overlap=overlap,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(workload, model=model, training=training)


def sizes(workload: Workload, width: int) -> tuple[float, list[tuple[GpuType, TensorShare]]]:
    share = even_share(workload.model, width)
    tokens = share.num_tokens(workload.model, workload.training)
    return 2.0 * tokens * workload.model.hidden_size, [(GPU, share)]


@pytest.mark.parametrize("width", [2, 8])
def test_a_fast_link_hides_all_but_a_fourth_of_each_forward_scatter(width: int) -> None:
    """What is left is that, and the price of products in pieces."""
    workload, link = job(), Link(1e15, 0.0)
    num_bytes, members = sizes(workload, width)
    parts = overlapped_parts(workload, members, num_bytes, link)
    speed = speed_of(workload.training, GPU).products
    for part, work in zip(parts, (attention_work, mlp_work), strict=True):
        column, row = work(
            workload.model, workload.training, even_share(workload.model, width), True
        ).products
        more = [
            max(0.0, speed.seconds(p._replace(rows=p.rows / n, number=n)) - speed.seconds(p))
            for p, n in ((column, width), (row, 4), (row, width))
        ]
        scatter_s = ring_reduce_scatter_s(num_bytes, width, link)
        assert part is not None
        assert part.forward_s == pytest.approx(more[0] + more[1] + scatter_s / 4)
        assert part.backward_s == pytest.approx(more[2])


def test_a_slow_link_hides_the_products_instead() -> None:
    """The exchange is what takes the time, less what is computed meanwhile."""
    workload, link, width = job(), Link(1e9, 0.0), 4
    num_bytes, members = sizes(workload, width)
    attention, _ = overlapped_parts(workload, members, num_bytes, link)
    column, row = attention_work(
        workload.model, workload.training, even_share(workload.model, width), True
    ).products
    speed = speed_of(workload.training, GPU).products
    gather_s, scatter_s = (
        f(num_bytes, width, link) for f in (ring_all_gather_s, ring_reduce_scatter_s)
    )
    whole = [speed.seconds(p) for p in (column, row)]
    cut = [speed.seconds(p._replace(rows=p.rows / 4, number=4)) for p in (column, row)]
    fourth = [max(pair) / 4 for pair in zip(whole, cut, strict=True)]
    assert attention is not None
    assert attention.forward_s == pytest.approx(
        gather_s + fourth[0] - whole[0] + scatter_s + fourth[1] - whole[1]
    )
    assert attention.backward_s == pytest.approx(
        gather_s + fourth[1] - whole[1] + gather_s - whole[0] + scatter_s - whole[0]
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("bandwidth", [5e9, 50e9, 450e9])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_layer_lies_between_its_products_alone_and_both_in_turn(
    width: int, bandwidth: float, recompute: str
) -> None:
    link = Link(bandwidth, 5e-6)
    hidden, plain = (
        price_pieces(job(kinds, recompute=recompute), None, sizes(job(), width)[1], link, 51200)
        for kinds in (ALL, ())
    )
    members = sizes(job(), width)[1]
    alone = price_pieces(job((), recompute=recompute), None, members, Link(1e18, 0.0), 51200)
    for name in ("forward_s", "backward_s"):
        least, own, most = (getattr(p.layer, name) for p in (alone, hidden, plain))
        assert least <= own
        # Products in pieces cost a little more where there is nothing to hide.
        assert own <= most * 1.02


def test_each_switch_shows_its_own_exchange() -> None:
    link, width = Link(200e9, 5e-6), 8
    num_bytes, members = sizes(job(), width)

    def total(*kinds: TensorOverlap) -> tuple[float, float]:
        parts = overlapped_parts(job(kinds), members, num_bytes, link)
        known = [part for part in parts if part is not None]
        return sum(p.forward_s for p in known), sum(p.backward_s for p in known)

    whole = total(*ALL)
    changed = {k: total(*(other for other in ALL if other != k)) for k in ALL}
    assert changed["gather"][0] > whole[0] and changed["gather"][1] > whole[1]
    assert changed["scatter"][0] > whole[0] and changed["scatter"][1] == whole[1]
    for kind in ("bulk_dgrad", "bulk_wgrad"):
        assert changed[kind][0] == whole[0] and changed[kind][1] > whole[1]


def test_the_first_pass_of_full_recompute_gathers_before_its_products() -> None:
    """Transformer Engine overlaps a gather only where gradients are asked for."""
    link, width = Link(200e9, 5e-6), 8
    num_bytes, members = sizes(job(), width)
    kept, again = (
        overlapped_parts(job(recompute=r), members, num_bytes, link)[1]
        for r in ("none", "full")
    )
    assert kept is not None and again is not None
    assert again.forward_s > kept.forward_s == again.again_s


def test_unlike_shares_latent_attention_and_experts_hide_nothing() -> None:
    link, workload = Link(200e9, 5e-6), job()
    unlike = [(GPU, share) for share in member_shares(workload.model, 2, (3, 1))]
    assert overlapped_parts(workload, unlike, 1e8, link) == (None, None)
    latent = replace(
        workload, model=replace(
            workload.model, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64,
            v_head_dim=128,
        ),
    )  # fmt: skip
    assert overlapped_parts(latent, [(GPU, even_share(latent.model, 2))], 1e8, link) == (None, None)
    experts = replace(
        workload, model=replace(
            workload.model, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096
        ),
    )  # fmt: skip
    found = overlapped_parts(experts, [(GPU, even_share(experts.model, 2))], 1e8, link)
    assert found[0] is not None and found[1] is None


def test_without_the_flag_prices_are_those_of_exchanges_in_turn() -> None:
    workload, link, width = job(()), Link(200e9, 5e-6), 4
    num_bytes, members = sizes(workload, width)
    found = price_pieces(workload, None, members, link, 51200).communication
    in_turn = tensor_parallel_times(num_bytes, width, link, True, 1)
    assert found.forward_s == pytest.approx(in_turn.layer_forward_s)
    assert found.backward_s == pytest.approx(in_turn.layer_backward_s)


def test_buffers_are_twelve_activations_of_the_group() -> None:
    workload = job(micro_batch_size=2)
    share = even_share(workload.model, 4)
    assert overlap_buffer_bytes(workload.model, workload.training, share) == (
        12 * 2 * 2 * 4096 * 8192
    )
    fp8 = replace(workload.training, fp8=True)
    assert overlap_buffer_bytes(workload.model, fp8, share) == (8 + 4 * 2) * 2 * 4096 * 8192
    alone = even_share(workload.model, 1)
    assert overlap_buffer_bytes(workload.model, workload.training, alone) == 0


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--tp-comm-overlap --sequence-parallel", ALL),
        ("--tp-comm-overlap", ()),
        ("--sequence-parallel", ()),
        ("--tp-comm-overlap --sequence-parallel --transformer-impl local", ()),
        (
            "--tp-comm-overlap --sequence-parallel --disable-tp-comm-overlap-ag "
            "--tp-comm-overlap-rs-dgrad",
            ("scatter", "bulk_dgrad", "bulk_wgrad", "scatter_dgrad"),
        ),
        ("--tp-comm-overlap --sequence-parallel --no-tp-comm-bulk-wgrad", ALL[:3]),
    ],
)
def test_flags_say_what_is_hidden(flags: str, found: tuple[str, ...]) -> None:
    read = load_workload(None, [*MINIMAL, *flags.split()])
    assert read.training.tp_comm_overlap == found
    assert set(found) <= set(get_args(TensorOverlap))
