"""A simulated step, as text for a terminal and as data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.cost.utilization import Utilization
from megatron_hetero.report.text.terminal import NOT_MEASURED, facts, utilization_words
from megatron_hetero.report.text.words import GIB, devices_by_node
from megatron_hetero.schedule.simulator.step import StepSimulation
from megatron_hetero.schedule.simulator.timelines import StageTimeline
from megatron_hetero.units import format_bytes, format_duration

MAX_LINKS = 12
"""The busiest links that a terminal shows; `--json` has them all."""


def simulation_report(
    simulation: StepSimulation, utilization: Utilization | None = None
) -> RenderableType:
    """Show step, stages and links."""
    return Group(
        facts(*_step(simulation, utilization)),
        Text(),
        Padding(_stage_table(simulation), (0, 0, 1, 1)),
        *_links(simulation),
    )


def simulation_to_data(simulation: StepSimulation) -> dict[str, Any]:
    """Convert to `step_time_s, bubble, devices, stages, links, messages`; times in seconds from the
    begin."""
    return {
        "step_time_s": simulation.step_time_s,
        "pipelines_s": simulation.pipelines_s,
        "gradient_sync_s": simulation.gradient_sync_s,
        "weight_sync_s": simulation.weight_sync_s,
        "bubble": simulation.bubble,
        "fits": not any(stage.lacking_bytes for stage in simulation.timelines),
        "sends": simulation.sends,
        "measured": simulation.measured,
        "peak_memory_bytes": simulation.peak_memory_bytes,
        "device_busy_s": simulation.device_busy_s,
        "stages": [stage_to_data(stage) for stage in simulation.timelines],
        "links": [
            {
                "name": link.name,
                "busy_s": link.busy_s,
                "num_messages": link.num_messages,
                "num_bytes": link.num_bytes,
            }
            for link in simulation.links
        ],
        "messages": [
            {
                "replica": m.pipeline,
                "sender": m.sender,
                "receiver": m.receiver,
                "kind": m.operation.kind,
                "micro_batch": m.operation.micro_batch,
                "chunk": m.operation.chunk,
                "posted_s": m.posted_s,
                "start_s": m.start_s,
                "end_s": m.end_s,
                "arrival_s": m.arrival_s,
            }
            for m in simulation.messages
        ],
    }


def stage_to_data(stage: StageTimeline) -> dict[str, Any]:
    """Convert one stage's line of the timeline."""
    return {
        "replica": stage.replica,
        "stage": stage.stage,
        "devices": list(stage.devices),
        "busy_s": stage.busy_s,
        "compute_end_s": stage.compute_end_s,
        "peak_in_flight": stage.peak_in_flight,
        "peak_memory_bytes": stage.peak_memory_bytes,
        "capacity_bytes": stage.capacity_bytes,
        "lacking_bytes": stage.lacking_bytes,
        "memory": [list(entry) for entry in stage.memory],
        "operations": [operation._asdict() for operation in stage.operations],
    }


def _step(simulation: StepSimulation, utilization: Utilization | None) -> Iterator[tuple[str, str]]:
    # The slowest update; all stages begin theirs together.
    update_s = max(
        o.end_s - o.start_s for s in simulation.timelines for o in s.operations if o.kind == "step"
    )
    yield "step time", format_duration(simulation.step_time_s)
    # Parts of the step, one after the other.
    parts = {
        "pipelines": simulation.pipelines_s,
        "gradient exchange after them": simulation.gradient_sync_s,
        "optimizer": update_s,
    }
    if simulation.weight_sync_s:
        parts["new weights"] = simulation.weight_sync_s
    yield "", ", ".join(f"{name} {format_duration(value)}" for name, value in parts.items())
    if utilization is not None:
        yield "utilization", utilization_words(utilization)
    yield "idle", f"{simulation.bubble:.1%} of all GPUs' time"
    for stage in simulation.timelines:
        if stage.lacking_bytes:
            yield (
                "memory",
                f"DOES NOT FIT: stage {stage.stage} of replica {stage.replica} lacks "
                f"{format_bytes(stage.lacking_bytes)} on its fullest GPU, with the reserve",
            )
    if simulation.sends == "waited":
        yield "sends", "stock Megatron runs this plan; it waits until a sent tensor has arrived"
    if simulation.sends == "rendezvous":
        yield "sends", "rendezvous (--sends): a sender waits for the receiver of a large tensor"
    if simulation.sends == "overlapped":
        yield "sends", "stock Megatron runs this plan, interleaved; it waits for some of its sends"
    if not simulation.measured:
        yield "basis", NOT_MEASURED


def _stage_table(simulation: StepSimulation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for heading in ("replica", "stage"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("GPUs", min_width=12)
    for heading in ("busy", "", "in flight", "memory in use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in simulation.timelines:
        table.add_row(
            str(stage.replica),
            str(stage.stage),
            devices_by_node(stage.devices),
            format_duration(stage.busy_s),
            f"{stage.busy_s / simulation.step_time_s:.0%}",
            str(stage.peak_in_flight),
            f"{stage.used_bytes / GIB:.1f} / {stage.capacity_bytes / GIB:.1f} GiB",
        )
    return table


def _links(simulation: StepSimulation) -> Iterator[RenderableType]:
    links = sorted(simulation.links, key=lambda link: -link.busy_s)
    if not links:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("link", min_width=12)
    for heading in ("busy", "", "messages", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in links[:MAX_LINKS]:
        table.add_row(
            link.name,
            format_duration(link.busy_s),
            f"{link.busy_s / simulation.step_time_s:.0%}",
            str(link.num_messages),
            format_bytes(link.num_bytes),
        )
    yield Padding(table, (0, 0, 1, 1))
    if len(links) > MAX_LINKS:
        yield Text(f" and {len(links) - MAX_LINKS} less busy ones (--json has all)")
