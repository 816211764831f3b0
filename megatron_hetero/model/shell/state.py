"""State of a shell that is followed, not run: variables, functions, arguments, and what it starts.

A branch that the text does not decide is followed on a copy (`Shell.fork`), which is merged back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_hetero.errors import ModelError
from megatron_hetero.model.shell.held import Records, Variable
from megatron_hetero.model.shell.merging import merged, merged_value
from megatron_hetero.model.shell.tree import FIRST_HOLE, LAST_HOLE, MAX_DEPTH
from megatron_hetero.model.shell.values import Word, assigned, opaque, unknown
from megatron_hetero.model.spec import Unread

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 20_000
"""Commands that are followed; a script that goes on longer loops."""
MAX_VALUE = 1 << 20
"""Characters of a variable, and words of an array."""
OF_BASH = frozenset({
    "PWD", "OLDPWD", "RANDOM", "SECONDS", "LINENO", "HOSTNAME", "UID", "EUID", "PPID", "OPTIND",
    "SHLVL", "HOSTTYPE", "OSTYPE", "MACHTYPE", "PATH", "TERM", "HOME", "USER", "LOGNAME", "SHELL",
    "FUNCNAME", "SRANDOM", "EPOCHSECONDS", "EPOCHREALTIME", "GROUPS", "PS4", "BASH_VERSION",
    "BASH_VERSINFO", "BASHPID", "BASH", "SHELLOPTS", "BASHOPTS", "BASH_REMATCH", "REPLY", "_",
    "OPTERR", "DIRSTACK", "BASH_LINENO", "BASH_COMMAND", "BASH_SUBSHELL", "PIPESTATUS",
})  # fmt: skip
"""Variables that are never unset, or set by bash itself."""
Flow = Literal["", "break", "continue", "return", "exit"]


@dataclass
class Shell:
    """State of a shell at a place of its script.

    `where` is the file and line of the current command; `path` the file that it stands in and
    `script` the one that was started.  `arguments` are those of the script or function, and
    `knows_arguments` says whether a missing one is really missing.  `unset` are variables that are
    said to be in no environment.  `context` says why what is followed now may not be run;
    `loops`: those around, of which `break 2` has two `loops_to_leave`.  `may_leave_loop`: a branch
    that may be taken has left the loop.  `output` collects what is printed, where somebody reads
    it, and is None where that is not known.
    """

    script: Path
    path: Path
    where: str
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, tuple[Node, Path]] = field(default_factory=dict)
    arguments: tuple[Word, ...] = ()
    knows_arguments: bool = False
    unset: frozenset[str] = frozenset()
    exported: frozenset[str] = frozenset()
    locals: list[dict[str, Variable | None]] = field(default_factory=list)
    context: str = ""
    flow: Flow = ""
    loops: int = 0
    loops_to_leave: int = 0
    may_leave_loop: bool = False
    returned: list[Shell] = field(default_factory=list)
    output: list[Word] | None = None
    is_captured: bool = False
    given: Word | None = None
    folder: Word | None = None
    line_of_code: str = ""
    stops_at_errors: bool = False
    records: Records = field(default_factory=Records)

    def fork(self, context: str = "") -> Shell:
        """Return an independent copy of the shell; `context` says why the copy may not be run."""
        other = copy(self)
        # Dicts and lists are copied, because branches change them in place; `records` stay shared.
        other.variables, other.functions = dict(self.variables), dict(self.functions)
        other.locals = [dict(scope) for scope in self.locals]
        other.returned = list(self.returned)
        other.output = None if self.output is None else list(self.output)
        other.context = self.context or context
        return other

    def take(self, other: Shell) -> None:
        """Go on as `other` is."""
        context = self.context
        self.__dict__.update(other.__dict__)
        self.context = context

    def merge(self, branches: Sequence[Shell], reason: str) -> None:
        """Go on after several branches, where the text leaves open which branch is taken.

        Args:
            reason: of values that differ, as in "is set inside the `if` of line 3".
        """
        # Branches that return are kept apart until the function ends.
        going_on = [branch for branch in branches if not branch.flow]
        self.returned = [
            *self.returned,
            *(b for b in branches if b.flow == "return"),
            *(r for b in branches for r in b.returned if r not in self.returned),
        ]
        leaving = [branch for branch in branches if branch.flow in ("break", "continue")]
        # Every branch leaves: the state is that of one that only leaves a loop, if there is one.
        if not going_on:
            last = leaving[-1] if leaving else branches[-1]
            self.take(last)
            if leaving:
                self._merge_values(leaving, reason)
            return
        # What the branches agree on stays known; all else is forgotten with the reason.
        alive = [*going_on, *leaving]
        first, returned = going_on[0], self.returned
        self._merge_values(alive, reason)
        self.flow, self.returned = "", returned
        # The loop around may have ended in one of these branches, so its number of runs is open.
        self.may_leave_loop = bool(leaving) or any(b.may_leave_loop for b in going_on)
        self.functions = {k: v for branch in alive for k, v in branch.functions.items()}
        self.exported = frozenset().union(*(branch.exported for branch in alive))
        self.folder = first.folder
        # Scopes stand at equal places in all branches: a branch opens and closes its own functions.
        self.locals = [
            {k: v for branch in reversed(alive) for k, v in branch.locals[i].items()}
            for i in range(len(self.locals))
        ]
        self.arguments = first.arguments
        if any(branch.arguments != first.arguments for branch in alive):
            self.forget_arguments(reason)
        # What one branch prints and another does not is unknown as a whole.
        if self.is_captured and any(b.output != first.output for b in alive):
            self.output = None
        else:
            self.output = first.output

    def _merge_values(self, branches: Sequence[Shell], reason: str) -> None:
        # Names in the order in which branches set them, so that equal scripts give equal reasons.
        names = dict.fromkeys(name for branch in branches for name in branch.variables)
        self.variables = {
            name: self._merged(name, [b.variables.get(name) for b in branches], reason)
            for name in names
        }
        self.unset = frozenset.intersection(*(branch.unset for branch in branches))

    def _merged(self, name: str, found: list[Variable | None], reason: str) -> Variable:
        values = [v for v in found if v is not None]
        first = values[0]
        if len(values) == len(found) and all(v.equals(first) for v in values):
            return first
        where = next((w.where for v in reversed(values) for w in v.words), self.where)
        words = f"{name} (line {where.rpartition(':')[2]}) {reason}, which is not run"
        # A table that differs loses its keys: which of them it has is not known.
        if any(v.keys is not None for v in values):
            return Variable((Word(None, where, words, True, may_split=True),), True)
        if any(v.is_array for v in values):
            lists = [v.words if v is not None else () for v in found]
            return Variable(merged(lists, words, where), True)
        # Plain values merge word by word, so that flags that all branches share stay known.
        held = [v.words[0] if v is not None and v.words else None for v in found]
        return Variable((replace(merged_value(held, words, where), where=where, may_split=False),))

    def write(self, words: Sequence[Word] | None) -> None:
        """Add to the output of the commands, if somebody reads the output; None if it is not
        known."""
        if not self.is_captured or self.output is None:
            return
        last = self.output[-1:]
        if last and last[0].text == "\n" and not last[0].is_known:
            # A newline that may not be there is now one between words.
            last = [opaque(last[0])]
        self.output = None if words is None else [*self.output[:-1], *last, *words]

    def step(self, node: Node) -> None:
        """Count one more command, at a node.

        Raises:
            ModelError: there were too many.
        """
        # In a string of code every command has the line of the `eval` or `bash -c` that runs it.
        if not self.line_of_code:
            self.where = f"{self.path}:{node.start_point[0] + 1}"
        self.records.steps += 1
        if self.records.steps > MAX_STEPS:
            raise ModelError(
                f"{self.where}: more than {MAX_STEPS} commands up to here; the script loops, or is "
                "too long to be followed: write the flags that it gives Megatron into a file"
            )

    def deeper(self, by: int) -> None:
        """Count statements and expansions inside one another.

        Raises:
            ModelError: there are too many.
        """
        self.records.depth += by
        if self.records.depth > MAX_DEPTH:
            raise ModelError(
                f"{self.where}: statements, expansions or calls stand inside one another more than "
                f"{MAX_DEPTH} deep"
            )

    def line_at(self, node: Node) -> str:
        """Return the file and line of a node; those of the command in a string of code."""
        return self.line_of_code or f"{self.path}:{node.start_point[0] + 1}"

    def assign(self, name: str, words: Sequence[Word], is_array: bool = False) -> None:
        """Set a variable; of an array, without `is_array`, its first element."""
        size = sum(len(w.text or "") + sum(len(p.text or "") for p in w.parts) for w in words)
        # Long values, and those with many parts, take long.
        num_parts = sum(len(word.parts) for word in words)
        self.records.steps += (size + 128 * num_parts + 4 * len(words)) >> 8
        if size > MAX_VALUE or len(words) > MAX_VALUE >> 4:
            raise ModelError(f"{self.where}: {name} grows beyond {MAX_VALUE} characters")
        if name == "SHELLOPTS":
            return
        self.unset -= {name}
        line = int(self.where.rpartition(":")[2])
        # Elements keep their own reasons; that of a plain value names its variable and line.
        named = tuple(words) if is_array else (assigned(words[0], name, line),)
        known = self.variables.get(name)
        # Plain `A=x` on an array sets element 0 and keeps the others.
        if not is_array and known is not None and known.is_array and known.words:
            first = known.words[0]
            # Element 0 has no certain place in a table, nor where the first word may be none.
            if known.keys is not None or first.may_split or first.is_conditional:
                self.forget([name], "has its first element set")
                return
            named, is_array = (*named, *known.words[1:]), True
        self.variables[name] = Variable(named, is_array)

    def set_variable(self, name: str, variable: Variable) -> None:
        """Set a variable as it is."""
        self.unset -= {name}
        self.variables[name] = variable

    def remove(self, name: str) -> None:
        """Unset a variable."""
        self.variables.pop(name, None)
        self.exported -= {name}
        self.unset |= {name}

    def forget(self, names: Iterable[str], reason: str) -> None:
        """Make variables unknown, as after a body that may run any number of times."""
        line = self.where.rpartition(":")[2]
        for name in names:
            known = self.variables.get(name)
            is_array = known is not None and known.is_array
            words = f"{name} (line {line}) {reason}"
            # A variable not set so far may turn out an array, of any number of words.
            word = Word(None, self.where, words, True, may_split=known is None or is_array)
            self.unset -= {name}
            self.variables[name] = Variable((word,), is_array)

    def forget_arguments(self, reason: str) -> None:
        """Take the arguments, and their number, for unknown."""
        words = f"$@ {reason}, which is not run"
        unknown_ones = Word(None, self.where, words, is_conditional=True, may_split=True)
        # The number of arguments is not known either: one word stands for any number of them.
        self.arguments, self.knows_arguments = (unknown_ones,), True

    def hole(self, word: Word) -> str:
        """Return the character that stands for a word in text to be parsed again.

        Raises:
            ModelError: there are too many.
        """
        # Equal words share a character, so that two copies of a text stay equal as text.
        if word in self.records.holes:
            return chr(FIRST_HOLE + self.records.holes.index(word))
        if FIRST_HOLE + len(self.records.holes) > LAST_HOLE:
            raise ModelError(f"{self.where}: too many parts of the script are not known")
        self.records.holes.append(word)
        return chr(FIRST_HOLE + len(self.records.holes) - 1)

    def unset_word(self, name: str) -> Word:
        """Return the value of a variable that the script does not set."""
        if name in self.unset:
            return Word("", self.where)
        # Bash sets such a variable itself: a value is there, and no text says which.
        if name in OF_BASH:
            return unknown(self.where, f"${name}", "is known where the script runs alone")
        # A file that is not read may set the variable, and the reason names all of these files.
        files = "".join(f"; perhaps in {f}, which is not read" for f in self.records.sourced)
        return unknown(self.where, f"${name}", f"is not set in the script{files}")

    @staticmethod
    def is_of_bash(name: str) -> bool:
        """Return whether a variable is never unset."""
        return name in OF_BASH

    def note(self, name: str, reason: str) -> None:
        """Remember a part that is not read (`model.spec.Unread`)."""
        self.records.unread.append(Unread(name, self.where, reason))
