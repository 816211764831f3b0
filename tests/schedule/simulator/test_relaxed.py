"""The relaxed run beside the simulation of a pipeline that shares no path: equal."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import stage_ends_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.parts import ChunkTimes, Crossing, Pipeline, SendMode
from megatron_hetero.schedule.programme import Operation, Schedule
from megatron_hetero.schedule.simulator.engine import run_step
from megatron_hetero.schedule.simulator.relaxed import RelaxedRun


def test_buffered_sends_take_the_seconds_of_1f1b() -> None:
    rng = Random(1)
    for _ in range(60):
        n, m = rng.randint(2, 6), rng.randint(1, 20)
        divisions = [[PassTimes(rng.random(), rng.random()) for _ in range(n)] for _ in range(3)]
        there, back = ([(rng.random(), rng.random()) for _ in range(n - 1)] for _ in "ab")
        times = [
            [(np.array([d[s].forward_s for d in divisions]),
              np.array([d[s].backward_s for d in divisions]))]
            for s in range(n)
        ]  # fmt: skip
        begins, found = RelaxedRun(one_f_one_b(n, m), "buffered").spans_s(times, there, back)
        there_s, back_s = (
            [BoundaryTime(serialisation_s=busy, latency_s=latency) for busy, latency in of]
            for of in (there, back)
        )
        for k, stages in enumerate(divisions):
            # Here a stage also ends no sooner than its last send arrives.
            ends = np.array(stage_ends_s(stages, there_s, back_s, m))
            assert found[0, k] == pytest.approx(ends[0], rel=1e-12)
            assert (found[:, k] >= ends * (1 - 1e-12)).all()
            # Gradients: the first stage's within its last backward pass, the others' behind it.
            wanted = [ends[0] - stages[0].backward_s, *ends[1:]]
            assert begins[:, k] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("sends", "chunks"), [("waited", 1), ("buffered", 3), ("overlapped", 2), ("overlapped", 4)]
)
def test_stages_that_share_no_path_end_as_simulated(sends: SendMode, chunks: int) -> None:
    """Boundaries between the same two stages are one path, chunk by chunk."""
    rng = Random(chunks)
    for _ in range(25):
        n = rng.randint(2, 5)
        m = n * rng.randint(1, 4)
        order = one_f_one_b(n, m) if chunks == 1 else interleaved(tuple(range(n)) * chunks, m)
        times = tuple(
            tuple(ChunkTimes(rng.random(), rng.random()) for _ in range(chunks)) for _ in range(n)
        )
        links = {
            (a, b): (0.4 * rng.random(), 0.2 * rng.random()) for a in range(n) for b in range(n)
        }
        pairs = list(pairwise(order.chain))
        there, back = [links[p] for p in pairs], [links[b, a] for a, b in pairs]
        crossings = [
            tuple(Crossing(((f"{a} to {b}", links[a, b][0]),), links[a, b][1]) for a, b in ends)
            for ends in (pairs, [(b, a) for a, b in pairs])
        ]
        run = run_step([Pipeline(order, times, crossings[0], crossings[1], sends)])
        _, found = RelaxedRun(order, sends).spans_s(
            [
                [(np.array([c.forward_s]), np.array([c.backward_input_s])) for c in own]
                for own in times
            ],
            there,
            back,
        )
        assert found.max() == pytest.approx(run.end_s, rel=1e-12)


def test_a_stage_that_waits_for_ever_is_refused() -> None:
    receive = Operation("recv_forward", 0)
    forward = Operation("forward", 0)
    programmes = (((forward,),), ((receive,), (forward,)))
    with pytest.raises(CheckFailedError, match="stage 1 waits for ever"):
        RelaxedRun(Schedule(programmes, 1), "buffered")


def test_a_split_backward_pass_is_refused() -> None:
    split = Operation("backward_input", 0)
    with pytest.raises(CheckFailedError, match="backward_input"):
        RelaxedRun(Schedule((((split,),),), 1), "buffered")
