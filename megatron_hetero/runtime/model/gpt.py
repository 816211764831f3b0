"""Parts that Megatron leaves to the pre-training script: batch, loss, datasets, layer spec.

The wheel has `megatron.training` but no `pretrain_gpt.py`. These are its counterparts for plain GPT
pre-training, with stock Megatron behind each call; jobs that stock Megatron runs use them too, so
nothing here may depend on the plan.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.models.gpt import default_layer_spec
from megatron.training.training import stimer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.model.dealt_experts import DealtMoELayer
from megatron_hetero.runtime.model.latent_attention import LatentSelfAttention
from megatron_hetero.runtime.model.norm import local_block_spec
from megatron_hetero.runtime.model.provider import EveryRankProvider
from megatron_hetero.runtime.model.spec_parts import with_parts
from megatron_hetero.runtime.parallel.context_attention import GatheredAttention
from megatron_hetero.runtime.parallel.groups import PipelinePlace

_SPIKY_LOSS_FACTOR = 10
"""A micro-batch's loss so many times above the largest of the first hundred is suspect; the factor
of Megatron-LM's `pretrain_gpt.py`."""

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through this stage: Megatron's forward step.

    Returns:
        The stage's output (per-token losses `[b, s]` on a last stage, activations `[s, b, h]`
        elsewhere) and the loss function for it.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    # `--log-straggler`: times the batch and the forward pass where Megatron's own script does.
    with stimer(bdata=True):
        tokens, labels, loss_mask, attention_mask, position_ids = _batch(
            data_iterator, get_attr_wrapped_model(model, "vp_stage")
        )
    timers("batch-generator").stop()
    with stimer:
        output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def _batch(data_iterator: Any, vp_stage: int | None) -> tuple[torch.Tensor | None, ...]:
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        mask = _mask_of_documents(data_iterator) if _every_stage_reads() else None
        return tuple(mask if key == "attention_mask" else None for key in _BATCH_KEYS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        raw = next(data_iterator)
        batch = {
            key: raw[key].cuda(non_blocking=True) if raw.get(key) is not None else None
            for key in _BATCH_KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if mpu.get_context_parallel_world_size() > 1:
        # The tokens of the whole sequence are here; each context-parallel rank keeps its part.
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    return tuple(batch.get(key) for key in _BATCH_KEYS)


def _every_stage_reads() -> bool:
    """Tell if inner stages of a plan need the batch too: for the mask between documents.

    Stock Megatron gives its inner stages none.
    """
    on_a_plan = isinstance(mpu.get_pipeline_model_parallel_group(), PipelinePlace)
    return on_a_plan and get_args().reset_attention_mask


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
    """Sum the per-token losses of one micro-batch that the mask counts.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output_tensor: [b, s], cross entropy of each token.
    Returns:
        The sum, the number of tokens, and `{"lm loss": [sum, tokens]}` for the log.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
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
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


@EveryRankProvider
def datasets_provider(num_samples: Any) -> tuple[GPTDataset | None, ...]:
    """Build Megatron's own (blended, indexed or mock) GPT datasets: train, valid, test.

    They are built on the ranks that read data and on rank 0; None elsewhere.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        object_storage_cache_path=args.object_storage_cache_path,
        sequences_per_dataset=_sequences_per_dataset(args.per_dataset_sequences_path),
    )

    def is_built_on_this_rank() -> bool:
        # The builder lets rank 0 write the index files before all others read them.  On a plan
        # rank 0 may be any place, and would otherwise leave the others to write them all at once.
        if torch.distributed.get_rank() == 0:
            return True
        reads = is_first_or_last_pipeline_stage(None) or _every_stage_reads()
        return mpu.get_tensor_model_parallel_rank() == 0 and reads

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset, num_samples, is_built_on_this_rank, config
    ).build()


def _sequences_per_dataset(path: str | None) -> dict[str, Any] | None:
    """Read the file of `--per-dataset-sequences-path`: [sequences, documents] of each data set."""
    if path is None:
        return None
    try:
        counted = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--per-dataset-sequences-path {path}: {error}") from error
    if not isinstance(counted, dict):
        raise UsageError(f"--per-dataset-sequences-path {path}: it must be an object by data set")
    return counted


def layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's default layer spec.

    Experts may be dealt out unequally (`runtime.model.dealt_experts`). Latent attention sums the
    gradient of its shared keys (`runtime.model.latent_attention`). Local layers get norms that
    allow sequence parallelism and attention that allows context parallelism.
    """
    config = model_config.transformer
    parts: dict[type, type] = {MLASelfAttention: LatentSelfAttention, MoELayer: DealtMoELayer}
    if config.transformer_impl == "local" and config.context_parallel_size > 1:
        parts[DotProductAttention] = GatheredAttention
    spec = with_parts(default_layer_spec(model_config, vp_stage), parts)
    if config.transformer_impl == "local" and config.sequence_parallel:
        return local_block_spec(spec, config, vp_stage)
    return spec
