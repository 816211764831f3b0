"""Watts slow the kernels of cards without a table, and of no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.work.calibration import shipped_calibration
from megatron_hetero.serving.prices.basis import price_basis
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.kernels import card_speed
from megatron_hetero.serving.prices.watts import part_kept_up

TABLE = Path(__file__).resolve().parents[3] / "benchmarks/tables/prompt-layers.json"
HELD = ("L4", "T4", "RTX-6000-Ada", "A30", "H100-PCIe", "H100-NVL")


def _part_of_peak(name: str) -> float:
    gpu = gpu_type(name)
    precision = "fp16" if gpu.peak_flops["bf16"] is None else "bf16"
    products = card_speed(gpu, precision).products
    peak = gpu.peak_flops[precision]
    assert peak is not None
    return products.flops_per_s * products.curve.peak / peak


@pytest.mark.parametrize("name", HELD)
def test_a_card_without_a_table_reaches_what_its_watts_keep_up_in_training(name: str) -> None:
    """The limit is the one that training's products have."""
    gpu = gpu_type(name)
    limit = shipped_calibration().most_for_watts(gpu)
    assert limit is not None
    assert _part_of_peak(name) == pytest.approx(limit)
    basis = price_basis(gpu, 1, ENGINES["vllm"])
    assert basis.prefill == f"{basis.decode}, as far as its watts go"


@pytest.mark.parametrize("name", ["A100-80GB", "A100-40GB", "V100-16GB", "L40S", "H20", "RTX-4090"])
def test_a_card_with_a_table_of_its_chip_and_one_with_enough_watts_are_left_alone(
    name: str,
) -> None:
    gpu = gpu_type(name)
    assert part_kept_up(gpu, 0.5) == 1.0
    assert "watts" not in price_basis(gpu, 1, ENGINES["vllm"]).prefill


@pytest.mark.parametrize("name", ["L4", "T4"])
def test_prompts_that_others_measured_take_what_cards_of_few_watts_are_priced_at(
    name: str,
) -> None:
    """Nothing is fitted to Helix's layers; without watts their products took 0.6 of the time."""
    data = json.loads(TABLE.read_text())
    rows = [row for row in data["layers"] if row["gpu"] == name]
    assert {row["model"] for row in rows} == {*data["products"]}
    speed = card_speed(gpu_type(name), "fp16").products
    for row in rows:
        shapes = data["products"][row["model"]]
        for tokens, ms in zip(row["tokens"], row["ms"], strict=True):
            seconds = sum(
                speed.seconds(2.0 * tokens * rows * columns, 2.0 * rows * columns)
                for rows, columns in shapes
            )
            # Attention and norms are in what was measured.
            assert 1e3 * seconds == pytest.approx(ms, rel=0.15)
