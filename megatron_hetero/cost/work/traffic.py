"""Bytes that the operators of a layer read and write beside its products, in either pass.

Every operator counts by what its kernel on a GPU reads and writes: one kernel for each operation of
torch, for each function that Megatron compiles (`jit_fuser`: bias, dropout and sum; activations),
and for each kernel of Transformer Engine (norms, rotation of positions).  Scores and context are
priced by themselves.  `tests/cost/work/test_traffic.py` runs Megatron-core's layers, and
Transformer Engine's, and sums what they move.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

_GATED, _PLAIN = (3, 5), (2, 3)
"""Elements moved for each column of an activation: gated, of which two are multiplied to one, or
not."""


class Moved(NamedTuple):
    """Bytes of the forward and of the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, forward: float, backward: float) -> Moved:
        """Return so many more."""
        return Moved(self.forward + forward, self.backward + backward)

    def times(self, factor: float) -> Moved:
        """Return so many times as much."""
        return Moved(self.forward * factor, self.backward * factor)


def norm_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count a norm of the residuals: backward it reads its input and a gradient."""
    element, residual = training.element_bytes, training.residual_bytes
    each = share.own_tokens(model, training) * model.hidden_size
    return Moved(residual + element, element + 2 * residual).times(each)


def ends_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count what either half of a layer begins and ends with: a norm, and the sum of its result and
    what went in, with bias and dropout."""
    element, residual = training.element_bytes, training.residual_bytes
    forward, backward = element + 2 * residual, 3 * residual
    # Backward both gradients of what went in are added; that of the sum itself is passed on.
    if training.hidden_dropout:
        forward, backward = forward + 1, backward + residual + 1 + element
    elif element < residual:
        backward += residual + element
    if model.add_bias_linear:
        backward += element
    own_tokens = share.own_tokens(model, training)
    moved = norm_bytes(model, training, share)
    return moved.plus(*(own_tokens * model.hidden_size * n for n in (forward, backward)))


def attention_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, *, is_fused: bool
) -> Moved:
    """Count what lies between the projections beside scores and context: rotation, norms and copies
    of queries, keys and values, and backward their gradients put together.

    Args:
        model, training: of the job.
        share: the GPU's part of its tensor-parallel group.
        is_fused: scores stay on chip.
    """
    if model.kv_lora_rank:
        return rotated_latent_bytes(model, training, share).plus(*_latents(model, training, share))
    query, keys = attention_sizes(model, share)
    heads_per_group = model.num_attention_heads // model.num_query_groups
    # Backward the gradients of all three are put together: Transformer Engine 2.20 lacks the
    # `_SplitAlongDim` by which Megatron would leave that out.
    forward, backward = 0, 2 * (query + 2 * keys)
    if model.is_rotary:
        forward, backward = forward + 2 * (query + keys), backward + 2 * (query + keys)
    if model.qk_layernorm:
        forward, backward = forward + 2 * (query + keys), backward + 3 * (query + keys)
    # Queries of several groups do not lie side by side; a norm wants rows of heads.
    if model.qk_layernorm or (heads_per_group > 1 and share.query_groups > 1):
        forward += 2 * query
    if not is_fused:
        # The context is put in the order of the projection, keys and values of a group are
        # repeated.
        moved = 2 * query + (2 * (query + keys) if heads_per_group > 1 else 0)
        forward, backward = forward + moved, backward + moved
    elif model.qk_layernorm:
        forward += 4 * keys
    elif model.is_rotary:
        forward += 2 * keys
    elif heads_per_group > 1:
        # A fused kernel takes all three as they come where they are alike.
        forward += 4 * keys
    if model.attention_output_gate:
        # The gate is copied as queries are, and multiplies the context.
        forward, backward = forward + 5 * query, backward + 2 * query + 5 * query
    # Transformer Engine's products add up their bias's gradient.
    if training.local_layers and (model.add_bias_linear or model.add_qkv_bias):
        backward += query + 2 * keys
    each = float(share.num_tokens(model, training) * training.element_bytes)
    return Moved(forward, backward).times(each)


