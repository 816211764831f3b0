"""Comparison of what Megatron's log prints of two runs.

Losses of balance and of further tokens are in no tensor: only the log has them. All that the last
rank prints of a step, but for times, is compared as a user reads it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)")
_ENTRY = re.compile(r"\s*([^|:]+?):\s+([-+.\deEinfa]+)\s*(?:\||$)")
_TIMES = ("elapsed", "throughput", "TFLOP")
_PRINTED = {"grad norm": 1e-3, "params norm": 1e-3, "num zeros": 0.0}
"""Entry -> half the unit, or more, of its printed digits; all losses have seven digits."""
_SEVEN_DIGITS = 1e-6


def printed_steps(log: str) -> dict[int, dict[str, float]]:
    """Read the entries of each step from the text of a log."""
    steps: dict[int, dict[str, float]] = {}
    for line in log.splitlines():
        found = _STEP.search(line)
        if found is None:
            continue
        entries = _ENTRY.findall(found.group(2))
        steps[int(found.group(1))] = {
            name: float(value)
            for name, value in entries
            if not any(word in name for word in _TIMES)
        }
    return steps


def first_unlike_entry(
    reference: str, plan: str, relative: float, averaged: Collection[int] = ()
) -> str | None:
    """Find the first entry of a step in which two logs differ; None if they agree.

    Args:
        reference: the log of the one process.
        plan: the log of the plan's last rank.
        relative: largest difference of a loss that counts as equal.
        averaged: steps whose printed losses are means with the step before. Megatron prints the
            first step after a start without beginning to count anew, so they depend on where a job
            was resumed; what was trained is compared without the log.
    """
    due, found = printed_steps(reference), printed_steps(plan)
    if not due:
        return "the one process's log has no line of a step that this program can read"
    # Both runs print the same steps, and each step the same entries.
    if due.keys() != found.keys():
        return f"steps {sorted(found)} are printed, in the one process {sorted(due)}"
    for step, entries in due.items():
        for name in sorted(entries.keys() | found[step].keys()):
            one, own = entries.get(name), found[step].get(name)
            if one is None or own is None:
                return f"{name!r} of step {step} is printed by one of the two only"
            if step in averaged and name.endswith("loss"):
                continue
            # The bound of the loss, and what the printed digits round.
            allowed = (relative + _SEVEN_DIGITS) * abs(one) + _PRINTED.get(name, 0.0)
            # In this form a NaN is a difference.
            if not abs(own - one) <= allowed:
                return f"{name} {own:g} in step {step}, in the one process {one:g}"
    return None
