"""Branches of an `if` that a script takes, where its text alone decides it.

Conditions have three values: true, false, and None where only a running shell could know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_CLOSING = {"[": "]", "[[": "]]"}


@dataclass(frozen=True)
class Operand:
    """A word of a test; no `text` where it is not known.  `is_quoted`: nothing in it is a
    pattern."""

    text: str | None
    is_quoted: bool = False


@dataclass
class ShellBody:
    """A body that is open: `runs` says whether the shell runs it.

    `is_condition` holds between `if`, `elif`, `while` or `until` and the body, and `condition` is
    the value so far; `is_taken` says whether an earlier branch of an `if` ran.
    """

    keyword: str
    line: int
    runs: bool | None = None
    is_condition: bool = False
    condition: bool | None = None
    is_taken: bool | None = False

    def __post_init__(self) -> None:
        self.is_condition = self.keyword in ("if", "while", "until")

    def follow(self, keyword: str) -> None:
        """Go on to the part that `then`, `elif`, `else` or `do` begins."""
        if self.keyword == "if":
            self._branch(keyword)
        elif self.is_condition:
            self.is_condition = False
            ends = self.condition is (self.keyword == "until")
            self.runs = False if ends else None  # how often is not known

    def _branch(self, keyword: str) -> None:
        if keyword == "then":
            self.is_condition = False
            self.runs = both(negated(self.is_taken), self.condition)
            return
        self.is_taken = either(self.is_taken, self.condition)
        self.is_condition = keyword == "elif"
        self.runs = None if self.is_condition else negated(self.is_taken)

    def add_test(self, operator: str, value: bool | None) -> None:
        """Add one more command of the condition, joined by the operator before it."""
        if operator == "&&":
            self.condition = both(self.condition, value)
        elif operator == "||":
            self.condition = either(self.condition, value)
        else:
            self.condition = value if operator in ("", ";", "\n") else None


def tested(words: Sequence[Operand]) -> bool | None:
    """Evaluate a command that stands as a condition: `[[ ... ]]`, `[ ... ]`, `test`, `true`."""
    if not words:
        return None
    name, rest = words[0].text, list(words[1:])
    if name in ("true", ":", "false"):
        return name != "false"
    if name in _CLOSING:
        if not rest or rest.pop().text != _CLOSING[name]:
            return None
    elif name != "test":
        return None
    if rest and rest[0].text == "!" and not rest[0].is_quoted:
        return negated(_expression(rest[1:]))
    return _expression(rest)


def _expression(words: Sequence[Operand]) -> bool | None:
    texts = [word.text for word in words if word.text is not None]
    if len(texts) < len(words):
        return None
    match texts:
        case [text]:
            return text != ""
        case ["-z" | "-n" as operator, text]:
            return (text == "") == (operator == "-z")
        case [left, "=" | "==" | "!=" as operator, right]:
            if not words[2].is_quoted and re.search(r"[*?\[(]", right):
                return None
            return (left == right) == (operator != "!=")
        case [left, operator, right] if operator in _COMPARISONS:
            if not all(re.fullmatch(r"-?[0-9]{1,18}", number) for number in (left, right)):
                return None
            return _COMPARISONS[operator](int(left), int(right))
    return None


def negated(value: bool | None) -> bool | None:
    """Return not `value`."""
    return None if value is None else not value


def both(one: bool | None, other: bool | None) -> bool | None:
    """Return `one` and `other`."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def either(one: bool | None, other: bool | None) -> bool | None:
    """Return `one` or `other`."""
    return negated(both(negated(one), negated(other)))