def rotated_latent_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count the rotation of latent attention's queries, in place, and what makes keys and values of
    their projection and of the rotary part (`fused_mla_yarn_rope_apply.py`)."""
    heads, rotary = share.query_groups, model.qk_pos_emb_head_dim
    keys_and_values = model.qk_head_dim + model.v_head_dim
    moved = heads * (2 * rotary + 2 * keys_and_values + rotary) + rotary
    each = share.num_tokens(model, training) * training.element_bytes
    return Moved(moved, moved).times(each)


def _latents(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count norms and copies of latents; the gradients of two projections of what went in are
    added."""
    norms = model.q_lora_rank + model.kv_lora_rank if model.qk_layernorm else 0
    # The latent of keys and values is parted from the rotary keys, and backward put together.
    put_together = 2 * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    return Moved(
        2 * norms + 2 * model.kv_lora_rank,
        3 * norms + put_together + 3 * model.hidden_size,
    ).times(share.own_tokens(model, training) * training.element_bytes)


def activation_bytes(model: ModelSpec, training: TrainingSpec, columns: float) -> Moved:
    """Count an activation that gives so many elements, with its bias or, behind experts, the
    router's weight.

    A kernel with a bias of its own is followed, backward, by the sum of the bias's gradient.
    """
    forward, backward = _GATED if model.gated_mlp else _PLAIN
    if model.add_bias_linear and not model.num_experts:
        backward += 2 if model.gated_mlp else 1
    return Moved(forward, backward).times(columns * training.element_bytes)


def routing_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, routed: float
) -> Moved:
    """Count what sorts tokens to experts and back, and what the shared expert adds.

    Unfused, a token is read and written for each of its experts (`index_select`), and on the way
    back each row is added to a sum that starts from zero (`scatter_add_`): read, and read and
    written.  Backward the two change places.  Fused (`--moe-permute-fusion`) each token is read, or
    written, once.  Rows that were exchanged come by sender, and are put in the order of the experts
    and back (`sort_chunks_by_idxs`).  Source: `moe_utils.py`, `token_dispatcher.py`, `experts.py`
    of Megatron-core 0.19.

    Args:
        model, training: of the job.
        share: the GPU's part of its tensor-parallel group.
        routed: rows of all experts here.
    """
    is_exchanged = training.token_dispatcher == "alltoall"
    own_tokens = share.own_tokens(model, training)
    # Tokens are sorted by their own rank before they travel, or by the ranks that gathered them.
    if is_exchanged:
        tokens, rows = float(own_tokens), float(own_tokens * model.moe_router_topk)
    else:
        tokens = share.num_tokens(model, training) * (share.expert_ranks or share.width)
        tokens, rows = tokens / share.width, routed
    sorted_once = 2 * rows + tokens if training.fuses_permutation else 5 * rows + tokens
    if training.fuses_permutation:
        sorted_once += tokens
    number = share.num_experts(model)
    moved = sorted_once + (4 * routed if is_exchanged and number > 1 else 0)
    # Experts apart put what they give together, and backward their gradients.
    if not training.grouped_experts and number > 1:
        moved += 2 * routed
    # What comes to experts in fp8 is copied with what pads it, and of one call's result the padding
    # is left out again (`Fp8Padding`, `Fp8Unpadding` of Transformer Engine).
    if training.fp8 and not training.pads_routing:
        moved += routed * (4 if training.grouped_experts else 2)
    # Backward the gradients of router and experts are added.
    forward, backward = moved, moved + 3 * own_tokens
    # The sum with what the shared expert gives; backward its gradient is one more.
    if share.shared_columns:
        forward, backward = forward + 3 * own_tokens, backward + 3 * own_tokens
    found = Moved(forward, backward).times(model.hidden_size * training.element_bytes)
    # A router in another precision casts, backward, what went in and its gradient.
    cast = 2 * (training.element_bytes + training.router_bytes) if training.router_bytes else 0
    return found.plus(0.0, own_tokens * model.hidden_size * cast)
