"""Data sets of a GPT: Megatron's own, built where a stage reads them.

Jobs that stock Megatron runs use them too. Two differ from Megatron's. Conversations (`--sft`) are
read line by line, without the package `datasets`. The fill-in-the-middle of a sample (`--fim-data`)
is drawn by its number, not by how many samples the process has read before: so both ends of a
pipeline, every replica and a resumed job see the same one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.support.rules import is_packed
from megatron_hetero.runtime.model.samples.provider import EveryRankProvider
from megatron_hetero.runtime.parallel.groups import PipelinePlace


def every_stage_reads() -> bool:
    """Tell if inner stages need the batch too: for the mask between documents, or for the
    boundaries of packed ones.

    Stock Megatron gives its inner stages no mask.
    """
    on_a_plan = isinstance(mpu.get_pipeline_model_parallel_group(), PipelinePlace)
    return is_packed(get_args()) or (on_a_plan and get_args().reset_attention_mask)


@EveryRankProvider
def datasets_provider(num_samples: Any) -> tuple[Any, ...]:
    """Build Megatron's own (blended, indexed or mock) GPT datasets: train, valid, test.

    They are built on the ranks that read data and on rank 0; None elsewhere.
    """
    args = get_args()
    kind, config = _kind(args), dataset_config(args)

    def is_built_on_this_rank() -> bool:
        # The builder lets rank 0 write the index files before all others read them.  On a plan
        # rank 0 may be any place, and would otherwise leave the others to write them all at once.
        if torch.distributed.get_rank() == 0:
            return True
        reads = is_first_or_last_pipeline_stage(None) or every_stage_reads()
        return mpu.get_tensor_model_parallel_rank() == 0 and reads

    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_on_this_rank, config).build()


def _kind(args: Any) -> type:
    if args.sft:
        return ConversationDataset
    if args.mock_data:
        return MockGPTDataset
    return NumberedFIMDataset if args.fim_data else GPTDataset


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return the configuration of Megatron's data sets of a GPT that the flags ask for."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    # One setting for each field of Megatron's configuration, from the flag of the same meaning.
    settings = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": build_tokenizer(args),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": makes_masks(args),
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "object_storage_cache_path": args.object_storage_cache_path,
        "sequences_per_dataset": _sequences_per_dataset(args.per_dataset_sequences_path),
        "inter_document_masking": args.dataloader_inter_document_masking,
        # Conversations are padded for it; packed sequences do not go with it yet.
        "context_parallel_size": 1,
    }
    # Fill-in-the-middle has a configuration of its own, with its tokens and rates.
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    tokens = {
        name: getattr(args, f"fim_{name}_token")
        for name in ("prefix", "middle", "suffix", "pad", "eod")
    }
    return GPTFIMDatasetConfig(
        **settings,
        fim_extra_tokens=tokens,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def makes_masks(args: Any) -> bool:
    """Tell if the data set makes attention masks, which packed sequences go without."""
    return bool(args.create_attention_mask_in_dataloader) and not is_packed(args)


class NumberedFIMDataset(GPTFIMDataset):
    """Megatron's data set for filling in the middle, drawn by the number of the sample."""

    def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
        seed = [self.config.random_seed, int(idx)]
        self.np_rng = numpy.random.RandomState(
            numpy.random.MT19937(numpy.random.SeedSequence(seed))
        )
        return super()._query_document_sample_shuffle_indices(idx)


class Conversations:
    """File of conversations: on each line an object with a list of `messages`.

    Only the places of the lines are kept in memory.

    Raises:
        UsageError: the file cannot be read; or, when a line is read, it is no such object.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # Byte at which each line begins, and the end of the file.
        self._starts = [0]
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    self._starts.append(self._starts[-1] + len(line))
        except OSError as error:
            raise UsageError(f"--sft: {path}: {error}") from error

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[dict[str, str]]:
        with open(self._path, "rb") as lines:
            lines.seek(self._starts[index])
            line = lines.readline()
        try:
            messages: list[dict[str, str]] = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'--sft: {self._path}, line {index + 1}: it must be {{"messages": [...]}} ({error})'
            ) from error
        return messages


class ConversationDataset(SFTDataset):
    """Megatron's data set of packed conversations, over `Conversations`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Conversations:
        """Open the file of conversations."""
        return Conversations(dataset_path)


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
