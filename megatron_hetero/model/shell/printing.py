"""What `echo` and `printf` print."""

from __future__ import annotations

import re

from megatron_hetero.model.shell.fields import as_unknown, spaced
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Status, Word, Words, concatenate, opaque, unknown

_NAME = re.compile(r"[A-Za-z_]\w*")
_DIRECTIVE = re.compile(r"%(?P<width>-?\d*)(?P<kind>[sdi%])|\\(?P<escape>.)")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}


def echo(shell: Shell, words: Words) -> Status:
    """Follow `echo`."""
    ends, reads_escapes = True, False
    hidden: Word | None = None
    given: list[Word] = []
    rest = list(words)
    # Leading words that are options, or may be: `echo $OPTIONS text`.
    while rest and may_be_option(rest[0]):
        word = rest.pop(0)
        text = word.text or ""
        is_option = re.fullmatch(r"-[neE]+", text) is not None
        # Up to the first doubtful word each option is certain.
        if word.is_known and is_option and hidden is None:
            ends, reads_escapes = ends and "n" not in text, reads_escapes or "e" in text
            continue
        # The first word that is surely no option ends the options, and is printed.
        if word.is_known and not is_option:
            given.append(word)
            break
        # An option is not printed; and behind no word at all the next may be an option.
        hidden = hidden or word
        is_flag = word.is_flag and not word.is_known
        given.append(word if is_flag else opaque(hidden if is_option else word, may_split=True))
    blank, newline = Word(" ", shell.where), Word("\n", shell.where)
    # If a doubtful word may be `-n`, the newline at the end is doubtful as well.
    if hidden is not None:
        newline = as_unknown(newline, hidden)
    made = spaced([*given, *rest], blank)
    may_read = reads_escapes or hidden is not None
    # With `-e` an unknown part could hold an escape.
    if any("\\" in (w.text or ("\\" if reads_escapes else "")) for w in made) and may_read:
        made = [unknown(shell.where, "echo -e", "prints escapes that are not read")]
    shell.write([*made, *([newline] if ends else [])])
    return True


def may_be_option(word: Word) -> bool:
    """Return whether a word begins with `-`, or may begin so or be no word."""
    for part in word.parts or (word,):
        if not part.is_known or part.text:
            return not part.is_known or (part.text or "").startswith("-")
    return word.may_split


def printf(shell: Shell, words: Words) -> Status:
    """Follow `printf`, into a variable with `-v`."""
    name = ""
    if len(words) > 1 and words[0].text == "-v":
        name, words = words[1].text or "", words[2:]
    if words and words[0].text == "--":
        words = words[1:]
    made = _formatted(shell, words)
    if not name:
        shell.write(made)
    elif _NAME.fullmatch(name):
        shell.assign(name, [concatenate(made)._replace(where=shell.where)])
    else:
        shell.note("", "printf -v sets a variable whose name is not read")
    return True


def _formatted(shell: Shell, words: Words) -> list[Word]:
    """Return what `printf FORMAT WORDS` prints; the format is used again while words are left."""
    not_read = unknown(shell.where, "printf", "has a format that is not read")
    if not words or not words[0].is_known or any(word.may_split for word in words):
        return [not_read]
    form, rest = words[0].text or "", list(words[1:])
    # A `%` that is left over begins a directive that is not read, such as `%f`.
    if re.sub(_DIRECTIVE, "", form).count("%"):
        return [not_read]
    made: list[Word] = []
    # The format is used as often as words are left, at least once; each round takes some.
    while True:
        before, position = len(rest), 0
        for match in _DIRECTIVE.finditer(form):
            made.append(Word(form[position : match.start()], shell.where))
            position = match.end()
            word = _directive(shell, match, rest)
            if word is None:
                return [not_read]
            made.append(word)
        made.append(Word(form[position:], shell.where))
        # A format without directives takes no words, and is printed once.
        if not rest or len(rest) == before:
            return made


def _directive(shell: Shell, match: re.Match[str], rest: list[Word]) -> Word | None:
    if match["escape"] is not None:
        text = _ESCAPES.get(match["escape"])
        return None if text is None else Word(text, shell.where)
    if match["kind"] == "%":
        return Word("%", shell.where)
    # Missing words print as nothing, and as 0 for numbers.
    word = rest.pop(0) if rest else Word("" if match["kind"] == "s" else "0", shell.where)
    if not word.is_known:
        # A width counts characters, which an unknown word does not show.
        return word if match["kind"] == "s" and not match["width"] else opaque(word)
    text = word.text or ""
    if match["kind"] != "s" and not re.fullmatch(r"-?(0|[1-9]\d{0,17})", text):
        return None
    width = match["width"]
    # `%05d` pads with zeros, and a long width would fill the memory.
    if width.startswith("0") or len(width) > 4:
        return None
    size = abs(int(width)) if width not in ("", "-") else 0
    padded = text.ljust(size) if width.startswith("-") else text.rjust(size)
    return Word(padded, word.where)
