"""The report of one check of the preflight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
"""error: the job would stop, hang or train wrongly.  warning: it has done so for others, or the
figures of the plan do not hold."""


@dataclass(frozen=True)
class Finding:
    """A fault of a job, with its remedy.

    `id` is stable, for programs and for the table in the docs. `where` names the place in the plan,
    the node or the flag. `what` describes the fault, `remedy` says what to set.
    """

    id: str
    severity: Severity
    where: str
    what: str
    remedy: str


def has_errors(findings: tuple[Finding, ...]) -> bool:
    """Tell if any finding would stop the job."""
    return any(finding.severity == "error" for finding in findings)
