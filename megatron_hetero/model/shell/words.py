"""Commands of a shell script as words, the words as parts that are not expanded yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WordPart:
    """Part of a word: literal text, the name of a variable or of an array, or source text that
    only a running shell can expand.  `default` is what stands for a variable that is unset (`-`) or
    also for one that is empty (`:-`); with `=` the variable takes it, too."""

    kind: Literal["text", "variable", "array", "unknown"]
    text: str
    default: tuple[WordPart, ...] | None = None
    operator: str = ""


@dataclass(frozen=True)
class ShellWord:
    """A word; `splits` when an unquoted expansion in it may make it several words.

    `elements` are the words in the brackets of an array assignment.
    """

    pieces: tuple[WordPart, ...]
    line: int
    splits: bool = False
    quoted: bool = False
    elements: tuple[ShellWord, ...] | None = None

    @property
    def keyword(self) -> str | None:
        """Return the text of a word that is nothing but unquoted text."""
        plain = len(self.pieces) == 1 and self.pieces[0].kind == "text" and not self.quoted
        return self.pieces[0].text if plain and self.elements is None else None


@dataclass(frozen=True)
class Command:
    """A simple command, and the `&&`, `||`, `|`, `;` ... before it."""

    line: int
    words: tuple[ShellWord, ...]
    operator: str = ""

    @property
    def is_conditional(self) -> bool:
        """Return whether it follows `&&` or `||`."""
        return self.operator in ("&&", "||")
