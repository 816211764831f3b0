"""workload.yaml: from the file to classes of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import read_yaml, validate_document
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
    quantised,
)
from megatron_hetero.serving.workload.schema import (
    ClassSection,
    DeadlineSection,
    TraceSection,
    ValueSection,
    WorkloadSection,
)
from megatron_hetero.serving.workload.trace import read_trace


class WorkloadError(FileFormatError):
    """workload.yaml or its trace does not describe requests."""


def load_request_mix(path: Path | str) -> RequestMix:
    """Read workload.yaml and the trace named inside.

    Raises:
        FileFormatError: a file is not well-formed, or the trace holds no requests.
        WorkloadError: the file breaks the schema; the message has file, line and key.
    """
    document = read_yaml(path)
    file = validate_document(document, WorkloadSection, WorkloadError)
    if file.trace is not None:
        requests = read_trace(Path(path).parent / file.trace.file, file.trace.format)
        return _of_trace(requests, file.trace, file.attainment, str(path))
    classes = tuple(_class(section) for section in file.classes)
    return RequestMix(classes, attainment=file.attainment, source=str(path))


def _class(section: ClassSection) -> RequestClass:
    return RequestClass(
        section.name,
        section.rate,
        _lengths(section.input),
        _lengths(section.output),
        *_deadlines(section),
        section.shared_prefix,
    )


def _deadlines(section: DeadlineSection) -> tuple[float, float]:
    return (
        math.inf if section.first_token is None else section.first_token,
        math.inf if section.between_tokens is None else section.between_tokens,
    )


def _lengths(value: int | tuple[ValueSection, ...]) -> TokenLengths:
    if isinstance(value, int):
        return TokenLengths(((value, 1.0),))
    return TokenLengths(tuple((part.tokens, part.weight) for part in value))


def _of_trace(
    rows: Sequence[tuple[float, int, int]], section: TraceSection, attainment: float, source: str
) -> RequestMix:
    """Divide the requests of a trace by the quantiles of their lengths."""
    # Cut points of the lengths of prompts and of answers.
    per_side = {1: 1, 4: 2, 9: 3}[section.classes]
    cuts = (
        _quantiles([num_input for _, num_input, _ in rows], per_side),
        _quantiles([num_output for _, _, num_output in rows], per_side),
    )
    start = min(row[0] for row in rows)
    # Each request goes to the class of its two lengths.
    requests = []
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for arrival_s, num_input, num_output in sorted(rows):
        key = tuple(
            sum(tokens > cut for cut in side)
            for tokens, side in zip((num_input, num_output), cuts, strict=True)
        )
        members.setdefault(key, []).append((num_input, num_output))
        requests.append(((arrival_s - start) / section.speed, key, num_input, num_output))
    # One mean gap more than there are, as the last request has a gap behind it too.
    span_s = requests[-1][0] * len(requests) / max(1, len(requests) - 1)
    if span_s <= 0:
        raise WorkloadError(f"{source}: all requests of the trace come at the same moment")
    # Each class has the rate and the lengths of its members.
    words = {1: ("any",), 2: ("short", "long"), 3: ("short", "middle", "long")}[per_side]
    keys = sorted(members)
    classes = tuple(
        RequestClass(
            f"{words[key[0]]}-in-{words[key[1]]}-out",
            len(members[key]) / span_s,
            quantised([num_input for num_input, _ in members[key]]),
            quantised([num_output for _, num_output in members[key]]),
            *_deadlines(section),
        )
        for key in keys
    )
    place = {key: index for index, key in enumerate(keys)}
    trace = tuple(Request(at, place[key], i, o) for at, key, i, o in requests)
    return RequestMix(classes, trace, attainment, source)


def _quantiles(values: Sequence[int], parts: int) -> list[int]:
    ordered = sorted(values)
    return [ordered[len(ordered) * k // parts - 1] for k in range(1, parts) if len(ordered) > k]
