"""The table of ranks: aligned, and honest about plans without devices."""

from __future__ import annotations

from megatron_hetero.flags.launch import RankRow
from megatron_hetero.report.text.ranks import rank_lines


def test_table() -> None:
    rows = (
        RankRow(0, 0, 0, "big.example", "A100-40GB", 3, 0, 0, 0),
        RankRow(1, 1, 0, "s", "T4", 10, 1, 2, 3),
    )
    assert list(rank_lines(rows)) == [
        "rank  host         GPU  type       replica  stage  tensor rank",
        "   0  big.example    3  A100-40GB        0      0            0",
        "   1  s             10  T4               1      2            3",
    ]


def test_without_devices() -> None:
    *_, line = rank_lines((RankRow(0, 0, 0, None, None, None, 0, 0, 0),))
    assert line.split() == ["0", "any", "any", "any", "0", "0", "0"]


def test_context_ranks_are_shown_where_there_are_any() -> None:
    rows = [RankRow(r, 0, r, None, None, None, 0, 0, r % 2, r // 2) for r in range(4)]
    heading, *lines = rank_lines(rows)
    assert heading.endswith("tensor rank  context rank")
    assert [line.split()[-2:] for line in lines] == [["0", "0"], ["1", "0"], ["0", "1"], ["1", "1"]]
