from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.model.shell.arithmetic import evaluated
from megatron_hetero.model.shell.values import Word, unknown

KNOWN = {"A": "3", "B": "010", "TEXT": "abc", "EMPTY": "", "NEGATIVE": "-2"}


def _value_of(name: str) -> Word:
    if name in KNOWN:
        return Word(KNOWN[name], "s:1")
    return unknown("s:1", f"${name}", "is not set in the script")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("2 ** 3 ** 2", 512), ("-2 ** 2", 4), ("7 / -2", -3),
        ("-7 % 3", -1), ("A * A - A", 6), ("B", 8), ("0x1F", 31), ("NEGATIVE * -1", 2), ("", 0),
        ("- - 4", 4), ("8 - 4 - 2", 2), ("2 ** 62", 1 << 62),
        ("A ? 1 : 2", 1), ("A > 3 ? 1 / 0 : 2", 2), ("A == 3 && B <= 8 || UNSET", 1), ("!A", 0),
        ("EMPTY + 1", 1), ("1 << 4 | 1", 17), ("~0", -1), ("0 && UNSET", 0), ("7 & 5 ^ 1", 4),
    ],
)  # fmt: skip
def test_values(text: str, value: int) -> None:
    word = evaluated(text, "s:7", _value_of)
    assert (word.text, word.where, word.reason) == (str(value), "s:7", "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A / 0", "$((A / 0)) is a division by zero"),
        ("2 ** 64", "$((2 ** 64)) is beyond 64 bits"),
        ("2 ** 62 * 4", "$((2 ** 62 * 4)) is beyond 64 bits"),
        ("2 ** -1", "$((2 ** -1)) is beyond 64 bits"),
        ("A = 4", "$((A = 4)) is not run"),
        ("$(nproc) * 2", "$(($(nproc) * 2)) is not run"),
        ("(1", "$(((1)) is not run"),
        ("1 2", "$((1 2)) is not run"),
        ("08", "$((08)) is not run"),
        ("1_000", "$((1_000)) is not run"),
        ("0o17", "$((0o17)) is not run"),
        ("0x1_0", "$((0x1_0)) is not run"),
        ("TEXT + 1", '$((TEXT + 1)) has TEXT, which is "abc"'),
        ("A ? UNSET : 2", "$UNSET is not set in the script"),
        ("UNSET * 2", "$UNSET is not set in the script"),
        ("1" + "+1" * 200, "$((1" + "+1" * 200 + ")) is not run"),
    ],
)
def test_what_is_not_known_says_why(text: str, reason: str) -> None:
    word = evaluated(text, "s:7", _value_of)
    assert (word.text, word.reason) == (None, reason)


@pytest.mark.parametrize(
    ("text", "value"), [("a += a = 2", "5"), ("a -= a++", "0"), ("a = a + 1", "4")]
)
def test_an_assignment_reads_its_left_side_first(text: str, value: str) -> None:
    held = {"a": Word("3", "s:1")}

    def assign(name: str, number: str) -> None:
        held[name] = Word(number, "s:7")

    assert evaluated(text, "s:7", held.__getitem__, assign).text == value
    assert held["a"].text == value


@given(st.text(alphabet="A1 0x+-*/%()${}9", max_size=40))
def test_any_text_is_a_number_or_a_reason(text: str) -> None:
    word = evaluated(text, "s:7", _value_of)
    assert (word.text is None) == bool(word.reason)


def test_assignments_reach_the_script() -> None:
    held = {"N": "4"}
    found = evaluated(
        "N += 2, M = N++ * 2", "s:7", lambda name: Word(held[name], ""), held.__setitem__
    )
    assert found.text == "12"
    assert held == {"N": "7", "M": "12"}
    evaluated("1 ? 2 : (N = 9)", "s:7", lambda name: Word(held[name], ""), held.__setitem__)
    assert held["N"] == "7"
