"""Conditions of a script, `[[ ... ]]`, `[ ... ]` and `test`, where its text decides them.

Conditions have three values: true, false, and None where only a running shell could know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.expansion import WordPiece, joined, pattern, pieces
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.patterns import matches
from megatron_hetero.model.shell.splitting import fields
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Word

if TYPE_CHECKING:
    from tree_sitter import Node

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = ("=", "==", "!=", "<", ">")
_UNARY = re.compile("-[a-zA-Z]")
_MOST_STEPS = 3e9
"""Steps of a search in the worst case; few searches come near theirs."""
_REGEX = re.compile(r"(?:[\w^$.*+?|() ,:/-]|\[[\w^.-]+\]|\\.)*")
"""Regular expressions that mean the same here."""
_FORMS = (
    "binary_expression",
    "unary_expression",
    "parenthesized_expression",
    "postfix_expression",
    "ternary_expression",
)


@dataclass(frozen=True)
class Operand:
    """A word of `[[ ]]`, in pieces, or an operator."""

    text: str
    pieces: tuple[WordPiece, ...] = ()
    is_operator: bool = False


def tested(shell: Shell, node: Node) -> bool | None:
    """Evaluate `[[ ... ]]` or `[ ... ]`."""
    # A condition with a syntax error has no certain words.
    if node.has_error:
        return None
    kind = node.children[0].type
    if kind == "((":
        value = calculated(shell, source(node)[2:-2])
        return None if not value.is_known else value.text != "0"
    # The brackets at both ends are no words of the condition.
    leaves = _leaves(node.children[1:-1])
    # `[` is a command: its words are split and globbed, and an unquoted empty value is no word.
    if kind == "[":
        words: list[Word] = []
        for group in leaves:
            if len(group) == 1 and group[0].is_named:
                words += fields(shell, group[0])
            else:
                found = [piece for leaf in group for piece in pieces(shell, leaf)]
                words.append(joined(found, shell.where))
        return tested_words(words)
    reader = _Reader(shell, [_operand(shell, group) for group in leaves])
    return reader.whole()


def _leaves(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the words of a condition, each as a list of nodes without a blank between.

    The grammar's own reading of `-a` and `=` is not bash's.
    """
    # Forms of the grammar are opened down to their words, in the order of the text.
    flat: list[Node] = []
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if node.type in _FORMS:
            waiting.extend(reversed(node.children))
        elif node.end_byte > node.start_byte:
            flat.append(node)
    groups: list[list[Node]] = []
    for leaf in flat:
        # Two nodes without a blank between are one word; round brackets are always words alone.
        touches = groups and groups[-1][-1].end_byte == leaf.start_byte
        if touches and leaf.type not in "()" and groups[-1][-1].type not in "()":
            groups[-1].append(leaf)
        else:
            groups.append([leaf])
    return groups


def _operand(shell: Shell, group: list[Node]) -> Operand:
    text = "".join(map(source, group))
    # Operators are unnamed nodes of the grammar, but for `-f` and its like.
    if len(group) == 1 and (not group[0].is_named or group[0].type == "test_operator"):
        return Operand(text, (WordPiece(Word(text, shell.where), is_text=True),), True)
    found = tuple(piece for leaf in group for piece in pieces(shell, leaf))
    return Operand(text, found)


