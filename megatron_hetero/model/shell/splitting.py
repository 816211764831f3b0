"""Words of the grammar's tree to words of a command line: none, one, or many of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.expansion import HOLES, WordPiece, pieces, with_home
from megatron_hetero.model.shell.fields import Token, cut, settled, tokens
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import BLANKS, Word, concatenate, opaque, unknown

if TYPE_CHECKING:
    from tree_sitter import Node

_BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_RANGE = re.compile(r"(?P<head>[^{}]*)\{(?P<first>-?\d+)\.\.(?P<last>-?\d+)\}(?P<tail>[^{}]*)")
_LIST = re.compile(r"(?P<head>[^{}]*)\{(?P<items>[^{}]*,[^{}]*)\}(?P<tail>[^{}]*)")
_GLOB = re.compile(r"[\w.-]*[*?]|[*?][\w.-]*|[\w.*?[\]!^-]*[*?\]]\.\w+")
"""What looks like names of files: `data*`, `*.txt`, `part[0-9].bin`; and every path with a star."""
_BETWEEN = re.compile(r"\\\n|\\.|[ \t\n]+|[^ \t\n\\]+", re.DOTALL)
_MOST_OF_BRACES = 4096


def fields(shell: Shell, node: Node | str) -> tuple[Word, ...]:
    """Expand a word to words: none, one, or many.

    The words of one variable were written where it is assigned.
    """
    # Braces are expanded before variables, from the text as it is written.
    if not isinstance(node, str):
        spread = _spread(shell, node)
        if spread is not None:
            return spread
    found = with_home(shell, list(pieces(shell, node)))
    return assembled(shell, found, shell.where if isinstance(node, str) else shell.line_at(node))


def words_of(shell: Shell, parent: Node, nodes: Sequence[Node]) -> list[Word]:
    """Expand the words of a command or an array, among which comments may stand.

    The grammar cuts a word at `\\ ` and at `$1` behind quotes; bash goes on with the word.
    """
    done: list[Word] = []
    for group in _touching(parent, nodes):
        first = group[0]
        if len(group) == 1:
            done += fields(shell, first)
            continue
        where = shell.where if isinstance(first, str) else shell.line_at(first)
        text = "".join(node if isinstance(node, str) else source(node) for node in group)
        # `"a"$` at the end of a node: the grammar has cut a `$NAME` in two.
        if any(not isinstance(n, str) and source(n).endswith("$") for n in group[:-1]):
            word = unknown(where, text, "is not understood")
            done.append(word._replace(may_split=True))
            continue
        found = [piece for node in group for piece in pieces(shell, node)]
        done += assembled(shell, with_home(shell, found), where)
    return done


def _touching(parent: Node, nodes: Sequence[Node]) -> list[list[Node | str]]:
    """Group nodes, and the text between nodes, that touch without a blank."""
    text = parent.text or b""
    groups: list[list[Node | str]] = [[]]
    # Bytes, as the grammar counts them; `end` is the end of the last node.
    end = nodes[0].start_byte if nodes else 0
    for node in nodes:
        between = text[end - parent.start_byte : node.start_byte - parent.start_byte].decode()
        # Blanks between nodes end a word, a continued line does not, and other text belongs to it.
        for part in _BETWEEN.findall(between) if node.start_byte > end else ():
            if not part.strip(" \t\n"):
                groups.append([])
            elif part != "\\\n":
                groups[-1].append(part)
        # `$"..."` is a text to be translated: the `$` is no part of it.
        last = groups[-1][-1] if groups[-1] else None
        if node.type == "string" and isinstance(last, str) and re.fullmatch(r"[^\\]*\$", last):
            groups[-1][-1] = last[:-1]
        # A comment is no word, and a node inside of the last one does not go on with it.
        if node.type == "comment" or node.start_byte < end:
            groups.append([])
        if node.type != "comment":
            groups[-1].append(node)
        end = max(end, node.end_byte)
    return [group for group in groups if group]


def assembled(shell: Shell, found: list[WordPiece], where: str) -> tuple[Word, ...]:
    """Split pieces into words as the shell does."""
    # Pieces are cut at the separators that stand in values without quotes.
    given = [token for piece in found for token in _tokens(shell, piece, where)]
    knows_separators = isinstance(field_separators(shell), str)
    # The word may become several if an unquoted part of it is unknown, or `IFS` is.
    may_split = any(
        piece.word.may_split
        or not (piece.is_quoted or piece.is_text or (piece.word.is_known and knows_separators))
        for piece in found
    )
    done: list[Word] = []
    for parts in cut(settled(given)):
        # A word from one place keeps that place, which a refusal names.
        written = [word for word in parts if word.text != "" or not word.is_known]
        place = written[0].where if len(written) == 1 else where
        word = concatenate(parts)._replace(where=place)
        done.append(_globbed(word._replace(may_split=may_split and not word.is_known), found))
    return tuple(done)


def _tokens(shell: Shell, piece: WordPiece, where: str) -> Iterator[Token]:
    """Yield the parts of a piece, and the ends of words inside of it and behind it."""
    if piece.is_text or piece.is_quoted:
        # Text of the script and quoted values are never split.
        if piece.is_quoted or piece.word.text != "":
            # An empty piece makes a word in quotes, and none without.
            for part in piece.word.parts or (piece.word,):
                yield Token(part._replace(where=where) if piece.is_text else part)
    else:
        separators = field_separators(shell)
        if isinstance(separators, str):
            yield from tokens(piece.word, separators)
        elif piece.word.text != "":
            # Unknown separators could cut the value anywhere.
            hidden = separators if piece.word.is_known else piece.word
            yield Token(opaque(hidden, may_split=True))
    if piece.end is not None:
        yield Token(piece.end, is_end=True)


def _globbed(word: Word, found: list[WordPiece]) -> Word:
    """Take a word with unquoted `*` for unknown that may name files: which of them there are, and
    how many, is open.

    Sums such as `([0]*3+[1]*58)` and lists such as `[0,1]` are taken to name none.
    """
    text = "".join(part.text or "" for part in word.parts or (word,))
    is_path = "/" in text and re.search(r"[*?]", text)
    if not is_path and not _GLOB.fullmatch(text):
        return word
    # A star in quotes stands for itself, so only unquoted pieces count.
    parts = [q.text or "" for p in found if not p.is_quoted for q in p.word.parts or (p.word,)]
    if not re.search(r"[*?[]", "".join(parts)):
        return word
    if not word.is_known:
        return word._replace(may_split=True)
    return word._replace(reason=f"{text} depends on the files that there are", may_split=True)


def field_separators(shell: Shell) -> str | Word:
    """Return the characters at which values are split, or the word that makes them unknown."""
    variable = shell.variables.get("IFS")
    if variable is None or not variable.words:
        return BLANKS
    first = variable.words[0]
    return first if first.text is None or not first.is_known else first.text


def has_braces(node: Node) -> bool:
    """Return whether a word may have braces that make several of it; those of `${X}` make none."""
    if node.type not in ("word", "concatenation", "brace_expression"):
        return False
    return _BRACES.search(re.sub(r"\$\{[^}]*\}", "", source(node))) is not None


def _spread(shell: Shell, node: Node) -> tuple[Word, ...] | None:
    """Expand braces, `{0..3}` and `{a,b}`; None for a word without any."""
    text = source(node)
    if not has_braces(node):
        return None
    where = shell.line_at(node)
    not_read = unknown(where, text, "has braces that are not read")._replace(may_split=True)
    # Quotes, variables and braces inside of braces are not read.
    if re.search(r"[\\'\"$`]|\{[^{}]*\{", text) or HOLES.search(text):
        return (not_read,)
    match = _RANGE.fullmatch(text)
    if match is not None:
        first, last = int(match["first"]), int(match["last"])
        # `{08..11}` pads with zeros; a long range would fill the memory.
        is_padded = any(re.match(r"-?0\d", match[name]) for name in ("first", "last"))
        if is_padded or abs(last - first) > _MOST_OF_BRACES:
            return (not_read,)
        # Ranges count down, too, and include both ends.
        step = 1 if first <= last else -1
        items = [str(number) for number in range(first, last + step, step)]
    else:
        match = _LIST.fullmatch(text)
        if match is None:
            return (not_read,)
        items = match["items"].split(",")
    words = (f"{match['head']}{item}{match['tail']}" for item in items)
    return tuple(Word(word, where) for word in words if word)
