"""Results of `doctor --train`, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from megatron_hetero.units import format_duration


def kit_report(data: Mapping[str, Any]) -> RenderableType:
    """Return one line and the finding of each check, and the verdict."""
    blocks: list[RenderableType] = []
    for check in data["checks"]:
        verdict = ("passed", "green") if check["ok"] else ("FAILED", "bold red")
        seconds = format_duration(check["seconds"])
        blocks.append(Text.assemble(verdict, f"  {check['name']}  ", (seconds, "dim")))
        blocks.append(Padding(Text(check["what"]), (0, 0, 0, 8)))
    failed = sum(not check["ok"] for check in data["checks"])
    machine = data["machine"]
    where = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "the CPU, over gloo"
    said = f"{failed} of {len(data['checks'])} checks failed" if failed else "All checks passed"
    blocks.append(
        Text(
            f"{said} on {where}, torch {machine['torch']}, megatron-core "
            f"{machine['megatron_core']}, {machine['date']}.",
            style="bold red" if failed else "green",
        )
    )
    if data["profile"]:
        blocks.append(Text(f"Times of this machine: {data['profile']}, for plan --profile"))
    return Group(*blocks)
