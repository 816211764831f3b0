"""Results of `megatron-hetero verify --json`, as the tools that verify many plans keep them."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ("loss", "gradients", "gradient_norm", "weights")


def header(steps: int) -> dict[str, Any]:
    """Return the commit, the day and the machine of a verification of so many steps."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": done.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "steps": steps,
    }


def put_page(path: Path, text: str, *, is_check: bool) -> int:
    """Write a page, or compare the page with what would be written; return the exit code."""
    if is_check:
        return 0 if path.read_text(encoding="utf-8") == text else 1
    path.write_text(text, encoding="utf-8")
    return 0


def kept_runs(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by optimizer, the worst differences that `verify` found and their bounds."""
    return {
        name: {key: run[key] for key in NUMBERS} | {"tolerance": run["tolerance"]}
        for name, run in found.get("runs", {}).items()
    }


def worst_part(run: Mapping[str, Any] | None) -> str:
    """Write the part of its bound that the worst number of a run took; nothing without a run."""
    if run is None:
        return ""
    parts = [run[key] / run["tolerance"][key] for key in NUMBERS if run[key] is not None]
    return f"{max(parts):.0%}"


def when_and_where(cases: list[dict[str, Any]]) -> str:
    """Say when, at which commits and on which machines cases were verified."""
    dates = sorted({case["date"] for case in cases})
    commits = ", ".join(sorted({case["commit"][:7] for case in cases}))
    machines = "; ".join(sorted({case["machine"] for case in cases}))
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {commits}, {machines}"
