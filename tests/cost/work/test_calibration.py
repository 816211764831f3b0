"""Constants of GPUs: whose they are, and peaks in a job's precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.work.calibration import (
    DEFAULT,
    Calibration,
    GemmEfficiency,
    ScoreTraffic,
    has_tf32,
    product_flops_per_s,
    shipped_calibration,
)
from megatron_hetero.errors import UnsupportedError
from tests.cost.builders import FAST, OLD, SLOW

DATA = {
    "gemm": {
        "FAST": {"fp16": {"max_efficiency": 0.8, "overhead_s": 1e-6}},
        DEFAULT: {
            "fp16": {"max_efficiency": 0.6, "overhead_s": 2e-6},
            "fp32": {"max_efficiency": 0.7, "overhead_s": 3e-6},
        },
    },
    "memory_efficiency": {"FAST": 0.9, DEFAULT: 0.5},
    "score_traffic": {"fp16": {"forward": 4.0, "backward": 6.0}},
    "dropout_slowdown": 1.5,
    "same_chip": {"TWIN": "FAST"},
}
CALIBRATION = Calibration.from_data(DATA)


def test_a_measured_type_has_its_own_constants_and_any_other_the_medians() -> None:
    own, median = GemmEfficiency(0.8, 1e-6), GemmEfficiency(0.6, 2e-6)
    assert CALIBRATION.gemm_efficiency(FAST, "bf16") == own
    assert CALIBRATION.gemm_efficiency(FAST, "fp16") == own
    assert CALIBRATION.gemm_efficiency(SLOW, "bf16") == median
    assert CALIBRATION.score_traffic == {"fp16": ScoreTraffic(4.0, 6.0)}
    assert CALIBRATION.dropout_slowdown == 1.5


def test_types_of_one_chip_share_their_constants() -> None:
    twin = replace(SLOW, name="TWIN")
    assert CALIBRATION.gemm_efficiency(twin, "bf16") == CALIBRATION.gemm_efficiency(FAST, "bf16")
    assert CALIBRATION.memory_bytes_per_s(twin) == 0.9 * SLOW.memory_bytes_per_s


def test_memory_bandwidth_is_a_part_of_the_peak() -> None:
    assert CALIBRATION.memory_bytes_per_s(FAST) == 0.9 * 1.5e12
    assert CALIBRATION.memory_bytes_per_s(SLOW) == 0.5 * 0.6e12


def test_fp32_products_run_on_tensor_cores_where_there_is_tf32() -> None:
    """FAST is of capability 8.0, OLD of 7.0 and without bf16."""
    assert has_tf32(FAST) and has_tf32(SLOW) and not has_tf32(OLD)
    assert CALIBRATION.gemm_efficiency(FAST, "fp32") == GemmEfficiency(0.8, 1e-6)
    assert CALIBRATION.gemm_efficiency(OLD, "fp32") == GemmEfficiency(0.7, 3e-6)
    assert not has_tf32(replace(FAST, compute_capability=None))
    assert not has_tf32(replace(FAST, compute_capability="7.5"))
    assert has_tf32(replace(FAST, compute_capability="10.0"))  # a number, not a word


def test_peaks_of_products_by_precision() -> None:
    assert product_flops_per_s(FAST, "bf16") == 300e12
    assert product_flops_per_s(FAST, "fp32") == 150e12  # TF32 has half of bf16's
    assert product_flops_per_s(OLD, "fp16") == 125e12
    assert product_flops_per_s(OLD, "fp32") == 15e12
    strong = replace(FAST, peak_flops={"bf16": 20e12, "fp32": 19e12})
    assert product_flops_per_s(strong, "fp32") == 19e12  # plain fp32 is faster there


def test_what_a_gpu_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="OLD cannot train in bf16"):
        product_flops_per_s(OLD, "bf16")


def test_the_shipped_constants_are_parts_of_peaks() -> None:
    shipped = shipped_calibration()
    assert {(DEFAULT, "fp16"), (DEFAULT, "fp32")} <= set(shipped.gemm)
    for curve in shipped.gemm.values():
        assert 0.2 < curve.max_efficiency <= 1.1  # clocks above the data sheet
        assert 0 <= curve.overhead_s < 1e-3
    assert all(0.2 < part <= 1.5 for part in shipped.memory_efficiency.values())
    assert shipped.dropout_slowdown >= 1
    assert all(t.forward > 0 and t.backward > 0 for t in shipped.score_traffic.values())
    assert shipped_calibration() is shipped


def test_types_that_share_a_chip_are_in_the_catalogue_and_have_constants() -> None:
    shipped = shipped_calibration()
    for name, other in shipped.same_chip.items():
        assert gpu_type(name).name == name
        assert other in shipped.memory_efficiency or any(gpu == other for gpu, _ in shipped.gemm)


def test_no_type_reaches_more_than_its_memory() -> None:
    for name in ("A100-40GB", "A10", "L40S", "RTX-3090", "RTX-4090"):
        gpu = gpu_type(name)
        assert 0 < shipped_calibration().memory_bytes_per_s(gpu) <= gpu.memory_bytes_per_s
