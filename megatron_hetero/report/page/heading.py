"""The top of the page: what is trained on what, and the figures that people ask for first."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.report.page.content import Content
from megatron_hetero.report.terminal import count
from megatron_hetero.units import format_duration


def heading(content: Content) -> Iterator[str]:
    """Title, summary and tiles, as HTML."""
    workload = content.plan.workload
    assert workload is not None  # `gather` refuses a plan without one
    model, training = workload.model, workload.training
    plan = content.plan
    billions = num_parameters(workload, plan.layout.tensor_parallel_widths) / 1e9
    kinds: dict[str, int] = {}
    for host in plan.hosts:
        kinds[host.gpu_type] = kinds.get(host.gpu_type, 0) + len(host.gpu_indices)
    gpus = " + ".join(f"{number} x {kind}" for kind, number in kinds.items())
    yield "<header><div>"
    yield f"<h1>Training plan for {escape(model_name(content))}</h1>"
    yield (
        f'<div class="sub">{billions:.1f} billion parameters, {model.num_layers} layers, sequence '
        f"{model.seq_length}, {training.precision}, global batch {training.global_batch_size} "
        f"&middot; {escape(gpus)} on {count(len(plan.hosts), 'node')}</div>"
    )
    yield '</div><button id="theme" hidden>dark colours</button></header>'
    yield f'<p class="lead">{escape(_summary(content))}</p>'
    if not content.estimates.measured:
        yield (
            '<span class="badge">predicted from data sheets and an analytic model; not measured on '
            "these machines</span>"
        )
    yield '<div class="tiles">'
    for value, words in _tiles(content):
        yield f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
    yield "</div>"


def _summary(content: Content) -> str:
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
    estimates, simulation = content.estimates, content.simulation
    yield format_duration(content.explanation.step_time_s), "a step"
    yield f"{estimates.tokens_per_s:,.0f}", "tokens a second"
    speedup = content.speedup_over_stock
    if speedup is not None:
        yield f"{speedup:.2f}x", "the speed of stock Megatron's best plan"
    if estimates.gap is not None:
        yield f"{estimates.gap:.0%}", "above the lower bound, at most"
    yield f"{1 - simulation.bubble:.0%}", "of all GPU time is computing"
    fullest = max(d.peak_bytes / d.capacity_bytes for d in estimates.devices.values())
    yield f"{fullest:.0%}", "of the fullest GPU's memory is used"


def model_name(content: Content) -> str:
    """How the page calls the model: the file that it was read from."""
    workload = content.plan.workload
    return "a model" if workload is None else workload.source.rpartition("/")[2]
