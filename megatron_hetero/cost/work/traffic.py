"""What the operators of a layer read and write beside its products, in either pass: bytes, and the
kernels that move them.

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
_ROUTER = (18, 10)
"""Operators of a router beside its product, which move next to nothing."""


class KernelTraffic(NamedTuple):
    """Bytes that kernels read and write, and how many kernels."""

    num_bytes: float = 0.0
    kernels: int = 0

    def plus(self, num_bytes: float, kernels: int = 1) -> KernelTraffic:
        """Return so many more; by default of one kernel."""
        return KernelTraffic(self.num_bytes + num_bytes, self.kernels + kernels)

    def times(self, factor: float) -> KernelTraffic:
        """Return so many times the bytes, of as many kernels."""
        return KernelTraffic(self.num_bytes * factor, self.kernels)


class Moved(NamedTuple):
    """KernelTraffic of the forward and of the backward pass."""

    forward: KernelTraffic = KernelTraffic()
    backward: KernelTraffic = KernelTraffic()

    def plus(self, forward: KernelTraffic, backward: KernelTraffic) -> Moved:
        """Return so much more."""
        return Moved(self.forward.plus(*forward), self.backward.plus(*backward))

    def times(self, factor: float) -> Moved:
        """Return so many times the bytes, of as many kernels."""
        return Moved(self.forward.times(factor), self.backward.times(factor))


def norm_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count a norm of the residuals: backward it reads its input and a gradient."""
    element, residual = training.element_bytes, training.residual_bytes
    each = share.own_tokens(model, training) * model.hidden_size
    # Each vector of a norm is added to its main gradient by a kernel of its own.
    backward = KernelTraffic(element + 2 * residual, 1 + model.norm_vectors)
    return Moved(KernelTraffic(residual + element, 1), backward).times(each)


def ends_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count what either half of a layer begins and ends with: a norm, and the sum of its result and
    what went in, with bias and dropout."""
    element, residual = training.element_bytes, training.residual_bytes
    forward, backward = KernelTraffic(element + 2 * residual, 1), KernelTraffic(3 * residual, 1)
    # Backward both gradients of what went in are added; that of the sum itself is passed on.
    if training.hidden_dropout:
        forward, backward = forward.plus(1, 0), backward.plus(residual + 1 + element)
    elif element < residual:
        backward = backward.plus(residual + element)
    if model.add_bias_linear:
        backward = backward.plus(element, 2)
    each = float(share.own_tokens(model, training) * model.hidden_size)
    return norm_bytes(model, training, share).plus(*Moved(forward, backward).times(each))


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
    forward, backward = KernelTraffic(), KernelTraffic(2 * (query + 2 * keys), 1)
    if model.is_rotary:
        forward = forward.plus(2 * (query + keys), 2)
        backward = backward.plus(2 * (query + keys), 2)
    if model.qk_layernorm:
        forward = forward.plus(2 * (query + keys), 2)
        backward = backward.plus(3 * (query + keys), 2 * (1 + model.norm_vectors))
    # Queries of several groups do not lie side by side; a norm wants rows of heads.
    if model.qk_layernorm or (heads_per_group > 1 and share.query_groups > 1):
        forward = forward.plus(2 * query)
    if not is_fused:
        # The context is put in the order of the projection, keys and values of a group are
        # repeated.
        forward, backward = forward.plus(2 * query), backward.plus(2 * query)
        if heads_per_group > 1:
            forward = forward.plus(2 * (query + keys), 2)
            backward = backward.plus(2 * (query + keys), 2)
    elif model.qk_layernorm:
        forward = forward.plus(4 * keys, 2)
    elif model.is_rotary:
        forward = forward.plus(2 * keys)
    elif heads_per_group > 1:
        # A fused kernel takes all three as they come where they are alike.
        forward = forward.plus(4 * keys, 2)
    if model.attention_output_gate:
        # The gate is copied as queries are, and multiplies the context.
        forward, backward = forward.plus(5 * query, 2), backward.plus(2 * query + 5 * query, 2)
    if model.add_bias_linear or model.add_qkv_bias:
        # Transformer Engine's products add up their bias's gradient.
        summed = query + 2 * keys if training.local_layers else 0
        backward = backward.plus(summed, 1 + training.local_layers)
    each = float(share.num_tokens(model, training) * training.element_bytes)
    return Moved(forward, backward).times(each)


def rotated_latent_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count the rotation of latent attention's queries, in place, and what makes keys and values of
    their projection and of the rotary part (`fused_mla_yarn_rope_apply.py`)."""
    heads, rotary = share.query_groups, model.qk_pos_emb_head_dim
    keys_and_values = model.qk_head_dim + model.v_head_dim
    moved = heads * (2 * rotary + 2 * keys_and_values + rotary) + rotary
    each = share.num_tokens(model, training) * training.element_bytes
    return Moved(KernelTraffic(moved, 2), KernelTraffic(moved, 2)).times(each)


