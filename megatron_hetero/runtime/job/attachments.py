"""Attachments of a job on an asymmetric plan to Megatron, made before training, in order.

`ATTACHMENTS` is the order; each entry says why it stands where it does.  An attachment reads the
`RankContext`, does nothing where the job does not ask for it, and stores there what later ones
need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_hetero.flags.support.rules import reports_logits
from megatron_hetero.flags.support.tensor_overlap import FLAG as TENSOR_OVERLAP
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.communication.communicators import model_communicators
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.runtime.batches import BatchSchedule, global_batch_size
from megatron_hetero.runtime.faults import marks
from megatron_hetero.runtime.gradients.main_weights import build_mixed_optimizer
from megatron_hetero.runtime.gradients.optimizer import build_optimizer
from megatron_hetero.runtime.gradients.sharding import ddp_hooks
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.megatron import (
    attention_logits,
    checkpoint_metadata,
    checkpoint_queue,
    context_batch,
    forward_backward,
    jit_warm_up,
    optimizer,
    parallel_state,
    skipped_steps,
    state_dumps,
    tensor_overlap,
    training_log,
    value_channels,
    vocabulary_range,
    weight_hashes,
)
from megatron_hetero.runtime.model import hooks, prediction
from megatron_hetero.runtime.model.attention.rotary import own_rotary_hook
from megatron_hetero.runtime.model.moe import expert_bias, experts
from megatron_hetero.runtime.model.precision import DTYPES
from megatron_hetero.runtime.model.samples.data import reads_data
from megatron_hetero.runtime.observe import straggler
from megatron_hetero.runtime.observe.stage_ratio import StageRatio, StageWatch
from megatron_hetero.runtime.observe.step_time import StepTime, prediction_of
from megatron_hetero.runtime.observe.timeline import recorder_of
from megatron_hetero.runtime.observe.token_rate import TokenRate
from megatron_hetero.runtime.parallel.context_place import set_context_place
from megatron_hetero.runtime.parallel.fused_rows import may_be_fused
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator
from megatron_hetero.runtime.parallel.tensor_place import TensorPlace
from megatron_hetero.runtime.sequences.balance import Balance
from megatron_hetero.runtime.sequences.schedule import DealtSchedule
from megatron_hetero.runtime.state import random_states, stock_optimizer
from megatron_hetero.runtime.steps.step import ReplicaSchedule
from megatron_hetero.sequences.pipelines import PipelineRates


@dataclass
class RankContext:
    """A rank of a job after the meeting, with all groups made.

    `args` are Megatron's, `model` is its configuration of the model with the lists of hooks.
    `optimizer_weights` is [rank] -> its relative part of the optimizer's state; None if the state
    is not divided. `precisions` is [replica][stage] -> what it computes in. The attachment of the
    schedule makes `watch`, those of the log read it; with `pipelines`, where each step is
    dealt to groups of replicas, it makes `balance`.
    """

    plan: Plan
    position: Position
    args: Any
    arguments: HeteroArguments
    workload: Workload
    model: Any
    place: TensorPlace
    precisions: tuple[tuple[Precision, ...], ...]
    batches: BatchSchedule
    groups: RankGroups
    communicator: PipelineCommunicator
    optimizer_weights: Sequence[int] | None
    overlaps_gathers: bool
    saves_states: bool
    loads_states: bool
    watch: StageWatch | None = None
    pipelines: Sequence[PipelineRates] | None = None
    balance: Balance | None = None

    @property
    def mixes_precisions(self) -> bool:
        return len({p for replica in self.precisions for p in replica}) > 1


@dataclass(frozen=True)
class Attachment:
    """An addition to Megatron, with the reason for the place in the order."""

    attach: Callable[[RankContext], None]
    place: str


def attach_all(context: RankContext) -> None:
    """Attach everything that the job asks for."""
    for attachment in ATTACHMENTS:
        attachment.attach(context)


def _groups(context: RankContext) -> None:
    parallel_state.fill(context.groups)


def _straggler_detector(context: RankContext) -> None:
    if context.args.log_straggler:
        rank = context.args.rank
        straggler.configure(context.args, context.plan, context.workload, rank)


def _schedule(context: RankContext) -> None:
    # Steps are dealt to groups of replicas, and the balance counts what each replica does.
    if context.pipelines is not None:
        replicas = [place.replica for place in rank_table(context.plan)]
        context.balance = Balance(replicas, context.pipelines)
        schedule = DealtSchedule(context.plan, context.groups, context.balance)
        forward_backward.apply(schedule)
        return
    # A watch costs time, so it is made only where the plan has figures to compare with.
    if StageRatio.applies(context.plan):
        context.watch = StageWatch()
    forward_backward.apply(ReplicaSchedule(context.batches, context.groups, context.watch))


def _skipped_steps(context: RankContext) -> None:
    replica = context.position.replica
    counts = {
        # A dealt step comes in one piece.
        global_batch_size(plan): 1
        if context.pipelines is not None
        else plan.replicas[replica].num_micro_batches
        for plan in context.batches.plans
    }
    # All ranks ask for a dealt step together.
    reads = context.pipelines is not None or reads_data(context.groups)
    skipped_steps.apply(counts, reads_data=reads)


def _checkpoints(context: RankContext) -> None:
    stages = random_states.replica_stages(context.plan)
    entries: dict[str, Any] = {}
    if context.saves_states:
        entries[random_states.METADATA] = stages
    if context.optimizer_weights is not None and context.args.optimizer == "adam":
        # Whoever loses the odd card goes on under a plan of stock Megatron, which reads this form.
        entries[stock_optimizer.FORM_KEY] = stock_optimizer.FORM
    checkpoint_metadata.apply(**entries)
    checkpoint_queue.save_with_a_server_that_ends()


def _expert_routing(context: RankContext) -> None:
    if context.args.num_experts is not None:
        experts.follow_routing(context.groups, context.args)


def _further_tokens(context: RankContext) -> None:
    if context.args.mtp_num_layers:
        prediction.follow_losses(context.groups, context.args.micro_batch_size)


def _dumps(context: RankContext) -> None:
    counts = [replica.num_micro_batches for replica in context.plan.replicas]
    part = counts[context.position.replica] / sum(counts)
    weight = 1.0 if context.args.calculate_per_token_loss else part
    state_dumps.apply(context.groups.copy, weight)
    if context.args.check_weight_hash_across_dp_replicas_interval is not None:
        weight_hashes.apply(hooks.weights_are_equal)


def _attention_logits(context: RankContext) -> None:
    if reports_logits(context.args):
        attention_logits.apply(context.args.num_attention_heads)


def _jit_warm_up(context: RankContext) -> None:
    args = context.args
    if args.swiglu and args.ffn_hidden_size // context.groups.tensor.size() % 2:
        jit_warm_up.apply()


def _tensor_overlap(context: RankContext) -> None:
    # On all ranks: stages of one GPU have the flag no longer, but make every group.
    if TENSOR_OVERLAP not in context.arguments.megatron:
        return
    groups = [one.ranks for one in model_communicators(context.plan) if one.use == "tensor"]
    backend = context.args.tp_comm_bootstrap_backend
    tensor_overlap.apply(groups, context.groups.timeout, backend)


def _value_channels(context: RankContext) -> None:
    value_channels.apply_if_needed(context.args)


def _vocabulary_rows(context: RankContext) -> None:
    if not context.place.is_even:
        vocabulary_range.apply(context.place.vocabulary_rows)


def _sequence_shares(context: RankContext) -> None:
    place = context.groups.context_place
    if place is not None:
        set_context_place(context.model.transformer, place)
        context_batch.apply(place)
        context.model.pre_wrap_hooks.append(own_rotary_hook(place))


def _masks(context: RankContext) -> None:
    stage = context.plan.replicas[context.position.replica].stages[context.position.stage]
    args = context.args
    divides = stage.shape.context_parallel > 1 and args.transformer_impl == "local"
    if divides and may_be_fused(args):
        # Attention of its rows needs no mask, which has a byte for each pair of tokens.
        args.create_attention_mask_in_dataloader = False


def _log(context: RankContext) -> None:
    training_log.add_observer(marks.after_a_step)
    # Every dealt step has its own number of tokens, which the balance counts.
    if context.balance is None:
        training_log.add_observer(TokenRate().observe)
    else:
        training_log.add_observer(TokenRate(context.balance.tokens_so_far).observe)
        training_log.add_observer(context.balance.observe)
    if context.watch is not None:
        training_log.add_observer(StageRatio(context.plan, context.watch).observe)
        promised = prediction_of(context.plan, context.workload)
        training_log.add_observer(StepTime(promised).observe)


def _timeline(context: RankContext) -> None:
    recorder = recorder_of(context.plan, context.arguments.timeline, context.args)
    if recorder is not None:
        training_log.add_observer(recorder.observe)
        context.model.post_wrap_hooks.append(recorder.post_wrap_hook)


def _optimizer(context: RankContext) -> None:
    divides = context.optimizer_weights is not None
    build: Callable[..., Any] = build_optimizer if divides else optimizer.as_megatron
    if context.mixes_precisions:
        build = partial(build_mixed_optimizer, divides=divides)
    optimizer.apply(stock_optimizer.follow_form(build))


def _model_hooks(context: RankContext) -> None:
    synchronise = hooks.synchronise_hook(
        context.plan,
        context.groups,
        context.optimizer_weights,
        overlaps_gathers=context.overlaps_gathers,
        aligned=context.args.align_grad_reduce,
        precisions=[
            context.precisions[place.replica][place.stage] for place in rank_table(context.plan)
        ],
    )
    # Stages in unlike precisions write what a plan in the job's own would.
    dtype = DTYPES[context.workload.training.precision] if context.mixes_precisions else None
    states = random_states.RandomStates(
        random_states.replica_stages(context.plan), context.position, context.loads_states
    )
    shows: list[hooks.ModelHook] = []
    if context.plan.layout.has_sharded_layers and not context.args.skip_train:
        context.model.pre_wrap_hooks.append(ddp_hooks.hide_sharded_hook(context.plan))
        shows = [ddp_hooks.show_sharded]
    context.model.post_wrap_hooks[:0] = [
        *shows,
        context.communicator.hook,
        hooks.marks_hook(context.groups),
        hooks.random_state_hook(context.groups),
        # Nothing has a gradient in a job that only evaluates.
        *([] if context.args.skip_train else [synchronise, expert_bias.expert_bias_hook]),
        hooks.checkpoint_hook(context.groups, states, dtype),
    ]


ATTACHMENTS = (
    Attachment(_groups, "first: all that follows asks Megatron's globals for the rank's groups"),
    Attachment(_straggler_detector, "before the first step is timed"),
    Attachment(_schedule, "before the log, whose observers read the watch that it makes"),
    Attachment(_skipped_steps, "before the loop, which may begin with one"),
    Attachment(_checkpoints, "before Megatron loads a checkpoint, in its set-up"),
    Attachment(_expert_routing, "before the model is built, whose routers then report"),
    Attachment(_further_tokens, "before the log, which sums their losses"),
    Attachment(_dumps, "before the first step, which may write"),
    Attachment(_attention_logits, "before the first step, after which heads are clipped"),
    Attachment(_jit_warm_up, "before Megatron's set-up, which warms up at a size no rank has"),
    Attachment(_tensor_overlap, "before Megatron's set-up, which would make buffers of one width"),
    Attachment(_value_channels, "before the model is built, whose attention says their width"),
    Attachment(_vocabulary_rows, "before the model is built, whose embedding asks for its rows"),
    Attachment(_sequence_shares, "before the model is built, whose attention asks for its tokens"),
    Attachment(_masks, "before the data sets are built, which make the masks"),
    Attachment(_log, "after the schedule; its lines stand in the order of the observers"),
    Attachment(_timeline, "after the log, so that a step's lines stand before its file is written"),
    Attachment(_optimizer, "before Megatron builds the optimizer"),
    Attachment(
        _model_hooks,
        "last, and put before all hooks that are there: what others hang on the model sees it as "
        "it will be trained",
    ),
)
