"""The simulator against queues whose waiting times are known."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.problem import Wire
from megatron_hetero.serving.prices.cache import CacheGroups, CachePool
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.router import Policy
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.simulate.transfer import Transfers
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
)


class ByToken:
    """Steps that take a millisecond for each token, and nothing else."""

    def times(self, work: StepWork) -> tuple[float, float]:
        return work.tokens * 1e-3, work.tokens * 1e-3


MIX = RequestMix((RequestClass("w", 1.0, TokenLengths(((100, 1.0),)), TokenLengths(((1, 1.0),))),))


def _server(max_sequences: int = 1, kv_tokens: int = 1 << 20) -> SimulatedReplica:
    queue = ReplicaQueue(
        ByToken(), CachePool.of_tokens(kv_tokens, 1), max_batched_tokens=1 << 20,
        max_sequences=max_sequences,
    )  # fmt: skip
    return SimulatedReplica(queue, "both", "-", (1.0,))


def _poisson(number: int, rate: float, draw_tokens: random.Random | None) -> list[Request]:
    rng = random.Random(1)
    now, requests = 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        tokens = 100 if draw_tokens is None else max(1, round(draw_tokens.expovariate(1 / 1000)))
        requests.append(Request(now, 0, tokens, 1))
    return requests


def _waiting_s(requests: list[Request], num_servers: int, policy: Policy) -> float:
    run = FleetRun([_server() for _ in range(num_servers)], MIX, policy=policy)
    outcome = run.run(requests)
    served = sum(r.input_tokens for r in requests) * 1e-3 / len(requests)
    return outcome.overall.first_token_s.mean - served


def _standard_error(relative_variance: float, load: float, number: int) -> float:
    return math.sqrt(relative_variance * 2 * (1 + load / (1 - load) ** 2) / number)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_one_replica_of_fixed_service_waits_as_m_d_1(load: float) -> None:
    service_s, number = 0.1, 40_000
    requests = _poisson(number, load / service_s, None)
    waited_s = _waiting_s(requests, 1, "least-load")
    # Of this very sample, by Lindley's recursion.
    waits, wait = [], 0.0
    for before, after in pairwise([*requests, requests[-1]]):
        waits.append(wait)
        wait = max(0.0, wait + service_s - (after.arrival_s - before.arrival_s))
    assert waited_s == pytest.approx(sum(waits) / number, abs=1e-9)
    # In the mean, by Pollaczek and Khinchine, within three standard errors of such a sample: waits
    # vary as their second moment says, and depend on each other over load / (1 - load)^2 services.
    expected_s = load * service_s / (2 * (1 - load))
    square = 2 * expected_s**2 + load * service_s**2 / (3 * (1 - load))
    error = _standard_error(square / expected_s**2 - 1, load, number)
    assert waited_s == pytest.approx(expected_s, rel=3 * error)


@pytest.mark.parametrize(("num_servers", "load"), [(1, 0.6), (3, 0.8), (5, 0.7)])
def test_replicas_behind_one_queue_wait_as_m_m_c(num_servers: int, load: float) -> None:
    """Erlang's C formula; services are exponential in milliseconds."""
    service_s = 1.0
    rate = load * num_servers / service_s
    requests = _poisson(40_000, rate, random.Random(2))
    offered = rate * service_s
    below = sum(offered**k / math.factorial(k) for k in range(num_servers))
    last = offered**num_servers / math.factorial(num_servers) / (1 - load)
    expected_s = last / (below + last) / (num_servers / service_s - rate)
    waiting = last / (below + last)
    error = _standard_error((2 - waiting) / waiting, load, len(requests))
    waited_s = _waiting_s(requests, num_servers, "one-queue")
    assert waited_s == pytest.approx(expected_s, rel=3 * error)


def test_a_prompt_begins_when_all_of_it_has_room() -> None:
    """As vLLM's `scheduler_reserve_full_isl`: else it is thrown out half done, again and again."""
    queue = ReplicaQueue(ByToken(), CachePool.of_tokens(110, 1), max_batched_tokens=16)
    requests = [Request(0.0, 0, 60, 20), Request(1e-6, 0, 60, 20)]
    outcome = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], MIX).run(requests)
    assert outcome.num_preemptions == 0
    # One behind the other: 60 tokens of the prompt and 19 more of the answer.
    assert outcome.seconds == pytest.approx(2 * 79e-3)
    assert queue.free_blocks == queue.pool.num_blocks


