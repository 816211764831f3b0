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
        if not check["tried"]:
            verdict = ("not tried", "yellow")
        seconds = format_duration(check["seconds"])
        blocks.append(Text.assemble(verdict, f"  {check['name']}  ", (seconds, "dim")))
        blocks.append(Padding(Text(check["what"]), (0, 0, 0, 8)))
    # The verdict counts what failed, and what this machine could not try.
    failed = sum(not check["ok"] for check in data["checks"])
    untried = sum(not check["tried"] for check in data["checks"])
    machine = data["machine"]
    where = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "the CPU, over gloo"
    said = f"{failed} of {len(data['checks'])} checks failed" if failed else "All checks passed"
    if untried:
        said = (
            f"{said} that were tried, {untried} were not,"
            if not failed
            else f"{said}, {untried} were not tried,"
        )
    blocks.append(
        Text(
            f"{said} on {where}, torch {machine['torch']}, megatron-core "
            f"{machine['megatron_core']}, {machine['date']}.",
            style="bold red" if failed else "green",
        )
    )
    if data["planted"]:
        blocks.append(_planted(data["planted"]))
    if data["profile"]:
        blocks.append(Text(f"Times of this machine: {data['profile']}, for plan --profile"))
    return Group(*blocks)


def _planted(data: Mapping[str, Any]) -> RenderableType:
    """Say which check found the planted error."""
    if data["found_by"]:
        return Text(f"The planted error {data['fault']} was found by: {data['found_by']}")
    untried = "".join(f"\n  not tried here: {name}" for name in data["not_tried"])
    said = f"The planted error {data['fault']} was NOT FOUND by any check that was tried here."
    return Text(said + untried, style="bold red")
