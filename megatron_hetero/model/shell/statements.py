"""Kinds of statements of a script, each with the function that follows it; nothing is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.branches import follow_case, follow_if, follow_list, follow_negated
from megatron_hetero.model.shell.code import Runner
from megatron_hetero.model.shell.commands import run_command
from megatron_hetero.model.shell.conditions import tested
from megatron_hetero.model.shell.declarations import run_declaration, run_unset
from megatron_hetero.model.shell.expansion import EXPANDERS, WordPiece
from megatron_hetero.model.shell.follow import STATEMENTS, run, run_all
from megatron_hetero.model.shell.groups import (
    follow_group,
    follow_pipeline,
    follow_redirected,
    follow_subshell,
)
from megatron_hetero.model.shell.loops import follow_c_for, follow_for, follow_while
from megatron_hetero.model.shell.parameters import (
    arithmetic_expansion,
    expansion,
    simple_expansion,
)
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.substitution import substituted
from megatron_hetero.model.shell.tree import bare_source, source
from megatron_hetero.model.shell.values import Status, Word

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["run"]


def _program(shell: Shell, node: Node) -> Status:
    return run_all(shell, node.children)


def _function(shell: Shell, node: Node) -> Status:
    name = next(source(child) for child in node.children if child.type == "word")
    shell.functions[name] = ((node.children[-1], shell.path),)
    return True


def _test(shell: Shell, node: Node) -> Status:
    return tested(shell, node)


def _assignment(shell: Shell, node: Node) -> Status:
    return run_command(shell, node, ())


def _assignments(shell: Shell, node: Node) -> Status:
    for child in node.children:
        run_command(shell, child, ())
    return True


def _substitution(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    text = bare_source(node)
    # Behind `:-` the grammar takes `$((A*4))` for a command in brackets.
    if text.startswith("$((") and text.endswith("))") and _is_balanced(text[3:-2]):
        yield from arithmetic_expansion(shell, node, is_quoted)
        return
    yield WordPiece(substituted(shell, node, run_all), is_quoted)


def _is_balanced(text: str) -> bool:
    """Return whether no bracket of a text closes one that stands before the text."""
    depths = itertools.accumulate((c == "(") - (c == ")") for c in text)
    return min(depths, default=0) >= 0


def _process(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    yield WordPiece(Word("/dev/fd/63", shell.where, f"{bare_source(node)} is not run"), True)


Runner.run = staticmethod(run)
EXPANDERS["simple_expansion"] = simple_expansion
EXPANDERS["expansion"] = expansion
EXPANDERS["arithmetic_expansion"] = arithmetic_expansion
EXPANDERS["command_substitution"] = _substitution
EXPANDERS["process_substitution"] = _process
STATEMENTS |= {
    "program": _program,
    "if_statement": follow_if,
    "list": follow_list,
    "negated_command": follow_negated,
    "case_statement": follow_case,
    "for_statement": follow_for,
    "c_style_for_statement": follow_c_for,
    "while_statement": follow_while,
    "do_group": follow_group,
    "compound_statement": follow_group,
    "subshell": follow_subshell,
    "pipeline": follow_pipeline,
    "redirected_statement": follow_redirected,
    "function_definition": _function,
    "test_command": _test,
    "variable_assignment": _assignment,
    "variable_assignments": _assignments,
    "command": lambda shell, node: run_command(shell, node, ()),
    "declaration_command": run_declaration,
    "unset_command": run_unset,
}
