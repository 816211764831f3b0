"""A job of flexible sequences: a job on a plan whose replicas train in groups.

Without a plan of the user's every GPU is a replica.  The plan says which rank is which GPU.  Groups
of parameters, the exchange of gradients, the optimizer, checkpoints and logs are those of every
plan; data, attention and the order of a step are those of this room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.emit import plan_arguments
from megatron_hetero.flags.support.rules import refuse
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.arguments import HeteroArguments, given_plan
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.checks.flexible_sequences import ADDED, REFUSED, check_words
from megatron_hetero.runtime.job.rank_arguments import shuffles_data
from megatron_hetero.runtime.job.stock import Step
from megatron_hetero.runtime.job.world import World
from megatron_hetero.sequences.job_plan import job_groups, job_plan
from megatron_hetero.sequences.proof import check_dealt_steps
from megatron_hetero.sequences.replica_groups import ReplicaGroups

if TYPE_CHECKING:
    from megatron_hetero.runtime.job.attachments import RankContext
    from megatron_hetero.runtime.parallel.groups import RankGroups


def sequences_plan(arguments: HeteroArguments) -> Plan:
    """Return the plan of a job with `--hetero-sequences`.

    Raises:
        UsageError: `--hetero-cluster` is missing.
        HeteroError: the cluster, the model or the flags are wrong or unsupported.
    """
    check_words(arguments.megatron, shuffles_data(arguments.megatron))
    asked = given_plan(arguments)
    if asked is not None:
        plan_arguments(asked, arguments.megatron, in_our_runtime=True)
    cluster, workload, profile = _inputs(arguments)
    return job_plan(cluster, workload, asked, profile)


def _inputs(arguments: HeteroArguments) -> tuple[Cluster, Workload, Profile | None]:
    cluster = load_cluster(_cluster_file(arguments))
    profile = None if arguments.profile is None else load_profile(arguments.profile)
    return cluster, load_workload(None, (*arguments.megatron, *ADDED)), profile


def groups_of(arguments: HeteroArguments, plan: Plan) -> ReplicaGroups:
    """Return the groups of a job with `--hetero-sequences` on its plan (`sequences_plan`)."""
    cluster, workload, profile = _inputs(arguments)
    return job_groups(cluster, workload, given_plan(arguments), plan, profile)


def _cluster_file(arguments: HeteroArguments) -> Path:
    if arguments.cluster is None:
        raise UsageError(
            "--hetero-sequences needs --hetero-cluster FILE: the GPUs of the job, whose speed, "
            "memory and links decide who trains what"
        )
    return arguments.cluster


class SequencesJob(AsymmetricJob):
    """Megatron's training of documents that are dealt to groups of ranks step by step."""

    def __init__(self, plan: Plan, arguments: HeteroArguments, world: World) -> None:
        # Once more: what a CPU or a GPU without Transformer Engine changes is among the flags now.
        found = groups_of(arguments, plan)
        self._tree, self._pipelines = found.tree, found.pipelines
        super().__init__(plan, replace(arguments, megatron=(*arguments.megatron, *ADDED)), world)

    def _parse(self, parse_and_validate_args: Step, named: dict[str, Any]) -> Any:
        args = super()._parse(parse_and_validate_args, named)
        heading = "These flags do not go with --hetero-sequences yet:"
        refuse(REFUSED, args, heading)
        return args

    def _check_operations(self, workload: Workload, *, aligned: bool) -> None:
        check_dealt_steps(self._plan, workload, self._tree, aligned=aligned)

    def _follow_batches(self, args: Any) -> None:
        """Count validation in documents as training is, in batches of any size."""
        args.eval_micro_batch_size = 1

    def configure(self, gpt_config_from_args: Step, args: Any, **given: Any) -> Any:
        """Build the model's configuration, with attention that groups divide."""
        from megatron_hetero.runtime.sequences.layers import divided_layer_spec, divided_rotary_hook

        model = super().configure(gpt_config_from_args, args, **given)
        model.transformer_layer_spec = divided_layer_spec
        # What crosses between stages has another length in every micro-batch.
        model.transformer.variable_seq_lengths = True
        model.pre_wrap_hooks.append(divided_rotary_hook)
        return model

    def _attach(self, context: RankContext) -> None:
        from megatron_hetero.runtime.sequences.groups import nested_groups

        groups = context.groups
        self._nested = nested_groups(self._tree, self._plan, groups.alone, groups.timeout)
        context.pipelines = self._pipelines
        super()._attach(context)

    def _iterators(self, datasets_provider: Step, groups: RankGroups) -> Callable[..., Any]:
        """Provide the steps of documents; the script's own provider is that of other data."""
        from megatron_hetero.runtime.model.samples.data import consumed_in_validation
        from megatron_hetero.runtime.model.samples.provider import EveryRankProvider
        from megatron_hetero.runtime.sequences.documents import document_datasets
        from megatron_hetero.runtime.sequences.groups import GroupPlace
        from megatron_hetero.runtime.sequences.steps import DealtSteps, dealt_tokens

        def provide(num_samples: Any) -> tuple[Any, ...]:
            args = self._args
            datasets = document_datasets(num_samples, self._tree.longest_sequence)
            # Of training, validation and test, in this order.
            consumed = (args.consumed_train_samples, consumed_in_validation(args), 0)
            sizes = (args.global_batch_size, args.eval_global_batch_size, args.global_batch_size)
            eod = datasets.eod if args.eod_mask_loss else None
            deal = partial(dealt_tokens, self._tree)
            in_sequence = self._workload.training.sequence_parallel
            place = GroupPlace(
                self._position.replica,
                self._tree.num_ranks,
                groups.pipeline.size(),
                self._nested,
                # Filling tokens make a member's tokens divide by every stage's width.
                lcm(*self._plan.layout.tensor_parallel_widths) if in_sequence else 1,
            )
            return tuple(
                None if dataset is None else DealtSteps(dataset, size, first, deal, place, eod)
                for dataset, size, first in zip(datasets.splits, sizes, consumed, strict=True)
            )

        return EveryRankProvider(provide)

    def _own_step(self, forward_step: Step) -> Step:
        from megatron_hetero.runtime.sequences import schedule

        return schedule.forward_step
