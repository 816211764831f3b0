"""Bytes that the MLP of a layer, or the experts in its place, keep from forward to backward."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


def mlp_activation_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    share: TensorShare,
    again: frozenset[str] = frozenset(),
) -> int:
    """Count the bytes that the MLP of one layer, or its experts, keep for backward; the norm before
    it is not counted.

    Args:
        share: the device's part of its tensor-parallel group.
        again: modules that are computed again (`model.recompute`).
    """
    if not model.num_experts:
        each = 0.0 if "mlp" in again else _kept_by_mlp(model, training, share)
        return int(share.num_tokens(model, training) * each)
    if "moe" in again:
        return 0
    # Routed experts, and beside them the expert of all tokens.
    kept = _kept_by_experts(model, training, share, "moe_act" in again)
    if "shared_experts" not in again:
        kept += _kept_by_shared_expert(model, training, share)
    return kept


def _kept_by_mlp(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> float:
    """Count the bytes kept for each token: input of the activation and of the second product.

    torch's own operations keep a gated unit's activated half and a copy of the other one as well
    (Megatron adds an offset to it).
    """
    of_activation = 1
    if model.gated_mlp:
        of_activation = 2 if training.fused_activation else 4
    each = of_activation * training.element_bytes + training.product_input_bytes
    return share.mlp_columns * each


def _kept_by_experts(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, is_activated_again: bool
) -> int:
    """Count the bytes kept, with tokens spread evenly over the experts.

    For each token and each of its experts: the input of the first product, which is a copy of its
    own, whole on every member; what an MLP keeps; its inner product before it is weighted, unless
    that is one kernel with the activation; the weight, and the place it came from, there and back.
    Of the router: its choice, and the scores for the losses of balance and of size, on or not.
    """
    element = training.element_bytes
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    # The router's choice and its weights, and in fp32 all scores, once for each of two losses.
    chosen, scores = 8 + 4, 2 * 4
    router = own_tokens * (model.moe_router_topk * chosen + model.num_experts * scores + 4)
    router += tokens * model.num_experts  # who got which token
    unweighted = 0 if training.fused_activation and model.gated_mlp else share.mlp_columns
    each = model.hidden_size * training.product_input_bytes + element
    if is_activated_again:
        # What the first product gives, alone.
        each += (2 if model.gated_mlp else 1) * share.mlp_columns * element
    else:
        each += _kept_by_mlp(model, training, share) + unweighted * element
    # Tokens that come to this member's experts; two 8-byte numbers a token say where it lies.
    here = int(share.routed_tokens(model, training))
    return int(here * (each + 2 * 8)) + router


def _kept_by_shared_expert(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> int:
    """Count the bytes kept by the expert that every token passes through."""
    columns = share.shared_columns
    if not columns:
        return 0
    element = training.element_bytes
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    # As an MLP of its own columns; its gate keeps the input and one value of each token.
    kept = int(tokens * _kept_by_mlp(model, training, replace(share, mlp_columns=columns)))
    if model.moe_shared_expert_gate:
        kept += own_tokens * element * (model.hidden_size + 1)
    return kept
