from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.of_plan import operations, order_of
from megatron_hetero.schedule.orders.interleaved import interleaved


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_equal_chunks_never_deadlock(
    num_stages: int, num_chunks: int, num_groups: int, more: int
) -> None:
    size = num_stages + more
    schedule = interleaved(list(range(num_stages)) * num_chunks, size * num_groups, size)
    check_schedule(schedule)


@st.composite
def chains(draw: st.DrawFn) -> list[int]:
    """Rounds over the stages, in which all but the first may leave out stages."""
    num_stages = draw(st.integers(2, 5))
    chain = list(range(num_stages))
    for _ in range(draw(st.integers(0, 3))):
        some = draw(st.sets(st.integers(0, num_stages - 1)))
        chain += [s for s in sorted(some) if s != chain[-1]]
    if chain[-1] != num_stages - 1:
        chain.append(num_stages - 1)
    return chain


@given(chains(), st.integers(1, 4))
def test_unlike_chunks_never_deadlock(chain: list[int], num_groups: int) -> None:
    check_schedule(interleaved(chain, (max(chain) + 1) * num_groups))


def test_orders_are_read_back() -> None:
    schedule = interleaved((0, 1, 0, 1), 4)
    text = order_of(schedule.programmes[0])
    assert text == "FFF1F1FB1FB1F1BF1BB1B1BB"
    computed = [o for i in schedule.programmes[0] for o in i if o.kind in ("forward", "backward")]
    assert list(operations(text)) == computed


@pytest.mark.parametrize(("micro_batches", "size"), [(4, 1), (1, None), (5, 4), (4, 5)])
def test_groups_that_would_wait_for_themselves_are_refused(
    micro_batches: int, size: int | None
) -> None:
    with pytest.raises(PlanFormatError, match="groups of 2 to"):
        interleaved((0, 1, 0, 1), micro_batches, size)
