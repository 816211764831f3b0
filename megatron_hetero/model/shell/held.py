"""What a shell holds: variables, and the records that all of its copies share."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_hetero.model.shell.values import Word, same
from megatron_hetero.model.spec import Unread


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
class Started:
    """A command that the script starts, in words; a `reason` says why it may not."""

    words: tuple[Word, ...]
    where: str
    reason: str = ""
    settings: tuple[tuple[str, Word], ...] = ()


@dataclass
class Records:
    """What all copies of a shell share: commands started, parts not read, and work done."""

    started: list[Started] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    holes: list[Word] = field(default_factory=list)
    ended: str = ""
    files: int = 0
    steps: int = 0
    depth: int = 0
