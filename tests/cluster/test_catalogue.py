from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names, sheet_link
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
    "RTX-2080",
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
    "RTX-3060",
    "RTX-3070",
    "RTX-3080",
    "RTX-3080-12GB",
    "RTX-3090-Ti",
    "RTX-4060-Ti-8GB",
    "RTX-4060-Ti-16GB",
    "RTX-4070",
    "RTX-4080",
    "RTX-5070-Ti",
    "RTX-5080",
    "RTX-5090",
    "RTX-PRO-6000",
    "P100-16GB",
    "H20-96GB",
    "H800-80GB",
    "B300",
    "GB200",
}


def test_every_required_gpu_is_there() -> None:
    assert set(gpu_type_names()) >= REQUIRED


@pytest.mark.parametrize("name", gpu_type_names())
def test_numbers_are_plausible_and_sourced(name: str) -> None:
    gpu = gpu_type(name)
    peaks = gpu.peak_flops
    assert gpu.name == name
    assert 8e9 < gpu.memory_bytes < 320e9
    assert 2.5e11 <= gpu.memory_bytes_per_s < 1e13
    assert set(peaks) == {"bf16", "fp16", "fp32", "fp8"}
    assert peaks["fp16"] and peaks["fp32"]
    # Pascal has no tensor cores: fp16 with fp32 accumulate has the rate of fp32.
    assert (
        peaks["fp16"] == peaks["fp32"] if name.startswith("P100") else peaks["fp16"] > peaks["fp32"]
    )
    assert peaks["bf16"] in (None, peaks["fp16"])
    assert peaks["fp8"] is None or peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.015)
    # Dense; with sparsity Blackwell's (31) and Hopper's (15) would be twice that.
    assert peaks["fp16"] / peaks["fp32"] < 32
    assert gpu.library == ("RCCL" if name.startswith("MI") else "NCCL")
    assert any(word in gpu.source for word in ("whitepaper", "datasheet", "brief", "sheet"))


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("V100-16GB", "fp16", 125),
        ("V100-16GB", "bf16", None),
        ("T4", "fp16", 65),
        ("T4", "bf16", None),
        ("RTX-2080", "fp16", 40.3),
        ("RTX-2080", "bf16", None),
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
        ("P100-16GB", "fp16", 10.6),
        ("P100-16GB", "bf16", None),
        ("RTX-3060", "bf16", 25.5),
        ("RTX-3070", "bf16", 40.6),
        ("RTX-3080-12GB", "bf16", 61.3),
        ("RTX-3090-Ti", "bf16", 80),
        ("RTX-4060-Ti-16GB", "bf16", 44.1),
        ("RTX-4070", "bf16", 58.3),
        ("RTX-4070-Ti-Super", "fp8", 176.4),
        ("RTX-5070-Ti", "bf16", 87.9),
        ("RTX-5080", "fp8", 225.1),
        ("RTX-5090", "bf16", 209.5),
        ("RTX-PRO-6000", "bf16", 503.8),
        ("H800-80GB", "bf16", 989.4),
        ("H20-96GB", "bf16", 148),
        ("H20-96GB", "fp8", 296),
        ("B300", "bf16", 2250),
        ("GB200", "bf16", 2500),
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
        ("A100 80GB", "A100-80GB"),
        ("a100-80g", "A100-80GB"),
        ("h100-sxm", "H100-80GB"),
        ("4070 ti super", "RTX-4070-Ti-Super"),
        ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA H20", "H20-96GB"),
        ("Tesla P100-SXM2-16GB", "P100-16GB"),
    ],
)
def test_aliases_and_the_names_that_cuda_reports(alias: str, name: str) -> None:
    assert gpu_type(alias).name == name


def test_an_unknown_gpu_suggests_near_names() -> None:
    with pytest.raises(ClusterError, match=r'"RTX-4900" is not .*did you mean "RTX-4090"') as error:
        gpu_type("RTX-4900")
    assert "gpu_types" in str(error.value)
    with pytest.raises(ClusterError, match="it has P100-16GB, P100-PCIe-16GB, V100-16GB"):
        gpu_type("Voodoo")


def entries() -> list[dict]:
    text = (resources.files("megatron_hetero.cluster") / "catalogue.json").read_text()
    return json.loads(text)["gpus"]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_rates_that_are_computed_follow_from_cores_and_clock(entry: dict) -> None:
    """Each core does 2 FLOP a cycle; a GeForce's tensor cores twice that with fp32 accumulate."""
    clocked = re.search(r"([0-9]+) cores and ([0-9.]+) GHz", entry["source"])
    gpu = gpu_type(entry["name"])
    fp16, fp32 = gpu.peak_flops["fp16"], gpu.peak_flops["fp32"]
    if clocked:
        assert fp32 == pytest.approx(int(clocked[1]) * 2 * float(clocked[2]) * 1e9, rel=0.005)
    if entry["name"].startswith("RTX-") and gpu.compute_capability in ("8.6", "8.9", "12.0"):
        assert fp16 == pytest.approx((2 if _is_geforce(entry) else 4) * fp32, rel=0.006)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_geforce_cards_and_no_others_are_marked_as_of_half_rate(entry: dict) -> None:
    """Without the mark a GeForce card is priced as if its peak could not be reached."""
    assert entry.get("half_rate", False) == _is_geforce(entry)


def _is_geforce(entry: dict) -> bool:
    return re.fullmatch(r"RTX-[2345]0[0-9]0(-.*)?", entry["name"]) is not None


@pytest.mark.parametrize("name", gpu_type_names())
def test_links_are_those_of_the_sheet(name: str) -> None:
    link = sheet_link(name)
    assert link.kind in ("NVLink", "Infinity Fabric", "PCIe 3.0", "PCIe 4.0", "PCIe 5.0")
    lanes = {"PCIe 3.0": 15.8e9, "PCIe 4.0": 31.5e9, "PCIe 5.0": 63e9}
    if link.kind in lanes:
        assert link.bytes_per_s in (lanes[link.kind], pytest.approx(lanes[link.kind] / 2, rel=0.01))
    else:
        assert 40e9 <= link.bytes_per_s <= 900e9


def test_bridges_are_between_pcie_cards_and_faster_than_their_slots() -> None:
    bridged = {name: sheet_link(name).bridge_bytes_per_s for name in gpu_type_names()}
    assert bridged["RTX-3090"] == pytest.approx(112.5e9 / 2, rel=0.01)  # both directions: 112.5
    assert bridged["RTX-4090"] is bridged["L40S"] is bridged["A10"] is bridged["V100-16GB"] is None
    for name, bytes_per_s in bridged.items():
        if bytes_per_s is not None:
            assert sheet_link(name).kind.startswith("PCIe")
            assert bytes_per_s > sheet_link(name).bytes_per_s


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("A100", '"A100-40GB" or "A100-40GB-PCIe" or "A100-80GB"'),
        ("RTX 4060 Ti", '"RTX-4060-Ti-8GB" or "RTX-4060-Ti-16GB"'),
        ("MI300", '"MI300X"'),
        ("Gaudi2", 'could not train: Gaudi2 (library: HCCL) is "hpu" or "npu"'),
        ("Apple M2 Ultra", 'could not train: Apple M2 Ultra (library: none) is not "cuda"'),
    ],
)
def test_what_could_be_several_or_none_says_so(typed: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(meant)):
        gpu_type(typed)
