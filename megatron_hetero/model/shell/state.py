"""State of a shell that is followed, not run: variables, functions, arguments, and what it starts.

A branch that the text does not decide is followed on a copy (`Shell.fork`), which is merged back
(`ways`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_hetero.errors import ModelError
from megatron_hetero.model.shell.held import Definition, Hidden, Records, Variable
from megatron_hetero.model.shell.tree import FIRST_HOLE, LAST_HOLE, MAX_DEPTH
from megatron_hetero.model.shell.values import Word, assigned, opaque, unknown
from megatron_hetero.model.unread import Unread

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
    `script` the one that was started, in its own folder or in `start_folder`. `arguments` are those
    of the script or function, and `knows_arguments` says whether a missing one is really missing.
    `unset` are variables that are said to be in no environment. `exported` are variables, and
    functions as `name()`, that a child sees, each with the reason why that is not certain, or "";
    `exports_all` is such a reason after `set -a`, and None without. `kinds` are letters of
    `declare`, for variables of which bash changes or refuses values. `context` says why what is
    followed now may not be run; `loops`: those around, of which `break 2` has two `loops_to_leave`.
    `may_leave_loop`: a branch that may be taken has left the loop. `output` collects what is
    printed, where somebody reads it, and is None where that is not known.
    """

    script: Path
    path: Path
    where: str
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, tuple[Definition, ...]] = field(default_factory=dict)
    arguments: tuple[Word, ...] = ()
    knows_arguments: bool = False
    unset: frozenset[str] = frozenset()
    exported: dict[str, str] = field(default_factory=dict)
    exports_all: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    locals: list[dict[str, Hidden]] = field(default_factory=list)
    context: str = ""
    flow: Flow = ""
    loops: int = 0
    loops_to_leave: int = 0
    may_leave_loop: bool = False
    returned: list[Shell] = field(default_factory=list)
    output: list[Word] | None = None
    is_captured: bool = False
    inherits_errexit: bool = False
    given: Word | None = None
    folder: Word | None = None
    start_folder: Path | None = None
    line_of_code: str = ""
    stops_at_errors: bool = False
    records: Records = field(default_factory=Records)

    def fork(self, context: str = "") -> Shell:
        """Return an independent copy of the shell; `context` says why the copy may not be run."""
        other = copy(self)
        # Dicts and lists are copied, because branches change them in place; `records` stay shared.
        other.variables, other.functions = dict(self.variables), dict(self.functions)
        other.exported, other.kinds = dict(self.exported), dict(self.kinds)
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
        if name in self.kinds:
            kept = self._of_kind(name, words, is_array)
            if kept is None:
                return
            words = kept
        self._is_set(name)
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

    def _is_set(self, name: str) -> None:
        self.unset -= {name}
        if self.exports_all is not None:
            self.exported.setdefault(name, self.exports_all)

    def _of_kind(self, name: str, words: Sequence[Word], is_array: bool) -> Sequence[Word] | None:
        """Return the value that a variable of a kind (`declare -i`, `-u`, ...) takes; None where it
        takes none."""
        kind, text = self.kinds[name], words[0].text or "" if len(words) == 1 else ""
        if "r" in kind:
            self.note("", f"{name} is read-only, and is set here")
            return None
        # Values that stay as they are, and letters of ASCII, which are the same in each locale.
        is_plain = not is_array and len(words) == 1 and words[0].is_known and text.isascii()
        if is_plain and kind == "i" and re.fullmatch(r"-?[1-9]\d{0,17}|0", text):
            return words
        if is_plain and kind in ("u", "l"):
            return [words[0]._replace(text=text.upper() if kind == "u" else text.lower())]
        self.forget([name], "is declared as of a kind that is not followed")
        return None

    def set_variable(self, name: str, variable: Variable) -> None:
        """Set a variable as it is."""
        self._is_set(name)
        self.variables[name] = variable

    def remove(self, name: str) -> None:
        """Unset a variable."""
        if "r" in self.kinds.pop(name, ""):
            self.note("", f"{name} is read-only, and is unset here")
        self.variables.pop(name, None)
        self.exported.pop(name, None)
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
            self._is_set(name)
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
        """Remember a part that is not read (`model.unread.Unread`)."""
        self.records.unread.append(Unread(name, self.where, reason))
