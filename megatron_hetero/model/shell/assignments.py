"""Assignments: `NAME=value`, `NAME+=value`, `NAME=( ... )` and `NAME[index]=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.expansion import key_of, value
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.splitting import words_of
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import descendants, source
from megatron_hetero.model.shell.values import Status, Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node



def assign(shell: Shell, node: Node, *, is_table: bool = False, is_new: bool = False) -> Status:
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
    elif appends and shell.kinds.get(name, "") not in ("", "r", "l", "u"):
        shell.forget([name], "is declared as of a kind that is not followed")
    elif appends and (known is not None or name not in shell.unset):
        before = known.words if known is not None else (shell.unset_word(name),)
        shell.assign(name, [concatenate([*before, word])._replace(where=shell.where)])
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
            before = () if not shell.records.sourced else (unset._replace(may_split=True),)
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
        key = key_of(shell, index)
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
