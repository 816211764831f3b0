"""Measurements that users have already: logs of nccl-tests.

The text is a stranger's: it is read line by line into numbers and words, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_hetero.errors import FileFormatError

MAX_TEXT = 4 << 20
"""Characters of a log that are read at most."""

# Digits are bounded: a row of thousands is no number that anything measured.
_ROW = re.compile(r"^\s*(?P<bytes>[0-9]{1,15})\s+(?P<count>[0-9]+)\s+(?P<type>\w+)\s+(?P<rest>.*)$")
_HEADING = re.compile(r"^#\s+size\s+count\s+type\s+(?P<rest>.*)$", re.MULTILINE)
# Long times have no point: nccl-tests print seven characters at most.
_FOOT = re.compile(r"^#\s*Out of bounds values\s*:\s*(?P<wrong>[0-9]{1,9})\s+FAILED", re.MULTILINE)
_TIME = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?(?:e\+[0-9]{1,2})?")
_NCCL_TEST = re.compile(r"(?P<name>all_reduce|sendrecv|all_gather|reduce_scatter)_perf")
_RANK = re.compile(r"^#\s+Rank\s+\d+\s(?:.*\son\s+(?P<host>\S+)\s+device\s)?")


@dataclass(frozen=True)
class LinkFit:
    """A line `latency_s + bytes / bytes_per_s` through measured times; `error` is the largest
    relative distance of a measured time from it."""

    latency_s: float
    bytes_per_s: float
    error: float


@dataclass(frozen=True)
class NcclTest:
    """A log of nccl-tests: the collective, the number of ranks and of their hosts, and (bytes,
    seconds) by size."""

    collective: str
    num_ranks: int
    times: tuple[tuple[int, float], ...]
    num_wrong: int
    num_hosts: int = 1

    def link(self) -> LinkFit:
        """Fit a single direction between two ranks, on the assumption of a ring.

        An all-reduce takes 2 (n - 1) rounds of 1/n of the buffer; an all-gather or reduce-scatter
        half of them; a send one round of all of it.
        """
        n = self.num_ranks
        rounds = {"all_reduce": 2 * (n - 1), "sendrecv": 1}.get(self.collective, n - 1)
        # Bytes of each round: a ring sends 1/n of the buffer at a time.
        part = 1.0 if self.collective == "sendrecv" else 1.0 / n
        return fit_link([(b * part, seconds / rounds) for b, seconds in self.times])


def fit_link(times: Sequence[tuple[float, float]]) -> LinkFit:
    """Fit latency and bandwidth through (bytes, seconds), by least relative squares.

    Raises:
        FileFormatError: fewer than two sizes, or times that do not grow with size.
    """
    if len({num_bytes for num_bytes, _ in times}) < 2 or any(t <= 0 for _, t in times):
        raise FileFormatError("a link needs positive times of at least two message sizes")
    # Weights of 1/t^2: a small message's time counts like a large one's.
    weights = [1.0 / seconds**2 for _, seconds in times]
    total = sum(weights)
    # Means, covariance and variance under these weights give slope and intercept.
    mean_bytes = sum(w * b for w, (b, _) in zip(weights, times, strict=True)) / total
    mean_s = sum(w * t for w, (_, t) in zip(weights, times, strict=True)) / total
    above = sum(
        w * (b - mean_bytes) * (t - mean_s) for w, (b, t) in zip(weights, times, strict=True)
    )
    below = sum(w * (b - mean_bytes) ** 2 for w, (b, _) in zip(weights, times, strict=True))
    slope = above / below
    if slope <= 0:
        raise FileFormatError(
            "larger messages did not take longer, so no bandwidth follows; measure larger ones"
        )
    # A negative intercept is noise of the smallest sizes.
    latency_s = max(mean_s - slope * mean_bytes, 0.0)
    error = max(abs((latency_s + slope * b) / t - 1) for b, t in times)
    return LinkFit(latency_s, 1.0 / slope, error)


def parse_nccl_test(text: str, source: str) -> NcclTest:
    """Read the output of `all_reduce_perf` and its kin.

    Raises:
        FileFormatError: no such log, one without results, or one of several tests; the message
            names `source`.
    """
    if len(text) > MAX_TEXT:
        raise FileFormatError(
            f"{source} has more than {MAX_TEXT} characters, the limit of a log; keep the lines of "
            "the ranks, the heading and the results"
        )
    named = _NCCL_TEST.search(text)
    if named is None:
        raise FileFormatError(
            f"{source} is no log of nccl-tests: it does not name all_reduce_perf, sendrecv_perf, "
            "all_gather_perf or reduce_scatter_perf. Keep the command in the log, or its heading."
        )
    headings = [found["rest"].split() for found in _HEADING.finditer(text)]
    if len(headings) != 1:
        raise FileFormatError(
            f"{source} has {len(headings)} headings of results (# size count type ...); give the "
            "log of one test, with its heading"
        )
    (columns,) = headings
    # The time's column differs by collective and age: some have no redop, some no root.
    column = next((i for i, word in enumerate(columns) if word.endswith("time")), len(columns))
    # Out of place and in place; behind the time stand two bandwidths, then the wrong values.
    of_wrong = {column + 3, *(i for i, word in enumerate(columns) if word in ("#wrong", "error"))}
    lines = text.splitlines()
    # A line for each rank stands above the results.
    ranks = [found for line in lines if (found := _RANK.match(line)) is not None]
    rows = [row for line in lines if (row := _result(line, column, of_wrong)) is not None]
    if not rows or len(ranks) < 2:
        raise FileFormatError(
            f"{source} has {len(rows)} results and {len(ranks)} ranks; at least two ranks and two "
            "sizes are needed"
        )
    return NcclTest(
        named["name"],
        len(ranks),
        tuple((size, seconds) for size, seconds, _ in rows),
        sum(wrong for *_, wrong in rows) or sum(int(n) for n in _FOOT.findall(text)),
        len({rank["host"] for rank in ranks}),
    )


def _result(line: str, column: int, of_wrong: Iterable[int]) -> tuple[int, float, int] | None:
    """Read (bytes, seconds out of place, wrong values) from a row: size, count, type, [redop],
    [root], then time in microseconds, algorithm and bus bandwidth, and the number of wrong
    values, out of place and in place.

    Args:
        line: a line of the log.
        column: place of the time behind the type.
        of_wrong: places of the numbers of wrong values.
    """
    found = _ROW.match(line)
    if found is None or int(found["bytes"]) == 0:
        return None
    words = found["rest"].split()
    if len(words) <= column or not _TIME.fullmatch(words[column]):
        return None
    # 1e+06 of a million; old versions have the largest difference, as 1e-07, and N/A is unchecked.
    wrong = [words[i] for i in of_wrong if i < len(words) and _TIME.fullmatch(words[i])]
    return (
        int(found["bytes"]),
        float(words[column]) * 1e-6,
        sum(int(float(word)) for word in wrong),
    )
