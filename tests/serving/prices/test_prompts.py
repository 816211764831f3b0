"""Means over the requests of a class: what costs more than a request of mean length."""

from __future__ import annotations

import pytest

from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.prompts import mean_request
from megatron_hetero.serving.prices.rates import PhaseRates
from megatron_hetero.serving.prices.steps import PipelinePrice
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix, TokenLengths
from tests.serving.prices.test_prices import example_served, pipeline_of

UNLIKE = TokenLengths(((200, 3.0), (9000, 1.0)))


def _equal(tokens: int) -> TokenLengths:
    return TokenLengths(((tokens, 1.0),))


def test_equal_requests_have_their_own_figures() -> None:
    mean = mean_request(RequestClass("c", 1.0, _equal(800), _equal(200), shared_prefix=0.25), None)
    assert (mean.prefix, mean.new, mean.context, mean.held) == (200, 600, 900, 800)
    assert mean.pairs == sum(range(201, 801))
    assert mean.near_pairs == mean.near_context == 0.0


def test_unlike_requests_are_summed_one_by_one() -> None:
    answers = TokenLengths(((10, 9.0), (910, 1.0)))
    kind = RequestClass("c", 1.0, UNLIKE, answers, shared_prefix=0.5)
    mean = mean_request(kind, 1000)
    # The prefix of 1200 tokens covers short prompts but for a token, and a part of long ones.
    assert mean.prefix == 1200
    assert mean.new == pytest.approx((3 * 1 + 7800) / 4)
    assert mean.pairs == pytest.approx((3 * 200 + sum(range(1201, 9001))) / 4)
    assert mean.near_pairs == pytest.approx((3 * 200 + 7800 * 1000) / 4)
    # 910 of 1000 decoded tokens are of one answer in ten.
    contexts = [prompt + half for prompt in (200, 9000) for half in (5, 455)]
    weights = [part * of for part in (3, 1) for of in (90, 910)]
    wanted = sum(c * w for c, w in zip(contexts, weights, strict=True)) / sum(weights)
    assert mean.context == pytest.approx(wanted)
    assert mean.held == pytest.approx(mean.new + (90 * 5 + 910 * 455) / 1000)


def _kept_up(kind: RequestClass, load: float) -> float:
    """Return the first tokens for each request that comes, at a multiple of a replica's rate."""
    price = PipelinePrice(pipeline_of("L40S", 1, 32), example_served(), ENGINES["vllm"])
    rates, mix = PhaseRates(price), RequestMix((kind,))
    per_s = rates.rate("both", kind).per_s
    prefix = round(kind.input_tokens.mean * kind.shared_prefix)
    queue = ReplicaQueue(price, rates.pool, shared_tokens=(prefix,))
    run = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], mix)
    return run.run(mix.arrivals(1000 / per_s, 0, load * per_s)).kept_up


@pytest.mark.parametrize(
    ("prompts", "answers", "shared"),
    [
        (UNLIKE, _equal(2), 0.5),
        (UNLIKE, _equal(100), 0.0),
        (_equal(500), TokenLengths(((20, 9.0), (1800, 1.0))), 0.2),
    ],
)
def test_unlike_requests_are_served_at_the_rate_that_is_promised(
    prompts: TokenLengths, answers: TokenLengths, shared: float
) -> None:
    kind = RequestClass("c", 1.0, prompts, answers, shared_prefix=shared)
    assert _kept_up(kind, 0.9) > 0.9


def test_not_much_less_is_promised_than_served() -> None:
    kind = RequestClass("c", 1.0, UNLIKE, _equal(2), shared_prefix=0.5)
    assert _kept_up(kind, 1.2) < 0.95
