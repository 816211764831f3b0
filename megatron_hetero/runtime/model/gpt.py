"""Parts that Megatron leaves to the pre-training script: batch, loss, layer spec.

The wheel has `megatron.training` but no `pretrain_gpt.py`. These are its counterparts for plain GPT
pre-training, with stock Megatron behind each call (the data sets are in
`runtime.model.samples.datasets`); jobs that stock Megatron runs use them too, so nothing here may
depend on the plan.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.models.gpt import default_layer_spec
from megatron.training.training import stimer
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_hetero.flags.support.rules import is_packed, reports_logits
from megatron_hetero.runtime.model.attention.latent_attention import LatentSelfAttention
from megatron_hetero.runtime.model.attention.reported_logits import ReportingAttention
from megatron_hetero.runtime.model.moe.dealt_experts import DealtMoELayer
from megatron_hetero.runtime.model.norm import SequenceParallelTorchNorm, local_block_spec
from megatron_hetero.runtime.model.prediction import predicting_spec
from megatron_hetero.runtime.model.samples.datasets import datasets_provider as datasets_provider
from megatron_hetero.runtime.model.samples.datasets import every_stage_reads, makes_masks
from megatron_hetero.runtime.model.samples.packed import PackedAttention, packed_parameters
from megatron_hetero.runtime.model.spec_parts import with_parts
from megatron_hetero.runtime.parallel.context_attention import GatheredAttention

_SPIKY_LOSS_FACTOR = 10
"""A micro-batch's loss so many times above the largest of the first hundred is suspect; the factor
of Megatron-LM's `pretrain_gpt.py`."""

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_PACKED_KEYS = ("cu_seqlens", "max_seqlen")


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through this stage: Megatron's forward step.

    Returns:
        The stage's output (per-token losses `[b, s]` on a last stage, activations `[s, b, h]`
        elsewhere; of packed sequences `[1, b * s]` and `[b * s, 1, h]`) and the loss function for
        it.
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    # `--log-straggler`: times the batch and the forward pass where Megatron's own script does.
    with stimer(bdata=True):
        batch = _batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        documents = packed_parameters(batch, args.seq_length) if is_packed(args) else None
        tokens, labels, loss_mask, attention_mask, position_ids = map(batch.get, _BATCH_KEYS)
    timers("batch-generator").stop()
    with stimer:
        output = model(
            tokens,
            position_ids,
            attention_mask,
            labels=labels,
            loss_mask=loss_mask,
            packed_seq_params=documents,
        )
    return output, partial(loss_func, loss_mask)


def _batch(data_iterator: Any, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """Read this stage's part of a micro-batch, shared with its tensor-parallel group."""
    args = get_args()
    packed = is_packed(args)
    # Inner stages get activations; of the batch they need the mask at most.
    if not packed and not is_first_or_last_pipeline_stage(vp_stage):
        return {"attention_mask": _mask_of_documents(data_iterator)} if every_stage_reads() else {}
    batch = {}
    # One rank of the tensor-parallel group reads, and shares with the others below.
    if mpu.get_tensor_model_parallel_rank() == 0:
        raw = next(data_iterator)
        batch = {
            key: raw[key].cuda(non_blocking=True) if raw.get(key) is not None else None
            for key in (*_BATCH_KEYS, *(_PACKED_KEYS if packed else ()))
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=makes_masks(args),
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        # The whole sequence is shared here; context parallelism cuts it afterwards.
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        # Predicting several tokens, the last stage embeds them too.
        mtp_on_this_rank=mtp_on_this_rank(None, args.mtp_num_layers, False, vp_stage),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if packed:
        return flatten_batch_for_packed_sequences(batch)
    if mpu.get_context_parallel_world_size() > 1:
        # The tokens of the whole sequence are here; each context-parallel rank keeps its part.
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    return batch


def _mask_of_documents(data_iterator: Any) -> torch.Tensor:
    """Read the mask `[b, 1, s, s]` of a micro-batch, and share it with the tensor-parallel
    group."""
    args = get_args()
    if mpu.get_tensor_model_parallel_rank() == 0:
        mask = next(data_iterator)["attention_mask"].cuda(non_blocking=True)
    else:
        shape = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        mask = torch.empty(shape, dtype=torch.bool, device=torch.cuda.current_device())
    group = mpu.get_tensor_model_parallel_group()
    if group.size() > 1:
        torch.distributed.broadcast(mask, mpu.get_tensor_model_parallel_src_rank(), group=group)
    return mask


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum a micro-batch's per-token losses under the mask.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output_tensor: [b, s], cross entropy of each token.
    Returns:
        The sum, the number of tokens, and `{"lm loss": [sum, tokens]}` for the log.
    """
    # [b * s], losses and mask alike.
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    # Megatron's rerun machine judges results, and may run a suspect step once more.
    args, rerun = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun.validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss,
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    # Sum and tokens apart: the log divides them after the sum over the job.
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's default layer spec.

    Experts may be dealt out unequally (`runtime.model.moe.dealt_experts`). Latent attention sums
    the gradient of its shared keys (`runtime.model.attention.latent_attention`). Local layers get
    norms that allow sequence parallelism and attention that allows context parallelism or packed
    sequences.
    """
    config = model_config.transformer
    spec = with_parts(default_layer_spec(model_config, vp_stage), _parts(config))
    if _has_own_norms(config):
        return local_block_spec(spec, config, vp_stage)
    return spec


def mtp_spec(spec: Any, model_config: Any) -> Any:
    """Return Megatron's spec of the layers that predict further tokens, with the parts of
    `layer_spec`."""
    config = model_config.transformer
    norms: dict[Any, Any] = {}
    if _has_own_norms(config):
        norms = {WrappedTorchNorm: SequenceParallelTorchNorm}
    return predicting_spec(spec, {**_parts(config), **norms})


def _has_own_norms(config: Any) -> bool:
    asks = config.sequence_parallel or config.fp32_residual_connection
    return config.transformer_impl == "local" and asks


def _parts(config: Any) -> dict[Any, Any]:
    """Return what stands in the place of Megatron's modules."""
    parts: dict[Any, Any] = {MLASelfAttention: LatentSelfAttention, MoELayer: DealtMoELayer}
    # At most one attention of our own, by what the job asks for.
    if config.transformer_impl == "local" and config.context_parallel_size > 1:
        parts[DotProductAttention] = GatheredAttention
    elif config.transformer_impl == "local" and is_packed(get_args()):
        parts[DotProductAttention] = PackedAttention
    elif config.transformer_impl == "local" and reports_logits(get_args()):
        parts[DotProductAttention] = ReportingAttention
    return parts
