"""What a tensor-parallel group gathers for its products: bytes of an element, widths of latents.

In fp8 with sequence parallelism what is gathered is cast before it travels, in either pass
(`gather_along_first_dim` with a quantizer, `transformer_engine/pytorch/distributed.py`, 2.20); what
is summed stays in the job's elements.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


class Gathered(NamedTuple):
    """Bytes of an element that is gathered: of a product's input, in either pass; of the gradient
    of what a row-parallel product gave, without and with `tp_comm_overlap_ag`.  `is_agreed`: the
    group first finds the largest element of each tensor, in an all-reduce of one number."""

    of_input: float
    of_gradient: float
    of_gradient_in_ring: float
    is_agreed: bool = False


def gathered(training: TrainingSpec, *, is_cast: bool) -> Gathered:
    """Return what travels where tensors are gathered for products that are in fp8, or not.

    With one scale rows alone travel (`_all_gather_fp8`), and a scale of the tensor as it is now is
    the group's (`set_quantizer_amax_reduction_group`).  With scales of blocks both casts of a
    gradient travel, by rows and by columns (`_all_gather_mxfp8`,
    `_start_all_gather_fp8_blockwise`); buffers of Transformer Engine take one.
    """
    if not (training.fp8 and is_cast):
        element = float(training.element_bytes)
        return Gathered(element, element, element)
    cast = training.product_input_bytes
    both = 2 * cast if training.has_block_scales else cast
    return Gathered(cast, both, cast, is_agreed=training.fp8_recipe == "tensorwise")


def latent_widths(model: ModelSpec) -> tuple[int, ...]:
    """Return the widths of what latent attention gathers under sequence parallelism: the input of
    the projection of queries, the latent of keys and values, and the rotary part of the keys.

    Empty without latent attention, and where the group divides the latents (local layers), whose
    down-projections gather hidden states (`MLASelfAttention` of Megatron-core 0.19).
    """
    if not model.kv_lora_rank or model.divides_latents:
        return ()
    return model.q_lora_rank or model.hidden_size, model.kv_lora_rank, model.qk_pos_emb_head_dim
