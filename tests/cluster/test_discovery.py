"""First cluster files: from what a driver says, and from names; all of them load."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.description import load_cluster
from megatron_hetero.cluster.discovery import (
    catalogue_name,
    cluster_yaml,
    draft_nodes,
    find_gpus,
    parse_gpus,
)
from megatron_hetero.cluster.measurements import LinkFit
from megatron_hetero.errors import ClusterError, EnvironmentMismatchError

FOUR = "".join(f"{i}, NVIDIA GeForce RTX 4090, 24564, 8.9\n" for i in range(4))
NVLINK = {(i, j): "NV4" if i + j == 1 else "SYS" for i in range(4) for j in range(4) if i != j}


def loaded(text: str, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize(
    ("name", "mib", "wanted"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16GB"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA GeForce GTX 1080", 8192, None),
        ("NVIDIA GeForce RTX 4090", 48000, None),
    ],
)
def test_drivers_names_are_those_of_the_catalogue(name: str, mib: int, wanted: str | None) -> None:
    assert catalogue_name(name, mib << 20) == wanted


def test_a_machine_becomes_a_file_that_loads(tmp_path: Path) -> None:
    nodes = draft_nodes(parse_gpus(FOUR), NVLINK, host="box")
    text = cluster_yaml(nodes, "from a test")
    cluster = loaded(text, tmp_path)
    (node,) = cluster.nodes
    assert (node.name, node.num_gpus, node.gpu_type.name) == ("box", 4, "RTX-4090")
    # The slowest path between two of them stands for all.
    assert node.link.bytes_per_s == 8e9
    assert "a guess" in text


def test_a_measured_link_is_no_guess(tmp_path: Path) -> None:
    nodes = draft_nodes(parse_gpus(FOUR), NVLINK, LinkFit(7e-6, 19.5e9, 0.02), host="box")
    text = cluster_yaml(nodes, "from a test")
    assert "guess" not in text
    (node,) = loaded(text, tmp_path).nodes
    assert (node.link.bytes_per_s, node.link.latency_s) == (19.5e9, pytest.approx(7e-6))


def test_one_gpu_needs_no_link(tmp_path: Path) -> None:
    nodes = draft_nodes(parse_gpus(FOUR.splitlines()[0]), {}, host="_my_box")
    assert nodes[0].name == "my-box"
    assert loaded(cluster_yaml(nodes, "x"), tmp_path).devices


def test_a_gpu_that_the_catalogue_lacks_must_be_described(tmp_path: Path) -> None:
    gpus = parse_gpus("0, NVIDIA GeForce GTX 1080, 8192, 6.1")
    text = cluster_yaml(draft_nodes(gpus, {}, host="box"), "x")
    assert "GTX-1080: {memory: 8192 MiB" in text
    with pytest.raises(ClusterError, match="memory_bandwidth"):  # the question mark stops it
        loaded(text, tmp_path)


def test_two_types_in_one_machine_are_two_nodes() -> None:
    gpus = parse_gpus(FOUR + "4, NVIDIA GeForce RTX 3090, 24576, 8.6\n")
    drafts = draft_nodes(gpus, {}, host="box")
    assert [(d.name, d.gpu, d.count) for d in drafts] == [
        ("box-0", "RTX-4090", 4),
        ("box-1", "RTX-3090", 1),
    ]


@pytest.mark.parametrize("text", ["", "No devices were found", "0, a, b, c"])
def test_other_answers_of_the_driver_are_refused(text: str) -> None:
    with pytest.raises(EnvironmentMismatchError, match="nvidia-smi"):
        parse_gpus(text)


def test_without_a_driver_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentMismatchError, match="init --node"):
        find_gpus()


def test_every_gpu_of_the_catalogue_can_be_started_from(tmp_path: Path) -> None:
    from megatron_hetero.cli.main import main

    path = tmp_path / "cluster.yaml"
    nodes = [f"--node=n{i}={1 + i % 8}x{name}" for i, name in enumerate(gpu_type_names())]
    assert main(["init", *nodes, "-o", str(path)]) == 0
    types = [node.gpu_type for node in load_cluster(path).nodes]
    assert types == [gpu_type(name) for name in gpu_type_names()]
    assert main(["init", *nodes, "-o", str(path)]) == 2  # never overwritten
    other = tmp_path / "other.yaml"
    assert main(["init", "--node", "a=RTX-4090", "-o", str(other)]) == 2
    assert main(["init", "--node", "a=2xRTX-9999", "-o", str(other)]) == 4
    assert not other.exists()
