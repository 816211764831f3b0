"""Files of measured steps: our CSV, and the result files of `vllm bench serve`."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.errors import ClusterError, FileFormatError, ProfileError
from megatron_hetero.files import read_json, read_text
from megatron_hetero.serving.prices.measured import EngineStep, StepPhase
from megatron_hetero.serving.prices.served import KvFormat, WeightFormat

COLUMNS = (
    "gpu", "engine", "version", "model", "width", "weights", "phase", "tokens", "context", "batch",
    "seconds",
)  # fmt: skip
OPTIONAL = {"kv": "16-bit", "layers": ""}
"""Columns that may be missing, and what they then hold."""
_MOST = 4_000_000
_WORDS: Mapping[str, Sequence[str]] = {
    "engine": ("vllm", "sglang"), "weights": get_args(WeightFormat), "kv": get_args(KvFormat),
    "phase": get_args(StepPhase),
}  # fmt: skip
_METADATA = {"gpu": None, "width": "1", "version": None, "weights": "16-bit", "kv": "16-bit"}
"""Keys of `vllm bench serve --metadata`; None: the key must be there."""


def read_measured_steps(
    paths: Sequence[Path], own_types: Collection[str]
) -> tuple[EngineStep, ...]:
    """Read files of measured steps: `.json` is a result of `vllm bench serve`, any other our CSV.

    Args:
        paths: the files, each of at most 16 MiB.
        own_types: names of GPU types that the cluster file describes.
    Raises:
        FileFormatError: a file is not well-formed.
        ProfileError: a value that no measurement can give; with file and line.
    """
    found: list[EngineStep] = []
    for path in paths:
        of_bench = path.suffix == ".json"
        found += _of_bench(path, own_types) if of_bench else _of_csv(path, own_types)
    return tuple(found)


def _of_csv(path: Path, own_types: Collection[str]) -> Iterator[EngineStep]:
    reader = csv.reader(io.StringIO(read_text(path)))
    number = 0
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header)
        for cells in reader:
            if not cells:
                continue
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(header):
                raise ProfileError(
                    f"{where}: {len(cells)} values under {len(header)} columns; give each its own"
                )
            row = {**OPTIONAL, **{n: c.strip() for n, c in zip(header, cells, strict=True)}}
            yield _step(row, where, own_types)
            number += 1
    except csv.Error as error:
        raise FileFormatError(f"{path}:{reader.line_num}: {error}") from None
    if not number:
        raise ProfileError(f"{path}: there are no steps below the header")


def _check_header(path: Path, header: Sequence[str]) -> None:
    known = (*COLUMNS, *OPTIONAL)
    for name in COLUMNS:
        if name not in header:
            raise ProfileError(f'{path}:1: there is no column "{name}"; {_columns()}')
    for name in header:
        if name not in known:
            raise ProfileError(f'{path}:1: column "{name}" is not known; {_columns()}')
        if header.count(name) > 1:
            raise ProfileError(f'{path}:1: there are two columns "{name}"; give one')


def _columns() -> str:
    return f"the columns are {', '.join(COLUMNS)}, and, if you like, {', '.join(OPTIONAL)}"


def _step(row: Mapping[str, str], where: str, own_types: Collection[str]) -> EngineStep:
    for name, allowed in _WORDS.items():
        if row[name] not in allowed:
            raise ProfileError(f'{where}: {name} "{row[name]}" is none of {", ".join(allowed)}')
    for name in ("version", "model"):
        if not row[name]:
            raise ProfileError(f"{where}: {name} is empty; write that of the run")
    tokens = _count(row, "tokens", where)
    # A decode step gives every request its one next token.
    if row["phase"] == "decode" and tokens != 1:
        raise ProfileError(f"{where}: tokens {tokens} in decode; a request has 1 in each step")
    context = _number(row, "context", where)
    if not 0 <= context <= _MOST:
        raise ProfileError(f"{where}: context {row['context']} is not from 0 to {_MOST}")
    seconds = _number(row, "seconds", where)
    if not 0 < seconds <= 3600:
        raise ProfileError(
            f"{where}: seconds {row['seconds']} is not above 0 and at most 3600, of one step"
        )
    return EngineStep(
        _gpu(row["gpu"], where, own_types), row["engine"], row["version"], row["model"],
        _count(row, "width", where), row["weights"], row["kv"], row["phase"],  # type: ignore[arg-type]
        tokens, context, _count(row, "batch", where),
        _count(row, "layers", where) if row["layers"] else None, seconds, where,
    )  # fmt: skip


def _gpu(name: str, where: str, own_types: Collection[str]) -> str:
    if name in own_types:
        return name
    try:
        return gpu_type(name).name
    except ClusterError as error:
        raise ProfileError(f"{where}: {error}") from None


def _count(row: Mapping[str, str], name: str, where: str) -> int:
    text = row[name]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= _MOST):
        raise ProfileError(f'{where}: {name} "{text}" is no whole number from 1 to {_MOST}')
    return int(text)


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        raise ProfileError(f'{where}: {name} "{row[name]}" is no number') from None
    if not isfinite(value):
        raise ProfileError(f"{where}: {name} {row[name]} is not finite")
    return value


def _of_bench(path: Path, own_types: Collection[str]) -> Iterator[EngineStep]:
    """Read a result of `vllm bench serve --save-result --metadata gpu=... version=...`.

    Its requests must have been under way in a constant number (`--max-concurrency`): the median of
    the seconds between tokens is a decode step of so many requests, and of a request alone the
    median to the first token is a prefill step.
    """
    document = read_json(path)
    data, line = document.data, 1
    if not isinstance(data, dict) or "median_itl_ms" not in data:
        raise ProfileError(
            f'{path}:{line}: there is no "median_itl_ms"; a .json file is a result of vllm bench '
            "serve --save-result (vllm bench latency writes neither lengths nor batch: put its "
            "seconds into a CSV)"
        )
    told = {key: data.get(key, default) for key, default in _METADATA.items()}
    for key, value in told.items():
        if value is None:
            raise ProfileError(
                f'{path}:{line}: there is no "{key}"; run vllm bench serve with --metadata '
                f"{key}=... (gpu, version; width, weights, kv where they are not 1 and 16-bit)"
            )
    batch, completed = (_whole(data, key, path) for key in ("max_concurrency", "completed"))
    # Requests in the first and last round are not beside as many others.
    if completed < 2 * batch:
        raise ProfileError(
            f"{path}:{line}: completed {completed} requests at max_concurrency {batch}; run at "
            f"least {2 * batch}, so that most steps have all of them"
        )
    new = _whole(data, "total_input_tokens", path) / completed
    answer = _whole(data, "total_output_tokens", path) / completed
    row = {key: str(value) for key, value in told.items()}
    row |= {"engine": "vllm", "model": str(data.get("model_id", "")), "layers": ""}

    def step(phase: str, tokens: float, context: float, key: str) -> EngineStep:
        seconds = data.get(key)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ProfileError(f"{path}:{line}: {key} {seconds!r} is no number")
        return _step(
            {
                **row, "phase": phase, "tokens": str(round(tokens)), "context": str(context),
                "batch": str(batch), "seconds": str(seconds / 1e3),
            },
            f"{path}:{line}", own_types,
        )  # fmt: skip

    yield step("decode", 1, new + answer / 2, "median_itl_ms")
    if batch == 1:
        yield step("prefill", new, 0.0, "median_ttft_ms")


def _whole(data: Mapping[str, Any], key: str, path: Path) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(
            f"{path}:1: {key} {value!r} is no number of 1 or more; run vllm bench serve with "
            "--max-concurrency, to its end"
        )
    return value
