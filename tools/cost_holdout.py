"""How well the cost model predicts tables that it was not fitted to.

    python tools/cost_holdout.py FOLDER

FOLDER: see `calibration_tables.py`.  Each GPU type (chip) in turn is left out of all tables that
the constants are fitted to, then each tensor-parallel width of the layer tables; what was left out
is predicted.  Printed is the mean absolute relative error of the time of one decoder layer, forward
and backward together, communication included, over all models and micro-batch sizes, as Markdown.
Links have the latency and bandwidth of the collective table of that GPU and width, as a user would
write them into cluster.yaml.

Of the tables of fused attention every second length is left out, then each GPU type; calls of
others are predicted from all of them.  Beside each error stands that of attention at the rate of
large products, as it was priced before there were tables.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attention_tables import (
    AttentionPoint,
    attention_points,
    by_table,
    fit_attention,
    ideal_s,
    predict_attention,
)
from calibration_tables import (
    CATALOGUE_NAMES,
    SAME_CHIP,
    LayerPoint,
    all_reduce_points,
    layer_points,
    operator_points,
    table_workload,
)
from layer_fits import fit_launch, fit_link, predict, with_launches
from make_calibration import fit

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.network.collectives import ring_all_reduce_s
from megatron_hetero.cost.work.calibration import Calibration
from megatron_hetero.cost.work.compute import layer_times

WIDTHS = (1, 2, 4, 8)
LAYER_OPERATORS = "enc-"


def chip(gpu: str) -> tuple[str, ...]:
    """Return all types of the tables with the chip of `gpu`."""
    name = SAME_CHIP.get(gpu, gpu)
    return (name, *(other for other, same in SAME_CHIP.items() if same == name))


def layer_errors(
    folder: Path, points: Sequence[LayerPoint], links: dict
) -> tuple[tuple[Calibration, float], dict[str, tuple[Calibration, float]]]:
    """Print both tables of layers, GPU types left out and widths left out; return the constants of
    all, and those without each type."""
    every = constants(folder)
    without_gpu = {g: constants(folder, chip(g)) for g in CATALOGUE_NAMES}
    without_width = {w: constants(folder, (), [v for v in WIDTHS if v != w]) for w in WIDTHS}
    for title, choose in (
        ("fp32, the GPU type left out", lambda p: without_gpu[p.gpu]),
        ("fp32, the width left out", lambda p: without_width[p.width]),
        ("fp32, nothing left out (layers of width 1 alone are fitted)", lambda p: every),
    ):
        error_table(title, points, lambda p, choose=choose: error(p, links, *choose(p)))
    return every, without_gpu


def constants(
    folder: Path, without: Sequence[str] = (), widths: Sequence[int] | None = None
) -> tuple[Calibration, float]:
    """Fit all constants and the host's seconds for each operator; None: layers of width 1, and
    operators of all widths."""
    data = fit(folder, without, widths or (1,))
    return Calibration.from_data(data), fit_launch(folder, data, without, widths or WIDTHS)


def error(point: LayerPoint, links: dict, calibration: Calibration, launch_s: float = 0.0) -> float:
    """Return the relative error of forward plus backward."""
    times = predict(point, links[point.gpu, point.width], calibration)
    return with_launches(point, times, launch_s).total_s / point.total_s - 1


def floor_table(
    points: Sequence[LayerPoint], links: dict, without_gpu: dict[str, tuple[Calibration, float]]
) -> None:
    """Print every layer that the host's launches make longer, without and with them."""
    print("\nfp32, layers bound by the host's launches, the GPU type left out\n")
    print("| GPU | model | TP | micro-batch | measured, ms | without the floor | with it |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for point in points:
        calibration, launch_s = without_gpu[point.gpu]
        before, after = (error(point, links, calibration, s) for s in (0.0, launch_s))
        if before != after:
            print(
                f"| {CATALOGUE_NAMES[point.gpu]} | {point.model} | {point.width} | "
                f"{point.micro_batch_size} | {1e3 * point.total_s:.2f} | {100 * before:+.1f} % | "
                f"{100 * after:+.1f} % |"
            )


def error_table(
    title: str, points: Iterable[LayerPoint], error_of: Callable[[LayerPoint], float]
) -> None:
    """Print a row for each GPU, a column for each width, and all of it."""
    cells: dict[tuple[str, int], list[float]] = {}
    for point in points:
        cells.setdefault((point.gpu, point.width), []).append(abs(error_of(point)))
    print(f"\n{title}\n")
    print("| GPU | " + " | ".join(f"TP {w}" for w in WIDTHS) + " | all |")
    print("| --- |" + " --: |" * (len(WIDTHS) + 1))
    for gpu in sorted({gpu for gpu, _ in cells}):
        print_row(CATALOGUE_NAMES[gpu], [cells.get((gpu, w), []) for w in WIDTHS])
    of_width = {w: [e for (_, v), es in cells.items() if v == w for e in es] for w in WIDTHS}
    print_row("all", list(of_width.values()))


def print_row(name: str, row: list[list[float]]) -> None:
    """Print the mean of each cell, and of all of them together."""
    every = [e for cell in row for e in cell]
    print(f"| {name} | " + " | ".join(percent(cell) for cell in [*row, every]) + " |")


def percent(errors: list[float]) -> str:
    """Write the mean of some errors."""
    return f"{100 * statistics.mean(errors):.1f} %" if errors else ""


def operator_errors(folder: Path) -> None:
    """Forward time of a layer in fp16, as the sum of its operators."""
    print("\nfp16, forward, sum of a layer's operators at width 1, the GPU type left out\n")
    print("| GPU | layers | error |\n| --- | --: | --: |")
    for gpu in CATALOGUE_NAMES:
        if gpu in SAME_CHIP:
            continue
        calibration = Calibration.from_data(fit(folder, chip(gpu)))
        sums: dict[tuple[str, int], list[float]] = {}
        for point in operator_points(folder, gpu, "fp16"):
            if point.operator.startswith(LAYER_OPERATORS):
                sums.setdefault((point.model, point.micro_batch_size), []).append(point.forward_s)
        errors = []
        for (model, size), parts in sums.items():
            if len(parts) == 13:  # all operators of a layer ran
                workload = table_workload(model, size, "fp16", operators=True)
                times = layer_times(workload, gpu_type(CATALOGUE_NAMES[gpu]), 1, calibration)
                errors.append(abs(times.forward_s / sum(parts) - 1))
        print(f"| {CATALOGUE_NAMES[gpu]} | {len(errors)} | {percent(errors)} |")


def collective_errors(folder: Path, *, groups: bool) -> None:
    """Print the errors of rings of 4 and 8, from a link fitted to rings of 2.

    Args:
        folder: of the tables.
        groups: the link has the bandwidth of each size of ring (`groups`), of its largest
            buffer.
    """
    beside = ", and the bandwidth of each size of ring with its largest buffer" if groups else ""
    print(f"\nAll-reduce inside a node, from the link that fits a pair of GPUs{beside}\n")
    print("| GPU | 2 | 4 | 8 |\n| --- | --: | --: | --: |")
    for gpu in CATALOGUE_NAMES:
        if gpu in SAME_CHIP:
            continue
        link, row = fit_link(folder, gpu, 2), []
        for width in (2, 4, 8):
            if groups and width > 2 and (sizes := [*all_reduce_points(folder, gpu, width)]):
                num_bytes, time_s = max(sizes)
                speed = 2 * (width - 1) / width * num_bytes / time_s
                link = replace(link, group_bytes_per_s=((width, min(speed, link.bytes_per_s)),))
            row.append(
                [
                    abs(ring_all_reduce_s(size, width, link) / time_s - 1)
                    for size, time_s in all_reduce_points(folder, gpu, width)
                ]
            )
        print(f"| {CATALOGUE_NAMES[gpu]} | " + " | ".join(map(percent, row)) + " |")


def profile_errors(points: Sequence[LayerPoint], ratios: dict[LayerPoint, float]) -> None:
    """Print how far off a profile is where it has not measured: the cost model times a measured
    ratio, or a line between two sizes (`cost.work.gauge`, `cost.work.profile`).

    Args:
        points: layers of all widths and sizes.
        ratios: measured over predicted seconds of each.
    """
    at = {(p.gpu, p.model, p.width, p.micro_batch_size): p for p in points}
    errors: dict[str, list[float]] = {}
    for point in points:
        size, width = point.micro_batch_size, point.width

        def of(width: int, size: float, point: LayerPoint = point) -> LayerPoint | None:
            return at.get((point.gpu, point.model, width, int(size)))

        def note(what: str, seconds: float, point: LayerPoint = point) -> None:
            errors.setdefault(what, []).append(abs(seconds / point.total_s - 1))

        predicted_s = point.total_s / ratios[point]
        half, double, one, narrow = (
            of(width, size / 2) if size % 2 == 0 else None,
            of(width, 2 * size),
            of(width, 1),
            of(width // 2, size) if width > 1 else None,
        )
        if one and size > 1:
            note("size 1 of this width | any larger size", predicted_s * ratios[one])
        if half and size > 2:
            note("half the size, and smaller ones | the size", predicted_s * ratios[half])
        if half and double:
            between_s = half.total_s + (double.total_s - half.total_s) / 3
            note("half and double the size | the size", between_s)
        if narrow:
            note("half the width | the width", predicted_s * ratios[narrow])
    print("\nfp32, a profile of other sizes or widths\n")
    print("| measured | predicted | layers | mean error | worst |\n| --- | --- | --: | --: | --: |")
    for what, found in errors.items():
        print(f"| {what} | {len(found)} | {percent(found)} | {100 * max(found):.0f} % |")


def attention_errors(folder: Path) -> None:
    """Print the tables of fused attention: lengths left out, GPU types left out, others' calls."""
    data, points = fit(folder), attention_points()

    def without(left_out: Sequence[AttentionPoint]) -> Calibration:
        kept = [point for point in points if point not in left_out]
        return Calibration.from_data({**data, "attention": fit_attention(kept, data)})

    tables = by_table(points)
    seconds = [point for calls in tables.values() for point in calls[1::2]]
    of_lengths = without(seconds)
    attention_table(
        "every second length left out",
        [(key, calls[1::2], of_lengths) for key, calls in tables.items() if calls[1:]],
    )
    of_type = {
        name: without([point for point in points if point.gpu.name == name])
        for name in dict.fromkeys(point.gpu.name for point in points)
    }
    attention_table(
        "the GPU type left out", [(key, calls, of_type[key[0]]) for key, calls in tables.items()]
    )
    others = by_table(attention_points("others"))
    attention_table(
        "calls that others timed, nothing of them fitted",
        [(key, calls, without(())) for key, calls in others.items()],
    )


def attention_table(
    title: str,
    rows: Sequence[tuple[tuple[str, int, str], Sequence[AttentionPoint], Calibration]],
) -> None:
    """Print the mean errors of both passes for each GPU type and head size, at the rate of large
    products and as predicted."""
    print(f"\nFused attention, 16 bits, causal, {title}\n")
    print("| GPU | head size | kernel | lengths | forward, as products | forward |", end="")
    print(" backward, as products | backward |\n| --- | --: | --- | --: | --: | --: | --: | --: |")
    every: list[list[float]] = [[], [], [], []]
    for (gpu, head_size, kernel), points, calibration in rows:
        cells: list[list[float]] = [[], [], [], []]
        for point in points:
            for first, (name, measured_s) in enumerate(point.seconds().items()):
                times = predict_attention(point, calibration)
                now_s = times.forward_s if name == "forward" else times.backward_s
                before_s = ideal_s(point, name, calibration)
                cells[2 * first].append(abs(before_s / measured_s - 1))
                cells[2 * first + 1].append(abs(now_s / measured_s - 1))
        every = [[*all_, *own] for all_, own in zip(every, cells, strict=True)]
        print(f"| {gpu} | {head_size} | {kernel} | {len(points)} | ", end="")
        print(" | ".join(map(percent, cells)) + " |")
    print("| all | | | | " + " | ".join(map(percent, every)) + " |")


def main() -> None:
    """Print every table."""
    folder = Path(sys.argv[1])
    points = layer_points(folder)
    links = {(p.gpu, p.width): fit_link(folder, p.gpu, p.width) for p in points}
    every, without_gpu = layer_errors(folder, points, links)
    operator_errors(folder)
    collective_errors(folder, groups=False)
    collective_errors(folder, groups=True)
    profile_errors(points, {p: 1 / (1 + error(p, links, *every)) for p in points})
    floor_table(points, links, without_gpu)
    attention_errors(folder)


if __name__ == "__main__":
    main()
