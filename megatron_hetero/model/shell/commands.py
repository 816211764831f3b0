"""Simple commands: assignments, declarations, calls of functions and what the script starts."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.builtins import BUILTINS
from megatron_hetero.model.shell.code import call, follow_nested
from megatron_hetero.model.shell.expansion import fields, in_quotes, value, words_of
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.state import Shell, Started, Variable
from megatron_hetero.model.shell.substitution import FILTERS
from megatron_hetero.model.shell.tree import descendants, source
from megatron_hetero.model.shell.values import Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None
_NAME = re.compile(r"[A-Za-z_]\w*")
_GIVEN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)
_REDIRECTIONS = ("file_redirect", "herestring_redirect", "heredoc_redirect")


def run_command(shell: Shell, node: Node, redirections: Sequence[Node]) -> Status:
    """Follow a simple command with its redirections."""
    if node.type == "variable_assignment":
        return _assign(shell, node)
    status: Status = True
    # The grammar takes `A=1 B=2` and the commands on the next lines for one.
    for children in _lines(node):
        status = _run_line(shell, node, children, redirections)
    return status


def _run_line(
    shell: Shell, node: Node, children: Sequence[Node], redirections: Sequence[Node]
) -> Status:
    redirections = [*redirections, *(c for c in children if c.type in _REDIRECTIONS)]
    children = [child for child in children if child.type not in _REDIRECTIONS]
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
            _assign(aside, prefix)
            name = source(prefix.children[0])
            held = aside.variables.get(name)
            if held is not None and held.words:
                settings.append((name, held.words[0]))
    elif prefixes:
        for prefix in prefixes:
            _assign(shell, prefix)
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
            if c.is_named and c.type not in (*marks, *_REDIRECTIONS, "pipeline", "list", "command")
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
            return in_quotes(shell, source(body))
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
        return _call_with(shell, name or "", words[1:], settings)
    if name in BUILTINS:
        return BUILTINS[name or ""](shell, words[1:])
    if shell.is_captured:
        made = FILTERS[name or ""](shell, words[1:]) if name in FILTERS else None
        if made is None:
            shell.output = None
        elif shell.output is not None:
            shell.output = [*shell.output, made]
        if name in FILTERS:
            return True if name in ("dirname", "basename", "pwd") else None
    if not follow_nested(shell, words, run_words):
        shell.records.started.append(Started(words, shell.where, shell.context, settings))
    return None


def _call_with(
    shell: Shell, name: str, words: tuple[Word, ...], settings: tuple[tuple[str, Word], ...]
) -> Status:
    """Call a function; variables before its name are set for the call."""
    before = {key: shell.variables.get(key) for key, _ in settings}
    for key, word in settings:
        shell.assign(key, [word])
    status = call(shell, name, words)
    for key, variable in before.items():
        if variable is None:
            shell.variables.pop(key, None)
        else:
            shell.variables[key] = variable
    return status


def run_declaration(shell: Shell, node: Node) -> Status:
    """Follow `export`, `declare`, `local`, `readonly` and `typeset`."""
    keyword = source(node.children[0])
    options = ""
    for child in node.children[1:]:
        if child.type in _REDIRECTIONS or not child.is_named:
            continue
        if child.type == "variable_assignment":
            name = source(child.children[0]).partition("[")[0]
            is_new = _declare(shell, keyword, options, name)
            _assign(shell, child, is_table="A" in options, is_new=is_new)
            _check_kind(shell, name, options)
            continue
        for word in fields(shell, child):
            text = word.text
            if text is not None and text[:1] in ("-", "+") and word.is_known:
                options += text[1:] if text.startswith("-") else ""
                continue
            _declare_word(shell, keyword, options, word)
    return True


def _declare(shell: Shell, keyword: str, options: str, name: str) -> bool:
    """Note what a declaration makes of a variable; return whether it begins a new local one."""
    is_local = keyword == "local" or (keyword in ("declare", "typeset") and "g" not in options)
    is_new = is_local and bool(shell.locals) and name not in shell.locals[-1]
    if is_new:
        shell.locals[-1][name] = shell.variables.get(name)
    if keyword == "export" or "x" in options:
        shell.exported |= {name}
    return is_new


def _check_kind(shell: Shell, name: str, options: str) -> None:
    """Take a variable for unknown whose kind (whole numbers, references, cases) is not followed."""
    if set(options) & set("inlu"):
        shell.forget([name], "is declared as of a kind that is not followed")


def _declare_word(shell: Shell, keyword: str, options: str, word: Word) -> None:
    if "f" in options or "p" in options or "F" in options:
        return
    first = (word.parts or (word,))[0]
    match = _GIVEN.fullmatch(first.text or "") if first.is_known else None
    if match is not None:
        _declare(shell, keyword, options, match["name"])
        rest = [Word(match["value"], word.where), *word.parts[1:]]
        if match["append"]:
            shell.forget([match["name"]], "is set in a way that is not read")
        else:
            shell.assign(match["name"], [replace(concatenate(rest), where=shell.where)])
        _check_kind(shell, match["name"], options)
    elif word.is_known and _NAME.fullmatch(word.text or ""):
        name = word.text or ""
        _declare(shell, keyword, options, name)
        is_local = keyword == "local" or (keyword != "export" and bool(shell.locals))
        if is_local and keyword != "readonly":
            shell.remove(name)
        if ("a" in options or "A" in options) and name not in shell.variables:
            keys = () if "A" in options else None
            shell.set_variable(name, Variable((), True, keys))
        elif set(options) & set("inlu"):
            _check_kind(shell, name, options)
    else:
        shell.note("", f"{keyword} sets a variable whose name is not known")


def run_unset(shell: Shell, node: Node) -> Status:
    """Follow `unset`."""
    words = [word for child in node.children[1:] for word in fields(shell, child)]
    if any(word.text == "-f" for word in words):
        for word in words:
            shell.functions.pop(word.text or "", None)
        return True
    for word in words:
        text = word.text or ""
        if word.is_known and _NAME.fullmatch(text):
            if shell.locals:
                shell.locals[-1].setdefault(text, shell.variables.get(text))
            shell.remove(text)
        elif text.startswith("-"):
            continue
        else:
            name = text.partition("[")[0]
            shell.forget([name] if _NAME.fullmatch(name) else [], "loses an element")
    return True


def _assign(shell: Shell, node: Node, *, is_table: bool = False, is_new: bool = False) -> Status:
    """Follow `NAME=value`, `NAME+=value`, `NAME=( ... )` and `NAME[index]=value`.

    `is_new`: the variable is a new local one, which hides an array of that name.
    """
    target = node.children[0]
    appends = any(child.type == "+=" for child in node.children[:2])
    given = node.children[2] if len(node.children) > 2 else None
    name, _, index = source(target).partition("[")
    known = shell.variables.get(name)
    is_table = is_table or (known is not None and known.keys is not None)
    if given is not None and given.type == "array":
        _assign_array(shell, name, given, appends, is_table)
        return _status(given)
    word = Word("", shell.where) if given is None else value(shell, given)
    if is_new and known is not None and known.is_array:
        shell.remove(name)
        known = None
    if index:
        _assign_element(shell, name, index[:-1], word, appends)
    elif known is not None and known.is_array and known.words and known.keys is None:
        _assign_element(shell, name, "0", word, appends)
    elif appends and (known is not None or name not in shell.unset):
        before = known.words if known is not None else (shell.unset_word(name),)
        shell.assign(name, [replace(concatenate([*before, word]), where=shell.where)])
    else:
        shell.assign(name, [word])
    return _status(given)


def _status(given: Node | None) -> Status:
    """Return whether an assignment succeeds: as the last command in it, which is not run."""
    if given is None:
        return True
    has_command = any(part.type == "command_substitution" for part in descendants(given))
    return None if has_command else True


def _assign_array(shell: Shell, name: str, given: Node, appends: bool, is_table: bool) -> None:
    elements = [c for c in given.children if c.is_named and c.type != "comment"]
    if any(source(c).startswith("[") and "]=" in source(c) for c in elements):
        _assign_pairs(shell, name, elements, appends, is_table)
        return
    words = words_of(shell, given, [c for c in given.children if c.is_named])
    if is_table:
        shell.forget([name], "is a table whose keys are not read")
        return
    if appends:
        known = shell.variables.get(name)
        before = known.words if known is not None else ()
        if known is None and name not in shell.unset:
            unset = shell.unset_word(name)
            before = () if not shell.records.sourced else (replace(unset, may_split=True),)
        words = [*before, *words]
    shell.assign(name, words, is_array=True)


def _assign_pairs(
    shell: Shell, name: str, elements: Sequence[Node], appends: bool, is_table: bool
) -> None:
    pairs: dict[str, Word] = {}
    known = shell.variables.get(name)
    if appends and known is not None and known.keys is not None:
        pairs = dict(zip(known.keys, known.words, strict=True))
    for element in elements:
        word = value(shell, element)
        match = re.fullmatch(r"\[(?P<key>[^\]]*)\]=(?P<value>.*)", word.text or "", re.DOTALL)
        if not word.is_known or match is None or not is_table:
            shell.set_variable(name, Variable((), True, None))
            shell.forget([name], "is a table that is not read")
            return
        pairs[match["key"]] = Word(match["value"], shell.where)
    shell.set_variable(name, Variable(tuple(pairs.values()), True, tuple(pairs)))


def _assign_element(shell: Shell, name: str, index: str, word: Word, appends: bool) -> None:
    known = shell.variables.get(name, Variable((), True))
    if known.keys is not None:
        key = in_quotes(shell, index)
        if key.is_known and not appends:
            pairs = dict(zip(known.keys, known.words, strict=True))
            pairs[key.text or ""] = word
            shell.set_variable(name, Variable(tuple(pairs.values()), True, tuple(pairs)))
            return
    else:
        number = calculated(shell, index)
        place = int(number.text or "0") if number.is_known else -1
        before = known.words[: place + 1]
        countable = not any(w.may_split or w.is_conditional for w in before)
        if 0 <= place <= len(known.words) and countable and name not in shell.unset | {""}:
            words = list(known.words)
            if place == len(words):
                words.append(Word("", shell.where))
            words[place] = concatenate((words[place], word)) if appends else word
            shell.assign(name, words, is_array=True)
            return
    shell.set_variable(name, Variable((), True))
    shell.forget([name], "has an element set whose place is not known")


def base_name(word: Word) -> str:
    """Return the last part of a command's path; empty where it is not known."""
    return os.path.basename(word.text) if word.text is not None else ""
