"""Times of the model's pieces on a stage: parts, what divides them, and layers of unlike kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.network.collectives import all_gather_s, reduce_scatter_s
from megatron_hetero.cost.share import member_shares
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.pieces import PieceTimes, modelled_layer, price_pieces
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TokenDispatcher
from tests.cost.builders import FAST, INSIDE, SLOW, make_workload

WORKLOAD = make_workload(hidden_size=1024, seq_length=1024, num_layers=4)
FREE = Link(1e30, 0.0)
MIXED = make_workload(
    hidden_size=1024,
    seq_length=1024,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=512,
    moe_layer_freq=(0, 1, 1, 1),
    sequence_parallel=True,
)


def pieces(
    *gpus: GpuType,
    workload: Workload = WORKLOAD,
    link: Link = INSIDE,
    shares: tuple[int, ...] | None = None,
    context: int = 1,
    context_link: Link | None = None,
) -> PieceTimes:
    members = member_shares(workload.model, len(gpus) // context, shares, context)
    pairs = list(zip(gpus, members, strict=True))
    return price_pieces(workload, None, pairs, link, 1024, context_link)


def test_a_stage_is_its_layers_and_its_ends() -> None:
    found = pieces(FAST)
    for first in (False, True):
        for last in (False, True):
            expected = 3 * found.layer.total_s
            expected += found.embedding.total_s * first + found.head.total_s * last
            expected += found.tied_s * (first and last)
            assert found.stage(3, first, last).total_s == pytest.approx(expected)
    assert found.stage(0, False, False).total_s == 0.0
    assert not found.measured  # there is no profile


def test_one_gpu_communicates_nothing() -> None:
    assert pieces(FAST).communication == PassTimes(0.0, 0.0)
    assert pieces(FAST, link=FREE) == pieces(FAST, link=Link(1.0, 1.0))


@pytest.mark.parametrize("width", [2, 4])
def test_a_group_computes_less_each_and_communicates(width: int) -> None:
    alone, group = pieces(FAST), pieces(*[FAST] * width)
    assert group.communication.forward_s > 0
    free = pieces(*[FAST] * width, link=FREE)
    assert free.layer.total_s < alone.layer.total_s
    computing_s = group.layer.total_s - group.communication.total_s
    assert computing_s == pytest.approx(free.layer.total_s - free.communication.total_s)
    # Each has no less than its part of the work.
    assert width * computing_s >= alone.layer.total_s * (1 - 1e-9)


def test_a_slower_link_makes_only_communication_longer() -> None:
    fast, slow = pieces(FAST, FAST), pieces(FAST, FAST, link=Link(1e9, 1e-4))
    assert slow.layer.total_s - slow.communication.total_s == pytest.approx(
        fast.layer.total_s - fast.communication.total_s
    )
    assert slow.communication.total_s > fast.communication.total_s


def test_a_group_is_as_slow_as_its_slowest_member() -> None:
    mixed, slow = pieces(FAST, SLOW, link=FREE), pieces(SLOW, SLOW, link=FREE)
    assert mixed.layer.forward_s == pytest.approx(slow.layer.forward_s)
    shifted = pieces(FAST, SLOW, link=FREE, shares=(3, 1))
    assert shifted.layer.total_s < mixed.layer.total_s  # most goes to the fast one


def test_a_faster_gpu_is_never_slower() -> None:
    fast, slow = pieces(FAST), pieces(SLOW)
    for piece in ("embedding", "layer", "head"):
        assert getattr(fast, piece).total_s < getattr(slow, piece).total_s


def test_full_recompute_does_the_forward_again() -> None:
    again = replace(WORKLOAD, training=replace(WORKLOAD.training, recompute="full"))
    plain, repeated = pieces(FAST, FAST), pieces(FAST, FAST, workload=again)
    assert repeated.layer.forward_s == plain.layer.forward_s
    assert repeated.layer.backward_s - plain.layer.backward_s == pytest.approx(
        plain.layer.forward_s
    )
    assert repeated.communication.backward_s - plain.communication.backward_s == pytest.approx(
        plain.communication.forward_s
    )


def test_parts_of_a_sequence_wait_for_the_keys_of_others() -> None:
    alone = pieces(FAST)
    near = pieces(FAST, FAST, context=2, context_link=FREE)
    far = pieces(FAST, FAST, context=2, context_link=Link(1e7, 1e-2))
    assert near.layer.total_s < alone.layer.total_s
    assert near.communication.total_s == pytest.approx(0.0)
    assert far.communication.total_s > 0
    waited_s = far.layer.total_s - near.layer.total_s
    assert waited_s == pytest.approx(far.communication.total_s)


def test_keys_that_travel_while_attention_works_are_hidden() -> None:
    """In a ring: what takes no longer than attention costs nothing."""
    found = [
        pieces(FAST, FAST, context=2, context_link=Link(speed, 0.0)).communication.total_s
        for speed in (1e15, 1e13, 1e9, 1e8)
    ]
    assert found[0] == found[1] == 0.0 < found[2] < found[3]


def test_layers_of_unlike_kinds_count_by_their_numbers() -> None:
    found = pieces(FAST, FAST, workload=MIXED)
    sparse, dense = found.kinds
    assert sparse.layer.total_s != dense.layer.total_s
    mean_s = (3 * sparse.layer.total_s + dense.layer.total_s) / 4
    assert found.layer.total_s == pytest.approx(mean_s)
    for counts in ((2, 0), (0, 2), (1, 1)):
        stage = found.with_layers(counts).stage(2, False, False)
        expected = counts[0] * sparse.layer.total_s + counts[1] * dense.layer.total_s
        assert stage.total_s == pytest.approx(expected)
    assert pieces(FAST).with_layers((1, 2)) == pieces(FAST)  # all alike
    assert (found.embedding, found.head) == (sparse.embedding, sparse.head)


def test_a_kind_is_a_model_of_such_layers_alone() -> None:
    found = pieces(FAST, workload=MIXED)
    for kind, own in zip(MIXED.model.kinds, found.kinds, strict=True):
        assert own == pieces(FAST, workload=replace(MIXED, model=kind))


@pytest.mark.parametrize("shared", [0, 256])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("is_dealt", [False, True])
def test_experts_on_one_group_exchange_what_their_dispatcher_sends(
    dispatcher: TokenDispatcher, shared: int, is_dealt: bool
) -> None:
    """Gathered, each token travels once; all-to-all, once for each of its two experts, to all ranks
    that divide an expert, or to the rank that has it.  Nothing is gathered again backward.  A
    shared expert exchanges like any MLP beside them."""
    width, job = 4, replace(MIXED, model=replace(MIXED.model, moe_layer_freq=()))
    model = replace(job.model, moe_shared_expert_intermediate_size=shared)
    training = replace(job.training, token_dispatcher=dispatcher)
    job = Workload(model, training, (), "")
    table = (1,) * width if is_dealt else None
    members = [(FAST, share) for share in member_shares(model, width, expert_shares=table)]
    tokens = 2.0 * 1024 * training.micro_batch_size * 1024
    gather_s, scatter_s = (of(tokens, width, INSIDE) for of in (all_gather_s, reduce_scatter_s))
    if dispatcher == "allgather":
        once_s = gather_s + scatter_s
    elif is_dealt:
        sent = 2 * tokens / width * (width - 1) / width
        once_s = 2 * (INSIDE.latency_s + sent / INSIDE.bytes_per_s)
    else:
        once_s = sum(of(2 * tokens, width, INSIDE) for of in (all_gather_s, reduce_scatter_s))
    attention_s = gather_s + scatter_s
    mlps = 2 if shared else 1
    found = modelled_layer(job, members, INSIDE).communication
    assert found.forward_s == pytest.approx(mlps * attention_s + once_s)
    assert found.backward_s == pytest.approx(mlps * (attention_s + gather_s) + once_s)
