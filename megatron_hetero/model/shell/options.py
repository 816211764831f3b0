"""Options of a shell that change how it reads a script: `set`, `shopt`, and code for later."""

from __future__ import annotations

from megatron_hetero.model.shell.code import run_code
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Status, Words

_NAMED = {"errexit": "e", "allexport": "a", "keyword": "k", "noexec": "n", "onecmd": "t",
          "braceexpand": "B"}  # fmt: skip
_OTHER_READING = frozenset(
    ["nocasematch", "lastpipe", "expand_aliases", "localvar_inherit", "localvar_unset", "xpg_echo"]
)
"""Options of `shopt` with which bash reads a script in another way than ours."""


def set_options(shell: Shell, words: Words) -> Status:
    """Follow `set`: options, and then the arguments."""
    rest = list(words)
    while rest:
        text = rest[0].text or ""
        # The first word that is no option begins the new arguments; `-` alone may end them.
        if text in ("-", "--") or not text.startswith(("-", "+")):
            is_end = text in ("-", "--") and rest[0].is_known
            if text == "-" and len(rest) == 1:
                return True
            shell.arguments = tuple(rest[1:] if is_end else rest)
            shell.knows_arguments = True
            return True
        rest.pop(0)
        # Among letters, as in `set -euo`, `o` takes the name of an option from the next word.
        for letter in text[1:]:
            if letter != "o":
                _set_letter(shell, letter, text.startswith("-"))
            elif rest:
                _set_letter(shell, _NAMED.get(rest.pop(0).text or "", ""), text.startswith("-"))
    return True


def _set_letter(shell: Shell, letter: str, is_on: bool) -> None:
    """Follow one option: `e` ends a script at a failure, `a` exports what is set from here on."""
    if letter == "e":
        shell.stops_at_errors = is_on
    elif letter == "a":
        shell.exports_all = "" if is_on else None
    elif (letter in ("k", "n", "t") and is_on) or (letter == "B" and not is_on):
        shell.note("", f"`set {'-' if is_on else '+'}{letter}` is not followed")


def shopt(shell: Shell, words: Words) -> Status:
    """Follow `shopt`, and note what changes the meaning of a script."""
    texts = [word.text if word.is_known else None for word in words]
    if None in texts:
        shell.note("", "shopt sets an option that is not known")
    for name in texts:
        if name in _OTHER_READING and "-s" in texts:
            shell.note("", f"`shopt -s {name}` is not followed")
        elif name == "inherit_errexit":
            shell.inherits_errexit = "-s" in texts
    return None


def trap(shell: Shell, words: Words) -> Status:
    """Follow the code of a trap on a copy: what it starts may be started, and what it sets after
    each command or failure may be set."""
    # `trap - EXIT` and `trap -p` take no code.
    if len(words) < 2 or (words[0].text or "").startswith("-") or words[0].text == "":
        return None
    line = shell.where.rpartition(":")[2]
    later = shell.fork(f"inside the `trap` of line {line}")
    later.stops_at_errors, later.is_captured, later.output = False, False, None
    run_code(later, words[0])
    signals = [(word.text or "?").upper().removeprefix("SIG") for word in words[1:]]
    if any(signal in ("ERR", "DEBUG", "RETURN", "?") for signal in signals):
        set_there = [n for n, v in later.variables.items() if shell.variables.get(n) is not v]
        shell.forget(set_there, f"may be set by the `trap` of line {line} at any command behind it")
        # A later assignment in the script would make the variable known again.
        if set_there:
            shell.note("", f"the `trap` of line {line} sets {', '.join(set_there)} at some command")
    return None
