"""The training entry: Megatron's flags in, Megatron's own `pretrain` out, on an asymmetric plan.

    torchrun ... -m megatron_hetero.pretrain_gpt <Megatron flags> --hetero-plan plan.json

All that can be refused is refused before the first process group exists.  A plan that stock
Megatron can express is handed to stock Megatron, in stock flags; so is a command line without a
plan.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_hetero.errors import CheckpointError, EnvironmentMismatchError, UsageError
from megatron_hetero.flags.emit import plan_arguments
from megatron_hetero.flags.stock import is_stock
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.plan.validate import validate_plan
from megatron_hetero.runtime import backend, machine, support
from megatron_hetero.runtime.arguments import (
    HeteroArguments,
    follow_stage,
    job_micro_batch_size,
    rank_arguments,
    requested_plan,
    split_arguments,
    virtual_world,
    vocab_divisor,
    workload_of,
)
from megatron_hetero.runtime.data import with_micro_batch_sizes

# What `pretrain_gpt.py` of Megatron-LM passes to the parser.
ARGUMENT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


class Observer(Protocol):
    """Something that watches a run without changing it (see `runtime.verify.record`)."""

    def observe_log(self) -> None: ...

    def post_wrap_hook(self, model: list[Any]) -> list[Any]: ...

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class World:
    """Where this process stands in the job, as `torchrun` tells it (or the local launcher).

    `store_path`: a file through which the ranks meet, instead of a TCP port.
    """

    rank: int
    size: int
    store_path: str | None = None

    @staticmethod
    def from_environment() -> World:
        return World(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            os.environ.get("MEGATRON_HETERO_STORE"),
        )

    def store(self) -> dist.Store | None:
        return dist.FileStore(self.store_path, self.size) if self.store_path else None


def main(argv: Sequence[str] | None = None, observer: Observer | None = None) -> None:
    """Train.  `argv` defaults to the command line.

    Raises:
        HeteroError: anything about flags, plan, model or machine that is not as it must be.
    """
    arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    plan = requested_plan(arguments)
    world = World.from_environment()
    if plan is not None:
        check_world(plan, world)
    if not backend.cuda_is_usable():
        backend.activate_cpu_backend()
        arguments = replace(arguments, megatron=(*arguments.megatron, *backend.CPU_FLAGS))
    if plan is None:
        train_stock(arguments.megatron, world, observer)
    elif is_stock(plan):
        decided = plan_arguments(plan, arguments.megatron)
        if world.rank == 0:
            print(f"> this plan is stock Megatron's own: {' '.join(decided)}", flush=True)
        train_stock((*arguments.megatron, *decided), world, observer, arguments.init)
    else:
        train_asymmetric(plan, arguments, world, observer)


def check_world(plan: Plan, world: World) -> Position:
    """The plan's place for this process.

    Raises:
        EnvironmentMismatchError: another number of processes, another host, another GPU.
    """
    table = rank_table(plan)
    if world.size != len(table):
        raise EnvironmentMismatchError(
            f"the plan has {len(table)} devices, one process each, but the job has {world.size} "
            f"(WORLD_SIZE). Start {len(table)} processes in all, as `megatron-hetero flags` "
            "prints them, or plan for the machines that are there."
        )
    machine.check_binding(plan, world.rank, table[world.rank])
    return table[world.rank]


def train_stock(
    megatron: Sequence[str],
    world: World,
    observer: Observer | None = None,
    init: str = "megatron",
) -> None:
    """Megatron's own training: its groups, schedule, data loaders and gradient sync."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hetero.runtime import gpt
    from megatron_hetero.runtime.megatron import compile_helpers
    from megatron_hetero.runtime.model_hooks import initial_weights_hook, stock_agreement_hook

    compile_helpers.apply()
    sys.argv = [sys.argv[0], *megatron]
    args = parse_and_validate_args(args_defaults=ARGUMENT_DEFAULTS)
    support.check_entry(args)
    check_checkpoint(args)
    config = _configuration(args)
    # Experts go by numbers of their rank's own, so names alone would draw all ranks' alike.
    if init == "layout-independent" and args.num_experts is None:
        config.model.pre_wrap_hooks.append(initial_weights_hook(args.seed))
        config.model.post_wrap_hooks.append(stock_agreement_hook)
    pretrain(
        config,
        _observed(observer, config, gpt.datasets_provider),
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        store=world.store(),
    )


