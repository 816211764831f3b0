"""Timelines from files: the operations of every stage in a rehearsal, or in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import read_json, validate_document
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.report.content import Lane, LaneGroup
from megatron_hetero.schedule.parts import OpSpan
from megatron_hetero.schedule.programme import BACKWARDS, OperationKind
from megatron_hetero.schedule.simulator.timelines import StageTimeline

Seconds = Annotated[float, Field(ge=0, le=1e6)]


class _Loose(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class _RehearsedOperation(_Loose):
    kind: OperationKind
    micro_batch: int
    chunk: int = 0
    start_s: Seconds
    end_s: Seconds


class _RehearsedStage(_Loose):
    replica: Annotated[int, Field(ge=0)]
    stage: Annotated[int, Field(ge=0)]
    devices: list[str] | None = None
    operations: list[_RehearsedOperation] = Field(max_length=1_000_000)


class _TimelineFile(_Loose):
    """A file of one plan's timeline; older ones do not say whose."""

    layout: str | None = None
    stages: list[_RehearsedStage] = Field(min_length=1, max_length=10_000)


class _RehearsalFile(_TimelineFile):
    rehearsed_step_time_s: Annotated[float, Field(gt=0, le=1e6)]


class _MeasuredFile(_TimelineFile):
    measured_step_time_s: Annotated[float, Field(gt=0, le=1e6)]
    step: Annotated[int, Field(ge=0)]


def rehearsed_lanes(path: Path, plan: Plan) -> LaneGroup:
    """Read the timeline that `rehearse --json` printed.

    Raises:
        FileFormatError: it is no such file, or of a plan with other stages.
    """
    found = validate_document(read_json(path), _RehearsalFile, FileFormatError)
    return _lanes(path, plan, "rehearsed", found.rehearsed_step_time_s, found)


def measured_lanes(path: Path, plan: Plan) -> LaneGroup:
    """Read the timeline that a training job wrote (`--hetero-timeline`).

    Raises:
        FileFormatError: it is no such file, of a plan with other stages, or of a step in which a
            stage computed nothing.
    """
    found = validate_document(read_json(path), _MeasuredFile, FileFormatError)
    # A ratio of measured and predicted passes needs both to take time.
    for stage in found.stages:
        for kinds in (("forward",), BACKWARDS):
            if not any(o.end_s > o.start_s for o in stage.operations if o.kind in kinds):
                raise FileFormatError(
                    f"{path}: replica {stage.replica} stage {stage.stage} has no {kinds[0]} pass "
                    "that took any time, so there is nothing to compare; record another step with "
                    "--hetero-timeline"
                )
    title = f"measured, step {found.step}"
    return _lanes(path, plan, title, found.measured_step_time_s, found)


def trace_lanes(groups: Sequence[LaneGroup]) -> dict[str, list[StageTimeline]]:
    """Convert timelines for a trace file."""
    return {
        group.title: [
            StageTimeline(lane.replica, lane.stage, lane.devices, lane.operations, (), 0)
            for lane in group.lanes
        ]
        for group in groups
    }


def _lanes(
    path: Path, plan: Plan, title: str, step_time_s: float, file: _TimelineFile
) -> LaneGroup:
    stages, layout = file.stages, format_layout(plan.layout)
    if file.layout not in (None, layout):
        raise FileFormatError(
            f"{path} is of another plan: its layout is {file.layout}, the plan's {layout}"
        )
    # The file must have each stage of the plan once.
    wanted = [(r, s) for r, replica in enumerate(plan.replicas) for s in range(len(replica.stages))]
    found = [(stage.replica, stage.stage) for stage in stages]
    if sorted(found) != wanted:
        raise FileFormatError(
            f"{path} has the stages {found}, the plan has {wanted} (replica, stage): it is of "
            "another plan"
        )
    for stage in stages:
        devices = list(plan.replicas[stage.replica].stages[stage.stage].devices)
        if stage.devices is not None and stage.devices != devices:
            raise FileFormatError(
                f"{path} is of another plan: replica {stage.replica} stage {stage.stage} is on "
                f"{', '.join(stage.devices)} there, and on {', '.join(devices)} in the plan"
            )
    lanes = tuple(
        Lane(
            stage.replica,
            stage.stage,
            plan.replicas[stage.replica].stages[stage.stage].devices,
            tuple(
                OpSpan(o.kind, o.micro_batch, o.chunk, o.start_s, o.end_s) for o in stage.operations
            ),
        )
        for stage in sorted(stages, key=lambda stage: (stage.replica, stage.stage))
    )
    return LaneGroup(title, step_time_s, lanes)
