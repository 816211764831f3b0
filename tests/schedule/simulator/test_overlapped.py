"""Stock Megatron's interleaved stages, in seconds that one can count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.parts import ChunkTimes, Crossing, Pipeline, Run, SendMode
from megatron_hetero.schedule.simulator.engine import run_step


def run(
    sends: SendMode,
    num_micro_batches: int,
    latency_s: float,
    times: tuple[ChunkTimes, ...],
    num_chunks: int = 2,
) -> Run:
    """Every boundary of the chain has a path to itself; messages take their latency alone."""
    chain = tuple(range(len(times))) * num_chunks
    crossings = [
        tuple(Crossing(((f"{way} {b}", 0.0),), latency_s) for b in range(len(chain) - 1))
        for way in ("forward", "backward")
    ]
    schedule = interleaved(chain, num_micro_batches)
    made = tuple((chunk,) * num_chunks for chunk in times)
    return run_step([Pipeline(schedule, made, *crossings, sends)])


def test_the_warm_up_waits_for_every_send_and_the_steady_state_for_forward_ones() -> None:
    """Two stages, two chunks, two micro-batches; a pass takes 1 s, a message 10 s."""
    found = run("overlapped", 2, 10.0, (ChunkTimes(1.0, 1.0),) * 2)
    starts = {
        stage: [(o.kind[0], o.micro_batch, o.chunk, o.start_s) for o in found.operations[0, stage]]
        for stage in (0, 1)
    }
    # Stage 0 launches all four ahead; each waits until the one before has arrived.
    assert starts[0][:2] == [("f", 0, 0, 0.0), ("f", 1, 0, 11.0)]
    # Stage 1 has the first at 11 s.  Its own warm-up is two passes long.
    assert starts[1][:2] == [("f", 0, 0, 11.0), ("f", 1, 0, 22.0)]
    # Micro-batch 0 is back at 22 s; stage 0 asks for it when its own second send is done, too.
    assert starts[0][2] == ("f", 0, 1, 22.0)
    ends = {mode: run(mode, 2, 10.0, (ChunkTimes(1.0, 1.0),) * 2).end_s
            for mode in ("buffered", "overlapped")}  # fmt: skip
    assert ends["buffered"] < ends["overlapped"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 3.0), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(2, 3),
    st.floats(0.0, 5.0),
)
def test_every_programme_ends_no_sooner_than_without_waiting(
    seconds: list[float], groups: int, num_chunks: int, latency_s: float
) -> None:
    times = tuple(ChunkTimes(s, 2 * s) for s in seconds)
    count = groups * len(seconds)
    free, waiting = (
        run(mode, count, latency_s, times, num_chunks) for mode in ("buffered", "overlapped")
    )
    assert waiting.end_s >= free.end_s - 1e-9
    for stage in range(len(seconds)):
        orders = [
            [(o.kind, o.micro_batch, o.chunk) for o in found.operations[0, stage]]
            for found in (free, waiting)
        ]
        assert orders[0] == orders[1]
    if latency_s == 0.0 and len(set(seconds)) == 1:
        assert waiting.end_s == pytest.approx(free.end_s)
