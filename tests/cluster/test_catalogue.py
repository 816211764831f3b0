from __future__ import annotations

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.errors import ClusterError

REQUIRED = {
    "V100-16GB",
    "V100-32GB",
    "T4",
    "A100-40GB",
    "A100-80GB",
    "A10",
    "A40",
    "L4",
    "L40",
    "L40S",
    "RTX-2080-Ti",
    "RTX-3080-Ti",
    "RTX-3090",
    "RTX-4090",
    "RTX-A4000",
    "RTX-A5000",
    "RTX-A6000",
    "Titan-RTX",
    "H100-80GB",
    "H100-PCIe",
    "H200",
    "GH200-96GB",
    "B200",
    "MI250",
    "MI300X",
}


def test_every_required_gpu_is_there() -> None:
    assert set(gpu_type_names()) >= REQUIRED


@pytest.mark.parametrize("name", gpu_type_names())
def test_numbers_are_plausible_and_sourced(name: str) -> None:
    gpu = gpu_type(name)
    peaks = gpu.peak_flops
    assert gpu.name == name
    assert 8e9 < gpu.memory_bytes < 300e9
    assert 3e11 <= gpu.memory_bytes_per_s < 1e13
    assert set(peaks) == {"bf16", "fp16", "fp32", "fp8"}
    assert peaks["fp16"] and peaks["fp32"] and peaks["fp16"] > peaks["fp32"]
    assert set(gpu_type_names()) >= REQUIRED
    assert peaks["bf16"] in (None, peaks["fp16"])
    assert peaks["fp8"] is None or peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.015)
    assert set(gpu_type_names()) >= REQUIRED
    assert peaks["fp16"] / peaks["fp32"] < 29
    assert any(word in gpu.source for word in ("whitepaper", "datasheet", "brief", "rates"))


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("V100-16GB", "fp16", 125),
        ("V100-16GB", "bf16", None),
        ("T4", "fp16", 65),
        ("T4", "bf16", None),
        ("RTX-2080-Ti", "fp16", 53.8),
        ("RTX-2080-Ti", "bf16", None),
        ("Titan-RTX", "fp16", 130.5),
        ("A100-40GB", "bf16", 312),
        ("A100-40GB", "fp32", 19.5),
        ("A100-40GB", "fp8", None),
        ("RTX-3080-Ti", "bf16", 68.2),
        ("RTX-3090", "bf16", 71),
        ("RTX-4090", "bf16", 165.2),
        ("RTX-4090", "fp8", 330.3),
        ("RTX-A6000", "bf16", 154.8),
        ("L4", "bf16", 121),
        ("H100-80GB", "bf16", 989.4),
        ("H100-PCIe", "bf16", 756),
        ("B200", "bf16", 2250),
        ("MI300X", "bf16", 1307.4),
    ],
)
def test_peaks_are_dense_with_fp32_accumulation(
    name: str, precision: str, tflops: float | None
) -> None:
    assert gpu_type(name).peak_flops[precision] == (tflops and pytest.approx(tflops * 1e12))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("A100-40", "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
    ],
)
def test_aliases_and_the_names_that_cuda_reports(alias: str, name: str) -> None:
    assert gpu_type(alias).name == name


def test_an_unknown_gpu_suggests_near_names() -> None:
    with pytest.raises(ClusterError, match=r'"RTX-4900" is not .*did you mean "RTX-4090"') as error:
        gpu_type("RTX-4900")
    assert "gpu_types" in str(error.value)
    with pytest.raises(ClusterError, match="it has V100-16GB, V100-32GB"):
        gpu_type("Voodoo")
