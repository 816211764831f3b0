"""Prices of kernels: what the formula has to hold on any card, and what the tables' errors say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.serving.prices.kernels import KernelCurve, card_speed, kernel_seconds

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/serving-kernels.json"


def test_the_longer_of_computing_and_moving_hides_the_shorter_but_for_a_part() -> None:
    curve = KernelCurve(peak=0.5, bandwidth=0.8, fixed_s=1e-5, exposed=0.25)
    assert kernel_seconds(curve, 1.0, 0.4) == pytest.approx(1e-5 + 2.0 + 0.25 * 0.5)
    assert kernel_seconds(curve, 0.1, 0.8) == pytest.approx(1e-5 + 1.0 + 0.25 * 0.2)


def test_short_heads_and_single_blocks_slow_attention_of_prompts_alone() -> None:
    for engine in ("vllm", "sglang"):
        speed = card_speed(gpu_type("H100-80GB"), "bf16", engine=engine).prefill_attention
        small, large = speed.seconds(1e12, 0, 4096, 64), speed.seconds(1e12, 0, 4096, 128)
        assert small > 1.1 * large
        # One head of 16,384 tokens: many multiprocessors wait for the one of the last block.
        flops = 2 * 16_384.0**2 * 128
        assert speed.seconds(flops, 0, 16_384) > 1.3 * speed.seconds(flops, 0, 128)


def test_engines_have_prices_of_their_own() -> None:
    vllm, sglang = (card_speed(gpu_type("H200"), "bf16", engine=e) for e in ("vllm", "sglang"))
    assert vllm.prefill_attention.curve != sglang.prefill_attention.curve
    assert card_speed(gpu_type("H200"), "bf16", engine="any") == vllm


def test_errors_of_what_was_left_out_are_those_of_the_tables_listed() -> None:
    """The committed summary is the mean of the committed rows, and no row is missing a card."""
    told = json.loads(RESULTS.read_text(encoding="utf-8"))
    for kind, groups in told["summary"].items():
        rows = [r for r in told["tables"] if r["kind"] == kind]
        assert len({r["card"] for r in rows}) == 9
        for way, found in groups["all engines"].items():
            errors = [r[way] for r in rows if r[way] is not None]
            assert len(errors) == found["tables"]
            assert sum(errors) / len(errors) == pytest.approx(found["mean"], abs=2e-4)


def test_more_rows_never_take_a_product_less_time_on_any_card() -> None:
    """Ratios by size are fitted so, at the precision of the tables."""
    cards = [gpu_type(name) for name in gpu_type_names()]
    for gpu in (card for card in cards if card.peak_flops["bf16"]):
        products = card_speed(gpu, "bf16").products
        for columns, depth in ((6144, 4096), (28672, 8192), (1024, 14336)):
            times = []
            for rows in (2.0**part for part in range(-1, 15)):
                moved = 2.0 * (columns * depth + rows * (columns + depth))
                sizes = rows, columns, depth
                times.append(products.seconds(2.0 * rows * columns * depth, moved, sizes=sizes))
            assert all(later >= earlier * 0.999 for earlier, later in pairwise(times)), gpu.name


def test_ratios_by_size_bring_tables_that_were_left_out_nearer() -> None:
    """Of the committed errors: over all tables, and with a version or an engine left out."""
    told = json.loads(RESULTS.read_text(encoding="utf-8"))["summary"]
    usual = "vLLM and SGLang, tables that own constants describe"
    for kind in ("products", "decode_attention"):
        for way in ("own", "version_left_out", "engine_left_out"):
            found = told[kind][usual][way]
            assert found["mean"] < found["constants_mean"]
    assert told["products"][usual]["version_left_out"]["mean"] < 0.1
