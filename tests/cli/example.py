"""The example that the README shows, for the tests of verbs on its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples/a100-rtx4090"
CLUSTER = str(_EXAMPLE / "cluster.yaml")
MODEL = str(_EXAMPLE / "gpt-7b.sh")
PLAN = ["plan", "--cluster", CLUSTER, "--model", MODEL]
QUICK = ("--strategy", "symmetric")
"""For what does not depend on how well was searched."""


@dataclass(frozen=True)
class Printed:
    """What `plan --json` wrote and printed."""

    path: Path
    out: str
    err: str
