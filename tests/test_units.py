from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import UsageError
from megatron_hetero.units import (
    UnitError,
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_flops,
    parse_time_span,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400 Gb/s", 50e9),
        ("400Gbit/s", 50e9),
        ("25 Gbps", 3.125e9),
        ("50 GB/s", 50e9),
        ("1.5 TB/s", 1.5e12),
        ("100 GiB/s", 100 * 2**30),
        ("8 kb/s", 1000.0),
        ("1e3 MB/s", 1e9),
        (" 1 B/s ", 1.0),
    ],
)
def test_bandwidth(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80 GiB", 80 * 2**30), ("24 GB", 24_000_000_000), ("1B", 1), ("1.5 KiB", 1536)],
)
def test_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("5 us", 5e-6), ("5µs", 5e-6), ("8 ms", 8e-3), ("2 min", 120), ("0 s", 0)]
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["312 TFLOPS", "312 TFLOP/s", "0.312 PFLOPS", "312000 GFLOPs"])
def test_flops(text: str) -> None:
    assert parse_flops(text) == pytest.approx(312e12, rel=1e-15)


def test_spans_and_counts() -> None:
    assert [parse_time_span(t) for t in ("36 h", "2 d", "1 w", "90 min")] == [
        129600,
        172800,
        604800,
        5400,
    ]
    assert [parse_count(t) for t in ("20000", "1.5e9", "20B", "1.4 T")] == [
        2e4,
        1.5e9,
        2e10,
        1.4e12,
    ]


@pytest.mark.parametrize(
    ("parse", "value", "reason"),
    [
        (parse_bandwidth, "25", "without a unit"),
        (parse_bandwidth, 25, "25 is not a bandwidth with a unit"),
        (parse_bandwidth, True, "True is not"),
        (parse_bandwidth, None, "None is not"),
        (parse_bandwidth, "25 gb/s", '"b" is a bit and "B" a byte'),
        (parse_bandwidth, "25 GB", '"GB" is not a unit of bandwidth'),
        (parse_bandwidth, "0 GB/s", "out of bounds"),
        (parse_bandwidth, "-1 GB/s", "out of bounds"),
        (parse_bandwidth, "11 TB/s", "at most 10 TB/s"),
        (parse_bandwidth, "1e999 GB/s", "out of bounds"),
        (parse_bandwidth, "nan GB/s", "is not a bandwidth"),
        (parse_bandwidth, "fast", "write for example"),
        (parse_bandwidth, "", "is not a bandwidth"),
        (parse_bytes, "24 Gb", '"B" is a byte'),
        (parse_bytes, "24", '"24 GiB"'),
        (parse_bytes, "0.3 B", "out of bounds"),
        (parse_duration, "5", "without a unit"),
        (parse_duration, "5 US", '"US" is not a unit'),
        (parse_duration, "-5 us", "at least 0"),
        (parse_duration, "25 h", "at most 24 h"),
        (parse_flops, "312 TB/s", "is not a unit of peak"),
        (parse_time_span, "3", "without a unit"),
        (parse_time_span, "11000 d", "at most 10 years"),
        (parse_count, "many", "is not a number"),
        (parse_count, "5 GB", "is not a number"),
        (parse_count, "0", "above 0"),
    ],
)
def test_refusals_say_what_to_write(parse, value, reason) -> None:
    with pytest.raises(UnitError) as error:
        parse(value)
    assert reason in str(error.value)
    # The schema of a file catches ValueError; the command line catches HeteroError.
    assert isinstance(error.value, ValueError) and isinstance(error.value, UsageError)


@given(st.text())
def test_any_text_gives_a_number_or_a_unit_error(text: str) -> None:
    for parse in (parse_bandwidth, parse_bytes, parse_duration, parse_flops, parse_count):
        try:
            assert parse(text) >= 0
        except UnitError:
            continue


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(24.5 * 2**30), "24.5 GiB"),
        (format_bytes(1023.9 * 2**20), "1 GiB"),
        (format_bytes(-(2**31)), "-2 GiB"),
        (format_bandwidth(3.125e9), "3.12 GB/s"),
        (format_bandwidth(999.9e9), "1 TB/s"),
        (format_duration(0), "0 s"),
        (format_duration(1.8e-15), "0 s"),  # what rounding leaves of a difference
        (format_duration(20e-6), "20 us"),
        (format_duration(0.01831), "18.3 ms"),
        (format_duration(90), "90 s"),
        (format_duration(900), "15 min"),
        (format_duration(5400), "1.5 h"),
    ],
)
def test_formats(printed: str, expected: str) -> None:
    assert printed == expected


@given(st.floats(min_value=1.0, max_value=9e12))
def test_printed_bandwidth_reads_back_to_three_figures(bytes_per_s: float) -> None:
    assert parse_bandwidth(format_bandwidth(bytes_per_s)) == pytest.approx(bytes_per_s, rel=5.1e-3)


@given(st.integers(min_value=1, max_value=1 << 49))
def test_printed_size_reads_back_to_three_figures(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5.1e-3)


@given(st.floats(min_value=1e-9, max_value=80000.0))
def test_printed_duration_reads_back_to_three_figures(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=5.1e-3)
