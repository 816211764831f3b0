"""Derive `megatron_hetero/cluster/nvlink.json` from measured tables of NCCL, and print how well its
prices of collectives predict them.

    python tools/make_nvlink.py [OUTPUT]

`benchmarks/tables/collectives.csv` holds microseconds of single all-reduces, all-gathers and
reduce-scatters in fp16 by GPU type, group and bytes.  Cards with equally fast NVLinks have one set
of constants (`cluster.node_links.NvlinkCurve`), fitted by least squares of relative errors.  The
tables that are printed have mean absolute errors: with nothing left out; with each buffer size,
each group size and each card left out in turn and predicted from the rest; and of the rounds of a
ring that stand where there is no table (5 us, two thirds of the sheet, as drafts of cluster.yaml
have them).  Nothing is fitted to PCIe: there the bandwidth and latency are the user's.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from product_tables import TABLES
from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import sheet_link
from megatron_hetero.cluster.node_links import Link, NvlinkCurve
from megatron_hetero.cost.network.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_hetero.files import read_json, write_json

OUTPUT = Path(__file__).resolve().parent.parent / "megatron_hetero" / "cluster" / "nvlink.json"
PRICES: dict[str, Callable[[float, int, Link], float]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
}
GROUPS = (2, 4, 8)
_LARGE_BYTES = 1 << 24
_START = (8e-6, 1e-6, 0.3, 2e-5, 3e-6, 0.85, 0.8)
"""In the order of `NvlinkCurve.NUMBERS`."""


@dataclass(frozen=True)
class Point:
    """A collective of the table; `bytes_per_s` is one direction of the GPU's link by the sheet."""

    gpu: str
    operation: str
    num_ranks: int
    num_bytes: int
    seconds: float
    bytes_per_s: float

    @property
    def collective(self) -> str:
        """Return the operation and the group in words."""
        return f"{self.operation.replace('_', '-')}, {self.num_ranks} GPUs"

    def error(self, link: Link) -> float:
        """Return the relative error of the price over a link."""
        return PRICES[self.operation](self.num_bytes, self.num_ranks, link) / self.seconds - 1

    def error_of(self, curve: NvlinkCurve) -> float:
        """Return the relative error of the price with some constants."""
        return self.error(Link(curve.part_of_sheet * self.bytes_per_s, 0.0, nvlink=curve))


