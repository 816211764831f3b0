from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import ModelError
from megatron_hetero.model.shell.lexer import commands
from megatron_hetero.model.shell.words import Command, WordPart

SCRIPT = Path("train.sh")


def _commands(text: str) -> list[Command]:
    return list(commands(SCRIPT, text))


def _texts(text: str) -> list[list[str]]:
    """Commands made of nothing but text."""
    return [["".join(p.text for p in w.pieces) for w in c.words] for c in _commands(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\nc", [["a", "b"], ["c"]]),
        ("a \\\n  b # comment it's\nc", [["a", "b"], ["c"]]),
        ("a#b 'c # d' \"e'f\"", [["a#b", "c # d", "e'f"]]),
        ("a; b && c || d | e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a > out 2>&1 < in", [["a"]]),
        ("a &> log\nb >>log 2>err c", [["a"], ["b", "c"]]),
        ("a 2 > x", [["a", "2"]]),
        ("cat <<END >x\n--junk it's $( \nEND\nb", [["cat"], ["b"]]),
        ("a <<-'E' b\n\tx\n\tE\nc", [["a", "b"], ["c"]]),
        ("f() { a; }", [["{", "a"], ["}"]]),
        ("a > >(tee x) b", [["a", "b"]]),
        ("a 'x\ny' b\r\nc", [["a", "x\ny", "b"], ["c"]]),
        ('a "x\\\ny" "\\$z" \\ \\#', [["a", "xy", "$z", " #"]]),
        ("", []),
        ("# only", []),
        ("a ''", [["a", ""]]),
    ],
)
def test_words_and_commands(text: str, expected: list[list[str]]) -> None:
    assert _texts(text) == expected


def test_expansions_are_pieces() -> None:
    (command,) = _commands('a$B "${C}x" "${D[@]}" ${E:-f $G} `date` $((1+2)) $1 $@ ${H%x}')
    pieces = [w.pieces for w in command.words]
    assert pieces[0] == (WordPart("text", "a"), WordPart("variable", "B"))
    assert command.words[0].splits and not command.words[1].splits
    assert pieces[1] == (WordPart("text", ""), WordPart("variable", "C"), WordPart("text", "x"))
    assert pieces[2][1] == WordPart("array", "D")
    assert pieces[3][0].default is not None
    assert WordPart("variable", "G") in pieces[3][0].default
    assert pieces[4] == (WordPart("unknown", "`date`"),)
    assert pieces[5] == (WordPart("unknown", "$((1+2))"),)
    assert pieces[6] == (WordPart("variable", "1"),)
    assert pieces[7] == (WordPart("array", "@"),)
    assert pieces[8] == (WordPart("unknown", "${H%x}"),)


def test_array_elements_span_lines() -> None:
    (command,) = _commands("A=(\n --x 1 # one\n\n --y 'b c'\n)\n")
    elements = command.words[0].elements
    assert elements is not None
    assert [("".join(p.text for p in e.pieces), e.line) for e in elements] == [
        ("--x", 2),
        ("1", 2),
        ("--y", 4),
        ("b c", 4),
    ]


def test_commands_after_and_and_or_are_conditional() -> None:
    assert [c.is_conditional for c in _commands("a && b || c; d\ne")] == [
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb 'c\nd", "train.sh:2: the quote ' is not closed"),
        ('a "b', 'train.sh:1: the quote " is not closed'),
        ("A=(\n--x", "train.sh:1: the bracket of this array is not closed; add )"),
        ("A=(a; b)", 'train.sh:1: ";" cannot stand inside an array'),
        ("a ${B", "train.sh:1: the brace of ${ is not closed; add }"),
        ("a $(b", "train.sh:1: the bracket is not closed; add )"),
        ("a `b", "train.sh:1: the backquote is not closed"),
    ],
)
def test_open_ends_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        _commands(text)
    assert str(error.value) == message


@given(st.lists(st.text(st.characters(exclude_characters="\r", codec="utf-8"), min_size=1)))
def test_quoted_words_come_back(words: list[str]) -> None:
    text = shlex.join(["command", *words])
    assert _texts(text) == [["command", *words]]


@given(st.text(alphabet="aB=$(){}[]'\"`\\<>|&;#@-+:/ \n1!?*", max_size=60))
def test_any_text_ends_in_commands_or_a_model_error(text: str) -> None:
    try:
        _commands(text)
    except ModelError as error:
        assert str(error).startswith("train.sh:")
