"""Statements of a cluster file that are defined, and that its author hardly meant."""

from __future__ import annotations

from typing import NamedTuple


class Doubt(NamedTuple):
    """A value that others of the same file contradict: its place, what counts, what to write."""

    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
