"""Settings that a plan may choose unlike the job's flags; the search and its bound share them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import lcm

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.fp8_sizes import FP8_ROWS
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.micro_batches import size_changes_objective
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TokenDispatcher

# Sequences; larger micro-batches are not searched.
_LARGEST_SIZE = 32
_YARN_POSITIONS = 4096
"""Positions in YaRN's table of latent attention
(`MLATransformerConfig.original_max_position_embeddings`)."""
_DISPATCHER = "--moe-token-dispatcher-type"
NOT_WITH_CONTEXT_PARALLEL = frozenset(
    {
        "--reset-attention-mask",
        "--moe-expert-capacity-factor",
        "--hierarchical-context-parallel-sizes",
        "--window-size",
        "--sft",
        "--dataloader-inter-document-masking",
        "--mtp-num-layers",
        "--qk-clip",
        "--log-max-attention-logit",
        "--moe-router-load-balancing-type sinkhorn",
    }
)
"""Flags with which the runtime refuses context parallelism, some only with local layers
(`flags.support.of_plan`)."""
_NOT_IN_A_RING = frozenset({"--softmax-type off-by-one", "--softmax-type learnable"})
"""Flags without a kernel of Transformer Engine for divided sequences (`get_attention_backend`), but
where ranks exchange heads."""


def may_choose(costs: CostModel, setting: str) -> bool:
    """Return whether plans may choose a setting for themselves: the prices model it, and the
    cluster's `limits.as_given` does not hold the job to its flags."""
    return costs.has_variants and setting not in costs.cluster.limits.as_given


