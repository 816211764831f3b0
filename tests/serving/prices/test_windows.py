"""Prices of layers with windows of attention: memory, steps, rates, hand-overs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.memory import cache_pool
from megatron_hetero.serving.prices.prompts import mean_request
from megatron_hetero.serving.prices.rates import PhaseRates
from megatron_hetero.serving.prices.served import ServedModel, load_served
from megatron_hetero.serving.prices.steps import PipelinePrice, stage_prices
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
)
from tests.serving.prices.test_prices import EXAMPLE, example_served, pipeline_of


def _windowed(folder: Path, **changes: object) -> ServedModel:
    config = json.loads((EXAMPLE / "config.json").read_text())
    config |= {"model_type": "mistral", "sliding_window": 1024, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return load_served(folder, None, "16-bit")


THREE_OF_FOUR = (["sliding_attention"] * 3 + ["full_attention"]) * 8


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    assert example_served().windowed == ()
    every = _windowed(tmp_path)
    assert (every.window, every.windowed) == (1024, (1,) * 32)
    some = _windowed(tmp_path, layer_types=THREE_OF_FOUR)
    assert some.windowed == (1, 1, 1, 0) * 8
    # SGLang has no windows in this family.
    assert some.under(ENGINES["sglang"]).windowed == ()
    assert some.under(ENGINES["vllm"]) == some
    off = _windowed(tmp_path, model_type="qwen2", use_sliding_window=False)
    assert (off.window, off.windowed) == (None, ())
    behind = _windowed(tmp_path, model_type="qwen2", use_sliding_window=True, max_window_layers=20)
    assert behind.windowed == (0,) * 20 + (1,) * 12


def test_layers_with_windows_share_a_pool_of_smaller_blocks(tmp_path: Path) -> None:
    full, some = example_served(), _windowed(tmp_path, layer_types=THREE_OF_FOUR)
    engine = ENGINES["vllm"]
    for layers in ((32,), (16, 16), (8, 8, 8, 8)):
        pipeline = pipeline_of("L40S", 1, *layers)
        whole, near = cache_pool(pipeline, full, engine), cache_pool(pipeline, some, engine)
        # A block has 8 of 32 layers: four groups, three of them with a window.
        assert (near.groups.num_full, near.groups.num_windowed) == (1, 3)
        assert near.num_blocks // 4 == whole.num_blocks
        assert near.longest > 2 * whole.longest
    # Stages that hold unlike parts of the groups have blocks of their widest part.
    pipeline = pipeline_of("L40S", 1, 30, 2)
    assert [s.num_cached for s in stage_prices(pipeline.stages, some)] == [8, 1]


def test_windows_shorten_attention_and_widen_batches(tmp_path: Path) -> None:
    """Three of four layers read at most 1024 tokens."""
    pipeline, engine = pipeline_of("H100-80GB", 1, 32), ENGINES["vllm"]
    full = PipelinePrice(pipeline, example_served(), engine)
    some = PipelinePrice(pipeline, _windowed(tmp_path, layer_types=THREE_OF_FOUR), engine)
    every = PipelinePrice(pipeline, _windowed(tmp_path), engine)

    def attention_s(price: PipelinePrice, work: StepWork) -> float:
        return price.times(work)[0] - price.times(work._replace(context=0.0, near_context=0.0))[0]

    long = StepWork(32, 32, 0, 32 * 16_384, 0, 32 * 1024)
    all_s, some_s, near_s = (attention_s(price, long) for price in (full, some, every))
    assert some_s == pytest.approx(all_s / 4 + near_s * 3 / 4, rel=0.05)
    assert near_s < all_s / 8
    # Within the window there is no difference.
    short = StepWork(32, 32, 0, 32 * 800, 0, 32 * 800)
    assert some.times(short)[0] == pytest.approx(full.times(short)[0], rel=1e-9)
    lengths = TokenLengths(((16_000, 1.0),)), TokenLengths(((400, 1.0),))
    kind = RequestClass("c", 1.0, *lengths)
    rates = [PhaseRates(price).rate("decode", kind) for price in (full, some, every)]
    assert rates[0].batch < rates[1].batch / 2 < rates[2].batch / 4
    assert rates[0].per_s < rates[1].per_s < rates[2].per_s
    prompts = [PhaseRates(price).rate("prefill", kind) for price in (full, some, every)]
    assert prompts[0].first_token_s > prompts[1].first_token_s > prompts[2].first_token_s
    brief = RequestClass("b", 1.0, TokenLengths(((300, 1.0),)), TokenLengths(((300, 1.0),)))
    alike = [PhaseRates(price).rate("both", brief) for price in (full, some)]
    assert alike[0].per_s == pytest.approx(alike[1].per_s, rel=1e-4)


def test_a_simulation_with_windows_serves_what_rates_promise(tmp_path: Path) -> None:
    price = PipelinePrice(
        pipeline_of("L40S", 1, 32), _windowed(tmp_path, layer_types=THREE_OF_FOUR), ENGINES["vllm"]
    )
    rates = PhaseRates(price)
    kind = RequestClass("c", 1.0, TokenLengths(((8000, 1.0),)), TokenLengths(((300, 1.0),)))
    per_s = 0.9 * rates.rate("both", kind).per_s
    queue = ReplicaQueue(price, rates.pool)
    run = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], RequestMix((kind,)))
    run.run([Request(number / per_s, 0, 8000, 300) for number in range(400)])
    ends = sorted(r.last_s for r in run.finished)
    assert 150 / (ends[300] - ends[150]) > 0.85 * per_s
    assert queue.free_blocks == rates.pool.num_blocks


def test_the_mean_context_in_a_window(tmp_path: Path) -> None:
    lengths = TokenLengths(((100, 1.0), (700, 1.0))), TokenLengths(((400, 1.0),))
    kind = RequestClass("c", 1.0, *lengths)
    assert mean_request(kind, 10_000).near_context == mean_request(kind, None).context == 600
    assert mean_request(kind, 50).near_context == 50
    # From 100 to 300 it grows, and stays there; from 700 on it is 300.
    assert mean_request(kind, 300).near_context == pytest.approx(((200 + 300) / 2 + 300) / 2)


def test_a_hand_over_has_what_a_window_reaches(tmp_path: Path) -> None:
    some = _windowed(tmp_path, layer_types=THREE_OF_FOUR)
    token = some.kv_bytes(1)
    assert some.hand_over_bytes(500, 16) == 500 * 32 * token
    assert some.hand_over_bytes(5000, 16) == (8 * 5000 + 24 * 1040) * token
    whole = example_served()
    of_token = whole.model.num_layers * whole.kv_bytes(width=1)
    assert whole.hand_over_bytes(5000, 16) == 5000 * of_token
