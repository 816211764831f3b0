"""Bash's arithmetic, `$((A * 2 + B))`, over whole numbers that the text knows.

Nothing is run: names, numbers, brackets and the operators `+ - * / % **` are all that is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_hetero.model.shell.values import Word, unknown

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d\w*)|\$?(?P<name>[A-Za-z_]\w*)|\$\{(?P<braced>[A-Za-z_]\w*)\}"
    r"|\$(?P<position>\d)|(?P<operator>\*\*|[-+*/%()]))"
)
_MAX_TOKENS = 200
_LARGEST = 1 << 63
"""Bash counts in 64 bits and wraps around; no flag has such a value."""


class _NotKnownError(Exception):
    """The value cannot be had; `word` says why."""

    def __init__(self, word: Word) -> None:
        super().__init__(word.reason)
        self.word = word


def evaluated(text: str, where: str, value_of: Callable[[str], Word]) -> Word:
    """Evaluate what stands between `$((` and `))`.

    Args:
        where: file and line, for the word returned.
        value_of: the value of a variable, which is unknown where the script does not set it.
    """
    try:
        reader = _Reader(_tokens(text, where), text, where, value_of)
        return Word(str(reader.whole()), where)
    except _NotKnownError as error:
        return error.word


def _shown(text: str) -> str:
    return f"$(({text}))"


def _tokens(text: str, where: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position, text_end = 0, len(text.rstrip())
    while position < text_end:
        match = _TOKEN.match(text, position)
        if match is None or len(found) == _MAX_TOKENS:
            raise _NotKnownError(unknown(where, _shown(text), "is not run"))
        kind = match.lastgroup or ""
        found.append(("name" if kind in ("braced", "position") else kind, match[kind]))
        position = match.end()
    return found


class _Reader:
    """A reader of one expression by descent: sums of products of powers of units."""

    def __init__(
        self,
        tokens: list[tuple[str, str]],
        text: str,
        where: str,
        value_of: Callable[[str], Word],
    ) -> None:
        self._tokens = tokens
        self._text = text
        self._where = where
        self._value_of = value_of

    def whole(self) -> int:
        if not self._tokens:
            return 0
        value = self._sum()
        if self._tokens:
            raise self._not_run()
        return value

    def _not_run(self, fault: str = "is not run") -> _NotKnownError:
        return _NotKnownError(unknown(self._where, _shown(self._text), fault))

    def _take(self, *operators: str) -> str:
        """Take the next token if it is one of `operators`; return it or nothing."""
        if self._tokens and self._tokens[0][0] == "operator" and self._tokens[0][1] in operators:
            return self._tokens.pop(0)[1]
        return ""

    def _checked(self, value: int) -> int:
        if not -_LARGEST <= value < _LARGEST:
            raise self._not_run("is beyond 64 bits")
        return value

    def _sum(self) -> int:
        value = self._product()
        while operator := self._take("+", "-"):
            other = self._product()
            value = self._checked(value + other if operator == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._power()
        while operator := self._take("*", "/", "%"):
            other = self._power()
            if operator == "*":
                value = self._checked(value * other)
                continue
            if other == 0:
                raise self._not_run("is a division by zero")
            # As in C, quotients are cut towards zero and a remainder has the dividend's sign.
            quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
            value = quotient if operator == "/" else value - quotient * other
        return value

    def _power(self) -> int:
        base = self._unit()
        if not self._take("**"):
            return base
        exponent = self._power()
        if not 0 <= exponent < 64:
            raise self._not_run("is beyond 64 bits")
        return self._checked(base**exponent)

    def _unit(self) -> int:
        if sign := self._take("-", "+"):
            value = self._unit()
            return -value if sign == "-" else value
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise self._not_run()
            return value
        if not self._tokens or self._tokens[0][0] == "operator":
            raise self._not_run()
        kind, text = self._tokens.pop(0)
        return self._number(text) if kind == "number" else self._variable(text)

    def _variable(self, name: str) -> int:
        word = self._value_of(name)
        if word.text is None or word.reason:
            raise _NotKnownError(word)
        text = word.text.strip()
        if not re.fullmatch(r"-?\d+", text):
            raise self._not_run(
                f'has {name}, which is "{text}"' if text else f"has an empty {name}"
            )
        return -self._number(text[1:]) if text.startswith("-") else self._number(text)

    def _number(self, text: str) -> int:
        """Read a number as bash does: 0x1F is hexadecimal, 017 is octal."""
        try:
            if text[:2] in ("0x", "0X"):
                value = int(text, 16)
            else:
                value = int(text, 8 if len(text) > 1 and text.startswith("0") else 10)
        except ValueError:
            raise self._not_run() from None
        return self._checked(value)