def train_asymmetric(
    plan: Plan, arguments: HeteroArguments, world: World, observer: Observer | None = None
) -> None:
    """Megatron's `pretrain` with the plan's groups, boundaries, gradient sync and data."""
    job_size = job_micro_batch_size(plan, arguments.megatron)
    plan = with_micro_batch_sizes(plan, job_size)
    support.check_plan(plan)
    position = rank_table(plan)[world.rank]
    # Megatron's parser prints every argument, as if this rank's replica were the job: once is
    # enough, and none of it before a refusal.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args = _parse(plan, position, arguments.megatron, job_size)
    if world.rank == 0:
        print(printed.getvalue(), end="", flush=True)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron_hetero.runtime import data, gpt, model_hooks
    from megatron_hetero.runtime.boundary import PipelineCommunicator
    from megatron_hetero.runtime.groups import build_groups
    from megatron_hetero.runtime.megatron import (
        checkpoint_metadata,
        compile_helpers,
        forward_backward,
        parallel_state,
        training_log,
    )
    from megatron_hetero.runtime.schedule import ReplicaSchedule, launched_forwards
    from megatron_hetero.runtime.tensor_place import TensorPlace, set_tensor_place
    from megatron_hetero.runtime.token_rate import TokenRate

    compile_helpers.apply()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    _join(world, args, timeout)
    if world.rank == 0:
        print("\n".join(machine.binding_lines(plan)), flush=True)
    groups = build_groups(plan, timeout)
    parallel_state.fill(groups)
    forward_backward.apply(ReplicaSchedule(plan, groups))
    checkpoint_metadata.apply()
    training_log.add_observer(TokenRate().observe)
    shape = plan.replicas[position.replica].stages[position.stage].shape
    place = TensorPlace.of_stage(shape, position.tensor_rank, args)
    with place.own_sizes(args):
        config = _configuration(args)
    set_tensor_place(config.model.transformer, place)
    if arguments.init == "layout-independent":
        config.model.pre_wrap_hooks.append(model_hooks.initial_weights_hook(args.seed))
    config.model.post_wrap_hooks += [
        model_hooks.synchronise_hook(plan, groups),
        model_hooks.checkpoint_hook(groups),
    ]
    provider = _observed(observer, config, gpt.datasets_provider)
    pretrain(
        config,
        data.iterators_provider(provider, plan, groups),
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        p2p_communicator=PipelineCommunicator(
            groups, config.model.transformer, launched_forwards(plan, position.replica)
        ),
        pg_collection=groups.collection(),
        skip_model_parallel_init=True,
    )


def _parse(plan: Plan, position: Position, megatron: Sequence[str], job_size: int) -> Any:
    """Megatron's arguments for this rank, with the plan checked against the model in them."""
    from megatron.training.arguments import parse_and_validate_args

    with virtual_world(plan, position, rank_arguments(plan, position, megatron)):
        try:
            args = parse_and_validate_args(args_defaults=ARGUMENT_DEFAULTS)
        except AssertionError as error:
            raise UsageError(f"Megatron refuses the flags: {error}") from error
    follow_stage(args, plan.replicas[position.replica].stages[position.stage])
    # What ranks padded the vocabulary by is no part of the model; checkpoints compare the flag.
    args.make_vocab_size_divisible_by = vocab_divisor(megatron)
    support.check_entry(args)
    support.check_arguments(args)
    check_checkpoint(args)
    workload = workload_of(args, megatron, job_size)
    validate_plan(replace(plan, workload=workload, estimates=None))
    machine.check_same_model(plan, workload)
    return args


def check_checkpoint(args: Any) -> None:
    """With `--exit-on-missing-checkpoint` there has to be one.

    Megatron ends the process with status 0 then, which a launcher takes for a finished job.

    Raises:
        CheckpointError: names the folder.
    """
    from megatron.training.checkpointing import checkpoint_exists

    if args.exit_on_missing_checkpoint and not checkpoint_exists(args.load):
        raise CheckpointError(
            f"--load {args.load}: there is no checkpoint (no latest_checkpointed_iteration.txt), "
            "and --exit-on-missing-checkpoint asks for one. Correct the folder, or leave the flag "
            "out to start from initial weights."
        )


def _join(world: World, args: Any, timeout: timedelta) -> None:
    """Create the process group of the whole job, on this process's own GPU.

    Megatron chooses the GPU only where it creates the process group itself.
    """
    if backend.cuda_is_usable():
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group(
        backend=args.distributed_backend,
        store=world.store(),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )


def _configuration(args: Any) -> Any:
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_hetero.runtime import gpt

    model = gpt_config_from_args(args)
    if model.transformer_layer_spec is None:
        model.transformer_layer_spec = gpt.layer_spec
    return pretrain_cfg_container_from_args(args, model)


def _observed(
    observer: Observer | None, config: Any, provider: Callable[..., Any]
) -> Callable[..., Any]:
    """Hang `observer` on a run about to start; the provider of datasets to start it with."""
    if observer is None:
        return provider
    observer.observe_log()
    config.model.post_wrap_hooks.append(observer.post_wrap_hook)
    return observer.recorded(provider)
