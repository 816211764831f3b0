"""Fit `serving/prices/kernels.json` to AIConfigurator's tables of kernels, and say how well.

    python tools/make_serving_kernels.py TABLES [--check-only] [--errors FILE]

TABLES is `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator (Apache-2.0).
It needs pyarrow, which nothing else here does.  For each table (card, engine, version) the mean
error of its rows is found five times: by its own constants and ratios; by those of the engine's
other versions on the card, and, where they measured the same shape, as measured (nothing that is
fitted to them can do better than that on average); by the other engines on the card; by the other
cards.  FILE gets all of them, and what constants alone say (`constants`).  Attention of prompts has
no ratios: its versions differ by their kernels more than by sizes, and ratios made tables of
engines that were left out worse.

Tables that even their own constants miss by more than half are named by their errors, and a second
summary is without them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from serving_ratios import TOLERANCE, Fitted, predict, with_ratios
from serving_tables import CARDS, FILES, GRIDS, LEAST_ROWS, Table, joined, read

from megatron_hetero.files import write_json
from megatron_hetero.serving.prices.kernels import KernelCurve

ENGINES = ("vllm", "sglang")
"""Engines that plans are made for; tables of TensorRT-LLM are held against them, and not fitted."""
SOURCE = (
    "ai-dynamo/aiconfigurator@095f58a51 (2026-08-21), Apache-2.0: systems/data/<system>/"
    "{gemm,attention}; bf16 rows of vLLM and SGLang, all versions; made by "
    "tools/make_serving_kernels.py"
)
TARGET = Path(__file__).resolve().parent.parent / "megatron_hetero/serving/prices/kernels.json"
_START = {"peak": 0.6, "bandwidth": 0.8, "fixed_s": 1.2e-5, "exposed": 0.5}
_RANGE = {
    "peak": (0.02, 1.2), "bandwidth": (0.05, 2.5), "fixed_s": (1e-7, 1e-3), "exposed": (0.02, 1.0),
    "block": (1e-3, 1e3), "size_power": (0.02, 1.5),
}  # fmt: skip


def fit(tables: Sequence[Table], kind: str) -> Fitted:
    """Fit the constants by relative errors, those of outliers counted less, and then the ratios."""
    start = dict(_START)
    if kind == "prefill_attention":
        start |= {"block": 40.0, "size_power": 0.3}
    names = list(start)
    rows = joined(tables)

    def errors(logs: np.ndarray) -> np.ndarray:
        curve = KernelCurve(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.log(predict(Fitted(curve), rows) / rows.seconds)

    low, high = (np.log([_RANGE[name][i] for name in names]) for i in (0, 1))
    found = least_squares(
        errors, np.log(list(start.values())), bounds=(low, high), loss="soft_l1", f_scale=TOLERANCE
    )
    constants = zip(names, np.exp(found.x), strict=True)
    curve = KernelCurve(**{name: float(f"{value:.3g}") for name, value in constants})
    return with_ratios(kind, curve, tables)


def middle(kind: str, fits: Sequence[Fitted], tables: Sequence[Table]) -> Fitted:
    """Return the median of each constant, and the ratios that fit all tables with it."""
    curves, names = [f.curve for f in fits], list(KernelCurve.model_fields)
    constants = {n: float(f"{median(getattr(c, n) for c in curves):.3g}") for n in names}
    return with_ratios(kind, KernelCurve(**constants), tables)


def error(fitted: Fitted, table: Table) -> float:
    """Return the mean absolute error, relative to what was measured."""
    return float(np.mean(np.abs(predict(fitted, table) / table.seconds - 1)))


def same_shapes(table: Table, others: Sequence[Table]) -> float | None:
    """Return the error of the median of what other tables measured at the same shapes; None where
    fewer than 50 are the same."""
    measured: dict[int, list[float]] = {}
    for other in others:
        for shape, seconds in zip(other.shape.tolist(), other.seconds.tolist(), strict=True):
            measured.setdefault(shape, []).append(seconds)
    rows = zip(table.shape.tolist(), table.seconds.tolist(), strict=True)
    errors = [abs(median(measured[s]) / own - 1) for s, own in rows if s in measured]
    return mean(errors) if len(errors) >= LEAST_ROWS else None


def held_out(kind: str, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return each table's errors by constants of the others; None where there are no others."""
    by_engine: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        by_engine.setdefault((table.card, table.engine), []).append(table)
    whole = {key: fit(own, kind) for key, own in by_engine.items()}
    found = []
    for table in tables:
        card, engine = table.card, table.engine
        same = [t for t in by_engine[card, engine] if t is not table]
        engines = [key for key in by_engine if key[0] == card and key[1] != engine]
        cards = [key for key in by_engine if key[0] != card and key[1] == engine]
        fits = {
            "own": fit([table], kind),
            "version_left_out": fit(same, kind) if same else None,
            "engine_left_out": _of(kind, engines, whole, by_engine),
            "card_left_out": _without_ratios(_of(kind, cards, whole, by_engine)),
        }
        found.append({
            "kind": kind, "card": card, "engine": engine, "version": table.version,
            "other_versions_measured": same_shapes(table, same),
            **{way: error(own, table) if own else None for way, own in fits.items()},
            "constants": {w: error(Fitted(own.curve), table) for w, own in fits.items() if own},
        })  # fmt: skip
    return found


