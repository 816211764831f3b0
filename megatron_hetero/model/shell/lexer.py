"""Bash text to simple commands made of words, the words still unexpanded.

Only the syntax of the shell: quotes, escapes, comments, continued lines, arrays, redirections and
here-documents (both dropped), and `$` forms; those that have to be run are kept as unknown pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatron_hetero.errors import ModelError
from megatron_hetero.model.shell.words import Command, ShellWord, WordPart

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]")
_BRACED = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(?P<array>\[[@*]\])?"
    r"(?:(?P<operator>:?[-=])(?P<default>.*)|:?\?.*)?",
    re.DOTALL,
)
_ARRAY_START = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_BLANKS = " \t\r"
MAX_NESTING = 32
"""Expansions inside one another."""


def commands(path: Path, text: str) -> Iterator[Command]:
    """Yield the simple commands of a script, in the order of the text.

    Raises:
        ModelError: a quote or bracket stays open.
    """
    return _Lexer(path, text.replace("\r\n", "\n")).commands()


class _Lexer:
    def __init__(self, path: Path, text: str, line: int = 1, depth: int = 0) -> None:
        self._path = path
        self._text = text
        self._position = 0
        self._line = line
        self._depth = depth
        self._here_documents: list[str] = []

    def commands(self) -> Iterator[Command]:
        words: list[ShellWord] = []
        before = operator = ""
        while self._position < len(self._text):
            character = self._text[self._position]
            if self._skip_blank(newline=False):
                continue
            if character in "\n;&|()" and not self._text.startswith("&>", self._position):
                operator = self._operator()
                if words:
                    yield Command(words[0].line, tuple(words), before)
                    words, before = [], operator
                elif operator != "\n":  # a command may begin on the line after its operator
                    before = operator
            elif character in "<>" or self._text.startswith("&>", self._position):
                self._redirection()
            else:
                word = self._word()
                if self._text.startswith("()", self._position):
                    self._position += 2  # a function: its name and brackets say nothing
                elif not self._is_file_number(word):
                    words.append(word)
        if words:
            yield Command(words[0].line, tuple(words), before)

    def _error(self, line: int, message: str) -> ModelError:
        return ModelError(f"{self._path}:{line}: {message}")

    def _next(self) -> str:
        character = self._text[self._position]
        self._position += 1
        self._line += character == "\n"
        return character

    def _skip_blank(self, newline: bool) -> bool:
        """Skip one blank, continued line or comment."""
        if self._text.startswith("\\\n", self._position):
            self._position += 2
            self._line += 1
        elif self._text[self._position] == "#":
            while self._position < len(self._text) and self._text[self._position] != "\n":
                self._position += 1
        elif self._text[self._position] in _BLANKS + ("\n" if newline else ""):
            self._next()
        else:
            return False
        return True

    def _operator(self) -> str:
        character = self._next()
        if character == "\n":
            self._skip_here_documents()
        elif character in "&|;" and self._text.startswith(character, self._position):
            self._position += 1
            return character * 2
        return character

    def _is_file_number(self, word: ShellWord) -> bool:
        """Return whether a word is the 2 of `2>&1`."""
        following = self._text[self._position : self._position + 1]
        return (word.keyword or "").isdecimal() and following in ("<", ">")

    def _redirection(self) -> None:
        """Skip `> file`, `2>&1`, `<<< text`; remember the end of `<< END`."""
        is_here_document = bool(re.match(r"<<(?!<)", self._text[self._position :]))
        while self._position < len(self._text) and self._text[self._position] in "<>&-|":
            self._position += 1
        while self._position < len(self._text) and self._skip_blank(newline=False):
            continue
        if self._position == len(self._text) or self._text[self._position] == "\n":
            return
        if self._text[self._position] == "(":
            self._skip_brackets()
            return
        target = self._word()
        if is_here_document:
            self._here_documents.append("".join(p.text for p in target.pieces))

    def _skip_here_documents(self) -> None:
        for end in self._here_documents:
            while self._position < len(self._text):
                stop = self._text.find("\n", self._position)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._position : stop]
                self._position = min(stop + 1, len(self._text))
                self._line += 1
                if line.strip() == end:
                    break
        self._here_documents = []

    def _word(self) -> ShellWord:
        """Read one word, from its first character on."""
        line = self._line
        pieces: list[WordPart] = []
        splits = quoted = False
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == "\\":
                self._next()
                escaped = self._next() if self._position < len(self._text) else ""
                pieces.append(WordPart("text", "" if escaped == "\n" else escaped))
                quoted = quoted or escaped != "\n"
            elif character in "'\"":
                pieces += self._quoted()
                quoted = True
            elif character in "$`":
                pieces.append(self._expansion())
                splits = True
            elif character == "(" and pieces and _ARRAY_START.fullmatch(pieces[0].text):
                elements = self._array(line)
                return ShellWord(tuple(pieces), line, elements=elements)
            elif character in " \t\r\n;&|()<>":
                break
            else:
                if pieces and pieces[-1].kind == "text" and not quoted:
                    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + self._next())
                else:
                    pieces.append(WordPart("text", self._next()))
        return ShellWord(tuple(pieces), line, splits, quoted)

    def _array(self, line: int) -> tuple[ShellWord, ...]:
        self._position += 1
        elements: list[ShellWord] = []
        while self._position < len(self._text):
            if self._skip_blank(newline=True):
                continue
            if self._text[self._position] == ")":
                self._position += 1
                return tuple(elements)
            before = self._position
            elements.append(self._word())
            if self._position == before:
                raise self._error(
                    self._line, f'"{self._text[before]}" cannot stand inside an array'
                )
        raise self._error(line, "the bracket of this array is not closed; add )")

    def _quoted(self) -> list[WordPart]:
        """Read the pieces of a quoted string."""
        line, quote = self._line, self._next()
        pieces: list[WordPart] = [WordPart("text", "")]
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == quote:
                self._position += 1
                return pieces
            if quote == '"' and character in "$`":
                pieces.append(self._expansion())
                continue
            if quote == '"' and character == "\\" and self._position + 1 < len(self._text):
                self._next()
                escaped = self._next()
                character = escaped if escaped in '$`"\\' else "\\" + escaped
                character = "" if escaped == "\n" else character
            else:
                self._next()
            pieces.append(WordPart("text", character))
        raise self._error(line, f"the quote {quote} is not closed")

    def _expansion(self) -> WordPart:
        """Read an expansion that a `$` or a backquote begins."""
        if self._depth == MAX_NESTING:
            raise self._error(
                self._line, f"expansions stand inside one another more than {MAX_NESTING} deep"
            )
        self._depth += 1
        try:
            return self._expanded()
        finally:
            self._depth -= 1

    def _expanded(self) -> WordPart:
        start = self._position
        if self._next() == "`":
            end = self._text.find("`", self._position)
            if end < 0:
                raise self._error(self._line, "the backquote is not closed")
            self._line += self._text.count("\n", self._position, end)
            self._position = end + 1
        elif self._text.startswith("(", self._position):
            self._skip_brackets()
        elif self._text.startswith("{", self._position):
            return self._braced(start)
        elif name := _NAME.match(self._text, self._position):
            self._position = name.end()
            return WordPart("variable", name.group())
        elif self._text.startswith(("@", "*"), self._position):
            self._position += 1
            return WordPart("array", "@")
        elif self._text[self._position : self._position + 1] in tuple("#?$!-"):
            self._position += 1
        else:
            return WordPart("text", "$")
        return WordPart("unknown", self._text[start : self._position])

    def _braced(self, start: int) -> WordPart:
        """Read `${...}`, at its opening brace."""
        line = self._line
        depth = 0
        while self._position < len(self._text):
            character = self._next()
            depth += (character == "{") - (character == "}")
            if depth == 0:
                break
        else:
            raise self._error(line, "the brace of ${ is not closed; add }")
        inner = self._text[start + 2 : self._position - 1]
        match = _BRACED.fullmatch(inner)
        if match is None:
            return WordPart("unknown", "${" + inner + "}")
        default = None
        if match["default"] is not None:
            # The default is read as if in double quotes, where it usually stands.
            quoted = _Lexer(self._path, f'"{match["default"]}"', line, self._depth)
            default = tuple(quoted._word().pieces)
        kind: Literal["variable", "array"] = (
            "array" if match["array"] or match["name"] in "@*" else "variable"
        )
        name = match["name"].replace("*", "@")
        return WordPart(kind, name, default, match["operator"] or "")

    def _skip_brackets(self) -> None:
        """Skip `( ... )` with whatever is inside, which would have to be run."""
        line = self._line
        depth = 0
        while self._position < len(self._text):
            character = self._text[self._position]
            if character in "'\"":
                self._quoted()
                continue
            self._next()
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return
        raise self._error(line, "the bracket is not closed; add )")
