"""Generated plans with Transformer Engine's layers beside one process of the same layers."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

SEED = 20


def prove_some(first: int, last: int) -> list[tuple[bool, str, str]]:
    """Train cases `first` to `last` - 1 in a process that has the layers.

    Returns:
        Whether a case is equal, its text, and the layers that its first rank named.
    """
    from tests.runtime.plan_features import TRANSFORMER_ENGINE_SPACE
    from tests.runtime.plan_generator import cases
    from tests.runtime.prove import prove

    found = []
    for case in islice(cases(SEED, TRANSFORMER_ENGINE_SPACE), first, last):
        with tempfile.TemporaryDirectory() as folder:
            proof = prove(case, Path(folder))
            log = Path(folder) / case.optimizer / "plan" / "rank-0.log"
            said = log.read_text().splitlines()[0] if log.exists() else "no log"
        found.append((proof.ok, str(proof), said))
    return found


def tried(flags: list[str]) -> str:
    """Verify a small plan with some of Megatron's flags; return the error's text, or ""."""
    from megatron_hetero.errors import HeteroError
    from megatron_hetero.lab.verify.options import Options
    from megatron_hetero.lab.verify.run import verify
    from megatron_hetero.model.load import load_workload
    from megatron_hetero.model.training import Precision
    from megatron_hetero.plan.build import plan_from_layout
    from megatron_hetero.plan.layout import parse_layout

    layout = parse_layout("tp2:1,tp1:1 @2 | tp1:2 @1")
    sizes = (
        "--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=128", "--num-attention-heads=4",
        "--seq-length=64", "--max-position-embeddings=64", "--vocab-size=1000",
        "--micro-batch-size=1", "--global-batch-size=3",
    )  # fmt: skip
    workload = load_workload(None, (*sizes, *flags), is_planned=False)
    precision: Precision = "bf16" if "--bf16" in flags else "fp32"
    options = Options(steps=2, optimizers=("adam",), precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = verify(plan_from_layout(layout, workload), workload, options, Path(folder))
        except HeteroError as error:
            return f"{type(error).__name__}: {error}"
    return f"{done.layers}: {'equal' if done.ok else 'unlike'}"


def tried_case(name: str, folder: str) -> tuple[bool, str]:
    """Train a case of the kit; return whether it is equal, and the layers that ran."""
    from megatron_hetero.lab.kit.cases import CASES
    from megatron_hetero.lab.kit.equality import try_case
    from megatron_hetero.lab.kit.small_job import Machine

    case = next(case for case in CASES if case.name == name)
    found = try_case(case, Machine("CPU", 0), Path(folder), lambda words: None)
    return found["ok"], found["layers"]


def forecast_parts(folder: str) -> tuple[dict[str, tuple[int, int]], str]:
    """Predict and measure the kit's memory; return the parts, and the layers that the probe named.
    """
    from megatron_hetero.lab.kit.forecast import forecast
    from megatron_hetero.lab.kit.small_job import Machine
    from megatron_hetero.lab.probe import command
    from megatron_hetero.runtime.transformer_engine.layers import TRANSFORMER_ENGINE

    logs = []
    run_ranks = command.run_ranks

    def kept(module: str, arguments: list[str], num: int, place: Path, *more: Any) -> None:
        run_ranks(module, arguments, num, place, *more)
        logs.append((place / "rank-0.log").read_text())

    command.run_ranks = kept  # type: ignore[assignment]
    at = Path(folder)
    found = forecast(
        Machine("CPU", 0), at / "profile.json", at / "runs", print, TRANSFORMER_ENGINE
    )
    (said,) = [line for line in logs[0].splitlines() if line.startswith("> layers")]
    return found.parts, said
