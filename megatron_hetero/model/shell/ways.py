"""Shells of several ways through a script, merged where the text leaves open which way is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_hetero.model.shell.held import Definition, Hidden, Variable
from megatron_hetero.model.shell.merging import merged, merged_value
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Word


def either_way(shell: Shell, ways: Sequence[Callable[[Shell], object]], what: str) -> None:
    """Follow each of some ways on a copy, and merge them.

    Args:
        what: of the statement, "the `if` of line 3".
    """
    context = f"inside {what}" if not what.startswith("after") else what
    branches = []
    for way in ways:
        # Each way begins with the same state, as only one of them is run.
        branch = shell.fork(context)
        way(branch)
        branches.append(branch)
    merge(shell, branches, f"is set {context}")


def merge(shell: Shell, branches: Sequence[Shell], reason: str) -> None:
    """Go on after several branches.

    Args:
        reason: of values that differ, as in "is set inside the `if` of line 3".
    """
    # Branches that return are kept apart until the function ends.
    going_on = [branch for branch in branches if not branch.flow]
    shell.returned = [
        *shell.returned,
        *(b for b in branches if b.flow == "return"),
        *(r for b in branches for r in b.returned if r not in shell.returned),
    ]
    leaving = [branch for branch in branches if branch.flow in ("break", "continue")]
    # Every branch leaves: the state is that of one that only leaves a loop, if there is one.
    if not going_on:
        last = leaving[-1] if leaving else branches[-1]
        shell.take(last)
        if leaving:
            _merge_values(shell, leaving, reason)
        return
    # What the branches agree on stays known; all else is forgotten with the reason.
    alive = [*going_on, *leaving]
    first, returned = going_on[0], shell.returned
    _merge_values(shell, alive, reason)
    shell.flow, shell.returned = "", returned
    # The loop around may have ended in one of these branches, so its number of runs is open.
    shell.may_leave_loop = bool(leaving) or any(b.may_leave_loop for b in going_on)
    shell.functions = _functions(alive)
    shell.folder = first.folder
    # A branch that gives up at errors, or exports all, may be the one that is run.
    shell.exports_all = _export([b.exports_all for b in alive], reason)
    shell.given = first.given
    if any(branch.given != first.given for branch in alive):
        shell.given = Word(None, shell.where, f"the input {reason}, which is not run")
    shell.arguments = first.arguments
    if any(branch.arguments != first.arguments for branch in alive):
        shell.forget_arguments(reason)
    # What one branch prints and another does not is unknown as a whole.
    if shell.is_captured and any(b.output != first.output for b in alive):
        shell.output = None
    else:
        shell.output = first.output


def _functions(branches: Sequence[Shell]) -> dict[str, tuple[Definition, ...]]:
    """Return the functions of all branches: of each name every definition that it may have."""
    names = dict.fromkeys(name for branch in branches for name in branch.functions)
    found = {
        name: dict.fromkeys(d for b in branches for d in b.functions.get(name, (None,)))
        for name in names
    }
    return {name: tuple(definitions) for name, definitions in found.items()}


def _export(found: Sequence[str | None], reason: str) -> str | None:
    """Return whether children see a variable (`Shell.exported`)."""
    if all(one == found[0] for one in found):
        return found[0]
    return next(filter(None, found), reason.replace("is set", "is exported"))


def _merge_values(shell: Shell, branches: Sequence[Shell], reason: str) -> None:
    # Names in the order in which branches set them, so that equal scripts give equal reasons.
    names = dict.fromkeys(name for branch in branches for name in branch.variables)
    variables = {
        name: _merged(shell, name, [b.variables.get(name) for b in branches], reason)
        for name in names
    }
    shell.unset = frozenset.intersection(*(branch.unset for branch in branches))
    names = dict.fromkeys(name for branch in branches for name in branch.exported)
    shell.exported = {
        name: _export([b.exported.get(name) for b in branches], reason) or "" for name in names
    }
    names = dict.fromkeys(name for branch in branches for name in branch.kinds)
    shell.kinds = {
        name: "".join(sorted(set().union(*(b.kinds.get(name, "") for b in branches))))
        for name in names
    }
    # Scopes stand at equal places in all branches: a branch opens and closes its own functions.
    shell.locals = [
        _scope(shell, [b.locals[i] for b in branches], reason) for i in range(len(shell.locals))
    ]
    shell.variables = variables


def _scope(
    shell: Shell, scopes: Sequence[dict[str, Hidden]], reason: str
) -> dict[str, Hidden]:
    """Return the variables that local ones hide, of one function."""
    merged_scope: dict[str, Hidden] = {}
    for name in dict.fromkeys(name for scope in scopes for name in scope):
        found = [scope[name] for scope in scopes if name in scope]
        merged_scope[name] = found[0]
        # Where the name is not local in every branch, what is behind the function is not known.
        if len(found) < len(scopes):
            word = Word(None, shell.where, f"{name} {reason}, which is not run", True, (), "", True)
            merged_scope[name] = replace(found[0], variable=Variable((word,)), is_unset=False)
    return merged_scope


def _merged(
    shell: Shell, name: str, found: list[Variable | None], reason: str
) -> Variable:
    values = [v for v in found if v is not None]
    first = values[0]
    if len(values) == len(found) and all(v.equals(first) for v in values):
        return first
    where = next((w.where for v in reversed(values) for w in v.words), shell.where)
    words = f"{name} (line {where.rpartition(':')[2]}) {reason}, which is not run"
    # A table that differs loses its keys: which of them it has is not known.
    if any(v.keys is not None for v in values):
        return Variable((Word(None, where, words, True, may_split=True),), True)
    if any(v.is_array for v in values):
        lists = [v.words if v is not None else () for v in found]
        return Variable(merged(lists, words, where), True)
    # Plain values merge word by word, so that flags that all branches share stay known.
    held = [v.words[0] if v is not None and v.words else None for v in found]
    return Variable((merged_value(held, words, where)._replace(where=where, may_split=False),))
