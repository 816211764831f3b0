"""Exchanges under products: the larger of the two, and what Transformer Engine's pieces leave."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import get_args

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.nvlink import nvlink_curve
from megatron_hetero.cost.memory.working import overlap_buffer_bytes
from megatron_hetero.cost.network.collectives import (
    all_gather_s,
    all_reduce_s,
    end_exchanges,
    reduce_scatter_s,
)
from megatron_hetero.cost.share import TensorShare, even_share, member_shares
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.cost.work.products import Product
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.cost.work.under_products import PartExchange, layer_exchanges
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TensorOverlap
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


def over_nvlink(bytes_per_s: float) -> Link:
    """Return a link whose collectives are priced as tables of NVLink say."""
    return Link(bytes_per_s, 5e-6, nvlink=nvlink_curve(GPU.name))


def sizes(workload: Workload, width: int) -> tuple[float, list[tuple[GpuType, TensorShare]]]:
    share = even_share(workload.model, width)
    tokens = share.num_tokens(workload.model, workload.training)
    return 2.0 * tokens * workload.model.hidden_size, [(GPU, share)]


@pytest.mark.parametrize("width", [2, 8])
def test_a_fast_link_hides_all_but_a_fourth_of_each_forward_scatter(width: int) -> None:
    """What is left is that, and the price of products in pieces."""
    workload, link = job(), Link(1e15, 0.0)
    num_bytes, members = sizes(workload, width)
    parts = layer_exchanges(workload, members, num_bytes, link)
    speed = speed_of(workload.training, GPU).products
    for part, work in zip(parts, (attention_work, mlp_work), strict=True):
        column, row = work(
            workload.model, workload.training, even_share(workload.model, width), True
        ).products
        more = [
            max(0.0, speed.seconds(p._replace(rows=p.rows / n, number=n)) - speed.seconds(p))
            for p, n in ((column, width), (row, 4), (row, width))
        ]
        scatter_s = reduce_scatter_s(num_bytes, width, link)
        assert part.forward_s == pytest.approx(more[0] + more[1] + scatter_s / 4)
        assert part.backward_s == pytest.approx(more[2])


def test_a_slow_link_hides_the_products_instead() -> None:
    """The exchange is what takes the time, less what is computed meanwhile."""
    workload, link, width = job(), Link(1e9, 0.0), 4
    num_bytes, members = sizes(workload, width)
    attention, _ = layer_exchanges(workload, members, num_bytes, link)
    column, row = attention_work(
        workload.model, workload.training, even_share(workload.model, width), True
    ).products
    speed = speed_of(workload.training, GPU).products
    gather_s, scatter_s = (f(num_bytes, width, link) for f in (all_gather_s, reduce_scatter_s))
    whole = [speed.seconds(p) for p in (column, row)]
    cut = [speed.seconds(p._replace(rows=p.rows / 4, number=4)) for p in (column, row)]
    fourth = [max(pair) / 4 for pair in zip(whole, cut, strict=True)]
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
        parts = layer_exchanges(job(kinds), members, num_bytes, link)
        return sum(p.forward_s for p in parts), sum(p.backward_s for p in parts)

    whole = total(*ALL)
    changed = {k: total(*(other for other in ALL if other != k)) for k in ALL}
    assert changed["gather"][0] > whole[0] and changed["gather"][1] > whole[1]
    assert changed["scatter"][0] > whole[0] and changed["scatter"][1] == whole[1]
    # Without their buffers the exchanges of column-parallel layers hide over NCCL.
    assert changed["bulk_dgrad"] == changed["bulk_wgrad"] == whole


def test_the_first_pass_of_full_recompute_gathers_before_its_products() -> None:
    """Transformer Engine overlaps a gather only where gradients are asked for."""
    link, width = Link(200e9, 5e-6), 8
    num_bytes, members = sizes(job(), width)
    kept, again = (
        layer_exchanges(job(recompute=r), members, num_bytes, link)[1] for r in ("none", "full")
    )
    assert again.forward_s > kept.forward_s == again.again_s


def in_turn(num_bytes: float, width: int, link: Link) -> PartExchange:
    gather_s, scatter_s = (f(num_bytes, width, link) for f in (all_gather_s, reduce_scatter_s))
    once_s = gather_s + scatter_s
    return PartExchange(once_s, once_s + gather_s, once_s)


LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip


def with_latents(workload: Workload, **changes: object) -> Workload:
    latents = {**LATENT, **changes}
    return replace(workload, model=replace(workload.model, **latents))  # type: ignore[arg-type]


def test_experts_exchange_in_turn() -> None:
    link, workload = Link(200e9, 5e-6), job()
    plain = in_turn(1e8, 2, link)
    experts = replace(
        workload, model=replace(
            workload.model, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096
        ),
    )  # fmt: skip
    found = layer_exchanges(experts, [(GPU, even_share(experts.model, 2))], 1e8, link)
    assert found[1] == pytest.approx(plain) and found[0] != pytest.approx(plain)


@pytest.mark.parametrize("q_lora_rank", [1536, 0])
def test_latent_attention_gathers_latents_and_scatters_hidden_states(q_lora_rank: int) -> None:
    """Megatron's latents are whole on every rank (`TELinear`, "duplicated"), of its own tokens: the
    two up-projections gather these, and the rotary part of the keys is gathered by itself."""
    link, width, hidden = Link(200e9, 5e-6), 4, 8192
    workload = with_latents(job(), q_lora_rank=q_lora_rank)
    num_bytes, members = sizes(workload, width)
    up, rotary = (q_lora_rank or hidden, 512), (64,)
    gathered_s, up_s, scattered_s = (
        sum(of(num_bytes * size / hidden, width, link) for size in of_sizes)
        for of, of_sizes in (
            (all_gather_s, up + rotary), (all_gather_s, up), (reduce_scatter_s, up + rotary)
        )
    )  # fmt: skip
    output = all_gather_s(num_bytes, width, link), reduce_scatter_s(num_bytes, width, link)
    found, _ = layer_exchanges(workload, members, num_bytes, link)
    forward_s = gathered_s + output[1]
    assert found == pytest.approx((forward_s, output[0] + up_s + scattered_s, forward_s))
    # Without sequence parallelism the gradients of the latents are summed.
    whole = replace(workload, training=replace(workload.training, sequence_parallel=False))
    found, _ = layer_exchanges(whole, members, num_bytes, link)
    summed_s = sum(all_reduce_s(num_bytes * size / hidden, width, link) for size in up)
    reduce_s = all_reduce_s(num_bytes, width, link)
    assert found == pytest.approx((reduce_s, summed_s, reduce_s))


def test_local_layers_that_divide_latents_gather_hidden_states() -> None:
    link = Link(200e9, 5e-6)
    workload = with_latents(job(), divides_latents=True)
    members = [(GPU, even_share(workload.model, 2))]
    found, _ = layer_exchanges(workload, members, 1e8, link)
    assert found == pytest.approx(in_turn(1e8, 2, link))


@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
def test_without_the_flag_column_parallel_layers_hide_their_backward_exchanges(
    shares: tuple[int, ...],
) -> None:
    """The input is gathered again under one product, its gradient scattered under another one: of
    the member that computes least.  Unlike shares hide no more with the flag."""
    link = over_nvlink(50e9)
    workload, (num_bytes, _) = job(() if shares == (1, 1) else ALL), sizes(job(), 2)
    members = [(GPU, share) for share in member_shares(workload.model, 2, shares)]
    speed = speed_of(workload.training, GPU).products
    plain = in_turn(num_bytes, 2, link)
    found = layer_exchanges(workload, members, num_bytes, link)
    for part, work in zip(found, (attention_work, mlp_work), strict=True):
        product_s = min(
            speed.seconds(work(workload.model, workload.training, share, True).products[0])
            for _, share in members
        )
        left_s = sum(
            max(0.0, f(num_bytes, 2, link) - product_s) for f in (all_gather_s, reduce_scatter_s)
        )
        gather_s = all_gather_s(num_bytes, 2, link)
        assert part == pytest.approx((plain.forward_s, gather_s + left_s, plain.forward_s))


def test_without_sequence_parallelism_the_sum_hides_under_the_gradient_of_weights() -> None:
    link = over_nvlink(20e9)
    num_bytes, members = sizes(job(), 4)
    workload = job(())
    workload = replace(workload, training=replace(workload.training, sequence_parallel=False))
    reduce_s = all_reduce_s(num_bytes, 4, link)
    speed = speed_of(workload.training, GPU).products
    found = layer_exchanges(workload, members, num_bytes, link)
    for part, work in zip(found, (attention_work, mlp_work), strict=True):
        column, _ = work(workload.model, workload.training, members[0][1], True).products
        left_s = max(0.0, reduce_s - speed.seconds(column))
        assert 0 < left_s < reduce_s
        assert part == pytest.approx((reduce_s, left_s, reduce_s))


def test_over_other_links_nothing_hides_without_the_flag() -> None:
    """Measured layers show their exchanges in full over PCIe."""
    link, width = Link(20e9, 5e-6), 4
    num_bytes, members = sizes(job(), width)
    for part in layer_exchanges(job(()), members, num_bytes, link):
        assert part == pytest.approx(in_turn(num_bytes, width, link))
    source = price_pieces(job(()), None, members, link, 4096000).source
    assert source is not None
    assert source.communication["head"].backward_s == pytest.approx(
        all_gather_s(num_bytes, width, link) + reduce_scatter_s(num_bytes, width, link)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_head_hides_its_backward_exchanges(sequence_parallel: bool) -> None:
    """A large vocabulary hides all of them; of a small one the rest is left."""
    link, width = over_nvlink(2e9), 4
    workload = job(())
    training = replace(workload.training, sequence_parallel=sequence_parallel)
    workload = replace(workload, training=training)
    num_bytes, members = sizes(workload, width)
    few, many = (
        price_pieces(workload, None, members, link, rows).source for rows in (4096, 4096000)
    )
    assert few is not None and many is not None
    assert many.communication["head"].backward_s == 0
    assert (
        few.communication["head"].forward_s
        == end_exchanges(num_bytes, width, link, sequence_parallel, 4096)[1]
    )
    product = Product(4096, 1024, 8192)
    product_s = speed_of(training, GPU).products.seconds(product)
    exchanges = (all_gather_s, reduce_scatter_s) if sequence_parallel else (all_reduce_s,)
    assert few.communication["head"].backward_s == pytest.approx(
        sum(f(num_bytes, width, link) - product_s for f in exchanges)
    )


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


@pytest.mark.parametrize(
    ("recipe", "of_input", "of_gradient", "agrees"),
    [
        ("tensorwise", 1, 1, True),
        ("delayed", 1, 1, False),
        ("blockwise", 1 + 1 / 32, 2 + 2 / 32, False),
        ("mxfp8", 1 + 1 / 32, 2 + 2 / 32, False),
    ],
)
def test_what_is_gathered_for_products_in_fp8_is_cast_before(
    recipe: str, of_input: float, of_gradient: float, agrees: bool
) -> None:
    """Forward the input is gathered in fp8 and the output summed in bf16; backward the gradient of
    the output and, over PCIe in turn, the input travel in fp8, the input's gradient in bf16."""
    link, width = Link(25e9, 5e-6), 4
    num_bytes, members = sizes(job(), width)
    workload = job((), fp8=True, fp8_recipe=recipe)
    agreed_s = all_reduce_s(4, width, link) if agrees else 0
    of_input_s, of_gradient_s = (
        all_gather_s(num_bytes / 2 * size, width, link) for size in (of_input, of_gradient)
    )
    scatter_s = reduce_scatter_s(num_bytes, width, link)
    forward_s = agreed_s + of_input_s + scatter_s
    for part in layer_exchanges(workload, members, num_bytes, link):
        assert part == pytest.approx(
            (forward_s, agreed_s + of_gradient_s + of_input_s + scatter_s, forward_s)
        )
