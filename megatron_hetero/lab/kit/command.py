"""`megatron-hetero doctor --train` behind the command line: the checks in order, as data.

A check that a process refuses or does not survive has failed, with what the process said; the
others go on.  A check that this machine cannot make is said to be not tried, with the reason.
With a planted error the equality checks go on until one has found it.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_hetero import __version__
from megatron_hetero.cluster.inventory.discovery import find_gpus
from megatron_hetero.errors import EnvironmentMismatchError, HeteroError, UsageError
from megatron_hetero.files import write_json
from megatron_hetero.lab.kit.cases import FP8, Case, cases_for
from megatron_hetero.lab.kit.documents import NUM_RANKS, try_documents
from megatron_hetero.lab.kit.equality import try_case
from megatron_hetero.lab.kit.forecast import Forecast, forecast
from megatron_hetero.lab.kit.lost_rank import LAYOUT, LOSSES, lose
from megatron_hetero.lab.kit.race import TEXT, race
from megatron_hetero.lab.kit.shared_card import apart, side_by_side
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.verify.faults.catalogue import FAULTS
from megatron_hetero.lab.verify.small.text import tokenizer_arguments
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.job.local_launch import preload
from megatron_hetero.runtime.transformer_engine.layers import LOCAL, TRANSFORMER_ENGINE
from megatron_hetero.units import format_bytes

MEMORY_FAULT = "memory-underpredicted"
"""Beside those of `lab.verify.faults`: the prediction of memory is taken for nine tenths."""
MEMORY_TOLERANCE = 0.03
"""Part of the prediction by which held memory may exceed the prediction: rounding of the allocator,
scalars."""
STEP_FACTOR, SHARED_STEP_FACTOR = 1.25, 3.0
"""Largest factor between measured and predicted step on a GPU, and on the cores of a CPU, shared
with further programs."""
RATIO_LIMIT, SHARED_RATIO_LIMIT = 1.05, 1.5
"""Most that the lower end of the interval of the own runtime over stock Megatron may be."""
NEEDED_BYTES = 8 << 30
"""Memory of a card for six ranks, a CUDA context of 750 MiB each, and their small models."""
RACE_LIMIT_S = 240.0
"""Seconds of a race; one takes 30."""
PROFILE, REPORT, RUNS = "profile", "report.json", "runs"
"""Names in the folder of the results; that of a profile without its ending."""
_TRAINED = (
    (LOCAL, "", ""),
    (TRANSFORMER_ENGINE, "-transformer-engine", ", Transformer Engine, bf16"),
)
"""Layers whose memory and speed are measured, their names of files, and words for them."""


@dataclass(frozen=True)
class KitRequest:
    """`output` is the folder of report and profile; `fault` names a planted error.

    `gpu`: a name of the catalogue, where it does not know the driver's.
    """

    output: Path
    gpu: str | None = None
    is_short: bool = False
    fault: str | None = None


@dataclass(frozen=True)
class Found:
    """Verdict of a check, in words and as data; `is_tried` is false where this machine cannot make
    the check."""

    ok: bool
    what: str
    data: dict[str, Any]
    is_tried: bool = True


def examine(request: KitRequest, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all checks; what they found is also in `output / REPORT`.

    Raises:
        UsageError: no such planted error, or a GPU that the catalogue does not know.
    """
    if request.fault not in (None, MEMORY_FAULT, *FAULTS):
        raise UsageError(
            f"--plant {request.fault}: choose one of {', '.join((MEMORY_FAULT, *FAULTS))}"
        )
    machine = _machine(request.gpu)
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
        for name, check in _checks(request, machine, lacking, on_progress):
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


def _machine(named: str | None) -> Machine:
    """Return the GPUs of this machine, as the driver lists them: CUDA in this process forbids
    forks."""
    count = torch.cuda.device_count()
    if count == 0:
        return Machine("CPU", 0)
    cards = find_gpus()
    # Every visible card has to hold its share of the ranks.
    for card in cards[:count]:
        free = card.memory_bytes - card.used_bytes
        if free < NEEDED_BYTES:
            raise EnvironmentMismatchError(
                f"GPU {card.index} ({card.name}) has {format_bytes(free)} free and the kit needs "
                f"{format_bytes(NEEDED_BYTES)}: end what runs on the card (`nvidia-smi` lists the "
                "processes), or hide the card with CUDA_VISIBLE_DEVICES."
            )
    # The type's name stands in profile.json, so the catalogue or the user has to say it.
    name = named or cards[0].catalogue_name
    if name is None:
        raise UsageError(
            f"the catalogue does not know this machine's {cards[0].name}; name the type "
            "nearest to it with --gpu"
        )
    return Machine(name, count)


_Check = Callable[[], Found]