def points(kind: str) -> list[Point]:
    """Read the table.

    Args:
        kind: how the names of the links of the sheets begin that are read.
    """
    found = []
    with (TABLES / "collectives.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sheet = sheet_link(row["gpu"])
            if row["operation"] in PRICES and sheet.kind.startswith(kind):
                sizes = int(row["gpus"]), int(row["bytes"]), 1e-6 * float(row["us"])
                found.append(Point(row["gpu"], row["operation"], *sizes, sheet.bytes_per_s))
    return found


def fit(own: Sequence[Point]) -> NvlinkCurve:
    """Fit the constants of cards with equally fast NVLinks."""
    # A group that is not there has the part that lies between, or next to, those that are.
    known = [n for n in GROUPS if any(point.num_ranks == n for point in own)]
    *smaller, largest = known

    def curve(logs: Sequence[float]) -> NvlinkCurve:
        values = np.exp(logs).tolist()
        numbers = dict(zip(NvlinkCurve.NUMBERS, values, strict=False))
        parts = zip(smaller, values[len(_START) :], strict=True)
        return NvlinkCurve(**numbers, group_parts=(*parts, (largest, 1.0)))

    def errors(logs: Sequence[float]) -> np.ndarray:
        found = curve(logs)
        return np.log([1 + point.error_of(found) for point in own])

    start = np.log([*_START, *[0.8] * len(smaller)])
    return curve(least_squares(errors, start, loss="soft_l1", f_scale=0.1).x)


def kinds(own: Sequence[Point]) -> dict[float, list[Point]]:
    """Group points by how fast the NVLink is."""
    found: dict[float, list[Point]] = {}
    for point in sorted(own, key=lambda point: point.bytes_per_s):
        found.setdefault(point.bytes_per_s, []).append(point)
    return found


Held = list[tuple[Point, float]]
"""Points with the relative errors of their prices."""


def left_out(own: Sequence[Point], of: Callable[[Point], Any]) -> Held:
    """Leave every value of a property out in turn, and predict it from the rest."""
    found = []
    for value in sorted({of(point) for point in own}):
        curve = fit([point for point in own if of(point) != value])
        found += [(point, point.error_of(curve)) for point in own if of(point) == value]
    return found


def cards_left_out(by_kind: dict[float, list[Point]]) -> Held:
    """Price each card as a type without a table: by cards of the nearest NVLink."""
    found = []
    for gpu in {point.gpu: None for own in by_kind.values() for point in own}:
        others = {k: [p for p in own if p.gpu != gpu] for k, own in by_kind.items()}
        ours = next(k for k, own in by_kind.items() if len(others[k]) < len(own))
        nearest = min((k for k in others if others[k]), key=lambda k: abs(np.log(k / ours)))
        curve = fit(others[nearest])
        found += [(p, p.error_of(curve)) for p in by_kind[ours] if p.gpu == gpu]
    return found


def percent(found: Sequence[float]) -> str:
    """Write the mean absolute error."""
    return f"{100 * statistics.mean(map(abs, found)):.1f} %" if found else ""


def words(num_bytes: int) -> str:
    """Write a buffer's size."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, figures to the right."""
    print("\n| " + " | ".join(head) + " |\n| --- |" + " --: |" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def rows_by(name: Callable[[Point], str], columns: Sequence[Held]) -> list[list[str]]:
    """Return a row for each name, in the order of the first column, and one of all points."""
    keys = list(dict.fromkeys(name(point) for point, _ in columns[0]))
    cells = [[percent([e for p, e in held if name(p) == key]) for held in columns] for key in keys]
    every = [percent([e for _, e in held]) for held in columns]
    return [[key, *own] for key, own in zip([*keys, "all"], [*cells, every], strict=True)]


def over_pcie() -> None:
    """Print the errors of rings over PCIe: latency and bandwidth as a user may write them, from the
    smallest and the largest buffer of each group, all sizes between predicted."""
    groups: dict[tuple[str, str, int], list[Point]] = {}
    for point in points("PCIe"):
        groups.setdefault((point.gpu, point.operation, point.num_ranks), []).append(point)
    rows = []
    for (gpu, operation, num), own in groups.items():
        price, own = PRICES[operation], sorted(own, key=lambda point: point.num_bytes)
        least, most = own[0], own[-1]
        latency_s = least.seconds / price(0.0, num, Link(1.0, 1.0))
        reached = price(most.num_bytes, num, Link(1.0, 0.0)) / (most.seconds - least.seconds)
        held = [(p, p.error(Link(reached, latency_s))) for p in own[1:-1]]
        rows.append(
            [
                *(gpu, operation.replace("_", "-"), str(num), f"{reached / 1e9:.1f} GB/s"),
                percent([error for p, error in held if p.num_bytes < _LARGE_BYTES]),
                percent([error for p, error in held if p.num_bytes >= _LARGE_BYTES]),
            ]
        )
    print("\nOver PCIe, latency and bandwidth from the smallest and the largest buffer")
    table(("GPU", "operation", "GPUs", "bandwidth", "below 16 MiB", "from 16 MiB on"), rows)


def entry(bytes_per_s: float, own: Sequence[Point]) -> dict[str, Any]:
    """Return the entry of `nvlink.json` of a kind of NVLink, numbers rounded."""
    found = asdict(fit(own))
    parts = {str(n): round(part, 3) for n, part in found.pop("group_parts")}
    return (
        {"gpus": sorted({point.gpu for point in own}), "sheet_bytes_per_s": bytes_per_s}
        | {k: round(v, 8 if k.endswith("_s") else 3) for k, v in found.items()}
        | {"group_parts": parts}
    )


def constants(curves: Sequence[dict[str, Any]]) -> None:
    """Print the entries of `nvlink.json`."""

    def times(entry: dict[str, Any], kind: str) -> str:
        return ", ".join(f"{1e6 * entry[f'{kind}_{of}_s']:.1f} us" for of in ("call", "step"))

    rows = [
        [
            f"{e['sheet_bytes_per_s'] / 1e9:.0f} GB/s: {', '.join(e['gpus'])}",
            f"{e['part_of_sheet']:.2f}",
            times(e, "small"),
            f"{e['small_part']:.2f}",
            times(e, "large"),
            ", ".join(f"{part:.2f}" for part in e["group_parts"].values()),
            f"{e['gather_part']:.2f}",
        ]
        for e in curves
    ]
    small, large = (f"{kind} buffers: call, step" for kind in ("small", "large"))
    table(("NVLink", "of the sheet", small, "part", large, "part of 2, 4, 8", "gathers"), rows)


def main() -> None:
    """Write the constants and print every table."""
    by_kind = kinds(points("NVLink"))
    about = read_json(TABLES / "kernels.json").data
    columns = about["collectives.csv"]["columns"]
    gpus = {point.gpu for own in by_kind.values() for point in own}
    provenance = {
        "derived_from": [
            f"collectives.csv, {gpu}: {about['repository']} {columns[gpu]['us']}"
            for gpu in sorted(gpus)
        ],
        "licence": f"{about['licence']}; see benchmarks/tables/kernels.LICENSE",
        "tool": "tools/make_nvlink.py",
    }
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    curves = [entry(*kind) for kind in by_kind.items()]
    write_json(output, {"curves": curves, "provenance": provenance})
    # With nothing left out, by size, by group, by card, and as rounds of a ring.
    curve_of = {kind: fit(own) for kind, own in by_kind.items()}
    fitted = [(p, p.error_of(curve_of[kind])) for kind, own in by_kind.items() for p in own]
    by_size = [h for own in by_kind.values() for h in left_out(own, lambda p: p.num_bytes)]
    by_group = [h for own in by_kind.values() for h in left_out(own, lambda p: p.num_ranks)]
    by_card = cards_left_out(by_kind)
    rounds = [(p, p.error(Link(2 / 3 * p.bytes_per_s, 5e-6))) for p, _ in fitted]
    held = fitted, by_size, by_group, by_card, rounds
    titles = "fitted", "size left out", "group left out", "card left out", "as rounds"
    print("What NCCL reaches over NVLink")
    constants(curves)
    print("\nAll-reduce, all-gather and reduce-scatter over NVLink, by card")
    table(("GPU", *titles), rows_by(lambda p: p.gpu, held))
    print("\nThe same, by buffer")
    table(("buffer", *titles), rows_by(lambda p: words(p.num_bytes), held))
    print("\nThe same, by operation and group")
    table(("collective", *titles), rows_by(lambda p: p.collective, held))
    over_pcie()


if __name__ == "__main__":
    main()
