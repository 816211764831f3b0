"""The page of a serving plan: who serves what, a minute of the fleet, and what deadlines cost."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    fitted,
    legend,
    line,
    number,
    rect,
    text,
    ticks,
)
from megatron_hetero.report.page.frame import framed, scrolled, section
from megatron_hetero.report.text.serving import price_lines
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.fleet.story import MINUTE_S, FleetStory
from megatron_hetero.units import format_duration

_LABELS, _VALUES = 330.0, 110.0
_ROOM = PAGE_WIDTH - _LABELS - _VALUES
_NUM_COLOURS = 8


def serving_page(plan: ServingPlan, story: FleetStory) -> str:
    """Write the whole document as text; it refers to nothing outside of itself."""
    title = f"Serving {plan.model.source}"
    body = "\n".join((*_heading(plan, title), *_who(plan), *_minute(plan, story), *_costs(story)))
    return framed(title, body)


def share_bars(plan: ServingPlan) -> Figure:
    """Draw a bar for each replica: requests per second of each class that go there."""
    classes = tuple((_colour(i), kind.name) for i, kind in enumerate(plan.classes))
    parts = [legend(classes, 0, 14)]
    scale = _ROOM / max(sum(replica.rates) for replica in plan.replicas)
    y = 32.0
    for replica in plan.replicas:
        parts.append(text(0, y + 14, _name(plan, replica.name, replica.shape), "small"))
        x = _LABELS
        for index, rate in enumerate(replica.rates):
            words = f"{replica.name}, {plan.classes[index].name}: {rate:.3g} requests/s"
            parts.append(rect(x, y, rate * scale, 18, _colour(index), title=words))
            x += rate * scale
        told = f"{sum(replica.rates):.3g}/s, {replica.phase}"
        parts.append(text(x + 8, y + 14, told, "small"))
        y += 26
    return Figure("shares", "requests per second of each class by replica", y, "".join(parts))


def minute_lanes(plan: ServingPlan, story: FleetStory) -> Figure:
    """Draw a lane for each replica: requests that wait or run there, over a minute."""
    most = max([1, *(max(levels) for levels in story.under_way)])
    width, height, y = (PAGE_WIDTH - _LABELS) / len(story.under_way[0]), 34.0, 12.0
    parts = []
    for replica, levels in zip(plan.replicas, story.under_way, strict=True):
        parts.append(text(0, y + 22, _name(plan, replica.name, replica.shape), "small"))
        parts.append(rect(_LABELS, y, PAGE_WIDTH - _LABELS, height, "lane"))
        # One path for a lane: a rectangle of each part would be thousands.
        steps = "".join(
            f"V{number(y + height * (1 - level / most))}H{number(_LABELS + (i + 1) * width)}"
            for i, level in enumerate(levels)
        )
        bottom = number(y + height)
        parts.append(
            f'<path class="p0" d="M{number(_LABELS)} {bottom}{steps}V{bottom}Z">'
            f"<title>{escape(replica.name)}: at most {max(levels)} requests</title></path>"
        )
        y += height + 8
    for tick in ticks(MINUTE_S):
        x = _LABELS + (PAGE_WIDTH - _LABELS) * tick / MINUTE_S
        parts.append(line(x, 8, x, y, "grid"))
        parts.append(text(x, y + 14, f"{tick:g} s", "tiny", anchor="end" if tick else "start"))
    alt = f"requests under way on each replica over a minute, at most {most}"
    return Figure("minute", alt, y + 20, "".join(parts))


def cost_bars(story: FleetStory) -> Figure | None:
    """Draw what an hour of the cheapest fleet costs for multiples of the deadlines; nothing
    without prices or deadlines."""
    prices = [cost for _, cost in story.costs if cost is not None]
    if not prices:
        return None
    parts, y = [], 8.0
    # Fleets whose price is 0 have bars without length.
    scale = _ROOM / (max(prices) or 1.0)
    for factor, cost in story.costs:
        words = "the workload's deadlines" if factor == 1 else f"{factor:g} times the deadlines"
        parts.append(text(0, y + 14, words, "small"))
        if cost is None:
            parts.append(text(_LABELS, y + 14, "no fleet of these machines keeps them", "small"))
        else:
            kind = "this" if factor == 1 else "other"
            parts.append(rect(_LABELS, y, cost * scale, 18, kind))
            parts.append(text(_LABELS + cost * scale + 8, y + 14, f"{cost:.2f} an hour", "small"))
        y += 26
    return Figure("costs", "price of an hour by multiple of the deadlines", y, "".join(parts))


def _heading(plan: ServingPlan, title: str) -> Iterator[str]:
    yield f"<header><h1>{escape(title)}</h1></header>"
    gpus = sum(replica.num_gpus for replica in plan.replicas)
    tiles = [
        (f"{len(plan.replicas)}", "replicas"), (f"{gpus}", "GPUs in use"),
        (f"{plan.scale:.2f} x", "the workload's rates"),
        (f"{plan.gap:.1%}", "at most from the best"),
    ]  # fmt: skip
    if plan.cost_per_hour is not None:
        tiles.append((f"{plan.cost_per_hour:.2f}", "an hour"))
    if plan.forecast is not None:
        tiles.append((f"{plan.forecast.attainment:.0%}", "of requests keep their deadlines"))
    shown = "".join(f'<div class="tile"><b>{b}</b><span>{escape(w)}</span></div>' for b, w in tiles)
    yield f'<div class="tiles">{shown}</div>'


def _who(plan: ServingPlan) -> Iterator[str]:
    yield section("Who serves what", "Requests per second that the router gives each replica.")
    yield scrolled(share_bars(plan))
    yield "".join(f"<p>{escape(words)}</p>" for words in price_lines(plan))
    forecasts = {c.name: c for c in plan.forecast.classes} if plan.forecast else {}
    if not forecasts:
        return
    titles = "class", "requests/s", "first token, p50 and p99", "between tokens", "kept"
    yield f"<table><tr>{''.join(f'<th>{words}' for words in titles)}</tr>"
    for kind in plan.classes:
        seen = forecasts[kind.name]
        first = seen.first_token_p50_s, seen.first_token_p99_s
        between = seen.between_tokens_p50_s, seen.between_tokens_p99_s
        cells = (
            escape(kind.name), f"{kind.rate_per_s:g}", ", ".join(map(format_duration, first)),
            ", ".join(map(format_duration, between)), f"{seen.attainment:.0%}",
        )  # fmt: skip
        yield f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>"
    yield "</table>"


def _minute(plan: ServingPlan, story: FleetStory) -> Iterator[str]:
    yield section(
        "A minute",
        f"Requests that wait or run on each replica, simulated at {story.load:.2f} times the "
        "workload's rates. The fleet is empty at first.",
    )
    yield scrolled(minute_lanes(plan, story))


def _costs(story: FleetStory) -> Iterator[str]:
    figure = cost_bars(story)
    if figure is not None:
        yield section("What deadlines cost", "The cheapest fleet that keeps other deadlines.")
        yield scrolled(figure)


def _name(plan: ServingPlan, name: str, shape: str) -> str:
    return fitted(f"{name}: {shape}", _LABELS - 10, 12)


def _colour(index: int) -> str:
    return f"p{index % _NUM_COLOURS}"
