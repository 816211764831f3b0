"""The result of a rehearsal, as text for a terminal.

The data is that of `lab.rehearse.rehearsal_to_data`, which `--json` prints too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.report.text.terminal import facts
from megatron_hetero.report.text.words import count, devices_by_node
from megatron_hetero.units import format_duration

MOST_LINES = 5
SHOWN = (
    "shown: the order of the work, what overlaps, who waits for whom and what every line carries, "
    "in processes that really ran it, and rings in the order of ranks and hosts\nnot shown: how "
    "long passes take, and how fast the lines are that the cluster file describes (probe measures)"
)
"""Facts that a rehearsal proves, and facts taken from the prediction."""


def rehearsal_report(data: Mapping[str, Any]) -> RenderableType:
    """Show predicted beside rehearsed times, for the step and each stage; the verdict in the last
    line."""
    return Group(
        facts(*_facts(data)),
        Text(),
        Padding(_stages(data), (0, 0, 1, 1)),
        *([Padding(_lines(data), (0, 0, 1, 1))] if data["lines"] else []),
        _verdict(data),
        Text(SHOWN, style="dim"),
    )


def _facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    runner = "stock Megatron" if data["stock_megatron"] else "Megatron with this plug-in"
    if data["lost_devices"]:
        yield "planned anew", f"without {', '.join(data['lost_devices'])}"
    yield "rehearsed", f"{count(data['num_ranks'], 'process', 'processes')} of {runner}"
    yield "layers", data["layers"]
    yield from run_facts(data)


def run_facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the layout, the pace of the run, and steps that were left out."""
    yield "layout", data["layout"]
    yield "time scale", f"{data['time_scale']:.3g} s here for each second of the cluster"
    if data["num_disturbed_steps"]:
        left_out = count(data["num_disturbed_steps"], "step")
        yield "", f"{left_out} left out, in which this machine did not keep pace"


def _stages(data: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for heading in ("replica", "stage"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("GPUs", min_width=12)
    for heading in ("predicted", "rehearsed", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in data["stages"]:
        table.add_row(
            str(stage["replica"]),
            str(stage["stage"]),
            devices_by_node(stage["devices"]),
            format_duration(stage["predicted_s"]),
            format_duration(stage["rehearsed_s"]),
            f"{stage['error']:+.1%}",
        )
    # The step below its stages.
    table.add_section()
    table.add_row(
        "",
        "",
        "whole step",
        format_duration(data["predicted_step_time_s"]),
        format_duration(data["rehearsed_step_time_s"]),
        f"{data['error']:+.1%}",
    )
    return table


def _lines(data: Mapping[str, Any]) -> Table:
    """Show the seconds for which a step takes the busiest paths and lines between nodes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("busiest between nodes", min_width=12)
    for heading in ("predicted", "rehearsed", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in data["lines"][:MOST_LINES]:
        table.add_row(
            line["name"],
            format_duration(line["predicted_s"]),
            format_duration(line["rehearsed_s"]),
            "nothing sent" if line["error"] is None else f"{line['error']:+.1%}",
        )
    return table


def _verdict(data: Mapping[str, Any]) -> Text:
    if data["ok"]:
        words = f"Order and waiting hold: the step is within {data['limit']:.0%} of the prediction."
        return Text(words, style="bold green")
    words = f"Order and waiting do NOT hold: more than {data['limit']:.0%} from the prediction."
    return Text(words, style="bold red")
