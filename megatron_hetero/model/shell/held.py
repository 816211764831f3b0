"""What a shell holds: variables, and the records that all of its copies share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.values import Word, same
from megatron_hetero.model.unread import Unread

if TYPE_CHECKING:
    from tree_sitter import Node

Definition = tuple["Node", Path] | None
"""Body of a function and its file; None where there may be no function of that name."""


@dataclass(frozen=True)
class Variable:
    """A shell variable: one value, or the elements of an array; `keys` are those of a table."""

    words: tuple[Word, ...]
    is_array: bool = False
    keys: tuple[str, ...] | None = None

    def equals(self, other: Variable) -> bool:
        """Return whether two variables have the same value, wherever written."""
        return (
            (self.is_array, self.keys) == (other.is_array, other.keys)
            and len(self.words) == len(other.words)
            and all(map(same, self.words, other.words))
        )


@dataclass(frozen=True)
class Hidden:
    """A variable that a local one of the same name hides: whether it is surely unset, whether
    children see it (`Shell.exported`), and its kind (`Shell.kinds`)."""

    variable: Variable | None
    is_unset: bool
    export: str | None
    kind: str


@dataclass(frozen=True)
class Started:
    """A command that the script starts, in words; a `reason` says why it may not."""

    words: tuple[Word, ...]
    where: str
    reason: str = ""
    settings: tuple[tuple[str, Word], ...] = ()


@dataclass(frozen=True)
class Made:
    """A file of text that the script writes: its name, the folder of the shell then, its text."""

    name: Word
    folder: Word | None
    text: Word


@dataclass
class Records:
    """What all copies of a shell share: commands started, parts not read, and work done.

    `written` are names of files that the script writes, `made` those of which the text is known;
    `following` the scripts that are followed, the one that starts the others first; `texts` is what
    stands in all files that were followed.
    """

    started: list[Started] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    made: dict[str, Made] = field(default_factory=dict)
    following: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    holes: list[Word] = field(default_factory=list)
    ended: str = ""
    files: int = 0
    steps: int = 0
    depth: int = 0
