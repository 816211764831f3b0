"""Flags of a job on an asymmetric plan, as Megatron reads them, checked against the plan."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import own_precisions, stage_precisions
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.batches import (
    BatchSchedule,
    batch_schedule,
    global_batch_size,
    with_batch,
    with_micro_batch_sizes,
    with_micro_batches,
)
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.checks import machine, support
from megatron_hetero.runtime.job.rank_arguments import (
    follow_job,
    follow_stage,
    given_number,
    job_micro_batch_size,
    rank_arguments,
    virtual_world,
    vocab_divisor,
)
from megatron_hetero.runtime.job.stock import Step, check_checkpoint, needs_of, parsed
from megatron_hetero.runtime.job.workload import workload_of
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.model import fp8, precision
from megatron_hetero.schedule.of_plan import check_schedules
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.schedule.proof.of_plan import How


class FlagsOnPlan:
    """Flags of a job as one rank of an asymmetric plan has them.

    `flexible_sequences.SequencesJob` overrides `_check_operations` and `_follow_batches`, which are
    methods for that reason. `lab.doctor.asked_job` overrides `_needs` and `_check_files`, because
    it starts jobs of other machines.

    Raises:
        HeteroError: flags and plan contradict each other, or ask for something unsupported.
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
        # `parse` fills these in.
        self._args: Any = None
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
        self._warnings = (*support.check_flags(given), *self._needs(named))
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
        self._check_files(args)
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

    def _needs(self, named: dict[str, Any]) -> tuple[str, ...]:
        """Refuse flags whose package or partner is missing; return warnings."""
        return needs_of(self._arguments.megatron, named)

    def _check_files(self, args: Any) -> None:
        check_checkpoint(args)

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
        """Set the global batches of training, which may grow, and of validation."""
        whole = global_batch_size(self._plan)
        if args.step_batch_size_schedule is not None:
            # Each batch has a plan of its own, whose schedule is checked as well.
            text = args.step_batch_size_schedule
            self._batches = batch_schedule(text, args.seq_length, self._plan)
            for plan in self._batches.plans:
                check_schedules(plan)
            # Megatron refuses the flag beside a schedule, and takes a micro-batch for the batch.
            args.global_batch_size = whole
            own_size = given_number(self._arguments.megatron, "--eval-global-batch-size")
            args.eval_global_batch_size = whole if own_size is None else own_size
        # Validation may have a batch of its own, and micro-batches of its own size.
        validation = with_batch(self._plan, args.eval_global_batch_size, "--eval-global-batch-size")
        of_validation = given_number(self._arguments.megatron, "--eval-micro-batch-size")
        if of_validation not in (None, self._job_size):
            validation = with_micro_batches(validation, of_validation, self._job_size)
        if validation is not self._plan:
            check_schedules(validation)
            self._batches = replace(self._batches, validation=validation)
        # Megatron's loop counts a validation step in micro-batches of this replica's size.
        own = validation.replicas[self._position.replica].micro_batch_size
        args.eval_micro_batch_size = own

    def _check_optimizer_shares(self) -> None:
        if not self._divides_optimizer and len(set(optimizer_weights(self._plan))) > 1:
            raise UsageError(
                "the plan divides the optimizer's state unequally (optimizer_share), but without "
                "--use-distributed-optimizer it is not divided. Add the flag, or remove the shares."
            )


def optimizer_weights(plan: Plan) -> list[int]:
    """Return, for each rank, its relative part of the distributed optimizer's state."""
    return [
        plan.replicas[place.replica].stages[place.stage].optimizer_share or 1
        for place in rank_table(plan)
    ]
