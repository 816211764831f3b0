"""The checks of the kit, in order: equality, lost ranks, memory and step, speed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_hetero.lab.kit.cases import FP8, Case, cases_for
from megatron_hetero.lab.kit.documents import NUM_RANKS, try_documents
from megatron_hetero.lab.kit.equality import try_case
from megatron_hetero.lab.kit.forecast import forecast
from megatron_hetero.lab.kit.lost_rank import LAYOUT, LOSSES, lose
from megatron_hetero.lab.kit.shared_card import apart
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.kit.verdicts import Found, equality_verdict, judged, raced
from megatron_hetero.runtime.transformer_engine.layers import LOCAL, TRANSFORMER_ENGINE

MEMORY_FAULT = "memory-underpredicted"
"""Beside those of `lab.verify.faults`: the prediction of memory is taken for nine tenths."""
PROFILE, RUNS = "profile", "runs"
"""Names in the folder of the results; that of a profile without its ending."""
_TRAINED = (
    (LOCAL, "", ""),
    (TRANSFORMER_ENGINE, "-transformer-engine", ", Transformer Engine, bf16"),
)
"""Layers whose memory and speed are measured, their names of files, and words for them."""
Check = Callable[[], Found]


def all_checks(
    output: Path,
    machine: Machine,
    lacking: str | None,
    on_progress: Callable[[str], None],
    *,
    is_short: bool,
    planted: str | None,
) -> Iterator[tuple[str, Check]]:
    """Yield the checks of the kit, with their names.

    Args:
        output: the folder of report and profile.
        machine: the GPUs of the machine, or none.
        lacking: why Transformer Engine's layers cannot be tried; None if they can.
        on_progress: called often with what runs.
        is_short: one case alone.
        planted: the name of an error that the checks have to find.
    """
    folder = output / RUNS
    if folder.exists():  # of a run before this one
        shutil.rmtree(folder)
    # The memory fault changes the prediction alone, which no equality check sees.
    fault = None if planted == MEMORY_FAULT else planted
    cases = () if planted == MEMORY_FAULT else cases_for(machine, is_short)
    for number, case in enumerate(cases):

        def equal(case: Case = case, number: int = number) -> Found:
            def on_run(words: str) -> None:
                on_progress(f"{case.name}: {words}")

            found = try_case(case, machine, folder / f"equal-{number}", on_run, fault)
            return equality_verdict(found)

        what = f"equal to one process: {case.name} ({case.layout}, {case.precision})"
        missing = machine.lacks_fp8() if set(FP8) <= set(case.flags) else None
        yield what, _if_there(case.layers, lacking or missing, equal)
    # Documents dealt to groups of ranks, beside whole documents.
    if cases and not is_short:

        def dealt() -> Found:
            return equality_verdict(try_documents(machine, folder / "documents", fault))

        words = f"flexible sequences, {NUM_RANKS} ranks, documents dealt in parts, fp32"
        yield f"equal to one process: {words}", dealt
    # Lost ranks, memory and speed are judged in a runtime without planted errors.
    if is_short or fault is not None:
        return
    for how in LOSSES if planted is None else ():

        def lost(how: str = how) -> Found:
            with apart():
                found = lose(how, machine, folder / how)
            return Found(found.ok, found.what, found.data)

        yield f"a rank that is {how} is named, and all leave ({LAYOUT})", lost

    # A profile is measured, and a job must then hold and take what the profile predicts.
    for named, short, words in _TRAINED:

        def predicted(named: str = named, short: str = short) -> Found:
            profile = output / f"{PROFILE}{short}.json"
            profile.unlink(missing_ok=True)
            found = forecast(machine, profile, folder / f"forecast{short}", on_progress, named)
            return judged(found, machine, planted == MEMORY_FAULT)

        what = f"memory and step as predicted (tp1:4 @4, {PROFILE}{short}.json){words}"
        yield what, _if_there(named, lacking, predicted)
    # The speed of the own runtime beside stock Megatron, on a job that both run.
    for named, short, words in _TRAINED if planted is None else ():

        def beside_stock(named: str = named, short: str = short) -> Found:
            return raced(machine, folder / f"race{short}", named)

        what = f"own runtime beside stock Megatron (tp1:4 @4){words}"
        yield what, _if_there(named, lacking, beside_stock)


def _if_there(named: str, lacking: str | None, check: Check) -> Check:
    """Return a check, or without the layers that it trains one that says why they are not there."""
    if named == LOCAL or lacking is None:
        return check
    return lambda: Found(True, f"not tried: {lacking}", {}, is_tried=False)
