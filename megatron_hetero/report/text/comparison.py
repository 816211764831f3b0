"""A plan beside stock Megatron and simpler plans, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.planner.advise.alternatives import Alternative
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.report.text.terminal import facts
from megatron_hetero.report.text.words import count, devices_by_node, folded_layout
from megatron_hetero.units import format_bytes, format_duration

_FASTEST, _NEXT = "best of all", "next best"
_ALIKE = 5e-4
"""Relative difference below which two steps are printed as the same."""


def comparison_lines(
    explanation: Explanation, not_stock: Sequence[str], *, runners_up: bool
) -> Iterator[RenderableType]:
    """Compare the plan with the best one of stock Megatron and, if asked, the next best of all.

    Args:
        not_stock: obstacles between the plan and stock Megatron (`flags.reasons_not_stock`).
    """
    yield Text("Beside other plans", style="bold")
    # Rows in the order: stock Megatron's best, next best plans, the simplest, those by hand.
    others = [(_NEXT, other) for other in (explanation.runners_up if runners_up else ())]
    # A plan that is stock's own needs no comparison with itself.
    if explanation.best_stock is not None and (not_stock or explanation.best_stock.slower_by < 0):
        others.insert(0, ("best of stock Megatron", explanation.best_stock))
    others += list(_simplest(explanation))
    others += [(other.strategy, other) for other in explanation.by_hand]
    if others:
        within = explanation.simplest_within
        how = {
            _FASTEST: "--plugin-gain 0% plans it" if within is None else "leave away --simplest",
            _NEXT: "plan anew",
        }
        yield Padding(_comparison_table(explanation.step_time_s, others, how), (0, 0, 1, 1))
    yield Padding(facts(*_stock_facts(explanation, not_stock)), (0, 0, 0, 1))
    yield Text(f" {count(explanation.num_priced, 'plan')} compared\n", style="dim")


def refused_lines(explanation: Explanation) -> Iterator[str]:
    """Yield a line if faster plans were found that no job could run."""
    others = explanation.refused
    if others:
        fastest = others[0]
        yield (
            f"No job could run the fastest plan, {fastest.layout} "
            f"({format_duration(fastest.step_time_s)} a step): {fastest.because.rstrip()}\n"
            "This is the next best plan that runs"
            + (f", after {len(others)} that do not" if len(others) > 1 else "")
        )


def _simplest(explanation: Explanation) -> Iterator[tuple[str, Alternative]]:
    simple, stock = explanation.simplest, explanation.best_stock
    if simple is not None and (stock is None or stock.layout != simple.layout):
        yield f"simplest within {100 * (explanation.simplest_within or 0.0):.3g}%", simple
    if explanation.fastest is not None:
        yield _FASTEST, explanation.fastest


def _stock_facts(explanation: Explanation, not_stock: Sequence[str]) -> Iterator[tuple[str, str]]:
    # Stock Megatron runs it, or why not and how near its best plan comes.
    if not not_stock:
        yield "plug-in", "not needed: stock Megatron runs this plan"
        return
    yield "plug-in", f"needed for {'; '.join(not_stock)}"
    if explanation.best_stock is not None:
        return
    short = explanation.stock_shortage
    if short is None:
        yield "stock Megatron", "no plan at all under the limits and numbers of this job"
        return
    yield (
        "stock Megatron",
        f"no plan fits: the nearest, {folded_layout(short.layout)}, lacks "
        f"{format_bytes(short.missing_bytes)} on {devices_by_node(short.devices)} "
        f"({short.gpu_type}), with {format_bytes(short.reserve_bytes)} in reserve",
    )


def _comparison_table(
    step_time_s: float, others: Sequence[tuple[str, Alternative]], how: Mapping[str, str]
) -> Table:
    """Return a row for each of the other plans; `how` says how to get those that are faster."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("layout, and what makes it slower", overflow="fold")
    table.add_row("this", format_duration(step_time_s), "", "")
    for name, alternative in others:
        _add_alternative(table, name, alternative, how.get(name, "plan --stock plans it"))
    return table


def _add_alternative(table: Table, name: str, alternative: Alternative, how: str) -> None:
    why = Text.assemble((folded_layout(alternative.layout), "green"))
    if alternative.settings:
        why.append(f"\n{alternative.settings}")
    # A difference that prints as 0.0 % is none.
    slower = f"{alternative.slower_by:+.1%}"
    if slower in ("-0.0%", "+0.0%"):
        slower = "the same"
    if alternative.slower_by > 0:
        why.append(f"\n{alternative.because}")
    elif alternative.slower_by < -_ALIKE:
        # Its space has micro-batch sizes and chunks that the search for this plan has not.
        why.append(f"\nfaster than this: {how}")
    table.add_row(name, format_duration(alternative.step_time_s), slower, why)
