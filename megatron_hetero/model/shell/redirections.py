"""Redirections: what commands read, and names of the files that they write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.code import beside
from megatron_hetero.model.shell.expansion import in_here_document, value
from megatron_hetero.model.shell.held import Made
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import REDIRECTIONS, source
from megatron_hetero.model.shell.values import Word, concatenate, file_name

if TYPE_CHECKING:
    from tree_sitter import Node

OUTPUT = (">", ">>", "&>", "&>>", ">|", ">&", "<>")
WRITERS = frozenset(
    ["tee", "sed", "cp", "mv", "ln", "install", "wget", "curl", "envsubst", "rsync", "touch", "dd"]
)
"""Programs that write the files that they are given."""


def words_behind(part: Node) -> list[Node]:
    """Return the words of a command that stand behind a redirection's file."""
    if part.type == "file_redirect":
        named = [c for c in part.children if c.is_named and c.type != "file_descriptor"]
        return named[1:]
    if part.type == "heredoc_redirect":
        marks = ("heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor")
        behind = statements_behind(part)
        return [
            c
            for c in part.children
            if c.is_named and c.type not in (*marks, *REDIRECTIONS) and c not in behind
        ]
    return []


def statements_behind(part: Node) -> list[Node]:
    """Return the statements that stand behind `<<EOF` in its line: a pipeline, or what follows
    `&&` or `||`."""
    found: list[Node] = []
    for before, child in zip([None, *part.children], part.children, strict=False):
        follows = before is not None and before.type in ("&&", "||")
        if child.type in ("pipeline", "list", "command") or (follows and child.is_named):
            found.append(child)
    return found


def input_of(shell: Shell, redirections: Sequence[Node]) -> Word | None:
    """Return what a command reads from `<<< text`, a here-document or a file."""
    given: Word | None = None
    for part in redirections:
        descriptor = next((source(c) for c in part.children if c.type == "file_descriptor"), "")
        if part.type == "file_redirect":
            is_input = any(child.type in ("<", "<&", "<&-", "<>") for child in part.children)
            if is_input and descriptor in ("", "0"):
                given = _text_of_file(shell, part)
        elif descriptor not in ("", "0"):
            continue  # read by its number alone, as in `read -u 3`
        elif part.type == "herestring_redirect":
            word = value(shell, part.children[-1])
            given = concatenate([word, Word("\n", shell.where)])
        elif part.type == "heredoc_redirect":
            given = _here_document(shell, part)
    return given


def _here_document(shell: Shell, part: Node) -> Word:
    start = next((c for c in part.children if c.type == "heredoc_start"), None)
    body = next((c for c in part.children if c.type == "heredoc_body"), None)
    if start is None or body is None:
        return Word("", shell.where)
    text = source(body)
    # `<<-` takes the tabs at the beginning of lines away.
    if any(child.type == "<<-" for child in part.children):
        text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
    # A quoted end, as in `<<'EOF'`, leaves the text as it is.
    if re.search(r"['\"\\]", source(start)):
        return Word(text, shell.where)
    return in_here_document(shell, text)


def _text_of_file(shell: Shell, part: Node) -> Word:
    name = next((c for c in part.children if c.is_named and c.type != "file_descriptor"), None)
    found = None
    if name is not None and any(child.type == "<" for child in part.children):
        found = beside(shell, value(shell, name))
    if found is None:
        return Word(None, shell.where, f"`{source(part)}` is not read")
    return Word(found[1], shell.where)


def note_written(shell: Shell, redirections: Sequence[Node]) -> None:
    """Remember the files into which commands print."""
    for part in redirections:
        # The files of `cat <<EOF > file` hang below the here-document.
        if part.type == "heredoc_redirect":
            note_written(shell, part.children)
        elif part.type == "file_redirect" and any(c.type in OUTPUT for c in part.children):
            named = [c for c in part.children if c.is_named and c.type != "file_descriptor"]
            note_names(shell, [value(shell, child) for child in named[:1]])


def note_made(
    shell: Shell, words: Sequence[Word], redirections: Sequence[Node], given: Word | None
) -> None:
    """Remember the text of `cat > FILE <<EOF`, which is surely run; after `note_written`."""
    if [word.text for word in words] != ["cat"] or given is None or shell.context:
        return
    parts = [p for part in redirections for p in (part, *part.children)]
    outputs = [p for p in parts if any(child.type in OUTPUT for child in p.children)]
    if len(outputs) != 1 or not any(child.type in (">", ">|") for child in outputs[0].children):
        return
    named = [value(shell, child) for child in outputs[0].children if child.is_named]
    if len(named) == 1 and (name := file_name(named[0])):
        shell.records.made[name] = Made(named[0], shell.folder, given)


def note_names(shell: Shell, words: Sequence[Word]) -> None:
    """Remember words as names of files that the script writes: none of them is read."""
    for word in words:
        name = file_name(word)
        if name and not (word.text or "").startswith("/dev/"):
            shell.records.written.add(name)
            shell.records.made.pop(name, None)
