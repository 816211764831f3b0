"""Work of a part of a decoder layer on one GPU of a group: products, memory traffic, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_hetero.cost.parameters import (
    attention_inputs,
    attention_matrices,
    attention_sizes,
    shared_expert_matrices,
)
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.products import Product
from megatron_hetero.hashed import value
from megatron_hetero.model.blocks import router_params
from megatron_hetero.model.recompute import norms_again, recomputed
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


class Again(NamedTuple):
    """What the backward pass computes again of a part of a layer, beside scores and context."""

    products: tuple[Product, ...] = ()
    memory_bytes: float = 0.0


@value(frozen=True)
class Work:
    """Work of a micro-batch on a GPU in the forward pass of a part of a layer.

    `score_bytes`: one element for each attention score, and what dropout of them moves in a pass;
    `head_size`: elements of a head's queries; `again`: of the modules that the job recomputes.
    """

    products: tuple[Product, ...]
    memory_bytes: float
    num_params: int
    again: Again = Again()
    attention_flops: tuple[float, ...] = ()
    head_size: int = 0
    score_bytes: float = 0.0
    score_dropout_bytes: float = 0.0

    @property
    def gemm_flops(self) -> tuple[float, ...]:
        """Return the FLOPs of each product."""
        return tuple(p.flops for p in self.products for _ in range(p.number))


WorkOf = Callable[[ModelSpec, TrainingSpec, TensorShare, bool], Work]


def attention_work(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> Work:
    """Count the work of norm, projections and core attention.

    Args:
        share: the GPU's part of its tensor-parallel group.
        flash: attention is fused, the scores stay on chip.
    """
    # Tokens are those of the whole group; heads and weights are the member's own.
    element = training.element_bytes
    tokens = share.num_tokens(model, training)
    query, key_value = attention_sizes(model, share)
    weights = attention_matrices(model, share)
    num_heads = share.query_groups * (model.num_attention_heads // model.num_query_groups)
    scores = tokens * num_heads * model.seq_length
    # Latent attention has value heads of another width, all others of the queries'.
    widths = (query, key_value) if model.kv_lora_rank else (query, query)
    products = _attention_products(model, training, share)
    memory_bytes = _norm_bytes(model, training, share)
    # The up-projections: of queries, from their latents or at once, and of keys and values.
    raised = (products[1 if model.q_lora_rank else 0], products[-2]) if model.kv_lora_rank else ()
    whole, modules = Again(products, memory_bytes), {"mla_up_proj": Again(raised)}
    return Work(
        products,
        memory_bytes,
        sum(weights),
        _computed_again(model, training, share, whole, modules, is_mlp=False),
        # Causal kernels skip half of the square; unfused products do not.
        attention_flops=tuple(
            2.0 * tokens * width * model.seq_length * (0.5 if flash else 1.0) for width in widths
        ),
        head_size=query // num_heads,
        # Fused kernels keep the scores on chip.
        score_bytes=0.0 if flash else float(scores * element),
        # Dropout reads and writes each, and a byte of its mask.
        score_dropout_bytes=0.0
        if flash or not training.attention_dropout
        else scores * (2.0 * element + 1),
    )


def _computed_again(
    model: ModelSpec,
    training: TrainingSpec,
    share: TensorShare,
    whole: Again,
    modules: Mapping[str, Again],
    *,
    is_mlp: bool,
) -> Again:
    """Return what is recomputed of a part of a layer.

    Args:
        share: the GPU's part of its tensor-parallel group.
        whole: all of the part.
        modules: what each of Megatron's modules has of it, but for core attention and norms.
        is_mlp: the part is the MLP, or experts.
    """
    if training.recompute == "full":
        return whole
    names = recomputed(training)
    found = [again for name, again in modules.items() if name in names]
    if norms_again(model, training, names)[is_mlp]:
        found.append(Again((), _passed_bytes(model, training, share)))
    products = tuple(product for again in found for product in again.products)
    return Again(products, sum(again.memory_bytes for again in found))


def _attention_products(
    model: ModelSpec, training: TrainingSpec, share: TensorShare
) -> tuple[Product, ...]:
    """Return the projections.  Down-projections to replicated latents see only the member's own
    tokens under sequence parallelism."""
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    # Latents that every member computes whole are of its own tokens under sequence parallelism.
    weights = attention_matrices(model, share)
    is_whole = [False] * len(weights)
    if model.kv_lora_rank and not model.divides_latents:
        is_whole[-3] = True
        is_whole[0] = bool(model.q_lora_rank)
    return tuple(
        Product.with_weights(own_tokens if whole else tokens, weight, depth)
        for weight, depth, whole in zip(
            weights, attention_inputs(model, share), is_whole, strict=True
        )
    )


def mlp_work(model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool) -> Work:
    """Count the work of norm, the two products and the activation between them; of experts where
    the model has them.

    Args:
        share: the GPU's part of its tensor-parallel group.
        flash: of no meaning here; both parts of a layer have one signature.
    """
    tokens = share.num_tokens(model, training)
    columns = share.mlp_columns
    # Columns of the first product; a gated MLP has two halves.
    first = columns * (2 if model.gated_mlp else 1)
    weights = (model.hidden_size * first, columns * model.hidden_size)
    if model.num_experts:
        return _experts_work(model, training, share, weights)
    # The activation reads the first product and writes the input of the second.
    activation_bytes = float(tokens * (first + columns) * training.element_bytes)
    products = _mlp_products(tokens, weights, model.hidden_size, columns)
    memory_bytes = _norm_bytes(model, training, share) + activation_bytes
    # With Transformer Engine's layers the norm is in the first product's module.
    norm_bytes = 0.0 if training.local_layers else _passed_bytes(model, training, share)
    whole = Again(products, memory_bytes)
    modules = {"mlp": Again(products, activation_bytes + norm_bytes)}
    again = _computed_again(model, training, share, whole, modules, is_mlp=True)
    return Work(products, memory_bytes, sum(weights), again)


def _experts_work(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, weights: tuple[int, int]
) -> Work:
    """Count the work of experts, each with an equal part of the tokens: a balanced router.

    `weights`: elements of an expert's two products.  Every token is sorted to each of its experts
    (read, written, and both again on the way back) and weighted after the activation.
    """
    element = training.element_bytes
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    num_experts = share.num_experts(model)
    # Rows of all experts here; each takes its equal part.
    routed = share.routed_tokens(model, training)
    columns = share.mlp_columns
    first = columns * (2 if model.gated_mlp else 1)
    experts = _mlp_products(
        routed / num_experts,
        weights,
        model.hidden_size,
        columns,
        num_experts,
        is_grouped=training.grouped_experts,
    )
    router = Product(own_tokens, model.num_experts, model.hidden_size)
    activated = float(routed * (first + 3 * columns) * element)
    # Sorted there and back, activated, and weighted.  Tokens that were exchanged come by sender,
    # and are put in the order of the experts, and back (`sort_chunks_by_idxs` of
    # `MoEAlltoAllTokenDispatcher`).
    sorts = 4 if training.token_dispatcher == "alltoall" and num_experts > 1 else 2
    copies = 2 * sorts
    # What comes to experts in fp8 is copied with what pads it, and of one call's result the padding
    # is left out again (`Fp8Padding`, `Fp8Unpadding` of Transformer Engine).
    if training.fp8 and not training.pads_routing:
        copies += 4 if training.grouped_experts else 2
    moved = routed * copies * model.hidden_size * element + activated
    shared = shared_expert_matrices(model, share)
    in_shared = 0.0
    if shared:
        # Its activation, and the sum with what the experts give.
        in_shared = float(tokens * (3 if model.gated_mlp else 2) * share.shared_columns * element)
        moved += in_shared + 3 * own_tokens * model.hidden_size * element
    of_shared = _mlp_products(tokens, shared, model.hidden_size, share.shared_columns)
    products = router, *experts, *of_shared
    memory_bytes = _norm_bytes(model, training, share) + moved
    modules = {"moe": Again(products, moved)}
    if "moe" not in recomputed(training):
        # Modules within it.
        modules = {
            "shared_experts": Again(of_shared, in_shared),
            "moe_act": Again((), activated),
        }
    whole = Again(products, memory_bytes)
    again = _computed_again(model, training, share, whole, modules, is_mlp=True)
    num_params = num_experts * sum(weights) + sum(shared) + router_params(model)
    return Work(products, memory_bytes, num_params, again)


def _mlp_products(
    tokens: float,
    weights: Sequence[int],
    hidden_size: int,
    columns: int,
    number: int = 1,
    is_grouped: bool = False,
) -> tuple[Product, ...]:
    """Return the two products of an MLP, or none of none.

    Args:
        tokens: rows of each.
        weights: elements of the two matrices.
        hidden_size, columns: inputs of the first and of the second.
        number: MLPs.
        is_grouped: all of them are one call, else they follow each other.
    """
    return tuple(
        Product.with_weights(tokens, weight, depth, number, is_grouped)
        for weight, depth in zip(weights, (hidden_size, columns), strict=False)
    )


def _passed_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> float:
    """Count the bytes that a norm by itself reads and writes."""
    return 2.0 * share.own_tokens(model, training) * model.hidden_size * training.element_bytes


def _norm_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> float:
    """Count the bytes of a norm (read, write) and a bias-dropout-add (two reads, a write, a mask
    byte)."""
    element = training.element_bytes
    own_tokens = share.own_tokens(model, training)
    return own_tokens * model.hidden_size * (2 * element + 3 * element + 1)
