"""Code that is read while a script is followed: functions, `eval`, sourced files."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hetero.errors import HeteroError
from megatron_hetero.files import read_text
from megatron_hetero.model.shell.fields import settled, spaced, tokens
from megatron_hetero.model.shell.held import Definition, Started, Variable
from megatron_hetero.model.shell.scopes import restore
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import parsed, parsed_script
from megatron_hetero.model.shell.values import (
    Status,
    Word,
    concatenate,
    file_name,
    same,
    shown_path,
)
from megatron_hetero.model.shell.ways import either_way, merge

if TYPE_CHECKING:
    from tree_sitter import Node

_OF_ENVIRONMENTS = re.compile(
    r"(\.?bashrc|\.?bash_profile|\.?profile|activate|conda\.sh|setvars\.sh|modules?\.sh|bash)"
)
"""Files that set up programs, and no job."""
_SETS_UP = re.compile(r"(\$\(|`)\S*(conda|mamba|pyenv|modulecmd|spack|ssh-agent)\b")
"""Programs that print code for `eval`, which sets them up."""
MAX_FILES = 64


class Runner:
    """The follower of statements, which `statements` sets: code needs it, and it needs code."""

    run: Callable[[Shell, Node], Status]


def call(shell: Shell, name: str, words: tuple[Word, ...]) -> Status:
    """Follow the body of a function with its arguments."""
    definitions = shell.functions[name]
    # Branches may have defined the function in several ways, or not at all.
    if len(definitions) > 1:
        ways = [lambda s, d=found: _call(s, name, d, words) for found in definitions]
        either_way(shell, ways, f"the function `{name}` that is defined in branches")
        return None
    return _call(shell, name, definitions[0], words)


def _call(shell: Shell, name: str, definition: Definition, words: tuple[Word, ...]) -> Status:
    if definition is None:
        shell.records.started.append(
            Started((Word(name, shell.where), *words), shell.where, shell.context)
        )
        return None
    # The caller's state is set aside: a function has its own arguments, file and loops.
    body, path = definition
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
    for variable, hidden in shell.locals[-1].items():
        restore(shell, variable, hidden)
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
        merge(shell, ways, reason)
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


def source_file(shell: Shell, words: tuple[Word, ...]) -> Status:
    """Follow a file that the script sources, if the file lies beside the script."""
    if not words:
        return False
    text = made_text(shell, words[0])
    found = beside(shell, words[0])
    # What the file would set may be missing; later reasons name it (`unset_word`).
    if found is None and text is None:
        shown = words[0].text or "".join(p.text or "..." for p in words[0].parts) or "a file"
        line = shell.where.rpartition(":")[2]
        shell.records.sourced.append(f"{shown} (line {line})")
        # Files such as `.bashrc` or `activate` set no flags, and a note on them would only alarm.
        if os.path.basename(shown) in shell.records.written:
            shell.note(shown, "it is sourced, and the script writes it first")
        elif not _OF_ENVIRONMENTS.fullmatch(os.path.basename(shown)):
            shell.note(shown, "it is sourced, and not found beside the script")
        return None
    # Words behind the file are its arguments; without any, the file sees those of the script.
    arguments, knows = shell.arguments, shell.knows_arguments
    if words[1:]:
        shell.arguments, shell.knows_arguments = words[1:], True
    # `return` in a sourced file ends the file alone.
    returned, shell.returned = shell.returned, []
    status = run_file(shell, *found) if found is not None else run_code(shell, text or words[0])
    _gather(shell, "is set in a sourced file")
    shell.returned = returned
    # `set --` in the file would outlast it, and is not told from `shift` here.
    if words[1:] and shell.arguments != words[1:]:
        shell.forget_arguments("is changed in a sourced file")
    elif words[1:]:
        shell.arguments, shell.knows_arguments = arguments, knows
    return status


def made_text(shell: Shell, word: Word) -> Word | None:
    """Return the text that the script itself has written into a file, if it is known."""
    made = shell.records.made.get(file_name(word))
    if made is None:
        return None
    here, there = shown_path(word), shown_path(made.name)
    if here is None or there is None:
        return made.text if same(word, made.name) else None
    # A relative path leads to that file from the folder in which the file was written.
    if os.path.normpath(here) != os.path.normpath(there):
        return None
    is_there = os.path.isabs(here) or shell.folder == made.folder
    return made.text if is_there else None


def beside(shell: Shell, word: Word) -> tuple[Path, str] | None:
    """Return the path and text of a file at the place named by the script, seen from its folder."""
    path = shown_path(word)
    if path is None or "\0" in path or len(path) > 4096:
        return None
    # What the script itself writes is not what lies there now; devices are no files.
    if os.path.basename(path) in shell.records.written or path.startswith(("/dev/", "/proc/")):
        return None
    folder = shell.start_folder or shell.script.parent
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
        # A name may be longer than a file system takes.
        if os.path.isfile(candidate):
            try:
                return candidate, read_text(candidate)
            except HeteroError:
                return None
    return None


def run_file(shell: Shell, path: Path, text: str) -> Status:
    """Follow the text of a file."""
    shell.records.files += 1
    if shell.records.files > MAX_FILES:
        shell.note(str(path), f"it is sourced, and more than {MAX_FILES} files are not read")
        return None
    # The place is the caller's again behind the file, for the notes that follow.
    own = (shell.path, shell.line_of_code, shell.where)
    shell.path, shell.line_of_code = path, ""
    shell.deeper(1)
    shell.records.texts.append(text)
    status = Runner.run(shell, parsed_script(path, text))
    shell.deeper(-1)
    shell.path, shell.line_of_code, shell.where = own
    return status


def evaluated_code(shell: Shell, words: tuple[Word, ...]) -> Status:
    """Follow `eval`."""
    code = concatenate(spaced(words, Word(" ", shell.where)) or [Word("", shell.where)])
    # Code of which not even a part is known could do anything; what sets up programs sets no job.
    parts = code.parts or (code,)
    if not any(part.is_known for part in parts if part.text != "") and not code.is_known:
        if not _SETS_UP.match(code.reason):
            shell.note("", f"eval runs code that is not known: {code.reason}")
        return None
    return run_code(shell, code)


def unknown_array(shell: Shell, name: str, word: Word) -> None:
    """Set an array whose elements are not known."""
    shell.set_variable(name, Variable((word,), True))
