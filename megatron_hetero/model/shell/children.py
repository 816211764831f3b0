"""Child processes that run code: `bash -c`, `bash <<EOF`, and scripts that a script starts."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from typing import TypeGuard

from megatron_hetero.model.shell.code import beside, made_text, run_code, run_file
from megatron_hetero.model.shell.fields import split
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.passing import hand_over, passed
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Word, file_name, opaque

_SHELLS = ("bash", "sh", "zsh", "dash")
_READ_INPUT = (*_SHELLS, "ssh", "sbatch", "srun", "bsub")
_ELSEWHERE = ("ssh", "pdsh", "pssh", "clush", "kubectl", "docker", "podman", "nerdctl")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_STARTERS = (
    "sbatch", "srun", "salloc", "mpirun", "mpiexec", "nohup", "time", "timeout", "setsid", "nice",
    "numactl", "stdbuf", "env", "exec", "sudo",
)  # fmt: skip
"""Programs that start the script in their words."""
_ADD_WORDS = ("xargs", "parallel")
_WITH_VALUE = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")
"""Options of bash that the next word belongs to."""
_SHELL_LINE = re.compile(r"(?:\S{0,200}/)?(?:bash|sh|zsh|dash)(?: +-\w+)+")
_LAUNCH = re.compile(r"\.py\s|\s-m\s+\S{0,200}pretrain\S{0,200}\s")
"""A line of code that starts training."""
_SCRIPT_LINE = re.compile(
    r"(?:(?:^|[\s/;&])(?:bash|sh)\s[^;&|]{0,200}|[\s;&]\.{0,2}/)"
    r"[^\s;&|]{1,200}\.(?:sh|bash|slurm|sbatch)\b"
)
"""A line of code, of several words, that starts a script."""
_LONGEST = 4096
"""Characters of a word in which such a line is looked for."""


def _child(shell: Shell, words: tuple[Word, ...], sees_variables: bool = True) -> Shell:
    """Return a child shell of this shell: it has the exported variables and functions."""
    # A child process sees exported variables alone; another machine sees none.
    child = shell.fork()
    seen = shell.exported if sees_variables else {}
    child.variables = {}
    for name, reason in seen.items():
        variable = shell.variables.get(name)
        # Arrays are not exported, whatever a script says.
        if variable is None or variable.is_array:
            continue
        if reason:
            why = f"{name} {reason}, which is not run"
            variable = Variable((Word(None, shell.where, why, True, may_split=True),))
        child.variables[name] = variable
    child.functions = {
        name: found for name, found in shell.functions.items() if f"{name}()" in seen
    }
    # Neither kinds of variables nor local ones of this shell are the child's.
    child.locals, child.returned, child.kinds, child.exports_all = [], [], {}, None
    child.arguments, child.knows_arguments = words, True
    child.is_captured, child.output, child.given = False, None, None
    # Neither `set -e` nor a loop around reaches into another process.
    child.stops_at_errors, child.loops = False, 0
    return child


def follow_nested(
    shell: Shell,
    words: tuple[Word, ...],
    settings: Sequence[tuple[str, Word]] = (),
    sees_variables: bool = True,
) -> bool:
    """Follow the code that a command gets as a word or as input; False if there is no code.

    Args:
        settings: variables that stand before the command, as in `A=1 bash run.sh`.
        sees_variables: the command gets the variables of this shell.
    """
    words = _of_ssh(words)
    names = [os.path.basename(word.text) if word.text is not None else "" for word in words]

    def started_behind(before: int) -> Callable[[tuple[Word, ...]], Shell]:
        """Return the maker of the child whose program stands behind so many words."""

        def child(given: tuple[Word, ...]) -> Shell:
            # `ssh host bash -c ...`: another machine has variables of its own.
            sees = sees_variables and not any(name in _ELSEWHERE for name in names[:before])
            # `xargs bash run.sh` adds words of its input.
            if any(name in _ADD_WORDS for name in names[:before]):
                why = f"{names[0]} adds words that are not read"
                given = (*given, Word(None, shell.where, why, True, may_split=True))
            made = _child(shell, given, sees)
            for name, word in settings if sees else ():
                made.set_variable(name, Variable((word,)))
                made.exported[name] = ""
            hand_over(shell, made, passed(shell, words[:before], settings))
            return made

        return child

    for i, name in enumerate(names):
        child = started_behind(i)
        # A script that is started by itself, or handed to Slurm.
        if name not in _SHELLS:
            may_start = i == 0 or names[0] in _STARTERS
            if may_start and _run_file(shell, words[i], child, words[i + 1 :]):
                return True
            continue
        at = i + 1
        # Options before the script; one with a `c`, as in `-lc`, says that code follows.
        while at < len(words) and re.match(r"[-+][A-Za-z-]", words[at].text or ""):
            option = words[at].text or ""
            at += 2 if option in _WITH_VALUE else 1
            behind = at + 1 if words[at : at + 1] and words[at].text == "--" else at
            # The word behind the code is `$0` of the child, so the arguments begin behind that.
            if re.fullmatch(r"-[a-z]*c", option) and behind < len(words):
                given = words[behind + 2 :]
                # Which word is `$0` is open where the first may be none or several.
                if words[behind + 1 : behind + 2] and words[behind + 1].may_split:
                    given = (opaque(words[behind + 1], may_split=True),)
                run_code(child(given), words[behind])
                return True
            # `bash -s a b <<EOF`: the input is the code, and the words are its arguments.
            if re.fullmatch(r"-[a-z]*s", option) and _is_seen(shell.given):
                run_code(child(words[behind:]), shell.given)
                return True
        # A script that lies beside this one is followed; of all others nothing is known.
        if at < len(words) and _run_file(shell, words[at], child, words[at + 1 :]):
            return True
    # `bash <<EOF`: the input is the code.
    if names[0] in _READ_INPUT and _is_seen(shell.given):
        run_code(started_behind(len(words))(()), shell.given)
        return True
    # A command of unknown kind may take a whole command line as one word.
    for i, word in enumerate(words[1:], 1):
        seen = "".join(part.text or "?" for part in word.parts or (word,))
        # What stands behind a Python program is for that program.
        is_script = not any(name.endswith(".py") for name in names[:i]) and " " in seen.strip()
        if _LAUNCH.search(seen) or (is_script and _SCRIPT_LINE.search(f" {seen[:_LONGEST]}")):
            run_code(started_behind(i)(()), word)
            return True
    return False


def _of_ssh(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the words that the other machine makes of `ssh host "bash -s" 8`."""
    if words[0].text != "ssh":
        return words
    return tuple(
        part
        for word in words
        for part in (split(word) if _SHELL_LINE.fullmatch(word.text or "") else (word,))
    )


def _is_seen(word: Word | None) -> TypeGuard[Word]:
    """Return whether anything is known of an input."""
    return word is not None and bool(word.parts or word.text is not None)


def is_script(name: str) -> bool:
    """Return whether a file is a script by its name."""
    return name.endswith(_SCRIPTS)


def _run_file(
    shell: Shell,
    word: Word,
    child: Callable[[tuple[Word, ...]], Shell],
    arguments: tuple[Word, ...],
) -> bool:
    """Follow a script that a script starts, if its text is known: it lies beside, or the script has
    written it.  One that starts itself again and again is followed only twice."""
    made = made_text(shell, word)
    found = beside(shell, word) if made is None and is_script(file_name(word)) else None
    if made is None and found is None:
        return False
    path = shell.script.parent / file_name(word) if found is None else found[0]
    following = shell.records.following
    if following.count(path.resolve()) < 2:
        following.append(path.resolve())
        # `$0` is the script, and the folder stays that of the shell that starts the script.
        inner = child(arguments)
        inner.start_folder = inner.start_folder or inner.script.parent
        inner.script = path
        if found is not None:
            run_file(inner, *found)
        else:
            run_code(inner, made or word)
        following.pop()
    return True
