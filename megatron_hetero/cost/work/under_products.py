"""Exchanges of a tensor-parallel group, and which of them hide under products.

Without any flag the backward pass of a column-parallel layer starts its exchanges and goes on:
Megatron's `LinearWithGradAccumulationAndAsyncCommunication` gathers the input once more under the
product for the input's gradient, and sums that gradient under the product for the weight's
(`CUDA_DEVICE_MAX_CONNECTIONS=1` has the exchange begin first); Transformer Engine's `Linear` and
`LayerNormLinear` do the same (`async_op=True`).  All other exchanges wait.  Measured layers hid
part of these exchanges over NVLink and nothing over PCIe, where exchanges count in full.

With `--tp-comm-overlap` more of them hide.  Which, and in how many pieces, is `initialize_ub`'s
default (`transformer_engine/pytorch/module/base.py`, 2.20) and Megatron's flags:

- forward, the inputs of the column-parallel products (qkv, fc1) are gathered in a ring: as many
  products as ranks, each while the next piece travels.  So are backward the gradients of the
  row-parallel outputs (proj, fc2), under the product for the input's gradient;
- forward, the outputs of the row-parallel products are reduced and scattered in a pipeline of four:
  the last fourth hides nowhere;
- backward, a column-parallel layer does as without the flag, over buffers of its own
  (`--disable-tp-comm-bulk-dgrad`, `-wgrad` leave that to NCCL, which hides as long).

An exchange takes part of the multiprocessors and of the memory's bandwidth from the product that
hides it, which is not priced.  `--tp-comm-overlap-cfg` can choose other methods; these are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.network.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.ends import head_product
from megatron_hetero.cost.work.gathered import Gathered, gathered, latent_widths
from megatron_hetero.cost.work.layer_work import WorkOf, attention_work, mlp_work
from megatron_hetero.cost.work.products import Product, ProductSpeed
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.model.recompute import WITH_SHARED_EXPERT, recomputed
from megatron_hetero.model.spec import Workload

Member = tuple[GpuType, TensorShare]
"""A GPU of a group with its part of the model."""
_PIPELINE = 4
"""Pieces of a pipelined reduce-scatter (`num_splits` of `initialize_ub`)."""


class PartExchange(NamedTuple):
    """Seconds of a half of a layer (attention, or the MLP) beyond those of its products.

    `again_s`: of a forward pass that is recomputed, or of the job's modules of it.  It may overlap
    where the first pass, without gradients, does not.
    """

    forward_s: float
    backward_s: float
    again_s: float


def exchanged_bytes(workload: Workload, members: Sequence[Member]) -> float:
    """Return the bytes of a micro-batch's activation in an exchange of the group: in the precision
    that products take and give, whatever the residuals are in."""
    model, training = workload.model, workload.training
    num_tokens = members[0][1].num_tokens(model, training)
    return float(num_tokens * model.hidden_size * training.element_bytes)


def layer_exchanges(
    workload: Workload,
    members: Sequence[Member],
    num_bytes: float,
    link: Link,
) -> tuple[PartExchange, PartExchange]:
    """Time the exchanges of attention and of the MLP, beside products where they hide under them.

    Latent attention and experts have other products, and exchange without overlap; Megatron
    switches `--tp-comm-overlap` off for them, because Transformer Engine has no buffers for their
    products.

    Args:
        workload: the job.
        members: type and share of each GPU of the group.
        num_bytes: of the activation of one micro-batch.
        link: the slowest inside the group.
    """
    attends_again, is_again = parts_again(workload)
    given = num_bytes, link
    if widths := latent_widths(workload.model):
        attention = _latent_part(workload, members[0][1].width, widths, *given)
    else:
        work_of = None if workload.model.kv_lora_rank else attention_work
        attention = _part(workload, members, work_of, *given, is_again=attends_again)
    work_of = None if workload.model.num_experts else mlp_work
    return attention, _part(workload, members, work_of, *given, is_again=is_again)


def parts_again(workload: Workload) -> tuple[bool, ...]:
    """Return whether exchanges of attention, and of the MLP or beside experts, are recomputed."""
    model, modules = workload.model, recomputed(workload.training)
    checkpoints = WITH_SHARED_EXPERT if model.num_experts else {"mlp"}
    raises = "mla_up_proj" in modules and bool(latent_widths(model))
    return raises or workload.training.recompute == "full", bool(checkpoints & modules)


def head_exchange_s(
    workload: Workload, members: Sequence[Member], num_bytes: float, link: Link, vocab_rows: int
) -> float:
    """Time the exchanges of the head's backward pass beyond its products: those of a
    column-parallel layer.

    Args:
        workload: the job.
        members: type and share of each GPU of the group.
        num_bytes: of the activation of one micro-batch.
        link: the slowest inside the group.
        vocab_rows: rows of the padded vocabulary.
    """
    model, training = workload.model, workload.training

    def seconds(gpu: GpuType, share: TensorShare) -> float:
        rows, tokens = share.rows_as_if_even(model, vocab_rows), share.num_tokens(model, training)
        product = head_product(model, share.width, rows, tokens)
        return speed_of(training, gpu).products.seconds(product)

    least_s, width = min(starmap(seconds, members)), members[0][1].width
    if not _hides_alone(link):
        least_s = 0.0
    if not training.sequence_parallel:
        return max(0.0, all_reduce_s(num_bytes, width, link) - least_s)
    exchanges = all_gather_s, reduce_scatter_s
    return sum(max(0.0, of(num_bytes, width, link) - least_s) for of in exchanges)


def _part(
    workload: Workload,
    members: Sequence[Member],
    work_of: WorkOf | None,
    num_bytes: float,
    link: Link,
    *,
    is_again: bool,
) -> PartExchange:
    """Time the exchanges of a column-parallel product and the row-parallel one behind it; without
    overlap where `work_of` is None.

    `is_again`: the part is a checkpoint, or within one.
    """
    training, width = workload.training, members[0][1].width
    if width == 1:
        return PartExchange(0.0, 0.0, 0.0)
    # The least that a member computes hides an exchange: all wait for it.
    products = [
        (_product_speed(workload, gpu), *_products(workload, share, work_of))
        for gpu, share in members
        if work_of
    ]

    def seconds(place: int, pieces: int = 1) -> float:
        """Time the column-parallel (0) or the row-parallel product (1), whole or cut."""
        return min(
            speed.seconds(own[place]._replace(rows=own[place].rows / pieces, number=pieces))
            for speed, *own in products
        )

    # No buffers for unlike shares, or for products that are not there.
    has_buffers = work_of is not None and len({share for _, share in members}) == 1
    kinds = frozenset(training.tp_comm_overlap if has_buffers else ())
    hides = work_of is not None and (bool(kinds) or _hides_alone(link))

    def bulk(exchange_s: float) -> float:
        """Time what a backward product of the column-parallel layer does not hide."""
        return max(0.0, exchange_s - seconds(0)) if hides else exchange_s

    if not training.sequence_parallel:
        # Backward: the sum of the input's gradient, under the product for the weight's.
        reduce_s = all_reduce_s(num_bytes, width, link)
        return PartExchange(reduce_s, bulk(reduce_s), reduce_s)
    # Seconds of the collectives by themselves: the input and the gradient of the output are
    # gathered, the output and the gradient of the input are summed.
    sizes = gathered(training, is_cast=work_of is not None)
    agreed_s = _agreed_s(sizes, width, link)

    def gathering_s(element_bytes: float) -> float:
        return all_gather_s(num_bytes * element_bytes / training.element_bytes, width, link)

    gather_s = gathering_s(sizes.of_input)
    scatter_s = reduce_scatter_s(num_bytes, width, link)

    def in_pieces(place: int, pieces: int) -> tuple[float, float]:
        """Time a product whole and cut; pieces that follow each other are no cooler."""
        return (whole_s := seconds(place)), max(whole_s, seconds(place, pieces))

    def ring(exchange_s: float, place: int) -> float:
        # The last piece to arrive has one product behind it: seconds beyond the uncut product.
        whole_s, cut_s = in_pieces(place, width)
        return max(cut_s, exchange_s + cut_s / width) - whole_s

    def pipeline(exchange_s: float, place: int) -> float:
        # The last exchange has no product beside it, or the first product no exchange.
        whole_s, cut_s = in_pieces(place, _PIPELINE)
        return max(cut_s + exchange_s / _PIPELINE, exchange_s + cut_s / _PIPELINE) - whole_s

    # Forward: in, and out.
    taken = ring(gather_s, 0) if "gather" in kinds else gather_s
    given = pipeline(scatter_s, 1) if "scatter" in kinds else scatter_s
    # Backward: the gradient of what went out, the input once more, the sum of the input's gradient.
    if "gather" in kinds:
        of_output = ring(gathering_s(sizes.of_gradient_in_ring), 1)
    else:
        of_output = gathering_s(sizes.of_gradient)
    if "scatter_dgrad" in kinds:
        # In a ring under the product, with the input gathered beside it by NCCL.
        of_input = ring(gather_s + scatter_s, 0)
    else:
        of_input = bulk(gather_s) + bulk(scatter_s)
    # A pass without gradients, whose activations are computed again, gathers before its product.
    first = gather_s if is_again else taken
    return PartExchange(
        agreed_s + first + given, agreed_s + of_output + of_input, agreed_s + taken + given
    )


def _latent_part(
    workload: Workload, width: int, widths: Sequence[int], num_bytes: float, link: Link
) -> PartExchange:
    """Time the exchanges of latent attention whose latents every member computes whole.

    The up-projections gather latents, not hidden states; the projection's output is as wide as
    these.

    Args:
        widths: of what is gathered, as `latent_widths`.
    """
    model, training = workload.model, workload.training
    if width == 1:
        return PartExchange(0.0, 0.0, 0.0)
    *columns, rotary = [num_bytes * size / model.hidden_size for size in widths]
    # Of modules, the up-projections alone exchange: they gather their inputs.
    is_selective = training.recompute == "selective"
    if not training.sequence_parallel:
        # Backward the gradient of each up-projection's input is summed.
        forward_s = all_reduce_s(num_bytes, width, link)
        backward_s = sum(all_reduce_s(size, width, link) for size in columns)
        return PartExchange(forward_s, backward_s, 0.0 if is_selective else forward_s)
    sizes = gathered(training, is_cast=True)
    agreed_s = _agreed_s(sizes, width, link)
    element = training.element_bytes
    inputs_s = sum(all_gather_s(size * sizes.of_input / element, width, link) for size in columns)
    raised_s = len(columns) * agreed_s + inputs_s
    forward_s = raised_s + all_gather_s(rotary, width, link)
    forward_s += reduce_scatter_s(num_bytes, width, link)
    # Backward: the gradient of the output, the inputs once more, and the gradients of all inputs.
    of_output_s = all_gather_s(num_bytes * sizes.of_gradient / element, width, link)
    of_inputs_s = sum(reduce_scatter_s(size, width, link) for size in (*columns, rotary))
    backward_s = agreed_s + of_output_s + inputs_s + of_inputs_s
    return PartExchange(forward_s, backward_s, raised_s if is_selective else forward_s)


def _agreed_s(sizes: Gathered, width: int, link: Link) -> float:
    """Time the all-reduce of one number before a gather, where a group agrees on a scale."""
    return all_reduce_s(4.0, width, link) if sizes.is_agreed else 0.0


def _hides_alone(link: Link) -> bool:
    """Return whether exchanges hide under products without a flag, which only NVLink has shown."""
    return link.nvlink is not None


def _products(
    workload: Workload, share: TensorShare, work_of: WorkOf
) -> tuple[Product, Product]:
    """Return the column-parallel and the row-parallel product of a part."""
    column, row = work_of(workload.model, workload.training, share, True).products
    return column, row


def _product_speed(workload: Workload, gpu: GpuType) -> ProductSpeed:
    """Return the speed of products in the job's precision, without casts."""
    # fp8 where the job and the GPU have it.
    speed = speed_of(workload.training, gpu)
    return speed.fp8 or speed.products


def exchange_times(parts: Sequence[PartExchange], again: Sequence[bool]) -> PassTimes:
    """Sum the exchanges of the parts of a layer, of those that are recomputed once more in the
    backward pass."""
    again_s = sum(part.again_s for part, is_again in zip(parts, again, strict=True) if is_again)
    return PassTimes(
        sum(part.forward_s for part in parts), sum(part.backward_s for part in parts) + again_s
    )
