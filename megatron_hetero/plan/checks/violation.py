"""Violations, reported by the invariants of a plan, and the words for places in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.plan.plan import Plan, Stage


@dataclass(frozen=True)
class Violation:
    """One broken invariant: the place in the plan's data (for file and line) and the message."""

    keypath: tuple[str | int, ...]
    message: str


def stages(plan: Plan) -> Iterator[tuple[int, int, Stage]]:
    """Yield every stage with its replica and stage number."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            yield r, s, stage


def stage_key(replica: int, stage: int, *field: str) -> tuple[str | int, ...]:
    """Build the path of a stage's field in plan.json."""
    return ("replicas", replica, "stages", stage, *field)


def stage_name(replica: int, stage: int) -> str:
    """Build the words that name a stage in messages."""
    return f"replica {replica}, stage {stage}"


def layer_range(first: int, last: int) -> str:
    """Write `layer 3`, `layers 3, 4` or `layers 3-9`; `last` is included."""
    if first == last:
        return f"layer {first}"
    return f"layers {first}, {last}" if last == first + 1 else f"layers {first}-{last}"
