"""Asymmetric plans beside one process of stock Megatron, by `lab.verify`, on what the machine has.

With two GPUs or more each rank has a GPU and NCCL between them; with fewer the ranks are processes
on the CPU over gloo, because NCCL takes no two ranks on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.verify.command import default_flags
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.outcome import outcome_to_data
from megatron_hetero.lab.verify.run import verify
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Precision
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout


@dataclass(frozen=True)
class Case:
    """A plan and how it trains; `flags` are Megatron's."""

    name: str
    layout: str
    flags: tuple[str, ...] = ()
    precision: Precision = "fp32"
    optimizer: str = "adam"

    @property
    def num_ranks(self) -> int:
        return parse_layout(self.layout).num_devices


_DIVIDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
CASES = (
    Case("replicas of unlike work", "tp1:2 @2 | tp1:2 @1"),
    Case("ZeRO-1, overlap", "tp1:2 @2 | tp1:2 @1", _DIVIDED),
    Case("bf16, recompute", "tp1:2 @2 | tp1:2 @1", ("--recompute-activations",), "bf16"),
    Case("unlike widths", "tp2:1,tp1:1 @3"),
    Case("sequence parallel", "tp2:2 @2 | tp1:2 @1", ("--sequence-parallel", *_DIVIDED)),
    Case("unlike depth", "tp2:1,tp1:1 @2 | tp1:2 @1"),
)
"""From few ranks to many; a machine tries all that it has GPUs for."""
ON_CPU = ("ZeRO-1, overlap", "unlike depth")
SHARE = ("ZeRO-1, overlap",)
"""Cases that are tried without two GPUs, and in the short check."""
STEPS = 3


def cases_for(machine: Machine, is_short: bool) -> tuple[Case, ...]:
    """Return the cases that this machine tries."""
    if machine.num_gpus >= 2:
        found = tuple(case for case in CASES if case.num_ranks <= machine.num_gpus)
        return found[:1] if is_short else found
    names = SHARE if is_short else ON_CPU
    return tuple(case for case in CASES if case.name in names)


def try_case(
    case: Case,
    machine: Machine,
    folder: Path,
    on_step: Callable[[str, int], None],
    fault: str | None = None,
) -> dict[str, Any]:
    """Train the plan and one process, and measure: what `lab.verify.outcome` says as data.

    Args:
        fault: an error of `lab.verify.faults`, planted in the plan's runs.
    Raises:
        HeteroError: as `lab.verify.run.verify`.
    """
    layout = parse_layout(case.layout)
    flags = (*default_flags(layout), *case.flags)
    if case.precision != "fp32":
        flags = (*flags, f"--{case.precision}")
    workload = load_workload(None, flags, is_planned=False)
    options = Options(
        steps=STEPS,
        optimizers=(case.optimizer,),
        precision=case.precision,
        fault=fault,
        plan_flags=machine.flags,
    )
    with _hidden_gpus(machine.num_gpus < 2):
        outcome = verify(plan_from_layout(layout, workload), workload, options, folder, on_step)
    return outcome_to_data(outcome)


@contextmanager
def _hidden_gpus(is_hidden: bool) -> Iterator[None]:
    """Let the ranks that are forked meanwhile see no GPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if is_hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif is_hidden:
            del os.environ["CUDA_VISIBLE_DEVICES"]
