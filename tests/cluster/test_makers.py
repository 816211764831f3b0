"""Libraries of GPUs: of names, of cluster files, and what of them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.cluster.makers import LIBRARIES, library_of_name, mixed_libraries
from megatron_hetero.errors import ClusterError

FILE = """\
version: 1
nodes: [{{name: a, gpu: {gpu}, count: 1}}]
gpu_types:
  {gpu}: {{memory: 96 GB, memory_bandwidth: 2 TB/s, bf16: 400 TFLOPS{more}}}
"""


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("MI325X", "RCCL"),
        ("AMD Radeon PRO W7900", "RCCL"),
        ("RX-7900-XTX", "RCCL"),
        ("Gaudi-3", "HCCL"),
        ("HL-225H", "HCCL"),
        ("Ascend-910B", "HCCL"),
        ("Apple-M2-Ultra", "none"),
        ("M4-Max", "none"),
        ("Intel-Max-1550", "oneCCL"),
        ("M40", "NCCL"),
        ("RTX-5090-48GB", "NCCL"),
        ("MY-CARD", None),
    ],
)
def test_a_name_shows_its_library(name: str, library: str | None) -> None:
    assert library_of_name(name) == library


def library_in(tmp_path: Path, gpu: str, more: str = "") -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.format(gpu=gpu, more=more))
    return load_cluster(path).nodes[0].gpu_type.library


def test_an_own_type_has_what_it_says_or_what_its_name_says_or_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r':4: gpu_types\.MY-CARD: the key "library" is missing'):
        library_in(tmp_path, "MY-CARD")
    assert library_in(tmp_path, "MY-CARD", ', compute_capability: "8.6"') == "NCCL"
    assert library_in(tmp_path, "Gaudi-2") == "HCCL"
    assert library_in(tmp_path, "MI300X") == "RCCL"
    for library in LIBRARIES:
        assert library_in(tmp_path, "MY-CARD", f", library: {library}") == library
        assert library_in(tmp_path, "Gaudi-2", f", library: {library}") == library
    with pytest.raises(ClusterError, match=r"gpu_types\.MY-CARD\.library"):
        library_in(tmp_path, "MY-CARD", ", library: Gloo")


def test_the_library_is_part_of_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for more in ("", ", library: NCCL", ", library: RCCL"):
        library_in(tmp_path, "RTX-5090-48GB", more)
        hashes.add(cluster_hash(load_cluster(tmp_path / "cluster.yaml")))
    assert len(hashes) == 2  # what is the default anyway changes nothing


def test_what_can_be_in_one_job() -> None:
    nv, amd = ("nv", "H100-80GB", "NCCL"), ("amd", "MI300X", "RCCL")
    assert not mixed_libraries([nv, ("nv1", "A10", "NCCL")])
    assert not mixed_libraries([amd])
    assert not mixed_libraries([])
    said = mixed_libraries([nv, amd])
    assert "NCCL of NVIDIA on nv (H100-80GB)" in said and "RCCL of AMD on amd (MI300X)" in said
    assert "limits: {library" in said
    assert "node g cannot be in a job" in mixed_libraries([("g", "Gaudi-2", "HCCL")])
