"""A job on an asymmetric plan: Megatron's training with groups, sync and data of our own."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_hetero.errors import UsageError
from megatron_hetero.files import content_hash
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.megatron_release import RELEASE
from megatron_hetero.model.spec import Precision, Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import own_precisions, stage_precisions
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.plan.sharding.expert_groups import expert_group_of
from megatron_hetero.runtime.batches import (
    BatchSchedule,
    batch_schedule,
    global_batch_size,
    with_batch,
    with_micro_batch_sizes,
    with_micro_batches,
)
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.faults.running import explained, saves_on_sigterm, start_watch
from megatron_hetero.runtime.job.arguments import (
    HeteroArguments,
    follow_job,
    follow_stage,
    given_number,
    job_micro_batch_size,
    rank_arguments,
    shuffles_data,
    virtual_world,
    vocab_divisor,
)
from megatron_hetero.runtime.job.checks import machine, support
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.stock import (
    Step,
    check_checkpoint,
    configured,
    ended,
    needs_of,
    parsed,
    with_layer_spec,
)
from megatron_hetero.runtime.job.workload import workload_of
from megatron_hetero.runtime.job.world import World, join
from megatron_hetero.runtime.model import fp8, precision
from megatron_hetero.schedule.of_plan import check_schedules
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.schedule.proof.of_plan import How

if TYPE_CHECKING:
    from megatron_hetero.runtime.job.attachments import RankContext
    from megatron_hetero.runtime.parallel.boundary import PipelineCommunicator
    from megatron_hetero.runtime.parallel.groups import RankGroups


class AsymmetricJob:
    """Megatron's training with the plan's groups, boundaries, gradient sync and data.

    `flexible_sequences.SequencesJob` overrides `_check_operations`, `_follow_batches`, `_attach`,
    `_iterators` and `_own_step`, which are methods for that reason.

    Raises:
        HeteroError: flags, plan or model contradict each other, or ask for something unsupported.
    """

    def __init__(self, plan: Plan, arguments: HeteroArguments, world: World) -> None:
        # The plan as the flags complete it: every replica has a micro-batch size.
        self._job_size = job_micro_batch_size(plan, arguments.megatron)
        self._plan = with_micro_batch_sizes(plan, self._job_size)
        support.check_plan(self._plan)
        check_schedules(self._plan)
        self._arguments, self._world = arguments, world
        # Where this rank stands: replica, stage and place in the stage.
        self._position = rank_table(plan)[world.rank]
        self._batches = BatchSchedule.constant(self._plan)
        self._stage = self._plan.replicas[self._position.replica].stages[self._position.stage]
        # `parse` and `configure` fill these in.
        self._args: Any = None
        self._model: Any = None
        self._place: Any = None
        self._divides_optimizer = self._overlaps_gathers = False
        self._saves_states = self._loads_states = False
        self._precisions: tuple[tuple[Precision, ...], ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._workload: Workload

    def parse(self, parse_and_validate_args: Step, **given: Any) -> Any:
        """Parse the flags as in `TrainingJob`, and check the plan against their model."""
        from megatron_hetero.runtime.megatron import guards, straggler_port

        guards.check_symbols(is_stock=False)
        straggler_port.apply()
        # Megatron's parser prints every argument, as if this rank's replica were the job: once is
        # enough, and none of it before a refusal.
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self._args = self._parse(parse_and_validate_args, given)
        if self._world.rank == 0:
            print(printed.getvalue(), end="", flush=True)
            for warning in self._warnings:
                print(f"> megatron-hetero: warning: {warning}", flush=True)
        return self._args

    def _parse(self, parse_and_validate_args: Step, named: dict[str, Any]) -> Any:
        # Refuse what needs no parsing.
        plan, position, megatron = self._plan, self._position, self._arguments.megatron
        table = flag_table()
        given = table.split(table.known_part(megatron))
        self._warnings = (*support.check_flags(given), *needs_of(megatron, named))
        # Megatron's own grid of random states stays empty (`rank_arguments`); these are ours.
        names = {option.name for option in given}
        self._saves_states = "--no-save-rng" not in names
        self._loads_states = names.isdisjoint(("--no-load-rng", "--finetune"))
        # Megatron parses as if this rank were alone in a world of its replica's shape.
        with virtual_world(plan, position, rank_arguments(plan, position, megatron)):
            args = parsed(parse_and_validate_args, named)
        # Undo what the virtual world changed for the parser alone.
        follow_stage(args, self._stage)
        follow_job(args, megatron)
        self._follow_batches(args)
        # What ranks padded the vocabulary by is no part of the model; checkpoints compare the flag.
        args.make_vocab_size_divisible_by = vocab_divisor(megatron)
        # Refuse what the parsed arguments say, each check by its own subject.
        support.check_entry(args)
        support.check_arguments(args, plan)
        support.check_orders(plan, args)
        support.check_context_parallel(plan, args)
        support.check_sharded_layers(plan, args)
        support.check_precisions(plan, args)
        check_checkpoint(args)
        # Megatron's own would divide nothing: its data-parallel group is this rank alone.  Without
        # it the rest of Megatron, and what it writes, is as for an ordinary optimizer.
        self._divides_optimizer = args.use_distributed_optimizer
        args.use_distributed_optimizer = False
        # The norm of the weights would be taken while they are under way.
        self._overlaps_gathers = args.overlap_param_gather and not args.log_params_norm
        args.overlap_param_gather = False
        # Without effect on a plan, but Megatron's configuration wants interleaving with it.
        args.overlap_p2p_comm_warmup_flush = False
        # The job as the plan's checks see it, with its true optimizer.
        self._check_optimizer_shares()
        self._workload = workload_of(args, megatron, self._job_size)
        training = replace(
            self._workload.training, use_distributed_optimizer=self._divides_optimizer
        )
        whole = replace(self._workload, training=training)
        # The plan must be valid for these flags, and must not hang.
        validate_plan(replace(plan, workload=whole, estimates=None))
        self._check_operations(whole, aligned=args.align_grad_reduce)
        machine.check_same_model(plan, self._workload)
        if args.fp8 is not None:
            fp8.check_plan(plan, self._workload)
        self._follow_precisions(args)
        return args

    def _check_operations(self, workload: Workload, *, aligned: bool) -> None:
        check_operations(self._plan, workload, How(aligned=aligned))

    def _follow_precisions(self, args: Any) -> None:
        """Set the arguments for the job's single optimizer, whatever the precision of this stage.
        """
        job = self._workload.training.precision
        self._precisions = stage_precisions(self._plan, job)
        if any(own_precisions(self._plan)):
            precision.check_own_device(self._position, self._precision, args.local_rank)
            precision.follow_optimizer(args, self._plan, job)

    @property
    def _precision(self) -> Precision:
        return self._precisions[self._position.replica][self._position.stage]

    def _follow_batches(self, args: Any) -> None:
        """Set the global batches of training and validation under growing batches, or of validation
        alone."""
        # Without growing batches training has one batch; validation may have its own, and
        # micro-batches of its own size.
        if args.step_batch_size_schedule is None:
            size, flag = args.eval_global_batch_size, "--eval-global-batch-size"
            validation = with_batch(self._plan, size, flag)
            of_validation = given_number(self._arguments.megatron, "--eval-micro-batch-size")
            if of_validation not in (None, self._job_size):
                validation = with_micro_batches(validation, of_validation, self._job_size)
            if validation is not self._plan:
                check_schedules(validation)
                self._batches = replace(self._batches, validation=validation)
            # Megatron's loop counts a validation step in micro-batches of this replica's size.
            own = validation.replicas[self._position.replica].micro_batch_size
            args.eval_micro_batch_size = own
            return
        # Growing batches: each batch has a plan of its own, whose schedule is checked as well.
        self._batches = batch_schedule(args.step_batch_size_schedule, args.seq_length, self._plan)
        for plan in self._batches.plans:
            check_schedules(plan)
        # The last batch is the plan's own, and validation has no other.
        args.global_batch_size = args.eval_global_batch_size = global_batch_size(self._plan)

    def _check_optimizer_shares(self) -> None:
        if not self._divides_optimizer and len(set(optimizer_weights(self._plan))) > 1:
            raise UsageError(
                "the plan divides the optimizer's state unequally (optimizer_share), but without "
                "--use-distributed-optimizer it is not divided. Add the flag, or remove the shares."
            )

    def configure(self, gpt_config_from_args: Step, args: Any, **given: Any) -> Any:
        """Build the model's configuration as in `TrainingJob`, in the sizes of this rank."""
        from megatron_hetero.runtime.model.hooks import initial_weights_hook
        from megatron_hetero.runtime.model.moe.dealt_experts import deal_experts, experts_hook
        from megatron_hetero.runtime.parallel.tensor_place import TensorPlace, set_tensor_place

        # Experts dealt out over replicas have groups of their own, beside the tensor-parallel ones.
        group = expert_group_of(self._plan, self._world.rank)
        place = TensorPlace.of_stage(
            self._stage.shape,
            self._position.tensor_rank,
            args,
            (0, 0) if group is None else group.place(self._world.rank),
        )
        # Megatron builds from `args` alone, which therefore have this rank's sizes and precision.
        with place.own_sizes(args), precision.in_precision(args, self._precision):
            model = with_layer_spec(configured(gpt_config_from_args, args, given))
        support.check_own_lengths(self._plan, model.transformer.variable_seq_lengths)
        # Layers, gradients and checkpoints find the place again on the model's configuration.
        set_tensor_place(model.transformer, place)
        if place.dealt is not None:
            deal_experts(model.transformer, place.dealt)
            model.pre_wrap_hooks.append(experts_hook)
        # With several chunks Megatron's loop would build the data once for each, and agrees on them
        # over all ranks, of which others have other numbers.  One chunk at most reads any.
        args.virtual_pipeline_model_parallel_size = None
        if self._arguments.init == "layout-independent" and args.perform_initialization:
            model.pre_wrap_hooks.append(initial_weights_hook(args.seed))
        self._model, self._place = model, place
        return model

    def _in_own_sizes(self, step: Step) -> Step:
        """Wrap a function of the script, which may derive a configuration from `args` once more."""

        def call(*given: Any, **named: Any) -> Any:
            own = precision.in_precision(self._args, self._precision)
            with self._place.own_sizes(self._args), own:
                return step(*given, **named)

        return call

    def pretrain(
        self,
        pretrain: Step,
        config: Any,
        datasets_provider: Step,
        model_type: Any,
        forward_step: Step,
        **named: Any,
    ) -> Any:
        """Train as in `TrainingJob`, with the plan's groups and everything that the job attaches.

        Args:
            pretrain: Megatron's function.
            config: Megatron's configuration of the job, with the model of `configure`.
            datasets_provider: the script's provider of data sets.
            model_type: Megatron's type of the model.
            forward_step: the script's forward step.
            named: further arguments of the script.
        Raises:
            UsageError: the script asks Megatron for something that the plan decides.
        """
        from megatron_hetero.runtime.megatron import compile_helpers
        from megatron_hetero.runtime.state.safety import guard_checkpoints

        # The script may decide nothing that the plan decides.
        _refuse_what_the_plan_decides(named)
        if self._model is None or config.model is not self._model:
            raise UsageError(
                "the script does not build its model with Megatron's gpt_config_from_args, so that "
                "the plan cannot divide it. Train a GPT: pretrain_gpt.py of Megatron-LM core "
                f"{RELEASE} or later, or -m megatron_hetero.pretrain_gpt."
            )
        compile_helpers.apply()
        # Guard the folder of checkpoints before anything is written.
        plan_hash = content_hash(plan_to_data(self._plan))
        saver = guard_checkpoints(plan_hash, self._arguments.faults.keep_checkpoints)
        timeout = timedelta(minutes=self._args.distributed_timeout_minutes)
        if self._world.rank == 0:
            saver.lock(self._args.save)
        # All ranks agree, or none starts.
        MEETING.agree(timeout)
        PROGRESS.enter(Phase.START)
        self._watch()
        # From here the watch explains errors of other ranks.
        PROGRESS.enter(Phase.GROUPS)
        with explained():
            join(self._world, self._args, timeout)
            communicator, groups = self._prepare(config, timeout)
            return ended(
                saver,
                pretrain,
                config,
                self._iterators(datasets_provider, groups),
                model_type,
                self._own_step(forward_step),
                p2p_communicator=communicator,
                pg_collection=groups.collection(),
                skip_model_parallel_init=True,
            )

    def _prepare(self, config: Any, timeout: timedelta) -> tuple[PipelineCommunicator, RankGroups]:
        """Build the plan's groups and boundaries, and attach all to Megatron.  Collective."""
        from megatron_hetero.runtime.job.attachments import RankContext
        from megatron_hetero.runtime.parallel.boundary import PipelineCommunicator
        from megatron_hetero.runtime.parallel.groups import build_groups

        plan = self._plan
        # Parsed in a virtual world; the writer of --async-save finds its GPU by this number.
        self._args.rank = self._world.rank
        if self._world.rank == 0:
            print("\n".join(machine.binding_lines(plan)), flush=True)
        has_own_lengths = config.model.transformer.variable_seq_lengths
        begin_s = time.monotonic()
        # Groups, made and connected in one order on all ranks.
        groups = build_groups(
            plan,
            timeout,
            has_own_lengths,
            self._args.seq_length,
            () if has_own_lengths else self._activation_elements(),
        )
        if self._world.rank == 0:
            print(
                f"> megatron-hetero: made and connected the {groups.num_communicators} "
                f"communicators of rank 0 in {time.monotonic() - begin_s:.1f} s; those of "
                "gradients follow with the model",
                flush=True,
            )
        PROGRESS.enter(Phase.SETUP)
        # The communicator of the pipeline, in each boundary's precision.
        communicator = PipelineCommunicator(
            groups,
            config.model.transformer,
            self._workload.training.sequence_parallel,
            precision.crossings(self._precisions[self._position.replica], groups.chain),
        )
        # Everything that attachments may ask for.
        context = RankContext(
            plan=plan,
            position=self._position,
            args=self._args,
            arguments=self._arguments,
            workload=self._workload,
            model=config.model,
            place=self._place,
            precisions=self._precisions,
            batches=self._batches,
            groups=groups,
            communicator=communicator,
            optimizer_weights=optimizer_weights(plan) if self._divides_optimizer else None,
            overlaps_gathers=self._overlaps_gathers,
            saves_states=self._saves_states,
            loads_states=self._loads_states,
        )
        self._attach(context)
        return communicator, groups

    def _activation_elements(self) -> set[int]:
        """Return the elements of the activations that cross boundaries in training and in
        validation."""
        sizes = {
            replica.micro_batch_size or self._job_size
            for plan in (*self._batches.plans, self._batches.of_validation)
            for replica in plan.replicas
        }
        return {size * self._args.seq_length * self._args.hidden_size for size in sizes}

    def _attach(self, context: RankContext) -> None:
        from megatron_hetero.runtime.job.attachments import attach_all

        attach_all(context)

    def _iterators(self, datasets_provider: Step, groups: RankGroups) -> Callable[..., Any]:
        """Return Megatron's provider of this rank's data."""
        from megatron_hetero.runtime.model.samples import data

        return data.iterators_provider(
            self._in_own_sizes(datasets_provider),
            self._batches,
            groups,
            self._job_size if shuffles_data(self._arguments.megatron) else None,
        )

    def _own_step(self, forward_step: Step) -> Step:
        """Return the forward step of this rank."""
        return self._in_own_sizes(forward_step)

    def _watch(self) -> None:
        place, world = self._position, self._world
        name = machine.gpu_name(self._args)
        if place.device is not None:
            name = f"{self._plan.type_by_device[place.device]} {place.device}"
        what = (
            f"{name}, replica {place.replica}, stage {place.stage}, tensor rank {place.tensor_rank}"
        )
        limit = self._arguments.faults.stall_limit_s
        saves = saves_on_sigterm(self._args)
        start_watch(world.rank, world.size, world.store_path, what, limit, saves)


def optimizer_weights(plan: Plan) -> list[int]:
    """Return, for each rank, its relative part of the distributed optimizer's state."""
    return [
        plan.replicas[place.replica].stages[place.stage].optimizer_share or 1
        for place in rank_table(plan)
    ]


def _refuse_what_the_plan_decides(named: dict[str, Any]) -> None:
    """Refuse arguments of a script that the plan cannot follow."""
    # Where embeddings are is the plan's to say, and the ranks meet where the launcher put them.
    ours = ("store", "get_embedding_ranks", "get_position_embedding_ranks")
    strange = sorted(name for name, value in named.items() if name not in ours and value)
    if strange:
        raise UsageError(
            f"the script passes {', '.join(strange)} to Megatron's pretrain, which an asymmetric "
            "plan cannot follow. Leave it out, or train with -m megatron_hetero.pretrain_gpt."
        )