def test_prompts_under_way_keep_the_room_that_they_began_with() -> None:
    queue = ReplicaQueue(ByToken(), CachePool.of_tokens(110, 1), max_batched_tokens=16, num_lanes=2)
    requests = [Request(0.0, 0, 60, 20), Request(1e-6, 0, 60, 20)]
    outcome = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], MIX).run(requests)
    assert outcome.num_preemptions == 0


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    queue = ReplicaQueue(ByToken(), CachePool.of_tokens(10_000), max_batched_tokens=64)
    outcome = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], MIX).run(
        [Request(2.0, 0, 200, 11)]
    )
    assert outcome.overall.first_token_s.mean == pytest.approx(0.2)
    assert outcome.overall.between_tokens_s.mean == pytest.approx(1e-3)
    assert outcome.seconds == pytest.approx(0.21)
    assert queue.free_blocks == queue.pool.num_blocks


def test_memory_bounds_the_batch_and_preempted_requests_end_with_all_their_tokens() -> None:
    queue = ReplicaQueue(ByToken(), CachePool.of_tokens(480), max_batched_tokens=512)
    requests = [Request(0.001 * i, 0, 100, 120) for i in range(8)]
    outcome = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], MIX).run(requests)
    assert outcome.num_preemptions > 0
    assert outcome.overall.num_requests == 8
    assert outcome.tokens_per_s * outcome.seconds == pytest.approx(8 * 120)
    assert queue.free_blocks == queue.pool.num_blocks


def test_a_shared_prefix_is_computed_once() -> None:
    def seconds(shared: int) -> float:
        queue = ReplicaQueue(ByToken(), CachePool.of_tokens(100_000), shared_tokens=(shared,))
        replica = SimulatedReplica(queue, "both", "-", (1.0,))
        requests = [Request(10.0 * i, 0, 1000, 1) for i in range(5)]
        return FleetRun([replica], MIX).run(requests).overall.first_token_s.mean

    assert seconds(0) == pytest.approx(1.0)
    # 800 tokens are 50 blocks: the first request computes them, four do not.
    assert seconds(800) == pytest.approx((1.0 + 4 * 0.2) / 5)


def test_a_kept_prefix_gives_way_to_a_request_that_needs_its_blocks() -> None:
    # The prefix of "a" takes 800 tokens of 2,400, and a request of "b" needs 2,300 at its end.
    queue = ReplicaQueue(ByToken(), CachePool.of_tokens(2400), shared_tokens=(800, 0))
    mix = RequestMix(
        tuple(
            RequestClass(name, 1.0, TokenLengths(((i, 1.0),)), TokenLengths(((o, 1.0),)))
            for name, i, o in (("a", 1000, 10), ("b", 1500, 800))
        )
    )
    run = FleetRun([SimulatedReplica(queue, "both", "-", (1.0, 1.0))], mix)
    outcome = run.run([Request(0.0, 0, 1000, 10), Request(50.0, 1, 1500, 800)])
    assert [c.num_requests for c in outcome.classes] == [1, 1]
    assert outcome.num_preemptions == 0


def test_keys_and_values_wait_for_a_wire_that_others_use() -> None:
    def replica(phase: str, place: str) -> SimulatedReplica:
        queue = ReplicaQueue(
            ByToken(), CachePool.of_tokens(1 << 20), stops_after_prefill=phase == "prefill"
        )
        return SimulatedReplica(queue, phase, place, (1.0,))

    fleet = [replica("prefill", "a"), replica("prefill", "a"), replica("decode", "b")]
    wire = Wire("a to b", frozenset({("a", "b")}), 1000.0)
    transfers = Transfers([wire], {("a", "b"): Link(1000.0, 0.5)})
    run = FleetRun(fleet, MIX, transfers, hand_over_bytes=lambda tokens: 10.0 * tokens)
    outcome = run.run([Request(0.0, 0, 100, 2), Request(0.0, 0, 100, 2)])
    # Both prefill for 0.1 s; one sends for 1 s, then the other; half a second of latency; a step
    # of the last prompt token gives the first token.
    assert outcome.overall.first_token_s.p50 == pytest.approx(0.1 + 1.0 + 0.5 + 0.001)
    assert outcome.overall.first_token_s.p99 == pytest.approx(0.1 + 2.0 + 0.5 + 0.001)


def test_keys_and_values_go_where_the_plan_sends_them() -> None:
    """Two places that hand over inside alone, over a wire between them that carries nothing."""

    def replica(phase: str, place: str) -> SimulatedReplica:
        queue = ReplicaQueue(
            ByToken(), CachePool.of_tokens(100_000), stops_after_prefill=phase == "prefill"
        )
        return SimulatedReplica(queue, phase, place, (1.0,))

    replicas = [replica(phase, place) for place in "ab" for phase in ("prefill", "decode")]
    pairs = [(one, other) for one in "ab" for other in "ab"]
    wires = tuple(
        Wire(f"{a}{b}", frozenset({(a, b)}), 1e9 if a == b else 1e3) for a, b in pairs
    )  # fmt: skip
    requests = [Request(0.5 * i, 0, 100, 1) for i in range(20)]

    def last_s(flows: dict[tuple[str, str, int], float] | None) -> float:
        links = {(w.name[0], w.name[1]): Link(w.bytes_per_s, 0.0) for w in wires}
        run = FleetRun(replicas, MIX, Transfers(wires, links), lambda n: 1e3 * n, flows=flows)
        return run.run(requests).overall.total_s.p99

    # Prefill 0.1 s, the transfer 0.1 ms, a step of a token.
    assert last_s({("a", "a", 0): 1.0, ("b", "b", 0): 1.0}) == pytest.approx(0.1011)
    # From "a" three times as often to "b", at 100 s each.
    assert last_s({("a", "b", 0): 3.0, ("a", "a", 0): 1.0, ("b", "b", 0): 1.0}) > 100.0


