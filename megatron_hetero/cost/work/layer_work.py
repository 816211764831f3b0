"""Work of a part of a decoder layer on one GPU of a group: products, memory traffic, weights.

What operators move beside the products is in `cost.work.traffic`.
"""

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
from megatron_hetero.cost.work.traffic import (
    KernelTraffic,
    Moved,
    activation_bytes,
    attention_bytes,
    ends_bytes,
    norm_bytes,
    rotated_latent_bytes,
    routing_bytes,
)
from megatron_hetero.hashed import value
from megatron_hetero.model.blocks import router_params
from megatron_hetero.model.recompute import norms_again, recomputed
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


class Again(NamedTuple):
    """What the backward pass computes again of a part of a layer, beside scores and context."""

    products: tuple[Product, ...] = ()
    moved: KernelTraffic = KernelTraffic()


@value(frozen=True)
class Work:
    """Work of a micro-batch on a GPU in the forward pass of a part of a layer.

    `moved`: what both passes move beside products and scores; `again`: of the modules that the job
    recomputes; `head_size`: elements of a head's queries; `score_bytes`: one element for each
    attention score, and what dropout of them moves in a pass.
    """

    products: tuple[Product, ...]
    moved: Moved
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
    moved = ends_bytes(model, training, share)
    moved = moved.plus(*attention_bytes(model, training, share, is_fused=flash))
    # The up-projections: of queries, from their latents or at once, and of keys and values.
    raised = (products[1 if model.q_lora_rank else 0], products[-2]) if model.kv_lora_rank else ()
    rotated = rotated_latent_bytes(model, training, share).forward if raised else KernelTraffic()
    whole, modules = Again(products, moved.forward), {"mla_up_proj": Again(raised, rotated)}
    return Work(
        products,
        moved,
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
        found.append(Again((), norm_bytes(model, training, share).forward))
    products = tuple(product for again in found for product in again.products)
    moved = KernelTraffic()
    for again in found:
        moved = moved.plus(*again.moved)
    return Again(products, moved)


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
    activated = activation_bytes(model, training, tokens * columns)
    products = _mlp_products(tokens, weights, model.hidden_size, columns)
    moved = ends_bytes(model, training, share).plus(*activated)
    # With Transformer Engine's layers the norm is in the first product's module.
    norm = Moved() if training.local_layers else norm_bytes(model, training, share)
    whole = Again(products, moved.forward)
    modules = {"mlp": Again(products, activated.forward.plus(*norm.forward))}
    again = _computed_again(model, training, share, whole, modules, is_mlp=True)
    return Work(products, moved, sum(weights), again)


def _experts_work(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, weights: tuple[int, int]
) -> Work:
    """Count the work of experts, each with an equal part of the tokens: a balanced router.

    `weights`: elements of an expert's two products.
    """
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    num_experts = share.num_experts(model)
    # Rows of all experts here; each takes its equal part.
    routed = share.routed_tokens(model, training)
    columns = share.mlp_columns
    experts = _mlp_products(
        routed / num_experts,
        weights,
        model.hidden_size,
        columns,
        num_experts,
        is_grouped=training.grouped_experts,
    )
    router = Product(own_tokens, model.num_experts, model.hidden_size)
    # The router's weights multiply within the activation.
    calls = 1 if training.grouped_experts else num_experts
    activated = activation_bytes(model, training, routed * columns, calls)
    moved = routing_bytes(model, training, share, routed).plus(*activated)
    shared = shared_expert_matrices(model, share)
    in_shared = Moved()
    if shared:
        in_shared = activation_bytes(model, training, float(tokens * share.shared_columns))
    moved = moved.plus(*in_shared)
    of_shared = _mlp_products(tokens, shared, model.hidden_size, share.shared_columns)
    products = router, *experts, *of_shared
    modules = {"moe": Again(products, moved.forward)}
    moved = moved.plus(*ends_bytes(model, training, share))
    if "moe" not in recomputed(training):
        # Modules within it.
        modules = {
            "shared_experts": Again(of_shared, in_shared.forward),
            "moe_act": Again((), activated.forward),
        }
    whole = Again(products, moved.forward)
    again = _computed_again(model, training, share, whole, modules, is_mlp=True)
    num_params = num_experts * sum(weights) + sum(shared) + router_params(model)
    return Work(products, moved, num_params, again)


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
