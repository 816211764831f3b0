"""The flags of checkpoints that last and of faults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.faults.drill import Drill, parse_drill
from megatron_hetero.runtime.faults.limits import DEFAULT_STALL_S


@dataclass(frozen=True)
class FaultOptions:
    """`keep_checkpoints`: how many of the newest are kept, None for all; `drill`: a fault made on
    purpose; `stall_limit_s`: how long a rank may stand still, 0 for no watch; `is_replanned`: what
    started the job starts it under another plan when machines are lost."""

    keep_checkpoints: int | None = None
    drill: Drill | None = None
    stall_limit_s: float = DEFAULT_STALL_S
    is_replanned: bool = False

    @staticmethod
    def of(given: argparse.Namespace) -> FaultOptions:
        """The options among parsed flags.

        Raises:
            UsageError: a number or a drill that cannot be.
        """
        keep = given.hetero_keep_checkpoints
        if keep is not None and keep < 1:
            raise UsageError(
                f"--hetero-keep-checkpoints {keep}: at least the newest one is kept; give 1 or more"
            )
        drill = given.hetero_drill
        stall = given.hetero_stall_limit
        if not (stall == 0 or 5 <= stall <= 86400):
            raise UsageError(
                f"--hetero-stall-limit {stall}: give seconds, 5 to 86400, or 0 for no watch"
            )
        return FaultOptions(
            keep,
            None if drill is None else parse_drill(drill),
            stall,
            given.hetero_on_loss == "replan",
        )


NO_FAULTS = FaultOptions()
"""Options of a job without flags of faults."""


def add_fault_arguments(group: Any) -> None:
    """Add the flags to an argparse group."""
    group.add_argument(
        "--hetero-keep-checkpoints",
        type=int,
        metavar="N",
        help="keep the N newest checkpoints of --save and delete older ones, each only after a "
        "newer one is complete (default: keep all)",
    )
    group.add_argument(
        "--hetero-stall-limit",
        type=float,
        default=DEFAULT_STALL_S,
        metavar="SECONDS",
        help="all ranks stop, with the reason, when one stands still in training for longer "
        f"(default {DEFAULT_STALL_S:.0f}; phases that take longer by nature teach it; 0: no watch)",
    )
    group.add_argument(
        "--hetero-on-loss",
        choices=("stop", "replan"),
        default="stop",
        help="replan: what `launch --hetero-on-loss replan` wrote goes on under another plan when "
        "a machine is lost. Our runtime then trains plans of stock Megatron too, so that every "
        "plan loads the checkpoints of every other (default: stop)",
    )
    group.add_argument(
        "--hetero-drill",
        metavar="FAULT@RANK:STEP:PHASE",
        help='make a fault on purpose, to see that the job survives it: "kill@1:30:steady", '
        '"freeze", "spin" or "no-space" in any phase that docs/faults.md lists',
    )
