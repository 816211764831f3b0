from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.order import format_order, parse_order
from megatron_hetero.plan.plan import LayerRange
from tests.plan.edits import PLAN, with_replica, with_stage

passes = st.lists(st.tuples(st.sampled_from("FBIW"), st.integers(0, 12)))


@given(passes)
def test_an_order_is_read_as_it_was_written(order: list[tuple[str, int]]) -> None:
    assert list(parse_order(format_order(order))) == order  # type: ignore[arg-type]


def test_spaces_are_free() -> None:
    assert parse_order(" F F1\nB1 B ") == (("F", 0), ("F", 1), ("B", 1), ("B", 0))


@pytest.mark.parametrize(
    ("text", "says"),
    [("FFX", "'X' at character 3"), (" F F\nX", "'X' at character 6"), ("1F", "'1' at")],
)
def test_what_is_no_pass_is_named(text: str, says: str) -> None:
    with pytest.raises(PlanFormatError, match=says):
        parse_order(text)


def test_peak_of_an_order_counts_until_the_weight_gradients() -> None:
    order = "FFFI" + "FI" * 9 + "WI" + "WI" + "W" * 10
    plan = with_stage(with_stage(PLAN, 0, 0, order=order), 0, 1, order="FB" * 12)
    assert num_in_flight(plan, 0, 0) == 12
    assert num_in_flight(plan, 0, 1) == 1


def test_chunks_make_the_chain() -> None:
    assert chain(PLAN.replicas[0]) == (0, 1)
    plan = with_stage(PLAN, 0, 0, chunks=(LayerRange(0, 2), LayerRange(3, 3)))
    plan = with_stage(plan, 0, 1, chunks=(LayerRange(2, 1), LayerRange(6, 2)), first_layer=2)
    two = "FF1" * 12 + "B1B" * 12
    stages = [with_stage(plan, 0, s, order=two).replicas[0].stages[s] for s in (0, 1)]
    plan = with_replica(plan, 0, stages=tuple(stages))
    assert chain(plan.replicas[0]) == (0, 1, 0, 1)
    validate_plan(plan)
    assert num_in_flight(plan, 0, 0) == 12
