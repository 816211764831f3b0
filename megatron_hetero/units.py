"""Quantities as people write them ("400 Gb/s", "24 GB", "5 us"), to SI numbers and back.

The unit is part of the value: a bare "25" is refused, because bits, bytes and powers of 1024 differ
by up to a factor of nine.  `b` is a bit and `B` is a byte, so case matters there.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from megatron_hetero.errors import UsageError

MILLION = 1e6
HOUR_S = 3600.0

# Upper limits of what a file may say: larger values are slips of the unit.
MAX_BANDWIDTH_BYTES_PER_S = 1e13
MAX_BYTES = 1 << 50
MAX_DURATION_S = 86400.0
MAX_FLOPS = 1e18
MAX_SPAN_S = 10 * 366 * 86400.0
MAX_COUNT = 1e18

# Decimal, so that "5 us" is the float 5e-6 and not its neighbour.
_DECIMAL = {
    prefix: Decimal(10) ** power
    for prefix, power in {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}.items()
}
_BINARY = {
    prefix: Decimal(2) ** power
    for prefix, power in {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}.items()
}
_SECONDS = {
    unit: Decimal(seconds)
    for unit, seconds in {
        "ns": "1e-9", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ms": "1e-3", "s": "1",
        "min": "60", "h": "3600",
    }.items()
}  # fmt: skip
_SPANS = _SECONDS | {"d": Decimal(86400), "days": Decimal(86400), "w": Decimal(604800)}
_COUNTS = {"": Decimal(1)} | {
    unit: Decimal(10) ** power
    for unit, power in {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}.items()
}
# Unit -> its factor to bytes, bytes per second, FLOP per second.
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BANDWIDTH = {
    f"{prefix}{symbol}": factor * num_bytes
    for prefix, factor in (_DECIMAL | _BINARY).items()
    for symbol, num_bytes in {
        "B/s": Decimal(1),
        "b/s": Decimal("0.125"),
        "bit/s": Decimal("0.125"),
        "bps": Decimal("0.125"),
    }.items()
}
_FLOPS = {
    f"{prefix}{symbol}": factor
    for prefix, factor in _DECIMAL.items()
    for symbol in ("FLOPS", "FLOP/s", "FLOPs")
}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*(\S.*)?", re.ASCII
)


class UnitError(UsageError, ValueError):
    """A quantity without a unit, with a wrong one, or out of bounds.

    Also a `ValueError`, so that the schema of a file reports it with file, line and key.
    """


def parse_bandwidth(text: object) -> float:
    """Read bytes per second of "400 Gb/s", "50 GB/s", "1.5 TB/s" or "100 GiB/s"; 0 < value <= 1e13.

    Raises:
        UnitError: no unit, an unknown one, or a value outside the bounds.

    >>> parse_bandwidth("25 Gb/s")
    3125000000.0
    """
    hint = '"b" is a bit and "B" a byte (8 bits): write for example "25 Gb/s" or "3.1 GB/s"'
    value = _parse(text, _BANDWIDTH, "bandwidth", hint)
    return _bounded(value, text, MAX_BANDWIDTH_BYTES_PER_S, "10 TB/s")


def parse_bytes(text: object) -> int:
    """Read bytes of "24 GB" (1e9) or "80 GiB" (2**30); 0 < value <= 1 PiB.

    Raises:
        UnitError: no unit, an unknown one (bits included), or a value outside the bounds.
    """
    hint = '"B" is a byte; write for example "24 GB" (1e9 bytes) or "24 GiB" (2**30 bytes)'
    value = _parse(text, _BYTES, "size", hint)
    # Half a byte is not a size: "0.3 B" rounds to 0 and is refused with the bounds.
    return int(_bounded(float(round(value)), text, MAX_BYTES, "1 PiB"))


def parse_duration(text: object) -> float:
    """Read seconds of "5 us", "8 ms", "0.5 s", "2 min"; 0 <= value <= one day.

    Raises:
        UnitError: no unit, an unknown one, or a value outside the bounds.
    """
    value = _parse(text, _SECONDS, "duration", 'write for example "5 us", "8 ms" or "1 s"')
    return _bounded(value, text, MAX_DURATION_S, "24 h", zero_allowed=True)


def parse_time_span(text: object) -> float:
    """Read seconds of "90 min", "36 h", "12 d" or "3 w"; 0 < value <= ten years.

    Raises:
        UnitError: no unit, an unknown one, or a value outside the bounds.
    """
    value = _parse(text, _SPANS, "time", 'write for example "36 h" or "12 d"')
    return _bounded(value, text, MAX_SPAN_S, "10 years")


def parse_count(text: str) -> float:
    """Read the number that "20000", "1.5e9", "20B" (1e9) or "1.4T" (1e12) is; 0 < value <= 1e18.

    Raises:
        UnitError: no number, an unknown suffix, or a value outside the bounds.
    """
    # A count has no unit, but may have a suffix of thousands.
    match = _QUANTITY.fullmatch(text.strip())
    number, unit = match.groups() if match else ("", None)
    if match is None or (unit or "") not in _COUNTS:
        raise UnitError(f'"{text}" is not a number; write for example "20000", "1.5e9" or "20B"')
    return _bounded(float(Decimal(number) * _COUNTS[unit or ""]), text, MAX_COUNT, "1e18")


def parse_flops(text: object) -> float:
    """Read FLOP/s of "312 TFLOPS" or "2.25 PFLOPS"; 0 < value <= 1e18.

    Raises:
        UnitError: no unit, an unknown one, or a value outside the bounds.
    """
    value = _parse(text, _FLOPS, "peak", 'write for example "312 TFLOPS" (dense, not sparse)')
    return _bounded(value, text, MAX_FLOPS, "1000 PFLOPS")


def format_bytes(num_bytes: float) -> str:
    """Write `23.1 GiB`: three figures, powers of 1024."""
    return _format(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bandwidth(bytes_per_s: float) -> str:
    """Write `3.12 GB/s`: three figures, powers of 1000, bytes."""
    return _format(bytes_per_s, 1000.0, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"))


def format_duration(seconds: float) -> str:
    """Write `18.3 ms`: three figures, from nanoseconds to hours; below ten minutes in seconds, so
    that steps can be compared."""
    # The sign of a difference stays.
    size = abs(seconds)
    if size < 0.5e-9:  # what rounding leaves of a difference
        return "0 s"
    if size >= 600:
        return f"{seconds / HOUR_S:.3g} h" if size >= HOUR_S else f"{seconds / 60:.3g} min"
    return _format(seconds * 1e9, 1000.0, ("ns", "us", "ms", "s"))


def _parse(text: object, units: dict[str, Decimal], quantity: str, hint: str) -> float:
    """Read the value of `text` in the base unit of `units`."""
    # YAML reads a bare number as a number, which has no unit.
    if not isinstance(text, str):
        raise UnitError(f"{text!r} is not a {quantity} with a unit; {hint}")
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UnitError(f'"{text}" is not a {quantity}; {hint}')
    number, unit = match.groups()
    if unit is None:
        raise UnitError(f'"{text}" is a {quantity} without a unit; {hint}')
    unit = unit.strip()
    if unit not in units:
        raise UnitError(f'"{text}": "{unit}" is not a unit of {quantity}; {hint}')
    # Exact in decimal, then rounded once to a float.
    return float(Decimal(number) * units[unit])


def _bounded(
    value: float, text: object, limit: float, limit_text: str, zero_allowed: bool = False
) -> float:
    # NaN is not above 0, so it is refused here too.
    positive = value > 0 or (zero_allowed and value == 0)
    if not positive or not math.isfinite(value) or value > limit:
        smallest = "at least 0" if zero_allowed else "above 0"
        raise UnitError(f'"{text}" is out of bounds: {smallest} and at most {limit_text}')
    return value


def _format(value: float, base: float, units: tuple[str, ...]) -> str:
    """Write `value` in the largest of `units` that leaves at least 1 after rounding to three
    figures."""
    largest = len(units) - 1
    power = 0
    # Rounding comes first: what prints as a whole `base` is 1 of the next unit.
    while power < largest and abs(float(_three_figures(value))) >= base:
        value /= base
        power += 1
    return f"{_three_figures(value)} {units[power]}"


def _three_figures(value: float) -> str:
    # `.3g` would write 1000 as 1e+03.
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
