"""Simple commands: calls of functions, builtins and what the script starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.assignments import assign
from megatron_hetero.model.shell.builtins import BUILTINS
from megatron_hetero.model.shell.code import Runner, call, follow_nested
from megatron_hetero.model.shell.declarations import DECLARING
from megatron_hetero.model.shell.expansion import in_here_document, value
from megatron_hetero.model.shell.held import Started
from megatron_hetero.model.shell.splitting import words_of
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.substitution import FILTERS
from megatron_hetero.model.shell.tree import REDIRECTIONS, parsed, source
from megatron_hetero.model.shell.values import Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None


def run_command(shell: Shell, node: Node, redirections: Sequence[Node]) -> Status:
    """Follow a simple command with its redirections."""
    if node.type == "variable_assignment":
        return assign(shell, node)
    # The grammar takes `A=1 B=2` and the commands on the next lines for one.
    first, *others = _lines(node)
    status = _run_line(shell, node, first, () if others else redirections)
    for children in others:
        if _is_declaration(children):
            # A declaration that the grammar takes for a command splits no words.
            row = children[0].start_point[0]
            start, end = children[0].start_byte, children[-1].end_byte
            text = (node.text or b"")[start - node.start_byte : end - node.start_byte].decode()
            status = Runner.run(shell, parsed("\n" * row + text))
            continue
        status = _run_line(shell, node, children, redirections if children is others[-1] else ())
    return status


def _run_line(
    shell: Shell, node: Node, children: Sequence[Node], redirections: Sequence[Node]
) -> Status:
    redirections = [*redirections, *(c for c in children if c.type in REDIRECTIONS)]
    children = [child for child in children if child.type not in REDIRECTIONS]
    prefixes = [child for child in children if child.type == "variable_assignment"]
    rest = [c for c in children if c.type != "variable_assignment" and c.is_named]
    nodes = [part.children[0] if part.type == "command_name" else part for part in rest]
    words = tuple(words_of(shell, node, nodes))
    for part in redirections:
        words += tuple(words_of(shell, part, _words_behind(part)))
    settings: list[tuple[str, Word]] = []
    if words and prefixes:
        aside = shell.fork()
        for prefix in prefixes:
            assign(aside, prefix)
            name = source(prefix.children[0])
            held = aside.variables.get(name)
            if held is not None and held.words:
                settings.append((name, held.words[0]))
    elif prefixes:
        for prefix in prefixes:
            assign(shell, prefix)
    given = _input(shell, redirections)
    if not words:
        return True
    outer = shell.given
    shell.given = outer if given is None else given
    status = run_words(shell, words, tuple(settings))
    shell.given = outer
    return status


def _lines(node: Node) -> list[list[Node]]:
    """Return the parts of a command, those of each line apart."""
    text = node.text or b""
    lines: list[list[Node]] = [[]]
    for child in node.children:
        if lines[-1]:
            start = lines[-1][-1].end_byte - node.start_byte
            between = text[start : child.start_byte - node.start_byte]
            if b"\n" in between.replace(b"\\\n", b"") and child.type != "comment":
                lines.append([])
        lines[-1].append(child)
    return lines


def _is_declaration(children: Sequence[Node]) -> bool:
    return children[0].type == "command_name" and source(children[0]) in (*DECLARING, "unset")


def _words_behind(part: Node) -> list[Node]:
    """Return the words of a command that stand behind a redirection's file."""
    if part.type == "file_redirect":
        named = [c for c in part.children if c.is_named and c.type != "file_descriptor"]
        return named[1:]
    if part.type == "heredoc_redirect":
        marks = ("heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor")
        return [
            c
            for c in part.children
            if c.is_named and c.type not in (*marks, *REDIRECTIONS, "pipeline", "list", "command")
        ]
    return []


def _input(shell: Shell, redirections: Sequence[Node]) -> Word | None:
    """Return what a command reads from `<<< text` or a here-document."""
    for part in redirections:
        if part.type == "herestring_redirect":
            word = value(shell, part.children[-1])
            return concatenate([word, Word("\n", shell.where)])
        if part.type == "heredoc_redirect":
            start = next((c for c in part.children if c.type == "heredoc_start"), None)
            body = next((c for c in part.children if c.type == "heredoc_body"), None)
            if start is None or body is None:
                return Word("", shell.where)
            if re.search(r"['\"\\]", source(start)):
                return Word(source(body), shell.where)
            return in_here_document(shell, source(body))
    return None


def run_words(
    shell: Shell, words: tuple[Word, ...], settings: tuple[tuple[str, Word], ...] = ()
) -> Status:
    """Follow a command whose words are expanded."""
    name = words[0].text if words[0].is_known else None
    while name in ("command", "builtin", "time", "exec") and len(words) > 1:
        if words[1].text is not None and words[1].text.startswith("-"):
            return None
        if name == "exec":
            status = run_words(shell, words[1:], settings)
            shell.flow = "exit"
            return status
        words = words[1:]
        name = words[0].text if words[0].is_known else None
    if name in shell.functions:
        return _with_settings(shell, settings, lambda: call(shell, name or "", words[1:]))
    if name in BUILTINS:
        return _with_settings(shell, settings, lambda: BUILTINS[name or ""](shell, words[1:]))
    if shell.is_captured:
        made = FILTERS[name or ""](shell, words[1:]) if name in FILTERS else None
        shell.write(None if made is None else [made])
        if name in FILTERS:
            return True if name in ("dirname", "basename", "pwd") else None
    if not follow_nested(shell, words, run_words):
        shell.records.started.append(Started(words, shell.where, shell.context, settings))
    return None


def _with_settings(
    shell: Shell, settings: tuple[tuple[str, Word], ...], run: Callable[[], Status]
) -> Status:
    """Run a function or builtin with the variables that stand before its name."""
    before = {key: shell.variables.get(key) for key, _ in settings}
    for key, word in settings:
        shell.assign(key, [word])
    held = {key: shell.variables.get(key) for key, _ in settings}
    status = run()
    for key, variable in before.items():
        if shell.variables.get(key) is not held[key]:
            shell.forget([key], "is set by a command that it is given to")
        elif variable is None:
            shell.variables.pop(key, None)
        else:
            shell.variables[key] = variable
    return status
