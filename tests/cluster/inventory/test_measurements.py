"""Logs of nccl-tests and matrices of nvidia-smi, read into links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.inventory.measurements import fit_link, parse_nccl_test
from megatron_hetero.errors import FileFormatError


def log(collective: str, num_ranks: int, latency_s: float, bytes_per_s: float) -> str:
    """A log of exact alpha-beta times in the format of nccl-tests 2.13 and later."""
    rounds = {"all_reduce": 2 * (num_ranks - 1), "sendrecv": 1}.get(collective, num_ranks - 1)
    part = 1.0 if collective == "sendrecv" else 1 / num_ranks
    lines = [f"# Running ./build/{collective}_perf -b 8 -e 128M -f 2 -g 2", "# Using devices"]
    for r in range(num_ranks):
        lines.append(f"#  Rank  {r} Group  0 Pid  {r} on  host device  {r} [0x01] NVIDIA RTX")
    lines.append("#       size         count      type   redop    root     time   algbw   busbw")
    for size in (1024, 65536, 1 << 20, 1 << 26):
        us = rounds * (latency_s + size * part / bytes_per_s) * 1e6
        lines.append(f"{size:12d} {size // 4:10d}     float     sum      -1 {us:10.4f}   1.00   "
                     f"1.00      0 {us:10.4f}   1.00    1.00      0")  # fmt: skip
    lines.append("# Out of bounds values : 0 OK")
    return "\n".join(lines)


@given(
    st.sampled_from(["all_reduce", "sendrecv", "all_gather", "reduce_scatter"]),
    st.integers(2, 16),
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e12),
)
def test_a_log_of_exact_times_gives_its_link(
    collective: str, num_ranks: int, latency_s: float, bytes_per_s: float
) -> None:
    test = parse_nccl_test(log(collective, num_ranks, latency_s, bytes_per_s), "a log")
    assert (test.collective, test.num_ranks, test.num_wrong) == (collective, num_ranks, 0)
    times = [seconds for _, seconds in test.times]
    if times[-1] > 1.05 * times[0]:  # the log has four decimals of a microsecond
        link = test.link()
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
        assert link.latency_s == pytest.approx(latency_s, rel=0.02, abs=2e-9)


def test_wrong_values_are_counted() -> None:
    text = log("all_reduce", 2, 1e-5, 1e10).replace("1.00      0 ", "1.00      7 ")
    assert parse_nccl_test(text, "a log").num_wrong == 28


def test_wrong_values_are_counted_by_the_million() -> None:
    text = log("all_reduce", 2, 1e-5, 1e10).replace("1.00      0 ", "1.00  1e+06 ")
    assert parse_nccl_test(text, "a log").num_wrong == 4_000_000


def test_wrong_values_in_place_are_counted() -> None:
    text = log("all_reduce", 2, 1e-5, 1e10).replace("    1.00      0\n", "    1.00      3\n")
    text = text.replace("time   algbw   busbw", " time   algbw   busbw #wrong" * 2)
    assert parse_nccl_test(text, "a log").num_wrong == 12


def test_a_log_that_failed_has_wrong_values() -> None:
    text = log("all_reduce", 2, 1e-5, 1e10).replace("values : 0 OK", "values : 12 FAILED")
    assert parse_nccl_test(text, "a log").num_wrong == 12


def test_a_long_log_is_not_read_in_part() -> None:
    with pytest.raises(FileFormatError, match="a log has more than 4194304 characters"):
        parse_nccl_test(log("all_reduce", 2, 1e-5, 1e10) + "\n# x" * 2_000_000, "a log")


def test_long_times_have_no_point() -> None:
    """nccl-tests print a time in seven characters: 47993 is one, and 178.98 a bandwidth."""
    text = log("all_reduce", 2, 1e-5, 1e10).replace(
        "# Out of",
        "  8589934592    2147483648     float     sum      -1    859003   10.00   10.00      0  "
        "  859003   10.00   10.00      0\n# Out of",
    )
    test = parse_nccl_test(text, "a log")
    assert test.times[-1] == (8589934592, pytest.approx(0.859003))
    assert test.link().bytes_per_s == pytest.approx(1e10, rel=0.01)


def test_a_log_of_two_tests_is_refused() -> None:
    """Their times are not of one collective, and each names all ranks."""
    text = log("all_reduce", 4, 1e-5, 1e10) + "\n" + log("sendrecv", 4, 1e-5, 1e10)
    with pytest.raises(FileFormatError, match="2 headings"):
        parse_nccl_test(text, "a log")


def test_hosts_are_counted() -> None:
    text = log("all_reduce", 4, 1e-5, 1e10)
    assert parse_nccl_test(text, "a log").num_hosts == 1
    text = text.replace("host device  3", "other device  3")
    assert parse_nccl_test(text, "a log").num_hosts == 2


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(FileFormatError, match="no bandwidth"):
        fit_link([(1.0, 2.0), (10.0, 1.0)])
    with pytest.raises(FileFormatError, match="two message sizes"):
        fit_link([(1.0, 2.0)])


@pytest.mark.parametrize("text", ["", "hello", "# all_reduce_perf\nnothing"])
def test_no_log_is_refused(text: str) -> None:
    with pytest.raises(FileFormatError):
        parse_nccl_test(text, "a log")
