"""Exchanges of a tensor-parallel group under products (`--tp-comm-overlap`), as Transformer Engine
has them.

Which exchange hides under which product, and in how many pieces, is `initialize_ub`'s default
(`transformer_engine/pytorch/module/base.py`, 2.20) and Megatron's flags:

- forward, the inputs of the column-parallel products (qkv, fc1) are gathered in a ring: as many
  products as ranks, each while the next piece travels.  So are backward the gradients of the
  row-parallel outputs (proj, fc2), under the product for the input's gradient;
- forward, the outputs of the row-parallel products are reduced and scattered in a pipeline of four:
  the last fourth hides nowhere;
- backward, a column-parallel layer gathers its input again under the product for the input's
  gradient, and scatters the sum of these under the product for the weight's: each is one piece.

An exchange takes part of the multiprocessors and of the memory's bandwidth from the product that
hides it, which is not priced.  `--tp-comm-overlap-cfg` can choose other methods; these are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hetero.cluster.spec import GpuType, Link
from megatron_hetero.cost.network.seconds import ring_all_gather_s, ring_reduce_scatter_s
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import PassTimes, speed_of
from megatron_hetero.cost.work.layer_work import WorkOf, attention_work, mlp_work
from megatron_hetero.cost.work.products import Product
from megatron_hetero.model.spec import TensorOverlap, Workload

_PIPELINE = 4
"""Pieces of a pipelined reduce-scatter (`num_splits` of `initialize_ub`)."""


class PartExchange(NamedTuple):
    """Seconds of a half of a layer (attention, or the MLP) beyond those of its products.

    `again_s`: of a forward pass that is recomputed.  It may overlap where the first one, without
    gradients, does not.
    """

    forward_s: float
    backward_s: float
    again_s: float


def overlapped_parts(
    workload: Workload,
    members: Sequence[tuple[GpuType, TensorShare]],
    num_bytes: float,
    link: Link,
) -> tuple[PartExchange | None, PartExchange | None]:
    """Time the exchanges of attention and of the MLP where the job hides them under products; None
    of a part where it does not.

    Megatron switches the overlap off for layers with other products than those that Transformer
    Engine has buffers for: latent attention.  Experts have none.

    Args:
        workload: the job.
        members: type and share of each GPU of the group.
        num_bytes: of the activation of one micro-batch.
        link: the slowest inside the group.
    """
    model, kinds = workload.model, workload.training.tp_comm_overlap
    # No overlap for unlike shares, a group of one, or products without buffers.
    shares = {share for _, share in members}
    if not kinds or len(shares) > 1 or members[0][1].width == 1 or model.kv_lora_rank:
        return None, None
    attention = _part(workload, members, attention_work, num_bytes, link)
    if model.num_experts:
        return attention, None
    return attention, _part(workload, members, mlp_work, num_bytes, link)


def _part(
    workload: Workload,
    members: Sequence[tuple[GpuType, TensorShare]],
    work_of: WorkOf,
    num_bytes: float,
    link: Link,
) -> PartExchange:
    """Time the exchanges of a column-parallel product and the row-parallel one behind it."""
    # Seconds of both collectives by themselves, and the two products that may hide them.
    training, width = workload.training, members[0][1].width
    kinds = frozenset(training.tp_comm_overlap)
    gather_s = ring_all_gather_s(num_bytes, width, link)
    scatter_s = ring_reduce_scatter_s(num_bytes, width, link)
    column, row = _products(workload, members[0][1], work_of)

    def seconds(product: Product) -> float:
        """Time a product on the member that hides least."""
        return min(_once_s(workload, gpu, product) for gpu, _ in members)

    def in_pieces(product: Product, pieces: int) -> tuple[float, float]:
        """Time a product whole and cut; pieces that follow each other are no cooler."""
        cut = product._replace(rows=product.rows / pieces, number=pieces)
        return (whole_s := seconds(product)), max(whole_s, seconds(cut))

    def ring(exchange_s: float, product: Product) -> float:
        # The last piece to arrive has one product behind it: seconds beyond the uncut product.
        whole_s, cut_s = in_pieces(product, width)
        return max(cut_s, exchange_s + cut_s / width) - whole_s

    def pipeline(exchange_s: float, product: Product) -> float:
        # The last exchange has no product beside it, or the first product no exchange.
        whole_s, cut_s = in_pieces(product, _PIPELINE)
        return max(cut_s + exchange_s / _PIPELINE, exchange_s + cut_s / _PIPELINE) - whole_s

    def bulk(exchange_s: float, product: Product) -> float:
        return max(0.0, exchange_s - seconds(product))

    def hidden(kind: TensorOverlap, by: float, without: float) -> float:
        return by if kind in kinds else without

    # Forward: in, and out.
    taken = hidden("gather", ring(gather_s, column), gather_s)
    given = hidden("scatter", pipeline(scatter_s, row), scatter_s)
    # Backward: the gradient of what went out, the input once more, the sum of the input's gradient.
    of_output = hidden("gather", ring(gather_s, row), gather_s)
    if "scatter_dgrad" in kinds:
        # In a ring under the product, with the input gathered beside it by NCCL.
        of_input = ring(gather_s + scatter_s, column)
    else:
        of_input = hidden("bulk_dgrad", bulk(gather_s, column), gather_s)
        of_input += hidden("bulk_wgrad", bulk(scatter_s, column), scatter_s)
    # A pass without gradients, whose activations are computed again, gathers before its product.
    first = gather_s if training.recompute == "full" else taken
    return PartExchange(first + given, of_output + of_input, taken + given)


def _products(
    workload: Workload, share: TensorShare, work_of: WorkOf
) -> tuple[Product, Product]:
    """Return the column-parallel and the row-parallel product of a part."""
    column, row = work_of(workload.model, workload.training, share, True).products
    return column, row


def _once_s(workload: Workload, gpu: GpuType, product: Product) -> float:
    """Time a product in the job's precision, without casts."""
    # fp8 where the job and the GPU have it.
    speed = speed_of(workload.training, gpu)
    return (speed.fp8 or speed.products).seconds(product)


def exchange_times(parts: Sequence[PartExchange], recompute: str) -> PassTimes:
    """Sum the exchanges of the parts of a layer, those of recompute among the backward pass's."""
    # Selective recompute repeats no exchange of tensor parallelism.
    again_s = sum(part.again_s for part in parts) if recompute == "full" else 0.0
    return PassTimes(
        sum(part.forward_s for part in parts), sum(part.backward_s for part in parts) + again_s
    )
