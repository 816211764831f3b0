"""Declarations: `export`, `declare`, `local`, `readonly`, `typeset`, and `unset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.assignments import assign
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.splitting import fields
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import REDIRECTIONS, source
from megatron_hetero.model.shell.values import Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None
DECLARING = ("export", "declare", "local", "readonly", "typeset")
_NAME = re.compile(r"[A-Za-z_]\w*")
_GIVEN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)


def run_declaration(shell: Shell, node: Node) -> Status:
    """Follow `export`, `declare`, `local`, `readonly` and `typeset`."""
    keyword = source(node.children[0])
    options = ""
    for child in node.children[1:]:
        if child.type in REDIRECTIONS or not child.is_named:
            continue
        if child.type == "variable_assignment":
            name = source(child.children[0]).partition("[")[0]
            # The name becomes local first, which keeps the old value aside.
            is_new = _declare(shell, keyword, options, name)
            assign(shell, child, is_table="A" in options, is_new=is_new)
            _check_kind(shell, name, options)
            continue
        # Options hold for the names behind them, up to the end of the command.
        options = declare_words(shell, keyword, fields(shell, child), options)
    return True


def declare_words(shell: Shell, keyword: str, words: Sequence[Word], options: str = "") -> str:
    """Follow a declaration whose words are expanded; return the options seen so far."""
    for word in words:
        text = word.text
        if text is not None and text[:1] in ("-", "+") and word.is_known:
            options += text[1:] if text.startswith("-") else ""
        else:
            _declare_word(shell, keyword, options, word)
    return options


def _declare(shell: Shell, keyword: str, options: str, name: str) -> bool:
    """Note what a declaration makes of a variable; return whether it begins a new local one."""
    # `declare -g` in a function sets the variable of the script.
    is_local = keyword == "local" or (keyword in ("declare", "typeset") and "g" not in options)
    # A name that is already local in this function has its old value noted.
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
    # `-f`, `-F` and `-p` print, and declare nothing.
    if "f" in options or "p" in options or "F" in options:
        return
    first = (word.parts or (word,))[0]
    # A word such as `"NAME=$VALUE"` has a known first part, up to the `=` at least.
    match = _GIVEN.fullmatch(first.text or "") if first.is_known else None
    if match is not None:
        _declare(shell, keyword, options, match["name"])
        rest = [Word(match["value"], word.where), *word.parts[1:]]
        # Which value `NAME+=` adds to, kinds and arrays included, is not followed in this form.
        if match["append"]:
            shell.forget([match["name"]], "is set in a way that is not read")
        else:
            shell.assign(match["name"], [replace(concatenate(rest), where=shell.where)])
        _check_kind(shell, match["name"], options)
    elif word.is_known and _NAME.fullmatch(word.text or ""):
        name = word.text or ""
        _declare(shell, keyword, options, name)
        # A local name without a value is unset; `export NAME` and `readonly NAME` keep the value.
        is_local = keyword == "local" or (keyword != "export" and bool(shell.locals))
        if is_local and keyword != "readonly":
            shell.remove(name)
        # An array without elements is still an array: `A+=(x)` adds to it.
        if ("a" in options or "A" in options) and name not in shell.variables:
            keys = () if "A" in options else None
            shell.set_variable(name, Variable((), True, keys))
        elif set(options) & set("inlu"):
            _check_kind(shell, name, options)
    else:
        shell.note("", f"{keyword} sets a variable whose name is not known")


def run_unset(shell: Shell, node: Node) -> Status:
    """Follow `unset`."""
    return unset_words(shell, [w for child in node.children[1:] for w in fields(shell, child)])


def unset_words(shell: Shell, words: Sequence[Word]) -> Status:
    """Follow `unset` with words that are expanded."""
    if any(word.text == "-f" for word in words):
        for word in words:
            shell.functions.pop(word.text or "", None)
        return True
    # `unset` takes variables, and only with `-f` functions.
    for word in words:
        text = word.text or ""
        if word.is_known and _NAME.fullmatch(text):
            if shell.locals:
                shell.locals[-1].setdefault(text, shell.variables.get(text))
            shell.remove(text)
        elif text.startswith("-"):
            continue
        elif not word.is_known:
            shell.note("", "unset takes away a variable whose name is not known")
        else:
            # `unset A[1]` leaves a gap between numbers, which the elements here cannot have.
            name = text.partition("[")[0]
            shell.forget([name] if _NAME.fullmatch(name) else [], "loses an element")
    return True
