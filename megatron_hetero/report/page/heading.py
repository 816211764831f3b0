"""The top of the page: the model, the GPUs, and the figures that people ask for first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape

from megatron_hetero.cost.utilization import utilization_of
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.report.content import Content
from megatron_hetero.report.text.terminal import traffic_lines
from megatron_hetero.report.text.words import count
from megatron_hetero.units import format_duration


def heading(content: Content) -> Iterator[str]:
    """Write title, summary and tiles, as HTML."""
    workload = content.plan.workload
    assert workload is not None  # `gather` refuses a plan without one
    model, training = workload.model, workload.training
    plan = content.plan
    # Padded vocabulary included, which depends on the widths.
    billions = num_parameters(workload, plan.layout.tensor_parallel_widths) / 1e9
    # GPUs in use by type.
    kinds = Counter(plan.type_by_device.values())
    gpus = " + ".join(f"{number} x {kind}" for kind, number in kinds.items())
    yield "<header><div>"
    yield f"<h1>Training plan for {escape(model_name(content))}</h1>"
    yield (
        f'<div class="sub">{billions:.1f} billion parameters, {model.num_layers} layers, sequence '
        f"{model.seq_length}, {training.precision}, global batch {training.global_batch_size} "
        f"&middot; {escape(gpus)} on {count(len(plan.hosts), 'machine')}</div>"
    )
    yield '</div><button id="theme" hidden>dark colours</button></header>'
    yield f'<p class="lead">{escape(_summary(content))}</p>'
    # What rests on no measurement says so at once.
    if not content.estimates.measured:
        yield (
            '<span class="badge">predicted from data sheets and an analytic model; not measured on '
            "these machines</span>"
        )
    yield '<div class="tiles">'
    for value, words in _tiles(content):
        yield f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
    yield "</div>"
    yield from _traffic(content)


def _traffic(content: Content) -> Iterator[str]:
    """Divide the price of an hour by cause, where traffic between sites costs something."""
    estimates = content.estimates
    if estimates.price_per_hour is None or not estimates.traffic_price_per_hour:
        return
    yield '<p class="hint">Of the price of an hour:</p>\n<ul>'
    yield f"<li>{estimates.price_per_hour:,.2f}: machines</li>"
    for words in traffic_lines(estimates.traffic):
        yield f"<li>{escape(words)}</li>"
    yield "</ul>"


def _summary(content: Content) -> str:
    # One sentence: copies, GPUs, time, stock Megatron, idle GPUs.
    plan = content.plan
    shape = (
        f"{count(len(plan.replicas), 'copy', 'copies')} of the model "
        f"{'shares' if len(plan.replicas) == 1 else 'share'} "
        f"{count(plan.layout.num_devices, 'GPU')}"
    )
    words = f"{shape}, and a step takes {format_duration(content.explanation.step_time_s)}"
    speedup = content.speedup_over_stock
    if speedup is None:
        words += "; no plan of stock Megatron fits these machines"
    elif not content.not_stock:
        words += "; stock Megatron runs it as it is"
    else:
        words += f", {speedup:.2f} times as fast as the best plan that stock Megatron can run"
    if plan.idle_devices:
        words += f". {count(len(plan.idle_devices), 'GPU stays', 'GPUs stay')} unused"
    return words + "."


def _tiles(content: Content) -> Iterator[tuple[str, str]]:
    # What people ask for first; a tile without a figure is left out.
    estimates, simulation = content.estimates, content.simulation
    yield format_duration(content.explanation.step_time_s), "a step"
    yield f"{estimates.tokens_per_s:,.0f}", "tokens a second"
    speedup = content.speedup_over_stock
    if speedup is not None:
        yield f"{speedup:.2f}x", "the speed of stock Megatron's best plan"
    if estimates.price_per_hour is not None:
        traffic = estimates.traffic_price_per_hour or 0.0
        total = estimates.price_per_hour + traffic
        of_it = f", {traffic / total:.0%} of it for traffic between sites" if traffic else ""
        yield f"{total:,.2f}", f"an hour{of_it}"
    if estimates.gap is not None:
        # Where plans with context parallelism have a bound of their own, this one is not theirs.
        is_of_all = estimates.bound_with_context_parallel_s is None
        of = "" if is_of_all else " of plans without context parallelism"
        yield f"{estimates.gap:.0%}", f"above the lower bound{of}, at most"
    yield f"{1 - simulation.bubble:.0%}", "of all GPU time is computing"
    # MFU only for types whose sheet gives a peak.
    used = utilization_of(content.plan, content.cluster, content.explanation.step_time_s)
    if used is not None and used.mfu is not None:
        yield f"{used.mfu:.1%}", f"MFU, {used.flops_per_s_per_gpu / 1e12:,.3g} TFLOP/s per GPU"
    fullest = max(device.used_part for device in estimates.devices.values())
    yield f"{fullest:.0%}", "of the fullest GPU's memory is in use"


def model_name(content: Content) -> str:
    """Return the name of the model on the page: the file that it was read from."""
    workload = content.plan.workload
    return "a model" if workload is None else workload.source.rpartition("/")[2]
