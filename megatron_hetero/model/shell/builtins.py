"""Commands of bash itself that change or print the state of a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from megatron_hetero.model.shell.code import evaluated_code, source_file
from megatron_hetero.model.shell.conditions import tested_words
from megatron_hetero.model.shell.declarations import DECLARING, declare_words, unset_words
from megatron_hetero.model.shell.lookup import calculated
from megatron_hetero.model.shell.options import set_options, shopt, trap
from megatron_hetero.model.shell.printing import echo, printf
from megatron_hetero.model.shell.reading import mapfile, read
from megatron_hetero.model.shell.state import Flow, Shell
from megatron_hetero.model.shell.values import Status, Word, Words, opaque, shown_path, unknown

_NAME = re.compile(r"[A-Za-z_]\w*")


def _cd(shell: Shell, words: Words) -> Status:
    # Options such as `-P` are about links, and no folder is looked at here.
    given = [word for word in words if not (word.text or "").startswith("-")]
    if len(given) != 1:
        shell.folder = unknown(shell.where, "cd", "goes to another folder")
    else:
        before = None if shell.folder is None else shown_path(shell.folder)
        path = shown_path(given[0])
        # A relative path goes on from the folder of an earlier `cd`.
        if path is not None and not path.startswith("/") and before is not None:
            shell.folder = given[0]._replace(text=f"{before}/{path}", parts=())
        elif path is None or (not path.startswith("/") and shell.folder is not None):
            # Behind an unknown folder, a relative path leads to another unknown folder.
            shell.folder = unknown(shell.where, "cd", "goes to a folder that is not known")
        else:
            shell.folder = given[0]
    # Whether the folder exists only the machine knows; in `$(cd ... && pwd)` it is taken to.
    return True if shell.is_captured else None


def _pwd(shell: Shell, words: Words) -> Status:
    from megatron_hetero.model.shell.substitution import FILTERS

    made = FILTERS["pwd"](shell, words)
    shell.write(None if made is None else [made])
    return True


def _getopts(shell: Shell, words: Words) -> Status:
    # A script without arguments is taken to be started without options.
    if not shell.arguments and len(words) < 3:
        shell.assign("OPTIND", [Word("1", shell.where)])
        return False
    names = [words[1].text or ""] if len(words) > 1 else []
    # Which options the script is started with is open, so each run of the loop is.
    names = [name for name in names if _NAME.fullmatch(name)]
    shell.forget([*names, "OPTARG", "OPTIND"], "is set by getopts")
    return None


def _shift(shell: Shell, words: Words) -> Status:
    if words and not words[0].is_known:
        shell.forget_arguments("is shifted by a number that is not known")
        return None
    text = words[0].text or "" if words else "1"
    # Bash fails where the number is none, and keeps the arguments.
    if not re.fullmatch(r"\+?\d{1,9}", text):
        return False
    count = int(text)
    # An argument that may be several words may outlast the shift.
    if any(word.may_split for word in shell.arguments[:count]):
        first = next(word for word in shell.arguments if word.may_split)
        shell.arguments = (opaque(first, may_split=True), *shell.arguments[count:])
        return None
    # Bash fails, and keeps the arguments, where fewer are left than are to go.
    if count > len(shell.arguments):
        return False
    shell.arguments = shell.arguments[count:]
    return True


def _leave_loop(flow: Flow) -> Callable[[Shell, Words], Status]:
    def leave(shell: Shell, words: Words) -> Status:
        # Bash warns about `break` outside of a loop, and goes on.
        if not shell.loops:
            return True
        count = words[0].text if words else "1"
        # `break 2` under a condition would end the loop around in one branch alone.
        if not re.fullmatch(r"[1-9]\d?", count or "") or (count != "1" and shell.context):
            shell.note("", f"`{flow}` of loops that are not known is not followed")
            count = "1"
        shell.flow, shell.loops_to_leave = flow, min(int(count or "1"), shell.loops)
        return True

    return leave


def _leave(flow: Flow) -> Callable[[Shell, Words], Status]:
    def leave(shell: Shell, words: Words) -> Status:
        # A certain `exit` of the script itself is what a refusal names, if nothing started before.
        if flow == "exit" and not shell.context and not shell.is_captured:
            shell.records.ended = f"{shell.where}: exit"
        shell.flow = flow
        # Without a number the status is that of the command before, which is not kept.
        code = words[0].text if words and words[0].is_known else None
        return code == "0" if code is not None else None

    return leave


def _let(shell: Shell, words: Words) -> Status:
    status: Status = None
    for word in words:
        number = calculated(shell, word.text or "") if word.is_known else word
        # An expression with an unknown name in it may set any variable.
        if not word.is_known:
            shell.note("", "let may set a variable whose name is not known")
        # As in bash, the last expression decides: 0 fails.
        status = None if not number.is_known else number.text != "0"
    return status


def _always(status: Status) -> Callable[[Shell, Words], Status]:
    return lambda shell, words: status


def _quiet(names: str, status: Status) -> Iterator[tuple[str, Callable[[Shell, Words], Status]]]:
    for name in names.split():
        yield name, _always(status)


def _declared(keyword: str) -> Callable[[Shell, Words], Status]:
    def declare(shell: Shell, words: Words) -> Status:
        declare_words(shell, keyword, words)
        return True

    return declare


def _bracket(shell: Shell, words: Words) -> Status:
    return tested_words(words[:-1]) if words and words[-1].text == "]" else None


BUILTINS: dict[str, Callable[[Shell, Words], Status]] = {
    **dict(_quiet("true :", True)),
    **dict(_quiet("ulimit umask wait hash alias pushd popd jobs kill", None)),
    "false": _always(False),
    "echo": echo,
    "printf": printf,
    "cd": _cd,
    "pwd": _pwd,
    "read": read,
    "mapfile": mapfile,
    "readarray": mapfile,
    "getopts": _getopts,
    "shift": _shift,
    "set": set_options,
    "shopt": shopt,
    "trap": trap,
    "exit": _leave("exit"),
    "return": _leave("return"),
    "break": _leave_loop("break"),
    "continue": _leave_loop("continue"),
    "let": _let,
    "test": lambda shell, words: tested_words(words),
    "[": _bracket,
    **{keyword: _declared(keyword) for keyword in DECLARING},
    "unset": unset_words,
    "eval": evaluated_code,
    "source": source_file,
    ".": source_file,
}
"""Name -> what the command does; it gets the words behind its name, expanded."""
