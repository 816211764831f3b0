"""`megatron-hetero doctor --train` behind the command line: the checks in order, as data.

A check that a process refuses or does not survive has failed, with what the process said; the
others go on.  A check that this machine cannot make is said to be not tried, with the reason.
With a planted error the equality checks go on until one has found it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_hetero import __version__
from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.files import write_json
from megatron_hetero.lab.kit.checks import MEMORY_FAULT, PROFILE, Check, all_checks
from megatron_hetero.lab.kit.shared_card import side_by_side
from megatron_hetero.lab.kit.small_job import Machine, this_machine
from megatron_hetero.lab.kit.verdicts import Found
from megatron_hetero.lab.verify.faults.catalogue import FAULTS
from megatron_hetero.runtime.job.local.loading import preload

REPORT = "report.json"
"""The name of the report in the folder of the results."""


@dataclass(frozen=True)
class KitRequest:
    """`output` is the folder of report and profile; `fault` names a planted error.

    `gpu`: a name of the catalogue, where it does not know the driver's.
    """

    output: Path
    gpu: str | None = None
    is_short: bool = False
    fault: str | None = None


def examine(request: KitRequest, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all checks; what they found is also in `output / REPORT`.

    Raises:
        UsageError: no such planted error, or a GPU that the catalogue does not know.
    """
    if request.fault not in (None, MEMORY_FAULT, *FAULTS):
        raise UsageError(
            f"--plant {request.fault}: choose one of {', '.join((MEMORY_FAULT, *FAULTS))}"
        )
    machine = this_machine(request.gpu)
    request.output.mkdir(parents=True, exist_ok=True)
    on_progress("importing Megatron")
    lacking = machine.lacks_transformer_engine()
    preload()
    # Imports do not belong to the seconds of the checks.
    began = time.monotonic()
    checks: list[dict[str, Any]] = []
    # All checks, on as many ranks as the machine can hold.
    with side_by_side(machine.num_gpus) as sharing:
        data = _report(request, machine, sharing, checks, 0.0)
        for name, check in all_checks(
            request.output,
            machine,
            lacking,
            on_progress,
            is_short=request.is_short,
            planted=request.fault,
        ):
            checks.append(_run(name, check, on_progress))
            # A kit that is cut short leaves what it found until then.
            data = _report(request, machine, sharing, checks, time.monotonic() - began)
            write_json(request.output / REPORT, data)
            # A planted error has to be found once; further checks would only cost time.
            if request.fault is not None and not checks[-1]["ok"]:
                break
    return data


def _report(
    request: KitRequest,
    machine: Machine,
    sharing: str,
    checks: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Return what `REPORT` says after `checks`.

    Args:
        request: what was asked.
        machine: the GPUs of the machine, or none.
        sharing: how ranks share a card, in words.
        checks: those made until now.
        seconds: that they took.
    """
    has_profile = not request.is_short and request.fault is None
    return {
        "ok": all(check["ok"] for check in checks),
        "checks": checks,
        "planted": None if request.fault is None else _planted(request.fault, checks),
        "seconds": seconds,
        "machine": {
            "gpus": machine.num_gpus,
            "gpu": machine.gpu,
            "ranks_share_a_gpu_by": sharing,
            "host": platform.node(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "megatron_hetero": __version__,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if machine.num_gpus else None,
            "megatron_core": importlib.metadata.version("megatron-core"),
        },
        "profile": str(request.output / f"{PROFILE}.json") if has_profile else None,
    }


def _planted(fault: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Say which check found a planted error; none may have, and some may not have been tried."""
    return {
        "fault": fault,
        "found_by": next((check["name"] for check in checks if not check["ok"]), None),
        "not_tried": [check["name"] for check in checks if not check["tried"]],
    }


def _run(name: str, check: Check, on_progress: Callable[[str], None]) -> dict[str, Any]:
    on_progress(name)
    began = time.monotonic()
    try:
        found = check()
    except HeteroError as error:
        found = Found(False, str(error), {})
    seconds = time.monotonic() - began
    return {
        "name": name,
        "ok": found.ok,
        "tried": found.is_tried,
        "what": found.what,
        "seconds": seconds,
        **found.data,
    }
