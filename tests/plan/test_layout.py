"""The layout line: grammar, bounds, messages with a caret, and the round trip."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.layout import MAX_LAYOUT_CHARACTERS, format_layout, parse_layout
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape
from tests.plan.strategies import layouts


def test_the_example_of_the_documentation() -> None:
    layout = parse_layout("tp4:20,tp2:12 @12 | tp1:16,tp1:16 @4")
    assert layout == Layout(
        (
            ReplicaShape((StageShape(4, 20), StageShape(2, 12)), 12),
            ReplicaShape((StageShape(1, 16), StageShape(1, 16)), 4),
        )
    )
    assert format_layout(layout) == "tp4:20,tp2:12 @12 | tp1:16,tp1:16 @4"
    assert layout.num_devices == 8


def test_shares_and_micro_batch_size() -> None:
    layout = parse_layout("tp4(3:2:2:1):20@3x2")
    assert layout == Layout((ReplicaShape((StageShape(4, 20, (3, 2, 2, 1)),), 3, 2),))
    assert format_layout(layout) == "tp4(3:2:2:1):20 @3x2"


def test_shares_of_sequences() -> None:
    layout = parse_layout("tp2(5:3)cp2(3:1)ep2:8z1 @4")
    shape = StageShape(2, 8, (5, 3), 2, (1, 1), 1, (3, 1))
    assert layout == Layout((ReplicaShape((shape,), 4),))
    assert format_layout(layout) == "tp2(5:3)cp2(3:1)ep2:8z1 @4"
    assert shape.uneven_context_shares == (3, 1)
    # What divides evenly is what the size alone says.
    assert parse_layout("tp1cp2(1:1):4 @1").replicas[0].stages[0].uneven_context_shares is None


@given(layouts)
def test_parse_inverts_format(layout: Layout) -> None:
    assert parse_layout(format_layout(layout)) == layout


@given(layouts, st.randoms(use_true_random=False))
def test_spaces_and_leading_zeros_are_free(layout: Layout, rng: random.Random) -> None:
    canonical = format_layout(layout)
    tokens = re.findall(r"tp|cp|[0-9]+|[^\s]", canonical)
    loose = "".join(
        ("0" if token.isdigit() and rng.random() < 0.3 else "")
        + token
        + rng.choice(["", " ", "\t", "\n  "])
        for token in tokens
    )
    assert format_layout(parse_layout(loose)) == canonical


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "expected a stage"),
        ("tp4", 4, "expected ':' and the stage's number of layers; the layout ends here"),
        ("tp4:20", 7, "'@' and the replica's number of micro-batches"),
        ("tp4:20, @4", 9, "expected a stage"),
        ("tp4:20 @", 9, "expected a number of micro-batches"),
        ("tp4:20 @4 tp", 11, "expected '|' and another replica"),
        ("tp4:20 @4 |", 12, "expected a stage"),
        ("tp4:20 @4 x", 12, "expected a micro-batch size"),
        ("TP4:20 @4", 1, "expected a stage, for example 'tp4:20'"),
        ("tp0:20 @4", 3, "from 1 to 1024, not 0"),
        ("tp1025:20 @4", 3, "from 1 to 1024, not 1025"),
        ("tp4:0 @4", 5, "a number of layers after ':' from 1"),
        ("tp4:20 @0", 9, "not 0"),
        ("tp4:-1 @4", 5, "found '-'"),
        ("tp2(3:1:1):4 @1", 4, "takes 2 shares, not 3"),
        ("tp2cp:4 @1", 6, "expected a context-parallel size after 'cp'"),
        ("tp2cp0:4 @1", 6, "a context-parallel size after 'cp' from 1 to 1024, not 0"),
        ("cp2:4 @1", 1, "expected a stage"),
        ("tp2cp2(3:1:1):4 @1", 7, "a stage of context-parallel size 2 takes 2 shares, not 3"),
        ("tp2cp2(3:0):4 @1", 10, "a share from 1 to 1024, not 0"),
        ("tp2cp2(3:1:4 @1", 14, "or ')'"),
        ("tp2(3:0):4 @1", 7, "a share from 1 to 1024, not 0"),
        ("tp2(3:1:4 @1", 11, "or ')'"),
        ("tp1:4z @1", 8, "expected a number of sharded layers after 'z'"),
        ("tp1:4z5 @1", 7, "a number of sharded layers after 'z' from 1 to 4, not 5"),
        ("tp²:4 @1", 3, "expected a tensor-parallel width"),
        ("tp" + "9" * 5000 + ":1 @1", 3, "not 99999999999999999..."),
        (",".join(["tp1024:1"] * 65) + " @1", 588, "at most 65536 are allowed"),
    ],
)
def test_errors_point_at_the_place(text: str, column: int, says: str) -> None:
    with pytest.raises(PlanFormatError) as caught:
        parse_layout(text)
    message, line, caret = str(caught.value).split("\n")
    assert message.startswith(f"layout, column {column}: ")
    assert says in message
    assert caret.endswith("^")
    pointed_at = line[len(caret) - 1 :].removesuffix("...")
    assert text[column - 1 :].startswith(pointed_at)


def test_text_too_long_is_refused_unread() -> None:
    with pytest.raises(PlanFormatError, match="characters long; at most 65536"):
        parse_layout("tp1:1 @1 |" * (MAX_LAYOUT_CHARACTERS // 10 + 1))


@given(st.text(alphabet="tp0123456789:,@|xz() \n\x1b-é", max_size=60))
def test_any_text_parses_or_is_refused_in_three_printable_lines(text: str) -> None:
    try:
        parse_layout(text)
    except PlanFormatError as error:
        lines = str(error).split("\n")
        assert len(lines) == 3
        assert all(line.isprintable() for line in lines)
