"""The flags of another system's command line, with the place of each for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_hetero.errors import UsageError
from megatron_hetero.files import read_text
from megatron_hetero.model.arguments import Argument, command_line_words, group_arguments
from megatron_hetero.model.script import read_megatron_words


@dataclass(frozen=True)
class StageRecompute:
    """The recompute of a stage, as `plan.Stage` says it."""

    recompute: Literal["none", "full"]
    num_layers: int | None = None


@dataclass(frozen=True)
class Conversion:
    """Layout line, with notes about the parts of the original that the line cannot hold.

    `recompute`: of each stage of every replica; empty where the job's flags say it for all.
    """

    layout: str
    notes: tuple[str, ...] = ()
    recompute: tuple[StageRecompute, ...] = ()


class GivenFlags:
    """Flags by name; asked for one by one, so that what nobody asked for can be named."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._by_name = {argument.flag: argument for argument in arguments}
        self._asked: set[str] = set()

    def has(self, flag: str) -> bool:
        """Return whether the flag was given."""
        self._asked.add(flag)
        return flag in self._by_name

    def text(self, flag: str) -> str:
        """Return its values, joined by spaces.

        Raises:
            UsageError: the flag is missing, or only a running shell knows its value.
        """
        if not self.has(flag):
            raise UsageError(f"{flag} is missing; give it in the script or after --")
        argument = self._by_name[flag]
        words = argument.words
        if words is None or len(words) < 2:
            raise UsageError(
                f"{argument.where}: {flag} has no value that can be read without running the "
                "script; give it after --"
            )
        return " ".join(words[1:])

    def integers(self, flag: str) -> tuple[int, ...]:
        """Return its values as whole numbers above zero.

        Raises:
            UsageError: as `text`, or a value is not such a number.
        """
        words = self.text(flag).split()
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise UsageError(f"{self.where(flag)}: {flag} {' '.join(words)}: whole numbers above 0")
        return tuple(int(word) for word in words)

    def integer(self, flag: str) -> int:
        """Return the only value of a flag.

        Raises:
            UsageError: as `integers`, or there are several.
        """
        values = self.integers(flag)
        if len(values) != 1:
            raise UsageError(f"{self.where(flag)}: {flag} takes one number, not {len(values)}")
        return values[0]

    def where(self, flag: str) -> str:
        """Return the file and line of a flag that was given."""
        return self._by_name[flag].where

    def never_asked_for(self, prefixes: Sequence[str]) -> tuple[str, ...]:
        """Return the flags with a prefix in `prefixes` that were never asked for."""
        return tuple(
            name
            for name in self._by_name
            if name not in self._asked and name.startswith(tuple(prefixes))
        )


def read_flags(script: Path | None, typed: Sequence[str]) -> GivenFlags:
    """Read the flags of a script, with typed flags in the place of equal flags of the script.

    Raises:
        UsageError, ModelError, FileFormatError: the script cannot be read.
    """
    arguments: list[Argument] = []
    if script is not None:
        arguments += group_arguments(read_megatron_words(script, read_text(script)))
    # Typed flags come last and win.
    arguments += group_arguments(command_line_words(typed))
    return GivenFlags(arguments)
