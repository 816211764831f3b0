"""Lists as HexiScale's command line writes them: `[[4, 2], [2]]`, `[[1] * 2] * 4`.

HexiScale evaluates the text as Python; here it is parsed, and nothing but lists, whole numbers, `*`
and `+` is understood.
"""

from __future__ import annotations

import ast

from megatron_hetero.errors import UsageError

_MOST = 100_000
"""Elements: a line of text must not be able to fill the memory."""

Nested = int | list["Nested"]


def parse_pipelines(text: str, flag: str) -> list[list[int]]:
    """Parse a list of lists of whole numbers above zero.

    Args:
        flag: for the message.
    Raises:
        UsageError: anything else.

    >>> parse_pipelines("[[1] * 2, [4]]", "--hetero_configs")
    [[1, 1], [4]]
    """
    try:
        # Parsed as Python, never evaluated.
        value = _value(ast.parse(text.strip(), mode="eval").body, flag)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise UsageError(f"{flag} {text!r}: not a list such as [[4, 2], [2]]") from error
    if not isinstance(value, list) or not value:
        raise UsageError(f"{flag} {text!r}: a list of lists is wanted, such as [[4, 2], [2]]")
    pipelines: list[list[int]] = []
    # Two levels: pipelines, and numbers above 0 in each.
    for row in value:
        if not isinstance(row, list) or not row:
            raise UsageError(f"{flag}: {row!r} is not a list of whole numbers")
        numbers = [n for n in row if isinstance(n, int) and n > 0]
        if len(numbers) != len(row):
            raise UsageError(f"{flag}: {row!r} is not a list of whole numbers above 0")
        pipelines.append(numbers)
    return pipelines


def _value(node: ast.expr, flag: str) -> Nested:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            return [_value(element, flag) for element in elements]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeated(_value(left, flag), _value(right, flag), flag)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left, flag), _value(right, flag)
            if isinstance(first, list) and isinstance(second, list):
                return _bounded([*first, *second], flag)
    raise UsageError(f"{flag}: {ast.unparse(node)} is neither a list nor a whole number")


def _repeated(first: Nested, second: Nested, flag: str) -> Nested:
    # `2 * [1]` is as good as `[1] * 2`.
    if isinstance(first, int):
        first, second = second, first
    if isinstance(first, list) and isinstance(second, int):
        # Counted before the list is made.
        if _size(first) * max(second, 0) > _MOST:
            raise UsageError(f"{flag}: more than {_MOST} elements")
        return first * second
    raise UsageError(f"{flag}: only a list can be repeated, by a whole number")


def _bounded(value: list[Nested], flag: str) -> list[Nested]:
    if _size(value) > _MOST:
        raise UsageError(f"{flag}: more than {_MOST} elements")
    return value


def _size(value: Nested) -> int:
    return 1 if isinstance(value, int) else 1 + sum(_size(element) for element in value)