def _latents(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> Moved:
    """Count norms and copies of latents; the gradients of two projections of what went in are
    added."""
    # The latent of keys and values is parted from the rotary keys, and backward put together.
    put_together = 2 * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    forward = KernelTraffic(2 * model.kv_lora_rank, 1)
    backward = KernelTraffic(put_together, 1).plus(3 * model.hidden_size)
    if model.qk_layernorm:
        latents, norms = model.q_lora_rank + model.kv_lora_rank, 1 + bool(model.q_lora_rank)
        forward = forward.plus(2 * latents, norms)
        backward = backward.plus(3 * latents, norms * (1 + model.norm_vectors))
    each = float(share.own_tokens(model, training) * training.element_bytes)
    return Moved(forward, backward).times(each)


def activation_bytes(
    model: ModelSpec, training: TrainingSpec, columns: float, calls: int = 1
) -> Moved:
    """Count an activation that gives so many elements, with its bias or, behind experts, the
    router's weight.

    A kernel with a bias of its own is followed, backward, by the sum of the bias's gradient.

    Args:
        model, training: of the job.
        columns: elements that it gives.
        calls: as many kernels share the elements.
    """
    of_forward, of_backward = _GATED if model.gated_mlp else _PLAIN
    forward, backward = KernelTraffic(of_forward, calls), KernelTraffic(of_backward, calls)
    if model.add_bias_linear and not model.num_experts:
        backward = backward.plus(2 if model.gated_mlp else 1, 2)
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
    if training.fuses_permutation:
        moved = KernelTraffic(2 * rows + 2 * tokens, 2)
    else:
        moved = KernelTraffic(2 * rows, 1).plus(tokens).plus(3 * rows)
    number = share.num_experts(model)
    if is_exchanged and number > 1:
        moved = moved.plus(4 * routed, 2)
    # Experts apart put what they give together, and backward their gradients.
    if not training.grouped_experts and number > 1:
        moved = moved.plus(2 * routed)
    # What comes to experts in fp8 is copied with what pads it, and of one call's result the padding
    # is left out again (`Fp8Padding`, `Fp8Unpadding` of Transformer Engine).
    if training.fp8 and not training.pads_routing:
        copies = 2 if training.grouped_experts else 1
        moved = moved.plus(2 * copies * routed, copies)
    # Backward the gradients of router and experts are added.
    forward, backward = moved.plus(0, _ROUTER[0]), moved.plus(3 * own_tokens, 1 + _ROUTER[1])
    # The sum with what the shared expert gives; backward its gradient is one more.
    if share.shared_columns:
        forward, backward = forward.plus(3 * own_tokens), backward.plus(3 * own_tokens)
    found = Moved(forward, backward).times(float(model.hidden_size * training.element_bytes))
    # A router in another precision casts, backward, what went in and its gradient.
    if not training.router_bytes:
        return found
    cast = 2 * (training.element_bytes + training.router_bytes)
    return found.plus(
        KernelTraffic(), KernelTraffic(float(own_tokens * model.hidden_size * cast), 2)
    )
