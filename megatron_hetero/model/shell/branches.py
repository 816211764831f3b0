"""Branches: `if`, `case`, `!`, and lists of commands joined by `&&` and `||`.

A condition that the text does not decide is followed both ways, and what differs is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.conditions import both, either, negated
from megatron_hetero.model.shell.expansion import pattern, pieces, value
from megatron_hetero.model.shell.follow import (
    SEPARATORS,
    line_of,
    run,
    run_all,
)
from megatron_hetero.model.shell.patterns import matches
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Status, Word
from megatron_hetero.model.shell.ways import either_way

if TYPE_CHECKING:
    from tree_sitter import Node


def follow_if(shell: Shell, node: Node) -> Status:
    """Follow `if`: conditions up to the first that holds, or both ways."""
    branches: list[tuple[list[Node], list[Node]]] = []
    otherwise: list[Node] = []
    head: list[Node] = []
    body: list[Node] | None = None
    # The children alternate: words of the condition, `then`, the body, further clauses.
    for child in node.children[1:-1]:
        if child.type == "then":
            body = []
        elif child.type == "elif_clause":
            # An `elif` is a condition and a body of its own, in one node.
            at = next(i for i, c in enumerate(child.children) if c.type == "then")
            branches.append((child.children[1:at], child.children[at + 1 :]))
        elif child.type == "else_clause":
            otherwise = child.children[1:]
        elif body is None:
            head.append(child)
        else:
            body.append(child)
    return _branch(shell, [(head, body or []), *branches], otherwise, line_of(shell, node))


def _branch(
    shell: Shell,
    branches: list[tuple[list[Node], list[Node]]],
    otherwise: list[Node],
    line: str,
) -> Status:
    # No condition holds: what `else` says, or nothing.
    if not branches:
        return run_all(shell, otherwise)
    (head, body), rest = branches[0], branches[1:]
    # A condition is followed even if it is not decided, as its commands may set variables.
    holds = condition(shell, lambda: run_all(shell, head))
    if holds is True:
        return run_all(shell, body)
    if holds is False:
        return _branch(shell, rest, otherwise, line)
    # The branches further down are one way: each of these is open in its turn.
    either_way(
        shell,
        [lambda s: run_all(s, body), lambda s: _branch(s, rest, otherwise, line)],
        f"the `if` of line {line}",
    )
    return None


def condition(shell: Shell, read: Callable[[], Status]) -> Status:
    """Follow commands whose failure does not end the script."""
    outer, shell.stops_at_errors = shell.stops_at_errors, False
    try:
        return read()
    finally:
        shell.stops_at_errors = outer


def follow_list(shell: Shell, node: Node) -> Status:
    """Follow `a && b` and `a || b`."""
    parts = [child for child in node.children if child.type not in SEPARATORS]
    return joined_statements(shell, lambda s: run(s, parts[0]), parts[1].type, parts[2])


def joined_statements(
    shell: Shell, left: Callable[[Shell], Status], operator: str, right: Node
) -> Status:
    """Follow what stands on both sides of `&&` or `||`."""
    # Only the status of the last command of a list ends a script after `set -e`.
    status = condition(shell, lambda: left(shell))
    # The left side ends the loop, the function or the script, as in `exit 1 || echo`.
    if shell.flow:
        return status
    # The left side decides that the right one runs: `&&` after success, `||` after failure.
    if status is (operator == "&&"):
        return run(shell, right)
    # The right side surely does not run, and the left status is that of the list.
    if status is not None:
        return status
    found: list[Status] = []
    line = line_of(shell, right)
    either_way(
        shell,
        [lambda s: found.append(run(s, right)), lambda s: None],
        f"after && or || on line {line}",
    )
    # A right side that fails makes `&&` fail in both cases; one that succeeds, `||` succeed.
    return (both if operator == "&&" else either)(None, found[0])


def follow_negated(shell: Shell, node: Node) -> Status:
    """Follow `! command`, and return the opposite status."""
    return negated(condition(shell, lambda: run(shell, node.children[-1])))


def follow_case(shell: Shell, node: Node) -> Status:
    """Follow `case`: the first pattern that fits, or all that may."""
    subject = value(shell, node.children[1])
    items = [child for child in node.children if child.type == "case_item"]
    return _matched(shell, node, subject, items)


def _matched(shell: Shell, node: Node, subject: Word, items: list[Node]) -> Status:
    """Follow the items of a `case` from one of them on.

    Args:
        node: the `case`.
        subject: the word that patterns are compared with.
        items: those that are left.
    """
    ways: list[Callable[[Shell], object]] = []
    is_decided = False
    for i, item in enumerate(items):
        # Bash tries the patterns in order, up to the first that fits.
        fits = _fits(shell, item, subject)
        if fits is False:
            continue
        # A pattern that may fit opens a way, and those behind stay possible.
        ways.append(_body_of_case(node, subject, items[i:]))
        if fits is True:
            is_decided = True
            break
    # Without a pattern that surely fits, `case` may do nothing.
    if not is_decided:
        ways.append(lambda s: None)
    # One way alone is no branch: what it sets is certain.
    if len(ways) == 1:
        ways[0](shell)
        return True if not is_decided else None
    either_way(shell, ways, f"the `case` of line {line_of(shell, node)}")
    return None


def _body_of_case(node: Node, subject: Word, items: list[Node]) -> Callable[[Shell], object]:
    """Return how to follow the body of the first of some items, as `_matched` takes them."""

    def follow(shell: Shell) -> None:
        # `;&` goes on with the next body, whatever its pattern.
        for i, item in enumerate(items):
            at = next(i for i, child in enumerate(item.children) if child.type == ")")
            run_all(shell, item.children[at + 1 :])
            last = item.children[-1].type
            # `;;&` goes on with the next pattern that fits.
            if last == ";;&" and not shell.flow:
                _matched(shell, node, subject, items[i + 1 :])
            if last != ";&":
                return

    return follow


def _fits(shell: Shell, item: Node, subject: Word) -> Status:
    at = next(i for i, child in enumerate(item.children) if child.type == ")")
    found: Status = False
    for child in item.children[:at]:
        if child.type in ("|", "("):
            continue
        expression = pattern(shell, pieces(shell, child))
        # A bare `*` fits every word, also one that is not known.
        if expression == "(?s:.*)":
            return True
        if isinstance(expression, Word) or not subject.is_known:
            found = either(found, None)
        else:
            found = either(found, matches(expression, subject.text or ""))
    return found
