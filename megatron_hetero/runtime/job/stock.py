"""A job for stock Megatron alone, and the steps common to all kinds of jobs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.errors import CheckpointError, UsageError
from megatron_hetero.files import content_hash
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.faults.options import NO_FAULTS, FaultOptions
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.faults.running import (
    describe_rank,
    explained,
    saves_on_sigterm,
    start_watch,
    stop_watch,
)
from megatron_hetero.runtime.job.checks import machine, support
from megatron_hetero.runtime.job.checks.needs import check_needs
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.world import World

_FORWARD_STEP = 2
"""Its place among the arguments of `pretrain` behind the configuration."""

if TYPE_CHECKING:
    from megatron_hetero.runtime.state.saving import Saver

Step = Callable[..., Any]
"""Megatron's `parse_and_validate_args`, `gpt_config_from_args` or `pretrain`."""


class StockJob:
    """Megatron's own training: its groups, schedule, data loaders and gradient sync."""

    def __init__(
        self,
        megatron: Sequence[str],
        world: World,
        init: str = "megatron",
        plan: Plan | None = None,
        timeline: Path | None = None,
        faults: FaultOptions = NO_FAULTS,
    ) -> None:
        """Prepare a job of stock Megatron.

        Args:
            megatron: Megatron's flags.
            world: the place of this process in the job.
            init: "megatron" or "layout-independent" initial weights.
            plan: the plan that stock Megatron runs, if there is one; it is only observed.
            timeline: file for the timeline of real steps.
            faults: limits of the watch, drills and kept checkpoints.
        """
        self._faults = faults
        self._megatron, self._world, self._init = tuple(megatron), world, init
        self._plan, self._timeline = plan, timeline
        self._args: Any = None

    def parse(self, parse_and_validate_args: Step, **given: Any) -> Any:
        """Parse the flags as in `TrainingJob`, after the checks of packages."""
        from megatron_hetero.runtime.megatron import compile_helpers, guards, straggler_port

        guards.check_symbols(is_stock=True)
        compile_helpers.apply()
        straggler_port.apply()
        for warning in needs_of(self._megatron, given):
            if self._world.rank == 0:
                print(f"> megatron-hetero: warning: {warning}", flush=True)
        sys.argv = [sys.argv[0], *self._megatron]
        self._args = parsed(parse_and_validate_args, given)
        support.check_entry(self._args)
        support.check_stock(self._args)
        check_checkpoint(self._args)
        return self._args

    def configure(self, gpt_config_from_args: Step, args: Any, **given: Any) -> Any:
        """Build the model's configuration as in `TrainingJob`."""
        from megatron_hetero.runtime.megatron import value_channels
        from megatron_hetero.runtime.model.hooks import initial_weights_hook, stock_agreement_hook

        model = with_layer_spec(configured(gpt_config_from_args, args, given))
        value_channels.apply_if_needed(args)
        # Experts go by numbers of their rank's own, so names alone would draw all ranks' alike.
        if self._init == "layout-independent" and args.num_experts is None:
            model.pre_wrap_hooks.append(initial_weights_hook(args.seed))
            if not args.skip_train:
                model.post_wrap_hooks.append(stock_agreement_hook)
        if self._plan is not None:
            watch_stock(self._plan, self._timeline, args, model)
        return model

    def pretrain(self, pretrain: Step, config: Any, *given: Any, **named: Any) -> Any:
        """Train as in `TrainingJob`, with the launcher's store."""
        from megatron_hetero.runtime.faults import marks
        from megatron_hetero.runtime.megatron import optimizer, optimizer_load, training_log
        from megatron_hetero.runtime.state.safety import guard_checkpoints
        from megatron_hetero.runtime.state.stock_optimizer import follow_form

        if named.get("store") is None:
            named["store"] = self._world.store()
        plan = None if self._plan is None else content_hash(plan_to_data(self._plan))
        saver = guard_checkpoints(plan, self._faults.keep_checkpoints)
        if self._world.rank == 0:
            saver.lock(self._args.save)
        training_log.add_observer(marks.after_a_step)
        config.model.post_wrap_hooks += [marks.stock_gradients_hook, self._watch_hook]
        given = tuple(
            marks.stock_forwards(g) if i == _FORWARD_STEP else g for i, g in enumerate(given)
        )
        optimizer_load.apply_if_needed(self._args)
        divides = self._args.use_distributed_optimizer
        if not divides and not getattr(self._args, "use_layer_wise_distributed_optimizer", False):
            # Megatron's ordinary optimizer does not read the state of its distributed one.
            optimizer.apply(follow_form(optimizer.as_megatron))
        # All ranks start alike, or none does.
        MEETING.agree(timedelta(minutes=self._args.distributed_timeout_minutes))
        world, limit = self._world, self._faults.stall_limit_s
        name, saves = machine.gpu_name(self._args), saves_on_sigterm(self._args)
        PROGRESS.enter(Phase.START)
        start_watch(world.rank, world.size, world.store_path, name, limit, saves)
        PROGRESS.enter(Phase.GROUPS)
        with explained():
            return ended(saver, pretrain, config, *given, **named)

    def _watch_hook(self, model: list[Any]) -> list[Any]:
        """Say which part of the model this rank has: a `post_wrap_hook`, when Megatron knows."""
        from megatron.core import parallel_state

        describe_rank(
            f"{machine.gpu_name(self._args)}, data-parallel replica "
            f"{parallel_state.get_data_parallel_rank()}, pipeline stage "
            f"{parallel_state.get_pipeline_model_parallel_rank()}, tensor rank "
            f"{parallel_state.get_tensor_model_parallel_rank()}"
        )
        return model


