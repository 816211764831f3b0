"""Findings of `doctor`, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.preflight.finding import Finding

_STYLES = {"error": "bold red", "warning": "yellow"}


def preflight_report(findings: Sequence[Finding], looked_at: str) -> RenderableType:
    """Show each finding as a small block, and the verdict in the last line.

    `looked_at`: what the preflight saw, in words ("8 GPUs on 2 nodes, not the machines").
    """
    return Group(*(_block(finding) for finding in findings), _verdict(findings, looked_at))


def _block(finding: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=5, style="dim")
    table.add_column(overflow="fold")
    table.add_row("where", finding.where)
    table.add_row("what", finding.what)
    table.add_row("do", finding.remedy)
    heading = Text.assemble((finding.severity, _STYLES[finding.severity]), "  ", finding.id)
    return Group(heading, Padding(table, (0, 0, 1, 2)))


def _verdict(findings: Sequence[Finding], looked_at: str) -> Text:
    # Errors colour the verdict; without any, warnings do.
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    if not findings:
        return Text(f"Nothing found. Looked at {looked_at}.", style="green")
    counts = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return Text(f"{' and '.join(counts)}. Looked at {looked_at}.", style=_STYLES[
        "error" if errors else "warning"])  # fmt: skip
