"""The result of a rehearsal of dealt steps, as text for a terminal.

The data is that of `lab.rehearse.dealt.command`, which `--json` prints too.
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
from megatron_hetero.report.text.trials.rehearsal import run_facts
from megatron_hetero.report.text.words import count
from megatron_hetero.units import format_duration

SHOWN = (
    "shown: the deal of every step and how its groups, pipelines and messages wait for each other, "
    "in processes that really trained it\nnot shown: how long passes and the exchanges inside a "
    "group take, and the exchange of gradients, which is in neither column"
)
"""Facts that a rehearsal of dealt steps proves, and facts taken from the prediction."""
_MOST_SIZES = 40


def dealt_rehearsal_report(data: Mapping[str, Any]) -> RenderableType:
    """Show predicted beside rehearsed seconds of every step; the verdict in the last line."""
    return Group(
        facts(*_facts(data)),
        Text(),
        Padding(_steps(data), (0, 0, 1, 1)),
        _verdict(data),
        Text(SHOWN, style="dim"),
    )


def _facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    processes = count(data["num_ranks"], "process", "processes")
    yield "rehearsed", f"{processes} of Megatron with this plug-in, --hetero-sequences flexible"
    yield from run_facts(data)


def _steps(data: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("groups", min_width=12)
    for heading in ("busiest/mean", "predicted", "rehearsed", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    # Long lists of groups are cut.
    for step in data["steps"]:
        sizes = step["groups"]
        table.add_row(
            f"{step['num_tokens']:,}",
            sizes if len(sizes) <= _MOST_SIZES else f"{sizes[:_MOST_SIZES]}..",
            f"{step['rehearsed_balance']:.2f}",
            format_duration(step["predicted_s"]),
            format_duration(step["rehearsed_s"]),
            f"{step['error']:+.1%}",
        )
    return table


def _verdict(data: Mapping[str, Any]) -> Text:
    if data["ok"]:
        words = f"The deals hold: a step is within {data['limit']:.0%} of the prediction."
        return Text(words, style="bold green")
    words = f"The deals do NOT hold: more than {data['limit']:.0%} from the prediction."
    return Text(words, style="bold red")
