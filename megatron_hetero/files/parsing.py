"""YAML events and JSON tokens, fed to a `DocumentBuilder`.

Both work on syntax alone: no constructor, no resolver and no tag of a library is in the path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from megatron_hetero.files.document import DocumentBuilder

# More digits than any number of a file needs; converting very long ones takes quadratic time.
MAX_DIGITS = 40

# YAML 1.2 core schema: `NO` and `12:30:45` are text, `1e9` is a number.
_YAML_NULL = re.compile(r"|~|null|Null|NULL")
_YAML_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_YAML_INT = re.compile(r"[-+]?[0-9]+")
_YAML_RADIX_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_YAML_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

# One match a token, with the white space before it: a file may have a million tokens.  What stands
# in a string is never given back (`*+`): to remember every escape takes gigabytes.
_JSON_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]*)(?:"
    r"(?P<punctuation>[{}\[\],:])"
    r'|"(?P<plain>[^"\\\x00-\x1f]*)"'
    r'|(?P<string>"(?:[^"\\\x00-\x1f]|\\.)*+")'
    r"|(?P<integer>-?(?:0|[1-9][0-9]*))(?![0-9.a-zA-Z_])"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9.a-zA-Z_])"
    r"|(?P<word>-?[A-Za-z_]+)"
    r"|(?P<end>\Z))?"
)
_JSON_WORDS = {"true": True, "false": False, "null": None}
_JSON_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}

_Token = tuple[Literal["punctuation", "scalar", "end"], Any, int]


def feed_yaml(builder: DocumentBuilder, text: str) -> None:
    """Read YAML 1.2 text into `builder`."""
    from ruamel.yaml import YAML  # a tenth of a second that reading JSON need not pay
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    # The parser yields events; nothing constructs objects from them.
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            _feed_yaml_event(builder, event)
    # Most errors have a mark, which counts lines from 0.
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        builder.fail(line, f"not valid YAML: {error.problem or error.context}")
    except YAMLError as error:
        builder.fail(1, f"not valid YAML: {str(error).splitlines()[0]}")


def _feed_yaml_event(builder: DocumentBuilder, event: Any) -> None:
    from ruamel.yaml import events

    line = event.start_mark.line + 1
    if isinstance(event, events.AliasEvent):
        builder.fail(line, f"the alias *{event.anchor} is not allowed; write the value out")
    if getattr(event, "anchor", None) is not None:
        builder.fail(line, f"the anchor &{event.anchor} is not allowed; write the values out")
    if getattr(event, "tag", None) is not None:
        builder.fail(line, f"the tag {event.tag} is not allowed; remove it")

    # Content: an end, a scalar (key or value), a begin of a container.
    if isinstance(event, events.MappingEndEvent | events.SequenceEndEvent):
        builder.end()
    elif isinstance(event, events.ScalarEvent):
        # Quoted text stays text; only plain scalars may be numbers, booleans or null.
        value = event.value if event.style else _plain_yaml_value(builder, event.value, line)
        if not builder.expects_key:
            builder.scalar(value, line)
        elif value == "<<" and not event.style:
            builder.fail(line, "the merge key << is not allowed; write the values out")
        else:
            builder.key(value, line)
    elif isinstance(event, events.CollectionStartEvent):
        if builder.expects_key:
            builder.fail(line, "a list or mapping is used as a key; a key is text")
        builder.begin({} if isinstance(event, events.MappingStartEvent) else [], line)


def _plain_yaml_value(builder: DocumentBuilder, text: str, line: int) -> Any:
    """Read an unquoted scalar by the core schema."""
    # In the order of the core schema, integers before floats.
    if _YAML_NULL.fullmatch(text):
        return None
    if _YAML_BOOL.fullmatch(text):
        return text.lower() == "true"
    if _YAML_INT.fullmatch(text):
        return _int(builder, text, 10, line)
    if _YAML_RADIX_INT.fullmatch(text):
        return _int(builder, text, 0, line)
    if _YAML_FLOAT.fullmatch(text):
        return float(text)
    if _YAML_NOT_FINITE.fullmatch(text):
        return math.nan  # one refusal for all of them, in the builder
    return text


def feed_json(builder: DocumentBuilder, text: str) -> None:
    """Read JSON text (RFC 8259) into `builder`."""
    tokens = _json_tokens(builder, text)
    # One value, and nothing behind it.
    _feed_json_value(builder, tokens, next(tokens))
    kind, _, line = next(tokens)
    if kind != "end":
        builder.fail(line, "something follows the end of the JSON value; remove it")


def _feed_json_value(builder: DocumentBuilder, tokens: Iterator[_Token], token: _Token) -> None:
    kind, value, line = token
    if kind == "scalar":
        builder.scalar(value, line)
    elif value == "{":
        builder.begin({}, line)
        _feed_json_members(builder, tokens)
    elif value == "[":
        builder.begin([], line)
        _feed_json_items(builder, tokens)
    else:
        builder.fail(line, f"not valid JSON: expected a value, found {_name(token)}")


def _feed_json_members(builder: DocumentBuilder, tokens: Iterator[_Token]) -> None:
    token = next(tokens)
    # A scalar may be the text "}", so the kind counts too.
    while token[1] != "}" or token[0] != "punctuation":
        kind, key, line = token
        if kind != "scalar" or not isinstance(key, str):
            builder.fail(line, f"not valid JSON: expected a key in quotes, found {_name(token)}")
        builder.key(key, line)
        _expect(builder, next(tokens), ":")
        _feed_json_value(builder, tokens, next(tokens))
        if _expect(builder, next(tokens), ",", "}") == "}":
            break
        token = next(tokens)
        # JSON has no comma before the end.
        if token[:2] == ("punctuation", "}"):
            builder.fail(token[2], "not valid JSON: a comma stands before }; remove it")
    builder.end()


def _feed_json_items(builder: DocumentBuilder, tokens: Iterator[_Token]) -> None:
    token = next(tokens)
    while token[:2] != ("punctuation", "]"):
        _feed_json_value(builder, tokens, token)
        if _expect(builder, next(tokens), ",", "]") == "]":
            break
        token = next(tokens)
        if token[:2] == ("punctuation", "]"):
            builder.fail(token[2], "not valid JSON: a comma stands before ]; remove it")
    builder.end()


def _expect(builder: DocumentBuilder, token: _Token, *allowed: str) -> str:
    kind, value, line = token
    if kind != "punctuation" or value not in allowed:
        expected = " or ".join(allowed)
        builder.fail(line, f"not valid JSON: expected {expected}, found {_name(token)}")
    return str(value)


def _json_tokens(builder: DocumentBuilder, text: str) -> Iterator[_Token]:
    """Yield tokens with their lines; after the last one, "end" for ever."""
    position, line = 0, 1
    while True:
        match = _JSON_TOKEN.match(text, position)
        # The pattern matches the empty string, and always its white space.
        assert match is not None and match.lastgroup is not None
        # Lines are counted in the white space: no other token of JSON has a line break.
        if match.end("space") > position:
            line += text.count("\n", position, match.end("space"))
        form = match.lastgroup
        if form == "space":
            at = match.end()
            builder.fail(line, f"not valid JSON: unexpected {text[at : at + 20]!r}")
        position = match.end()
        if form == "punctuation":
            yield "punctuation", match["punctuation"], line
        elif form == "end":
            yield "end", None, line
        else:
            yield "scalar", _json_scalar(builder, form, match[form], line), line


def _json_scalar(builder: DocumentBuilder, form: str, text: str, line: int) -> Any:
    """Return the value of a token that matched the group `form` of `_JSON_TOKEN`."""
    if form == "plain":
        return text
    # Escapes are the library's to read.
    if form == "string":
        try:
            return json.loads(text)
        except ValueError as error:
            builder.fail(line, f"not valid JSON: {error}")
    # An exact integer, unless the number has a point or an exponent.
    if form == "integer":
        return _int(builder, text, 10, line)
    if form == "number":
        return float(text)
    # The builder refuses it as it does YAML's.
    if text in _JSON_NOT_FINITE:
        return float(text)
    if text not in _JSON_WORDS:
        builder.fail(line, f'not valid JSON: "{text}" is not a value; text stands in quotes')
    return _JSON_WORDS[text]


def _int(builder: DocumentBuilder, text: str, base: int, line: int) -> int:
    if len(text) > MAX_DIGITS:
        builder.fail(line, f"a number of {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text, base)


def _name(token: _Token) -> str:
    kind, value, _ = token
    return "the end of the file" if kind == "end" else repr(value)
