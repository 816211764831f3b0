"""Groups of commands: `{ }`, subshells, pipelines, and statements with redirections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.commands import run_command
from megatron_hetero.model.shell.follow import (
    Status,
    run,
    run_all,
)
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

_OUTPUT = (">", ">>", "&>", "&>>", ">|", ">&")


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
    shell.output = apart.output
    return status if apart.flow != "exit" else None


def follow_pipeline(shell: Shell, node: Node) -> Status:
    """Follow the parts of a pipeline, each in a shell of its own."""
    parts = [child for child in node.children if child.is_named and child.type != "comment"]
    given: Word | None = None
    for i, part in enumerate(parts):
        apart = shell.fork()
        # The first part reads the input of the pipeline, each other one the output before.
        apart.given = given if i else shell.given
        is_last = i + 1 == len(parts)
        # All but the last part print into the pipe.
        if not is_last:
            apart.is_captured, apart.output = True, []
        status = run(apart, part)
        printed = apart.output
        # An output that is not known in whole is no input to follow.
        given = None if printed is None else _joined_output(printed)
        if is_last and shell.is_captured:
            shell.output = apart.output
    # The status of a pipeline depends on programs that are not run.
    del status
    return None


def _joined_output(printed: list[Word]) -> Word:
    return concatenate(printed or [Word("", "")])


def follow_redirected(shell: Shell, node: Node) -> Status:
    """Follow a statement whose output or input is another file; words may follow the file."""
    body = node.children[0]
    redirections = node.children[1:]
    # `> file` without a command makes an empty file.
    if body.type.endswith("_redirect"):
        return None
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
    kinds = [child.type for child in part.children]
    # `2> file` redirects messages, not the output.
    descriptor = next((source(c) for c in part.children if c.type == "file_descriptor"), "1")
    return any(kind in _OUTPUT for kind in kinds) and descriptor == "1"


def _redirected_command(shell: Shell, body: Node, redirections: Sequence[Node]) -> Status:
    if body.type == "command":
        shell.step(body)
        return run_command(shell, body, redirections)
    # The grammar hangs what follows `<<EOF` on its line below the redirection.
    rests = [part for part in redirections if part.type == "heredoc_redirect"]
    for rest in rests:
        for child in rest.children:
            if child.type in ("pipeline", "list", "command"):
                shell.note("", f"`{source(child)}` is not understood")
    return run(shell, body)
