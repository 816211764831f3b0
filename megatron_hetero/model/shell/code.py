"""Code that is read while a script is followed: functions, `eval`, `bash -c`, sourced files."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hetero.errors import HeteroError
from megatron_hetero.files import read_text
from megatron_hetero.model.shell.fields import settled, spaced, tokens
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import parsed, parsed_script
from megatron_hetero.model.shell.values import Word, concatenate, shown_path

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None
_SHELLS = ("bash", "sh", "zsh", "dash")
_READ_INPUT = (*_SHELLS, "ssh", "sbatch", "srun")
_ELSEWHERE = ("ssh", "pdsh", "clush", "kubectl")
_LAUNCH = re.compile(r"\.py\s|\s-m\s+\S{0,200}pretrain\S{0,200}\s")
_OF_ENVIRONMENTS = re.compile(
    r"(\.?bashrc|\.?bash_profile|\.?profile|activate|conda\.sh|setvars\.sh|modules?\.sh|bash)"
)
"""Files that set up programs, and no job."""
MAX_FILES = 64


class Runner:
    """The follower of statements, which `statements` sets: code needs it, and it needs code."""

    run: Callable[[Shell, Node], Status]


def call(shell: Shell, name: str, words: tuple[Word, ...]) -> Status:
    """Follow the body of a function with its arguments."""
    # The caller's state is set aside: a function has its own arguments, file and loops.
    body, path = shell.functions[name]
    arguments, knows, own = shell.arguments, shell.knows_arguments, (shell.path, shell.line_of_code)
    outer_returned, where, loops = shell.returned, shell.where, shell.loops
    shell.arguments, shell.knows_arguments, shell.returned = words, True, []
    # `break` in a function does not leave a loop of its caller.
    shell.path, shell.line_of_code, shell.loops = path, "", 0
    # Declarations with `local` note here what the name held outside.
    shell.locals = [*shell.locals, {}]
    shell.deeper(1)
    status = Runner.run(shell, body)
    shell.deeper(-1)
    # Every `return` in a branch is a way to the end, and all of these go on behind the call.
    _gather(shell, f"is set inside the function `{name}`")
    # Local variables end here: outside, their names hold what they held before.
    for variable, before in shell.locals[-1].items():
        if before is None:
            shell.variables.pop(variable, None)
            shell.unset |= {variable}
        else:
            shell.variables[variable] = before
    shell.locals = shell.locals[:-1]
    shell.arguments, shell.knows_arguments = arguments, knows
    (shell.path, shell.line_of_code), shell.where = own, where
    shell.returned, shell.loops = outer_returned, loops
    return status


def _gather(shell: Shell, reason: str) -> None:
    """Merge the branches that end in a `return` with the branch to the end."""
    ways = list(shell.returned)
    # A branch that ends in `exit` has no part in what follows.
    if shell.flow in ("", "return"):
        ways.append(shell.fork())
    shell.returned = []
    # All ways left the script, and `flow` stays as it is.
    if not ways:
        return
    for way in ways:
        way.flow, way.returned = "", []
    if len(ways) == 1:
        shell.take(ways[0])
    else:
        shell.merge(ways, reason)
    shell.flow = ""


def text_of(shell: Shell, word: Word) -> str | None:
    """Return the text of a word that is read again, with a character for each unknown part.

    Returns:
        None where an operator or a quote of the code may touch other text.
    """
    # `settled` doubts what touches an unknown word that may vanish with its blank.
    given = list(tokens(word))
    made = ""
    for before, token in zip(given, settled(given), strict=True):
        is_doubted = before.word.is_known and not token.word.is_known
        # A doubted word without quotes or operators reads the same with or without a neighbour.
        if is_doubted and not re.fullmatch(r"[\w./=:,@%+-]*", token.word.text or ""):
            return None
        # An unknown word becomes one character that no script has, and the reader of code finds it.
        is_text = token.is_end or token.word.is_known
        made += token.word.text or "" if is_text else shell.hole(token.word)
    return made


def run_code(shell: Shell, word: Word) -> Status:
    """Follow the code in a word."""
    text = text_of(shell, word)
    if text is None:
        shell.note("", "code whose quotes or operators depend on what is not known is not followed")
        return None
    # Commands in the code get the line of the command that runs the code.
    outer, shell.line_of_code = shell.line_of_code, shell.where
    shell.deeper(1)
    status = Runner.run(shell, parsed(text))
    shell.deeper(-1)
    shell.line_of_code = outer
    return status


def _child(shell: Shell, words: tuple[Word, ...], sees_variables: bool = True) -> Shell:
    """Return a child shell of this shell: it has the exported variables."""
    # A child process sees exported variables alone; another machine sees none.
    child = shell.fork()
    child.variables = {
        name: variable
        for name, variable in shell.variables.items()
        if sees_variables and (name in shell.exported or "*" in shell.exported)
    }
    # Functions and local variables of this shell are not the child's.
    child.functions, child.locals, child.returned = {}, [], []
    child.arguments, child.knows_arguments = words, True
    child.is_captured, child.output, child.given = False, None, None
    # Neither `set -e` nor a loop around reaches into another process.
    child.stops_at_errors, child.loops = False, 0
    return child


def follow_nested(
    shell: Shell,
    words: tuple[Word, ...],
    run_words: Callable[[Shell, tuple[Word, ...]], Status],
) -> bool:
    """Follow the code that a command gets as a word or as input; False if there is no code."""
    # `ssh host bash -c ...`: the code runs on another machine, with that machine's variables.
    names = [os.path.basename(word.text) if word.text is not None else "" for word in words]
    sees = not any(name in _ELSEWHERE for name in names[:3])
    for i, name in enumerate(names):
        if name not in _SHELLS:
            continue
        at = i + 1
        # Options before the script; one with a `c`, as in `-lc`, says that code follows.
        while at < len(words) and re.match(r"[-+][A-Za-z-]", words[at].text or ""):
            is_code = re.fullmatch(r"-[a-z]*c", words[at].text or "")
            at += 1
            # The word behind the code is `$0` of the child, so the arguments begin behind that.
            if is_code and at < len(words):
                run_code(_child(shell, words[at + 2 :], sees), words[at])
                return True
        # A script that lies beside this one is followed; of all others nothing is known.
        if at < len(words) and names[at].endswith((".sh", ".bash", ".slurm", ".sbatch")):
            found = beside(shell, words[at])
            if found is not None:
                _run_file(_child(shell, words[at + 1 :], sees), *found)
                return True
    # `bash <<EOF`: the input is the code.
    if names[0] in _READ_INPUT and shell.given is not None:
        run_code(_child(shell, (), sees), shell.given)
        return True
    # A command of unknown kind may take a whole command line as one word.
    for word in words[1:]:
        seen = "".join(part.text or "?" for part in word.parts or (word,))
        if _LAUNCH.search(seen):
            run_code(_child(shell, (), sees), word)
            return True
    return False


def source_file(shell: Shell, words: tuple[Word, ...]) -> Status:
    """Follow a file that the script sources, if the file lies beside the script."""
    if not words:
        return False
    found = beside(shell, words[0])
    # What the file would set may be missing; later reasons name it (`unset_word`).
    if found is None:
        shown = words[0].text or "".join(p.text or "..." for p in words[0].parts) or "a file"
        line = shell.where.rpartition(":")[2]
        shell.records.sourced.append(f"{shown} (line {line})")
        # Files such as `.bashrc` or `activate` set no flags, and a note on them would only alarm.
        if not _OF_ENVIRONMENTS.fullmatch(os.path.basename(shown)):
            shell.note(shown, "it is sourced, and not found beside the script")
        return None
    # Words behind the file are its arguments; without any, the file sees those of the script.
    arguments, knows = shell.arguments, shell.knows_arguments
    if words[1:]:
        shell.arguments, shell.knows_arguments = words[1:], True
    # `return` in a sourced file ends the file alone.
    returned, shell.returned = shell.returned, []
    status = _run_file(shell, *found)
    _gather(shell, "is set in a sourced file")
    shell.returned = returned
    if words[1:]:
        shell.arguments, shell.knows_arguments = arguments, knows
    return status


def beside(shell: Shell, word: Word) -> tuple[Path, str] | None:
    """Return the path and text of a file at the place named by the script, seen from its folder."""
    path = shown_path(word)
    if path is None or "\0" in path or len(path) > 4096:
        return None
    folder = shell.script.parent
    # A `cd` before counts from the folder of the script, if it is relative.
    if shell.folder is not None and not os.path.isabs(path):
        place = shown_path(shell.folder)
        if place is None:
            return None
        folder = folder / place if not Path(place).is_absolute() else Path(place)
    candidates = [folder / path]
    # A path made of `$0` already leads from here, as `$0` is the path of the script.
    if word.is_known is False and not os.path.isabs(path):
        candidates.insert(0, Path(path))
    for candidate in candidates:
        if candidate.is_file():
            try:
                return candidate, read_text(candidate)
            except HeteroError:
                return None
    return None


def _run_file(shell: Shell, path: Path, text: str) -> Status:
    shell.records.files += 1
    if shell.records.files > MAX_FILES:
        shell.note(str(path), f"it is sourced, and more than {MAX_FILES} files are not read")
        return None
    # The place is the caller's again behind the file, for the notes that follow.
    own = (shell.path, shell.line_of_code, shell.where)
    shell.path, shell.line_of_code = path, ""
    shell.deeper(1)
    status = Runner.run(shell, parsed_script(path, text))
    shell.deeper(-1)
    shell.path, shell.line_of_code, shell.where = own
    return status


def evaluated_code(shell: Shell, words: tuple[Word, ...]) -> Status:
    """Follow `eval`."""
    code = concatenate(spaced(words, Word(" ", shell.where)) or [Word("", shell.where)])
    # Code of which not even a part is known could do anything.
    if code.text is None and not code.parts:
        shell.note("", f"eval runs code that is not known: {code.reason}")
        return None
    return run_code(shell, code)


def unknown_array(shell: Shell, name: str, word: Word) -> None:
    """Set an array whose elements are not known."""
    shell.set_variable(name, Variable((word,), True))
