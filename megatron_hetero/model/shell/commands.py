"""Simple commands: calls of functions, builtins and what the script starts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.assignments import assign
from megatron_hetero.model.shell.builtins import BUILTINS
from megatron_hetero.model.shell.children import follow_nested
from megatron_hetero.model.shell.code import Runner, call
from megatron_hetero.model.shell.declarations import DECLARING
from megatron_hetero.model.shell.held import Started
from megatron_hetero.model.shell.passing import SETTING, setting, shown
from megatron_hetero.model.shell.redirections import (
    WRITERS,
    input_of,
    note_made,
    note_names,
    note_written,
    words_behind,
)
from megatron_hetero.model.shell.splitting import words_of
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.substitution import FILTERS
from megatron_hetero.model.shell.tree import REDIRECTIONS, parsed, source
from megatron_hetero.model.shell.values import Status, Word

if TYPE_CHECKING:
    from tree_sitter import Node

_WITHOUT_INPUT = frozenset(
    ["dirname", "basename", "realpath", "readlink", "seq", "expr", "mkdir", "rm", "date", "sleep"]
)
"""Programs that read no input."""


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
        words += tuple(words_of(shell, part, words_behind(part)))
    settings: list[tuple[str, Word]] = []
    if words and prefixes:
        aside = shell.fork()
        # For one command a variable loses its kind, unless it is read-only.
        aside.kinds = {key: "r" for key, kind in shell.kinds.items() if "r" in kind}
        for prefix in prefixes:
            assign(aside, prefix)
            name = source(prefix.children[0])
            held = aside.variables.get(name)
            if held is not None and held.words:
                settings.append((name, held.words[0]))
    elif prefixes:
        for prefix in prefixes:
            assign(shell, prefix)
    given = input_of(shell, redirections)
    note_written(shell, redirections)
    note_made(shell, words, redirections, given)
    if not words:
        return True
    # A command with an input of its own takes nothing from the input of the commands around.
    outer = shell.given
    shell.given = outer if given is None else given
    status = run_words(shell, words, tuple(settings))
    if given is not None:
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


def run_words(
    shell: Shell, words: tuple[Word, ...], settings: tuple[tuple[str, Word], ...] = ()
) -> Status:
    """Follow a command whose words are expanded."""
    name = words[0].text if words[0].is_known else None
    # Code of `eval` or `bash -c` whose first word begins with what is not known.
    if shell.line_of_code and name is None and _may_assign(words[0]):
        shell.note("", "code sets a variable whose name is not known")
    elif shell.line_of_code and all(word.text is None and not word.parts for word in words):
        shell.note("", f"code that is not known is run: {words[0].reason}")
    # Words before a command that leave its meaning as it is.
    while name in ("command", "builtin", "time", "exec", "env") and len(words) > 1:
        if words[1].text is not None and words[1].text.startswith("-"):
            return _with_options(shell, words, settings)
        if name == "exec":
            status = run_words(shell, words[1:], settings)
            # The shell is replaced: nothing behind runs.
            shell.flow = "exit"
            return status
        words = words[1:]
        # `env A=1 command` sets variables as `A=1 command` does; `time A=1` sets them for good.
        while words and (match := SETTING.match(shown(words[0]))):
            if name == "env":
                settings = (*settings, setting(words[0], match["name"]))
            elif name == "time":
                shell.forget([match["name"]], "is set behind `time`")
            words = words[1:]
        if not words:
            return True
        name = words[0].text if words[0].is_known else None
    # Functions hide builtins, and builtins hide programs, of the same name.
    if name in shell.functions:
        return _with_settings(shell, settings, lambda: call(shell, name or "", words[1:]))
    if name in BUILTINS:
        return _with_settings(shell, settings, lambda: BUILTINS[name or ""](shell, words[1:]))
    status = _run_program(shell, words, settings)
    # A program may read the input that the commands behind it would get.
    if shell.given is not None and name not in _WITHOUT_INPUT:
        shell.given = Word(None, shell.where, f"{name or 'a program'} reads the input")
    return status


def _may_assign(word: Word) -> bool:
    """Return whether a word in code, unknown at its beginning, may be an assignment."""
    first, *rest = word.parts or (word,)
    return not first.is_known and any("=" in (part.text or "") for part in rest[:1])


def _with_options(
    shell: Shell, words: tuple[Word, ...], settings: tuple[tuple[str, Word], ...]
) -> Status:
    """Follow `env -u X command` and the like: what they change of the command is not followed."""
    name = words[0].text
    if name in ("time", "exec", "env"):
        # `env -i` and `env -` start with nothing; other options leave the variables.
        options = itertools.takewhile(lambda text: text.startswith("-"), map(shown, words[1:]))
        sees = name != "env" or not {"-i", "-", "--ignore-environment"} & set(options)
        status = _run_program(shell, words, settings, sees_variables=sees)
        shell.flow = "exit" if name == "exec" else shell.flow
        return status
    return None


def _run_program(
    shell: Shell,
    words: tuple[Word, ...],
    settings: tuple[tuple[str, Word], ...],
    *,
    sees_variables: bool = True,
) -> Status:
    """Follow what a program prints, if that is read, or the code that the program is given."""
    name = words[0].text if words[0].is_known else None
    if name in WRITERS:
        note_names(shell, words[1:])
    # Of programs in `$(...)` only a few have an output that the text gives.
    if shell.is_captured:
        made = FILTERS[name or ""](shell, words[1:]) if name in FILTERS else None
        shell.write(None if made is None else [made])
        if name in FILTERS:
            return True if name in ("dirname", "basename", "pwd") else None
    if not follow_nested(shell, words, settings, sees_variables):
        shell.records.started.append(Started(words, shell.where, shell.context, settings))
    return None


def _with_settings(
    shell: Shell, settings: tuple[tuple[str, Word], ...], run: Callable[[], Status]
) -> Status:
    """Run a function or builtin with the variables that stand before its name."""
    before = {key: shell.variables.get(key) for key, _ in settings}
    for key, word in settings:
        if key in shell.kinds:
            shell.forget([key], "is declared as of a kind that is not followed")
        else:
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
