"""Groups of commands: `{ }`, subshells, pipelines, and statements with redirections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.branches import joined_statements
from megatron_hetero.model.shell.commands import run_command
from megatron_hetero.model.shell.follow import (
    run,
    run_all,
)
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.redirections import (
    OUTPUT,
    input_of,
    note_written,
    statements_behind,
)
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Status, Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node



def follow_group(shell: Shell, node: Node) -> Status:
    """Follow `{ ... }` in the same shell, or calculate `(( ... ))`."""
    if node.children[0].type == "((":
        number = calculated(shell, source(node)[2:-2])
        return None if not number.is_known else number.text != "0"
    return run_all(shell, node.children[1:-1])


def follow_subshell(shell: Shell, node: Node) -> Status:
    """Follow `( ... )` in a copy of the shell; only what the copy prints comes back."""
    # A subshell starts with all variables, and keeps what it sets to itself.
    apart = shell.fork()
    status = run_all(apart, node.children[1:-1])
    shell.output, shell.given = apart.output, apart.given
    return status if apart.flow != "exit" else None


def follow_pipeline(shell: Shell, node: Node) -> Status:
    """Follow the parts of a pipeline, each in a shell of its own."""
    parts = [child for child in node.children if child.is_named and child.type != "comment"]
    return _piped(shell, [_runs(part) for part in parts])


def _runs(node: Node) -> Callable[[Shell], Status]:
    return lambda shell: run(shell, node)


def _piped(shell: Shell, parts: Sequence[Callable[[Shell], Status]]) -> Status:
    given: Word | None = None
    for i, part in enumerate(parts):
        apart = shell.fork()
        # The first part reads the input of the pipeline, each other one the output before.
        apart.given = given if i else shell.given
        is_last = i + 1 == len(parts)
        # All but the last part print into the pipe.
        if not is_last:
            apart.is_captured, apart.output = True, []
        part(apart)
        if not i:
            shell.given = apart.given
        printed = apart.output
        # An output that is not known in whole is an input of which nothing is known.
        given = Word(None, shell.where, "a pipe is not read")
        if printed is not None:
            given = _joined_output(printed)
        if is_last and shell.is_captured:
            shell.output = apart.output
    # The status of a pipeline depends on programs that are not run.
    return None


def _joined_output(printed: list[Word]) -> Word:
    return concatenate(printed or [Word("", "")])


def follow_redirected(shell: Shell, node: Node) -> Status:
    """Follow a statement whose output or input is another file; words may follow the file."""
    body = node.children[0]
    redirections = node.children[1:]
    # `> file` without a command makes an empty file.
    if body.type.endswith("_redirect"):
        note_written(shell, node.children)
        return None
    # The grammar hangs what follows `<<EOF` on its line below the redirection.
    parts = [part for part in redirections if part.type == "heredoc_redirect"]
    behind = [(part, child) for part in parts for child in statements_behind(part)]
    if not behind:
        return _redirected(shell, body, redirections)
    part, child = behind[0]

    def first(shell: Shell) -> Status:
        return _redirected(shell, body, redirections)

    if len(behind) > 1:
        shell.note("", f"`{source(behind[1][1])}` is not understood")
    if child.type == "pipeline":
        later = [c for c in child.children if c.is_named and c.type != "comment"]
        return _piped(shell, [first, *map(_runs, later)])
    operator = next((c.type for c in part.children if c.type in ("&&", "||")), "")
    if not operator:
        shell.note("", f"`{source(child)}` is not understood")
        return _redirected(shell, body, redirections)
    return joined_statements(shell, first, operator, child)


def _redirected(shell: Shell, body: Node, redirections: Sequence[Node]) -> Status:
    if not shell.is_captured:
        return _redirected_command(shell, body, redirections)
    # Output that goes to a file is missing in the text of `$(...)`.
    hides = any(_hides_output(part) for part in redirections)
    outer = shell.output
    status = _redirected_command(shell, body, redirections)
    if hides:
        shell.output = outer
    return status


def _hides_output(part: Node) -> bool:
    if part.type == "heredoc_redirect":
        return any(_hides_output(child) for child in part.children)
    kinds = [child.type for child in part.children]
    # `2> file` redirects messages, not the output.
    descriptor = next((source(c) for c in part.children if c.type == "file_descriptor"), "1")
    return any(kind in OUTPUT for kind in kinds) and descriptor == "1"


def _redirected_command(shell: Shell, body: Node, redirections: Sequence[Node]) -> Status:
    if body.type == "command":
        shell.step(body)
        return run_command(shell, body, redirections)
    # All commands of a group or a loop share one input.
    given = input_of(shell, redirections)
    note_written(shell, redirections)
    outer = shell.given
    shell.given = outer if given is None else given
    status = run(shell, body)
    if given is not None:
        shell.given = outer
    return status
