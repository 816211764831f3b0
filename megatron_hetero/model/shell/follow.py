"""Statements one after another, in the order in which bash would run each; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.names import assigned_names
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import first_fault, source
from megatron_hetero.model.shell.values import Status

if TYPE_CHECKING:
    from tree_sitter import Node

STATEMENTS: dict[str, Callable[[Shell, Node], Status]] = {}
"""How each kind of statement of the grammar is followed; `statements` fills it in."""
SEPARATORS = frozenset({";", "\n", "&", ";;", "comment", "heredoc_body", "file_redirect"})
_WITH_BODIES = frozenset(
    [
        "program",
        "if_statement",
        "elif_clause",
        "else_clause",
        "case_statement",
        "for_statement",
        "list",
        "do_group",
        "c_style_for_statement",
        "while_statement",
        "compound_statement",
        "subshell",
        "function_definition",
    ]
)
_STOPPING = frozenset({"command", "test_command", "pipeline", "compound_statement", "subshell"})


def run(shell: Shell, node: Node) -> Status:
    """Follow one statement."""
    # A `break`, `return` or `exit` before: the rest of the list is not run.
    if shell.flow:
        return None
    shell.step(node)
    shell.deeper(1)
    try:
        return _run(shell, node)
    finally:
        shell.deeper(-1)


def _run(shell: Shell, node: Node) -> Status:
    # A statement with a body is followed even if a part has a fault: the part notes the fault.
    if node.is_error or node.is_missing or (node.has_error and node.type not in _WITH_BODIES):
        return not_understood(shell, node)
    statement = STATEMENTS.get(node.type)
    if statement is not None:
        return statement(shell, node)
    # Unnamed nodes are signs such as `(`, which do nothing.
    if not node.is_named:
        return None
    return not_understood(shell, node)


def not_understood(shell: Shell, node: Node) -> Status:
    """Note a statement that the grammar does not understand, and forget the variables set
    inside."""
    # The fault may stand lines below the beginning of its statement.
    fault = first_fault(node)
    line = shell.line_at(fault)
    text = " ".join(source(node).split())
    shown = text if len(text) < 40 else f"{text[:37]}..."
    outer, shell.where = shell.where, line
    shell.note("", f"`{shown}` is not understood")
    shell.forget(assigned_names(node, shell.functions), "is set in what is not understood")
    shell.where = outer
    return None


def run_all(shell: Shell, nodes: Sequence[Node]) -> Status:
    """Follow statements one after another."""
    status: Status = True
    for i, node in enumerate(nodes):
        if shell.flow:
            break
        # An ERROR node is no sign between statements: it is noted as not understood.
        if node.type in SEPARATORS or (not node.is_named and node.type not in ("ERROR",)):
            continue
        following = nodes[i + 1].type if i + 1 < len(nodes) else ""
        # A command in the background runs in a copy: what it sets does not come back.
        if following == "&":
            apart = shell.fork()
            run(apart, node)
            status = True
            continue
        status = run(shell, node)
        # An `if` or a loop has no failure of its own: a command in it has.
        if status is False and shell.stops_at_errors and _goes_on(shell) and node.type in _STOPPING:
            end_script(shell, "a command fails after `set -e`")
    return status


def _goes_on(shell: Shell) -> bool:
    return not shell.flow


def end_script(shell: Shell, why: str) -> None:
    """Follow nothing further, and record where and why the script ends."""
    shell.flow = "exit"
    # Under a condition, or in `$(...)`, the end is not the end of the script.
    if not shell.context and not shell.is_captured:
        shell.records.ended = f"{shell.where}: {why}"


def line_of(shell: Shell, node: Node) -> str:
    """Return the number of the line on which a statement begins."""
    return shell.line_at(node).rpartition(":")[2]
