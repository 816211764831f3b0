"""Mixture of experts on an asymmetric plan: refusals, and the routing losses of the log.

Each stage holds all experts of its layers, every expert divided over the stage's tensor-parallel
group as a dense MLP is (expert parallelism of 1), and so is a shared expert; or experts are dealt
out (`runtime.model.moe.dealt_experts`). Routers are copies. A
router sees the tokens of one micro-batch, over the whole group, so it chooses as one process does
under any plan, drops the same tokens (`runtime.megatron.token_dropping`), shares experts out alike
(`runtime.megatron.sinkhorn_routing`), and is biased by the
tokens of the whole job (`runtime.model.moe.expert_bias`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, set_moe_metrics_tracker

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.dealt_experts import check_dealt_experts
from megatron_hetero.model.megatron_release import MEGATRON
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.megatron import sinkhorn_routing, token_dropping
from megatron_hetero.runtime.parallel.groups import RankGroups

_BALANCED_BY = {"aux_loss", "seq_aux_loss", "sinkhorn", "none"}

REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--num-experts without --sequence-parallel",
        lambda a: not a.sequence_parallel and a.tensor_model_parallel_size > 1,
        "add it; Megatron trains experts on a tensor-parallel group only so",
    ),
    (
        "--num-experts with biases",
        lambda a: a.add_bias_linear and a.transformer_impl == "local",
        "add --disable-bias-linear; Megatron's local experts fail in the backward pass with them",
    ),
    (
        "--moe-latent-size",
        lambda a: a.moe_latent_size is not None,
        "leave it out; its projections, which Megatron has in Transformer Engine alone, are in no "
        "price yet",
    ),
    (
        "--moe-router-load-balancing-type",
        lambda a: not _BALANCED_BY.issuperset(_names(a.moe_router_load_balancing_type)),
        "use aux_loss, seq_aux_loss, sinkhorn or none; the others count tokens over data-parallel "
        "groups",
    ),
    (
        "--moe-pad-expert-input-to-capacity",
        lambda a: a.moe_pad_expert_input_to_capacity,
        "leave it out; tokens beyond the capacity are dropped without it, and each rank would pad "
        "to a capacity of its own",
    ),
    (
        "--moe-token-dispatcher-type flex",
        lambda a: a.moe_token_dispatcher_type == "flex",
        "use allgather or alltoall",
    ),
    (
        "--moe-use-upcycling",
        lambda a: a.moe_use_upcycling,
        f"leave it out; {MEGATRON} builds the dense model, whose weights it would copy, from the "
        "configuration with experts",
    ),
    (
        "--moe-input-jitter-eps",
        lambda a: a.moe_input_jitter_eps is not None,
        "leave it out; each rank would draw noise of its own for the same tokens",
    ),
    (
        "--moe-router-force-load-balancing / --moe-router-force-biased",
        lambda a: a.moe_router_force_load_balancing or a.moe_router_force_biased is not None,
        "leave them out; they route at random to measure speed, and train nothing",
    ),
)
"""(flag in the user's words, predicate of the parsed arguments that ask for the flag, advice)."""


def _names(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else list(kinds)


def check_micro_batches(plan: Plan, args: Any) -> None:
    """Refuse micro-batches of unlike size where experts are balanced, or drop, within each.

    Raises:
        UnsupportedError: the message has the sizes, and advice.
    """
    # A replica without a size of its own has the job's.
    sizes = sorted({replica.micro_batch_size or args.micro_batch_size for replica in plan.replicas})
    if len(sizes) > 1 and args.moe_expert_capacity_factor is not None:
        raise UnsupportedError(
            f"replicas have micro-batches of {' and '.join(map(str, sizes))} sequences, and "
            "--moe-expert-capacity-factor gives each expert a capacity within a micro-batch: they "
            "would drop differently. Leave it out, or use one size for all."
        )
    within = {"aux_loss", "sinkhorn"}.intersection(_names(args.moe_router_load_balancing_type))
    if len(sizes) > 1 and within:
        raise UnsupportedError(
            f"replicas have micro-batches of {' and '.join(map(str, sizes))} sequences, and "
            f"--moe-router-load-balancing-type {min(within)} balances experts within a "
            "micro-batch: they would be balanced differently. Use seq_aux_loss, or one size for "
            "all."
        )


def check_tables(plan: Plan, args: Any) -> None:
    """Refuse unlike numbers of experts on the devices of a stage in one module of all experts.

    Raises:
        UnsupportedError: the message names the stages.
    """
    found = [
        f"replica {r}, stage {s}: {stage.shape}"
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        if len(set(stage.shape.expert_shares or ())) > 1
    ]
    if found and args.moe_grouped_gemm and args.transformer_impl != "local":
        raise UnsupportedError(
            "--moe-grouped-gemm: Transformer Engine's module of all experts wants equally many on "
            "each device. Leave the flag out, or the shares after ep:\n  " + "\n  ".join(found)
        )


def check_groups(plan: Plan, args: Any) -> None:
    """Refuse what groups of experts over replicas do not follow.

    Raises:
        UnsupportedError: the message names the flags, and advice.
    """
    check_dealt_experts(plan, has_biases=args.add_bias_linear)


class JobMoEMetrics(MoEMetricsTracker):
    """Megatron's tracker of routing losses, summed over a job whose pipelines have no groups.

    Megatron sums over the pipeline and the tensor-parallel group, takes the mean over replicas of
    equally many micro-batches, and divides by their number. Here replicas have unlike numbers, and
    sizes, of micro-batches, so that each counts by its sequences.

    Args:
        groups: the groups of this rank.
        size: sequences in a micro-batch of this rank.
    """

    def __init__(self, groups: RankGroups, size: int) -> None:
        super().__init__()
        self._size = size
        # Ranks of this stage, each with its own part of the tokens.
        self._num_parts = groups.stage.size()

    def _sync_metrics(self, metric_names: list[str], pg_collection: Any = None) -> None:
        for name in metric_names:
            entry = self._metrics[name]
            # Megatron's losses of balance are each rank's part; others are means of its tokens.
            is_part = entry.reduce_group is not None
            entry.values.mul_(self._size if is_part else self._size / self._num_parts)
            dist.all_reduce(entry.values)
            # The caller divides by the step's micro-batches of this rank's size.
            entry.values.div_(self._size)


def follow_routing(groups: RankGroups, args: Any) -> None:
    """Sum the routing losses of Megatron's log, drop tokens and share experts out, as the whole job
    does."""
    set_moe_metrics_tracker(JobMoEMetrics(groups, args.micro_batch_size))
    if args.moe_expert_capacity_factor is not None and groups.tensor.size() > 1:
        token_dropping.apply(groups.tensor)
    if "sinkhorn" in _names(args.moe_router_load_balancing_type) and groups.tensor.size() > 1:
        sinkhorn_routing.apply(groups.tensor)