def ended(saver: Saver, pretrain: Step, *given: Any, **named: Any) -> Any:
    """Train to the end; a failed last save makes the end a failure.

    Raises:
        CheckpointError: it was not.
    """
    try:
        result = pretrain(*given, **named)
    except SystemExit as leaving:
        # Megatron ends a run so at --exit-interval and its kind.
        if not leaving.code:
            stop_watch()
            saver.check_end()
        raise
    stop_watch()
    saver.check_end()
    return result


def needs_of(megatron: Sequence[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Call `check_needs` for a script's call of Megatron's parser with the arguments `given`."""
    table = flag_table()
    defaults = given.get("args_defaults") or {}
    return check_needs(
        table.split(table.known_part(megatron)),
        cuda=backend.cuda_is_usable(),
        default_tokenizer=defaults.get("tokenizer_type"),
    )


def parsed(parse_and_validate_args: Step, given: Mapping[str, Any]) -> Any:
    """Parse `sys.argv` with Megatron's parser.

    Raises:
        UsageError: Megatron refuses the flags; the message is its own, or the line of code that
            refuses without one.
    """
    try:
        return parse_and_validate_args(**given)
    except (AssertionError, ValueError, RuntimeError, ImportError, OSError) as error:
        # Some of Megatron's assertions have no message: then the refusing line says what is wanted.
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UsageError(f"Megatron refuses the flags: {said}") from error


def configured(gpt_config_from_args: Step, args: Any, given: Mapping[str, Any]) -> Any:
    """Build the configuration of the model with Megatron's own function.

    Raises:
        UsageError: Megatron refuses the model; the message is its own.
    """
    try:
        return gpt_config_from_args(args, **given)
    except (AssertionError, ValueError, ImportError) as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UsageError(f"Megatron refuses the model that the flags describe: {said}") from error


def watch_stock(plan: Plan, timeline: Path | None, args: Any, model: Any) -> None:
    """Attach the observers that a plan in stock Megatron asks for: stage ratios and a timeline."""
    from megatron_hetero.runtime.megatron import training_log
    from megatron_hetero.runtime.observe.stage_ratio import (
        StageRatio,
        StageWatch,
        watch_stock_passes,
    )
    from megatron_hetero.runtime.observe.step_time import StepTime, prediction_of
    from megatron_hetero.runtime.observe.timeline import recorder_of

    # Only a plan with estimates for these GPUs has figures to compare with.
    if StageRatio.applies(plan):
        watch = StageWatch()
        watch_stock_passes(watch)
        training_log.add_observer(StageRatio(plan, watch).observe)
        if plan.workload is not None:
            promised = prediction_of(plan, plan.workload)
            training_log.add_observer(StepTime(promised).observe)
    recorder = recorder_of(plan, timeline, args)
    if recorder is not None:
        training_log.add_observer(recorder.observe)
        model.post_wrap_hooks.append(recorder.post_wrap_hook)


def with_layer_spec(model: Any) -> Any:
    """Set our layer spec, unless `--spec` names a spec, and the spec of further tokens."""
    from megatron_hetero.runtime.megatron import mtp_spec
    from megatron_hetero.runtime.model import gpt
    from megatron_hetero.runtime.model.prediction import one_embedding_hook

    if model.transformer_layer_spec is None:
        model.transformer_layer_spec = gpt.layer_spec
    if model.transformer.mtp_num_layers:
        mtp_spec.apply(gpt.mtp_spec)
        model.pre_wrap_hooks.append(one_embedding_hook)
    return model


def check_checkpoint(args: Any) -> None:
    """Check that a checkpoint exists if `--exit-on-missing-checkpoint` is given.

    Megatron would end the process with status 0, which a launcher takes for a finished job.

    Raises:
        CheckpointError: there is none; the message names the folder.
    """
    from megatron_hetero.runtime.state.choosing import has_checkpoint

    if args.exit_on_missing_checkpoint and not has_checkpoint(args.load):
        raise CheckpointError(
            f"--load {args.load}: there is no checkpoint (no latest_checkpointed_iteration.txt), "
            "and --exit-on-missing-checkpoint asks for one. Correct the folder, or leave the flag "
            "out to start from initial weights."
        )