def test_a_pipeline_overlaps_its_batches() -> None:
    class TwoStages:
        def times(self, work: StepWork) -> tuple[float, float]:
            return 0.2, 0.1

    def seconds(num_lanes: int) -> float:
        queue = ReplicaQueue(
            TwoStages(), CachePool.of_tokens(1 << 20), num_lanes=num_lanes, max_sequences=2
        )
        queue.budget = 10
        replica = SimulatedReplica(queue, "both", "-", (1.0,))
        return FleetRun([replica], MIX).run([Request(0.0, 0, 10, 50)] * 2).seconds

    assert seconds(2) == pytest.approx(50 * 0.2 + 0.1)
    assert seconds(1) > seconds(2)


def test_no_batch_overtakes_the_one_before_it() -> None:
    """Two stages of a millisecond a token: the second batch leaves behind the first."""

    class TwoStages:
        def times(self, work: StepWork) -> tuple[float, float]:
            return work.tokens * 2e-3, work.tokens * 1e-3

    queue = ReplicaQueue(
        TwoStages(), CachePool.of_tokens(1 << 20), 1000, max_sequences=2, num_lanes=2
    )
    replica = SimulatedReplica(queue, "both", "-", (1.0,))
    run = FleetRun([replica], MIX)
    run.run([Request(0.0, 0, 1000, 1), Request(0.0, 0, 100, 1)])
    # Stage 1 until 1.0 and 1.1 s, stage 2 until 2.0 and 2.1 s.
    assert [r.last_s for r in run.finished] == pytest.approx([2.0, 2.1])


def test_weights_divide_requests_and_equal_seeds_give_equal_runs() -> None:
    def run(seed: int) -> tuple[float, ...]:
        fleet = [
            SimulatedReplica(
                ReplicaQueue(ByToken(), CachePool.of_tokens(1 << 20)), "both", "-", (weight,)
            )
            for weight in (3.0, 1.0)
        ]
        requests = _poisson(4000, 0.5, None)
        return FleetRun(fleet, MIX, policy="weights", seed=seed).run(requests).busy

    assert run(1) == run(1)
    assert run(1)[0] / run(1)[1] == pytest.approx(3, rel=0.1)


def test_a_request_that_fits_no_memory_is_refused() -> None:
    with pytest.raises(InfeasiblePlanError, match="100 \\+ 1 tokens"):
        FleetRun([_server(kv_tokens=50)], MIX).run([Request(0.0, 0, 100, 1)])


def test_a_request_that_waited_at_the_router_is_refused_too() -> None:
    requests = [Request(0.0, 0, 40, 1), Request(0.01, 0, 100, 1)]
    with pytest.raises(InfeasiblePlanError, match="100 \\+ 1 tokens"):
        FleetRun([_server(kv_tokens=50)], MIX, policy="one-queue").run(requests)


def test_a_window_gives_back_what_no_token_attends_to() -> None:
    """One group of layers keeps all of 1000 + 200 tokens, two groups a window of 100."""
    groups = CacheGroups(16, 1, 2, 100, 2 * 64)
    works = []

    class Recorded(ByToken):
        def times(self, work: StepWork) -> tuple[float, float]:
            works.append(work)
            return super().times(work)

    queue = ReplicaQueue(Recorded(), CachePool(200, groups), max_batched_tokens=64)
    run = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], MIX)
    held = []
    run.run([Request(0.0, 0, 1000, 200)], lambda _, queues: held.append(queues[0].free_blocks))
    # 75 blocks without a window, and with one 100 tokens that begin and end inside of blocks.
    assert min(held) == 200 - 75 - 2 * 8
    assert queue.free_blocks == 200
    # The last chunk, and the last token: 40 and 1 of 100 pairs each.
    assert works[15].near_pairs == 40 * 100
    assert (works[-1].context, works[-1].near_context) == (1199, 100)
    # Full attention of all layers would not have had room.
    with pytest.raises(InfeasiblePlanError, match="1000 \\+ 200 tokens is longer"):
        full = ReplicaQueue(ByToken(), CachePool(200, CacheGroups(16, 3)), max_batched_tokens=64)
        FleetRun([SimulatedReplica(full, "both", "-", (1.0,))], MIX).run(
            [Request(0.0, 0, 1000, 200)]
        )