def micro_batch_sizes(costs: CostModel, num_replicas: int = 1) -> tuple[int, ...]:
    """Return the micro-batch sizes open to `num_replicas` replicas or more, the job's own first.
    They divide the global batch (the runtime counts in them) and leave a micro-batch for each
    replica."""
    # Sizes beyond the job's own only where they leave the training objective as it is.
    training = costs.workload.training
    own, batch = training.micro_batch_size, training.global_batch_size
    if not may_choose(costs, "micro_batch_size") or size_changes_objective(costs.workload):
        return (own,)
    # Each of the replicas needs a micro-batch at least.
    sizes = range(1, min(_LARGEST_SIZE, batch // num_replicas) + 1)
    others = (size for size in sizes if size != own and batch % size == 0)
    return own, *others


def may_mix_sizes(costs: CostModel) -> bool:
    """Return whether replicas may differ in micro-batch size; the loss then has to be per token."""
    return costs.workload.training.per_token_loss and len(micro_batch_sizes(costs)) > 1


def context_parallels(costs: CostModel, width: int, most: int) -> tuple[int, ...]:
    """Return the context-parallel sizes from 2 to `most` that a stage in tensor-parallel groups of
    `width` may choose: those that the runtime runs.

    Each rank has two chunks of every sequence, which the group divides under
    `--sequence-parallel`.
    """
    if not (may_choose(costs, "context_parallel") and may_divide(costs.workload)):
        return ()
    # Chunks of a sequence that every rank of the stage must be able to take evenly.
    model, training = costs.workload.model, costs.workload.training
    parts = 2 * (width if training.sequence_parallel else 1)
    # Products in fp8 need a number of tokens that is a multiple of `FP8_ROWS` as well.
    if training.fp8:
        parts = lcm(parts, FP8_ROWS)
    return tuple(
        size
        for size in range(2, most + 1)
        if model.seq_length % (parts * size) == 0
        and cuts_positions(costs.workload, size)
        and cuts_heads(costs.workload, width, size)
    )


def may_divide_on(workload: Workload, gpu: GpuType) -> bool:
    """Return whether a stage on such GPUs may divide sequences.  Transformer Engine divides them by
    a fused kernel alone (`get_attention_backend`, 2.20: compute capability 8.0, 16 bits); local
    layers gather keys and values (`runtime.parallel.context_attention`)."""
    model, training = workload.model, workload.training
    return training.local_layers or uses_flash_attention(model, training, gpu)


@lru_cache(maxsize=64)
def may_divide(workload: Workload, but: frozenset[str] = frozenset()) -> bool:
    """Return whether stages may divide sequences: no further tokens are predicted, and no flag is
    given that the runtime, or Transformer Engine's ring, refuses beside it; `but` are not asked."""
    given = _given(workload)
    refused = NOT_WITH_CONTEXT_PARALLEL - but
    training = workload.training
    if not (training.local_layers or training.cp_comm_type == "a2a"):
        refused |= _NOT_IN_A_RING
    return not (workload.model.mtp_num_layers or given & refused)


@lru_cache(maxsize=64)
def _given(workload: Workload) -> frozenset[str]:
    """Return the words of the job's flags, and every flag with its value."""
    # A flag may stand as `--flag value` or as `--flag=value`.
    words = [part for word in workload.megatron_args for part in word.split("=", 1)]
    return frozenset({*words, *(f"{flag} {value}" for flag, value in pairwise(words))})


def cuts_heads(workload: Workload, width: int, context_parallel: int) -> bool:
    """Return whether context-parallel ranks can exchange the heads of keys, where the job asks for
    that in place of a ring."""
    own_groups = workload.model.num_query_groups // width
    return own_groups % context_parallel == 0 or workload.training.cp_comm_type != "a2a"


@lru_cache(maxsize=1024)
def cuts_positions(workload: Workload, context_parallel: int) -> bool:
    """Return whether Megatron can cut the job's table of positions for so many context-parallel
    ranks: YaRN's of latent attention, which it cuts when it builds the model."""
    # Only latent attention has YaRN's table; a rank takes two chunks of it.
    if not workload.model.kv_lora_rank or _YARN_POSITIONS % (2 * context_parallel) == 0:
        return True
    # The last of several options counts, as in argparse; plain `rope` has no such table.
    options = last_of_each(flag_table().split(workload.megatron_args))
    return any(o.name == "--rope-type" and o.values == ("rope",) for o in options)


def shares_tokens(costs: CostModel) -> bool:
    """Return whether stages may divide sequences in unlike shares: local layers, which store no
    scores where they do so."""
    workload = costs.workload
    return (
        workload.training.fused_scores == "divided"
        and may_choose(costs, "shares")
        and may_choose(costs, "context_parallel")
        and may_divide(workload)
        and not (workload.model.num_experts or workload.model.kv_lora_rank)
    )


def deals_experts(costs: CostModel) -> bool:
    """Return whether stages may deal whole experts out evenly to the GPUs of a tensor-parallel
    group (`cost.share.equal_dealing`).

    Where times are measured, they are those of divided experts.
    """
    has_experts = costs.workload.model.num_experts > 0
    return has_experts and costs.profile is None and may_choose(costs, "shares")


def deals_unlike(costs: CostModel, width: int) -> bool:
    """Return whether a tensor-parallel group of `width` may deal whole experts out in unlike
    numbers: not where all experts of a GPU are one module, which wants as many on each."""
    workload = costs.workload
    is_one_module = workload.training.grouped_experts
    return deals_experts(costs) and not is_one_module and width <= workload.model.num_experts


ExpertGroups = tuple[int, int]
"""Expert-parallel and expert-tensor-parallel size, as of `StageShape.expert_groups`."""


def expert_groups(costs: CostModel, width: int, num_gpus: int) -> tuple[ExpertGroups, ...]:
    """Return the ways to deal experts out over `num_gpus` GPUs of alike stages, in tensor-parallel
    groups of `width`; not the one that divides every expert in its group."""
    model = costs.workload.model
    if not deals_experts(costs):
        return ()
    found = []
    # size: expert-parallel ranks; own: ranks that divide each expert.
    for size in _divisors(model.num_experts):
        for own in _divisors(width):
            fits = num_gpus % (size * own) == 0 and model.moe_ffn_hidden_size % own == 0
            if (size, own) != (1, width) and fits and divides_experts(model, own):
                found.append((size, own))
    return tuple(found)


def dispatchers(costs: CostModel) -> tuple[TokenDispatcher, ...]:
    """Return the job's own dispatcher of tokens, or if the job names none, both of Megatron's."""
    own = costs.workload.training.token_dispatcher
    # A dispatcher that the job names is the user's choice.
    given = any(word.split("=")[0] == _DISPATCHER for word in costs.workload.megatron_args)
    return (own,) if given else ("allgather", "alltoall")


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def recomputes(costs: CostModel) -> tuple[Recompute, ...]:
    """Return the kinds of recompute that a stage may have; "full" may cover any number of its
    layers."""
    if may_choose(costs, "recompute"):
        return "none", "selective", "full"
    return (costs.workload.training.recompute,)
