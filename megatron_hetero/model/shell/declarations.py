"""Declarations: `export`, `declare`, `local`, `readonly`, `typeset`, and `unset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.assignments import assign
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.scopes import make_local, unset
from megatron_hetero.model.shell.splitting import fields, has_braces
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import REDIRECTIONS, source
from megatron_hetero.model.shell.values import Status, Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

Options = frozenset[str]
DECLARING = ("export", "declare", "local", "readonly", "typeset")
_NAME = re.compile(r"[A-Za-z_]\w*")
_GIVEN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)


def run_declaration(shell: Shell, node: Node) -> Status:
    """Follow `export`, `declare`, `local`, `readonly` and `typeset`."""
    keyword = source(node.children[0])
    options: Options = frozenset()
    for child in node.children[1:]:
        if child.type in REDIRECTIONS or not child.is_named:
            continue
        if child.type == "variable_assignment":
            name = source(child.children[0]).partition("[")[0]
            # The name becomes local first, which keeps the old value aside.
            is_new = _declare(shell, keyword, options, name)
            assign(shell, child, is_table="A" in options, is_new=is_new)
            # `export A={1,2}` is `export A=1 A=2`, unlike `A={1,2}`.
            if any(has_braces(given) for given in child.children[2:]):
                shell.forget([name], "has braces that are not read")
            _after_value(shell, keyword, options, name)
            continue
        # Options hold for the names behind them, up to the end of the command.
        options = declare_words(shell, keyword, fields(shell, child), options)
    return True


def declare_words(
    shell: Shell, keyword: str, words: Sequence[Word], options: Options = frozenset()
) -> Options:
    """Follow a declaration whose words are expanded; return the options seen so far.

    Options are letters, those that a `+` takes away with it: `-gx +i` is `g`, `x`, `+i`.
    """
    for word in words:
        text = word.text
        if text is not None and text[:1] in ("-", "+") and word.is_known:
            options |= {text[0].replace("-", "") + letter for letter in text[1:]}
        else:
            _declare_word(shell, keyword, options, word)
    return options


def _declare(shell: Shell, keyword: str, options: Options, name: str) -> bool:
    """Note what a declaration makes of a variable; return whether it begins a new local one."""
    # `declare -g` in a function sets the variable of the script.
    is_local = keyword == "local" or (keyword in ("declare", "typeset") and "g" not in options)
    is_new = is_local and make_local(shell, name)
    if "g" in options and any(name in scope for scope in shell.locals):
        shell.note("", f"{keyword} -g sets {name} behind a local variable, which is not followed")
    if (keyword == "export" and "n" in options) or "+x" in options:
        shell.exported.pop(name, None)
    elif keyword == "export" or "x" in options:
        shell.exported[name] = ""
    if keyword != "export" and "n" in options:
        shell.note("", f"{name} is a reference to another variable, which is not followed")
    kind = {*shell.kinds.get(name, ""), *(options & {"i", "l", "u", "c"})}
    kind -= {option[1:] for option in options if option.startswith("+")}
    shell.kinds.pop(name, None)
    if kind:
        shell.kinds[name] = "".join(sorted(kind))
    return is_new


def _after_value(shell: Shell, keyword: str, options: Options, name: str) -> None:
    """Note that a variable keeps the value that it has now."""
    if keyword == "readonly" or "r" in options:
        shell.kinds[name] = "".join(sorted({*shell.kinds.get(name, ""), "r"}))


def _declare_word(shell: Shell, keyword: str, options: Options, word: Word) -> None:
    # `-f`, `-F` and `-p` print, and declare nothing; `export -f` takes functions.
    if options & {"f", "p", "F"}:
        if "f" in options and (keyword == "export" or "x" in options):
            shell.exported[f"{word.text}()"] = ""
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
            shell.assign(match["name"], [concatenate(rest)._replace(where=shell.where)])
        _after_value(shell, keyword, options, match["name"])
    elif word.is_known and _NAME.fullmatch(word.text or ""):
        name = word.text or ""
        # A new local name without a value is unset; `export NAME` and `readonly NAME` keep it.
        if _declare(shell, keyword, options, name):
            shell.variables.pop(name, None)
            shell.unset |= {name}
        # An array without elements is still an array: `A+=(x)` adds to it.
        if ("a" in options or "A" in options) and name not in shell.variables:
            keys = () if "A" in options else None
            shell.set_variable(name, Variable((), True, keys))
        _after_value(shell, keyword, options, name)
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
    for word in words:
        text = word.text or ""
        if word.is_known and _NAME.fullmatch(text):
            unset(shell, text)
        elif text.startswith("-"):
            continue
        elif not word.is_known:
            shell.note("", "unset takes away a variable whose name is not known")
        else:
            # `unset A[1]` leaves a gap between numbers, which the elements here cannot have.
            name = text.partition("[")[0]
            shell.forget([name] if _NAME.fullmatch(name) else [], "loses an element")
    return True