class _Reader:
    """A reader of `[[ ]]` by descent: choices of conjunctions of tests."""

    def __init__(self, shell: Shell, operands: list[Operand]) -> None:
        self._shell = shell
        self._operands = operands
        self._is_read = True

    def whole(self) -> bool | None:
        value = self._choice()
        # Words that are left over mean that the condition was not understood.
        return value if self._is_read and not self._operands else None

    def _next_is(self, text: str) -> bool:
        first = self._operands[0] if self._operands else None
        return first is not None and first.is_operator and first.text == text

    def _choice(self) -> bool | None:
        value = self._conjunction()
        while self._next_is("||"):
            self._operands.pop(0)
            value = either(value, self._conjunction())
        return value

    def _conjunction(self) -> bool | None:
        value = self._unit()
        while self._next_is("&&"):
            self._operands.pop(0)
            value = both(value, self._unit())
        return value

    def _unit(self) -> bool | None:
        if self._next_is("!"):
            self._operands.pop(0)
            return negated(self._unit())
        if self._next_is("("):
            self._operands.pop(0)
            value = self._choice()
            if not self._next_is(")"):
                self._is_read = False
                return None
            self._operands.pop(0)
            return value
        # A test reaches up to the next connective; its number of words decides its form.
        own: list[Operand] = []
        while self._operands and not any(map(self._next_is, ("&&", "||", ")"))):
            own.append(self._operands.pop(0))
        return self._test(own)

    def _test(self, own: list[Operand]) -> bool | None:
        words = [joined(operand.pieces, self._shell.where) for operand in own]
        match own:
            # One word is true if it is not empty.
            case [one] if not one.is_operator:
                return None if not words[0].is_known else words[0].text != ""
            case [operator, _] if operator.is_operator and _UNARY.fullmatch(operator.text):
                return _of_one(operator.text, words[1])
            case [_, operator, right]:
                return self._of_two(words[0], operator.text, right, words[2])
        # No form fits: the whole condition is unknown, whatever the other tests are.
        self._is_read = False
        return None

    def _of_two(self, left: Word, operator: str, right: Operand, word: Word) -> bool | None:
        if operator in _COMPARISONS:
            # `[[ ]]` evaluates both sides of `-eq` as arithmetic: names stand for their values.
            numbers = [calculated(self._shell, w.text or "") for w in (left, word) if w.is_known]
            if len(numbers) < 2 or not all(number.is_known for number in numbers):
                return None
            return _COMPARISONS[operator](*(int(number.text or "0") for number in numbers))
        if operator in ("=", "==", "!="):
            # The right side is a pattern where it is not quoted, else plain text.
            expression = pattern(self._shell, right.pieces)
            if isinstance(expression, Word) or not left.is_known:
                return None
            found = matches(expression, left.text or "")
            return negated(found) if operator == "!=" else found
        if operator == "=~":
            # Bash sets the parts that were found, which are not followed.
            self._shell.forget(["BASH_REMATCH"], "is set by `=~`")
            if not left.is_known or not word.is_known:
                return None
            # A quoted part stands for itself, which the joined word no longer shows.
            is_plain = all(not piece.is_quoted for piece in right.pieces)
            if not is_plain or not _REGEX.fullmatch(word.text or ""):
                return None
            try:
                # Bash's `$` is the end of the text alone; Python's may stand before a last newline.
                # Bash's `.` is any character, a newline too.
                regex = re.compile((word.text or "").replace("$", r"\Z"), re.DOTALL)
            except re.error:
                return None
            if _steps(regex.pattern, len(left.text or "")) > _MOST_STEPS:
                return None
            return regex.search(left.text or "") is not None
        return None


def _steps(regex: str, size: int) -> float:
    """Return the steps of a search in the worst case: the matcher backtracks over a text once for
    each repetition, and in exponential time where a repetition repeats another."""
    loops = min(len(re.findall(r"[*+]", regex)), 9)
    doublings = regex.count("?") + (size if re.search(r"\)[*+]", regex) else 0)
    return float(max(size, 1)) ** (loops + 1) * 2.0 ** min(doublings, 100)


def tested_words(words: Sequence[Word]) -> bool | None:
    """Evaluate the words of `[ ]` and `test` by the number of words, as POSIX prescribes."""
    # The number of words decides, and here it is open.
    if any(word.may_split for word in words):
        return None
    # An unknown word is None, so that no pattern below takes it for an operator.
    texts = [word.text if word.is_known else None for word in words]
    match texts:
        case []:
            return False
        case [one]:
            return None if one is None else one != ""
        # Beyond four words POSIX leaves the meaning of a leading `!` open.
        case ["!", *_] if len(texts) <= 4:
            return negated(tested_words(words[1:]))
        case [str(operator), _] if _UNARY.fullmatch(operator):
            return _of_one(operator, words[1])
        case [_, "-a", _]:
            return both(tested_words(words[:1]), tested_words(words[2:]))
        case [_, "-o", _]:
            return either(tested_words(words[:1]), tested_words(words[2:]))
        case [left, str(operator), right]:
            return _of_texts(left, operator, right)
    # Longer tests are cut at connectives, the loosest first, if no word could be one by chance.
    for operator, join in (("-o", either), ("-a", both)):
        if operator in texts and len(texts) > 4 and "(" not in texts and None not in texts:
            at = texts.index(operator)
            return join(tested_words(words[:at]), tested_words(words[at + 1 :]))
    return None


def _of_one(operator: str, word: Word) -> bool | None:
    # Tests of files depend on the machine of the job.
    if operator not in ("-z", "-n"):
        return None
    if not word.is_known:
        # A value that is known in part is not empty.
        has_text = any((p.text or "").strip() and p.is_known for p in word.parts)
        return operator == "-n" if has_text else None
    return (word.text == "") == (operator == "-z")


def _of_texts(left: str | None, operator: str, right: str | None) -> bool | None:
    if left is None or right is None:
        return None
    if operator in _TEXTS[:3]:
        return (left == right) == (operator != "!=")
    if operator in _COMPARISONS:
        # `[ ]` compares decimal numbers alone; 18 digits surely fit into bash's 64 bits.
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
