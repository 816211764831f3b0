"""The page: the job, the plan, its speed and its causes, and the commands that run it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megatron_hetero import __version__
from megatron_hetero.flags.needed import missing_in_job, missing_line
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner.advise.alternatives import Alternative
from megatron_hetero.planner.advise.explain import HiddenHop
from megatron_hetero.report.content import Content
from megatron_hetero.report.page.bars import (
    busy_bars,
    comparison_bars,
    link_bars,
    memory_bars,
    time_bar,
    what_if_bars,
)
from megatron_hetero.report.page.cluster_map import cluster_map
from megatron_hetero.report.page.exchange_tree import exchange_tree
from megatron_hetero.report.page.figure import Figure
from megatron_hetero.report.page.frame import framed, scrolled, section
from megatron_hetero.report.page.heading import heading, model_name
from megatron_hetero.report.page.pipelines import pipelines
from megatron_hetero.report.page.timeline import close_up, timeline
from megatron_hetero.report.text.terminal import bound_covers_words
from megatron_hetero.report.text.words import devices_by_node, ranges
from megatron_hetero.units import format_duration

WORDS = (
    ("replica", "one copy of the model; replicas share out the samples of every step"),
    ("stage", "consecutive layers of a replica, on one GPU or a tensor-parallel group"),
    ("tensor parallel", "the GPUs of a stage hold a part of each layer and work on it together"),
    ("micro-batch", "the samples that go through a pipeline at a time"),
    ("step", "one update of the weights, from all samples of the global batch"),
    ("lower bound", "what the same GPUs would need if the work could be divided without loss"),
)


def figures(content: Content) -> tuple[Figure, ...]:
    """Draw every figure of the page, in its order."""
    found = [
        cluster_map(content.plan, content.cluster),
        pipelines(content.plan, content.cluster, content.estimates),
        timeline(content.timelines),
        close_up(content.timelines),
        time_bar(content.explanation),
        busy_bars(content.plan, content.simulation),
        link_bars(content.simulation),
        exchange_tree(content.plan, content.cluster, content.simulation),
        memory_bars(content),
        comparison_bars(content),
        what_if_bars(content.what_if),
    ]
    return tuple(figure for figure in found if figure is not None)


def page(content: Content) -> str:
    """Write the whole document as text; it refers to nothing outside of itself."""
    # Figures by name; some plans have no links, no exchange and no close-up.
    drawn = {figure.name: figure for figure in figures(content)}
    body = "\n".join(
        (
            *heading(content),
            *_where(content, drawn),
            *_timeline(content, drawn),
            *_time(content, drawn),
            *_memory(content, drawn),
            *_comparison(content, drawn),
            *_what_if(drawn),
            *_run(content),
            *_foot(content),
        )
    )
    return framed(f"Plan for {model_name(content)}", body)


def _where(content: Content, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section(
        "Where the model is",
        "Each GPU with the copy of the model (R0, R1, ...) and the part of it that it holds.",
    )
    yield scrolled(drawn["map"])
    yield section(
        "The pipelines",
        "Samples go through the stages from left to right, gradients come back. Under each arrow: "
        "how long one micro-batch takes over that link.",
    )
    yield scrolled(drawn["pipelines"])
    # Replicas with the same counts, hop and gain are one sentence.
    alike: dict[tuple[int, int, int, str], list[HiddenHop]] = {}
    for hop in content.explanation.hidden_hops:
        shorter = f"{1 - hop.pipeline_s / hop.own_pipeline_s:.0%}"
        key = max(hop.launch_counts), max(hop.own_launch_counts), hop.boundary, shorter
        alike.setdefault(key, []).append(hop)
    for (counts, own, boundary, shorter), hops in alike.items():
        who = f"Replica {hops[0].replica} runs"
        if len(hops) > 1:
            who = f"Replicas {ranges([hop.replica for hop in hops])} run"
        yield (
            f"<p>{who} up to {counts} forward passes ahead of the first backward pass (1F1B: "
            f"{own}). That hides the slowest hop, from stage {boundary} to the next, behind "
            f"work, and makes the pipeline {shorter} shorter.</p>"
        )


def _timeline(content: Content, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section(
        "One step, from begin to end",
        "A row for each stage. Blue is forward, orange is backward; pale is waiting, which a good "
        "plan has little of. The numbers are micro-batches.",
    )
    # More than 1 % between formula and simulation is worth a sentence.
    predicted_s, quick_s = content.simulation.step_time_s, content.explanation.step_time_s
    if abs(predicted_s / quick_s - 1) > 0.01:
        yield (
            f"<p>The planner's formula gives {format_duration(quick_s)}. The simulation below, in "
            "which replicas share links and messages queue, gives "
            f"{format_duration(predicted_s)}.</p>"
        )
    yield scrolled(drawn["timeline"])
    if "close-up" in drawn:
        yield '<p class="hint">The beginning, enlarged:</p>'
        yield scrolled(drawn["close-up"])
    # Timelines of files beside the prediction.
    if len(content.timelines) > 1:
        predicted, *others = content.timelines
        for other in others:
            error = other.step_time_s / predicted.step_time_s - 1
            yield (
                f"<p>{escape(other.title)}: {format_duration(other.step_time_s)}, {error:+.1%} "
                "from the prediction.</p>"
            )
    for note in content.notes:
        yield f"<p>{escape(note)}</p>"


def _time(content: Content, drawn: dict[str, Figure]) -> Iterator[str]:
    binding = content.explanation.binding
    yield section(
        "Where the time goes",
        f"The step as stage {binding.stage} of replica {binding.replica} lives it "
        f"({devices_by_node(binding.devices)}), which sets the pace.",
    )
    yield scrolled(drawn["time"])
    yield '<p class="hint">How much of the step each stage computes:</p>'
    yield scrolled(drawn["busy"])
    if "links" in drawn:
        yield (
            '<p class="hint">How much of the step the busiest paths carry messages, and how much '
            "they carry:</p>"
        )
        yield scrolled(drawn["links"])
    if "exchange" in drawn:
        yield (
            '<p class="hint">What each site and machine sends and receives of gradients and new '
            "weights in a step:</p>"
        )
        yield scrolled(drawn["exchange"])


def _memory(content: Content, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section(
        "Memory",
        "Predicted peak on the fullest GPU of each stage; the line at the end is what the GPU has. "
        "The plan leaves the reserve free.",
    )
    yield scrolled(drawn["memory"])


def _bounded(estimates: Estimates) -> str:
    """Name the plans that the lower bound is of."""
    if estimates.bound_with_context_parallel_s is None:
        return "division of this model over these GPUs"
    return "plan without context parallelism"


def _comparison(content: Content, drawn: dict[str, Figure]) -> Iterator[str]:
    explanation = content.explanation
    yield section(
        "Beside other plans",
        f"{explanation.num_priced} plans were compared. The bound is of the same cost model: no "
        f"{_bounded(content.estimates)} is faster by it.",
    )
    yield scrolled(drawn["comparison"])
    yield '<table class="plans"><tr><th>plan</th><th>a step</th><th>layout</th>'
    yield "<th>why slower</th></tr>"
    yield _plan_row("this plan", explanation.step_time_s, format_layout(content.plan.layout), "")
    # Stock Megatron's best, or why it has none.
    stock = explanation.best_stock
    if stock is not None:
        yield _alternative_row("stock Megatron's best", stock)
    elif explanation.stock_shortage is not None:
        short = explanation.stock_shortage
        yield _plan_row("stock Megatron", None, short.layout,
                        f"does not fit into {short.gpu_type}")  # fmt: skip
    for i, other in enumerate(explanation.runners_up, start=1):
        yield _alternative_row(f"next best {i}", other)
    for other in explanation.by_hand:
        yield _alternative_row(other.strategy, other)
    yield "</table>"
    divided_s = content.estimates.bound_with_context_parallel_s
    if divided_s is not None:
        yield f'<p class="hint">The bound is {escape(bound_covers_words(divided_s))}.</p>'
    if content.estimates.bound_relaxes:
        relaxed = escape(content.estimates.bound_relaxes)
        yield f'<p class="hint">The bound leaves out: {relaxed}.</p>'
    # Idle GPUs by the reason that the planner gave.
    idle: dict[str, list[str]] = {}
    for device, reason in content.plan.idle_reasons.items():
        idle.setdefault(reason, []).append(device)
    for reason, devices in idle.items():
        yield f'<p class="hint">Unused: {escape(devices_by_node(devices))}: {escape(reason)}.</p>'


def _alternative_row(name: str, other: Alternative) -> str:
    because = other.because if other.slower_by > 0 else ""
    words = "; ".join(part for part in (other.settings, because) if part)
    return _plan_row(name, other.step_time_s, other.layout, words)


def _plan_row(name: str, step_time_s: float | None, layout: str, because: str) -> str:
    time = "-" if step_time_s is None else format_duration(step_time_s)
    # A long layout may break behind each comma.
    breakable = escape(layout).replace(",", ",<wbr>")
    return (
        f'<tr><td>{escape(name)}</td><td class="n">{time}</td>'
        f"<td><code>{breakable}</code></td><td>{escape(because)}</td></tr>"
    )


def _what_if(drawn: dict[str, Figure]) -> Iterator[str]:
    yield section(
        "What if",
        "The same plan on a slightly different cluster: what a step would take longer or less. A "
        "new plan for that cluster may do better.",
    )
    yield scrolled(drawn["what-if"])


def _run(content: Content) -> Iterator[str]:
    # Whether the plug-in is needed, then the command of each machine.
    needs = (
        f"Stock Megatron cannot express {'; '.join(content.not_stock)}: the plug-in is needed."
        if content.not_stock
        else "Stock Megatron runs this plan; no plug-in is needed."
    )
    yield section("Run it", f"{needs} Start one line on each machine; copy the plan there first.")
    if missing := missing_in_job(content.plan.workload):
        yield (
            f'<p class="hint">These flags are not a whole job yet: it cannot start without '
            f"{escape(missing_line(missing))}.</p>"
        )
    for launch in content.launches:
        name = launch.host or "any machine"
        yield f'<p class="hint">{escape(name)}</p>'
        yield f'<div class="command"><pre>{escape(launch.line)}</pre></div>'
    yield '<p class="hint">The arguments after the entry script, one a line:</p>'
    yield f'<div class="command"><pre>{escape(content.arguments)}</pre></div>'


def _foot(content: Content) -> Iterator[str]:
    yield section("Words", "As this page uses them.")
    yield "<dl>"
    for word, meaning in WORDS:
        yield f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>"
    yield "</dl>"
    hashes = ", ".join(
        f"{escape(name)} <code>{escape(digest[:16])}</code>"
        for name, digest in content.plan.inputs.items()
    )
    yield (
        f"<footer>megatron-hetero {__version__}. Plan <code>{escape(content.plan_name)}</code>, "
        f"made by {escape(content.plan.made_by or 'hand')}; inputs: {hashes or 'unknown'}.</footer>"
    )