def _checks(
    request: KitRequest,
    machine: Machine,
    lacking: str | None,
    on_progress: Callable[[str], None],
) -> Iterator[tuple[str, _Check]]:
    folder = request.output / RUNS
    if folder.exists():  # of a run before this one
        shutil.rmtree(folder)
    # The memory fault changes the prediction alone, which no equality check sees.
    fault = None if request.fault == MEMORY_FAULT else request.fault
    cases = () if request.fault == MEMORY_FAULT else cases_for(machine, request.is_short)
    for number, case in enumerate(cases):

        def equal(case: Case = case, number: int = number) -> Found:
            def on_step(run: str, step: int) -> None:
                on_progress(f"{case.name}: {run}, step {step}")

            return _equality(try_case(case, machine, folder / f"equal-{number}", on_step, fault))

        what = f"equal to one process: {case.name} ({case.layout}, {case.precision})"
        missing = machine.lacks_fp8() if set(FP8) <= set(case.flags) else None
        yield what, _if_there(case.layers, lacking or missing, equal)
    # Documents dealt to groups of ranks, beside whole documents.
    if cases and not request.is_short:

        def dealt() -> Found:
            return _equality(try_documents(machine, folder / "documents", fault))

        words = f"flexible sequences, {NUM_RANKS} ranks, documents dealt in parts, fp32"
        yield f"equal to one process: {words}", dealt
    # Lost ranks, memory and speed are judged in a runtime without planted errors.
    if request.is_short or fault is not None:
        return
    for how in LOSSES if request.fault is None else ():

        def lost(how: str = how) -> Found:
            with apart():
                found = lose(how, machine, folder / how)
            return Found(found.ok, found.what, found.data)

        yield f"a rank that is {how} is named, and all leave ({LAYOUT})", lost

    # A profile is measured, and a job must then hold and take what the profile predicts.
    for named, short, words in _TRAINED:

        def predicted(named: str = named, short: str = short) -> Found:
            profile = request.output / f"{PROFILE}{short}.json"
            profile.unlink(missing_ok=True)
            found = forecast(machine, profile, folder / f"forecast{short}", on_progress, named)
            return judged(found, machine, request.fault == MEMORY_FAULT)

        what = f"memory and step as predicted (tp1:4 @4, {PROFILE}{short}.json){words}"
        yield what, _if_there(named, lacking, predicted)
    # The speed of the own runtime beside stock Megatron, on a job that both run.
    for named, short, words in _TRAINED if request.fault is None else ():

        def raced(named: str = named, short: str = short) -> Found:
            return _race(machine, folder / f"race{short}", named)

        what = f"own runtime beside stock Megatron (tp1:4 @4){words}"
        yield what, _if_there(named, lacking, raced)


def _if_there(named: str, lacking: str | None, check: _Check) -> _Check:
    """Return a check, or without the layers that it trains one that says why they are not there."""
    if named == LOCAL or lacking is None:
        return check
    return lambda: Found(True, f"not tried: {lacking}", {}, is_tried=False)


def _run(name: str, check: _Check, on_progress: Callable[[str], None]) -> dict[str, Any]:
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


def _equality(data: dict[str, Any]) -> Found:
    """Return the verdict: the worst of loss, gradients, norm and weights against its tolerance."""
    keys = ("loss", "gradients", "gradient_norm", "weights")
    worst = max(keys, key=lambda key: data[key] / data["tolerance"][key])
    what = (
        f"{worst.replace('_', ' ')} differ by {data[worst]:.1e}, {data['tolerance'][worst]:.1e} "
        "allowed"
    )
    if data["unequal_initial_weights"]:
        what += f"; unequal initial weights of {data['unequal_initial_weights']}"
    if data.get("unequal_holders"):
        what += f"; {data['unequal_holder']}"
    # JSON has no numbers for a diverged run: they become null.
    distances = {key: data[key] if math.isfinite(data[key]) else None for key in keys}
    return Found(data["ok"], what, {"distances": distances})


def judged(found: Forecast, machine: Machine, is_planted: bool) -> Found:
    """Say whether memory and step are as predicted; planted: nine tenths of the memory are."""
    predicted = found.predicted_bytes * (0.9 if is_planted else 1.0)
    over = found.held_bytes / predicted - 1
    ratio = found.step_s / found.predicted_step_s
    factor = STEP_FACTOR if machine.num_gpus else SHARED_STEP_FACTOR
    # Memory may stay below its prediction; a step may be neither much longer nor much shorter.
    fits, is_timely = over <= MEMORY_TOLERANCE, 1 / factor <= ratio <= factor
    memory = f"{found.held_bytes / 2**20:.1f} MiB held, {over:+.1%} beside the prediction"
    if not fits:
        memory += f" (too little is predicted: more than {MEMORY_TOLERANCE:.0%})"
    step = (
        f"a step of {found.step_s * 1e3:.1f} ms, {ratio:.2f} of the prediction ({1 / factor:.2f} "
        f"to {factor:.2f} allowed)"
    )
    if found.attention is not None:
        step += f"; {found.attention} attention"
    data = {
        "attention": found.attention,
        "predicted_bytes": round(predicted),
        "held_bytes": found.held_bytes,
        "predicted_step_s": found.predicted_step_s,
        "step_s": found.step_s,
        "parts_bytes": {name: list(pair) for name, pair in found.parts.items()},
    }
    return Found(fits and is_timely, f"{memory}; {step}", data)


def _race(machine: Machine, folder: Path, named: str) -> Found:
    # The tokenizer of the text sets the vocabulary, so the model's own flag goes.
    flags = [flag for flag in machine.model(named) if not flag.startswith("--vocab-size")]
    more = (
        *tokenizer_arguments(folder / TEXT),
        "--lr=3e-4",
        "--lr-decay-style=constant",
        "--optimizer=adam",
        "--log-interval=1",
        "--eval-iters=0",
        "--eval-interval=1000000",
        "--num-workers=0",
    )
    # Four micro-batches on one rank: a plan that stock Megatron runs as well.
    plan = plan_from_layout(parse_layout("tp1:4 @4"))
    pairs = 40 if machine.num_gpus else 12
    found = race(
        plan, (*flags, *more), (), pairs, folder, forced=True, limit_s=RACE_LIMIT_S
    )
    # The race fails only where the whole interval lies above the limit.
    low, high = found.interval
    limit = RATIO_LIMIT if machine.num_gpus else SHARED_RATIO_LIMIT
    what = f"step times {found.ratio:.3f} ({low:.3f} to {high:.3f}), at most {limit:.2f} allowed"
    return Found(low <= limit, what, {"ratio": found.ratio, "interval": [low, high]})
