"""Days and money of a whole run, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from megatron_hetero.planner.objectives.outcome import Outcome
from megatron_hetero.report.text.terminal import bound_covers_words, facts

_NAMES = {
    "throughput": "fastest step",
    "cheapest": "cheapest tokens",
    "fewest-gpus": "fewest GPUs for the deadline",
}


def outcome_lines(outcome: Outcome) -> Iterator[RenderableType]:
    """Show the goal and the outcome of a run; nothing of a search for the fastest step without
    limits and without a number of steps."""
    found = list(_facts(outcome))
    if found:
        yield Text.assemble(("Looked for", "bold"), f"  {_NAMES[outcome.objective]}")
        yield Padding(facts(*found), (0, 0, 1, 1))


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    # Hours and money of the run, against the limits that were given.
    if outcome.num_steps is not None and outcome.num_tokens is not None:
        hours, most = outcome.run_hours, outcome.deadline_hours
        limit = "" if most is None else f"; the deadline is {most:,.4g} h"
        yield (
            "whole run",
            f"{outcome.num_steps:,.0f} steps, {outcome.num_tokens:.3g} tokens: {hours:,.4g} h"
            f"{limit}",
        )
    if outcome.run_price is not None:
        limit = "" if outcome.budget is None else f"; the budget is {outcome.budget:,.6g}"
        yield "it costs", f"{outcome.run_price:,.6g}{_of_it(outcome)}{limit}"
    if outcome.objective != "cheapest" and _is_mostly_traffic(outcome):
        yield "", "most of it is for traffic: --objective cheapest weighs that against the time"
    if outcome.max_price_per_hour is not None and outcome.price_per_hour is not None:
        yield (
            "an hour",
            f"machines cost {outcome.price_per_hour:,.6g}; the limit is "
            f"{outcome.max_price_per_hour:,.6g}",
        )
    # The bound in the unit of the goal.
    if outcome.bound is None or outcome.gap is None:
        if outcome.objective != "throughput":
            yield "no bound", "none is known under these limits"
        return
    what = {
        "throughput": f"a step of {outcome.bound:.4g} s under these limits",
        "cheapest": f"{outcome.bound:.4g} for a million tokens",
        "fewest-gpus": f"{outcome.bound:.0f} GPUs",
    }[outcome.objective]
    yield "at least", f"{what}; this plan is within {outcome.gap:.1%} of it"
    if outcome.bound_with_context_parallel is not None:
        yield "", f"({bound_covers_words(outcome.bound_with_context_parallel)})"
    yield "", f"(the bound relaxes: {outcome.bound_relaxes})"


def _of_it(outcome: Outcome) -> str:
    """Divide the price of a run into machines and traffic, where traffic costs something."""
    if not outcome.run_traffic_price or outcome.run_price is None:
        return ""
    traffic = outcome.run_traffic_price
    machines = outcome.run_price - traffic
    return f": machines {machines:,.6g}, traffic between sites {traffic:,.6g}"


def _is_mostly_traffic(outcome: Outcome) -> bool:
    return 2 * (outcome.run_traffic_price or 0.0) > (outcome.run_price or 0.0)
