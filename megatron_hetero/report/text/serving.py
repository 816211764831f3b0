"""A serving plan for terminals."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.table import Table

from megatron_hetero.serving.fleet.forecast import LEAST_KEPT_UP
from megatron_hetero.serving.fleet.plan import FleetForecast, PlannedReplica, ServingPlan
from megatron_hetero.serving.replan import Change
from megatron_hetero.units import format_duration


def serving_tables(plan: ServingPlan) -> tuple[Table | str, ...]:
    """Return the tables and lines of a plan: replicas, classes, bound and price."""
    return (_replicas(plan), _classes(plan), *_lines(plan))


def _replicas(plan: ServingPlan) -> Table:
    table = _table("replicas", "phase", "GPUs", "stages", "time taken", "KV tokens")
    # Equal replicas are one row, where the first of them stands.
    alike = Counter(map(_kind, plan.replicas))
    for replica in plan.replicas:
        count = alike.pop(_kind(replica), 0)
        if count:
            table.add_row(
                f"{count} x",
                replica.phase,
                str(replica.num_gpus),
                replica.shape,
                f"{replica.utilization:.0%}",
                f"{replica.kv_tokens:,}",
            )
    return table


def _kind(replica: PlannedReplica) -> tuple[str, str, str]:
    return replica.phase, replica.place, replica.shape


def _classes(plan: ServingPlan) -> Table:
    table = _table(
        "class", "rate/s", "input", "output", "first token p50", "p99", "between p50", "p99", "kept"
    )
    # Only a simulated plan has times of its classes.
    forecasts = {c.name: c for c in plan.forecast.classes} if plan.forecast else {}
    for kind in plan.classes:
        row = [kind.name, f"{kind.rate_per_s:g}", f"{kind.mean_input:.0f}"]
        row.append(f"{kind.mean_output:.0f}")
        seen = forecasts.get(kind.name)
        if seen is not None and seen.num_requests:
            row += [
                format_duration(seen.first_token_p50_s),
                format_duration(seen.first_token_p99_s),
                format_duration(seen.between_tokens_p50_s),
                format_duration(seen.between_tokens_p99_s),
                f"{seen.attainment:.0%}",
            ]
        else:
            row += ["-"] * 5
        table.add_row(*row)
    return table


def _lines(plan: ServingPlan) -> list[str]:
    rate = sum(kind.rate_per_s for kind in plan.classes)
    lines = []
    if plan.goal == "cost":
        lines.append(
            f"Costs {plan.cost_per_hour:g} an hour; no fleet of these shapes serves the rates for "
            f"less than {plan.bound:.4g} (gap {plan.gap:.1%}: waiting, which the bound leaves out)."
        )
    else:
        lines.append(
            f"Serves {plan.scale * rate:.4g} requests/s of this mix ({plan.scale:.3g} times the "
            f"workload's rates); no fleet of these shapes serves more than {plan.bound * rate:.4g} "
            f"(gap {plan.gap:.1%})."
        )
        if plan.cost_per_hour is not None:
            lines.append(f"Costs {plan.cost_per_hour:g} an hour.")
    if plan.forecast is not None:
        lines.append(_simulated(plan.forecast))
    if plan.any_engine is not None:
        lines.append(_restriction(plan))
    return [*lines, *price_lines(plan)]


def _simulated(forecast: FleetForecast) -> str:
    line = (
        f"Simulated: {forecast.load:.3g} times the rates for {format_duration(forecast.seconds)} "
        f"of arrivals, deadlines kept by {forecast.attainment:.0%} of the requests."
    )
    if forecast.kept_up is None:
        return f"{line} Whether queues grow over longer times this run does not tell."
    if forecast.kept_up < LEAST_KEPT_UP:
        line += (
            f" The fleet falls behind: {forecast.kept_up:.0%} as many requests began as came in "
            "the second half. Send it less, or plan with --goal goodput, which simulates what it "
            "promises."
        )
    return line


def price_lines(plan: ServingPlan) -> list[str]:
    """Return a line for each basis of prices: the GPU types and widths that have it."""
    # Basis -> what it prices.
    told: dict[str, list[str]] = {}
    for part in plan.prices:
        group = f"{part.gpu} tp{part.width}"
        if part.prefill == part.decode:
            told.setdefault(part.prefill, []).append(group)
        else:
            told.setdefault(part.prefill, []).append(f"{group} prefill")
            told.setdefault(part.decode, []).append(f"{group} decode")
    return [f"Prices of {', '.join(groups)}: {basis}." for basis, groups in told.items()]


def _restriction(plan: ServingPlan) -> str:
    is_cost = plan.goal == "cost"
    value, other = plan.cost_per_hour if is_cost else plan.scale, plan.any_engine
    unlike = f"Pipelines of unlike widths, which {plan.engine.name} does not run,"
    # A fleet that costs nothing has none that is cheaper.
    if not value or other is None:
        return f"{unlike} gain nothing."
    if is_cost and not other:
        return f"{unlike} would cost nothing in rates."
    # Less cost or more load: either way above 1 is better.
    better = value / other if is_cost else other / value
    if better <= 1.005:
        return f"{unlike} gain nothing."
    return f"{unlike} would be {better:.2f} times as good in rates."


def change_lines(change: Change) -> list[str]:
    """Return the lines about the changes that a new plan makes."""
    lines = [
        f"{len(change.stays)} replicas stay, {len(change.stops)} stop, {len(change.starts)} start; "
        f"{format_duration(change.reload_s)} of reload, in which {change.kept_part:.0%} of the old "
        "rates go on."
    ]
    verdict = "pays" if change.pays else "does not pay"
    if change.gain is None:
        compared = "The old plan serves nothing with the GPUs that are left"
    else:
        compared = f"The new plan serves {change.gain:.3g} times what the old one would"
    lines.append(f"{compared}: over {format_duration(change.stable_s)} the change {verdict}.")
    return lines


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("phase", "stages", "class")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table
