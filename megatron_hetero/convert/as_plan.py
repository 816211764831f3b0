"""A conversion as a plan of ours: its layout, its model and the recompute of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_hetero.convert.given import Conversion, StageRecompute
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, Stage


def model_of(path: Path | None, typed: Sequence[str]) -> Workload | None:
    """Read the model that `--model` names, with the flags typed behind `--` beside the layout.

    Returns:
        None without a path.
    Raises:
        HeteroError: there is no such model, or it contradicts itself.
    """
    if path is None:
        return None
    workload = load_workload(path, _flags_of_the_model(typed))
    # The model's script is often the other system's own, whose flags Megatron does not know.
    known = flag_table().known_part(workload.megatron_args)
    return replace(workload, megatron_args=known)


def plan_of(conversion: Conversion, workload: Workload | None) -> Plan:
    """Build the plan of a conversion, with the recompute of each stage.

    Raises:
        HeteroError: the layout or a stage's recompute does not fit the model.
    """
    plan = plan_from_layout(parse_layout(conversion.layout), workload)
    if not conversion.recompute:
        return plan
    # A layout has no recompute, so each stage gets its own here.
    replicas = tuple(
        replace(replica, stages=tuple(map(_recomputed, replica.stages, conversion.recompute)))
        for replica in plan.replicas
    )
    plan = replace(plan, replicas=replicas)
    validate_plan(plan)
    return plan


def _recomputed(stage: Stage, how: StageRecompute) -> Stage:
    return replace(stage, recompute=how.recompute, recompute_num_layers=how.num_layers)


def _flags_of_the_model(typed: Sequence[str]) -> tuple[str, ...]:
    """Keep the flags that describe the model, of Megatron's flags typed behind `--`."""
    kept: list[str] = []
    # Whether the present flag is kept; its values follow it.
    taken = False
    for word in flag_table().known_part(tuple(typed)):
        if word.startswith("--"):
            # The layout replaces what these flags would say; a value has no say in it.
            name = word.partition("=")[0]
            taken = "parallel" not in name and "hetero" not in name
        if taken:
            kept.append(word)
    return tuple(kept)
