"""Texts that nobody meant: sound ones with random damage, and pieces of bad ideas."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = (
    *(
        "\x00",
        "\x1b[31m",
        "\r",
        "\n",
        "\n\n",
        "\t",
        " ",
        "\\",
        "\\\n",
        "'",
        '"',
        "`",
        "#",
        "\ufeff",
    ),
    *(
        "$(touch pwned)",
        "`touch pwned`",
        "${x:-$(id)}",
        "${",
        "$((1",
        ";rm -rf x;",
        "&&",
        "||",
        "|",
    ),
    *("<<EOF", ">pwned", "2>&1", "()", "(", ")", "[", "]", "{", "}", "{{}}", "[[", "*", "~", "!"),
    *("&a", "*a", "<<: *a", "!!python/object/apply:os.system [id]", "!!binary", "? ", "- ", ": "),
    *("---\n", "...\n", "%YAML 1.2\n", "null", "true", ".nan", "-.inf", "NaN", "Infinity", "1e999"),
    *(
        "-1",
        "0",
        "00",
        "1_000",
        "0x10",
        "0o7",
        "9" * 25,
        "9" * 5000,
        "1e-400",
        "²",
        "٣",
        "\uff11\uff12",
        "½",
    ),
    *(
        "-",
        "--",
        "--spec os system",
        "--load=/x",
        "-oProxyCommand=x",
        "../../etc/passwd",
        "/dev/zero",
    ),
    *(
        "${oc.env:HOME}",
        "${now:%Y}",
        "${a}",
        "${a.b}",
        "_target_: os.system",
        "auto_map",
        "@",
        "@@",
    ),
    *(
        "é",
        "\u202e",
        "\ud7ff",
        "\U0001d7d9",
        "İ",
        "ß",
        "A" * 300,
        "a" * 70,
        "x@y",
        ",",
        "=",
        ":",
        "::",
        "'" * 9,
    ),
)


def damaged(sound: Sequence[str], chance: random.Random) -> str:
    """A sound text with one to six random changes; sometimes none of it is left."""
    if not sound or chance.random() < 0.05:
        return "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
    text = chance.choice(sound)
    for _ in range(chance.randint(1, 6)):
        text = chance.choice(_CHANGES)(text, chance, sound)
    return text


def word(chance: random.Random) -> str:
    """A short hostile word: pieces of bad ideas around a harmless one."""
    parts = [
        *chance.choices(PIECES, k=chance.randint(0, 3)),
        chance.choice(("job", "a1", "x.y", "")),
    ]
    chance.shuffle(parts)
    return "".join(parts)


def _span(text: str, chance: random.Random) -> tuple[int, int]:
    start = chance.randint(0, len(text))
    return start, min(len(text), start + int(chance.expovariate(1 / 8)))


def _remove(text: str, chance: random.Random, _: Sequence[str]) -> str:
    start, stop = _span(text, chance)
    return text[:start] + text[stop:]


def _insert(text: str, chance: random.Random, _: Sequence[str]) -> str:
    start, _stop = _span(text, chance)
    return text[:start] + chance.choice(PIECES) + text[start:]


def _put(text: str, chance: random.Random, _: Sequence[str]) -> str:
    start, stop = _span(text, chance)
    return text[:start] + chance.choice(PIECES) + text[stop:]


def _repeat(text: str, chance: random.Random, _: Sequence[str]) -> str:
    start, stop = _span(text, chance)
    return text[:start] + text[start:stop] * chance.choice((2, 3, 100)) + text[stop:]


def _nest(text: str, chance: random.Random, _: Sequence[str]) -> str:
    start, stop = _span(text, chance)
    opening, closing = chance.choice(
        (
            ("[", "]"),
            ("{a: ", "}"),
            ('{"a":', "}"),
            ('"$(', ')"'),
            ("${a:-", "}"),
            ("(", ")"),
            ("- ", ""),
        )
    )
    depth = chance.choice((1, 3, 40, 1500))
    return text[:start] + opening * depth + text[start:stop] + closing * depth + text[stop:]


def _cut(text: str, chance: random.Random, _: Sequence[str]) -> str:
    return text[: chance.randint(0, len(text))]


def _splice(text: str, chance: random.Random, sound: Sequence[str]) -> str:
    other = chance.choice(sound)
    return text[: chance.randint(0, len(text))] + other[chance.randint(0, len(other)) :]


def _lines(text: str, chance: random.Random, _: Sequence[str]) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        i, j = (chance.randrange(len(lines)) for _ in range(2))
        lines[i], lines[j] = lines[j], chance.choice((lines[i], lines[j]))
    return "".join(lines)


_CHANGES = (_remove, _insert, _insert, _put, _put, _put, _repeat, _nest, _cut, _splice, _lines)
