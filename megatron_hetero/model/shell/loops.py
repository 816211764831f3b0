"""Loops: as many runs as the text decides, or else none and more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.branches import condition
from megatron_hetero.model.shell.follow import (
    line_of,
    not_understood,
    run,
    run_all,
)
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.names import assigned_names
from megatron_hetero.model.shell.splitting import fields
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Status, Word
from megatron_hetero.model.shell.ways import either_way

if TYPE_CHECKING:
    from tree_sitter import Node


def follow_for(shell: Shell, node: Node) -> Status:
    """Follow `for X in ...`, once for each word."""
    # `select` asks a person.
    if node.children[0].type == "select":
        return not_understood(shell, node)
    name = source(node.children[1])
    body = node.children[-1]
    # `for X` without `in` goes through the arguments.
    has_words = any(child.type == "in" for child in node.children)
    words: list[Word] = list(shell.arguments)
    if has_words:
        at = next(i for i, child in enumerate(node.children) if child.type == "in")
        listed = [c for c in node.children[at + 1 : -1] if c.type not in (";", "\n")]
        words = [word for child in listed for word in fields(shell, child)]
    # The state before the loop, for a loop whose runs turn out to be unknown.
    before = shell.fork()
    # With a word that may be none or several, the number of runs is open.
    if not any(word.may_split for word in words):
        for word in words:
            shell.assign(name, [word])
            _run_body(shell, body)
            if shell.may_leave_loop or _leaves_loop(shell):
                break
        if not shell.may_leave_loop:
            return None
    # The runs followed so far are taken back: none of them is certain.
    shell.take(before)
    return _uncertain_loop(shell, node, lambda s: _run_body(s, body), [name])


def _run_body(shell: Shell, body: Node) -> None:
    shell.loops += 1
    run(shell, body)
    shell.loops -= 1


def _leaves_loop(shell: Shell) -> bool:
    """Return whether the loop ends here, after `break`, `return` or `exit`."""
    if shell.flow not in ("break", "continue"):
        # `return` and `exit` leave every loop.
        return bool(shell.flow)
    # `break 2` has one loop fewer to leave now.
    shell.loops_to_leave -= 1
    if shell.loops_to_leave:
        return True  # the loop around goes on, or ends, in the same way
    is_end = shell.flow == "break"
    shell.flow = ""
    return is_end


def follow_c_for(shell: Shell, node: Node) -> Status:
    """Follow `for ((i = 0; i < n; i++))`."""
    # Arithmetic is evaluated from text, so the head is cut at each `;` of its text.
    head = source(node).partition("((")[2].partition("))")[0].split(";")
    body = node.children[-1]
    before = shell.fork()
    if len(head) == 3:
        calculated(shell, head[0])
        while True:
            # Each run counts as a step, so that a loop without an end is refused.
            shell.step(node)
            holds = calculated(shell, head[1]) if head[1].strip() else Word("1", shell.where)
            if not holds.is_known:
                break
            if holds.text == "0":
                return None
            _run_body(shell, body)
            if shell.may_leave_loop:
                break
            if _leaves_loop(shell):
                return None
            # An increment that is not known would make every later condition unknown.
            if not calculated(shell, head[2]).is_known:
                break
    shell.take(before)
    return _uncertain_loop(shell, node, lambda s: _run_body(s, body), [])


def follow_while(shell: Shell, node: Node) -> Status:
    """Follow `while` and `until` as long as their condition is known."""
    body = node.children[-1]
    at = len(node.children) - 1
    head = node.children[1:at]
    # `until` has the same form, with the opposite condition.
    wanted = node.children[0].type == "while"
    before = shell.fork()
    while True:
        shell.step(node)
        holds = condition(shell, lambda: run_all(shell, head))
        # A command of the condition leaves the loop, the function or the script.
        if shell.flow:
            return None
        if holds is None:
            break
        if holds is not wanted:
            return None
        _run_body(shell, body)
        if shell.may_leave_loop:
            break
        if _leaves_loop(shell):
            return None
    shell.take(before)

    def once(branch: Shell) -> None:
        run_all(branch, head)
        _run_body(branch, body)

    return _uncertain_loop(shell, node, once, [])


def _uncertain_loop(
    shell: Shell, node: Node, body: Callable[[Shell], object], names: Sequence[str]
) -> Status:
    """Follow a loop with an unknown number of runs: none, or more than one."""
    kind = {"c_style_for_statement": "for", "for_statement": "for"}.get(node.type, "while")
    what = f"the `{kind}` of line {line_of(shell, node)}"
    reason = f"is set inside {what}, which is not run"
    # What the body sets may have any value at the start of a later run.
    set_inside = [*names, *assigned_names(node, shell.functions)]

    def once(branch: Shell) -> None:
        # A variable that only grows keeps what it had before, so flags in it stay known.
        branch.forget([n for n in set_inside if not _only_grows(node, n)], reason)
        body(branch)
        # After a possible last run the script goes on behind the loop.
        if branch.flow in ("break", "continue"):
            branch.flow = ""

    def never(branch: Shell) -> None:
        del branch

    shell.may_leave_loop = False
    either_way(shell, [never, once], what)
    shell.may_leave_loop = False
    # A loop that shifts leaves open which arguments are left.
    if any(word in source(node) for word in ("shift", "set --")) and shell.arguments:
        shell.forget_arguments(f"is set inside {what}")
    return None


def _only_grows(node: Node, name: str) -> bool:
    """Return whether a body only appends to a variable: what was in it stays."""
    return f"{name}+=" in source(node) and source(node).count(f"{name}=") == 0