def _without_ratios(fitted: Fitted | None) -> Fitted | None:
    """Return the constants alone, as cards without a table are priced."""
    return Fitted(fitted.curve) if fitted else None


def _of(
    kind: str,
    keys: Sequence[tuple[str, str]],
    whole: Mapping[tuple[str, str], Fitted],
    tables: Mapping[tuple[str, str], Sequence[Table]],
) -> Fitted | None:
    """Return what others say on the whole; None of no others."""
    if not keys:
        return None
    own = [table for key in keys for table in tables[key]]
    return middle(kind, [whole[key] for key in keys], own)


WAYS = (
    "own", "version_left_out", "other_versions_measured", "engine_left_out", "card_left_out",
)  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean and the median over tables of each way to be predicted."""
    found = {}
    for way in WAYS:
        own = [row for row in rows if row[way] is not None]
        if own:
            errors = [row[way] for row in own]
            found[way] = {"mean": mean(errors), "median": median(errors), "tables": len(errors)}
        if own and way in own[0]["constants"]:
            found[way]["constants_mean"] = mean(row["constants"][way] for row in own)
    return found


def main() -> int:
    """Fit, print the errors of what was left out, and write."""
    parser = argparse.ArgumentParser(description="Fit the kernels of inference to tables.")
    parser.add_argument("tables", type=Path)
    parser.add_argument("--check-only", action="store_true", help="write no constants")
    parser.add_argument("--errors", type=Path, help="file for the errors of every table")
    arguments = parser.parse_args()
    kernels: dict[str, dict[str, dict[str, Fitted]]] = {}
    rows: list[dict[str, Any]] = []
    summaries = {}
    for kind, pattern in FILES.items():
        tables = [
            found
            for system, card in CARDS.items()
            for path in sorted((arguments.tables / system).glob(pattern))
            if (found := read(path, kind, card)) is not None
        ]
        own = held_out(kind, tables)
        rows += own
        summaries[kind] = {
            "all engines": summary(own),
            "vLLM and SGLang": summary([row for row in own if row["engine"] in ENGINES]),
            "vLLM and SGLang, tables that own constants describe": summary(
                [row for row in own if row["engine"] in ENGINES and row["own"] <= 0.5]
            ),
        }
        for row in own:
            words = " ".join(f"{w} {row[w]:.1%}" for w in WAYS if row[w] is not None)
            print(f"{kind} {row['card']} {row['engine']} {row['version']}: {words}")
        for name, found in summaries[kind].items():
            print(f"{kind}, {name}: " + ", ".join(
                f"{way} mean {e['mean']:.1%}, median {e['median']:.1%} of {e['tables']}"
                for way, e in found.items()
            ))  # fmt: skip
        kernels[kind] = fits_of(kind, tables)
    if arguments.errors:
        about = {"source": SOURCE, "summary": summaries, "tables": rows}
        write_json(arguments.errors, _rounded(about))
    if not arguments.check_only:
        write_json(TARGET, written(kernels))
    return 0


def written(kernels: Mapping[str, Mapping[str, Mapping[str, Fitted]]]) -> dict[str, Any]:
    """Return what `kernels.json` says: constants and ratios by kind, engine and card."""
    return {
        "source": SOURCE,
        "grids": {kind: asdict(grid) for kind, grid in GRIDS.items()},
        "kernels": {
            kind: {e: {c: f.curve.model_dump() for c, f in own.items()} for e, own in fits.items()}
            for kind, fits in kernels.items()
        },
        "ratio_logs": {
            kind: {
                engine: {
                    c: f.ratio_logs.tolist() for c, f in own.items() if f.ratio_logs is not None
                }
                for engine, own in kernels[kind].items()
            }
            for kind in GRIDS
        },
    }


def fits_of(kind: str, tables: Sequence[Table]) -> dict[str, dict[str, Fitted]]:
    """Return the fits of each engine on each card, and of cards without tables."""
    found: dict[str, dict[str, Fitted]] = {}
    for engine in ENGINES:
        own = [table for table in tables if table.engine == engine]
        found[engine] = {
            card: fit([table for table in own if table.card == card], kind)
            for card in sorted({table.card for table in own})
        }
        found[engine]["default"] = Fitted(middle(kind, list(found[engine].values()), own).curve)
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_rounded(own) for own in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
