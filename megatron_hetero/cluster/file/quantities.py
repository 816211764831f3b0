"""Field types of cluster files: text with a unit in the file, a number in SI units inside."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from megatron_hetero.units import parse_bandwidth, parse_bytes, parse_duration, parse_flops


def _schema(description: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "description": description, "examples": [example]})


Bandwidth = Annotated[
    float, PlainValidator(parse_bandwidth), _schema("Bits or bytes per second.", "25 Gb/s")
]
"""Bytes per second."""

Latency = Annotated[float, PlainValidator(parse_duration), _schema("Time of one hop.", "5 us")]
"""Seconds."""

MemorySize = Annotated[
    int, PlainValidator(parse_bytes), _schema("Size with its unit; GB is 1e9 bytes.", "24 GiB")
]
"""Bytes."""

Peak = Annotated[
    float, PlainValidator(parse_flops), _schema("Dense peak, without sparsity.", "312 TFLOPS")
]
"""FLOP/s."""
