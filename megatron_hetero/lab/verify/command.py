"""`megatron-hetero verify` behind the command line: options in, data out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.plan import Layout, Plan
from megatron_hetero.plan.precision import in_one_precision, mixes_precisions
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.runtime.job.local.loading import preload
from megatron_hetero.runtime.transformer_engine import layers


def verify_arguments(
    arguments: argparse.Namespace, on_progress: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    """Verify the plan of `arguments`, whose fields `cli.verify` lists.

    Args:
        arguments: the parsed command line.
        on_progress: called often with the present activity, in words.
    Returns:
        The data of `outcome_to_data`; `ok` is true if the plan trains as one process does.
    Raises:
        UsageError: plan, layout and Megatron flags contradict each other, or the planted error is
            unknown.
        EnvironmentMismatchError: this machine's memory cannot hold the processes.
        RankFailedError: a process failed.
    """
    _check_own_flags(arguments.megatron_args)
    plan, workload = _plan_and_workload(arguments)
    on_progress("importing Megatron")
    layers.provide_for(workload.megatron_args)
    preload()

    from megatron_hetero.lab.verify.faults.catalogue import check_fault
    from megatron_hetero.lab.verify.options import OPTIMIZERS, Options
    from megatron_hetero.lab.verify.outcome import outcome_to_data
    from megatron_hetero.lab.verify.run import verify

    # Refuse a wrong request before anything is started.
    if arguments.plant is not None:
        check_fault(arguments.plant)
    own = workload.training.optimizer
    precision = workload.training.precision
    # The precision of the comparison: the job's, the plan's mixture, or the one that is asked for.
    if arguments.precision == "mixed":
        if not mixes_precisions(plan, precision):
            raise UsageError(
                "--precision mixed: the plan's stages all compute in one precision. Leave it out, "
                "or give some stages their own `precision` in plan.json."
            )
    elif arguments.precision is not None:
        plan, precision = in_one_precision(plan), arguments.precision
    # The job's optimizer first, then the other one.
    others = tuple(o for o in OPTIMIZERS if o != own)
    options = Options(
        steps=arguments.steps,
        optimizers=(arguments.optimizer,) if arguments.optimizer else (own, *others),
        floor=arguments.floor,
        precision=precision,
        # As the job trains, and once more where no rounding hides a difference.
        fp32_optimizers=(
            () if arguments.optimizer or arguments.precision not in (None, "mixed") else others
        ),
        fault=arguments.plant,
        resumes_after=max(arguments.steps // 2, 1) if arguments.resume else 0,
    )

    on_progress("starting")
    with kept_folder(arguments.keep, "verify") as folder:
        return outcome_to_data(verify(plan, workload, options, folder, on_progress))


def _check_own_flags(flags: Sequence[str]) -> None:
    """Refuse flags of this package among Megatron's: a verification trains what the plan says.

    Raises:
        UnsupportedError: there is one.
    """
    own = [flag.partition("=")[0] for flag in flags if flag.startswith("--hetero-")]
    if "--hetero-sequences" in own:
        raise UnsupportedError(
            "--hetero-sequences: verify compares equal batches of sequences, and flexible jobs "
            "train documents that are dealt anew in each step. Nothing of this job was compared. "
            "Leave it out to verify the plan itself; tests/runtime/sequences/test_equality.py "
            "compares flexible jobs with one process."
        )
    if own:
        raise UnsupportedError(
            f"{', '.join(own)}: verify takes the plan or --layout alone, and sets these itself. "
            "Leave them out."
        )


def _plan_and_workload(arguments: argparse.Namespace) -> tuple[Plan, Workload]:
    # A layout names no model, so flags behind `--` do, with sizes for what they leave out.
    if arguments.layout is not None:
        layout = parse_layout(arguments.layout)
        args = (*default_flags(layout), *arguments.megatron_args)
        # Nothing is planned, so what the planner cannot price may be trained.
        workload = load_workload(None, args, is_planned=False)
        return plan_from_layout(layout, workload), workload
    plan = load_plan(arguments.plan)
    if arguments.megatron_args:
        raise UsageError(
            f"{arguments.plan} says which model it is for; Megatron flags ("
            f"{' '.join(arguments.megatron_args)}) go with --layout."
        )
    if plan.workload is None:
        raise UsageError(
            f"{arguments.plan} does not say which model it is for; use "
            f"--layout '{format_layout(plan.layout)}' with Megatron's model flags after --."
        )
    return plan, plan.workload


def default_flags(layout: Layout) -> tuple[str, ...]:
    """Return sizes absent from a layout and shrunk anyway; the user's later flags win."""
    shares = (sum(s.shares) for r in layout.replicas for s in r.stages if s.shares is not None)
    # Heads and sequence in units that every width, share and context-parallel size divides.
    unit = lcm(*layout.tensor_parallel_widths, *shares)
    heads = unit * 4
    contexts = (s.context_parallel for r in layout.replicas for s in r.stages)
    sequence = unit * 64 * lcm(*contexts)
    sizes = [r.micro_batch_size or 1 for r in layout.replicas]
    batch = sum(r.num_micro_batches * s for r, s in zip(layout.replicas, sizes, strict=True))
    # Micro-batches of unlike sizes need losses weighted by tokens.
    per_token = ("--calculate-per-token-loss",) if len(set(sizes)) > 1 else ()
    # Transformer Engine divides a sequence in equal parts only.
    local = ("--transformer-impl=local",) if layout.has_uneven_context_parallel else ()
    return (
        f"--num-layers={layout.replicas[0].num_layers}",
        f"--hidden-size={heads * 16}",
        f"--ffn-hidden-size={heads * 64}",
        f"--num-attention-heads={heads}",
        f"--seq-length={sequence}",
        f"--max-position-embeddings={sequence}",
        "--vocab-size=50257",
        f"--micro-batch-size={sizes[0]}",
        f"--global-batch-size={batch}",
        *per_token,
        *local,
    )
