"""Flags of this package, and the plan that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.emit import plan_arguments
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.faults.options import NO_FAULTS, FaultOptions, add_fault_arguments


@dataclass(frozen=True)
class HeteroArguments:
    """Values of the `--hetero-` flags; `megatron` is everything else, unchanged."""

    layout: str | None
    plan: Path | None
    init: str
    megatron: tuple[str, ...]
    timeline: Path | None = None
    faults: FaultOptions = NO_FAULTS
    sequences: str | None = None
    cluster: Path | None = None
    profile: Path | None = None


def add_hetero_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags; also usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group("asymmetric parallelism (megatron-hetero)")
    group.add_argument(
        "--hetero-layout",
        metavar="LAYOUT",
        help='the asymmetric plan on one line, e.g. "tp4:20,tp2:12 @12 | tp1:16,tp1:16 @4"',
    )
    group.add_argument(
        "--hetero-plan", type=Path, metavar="FILE", help="the plan as written by megatron-hetero"
    )
    group.add_argument(
        "--hetero-init",
        choices=("layout-independent", "megatron"),
        default="layout-independent",
        help="initial weights by global index (the same under every plan), or Megatron's own draws",
    )
    group.add_argument(
        "--hetero-timeline",
        type=Path,
        metavar="FILE",
        help="write what every stage does when, of the steps from Megatron's --profile-step-start "
        "(10) to before --profile-step-end (12); for ui.perfetto.dev and `report --measured`",
    )
    group.add_argument(
        "--hetero-sequences",
        choices=("flexible",),
        help="every document is one sequence, and those of a step are dealt to groups of GPUs of "
        "unlike size, in shares by speed (docs/sequences.md); needs --hetero-cluster. With a plan "
        "or a layout they are dealt to its replicas",
    )
    group.add_argument(
        "--hetero-cluster",
        type=Path,
        metavar="FILE",
        help="the GPUs of a job with --hetero-sequences, as for `plan`",
    )
    group.add_argument(
        "--hetero-profile",
        type=Path,
        metavar="FILE",
        help="measured times of these GPUs, as `probe` writes them (default: the catalogue)",
    )
    add_fault_arguments(group)
    return parser


def split_arguments(argv: Sequence[str]) -> HeteroArguments:
    """Take our flags out of a command line.

    Raises:
        UsageError: both a plan and a layout are given, or a flag's value cannot be.
    """
    parser = add_hetero_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    ours, megatron = parser.parse_known_args(list(argv))
    if ours.hetero_layout is not None and ours.hetero_plan is not None:
        raise UsageError("give --hetero-plan or --hetero-layout, not both")
    # Nothing but flexible sequences reads a cluster or a profile at run time.
    of_cluster = [n for n in ("cluster", "profile") if getattr(ours, f"hetero_{n}") is not None]
    if ours.hetero_sequences is None and of_cluster:
        raise UsageError(f"--hetero-{of_cluster[0]} is for --hetero-sequences; leave it out")
    return HeteroArguments(
        ours.hetero_layout,
        ours.hetero_plan,
        ours.hetero_init,
        tuple(megatron),
        ours.hetero_timeline,
        FaultOptions.of(ours),
        ours.hetero_sequences,
        ours.hetero_cluster,
        ours.hetero_profile,
    )


def requested_plan(arguments: HeteroArguments) -> Plan | None:
    """Return the plan that the flags ask for, validated; None if they ask for none.

    Raises:
        UsageError: a Megatron flag contradicts what the plan decides.
        PlanFormatError: the plan or the layout is not valid.
    """
    plan = given_plan(arguments)
    if plan is None:
        return None
    plan_arguments(plan, arguments.megatron, in_our_runtime=arguments.faults.is_replanned)
    return plan


def given_plan(arguments: HeteroArguments) -> Plan | None:
    """Return the plan of a file or a layout, validated; None if neither is given.

    Raises:
        PlanFormatError: the plan or the layout is not valid.
    """
    if arguments.plan is not None:
        return load_plan(arguments.plan)
    if arguments.layout is not None:
        return plan_from_layout(parse_layout(arguments.layout))
    return None
