"""A job on an asymmetric plan: Megatron's training with groups, sync and data of our own."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_hetero.errors import UsageError
from megatron_hetero.files import content_hash
from megatron_hetero.model.megatron_release import RELEASE
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import place_name, rank_table
from megatron_hetero.plan.sharding.expert_groups import expert_group_of
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.faults.running import explained, saves_on_sigterm, start_watch
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.checks import machine, support
from megatron_hetero.runtime.job.flags_on_plan import FlagsOnPlan, optimizer_weights
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.rank_arguments import shuffles_data
from megatron_hetero.runtime.job.stock import Step, configured, ended, with_layer_spec
from megatron_hetero.runtime.job.world import World, join
from megatron_hetero.runtime.model import precision

if TYPE_CHECKING:
    from megatron_hetero.runtime.job.attachments import RankContext
    from megatron_hetero.runtime.parallel.groups import RankGroups
    from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator
    from megatron_hetero.runtime.state.choosing import UnlikeRanks


class AsymmetricJob(FlagsOnPlan):
    """Megatron's training with the plan's groups, boundaries, gradient sync and data.

    `flexible_sequences.SequencesJob` overrides `_attach`, `_iterators` and `_own_step`, which are
    methods for that reason.

    Raises:
        HeteroError: flags, plan or model contradict each other, or ask for something unsupported.
    """

    def __init__(self, plan: Plan, arguments: HeteroArguments, world: World) -> None:
        super().__init__(plan, arguments, world)
        # `configure` fills these in.
        self._model: Any = None
        self._place: Any = None

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
        keep = self._arguments.faults.keep_checkpoints
        saver = guard_checkpoints(plan_hash, keep, self._ranks(plan_hash))
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

    def _ranks(self, plan_hash: str) -> UnlikeRanks:
        """Return what Megatron cannot know of the job's ranks when it loads a checkpoint."""
        from megatron_hetero.runtime.state.choosing import UnlikeRanks

        first = rank_table(self._plan)[0]
        stages = self._plan.replicas[first.replica].stages
        return UnlikeRanks(plan_hash, (stages[first.stage].shape.tensor_parallel, len(stages)))

    def _prepare(self, config: Any, timeout: timedelta) -> tuple[PipelineCommunicator, RankGroups]:
        """Build the plan's groups and boundaries, and attach all to Megatron.  Collective."""
        from megatron_hetero.runtime.job.attachments import RankContext
        from megatron_hetero.runtime.parallel.building import build_groups
        from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator

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
        what = f"{name}, {place_name(place, self._plan.layout)}"
        limit = self._arguments.faults.stall_limit_s
        saves = saves_on_sigterm(self._args)
        start_watch(world.rank, world.size, world.store_path, what, limit, saves)


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
