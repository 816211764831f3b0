"""`megatron-hetero verify`: train a plan on this machine's CPU beside one process, and compare.

`megatron_hetero.lab.verify.command.verify_arguments` does the work and returns data;
`report.text.trials.verification` puts it in words.  `arguments` holds:

    plan: Path | None             exactly one of plan and layout is given
    layout: str | None
    megatron_args: tuple[str]     words after `--`
    steps: int                    optimizer steps, >= 1
    optimizer: "adam" | "sgd" | None    None: both
    precision: "fp32" | "bf16" | "fp16" | "mixed" | None    None: the job's and its stages'
    floor: bool                   also measure the rounding floor
    resume: bool                  the plan's processes end at a checkpoint, and others go on
    json: bool                    one JSON object on stdout, text for people on stderr
    plant: str | None             name of a planted error, which must make the check fail
    keep: Path | None             folder that keeps what the runs wrote
    color: "auto" | "always" | "never"
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import platform
from pathlib import Path
from typing import Any, cast

from megatron_hetero.cli.arguments import at_least_one
from megatron_hetero.cli.output import Output
from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.report.text.trials.verification import verification_report

DESCRIPTION = """\
Train a plan on this machine's CPU, one process for each GPU of the plan, in
Megatron's own training loop, and beside it one process of stock Megatron from
the same weights and samples; report how far losses, gradients, gradient norm
and weights are apart.  The model is shrunk to fit, never the replicas, stages,
widths, shares or micro-batch counts; of the job's flags each is kept, shrunk,
without effect, left out (only what a CPU cannot run) or refused, and named.
On 2 cores 8 processes take half a minute, 64 about five minutes.
Exit code 0: equal to rounding; 1: not; 2, 4, 5: refused, as by the runtime;
6: a process died.

  megatron-hetero verify plan.json
  megatron-hetero verify --layout "tp2:3,tp1:1 @4 | tp1:4 @2" -- --swiglu"""
TAKES_MEGATRON_FLAGS = True

RUNTIME_MODULES = ("torch", "megatron.core", "megatron.training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `verify`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("plan", type=Path, nargs="?", metavar="PLAN.JSON", help="the plan")
    source.add_argument("--layout", metavar="LINE", help='for example "tp2:3,tp1:1 @4 | tp1:4 @2"')
    parser.add_argument(
        "--steps", type=at_least_one, default=5, metavar="N", help="optimizer steps (default: 5)"
    )
    parser.add_argument(
        "--optimizer", choices=("adam", "sgd"), help="default: the job's, then the other one"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16", "mixed"),
        help="of weights and activations; in half precision a third run, in fp32, measures what "
        "is rounding; mixed: as the plan's stages have it, beside one process that casts where "
        "they do (default: the job's and its stages', and fp32 with the other optimizer)",
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="also compare one process with one process that sums in another order",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="after half of the steps the plan saves a checkpoint and ends; new processes load it "
        "and go on, beside the one process, which never stops",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what the runs wrote: logs, tensors"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--plant", metavar="NAME", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check that the runtime is installed, run the verification and report."""
    require_runtime()
    # Ranks are forked, which CUDA does not survive; the check is one of arithmetic and order.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    command = importlib.import_module("megatron_hetero.lab.verify.command")
    with output.progress("verifying") as on_progress:
        data: dict[str, Any] = command.verify_arguments(arguments, on_progress)
    output.show(verification_report(data))
    if arguments.json:
        output.json(cast(dict[str, Any], _without_nan(data)))
    return 0 if data["ok"] else 1


def _without_nan(data: object) -> object:
    """Replace the numbers of a diverged run, for which JSON has no form, by null."""
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def require_runtime() -> None:
    """Refuse to start without torch and Megatron.

    Raises:
        EnvironmentMismatchError: one is missing; the message says what to install.
    """
    missing = missing_modules()
    if not missing:
        return
    raise EnvironmentMismatchError(
        f"this verb trains, and these packages are not installed: {', '.join(missing)}. "
        "Install the runtime, in a clone of the repository, with\n\n"
        '    pip install ".[runtime]"\n\n'
        "on Linux x86-64 with Python 3.12 or 3.13. To use a CPU build of torch (smaller, no CUDA "
        "libraries), install that build first, for instance\n\n"
        "    pip install ./torch-VERSION+cpu-....whl\n\n"
        "and then the line above; or let make do both:  make env TORCH=WHEEL_OR_VERSION."
        f" Here: Python {platform.python_version()} on {platform.system()} {platform.machine()}."
    )


def missing_modules() -> list[str]:
    """Return the modules of the runtime that are not installed."""
    # Looked up and not imported: the answer comes at once.
    return [name for name in RUNTIME_MODULES if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
