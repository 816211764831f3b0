"""Bash's arithmetic, `$((A > 1 ? B * 2 : C))`, over whole numbers that the text knows.

Nothing is run: names, numbers, brackets and C's operators are all that is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_hetero.model.shell.values import Word, opaque, unknown

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\w#]*)|(?P<name>[A-Za-z_]\w*)|(?P<operator><<=|>>=|\*\*|\+\+|--|<<|>>|"
    r"<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%()<>!~&|^?:=,]))"
)
# A longer expression is data; the descent below would spend its time and stack on it.
_MAX_TOKENS = 200
_MAX_DEPTH = 40
_LARGEST = 1 << 63
"""Bash counts in 64 bits and wraps around; no flag has such a value."""
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Operators of two sides, the loosest first."""
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")
_ON_BITS: dict[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_NUMBERS = {"0[xX][0-9a-fA-F]+": 16, "0[0-7]*": 8, "[1-9][0-9]*": 10}
"""Form of a number -> its base."""


class _NotKnownError(Exception):
    """The value cannot be had; `word` says why."""

    def __init__(self, word: Word) -> None:
        super().__init__(word.reason)
        self.word = word


def evaluated(
    text: str,
    where: str,
    value_of: Callable[[str], Word],
    assign: Callable[[str, str], None] | None = None,
) -> Word:
    """Evaluate the text between `$((` and `))`, with `$` forms already replaced.

    Args:
        where: file and line, for the word returned.
        value_of: the value of a variable, which is unknown where the script does not set it.
        assign: takes the name and value of an assignment; without it, none is read.
    """
    try:
        reader = _Reader(_tokens(text, where), text, where, value_of, assign)
        return Word(str(reader.whole()), where)
    except _NotKnownError as error:
        return opaque(error.word)


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
        found.append((kind, match[kind]))
        position = match.end()
    return found


class _Reader:
    """A reader of one expression by descent: assignments of choices of terms.

    `_is_active` is false in the part of `a ? b : c`, `a && b`, `a || b` that does not count, in
    which nothing is assigned or refused.
    """

    def __init__(
        self,
        tokens: list[tuple[str, str]],
        text: str,
        where: str,
        value_of: Callable[[str], Word],
        assign: Callable[[str, str], None] | None,
    ) -> None:
        # The reader takes its tokens from the front, so that every method sees the rest alone.
        self._tokens = tokens
        self._text = text
        self._where = where
        self._value_of = value_of
        self._assign = assign
        self._is_active = True
        self._depth = 0

    def whole(self) -> int:
        # Bash gives an empty expression, as in `$(( ))`, the value 0.
        if not self._tokens:
            return 0
        # The last expression between commas is the value; those before are read for assignments.
        value = self._choice()
        while self._take(","):
            value = self._choice()
        # Tokens that no rule takes, such as a second number, make the whole expression unreadable.
        if self._tokens:
            raise self._not_run()
        return value

    def _not_run(self, fault: str = "is not run") -> _NotKnownError:
        return _NotKnownError(unknown(self._where, _shown(self._text), fault))

    def _next_is(self, *operators: str) -> bool:
        return bool(self._tokens) and self._tokens[0] in {("operator", o) for o in operators}

    def _take(self, *operators: str) -> str:
        """Take the next token if it is among `operators`; return the token or an empty text."""
        return self._tokens.pop(0)[1] if self._next_is(*operators) else ""

    def _checked(self, value: int) -> int:
        # A part that does not count, as `1 << 70` in `0 && 1 << 70`, is no error: any value does.
        if self._is_active and not -_LARGEST <= value < _LARGEST:
            raise self._not_run("is beyond 64 bits")
        return value if -_LARGEST <= value < _LARGEST else 0

    def _skipping(self, read: Callable[[], int], counts: bool) -> int:
        """Read a part, which may not count."""
        outer, self._is_active = self._is_active, self._is_active and counts
        try:
            return read()
        finally:
            self._is_active = outer

    def _choice(self) -> int:
        # Each bracket and each `?` costs a Python frame, which a script must not exhaust.
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._not_run()
        try:
            return self._assigned_or_chosen()
        finally:
            self._depth -= 1

    def _assigned_or_chosen(self) -> int:
        # An assignment binds loosest, so it is seen by its two first tokens, before any operator.
        if (
            len(self._tokens) > 1
            and self._tokens[0][0] == "name"
            and self._tokens[1] in {("operator", o) for o in _ASSIGNMENTS}
        ):
            name, operator = self._tokens.pop(0)[1], self._tokens.pop(0)[1]
            # As in bash, the left side is read before the right one, which may assign to it.
            before = 0 if operator == "=" else self._variable(name)
            value = self._choice()
            if operator != "=":
                value = self._combined(operator[:-1], before, value)
            return self._set(name, value)
        condition = self._level(0)
        if not self._take("?"):
            return condition
        # Both sides are read, for their tokens; only the chosen side may assign or be refused.
        yes = self._skipping(self._choice, condition != 0)
        if not self._take(":"):
            raise self._not_run()
        no = self._skipping(self._choice, condition == 0)
        return yes if condition else no

    def _set(self, name: str, value: int) -> int:
        if self._is_active:
            if self._assign is None:
                raise self._not_run()
            self._assign(name, str(value))
        return value

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._level(level + 1)
        while operator := self._take(*_LEVELS[level]):
            # `&&` needs its right side after a true left one, `||` after a false left one.
            counts = operator not in ("&&", "||") or (value != 0) == (operator == "&&")
            other = self._skipping(lambda: self._level(level + 1), counts)
            if operator in ("&&", "||"):
                value = int(bool(other)) if counts else int(operator == "||")
            else:
                value = self._combined(operator, value, other)
        return value

    def _combined(self, operator: str, value: int, other: int) -> int:
        if operator in _ON_BITS:
            return self._checked(int(_ON_BITS[operator](value, other)))
        if operator in ("<<", ">>"):
            # C leaves shifts below 0 and from 64 on undefined: the result is the processor's.
            if not 0 <= other < 64:
                if self._is_active:
                    raise self._not_run("is beyond 64 bits")
                return 0
            return self._checked(value << other if operator == "<<" else value >> other)
        if other == 0:
            if self._is_active:
                raise self._not_run("is a division by zero")
            return 0
        # As in C, quotients are cut towards zero and a remainder has the dividend's sign.
        quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
        return self._checked(quotient if operator == "/" else value - quotient * other)

    def _power(self) -> int:
        base = self._unit()
        if not self._take("**"):
            return base
        # The operator groups to the right: `2 ** 3 ** 2` is `2 ** 9`.
        exponent = self._power()
        # Bash refuses negative exponents; 64 and more leave 64 bits for all bases but -1, 0 and 1.
        if not 0 <= exponent < 64:
            if self._is_active:
                raise self._not_run("is beyond 64 bits")
            return 0
        return self._checked(base**exponent)

    def _unit(self) -> int:
        # `++i` has the value after the change; `i++` further down has the value before.
        if step := self._take("++", "--"):
            kind, name = self._tokens.pop(0) if self._tokens else ("", "")
            if kind != "name":
                raise self._not_run()
            return self._set(name, self._variable(name) + (1 if step == "++" else -1))
        if sign := self._take("-", "+", "!", "~"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._not_run()
            value = self._unit()
            self._depth -= 1
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        if self._take("("):
            value = self._choice()
            if not self._take(")"):
                raise self._not_run()
            return value
        if not self._tokens or self._tokens[0][0] == "operator":
            raise self._not_run()
        kind, text = self._tokens.pop(0)
        if kind == "number":
            return self._number(text)
        value = self._variable(text)
        if step := self._take("++", "--"):
            self._set(text, value + (1 if step == "++" else -1))
        return value

    def _variable(self, name: str) -> int:
        # A skipped part needs no value, so an unknown variable there makes nothing unknown.
        if not self._is_active:
            return 0
        word = self._value_of(name)
        if not word.is_known:
            raise _NotKnownError(word)
        text = (word.text or "").strip()
        if not text:
            return 0
        # Bash evaluates the text of a variable as an expression again; only a number is read here.
        if not re.fullmatch(r"-?\d+", text):
            raise self._not_run(f'has {name}, which is "{text}"')
        return -self._number(text[1:]) if text.startswith("-") else self._number(text)

    def _number(self, text: str) -> int:
        """Read a number as bash does: 0x1F is hexadecimal, 017 is octal."""
        # Python's `int` takes more than bash does, such as `1_000` and `0o17`.
        for form, base in _NUMBERS.items():
            if re.fullmatch(form, text):
                return self._checked(int(text, base))
        raise self._not_run()
