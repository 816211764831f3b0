"""What a job hangs on Megatron: nothing that it does not ask for, and hooks in their order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.training import global_vars

from megatron_hetero.plan.precision import stage_precisions
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.batches import BatchSchedule, with_micro_batch_sizes
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.attachments import RankContext, attach_all
from megatron_hetero.runtime.megatron import guards
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator
from megatron_hetero.runtime.parallel.tensor_place import tensor_place
from tests.runtime.test_stage_precision import mixed
from tests.runtime.toy_model import ToyRank, in_world
from tests.runtime.workloads import plan, workload

LAYOUT = "tp1:2,tp1:2 @2 | tp1:4 @1"
ARGS: dict[str, Any] = {
    "log_straggler": False, "rank": 0, "num_experts": None, "mtp_num_layers": None,
    "dist_ckpt_optim_fully_reshardable": False, "calculate_per_token_loss": False,
    "check_weight_hash_across_dp_replicas_interval": None, "num_attention_heads": 24,
    "swiglu": False, "ffn_hidden_size": 384, "skip_train": False, "micro_batch_size": 1,
    "qk_clip": False, "log_max_attention_logit": False, "multi_latent_attention": False,
    "transformer_impl": "local", "sft": False, "dataloader_inter_document_masking": False,
    "reset_attention_mask": False, "attention_dropout": 0.0, "softmax_type": "vanilla",
    "attention_backend": AttnBackend.auto, "align_grad_reduce": True,
    "create_attention_mask_in_dataloader": True,
}  # fmt: skip
HASHES = "check_weight_hash_across_dp_replicas_interval"
ROWS = "VocabUtility.vocab_range_from_per_partition_vocab_size"
ALWAYS = {
    "get_forward_backward_func", "dummy_train_step", "training_log", "get_megatron_optimizer",
    "_build_sharded_state_dict_metadata", "save_grads",
}  # fmt: skip


def attached(layout: str, rank: int, **changes: Any) -> RankContext:
    """A rank of a job that asks for nothing but `changes`, with everything attached."""
    asked = with_micro_batch_sizes(plan(layout), 1)
    if precisions := changes.pop("precisions", None):
        asked = with_micro_batch_sizes(mixed(layout, precisions), 1)
    toy = ToyRank(asked, rank, False, overlap=False)
    toy.config.pipeline_dtype = torch.float64
    args = SimpleNamespace(**{**ARGS, **changes})
    global_vars._GLOBAL_ARGS = args
    model = SimpleNamespace(
        transformer=toy.config, pre_wrap_hooks=["their first"], post_wrap_hooks=["their last"]
    )
    context = RankContext(
        plan=asked,
        position=rank_table(asked)[rank],
        args=args,
        arguments=split_arguments([]),
        workload=workload(),
        model=model,
        place=tensor_place(toy.config),
        precisions=stage_precisions(asked, "fp32"),
        batches=BatchSchedule.constant(asked),
        groups=toy.groups,
        communicator=PipelineCommunicator(toy.groups, toy.config, False),
        optimizer_weights=None,
        overlaps_gathers=False,
        saves_states=False,
        loads_states=False,
    )
    attach_all(context)
    return context


def replaced_symbols() -> set[str]:
    """Megatron's symbols in whose place stands something of ours."""
    found = set()
    for symbol in guards.replaced():
        owner, name = symbol.place()
        if getattr(owner, name) is not symbol.original():
            found.add(symbol.name)
    return found


ASKED: tuple[tuple[dict[str, Any], set[str]], ...] = (
    ({}, set()),
    ({HASHES: 5}, {"check_param_hashes_across_dp_replicas"}),
    ({"log_max_attention_logit": True}, {"clip_qk"}),
    ({"multi_latent_attention": True}, {"DotProductAttention.__init__"}),
)
"""Flags, and what of Megatron is replaced for them."""


def test_only_what_a_job_asks_for_is_replaced(tmp_path: Path) -> None:
    """Nor anything on a stage of equal shares for the sake of another's unequal ones."""

    def check(rank: int) -> None:
        before = replaced_symbols()

        def found(layout: str, **changes: Any) -> set[str]:
            attached(layout, rank, **changes)
            made = replaced_symbols() - before
            for symbol in guards.replaced():
                if symbol.name in made:
                    symbol.revert()  # type: ignore[attr-defined]
            return made

        for changes, more in ASKED:
            assert found(LAYOUT, **changes) == ALWAYS | more
        assert found("tp2(2:1):4 @2 | tp1:4 @1") == ALWAYS | ({ROWS} if rank < 2 else set())

    in_world(LAYOUT, check, tmp_path)


def test_hooks_stand_before_those_of_others_and_only_where_something_trains(
    tmp_path: Path,
) -> None:
    def check(rank: int) -> None:
        found = {}
        for evaluates in (False, True):
            context = attached(LAYOUT, rank, skip_train=evaluates)
            assert context.model.pre_wrap_hooks == ["their first"]
            *own, last = context.model.post_wrap_hooks
            assert last == "their last" and own[0] == context.communicator.hook
            found[evaluates] = [hook.__qualname__.split(".")[0] for hook in own]
        assert "synchronise_hook" in found[False] and "synchronise_hook" not in found[True]
        training = ("synchronise_hook", "expert_bias_hook")
        assert found[True] == [name for name in found[False] if name not in training]

    in_world(LAYOUT, check, tmp_path)


def test_masks_are_made_where_attention_asks_for_them(tmp_path: Path) -> None:
    layout = "tp1cp2:2,tp1:2 @1"

    def check(rank: int) -> None:
        makes = []
        for changes in ({}, {"attention_dropout": 0.1}, {"attention_backend": AttnBackend.unfused}):
            makes.append(attached(layout, rank, **changes).args.create_attention_mask_in_dataloader)
        assert makes == [rank == 2, True, True]

    in_world(layout, check, tmp_path)


def test_one_precision_or_several(tmp_path: Path) -> None:
    layout = "tp1:4 @2 | tp1:4 @1"

    def check(rank: int) -> None:
        for own in (None, "bf16"):
            context = attached(layout, rank, precisions=[[None], [own]])
            assert context.mixes_precisions == (own is not None)

    in_world(layout, check, tmp_path)
