"""Constants of GPUs: whose they are, and peaks in a job's precision."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.work import calibration as calibration_module
from megatron_hetero.cost.work.calibration import (
    Calibration,
    GemmEfficiency,
    ScoreTraffic,
    has_tf32,
    product_flops_per_s,
    shipped_calibration,
)
from megatron_hetero.cost.work.fused_attention import DEFAULT, AttentionEfficiency
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import read_json
from tests.cost.builders import FAST, OLD, SLOW

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from attention_tables import (
    attention_points,
    fit_attention,
    predict_attention,
)

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
    "attention": {
        "part_of_products": {
            "FAST": {
                "64": {"forward": 0.9, "backward": 0.7},
                "256": {"forward": 0.8, "backward": 0.5},
            },
            DEFAULT: {"128": {"forward": 1.0, "backward": 0.6}},
        },
        "extra_tokens": {"forward": 500.0, "backward": 1000.0},
        "call_s": {"forward": 0.0, "backward": 0.0},
    },
    "same_chip": {"TWIN": "FAST"},
}
CALIBRATION = Calibration.from_data(DATA)


def test_a_measured_type_has_its_own_constants_and_any_other_the_medians() -> None:
    own, usual = GemmEfficiency(0.8, 1e-6), GemmEfficiency(0.6, 2e-6)
    assert CALIBRATION.gemm_efficiency(FAST, "bf16") == own
    assert CALIBRATION.gemm_efficiency(FAST, "fp16") == own
    assert CALIBRATION.gemm_efficiency(SLOW, "bf16") == usual
    assert CALIBRATION.score_traffic == {"fp16": ScoreTraffic(4.0, 6.0)}
    assert CALIBRATION.dropout_slowdown == 1.5


def test_types_of_one_chip_share_their_constants() -> None:
    twin = replace(SLOW, name="TWIN")
    assert CALIBRATION.gemm_efficiency(twin, "bf16") == CALIBRATION.gemm_efficiency(FAST, "bf16")
    assert CALIBRATION.memory_bytes_per_s(twin) == 0.9 * SLOW.memory_bytes_per_s


def test_attention_reaches_what_the_nearest_head_size_does() -> None:
    """80 is nearer to 64 than to 256, 160 is not: sizes are compared by their ratio."""
    long = 10**9
    for size, nearest in ((32, 64), (64, 64), (80, 64), (160, 256), (512, 256)):
        own = DATA["attention"]["part_of_products"]["FAST"][str(nearest)]  # type: ignore[index]
        reached = CALIBRATION.attention_efficiency(FAST, size, long)
        assert reached.forward == pytest.approx(own["forward"])
        assert reached.backward == pytest.approx(own["backward"])
    twin = replace(SLOW, name="TWIN")
    assert CALIBRATION.attention_efficiency(twin, 64, long) == (
        CALIBRATION.attention_efficiency(FAST, 64, long)
    )


def test_short_sequences_reach_less_and_types_without_a_table_the_median() -> None:
    assert CALIBRATION.attention_efficiency(SLOW, 64, 500) == AttentionEfficiency(
        pytest.approx(0.5), pytest.approx(0.2)
    )
    assert CALIBRATION.attention_efficiency(SLOW, 64, 1000) == AttentionEfficiency(1 / 1.5, 0.3)


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
    products = {gpu for gpu, _ in shipped.gemm}
    for name, other in shipped.same_chip.items():
        assert gpu_type(name).name == name
        assert other in {*shipped.memory_efficiency, *products, *shipped.attention.by_type}


def test_the_shipped_parts_of_attention_are_those_that_the_tables_give() -> None:
    """The excerpt of the published tables is in the repository, so anybody can fit it again."""
    shipped = read_json(Path(calibration_module.__file__).with_name("calibration.json")).data
    again = fit_attention(attention_points(), shipped)
    parts = shipped["attention"]["part_of_products"]
    assert again["part_of_products"].items() <= parts.items()
    assert shipped["attention"]["extra_tokens"] == again["extra_tokens"]
    assert shipped["attention"]["call_s"] == again["call_s"]
    assert shipped["provenance"]["attention_derived_from"] == list(
        dict.fromkeys(point.origin for point in attention_points())
    )


def test_every_call_of_the_tables_is_predicted() -> None:
    """The worst of them, 12 % in a backward pass of 2,048 tokens, and half of them within 3 %."""
    errors = []
    for point in attention_points():
        if point.is_causal:
            times = predict_attention(point, shipped_calibration())
            errors.append(abs(times.forward_s / point.forward_s - 1))
            assert point.backward_s is not None
            errors.append(abs(times.backward_s / point.backward_s - 1))
    assert max(errors) < 0.12 and median(errors) < 0.03


def test_no_type_reaches_more_than_its_memory() -> None:
    for name in ("A100-40GB", "A10", "L40S", "RTX-3090", "RTX-4090"):
        gpu = gpu_type(name)
        assert 0 < shipped_calibration().memory_bytes_per_s(gpu) <= gpu.memory_bytes_per_s


def test_it_is_known_which_types_have_a_table_of_products() -> None:
    shipped = shipped_calibration()
    assert all(map(shipped.has_products, ("H100-80GB", "V100-PCIe-32GB", "GH200-96GB", "L40S")))
    assert not any(map(shipped.has_products, ("RTX-5090", "RTX-4090", "RTX-4090-D", "H20-96GB")))


def test_types_without_a_table_reach_a_part_of_their_fastest_product() -> None:
    calibration = shipped_calibration()

    def reached(name: str) -> float:
        gpu = gpu_type(name)
        peak = gpu.peak_flops["bf16"] or gpu.peak_flops["fp16"]
        assert peak is not None
        return calibration.gemm_efficiency(gpu, "fp16").max_efficiency * peak / 1e12

    # Median of (A100 twice, H100, L40S, GH200, RTX 3090, V100): that of the V100.
    part = 0.714 * 125 / 96.1
    assert reached("RTX-4090") == pytest.approx(part * 178.8)
    assert reached("RTX-A6000") == pytest.approx(part * 131.2)
    # GeForce cards that the list lacks: the mean of the two that have tables.
    assert reached("RTX-4080") == pytest.approx((1.018 + 0.959) / 2 * 97.5)
    assert reached("A10") == pytest.approx(0.8081 * 125)
    # Types with a table of their own.
    assert reached("RTX-3090") == pytest.approx(0.959 * 71)
    assert reached("L40S") == pytest.approx(0.6123 * 362.05)


def test_types_without_a_table_reach_what_their_kin_do_and_no_more_than_their_watts_allow() -> None:
    """Tables of one compute capability differ by 1.1357 in what a watt gives: B200 and GB200."""
    shipped = shipped_calibration()

    def reached(name: str, **changed: object) -> float:
        gpu = replace(gpu_type(name), **changed)
        return shipped.gemm_efficiency(gpu, "fp16").max_efficiency

    slack = (0.7218 * 2250 / 1000) / (0.6864 * 2500 / 1200)
    # H100, H200 and GH200 have the same compute capability; AMD's cards have none.
    assert reached("H20-96GB") == pytest.approx(0.8081)
    assert reached("MI325X") == pytest.approx(0.8081)
    # 70 W beside the 280 of a TITAN RTX, 72 W beside the 350 of an L40S.
    assert reached("T4") == pytest.approx(slack * 0.664 * (70 / 65) / (280 / 130.5), rel=1e-3)
    assert reached("L4") == pytest.approx(slack * 0.6123 * (72 / 121) / (350 / 362.05), rel=1e-3)
    # Without the watts, or with as many as those of the L40S, the fastest product counts.
    best = 0.714 * 125 / 96.1 * 91.4 / 121
    assert reached("L4", board_watts=None) == pytest.approx(best, rel=1e-3)
    assert reached("L4", board_watts=350.0) == pytest.approx(best, rel=1e-3)
    # A type with a table has what its table says.
    assert reached("L40S", board_watts=35.0) == 0.6123


def test_whole_layers_on_cards_of_few_watts_take_what_their_watts_say() -> None:
    """L4 and T4 without tables, beside an A100 and a V100 with them: layers that Helix timed."""
    shipped = shipped_calibration()
    tables = Path(__file__).resolve().parents[3] / "benchmarks" / "tables"
    data = read_json(tables / "prompt-layers.json").data
    for row in data["layers"]:
        gpu = gpu_type(row["gpu"])
        weights = sum(inputs * outputs for inputs, outputs in data["products"][row["model"]])
        measured = median(
            2.0 * tokens * weights / (1e-3 * ms * product_flops_per_s(gpu, "fp16"))
            for tokens, ms in zip(row["tokens"], row["ms"], strict=True)
        )
        priced = shipped.gemm_efficiency(gpu, "fp16").max_efficiency
        assert priced == pytest.approx(measured, rel=0.12), row["gpu"]


def test_a_peak_of_the_users_own_is_no_part_of_the_lists_product(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "version: 1\ngpu_types:\n  L40S: {bf16: 300 TFLOPS}\n  L4: {memory: 20 GiB}\n"
        "nodes:\n- {name: a, gpu: L40S, count: 1}\n- {name: b, gpu: L4, count: 1}\n"
        "links: {between_nodes: {bandwidth: 10 Gb/s, latency: 50 us}}\n"
    )
    own, l4 = (node.gpu_type for node in load_cluster(file).nodes)
    assert own.best_product is None
    assert l4.best_product == gpu_type("L4").best_product
