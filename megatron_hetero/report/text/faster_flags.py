"""Flags that would speed a plan up, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from megatron_hetero.planner.faster_flags import FlagGain
from megatron_hetero.units import format_duration

_OTHER_OBJECTIVE = (
    ", and change what is trained: within a micro-batch experts are balanced, or losses averaged"
)


def faster_flag_lines(gains: Sequence[FlagGain]) -> Iterator[RenderableType]:
    """Write a line for each flag that gains; nothing if none does."""
    for gain in gains:
        was, is_then = format_duration(gain.from_s), format_duration(gain.step_time_s)
        # A flag with which idle GPUs could train too, or one that is faster on the same GPUs.
        if gain.joining:
            flags = " ".join(gain.flags)
            if gain.in_place_of is not None:
                flags += f" in place of {gain.in_place_of}"
            yield Text(
                f"with {flags} the {gain.joining} train too: "
                f"{is_then} a step ({gain.gain:.1%} less)"
            )
            continue
        yield Text(
            f"{' '.join(gain.flags)} would take this plan from {was} to {is_then} a step "
            f"({gain.gain:.1%} less)"
            + (_OTHER_OBJECTIVE if gain.changes_objective else "")
        )
