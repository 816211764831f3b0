"""One process of stock Megatron: the reference of a comparison.

Model, groups, schedule, data loader, gradient sync, optimizer and loop are Megatron's. Batch, loss
and choice of datasets, which Megatron leaves to the training script, are written here once more, so
that an error in `runtime.model.gpt` cannot hide by being on both sides. From this package come only
the CPU bridge, the wheel's missing Makefile, and the width of latent attention's value heads, which
Megatron's local attention does not take.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.megatron import compile_helpers, value_channels
from megatron_hetero.runtime.transformer_engine import layers

if TYPE_CHECKING:
    from megatron_hetero.lab.verify.processes.casts import Casts
    from megatron_hetero.lab.verify.processes.recorder import Recorder


def train(
    argv: Sequence[str],
    store: torch.distributed.Store | None,
    recorder: Recorder | None = None,
    casts: Casts | None = None,
) -> None:
    """Run Megatron's `pretrain` with `argv` on this process's GPU, or on its CPU where there is
    none, watched by `recorder`.

    With `casts` the flags' precision is the optimizer's alone; the model is in fp32, and casts.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    # What Megatron takes for granted of CUDA is bridged on a CPU.
    flags = layers.gpu_flags(argv)
    if not backend.cuda_is_usable():
        flags = layers.cpu_flags(argv)
        backend.activate_cpu_backend()
    compile_helpers.apply()
    # Megatron reads its flags from the process's own.
    sys.argv = [sys.argv[0], *argv, *flags]
    try:
        args = parse_and_validate_args()
        config = pretrain_cfg_container_from_args(args, _model(gpt_config_from_args, args, casts))
    except AssertionError as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UsageError(f"Megatron refuses the flags: {said}") from error
    value_channels.apply_if_needed(args)
    provider: Any = _datasets
    # Observe the run from Megatron's hooks alone.
    if recorder is not None:
        recorder.observe_log()
        config.model.post_wrap_hooks.append(recorder.post_wrap_hook)
        provider = recorder.recorded(_datasets)
    pretrain(config, provider, ModelType.encoder_or_decoder, _forward_step, store=store)


def _model(gpt_config_from_args: Any, args: Any, casts: Casts | None) -> Any:
    if casts is None:
        return gpt_config_from_args(args)
    # The model is built in fp32; the optimizer still sees the job's flags.
    of_optimizer = args.fp16, args.bf16, args.params_dtype
    args.fp16, args.bf16, args.params_dtype = False, False, torch.float32
    model = gpt_config_from_args(args)
    args.fp16, args.bf16, args.params_dtype = of_optimizer
    args.accumulate_allreduce_grads_in_fp32 = True
    model.pre_wrap_hooks.append(casts.attach)
    return model


def _forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = {
        name: value.cuda(non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in next(batches).items()
    }
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    # Tokens that the mask leaves in the loss.
    counted = batch["loss_mask"].bool()

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # Megatron divides the sum by the tokens of the step (three results: loss per token).
        total, count = losses.float()[counted].sum(), counted.sum()
        report = torch.stack([total.detach(), count.float()])
        return total, count.int(), {"lm loss": report}

    return losses, loss


def _datasets(num_samples: Any) -> tuple[Any, ...]:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    # Packed documents are masked here, and end where the text says it.
    packed = args.dataloader_inter_document_masking
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids or packed,
        reset_attention_mask=args.reset_attention_mask or packed,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader or packed,
    )
    return tuple(
        BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()
    )
