"""Differences of two plans for a terminal: like rows in one."""

from __future__ import annotations

from megatron_hetero.plan.diff import MEMORY, Difference
from megatron_hetero.report.text.changes.differences import folded
from megatron_hetero.report.text.words import ranges


def test_gpus_that_move_together_are_one_row() -> None:
    rows = folded(
        Difference(f"device a:{i}", "moves", "idle", f"replica 0, stage 1, tensor rank {i}")
        for i in range(4)
    )
    assert rows == [Difference("4 GPUs, a: 0 1 2 3", "moves", "idle", "replica 0, stage 1")]


def test_a_change_of_places_in_a_group_keeps_them() -> None:
    stage = "replica 0, stage 1, tensor rank"
    rows = [
        Difference(f"device a:{i}", "moves", f"{stage} {i}", f"{stage} {1 - i}") for i in (0, 1)
    ]
    assert folded(rows) == rows


def test_many_rows_of_memory_are_one() -> None:
    rows = [Difference(f"device a:{i}", MEMORY, f"{i} GiB", "9 GiB") for i in range(5)]
    assert folded(rows) == [Difference("5 GPUs", MEMORY, "differs", "each in --json")]
    assert folded(rows[:4]) == rows[:4]


def test_runs_of_numbers() -> None:
    assert ranges([0, 1, 2, 3, 5]) == "0-3, 5"
